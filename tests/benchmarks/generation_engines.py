"""One engine of `generation_table` in a process of its own: loads a model and times it.

    python tests/benchmarks/generation_engines.py ENGINE MODEL.gguf LIBRARY.so THREADS

An engine's process imports that engine only, so that its memory is its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 1088
PREFILL, SHORT, LONG, NEW = 512, 16, 1000, 32


def draw_prompt(count: int, seed: int) -> list[int]:
    """Tokens of no meaning: the speed does not depend on them, unless an engine remembers them."""
    return np.random.default_rng(seed).integers(1000, 20_000, count).tolist()


class OwnEngine:
    """A compiled library in a `Generator`, with TVM's runtime and no compiler."""

    def __init__(self, model: Path, library: Path, threads: int) -> None:
        import relayquant as rq
        from relayquant_runtime import Library

        self.generator = rq.Generator(Library(library), rq.load_tokenizer(model))

    def iterate(self, prompt: list[int]) -> Iterator[int]:
        for (piece,) in self.generator.iterate([prompt], max_tokens=NEW + 1):
            yield piece.token

    def score(self, tokens: list[int]) -> np.ndarray:
        """Scores behind each token of a window."""
        rows = np.array([tokens], "int32")
        picked = np.arange(len(tokens), dtype="int32")[None]
        return self.generator.executor.run("prefill", [rows, np.zeros(1, "int32"), picked])[0][0]


class LlamaCpp:
    """llama-cpp-python, by its eval and the scores of its context."""

    def __init__(self, model: Path, library: Path, threads: int) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(
            str(model), n_ctx=LENGTH, n_batch=PREFILL, n_ubatch=PREFILL, n_threads=threads,
            n_threads_batch=threads, verbose=False, logits_all=False,
        )  # fmt: skip
        self.size = self.llama.n_vocab()

    def iterate(self, prompt: list[int]) -> Iterator[int]:
        self.llama.reset()
        self.llama.eval(prompt)
        while True:
            logits = self.llama._ctx.get_logits()
            token = int(np.ctypeslib.as_array(logits, (self.size,)).argmax())
            yield token
            self.llama.eval([token])


class OpenVINO:
    """openvino-genai's LLMPipeline, which reads GGUF; token by token through its streamer."""

    def __init__(self, model: Path, library: Path, threads: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        self.pipeline = openvino_genai.LLMPipeline(
            str(model), "CPU", INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY"
        )

    def iterate(self, prompt: list[int]) -> Iterator[int]:
        """Times of the tokens are taken in the streamer, and given with them."""
        import openvino as ov

        times: list[float] = []
        genai = self.genai

        class Clock(genai.StreamerBase):
            def write(self, token: Any) -> Any:
                times.append(time.perf_counter())
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        ids = ov.Tensor(np.array([prompt], "int64"))
        mask = ov.Tensor(np.ones((1, len(prompt)), "int64"))
        self.pipeline.generate(
            genai.TokenizedInputs(ids, mask),
            genai.GenerationConfig(
                max_new_tokens=NEW + 1, do_sample=False, ignore_eos=True, apply_chat_template=False
            ),
            Clock(),
        )
        yield from times


ENGINES: dict[str, tuple[str, Callable[..., Any]]] = {
    "relayquant": ("relayquant", OwnEngine),
    "llama.cpp": ("llama_cpp", LlamaCpp),
    "OpenVINO GenAI": ("openvino_genai", OpenVINO),
}


def time_tokens(engine: Any, prompt: list[int]) -> list[float]:
    """Seconds until each of the first tokens is there."""
    start, found = time.perf_counter(), []
    for token in engine.iterate(prompt):
        found.append(token if isinstance(token, float) else time.perf_counter())
        if len(found) > NEW:
            break
    return [each - start for each in found]


def measure(name: str, model: Path, library: Path, threads: int) -> dict[str, float]:
    """One round of an engine in this process."""
    package, make = ENGINES[name]
    import_module(package)
    start = time.perf_counter()
    engine = make(model, library, threads)
    load = time.perf_counter() - start
    first = load + time_tokens(engine, draw_prompt(PREFILL, 0))[0]
    times = [time_tokens(engine, draw_prompt(PREFILL, seed))[0] for seed in (1, 2)]
    prefill = PREFILL / min(times)
    found = {"load": load, "first": first, "prefill": prefill}
    for key, count in (("decode_short", SHORT), ("decode_long", LONG)):
        steps = np.diff(time_tokens(engine, draw_prompt(count, 3)))
        found[key] = len(steps) / steps.sum()
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return found | {"memory": int(status.split()[0]) * 1024 / 1e6}


if __name__ == "__main__":
    engine, model, library, threads = sys.argv[1:]
    print(json.dumps(measure(engine, Path(model), Path(library), int(threads))))
