"""Every kind of file that is read: a damaged copy gives what it should hold or one error of ours
that names the file, never a bare exception of a parser, a crash, or a full memory.

One table of formats, one of faults (`damage`). What keeps the class closed is `files.reading`,
which all readers go through; a new format is a new row here. The seeds of a usual run are few.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from damage import damage
from float_models import MAP, build_model, draw_batches
from legacy_json import conv_module
from quantized_models import GraphBuilder
from tvm.relax import op

import relayquant as rq
from relayquant.base.storage.files import open_temporary_folder, replace_folder, write_whole
from relayquant.cli.files import load_mapping, load_module
from relayquant.codegen.library import linking
from relayquant.config.observers import MinMax
from relayquant.data import InputInfo, open_dataset
from relayquant.errors import FileError, RelayQuantError
from relayquant.flow.refine.search_state import SearchState
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.relay import encode_params
from relayquant.stages.calibration.checkpoint import FORMAT as CHECKPOINT
from relayquant.stages.calibration.checkpoint import (
    DataRecord,
    Workspace,
    check_fingerprint,
    read_json,
)
from relayquant.stages.calibration.result import CalibrationResult
from relayquant.stages.calibration.shard import GroupObservation, ShardStates, ShardTask
from relayquant.stages.calibration.store import Shard, ValueStore
from relayquant.stages.prepared import GroupStatistics

#: seeds of every format in a usual run, and with -m slow
FEW, MANY = 40, 2000
#: of formats that take seconds for each, a part of them
SLOW = {"torch.export": 4}


@dataclass(frozen=True)
class FileFormat:
    """A kind of file: how one is made in a folder (its path is returned), and how it is read."""

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]


def model() -> tvm.IRModule:
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), MAP)


def write(name: str, text: str | bytes) -> Callable[[Path], Path]:
    """A maker of a file with this content."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return make


# --- Our own files --------------------------------------------------------------------------------


def make_prepared(folder: Path) -> Path:
    prepared = rq.prepare(model(), effort="fast")
    prepared = rq.calibrate(prepared, draw_batches(model(), 3), order=rq.config.Order.PARALLEL)
    rq.save_prepared(prepared, folder / "model.prepared")
    return folder / "model.prepared"


def make_module(folder: Path) -> Path:
    qmod = rq.quantize(
        model(), None, draw_batches(model(), 3), effort="fast", guard=rq.config.Guard.OFF
    )
    return write("model.json", tvm.ir.save_json(qmod))(folder)


def make_archive(folder: Path) -> Path:
    qmod = rq.quantize(
        model(), None, draw_batches(model(), 3), effort="fast", guard=rq.config.Guard.OFF
    )
    return rq.save_module(qmod, folder / "model.rqm")


def read_module(path: Path) -> None:
    """What `relayquant inspect` looks at."""
    module = load_module(path)
    find_ledger(module)
    count_constant_bytes(module)


PARAMETERS = {
    "x": rq.QParams(np.float32(0.1), 3, "uint8"),
    "w": rq.QParams(np.array([0.1, 0.3], "float32"), np.zeros(2), "int8", 1),
}
INFO = rq.observers.ValueInfo(
    "x", rq.config.Role.ACTIVATION, rq.QSpec("uint8", rq.config.Scheme.AFFINE), MAP
)
OBSERVED = {"x": GroupObservation(MinMax(), INFO, ("x",))}
TASK = ShardTask((), Shard(0, 0, 3), ValueStore(Path()), OBSERVED, {}, ())


def see() -> Any:
    observer = OBSERVED["x"].observer
    return observer.update(observer.start(INFO), np.ones(MAP, "float32"))


def make_choices(folder: Path) -> Path:
    statistics = {"x": GroupStatistics(OBSERVED["x"].observer, see())}
    found = CalibrationResult(PARAMETERS, {"a:weight": np.ones((2, 3), "float32")}, statistics)
    found.save(folder / "step")
    return folder / "step"


def make_shard(folder: Path) -> Path:
    ShardStates({"x": see()}, {}).save(folder / "shard")
    return folder / "shard"


def make_record(folder: Path) -> Path:
    record = DataRecord(2, {"x": (0, 64)}, ({"n": 3}, {"n": 4}), ("ab", "cd"))
    Workspace(folder).write_data(record)
    return folder / "data.json"


BINDING = {"model": "sha256:1", "order": "parallel"}


def read_header(path: Path) -> None:
    check_fingerprint(path.parent, read_json(path), BINDING, "calibration")


def make_values(folder: Path) -> Path:
    store = ValueStore(folder)
    with store.write("x", TASK.shard) as writer:
        for batch in draw_batches(model(), 3):
            writer.append(batch["x"])
    return store.path("x", TASK.shard)


def read_values(path: Path) -> None:
    assert len(list(ValueStore(path.parent).read("x", TASK.shard))) == 3


def make_search(folder: Path) -> Path:
    state = SearchState.open(folder / "search.json", "abc")
    state.ranking, state.trials = {"a": 30.5, "out": float("inf")}, {"float32:a": 0.25}
    state.best = {"operators": ["a"], "mapping": rq.QConfigMapping().to_dict()}
    state.check_basis({"data": "123"})
    return folder / "search.json"


MAPPING = (
    rq.QConfigMapping()
    .set_global(rq.get_backend_config("x86").default_qconfig)
    .set_module_name("a", None)
)

# --- Those of others ------------------------------------------------------------------------------

RELAY = """#[version = "0.0.5"]
def @main(%x: Tensor[(1, 2, 8, 8), float32], %w: Tensor[(4, 2, 3, 3), float32]) {
  %0 = nn.conv2d(%x, %w, padding=[1, 1, 1, 1], channels=4, kernel_size=[3, 3]);
  nn.relu(%0)
}
"""
AIMET = {
    "version": "0.6.1",
    "activation_encodings": {"x": [{"bitwidth": 8, "scale": 0.1, "offset": -3, "dtype": "int"}]},
    "param_encodings": {"w": [{"bitwidth": 8, "scale": 0.1, "offset": -128, "is_sym": "True"}] * 2},
}
TABLE = {"CLS": "TensorsData", "data": {"x": {"lowest": {"data": [-1]}, "highest": {"data": [2]}}}}


def make_npz(folder: Path) -> Path:
    rows = np.random.default_rng(0).random((5, 4, 6, 6)).astype("float32")
    np.savez_compressed(folder / "data.npz", x=rows, y=np.asfortranarray(rows))
    return folder / "data.npz"


def read_npz(path: Path) -> None:
    list(open_dataset(path, [InputInfo("x", MAP, "float32"), InputInfo("y", MAP, "float32")]))


def make_onnx(folder: Path) -> Path:
    b = GraphBuilder()
    weight, scale = b.weight((4, 4, 3, 3))
    y = b.round_trip("x", 0.02, np.uint8(120))
    y = b.node("Conv", y, weight, b.bias(4, np.float32(0.02) * scale), pads=[1, 1, 1, 1])
    y = b.node("Reshape", b.node("Relu", y), b.constant(np.array([1, 144])))
    built = b.model({"x": ("float32", MAP)}, {y: ("float32", (1, 144))})
    return write("model.onnx", built.SerializeToString())(folder)


def make_params(folder: Path) -> Path:
    write("model.relay", RELAY)(folder)
    return write("model.params", encode_params({"w": np.ones((4, 2, 3, 3), "float32")}))(folder)


def make_torch(folder: Path) -> Path:
    torch = pytest.importorskip("torch", reason="pip install torch")
    layers = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.ReLU()
    program = torch.export.export(torch.nn.Sequential(*layers).eval(), (torch.zeros(MAP),))
    torch.export.save(program, folder / "model.pt2")
    return folder / "model.pt2"


FORMATS = {
    "prepared": FileFormat(make_prepared, rq.load_prepared),
    "module": FileFormat(make_module, read_module),
    "module, archive": FileFormat(make_archive, read_module),
    "configuration": FileFormat(write("c.json", json.dumps(MAPPING.to_dict())), load_mapping),
    "parameters": FileFormat(
        lambda folder: rq.save_qparams(PARAMETERS, folder / "q.json"), rq.load_qparams
    ),
    "parameters of AIMET": FileFormat(write("q.json", json.dumps(AIMET)), rq.load_qparams),
    "parameters of ONNX Runtime": FileFormat(write("q.json", json.dumps(TABLE)), rq.load_qparams),
    "calibration table": FileFormat(write("q.cache", "x 1.5\nconv 1 2\n"), rq.load_qparams),
    "search state": FileFormat(make_search, lambda path: SearchState.open(path, "abc")),
    "checkpoint, header": FileFormat(
        write("checkpoint.json", json.dumps({"format": CHECKPOINT, "binding": BINDING})),
        read_header,
    ),
    "checkpoint, data": FileFormat(make_record, lambda path: Workspace(path.parent).read_data()),
    "checkpoint, choices": FileFormat(
        make_choices, lambda path: CalibrationResult.load(path, OBSERVED)
    ),
    "checkpoint, states": FileFormat(make_shard, lambda path: ShardStates.load(path, TASK)),
    "checkpoint, values": FileFormat(make_values, read_values),
    "data": FileFormat(make_npz, read_npz),
    "ONNX": FileFormat(make_onnx, rq.load),
    "Relay text": FileFormat(write("model.relay", RELAY), rq.load),
    "Relay JSON": FileFormat(write("model.json", conv_module()), rq.load),
    "Relay params": FileFormat(make_params, lambda path: rq.load(path.with_suffix(".relay"))),
    "torch.export": FileFormat(make_torch, rq.load),
}  # fmt: skip


def check_damaged(kind: str, path: Path, whole: bytes, seed: int) -> bool:
    """Whether a damaged copy is refused, and how."""
    path.write_bytes(damage(whole, seed))
    try:
        FORMATS[kind].read(path)
    except RelayQuantError as error:
        text = str(error)
        assert str(path) in text or path.parent.name in text, f"seed {seed} names no file: {text}"
        assert len(text) < 3000, f"seed {seed}: {text}"
        return True
    return False


@pytest.fixture(params=FORMATS)
def sample(request, tmp_path):
    """(kind, path, content) of a file of every format, whole, which is read."""
    path = FORMATS[request.param].make(tmp_path)
    FORMATS[request.param].read(path)
    return request.param, path, path.read_bytes()


@pytest.mark.sample(3)
def test_file__damaged(sample):
    seeds = range(FEW // SLOW.get(sample[0], 1))
    refused = sum(check_damaged(*sample, seed) for seed in seeds)
    assert refused > len(seeds) / 4  # some of the faults do no harm


@pytest.mark.slow
def test_file__damaged_in_many_ways(sample):
    for seed in range(FEW, MANY // SLOW.get(sample[0], 1) ** 2):
        check_damaged(*sample, seed)


# --- Writing --------------------------------------------------------------------------------------

FULL = """
import os, resource, sys
sys.path[:0] = {tests!r}
import numpy as np
import tvm
import test_damaged_files as t
import relayquant as rq
from relayquant.flow.refine.search_state import SearchState
from relayquant.stages.calibration.checkpoint import Workspace

prepared = rq.prepare(t.model(), effort="fast")
batches = t.draw_batches(t.model(), 3)
scales = np.ones(1999, "float32")
wide = rq.QParams(scales, np.zeros(1999), "int8", 0)
state = SearchState(t.Path("search.json"), "abc")
state.ranking = dict.fromkeys(map(str, range(999)), 1.0)
executable = rq.compile(t.model())
writers = [
    ("model.prepared", lambda: rq.save_prepared(prepared, "model.prepared")),
    ("q.json", lambda: rq.save_qparams({{"x": wide}}, "q.json")),
    ("search.json", state.save),
    ("module-", lambda: Workspace(t.Path(".")).write_module("x" * 9999)),
    ("m.params", lambda: rq.relay.save_params({{"w": scales}}, "m.params")),
    ("checkpoint", lambda: rq.calibrate(prepared, batches, checkpoint="checkpoint")),
    # LLVM ends the process where it cannot write: description, kernels.
    ("write", lambda: executable.export_library("m.so")),
    ("write", lambda: t.write_library(executable, "m.so")),
]
if sys.argv[1] == "ulimit":
    writers += [("TMPDIR", lambda: rq.calibrate(prepared, batches))]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
else:
    with open("filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(512)):
                pass
        except OSError:
            pass
        file.truncate(file.tell() - 4096)  # Python takes a folder without space for none
for name, write in writers:
    try:
        write()
        print(name, "was written")
    except OSError as error:
        print(name, name in str(error), "Cannot write" in str(error), error.errno)
print("left", *sorted(path.name for path in t.Path(".").rglob("*") if path.is_file()))
"""


def write_library(executable: Any, path: str) -> None:
    """Write the kernels of a library alone."""
    with open_temporary_folder() as folder:
        write_whole(Path(path), lambda file: linking.write_library(executable.mod, file, folder))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ulimit", "tmpfs"])
def test_write__a_full_disk_names_the_file(tmp_path, way):
    """A limit on the size of files, and a file system without space."""
    command = [sys.executable, "-c", FULL.format(tests=sys.path), way]
    if way == "tmpfs":
        mount = 'mount -t tmpfs -o size=64k none "$0" && cd "$0" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, str(tmp_path), *command]
        if subprocess.run([*command[:5], str(tmp_path), "true"], check=False).returncode:
            pytest.skip("needs the right to mount")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    *lines, left = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 8 + (way == "ulimit"), done.stderr
    number = errno.EFBIG if way == "ulimit" else errno.ENOSPC
    assert [line for line in lines if line[1:] != ["True", "True", str(number)]] == []
    # Nothing is left half written but the checkpoint, which goes on.
    assert {*left} <= {"left", "filler", "checkpoint.json", "lock"}, left


def fill_disk(place: Path) -> None:
    """A system call that fails on this file."""
    raise OSError(errno.ENOSPC, "", str(place))


def copy_to_full_disk(place: Path) -> None:
    """As `shutil.copyfile` fails, which names where it reads first."""
    raise OSError(errno.ENOSPC, "", "/source", None, str(place))


def write_on_full_disk(place: Path) -> None:
    """A writer of ours, called by a writer of ours."""
    write_whole(place, fill_disk)


@pytest.mark.parametrize("fail", [fill_disk, copy_to_full_disk, write_on_full_disk])
def test_write__an_error_within_names_the_path_that_was_given(tmp_path, fail):
    """And not the temporary one, which the user has never heard of."""
    file, folder = tmp_path / "out.bin", tmp_path / "deploy"

    def fill(inner: Path) -> None:
        (inner / "a" / "b").mkdir(parents=True)
        fail(inner / "a" / "b" / "c")

    for path, write in (
        (file, lambda: write_whole(file, fail)),
        (folder, lambda: replace_folder(folder, "mark", fill)),
    ):
        with pytest.raises(FileError, match=r"No space left on device\. Free space") as raised:
            write()
        words = str(raised.value).removeprefix("Cannot write ").replace(":", " ").split()
        assert [word for word in words if "/" in word and not word.startswith(str(path))] == []
        assert words[0].startswith(str(path))
        assert raised.value.errno == errno.ENOSPC
        assert [*tmp_path.iterdir()] == []
