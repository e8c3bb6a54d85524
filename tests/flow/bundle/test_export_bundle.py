"""Bundles: what is written, what is said of it, and what the reader refuses."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from float_models import build_model, draw_batches
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant import cli
from relayquant.base.storage.files import replace_folder
from relayquant.data.images import Preprocessing
from relayquant.data.item import InputInfo
from relayquant.errors import FileError
from relayquant.flow.bundle.export import describe_preprocessing
from relayquant.flow.bundle.runtime_libraries import LIBRARIES, find_runtime
from relayquant_runtime import RUNTIME, Library, LibraryError, open_again
from relayquant_runtime import bundle as reader
from relayquant_runtime.elf import read_machine

ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}
PICTURES = (1, 3, 6, 6)


@I.ir_module
class Counter:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32"), count: R.Tensor((), "float32")):
        with R.dataflow():
            more = R.add(count, R.const(1, "float32"))
            result = (R.multiply(x, more), more)
            R.output(result)
        return result


COUNTER = rq.with_state(Counter, [rq.StateValue("count", (), "float32")])


@functools.cache
def quantize_pictures(shape=PICTURES, channels: int = 4):
    mod = build_model(lambda emit, x: emit.conv("a", x, channels), shape)
    data = draw_batches(mod, 2)
    integers = {"input_dtypes": {"x": "uint8"}, "output_dtypes": {"a": "uint8"}}
    options = {"backend": "x86", "effort": "fast", "guard": "off", "callbacks": ()}
    return rq.quantize(mod, None, data, **options, **integers)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "deploy"
    rq.export_bundle(rq.compile(COUNTER), folder)
    return folder


@pytest.fixture
def copied(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def test_bundle__has_what_a_program_needs(bundle):
    described = json.loads((bundle / "bundle.json").read_text())
    assert described["functions"] == {
        "main": {
            "inputs": [{"name": "x", "shape": ["n", 3], "dtype": "float32"}],
            "outputs": [{"name": "output0", "shape": ["n", 3], "dtype": "float32"}],
        }
    }
    assert described["state"] == [{"name": "count", "shape": [], "dtype": "float32"}]
    assert described["missing"] == []
    found = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert found == {*described["files"], "bundle.json"}
    assert {f"lib/{name}" for name in LIBRARIES} <= found
    needed = ("include/tvm/ffi/extra/module.h", "example/main.cpp", "example/CMakeLists.txt")
    assert {*needed, "python/relayquant_runtime/__init__.py", "model.so"} <= found


def test_bundle__says_scales_and_preprocessing(tmp_path):
    qmod = quantize_pictures()
    rq.export_bundle(qmod, tmp_path / "deploy", preprocessing="imagenet,crop=6,size=6")
    described = json.loads((tmp_path / "deploy" / "bundle.json").read_text())
    main, ledger = described["functions"]["main"], rq.ledger(qmod)
    for rows, values in ((main["inputs"], ledger.inputs), (main["outputs"], ledger.outputs)):
        (row,), (value,) = rows, values
        assert (row["name"], row["dtype"]) == (value.name, "uint8")
        assert (row["scale"], row["zero_point"]) == ([*value.scale], [*value.zero_point])
    given = described["preprocessing"]
    assert given["mean"] == [0.485, 0.456, 0.406]
    assert (given["size"], given["crop"]) == (6, [6, 6])
    assert (given["layout"], given["order"]) == ("nchw", "rgb")


@pytest.mark.parametrize(
    ("text", "shape"), [("tflite", [1, 3, 6, 8]), ("unit", [1, 6, 8, 1]), ("size=9", [1, 3, 6, 8])]
)
def test_preprocessing__as_described_gives_the_input_that_pictures_become(text, shape):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (21, 13, 3), "uint8")
    picture = image.fromarray(pixels)
    given = describe_preprocessing(text, [{"name": "x", "shape": shape, "dtype": "float32"}])
    assert given is not None
    size, crop = given["size"], given["crop"]
    # As a program reads bundle.json: one number is the shorter side, two are the whole picture.
    if isinstance(size, int):
        height, width = (round(side * size / 13) for side in (21, 13))
    else:
        height, width = size
    resized = picture.convert("L" if given["order"] == "grey" else "RGB").resize((width, height), 2)
    array = np.asarray(resized, "float32").reshape(height, width, -1)
    if crop is not None:
        top, left = (height - crop[0]) // 2, (width - crop[1]) // 2
        array = array[top : top + crop[0], left : left + crop[1]]
    array = (array / given["scale"] - np.float32(given["mean"])) / np.float32(given["std"])
    if given["layout"] == "nchw":
        array = array.transpose(2, 0, 1)
    info = InputInfo("x", tuple(shape), "float32")
    np.testing.assert_array_equal(array[None], Preprocessing.parse(text).apply(picture, info))


# In a process whose TVM is hidden, as on a machine that has apache-tvm-ffi alone.
ALONE = """
import importlib.util, sys
import numpy as np
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "tvm" else found(name, *more)
from relayquant_runtime import Library
library = Library(sys.argv[1])
x = np.ones((2, 3), "float32")
print(library.run("main", [x])[0].tolist(), library.run("main", [x])[0].tolist())
print(library.describe())
print(sorted({"tvm", "relayquant"} & {*sys.modules}))
"""


def test_bundle__runs_without_the_package_apache_tvm(bundle):
    command = [sys.executable, "-c", ALONE, str(bundle)]
    environment = {**os.environ, "PYTHONPATH": str(bundle / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=bundle)
    assert done.returncode == 0, done.stderr
    results, *described, loaded = done.stdout.splitlines()
    assert results == "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]] [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]"
    assert described[1] == "main(x float32 (n, 3)) -> output0 float32 (n, 3)"
    assert described[2] == "state: count float32 ()"
    assert loaded == "[]"


MANY = """
import importlib.util, sys
from itertools import product
from pathlib import Path
import numpy as np
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "tvm" else found(name, *more)
from relayquant_runtime import Library, LibraryError
x, first, second = np.ones((2, 3), "float32"), *map(Path, sys.argv[1:])
for path in (first / "none.so", first / "library.so"):
    try:
        Library(path)
    except LibraryError as error:
        print(error)
for path in (first, second, second / "library.so"):
    print(Library(path).run("main", [x])[0][0].tolist())
"""


def test_bundle__two_in_a_process_share_the_runtime(bundle, tmp_path):
    """A server with two models: a second copy of TVM's runtime would end the process."""
    folders = [shutil.copytree(bundle, tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        shutil.copy(reader.read_bundle(folder).library, folder / "library.so")
    command = [sys.executable, "-c", MANY, *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(bundle / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=bundle)
    assert done.returncode == 0, done.stderr
    missing, alone, *results = done.stdout.splitlines()
    assert missing.startswith("There is no file")
    assert "needs TVM's runtime. The folder that export_bundle wrote has it" in alone
    assert results == ["[1.0, 1.0, 1.0]"] * 3


def test_library_describe__says_whether_tiles_are_in_use(tmp_path, monkeypatch):
    """The library is compiled for a CPU with AMX, and loaded where nothing of it is run."""
    qmod = quantize_pictures((1, 64, 9, 9), 64)  # it takes tiles
    executable = rq.compile(qmod, "llvm -mcpu=sapphirerapids")
    executable.export_library(str(tmp_path / "m.so"))
    library = Library(tmp_path / "m.so")
    loaded = open_again(tmp_path / "m.so")
    answer = ctypes.c_uint8.in_dll(loaded, "relayquant_tile_permission")
    told = {True: "on tiles", False: "may not use the tiles"}
    for is_allowed, uses in product((True, False), (None, True, False)):
        monkeypatch.setattr("relayquant_runtime.tiles.may_use_tiles", lambda now=is_allowed: now)
        answer.value = {None: 0, True: 1, False: 2}[uses]  # what the library was told when it asked
        first, *_, last = library.describe().splitlines()
        assert first.endswith("linux-gnu, sapphirerapids")
        assert told[is_allowed if uses is None else uses] in last


def test_bundle__is_replaced_and_nothing_else_is(tmp_path):
    executable = rq.compile(COUNTER)
    folder = tmp_path / "deploy"
    folder.mkdir()
    for _ in range(2):
        assert rq.export_bundle(executable, folder) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["deploy"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").touch()
    with pytest.raises(rq.errors.FileError, match=r"mine: it holds something else.*bundle\.json"):
        rq.export_bundle(executable, tmp_path / "mine")
    with pytest.raises(rq.errors.FileError, match="there is no folder"):
        rq.export_bundle(executable, tmp_path / "none" / "deploy")
    with pytest.raises(rq.ConfigError, match="an executable has one"):
        rq.export_bundle(executable, folder, ARM)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["photo.jpg"]


def edit(folder: Path, change) -> None:
    path = folder / "bundle.json"
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lead_outside(folder: Path) -> None:
    (folder.parent / "model.so").write_bytes((folder / "model.so").read_bytes())
    (folder / "model.so").unlink()
    (folder / "model.so").symlink_to(folder.parent / "model.so")


DAMAGES = {
    "no bundle": (lambda f: (f / "bundle.json").unlink(), "is no bundle.*export_bundle wrote"),
    "no json": (lambda f: (f / "bundle.json").write_text("{"), "is damaged"),
    "a list": (lambda f: (f / "bundle.json").write_text("[]"), "is damaged"),
    "nested": (lambda f: (f / "bundle.json").write_text("[" * 99_999), "is damaged"),
    "another version": (lambda f: edit(f, lambda d: d.update(format="x.2")), "of another version"),
    "no library": (lambda f: edit(f, lambda d: d.pop("library")), "names no library"),
    "an unlisted library": (lambda f: edit(f, lambda d: d.update(library="x")), "names no library"),
    "absolute": (
        lambda f: edit(f, lambda d: d.update(library="/x", files={"/x": {}})),
        "outside the folder",
    ),
    "parent": (
        lambda f: edit(f, lambda d: d.update(library="../x", files={"../x": {}})),
        "outside the folder",
    ),
    "link": (lead_outside, "outside the folder"),
    "a file is missing": (lambda f: (f / "lib" / LIBRARIES[1]).unlink(), "Copy the whole folder"),
    "another byte": (lambda f: flip(f / "model.so"), "its sha256 differs"),
    "another runtime": (lambda f: flip(f / "lib" / LIBRARIES[1]), "its sha256 differs"),
    "cut off": (lambda f: os.truncate(f / "model.so", 100), "its size"),
    "no digest": (lambda f: edit(f, lambda d: d["files"].update({"model.so": 3})), "differs"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_library__refuses_a_folder_that_is_not_as_it_was_written(damage, copied):
    change, told = DAMAGES[damage]
    change(copied)
    with pytest.raises(LibraryError, match=told):
        Library(copied)


def test_library__reads_no_more_of_the_json_than_a_bundle_has(copied, monkeypatch):
    monkeypatch.setattr(reader, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(LibraryError, match="is damaged"):
        Library(copied)


def elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + bytes(40)


def write_wheels(folder: Path, machine: int, names=LIBRARIES) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "apache_tvm.whl", "w") as wheel:
        for name in names:
            wheel.writestr(f"tvm/lib/{name}", elf(machine))
    return folder


def test_find_runtime__takes_the_libraries_of_the_target(tmp_path):
    target = rq.compile(COUNTER, ARM).target
    assert LIBRARIES[1:] == RUNTIME
    given = find_runtime(target, write_wheels(tmp_path / "arm", 183))
    assert {name: read_machine(data) for name, data in given.files.items()} == dict.fromkeys(
        LIBRARIES, "aarch64"
    )
    with pytest.raises(rq.ConfigError, match=r"no libtvm_ffi\.so, libtvm_runtime\.so.* --platform"):
        find_runtime(target, write_wheels(tmp_path / "x86", 62))
    with pytest.raises(rq.ConfigError, match=r"has no libtvm_ffi\.so for aarch64"):
        find_runtime(target, write_wheels(tmp_path / "part", 183, RUNTIME))
    with pytest.raises(rq.ConfigError, match=r"no folder or wheel .*none\. .*pip download .*RQ502"):
        find_runtime(target, tmp_path / "none")
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(rq.ConfigError, match=r"is no folder or wheel with TVM's libraries"):
        find_runtime(target, tmp_path / "x.whl")


def test_export_bundle__for_another_cpu_says_what_to_get(tmp_path, monkeypatch):
    executable = rq.compile(COUNTER, ARM)
    # Whatever this machine has to link with.
    monkeypatch.setattr(
        "relayquant.codegen.library.mmap_constants.choose_linker",
        lambda *_: lambda output, objects, **_: Path(output).write_bytes(b"code"),
    )
    with pytest.warns(UserWarning, match=r"no runtime of TVM.*manylinux_2_28_aarch64.*'wheels'"):
        rq.export_bundle(executable, tmp_path / "deploy")
    described = json.loads((tmp_path / "deploy" / "bundle.json").read_text())
    assert "pip download" in described["missing"][0]
    assert described["target"] == {
        "triple": "aarch64-linux-gnu",
        "cpu": "cortex-a76",
        "flags": ["asimd", "asimddp", "asimdhp", "asimdrdm", "atomics"],
    }
    wheels = write_wheels(tmp_path / "wheels", 183)
    rq.export_bundle(executable, tmp_path / "deploy", runtime=wheels)
    described = json.loads((tmp_path / "deploy" / "bundle.json").read_text())
    assert described["missing"] == []
    assert (tmp_path / "deploy" / "lib" / "libtvm_ffi.so").read_bytes() == elf(183)


def test_command__writes_a_bundle(tmp_path, capsys):
    rq.save_module(quantize_pictures(), tmp_path / "m.rqm")
    folder = tmp_path / "deploy"
    command = ["compile", str(tmp_path / "m.rqm"), "-o", f"{folder}/"]
    assert cli.main([*command, "--preprocess", "unit"]) == 0
    assert f"wrote {folder}" in capsys.readouterr().out
    assert json.loads((folder / "bundle.json").read_text())["preprocessing"]["scale"] == 255
    x = np.zeros(PICTURES, "uint8")
    assert Library(folder).run("main", [x])[0].dtype == "uint8"
    assert cli.main(["compile", str(tmp_path / "m.rqm"), "-o", str(tmp_path)]) == 2
    assert re.search(r"holds something else", capsys.readouterr().err)
    assert cli.main([*command[:3], str(tmp_path / "m.so"), "--preprocess", "unit"]) == 2
    assert "--preprocess are for a folder" in capsys.readouterr().err


def test_replace_folder__an_old_folder_stays_if_the_new_one_cannot_take_its_place(
    tmp_path, monkeypatch
):
    folder = tmp_path / "deploy"
    replace_folder(folder, "mark", lambda place: (place / "mark").write_text("old"))
    rename = Path.rename

    def refuse(path, target):
        if path.name == "new":
            raise OSError("refused")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(FileError, match="refused"):
        replace_folder(folder, "mark", lambda place: (place / "mark").write_text("new"))
    assert (folder / "mark").read_text() == "old"
    assert [*tmp_path.iterdir()] == [folder]
