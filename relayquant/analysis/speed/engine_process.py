"""One engine with one model in its own process. `engines` starts it and talks to it.

It runs as a script. The process loads its engine and nothing else: no TVM next to ONNX Runtime, and
no compiler next to TVM's runtime. One line of JSON each way, on stdin and stdout:

    {"engine", "path", "precision", "inputs", "threads"}  ->  {"ready": true} or {"error": "..."}
    {"turn": seconds, "interval": seconds}            ->  [[wall seconds, CPU seconds], ...]
    {"memory": true}                                  ->  [bytes now, bytes at most]

What an engine prints goes to stderr. The process ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

if __name__ == "__main__":
    # The folder of a script comes first in the path. Here it has modules named like modules of
    # Python.
    del sys.path[0]

import numpy as np

Run = Callable[[], object]

#: precision of a float model -> OpenVINO's name
PRECISION_HINTS = {"float32": "f32", "bf16": "bf16"}


def load_relayquant(
    path: str, _: str | None, inputs: Mapping[str, np.ndarray], threads: int
) -> Run:
    """Return a run of a library that `export_library` wrote. `threads` are in the environment."""
    from relayquant_runtime import Library, as_tensor

    tensors = [as_tensor(array) for array in inputs.values()]
    main = Library(path)["main"]
    return lambda: main(*tensors)


def load_onnxruntime(
    path: str, _: str | None, inputs: Mapping[str, np.ndarray], threads: int
) -> Run:
    """Return a run of an ONNX file.

    Threads spin during a run and stop at its end, so they take no time from the next measurement.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = dict(inputs)
    return lambda: session.run(None, feed)


def load_openvino(
    path: str, precision: str | None, inputs: Mapping[str, np.ndarray], threads: int
) -> Run:
    """Return a run of an ONNX or OpenVINO file, compiled for the shapes of the inputs and low
    latency.

    On a CPU with bfloat16, OpenVINO computes float models in bfloat16 unless it is asked for
    float32. So a precision is always requested for them.
    """
    import openvino as ov  # pyright: ignore[reportMissingImports]

    core = ov.Core()
    model = core.read_model(path)
    if model.is_dynamic():
        model.reshape({name: list(array.shape) for name, array in inputs.items()})
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    if precision is not None:
        settings["INFERENCE_PRECISION_HINT"] = PRECISION_HINTS[precision]
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    for name, array in inputs.items():
        request.set_tensor(name, ov.Tensor(np.ascontiguousarray(array)))
    return request.infer


#: engine name -> makes a run of (path, precision of a float model, inputs, threads)
LOADERS: dict[str, Callable[[str, str | None, Mapping[str, np.ndarray], int], Run]] = {
    "relayquant": load_relayquant,
    "onnxruntime": load_onnxruntime,
    "openvino": load_openvino,
}


def time_turn(run: Run, seconds: float, interval: float = 0.0) -> list[tuple[float, float]]:
    """Time one turn: (wall seconds, CPU seconds) of each run.

    An untimed run first fills the caches and wakes the threads. Then timed runs follow for
    `seconds`, at least one. A run starts `interval` seconds after the start of the run before it,
    like a request to a server. The process sleeps in between.
    """
    due = time.perf_counter()
    run()
    timings, begin = [], time.perf_counter()
    while not timings or time.perf_counter() - begin < seconds:
        due = max(due + interval, time.perf_counter())
        if (rest := due - time.perf_counter()) > 0:
            time.sleep(rest)
        start, cpu = time.perf_counter(), time.process_time()
        run()
        elapsed = time.perf_counter() - start
        timings.append((elapsed, time.process_time() - cpu))
    return timings


def read_memory() -> tuple[int, int]:
    """Return the resident bytes of this process: (now, maximum so far).

    File pages count, even if other processes share them (VmRSS, VmHWM of Linux). Zeros on other
    systems.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return 0, 0
    now, most = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    given = json.loads(sys.stdin.readline())
    try:
        with np.load(given["inputs"]) as arrays:
            inputs = {name: arrays[name] for name in arrays.files}
        load = LOADERS[given["engine"]]
        run = load(given["path"], given["precision"], inputs, given["threads"])
        run()  # The first run allocates.
    except Exception as error:
        # Any exception of the engine is reported. The parent process raises it as an error of ours.
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        if "memory" in asked:
            answer(read_memory())
        else:
            answer(time_turn(run, asked["turn"], asked["interval"]))


if __name__ == "__main__":
    main()
