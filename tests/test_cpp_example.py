"""The C++ example, built with CMake: for this machine, and for Arm where an emulator runs it.

For Arm: Debian's packages qemu-user and g++-aarch64-linux-gnu, and a folder with the wheels of
apache-tvm and apache-tvm-ffi for aarch64 in RELAYQUANT_ARM_WHEELS, or a network to fetch them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from float_models import build_model, draw_batches
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.flow.bundle.runtime_libraries import PACKAGES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++"
    ),
]

ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}
ROOT = Path(__file__).parents[1]


@I.ir_module
class RunningSum:
    @R.function
    def main(
        x: R.Tensor(("n", 3), "float32"),
        total: R.Tensor((), "float32"),
        count: R.Tensor((), "float16"),
    ):
        with R.dataflow():
            more, steps = R.add(total, R.sum(x)), R.add(count, R.const(1, "float16"))
            result = (R.add(x, more), R.astype(x, "int32"), R.astype(steps, "int64"), more, steps)
            R.output(result)
        return result


STATE = [
    rq.StateValue("total", (), "float32", np.float32(5)),
    rq.StateValue("count", (), "float16"),
]
STREAM = rq.with_state(RunningSum, STATE)


@dataclass(frozen=True)
class Program:
    """The built example, and how it is started."""

    command: list[str]
    target: dict | None
    runtime: Path | None

    def export(self, mod, folder: Path) -> Path:
        return rq.export_bundle(mod, folder, self.target, runtime=self.runtime)

    def run(self, *words) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def read(self, *words) -> list[np.ndarray]:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return [read_line(line) for line in done.stdout.splitlines()]


def read_line(line: str) -> np.ndarray:
    """dtype, sizes, ":" and values."""
    kind, values = line.split(":")
    dtype, *sizes = kind.split()
    return np.array(values.split(), dtype).reshape([*map(int, sizes)])


def build(folder: Path, bundle: Path, *options: str) -> Path:
    source = ROOT / "examples" / "cpp"
    settings = [f"-DBUNDLE={bundle}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-Wall -Werror"]
    for command in (
        ["cmake", "-S", source, "-B", folder, *settings, *options],
        ["cmake", "--build", folder],
    ):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module", params=["here", "arm"])
def program(request, tmp_path_factory) -> Program:
    folder = tmp_path_factory.mktemp("example")
    if request.param == "here":
        bundle = rq.export_bundle(STREAM, folder / "deploy")
        return Program([str(build(folder / "build", bundle))], None, None)
    emulator, compiler = shutil.which("qemu-aarch64"), shutil.which("aarch64-linux-gnu-g++")
    if not emulator or not compiler:
        pytest.skip("needs qemu-user and g++-aarch64-linux-gnu: apt install them")
    wheels = find_wheels(folder)
    bundle = rq.export_bundle(STREAM, folder / "deploy", ARM, runtime=wheels)
    options = [f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_SYSTEM_NAME=Linux"]
    built = build(folder / "build", bundle, *options)
    return Program([emulator, "-L", "/usr/aarch64-linux-gnu", str(built)], ARM, wheels)


def find_wheels(folder: Path) -> Path:
    if "RELAYQUANT_ARM_WHEELS" in os.environ:
        return Path(os.environ["RELAYQUANT_ARM_WHEELS"])
    wheels = folder / "wheels"
    packages = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
    options = ["--no-deps", "--only-binary=:all:", "--platform", "manylinux_2_28_aarch64"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "--python-version", "3.11"]
    done = subprocess.run([*command, "-d", wheels, *packages], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheels of TVM for aarch64: {done.stderr.strip().splitlines()[-1]}")
    return wheels


def test_example__quantized_model(program, tmp_path):
    mod = build_model(lambda emit, x: emit.conv("a", x, 8), (1, 3, 6, 6))
    data = draw_batches(mod, 2)
    backend = "x86" if program.target is None else "arm"
    options = {"effort": "fast", "guard": "off", "callbacks": ()}
    qmod = rq.quantize(mod, None, data, backend=backend, **options)
    data[0]["x"].tofile(tmp_path / "x.bin")
    program.export(qmod, tmp_path / "deploy")
    (found,) = program.read(tmp_path / "deploy", tmp_path / "x.bin")
    np.testing.assert_array_equal(found, rq.reference.run(qmod, data[0])[0])
    # Two models at the same time, and one on two threads, compute the same.
    both = program.read(tmp_path / "deploy", "--models", 2, "--threads", 2, tmp_path / "x.bin")
    np.testing.assert_array_equal(both, [found, found])


def test_example__state_and_free_sizes(program, tmp_path):
    x = np.arange(6, dtype="float32").reshape(2, 3)
    x.tofile(tmp_path / "x.bin")
    program.export(STREAM, tmp_path / "deploy")
    for steps in (1, 4):
        words = (tmp_path / "deploy", "--steps", steps, tmp_path / "x.bin")
        moved, whole, count = program.read(*words)
        np.testing.assert_array_equal(moved, x + 5 + 15 * steps)
        np.testing.assert_array_equal(whole, x.astype("int32"))
        assert count == steps


def test_example__says_what_is_wrong(program, tmp_path):
    program.export(STREAM, tmp_path / "deploy")
    (tmp_path / "short.bin").write_bytes(bytes(20))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "bundle.json").write_text("{}")
    wrong = tmp_path / "wrong"
    shutil.copytree(tmp_path / "deploy", wrong)
    machine = "aarch64" if platform.machine() == "x86_64" and program.target is None else "x86_64"
    other = {"kind": "llvm", "mtriple": f"{machine}-linux-gnu"}
    rq.compile(STREAM, other).export_library(
        str(wrong / "model.so"), fcompile=lambda out, files, **_: shutil.copy(files[0], out)
    )
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "deploy", cut)
    data = (cut / "model.so").read_bytes()
    (cut / "model.so").write_bytes(data[: len(data) // 2])
    for words, told in (
        ([], "Usage: run FOLDER"),
        ([cut], f"{cut}/model.so was cut off: it has {len(data) // 2} of {len(data)} bytes"),
        ([cut, "--steps", "many"], "--steps takes a number, not 'many'"),
        ([cut, "--threads"], "--threads takes a number, not ''"),
        ([cut, *["x.bin"] * 2], "Inputs of the model: 1; files given: 2. Usage: run"),
        ([tmp_path / "none"], f"Cannot read {tmp_path / 'none'}/bundle.json"),
        ([tmp_path / "deploy", tmp_path / "none"], f"Cannot read {tmp_path / 'none'}"),
        (
            [tmp_path / "deploy", tmp_path / "short.bin"],
            "input 'x' has 20 bytes; the model takes 12",
        ),
        ([tmp_path / "text"], ""),
        ([wrong], f"{wrong}/model.so cannot be loaded: it is for another CPU"),
    ):
        done = program.run(*words)
        assert done.returncode == 1, (words, done)
        assert told in done.stderr
        assert done.stdout == ""


def test_example__results_that_cannot_be_written(program, tmp_path):
    program.export(STREAM, tmp_path / "deploy")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*program.command, tmp_path / "deploy"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"Cannot write the results\n")


def test_example__for_instructions_that_this_machine_lacks(program, tmp_path):
    if program.target is not None:
        pytest.skip("an emulator may show the flags of the machine that it runs on")
    x = np.zeros((1, 3), "float32")
    x.tofile(tmp_path / "x.bin")
    library = program.export(STREAM, tmp_path / "deploy") / "model.so"
    described = library.read_bytes()
    flags = re.compile(rb'"flags": \["\w+')
    if not flags.search(described):
        pytest.skip("nothing is known of this kind of CPU")
    changed = flags.sub(lambda found: b'"flags": ["'.ljust(len(found[0]), b"z"), described)
    library.write_bytes(changed)
    done = program.run(tmp_path / "deploy", tmp_path / "x.bin")
    assert done.returncode == 1
    assert re.search(r"model\.so was compiled for instructions .* lacks: z+\. Compile", done.stderr)


RELOAD = """
#include <cstdio>
#include "relayquant.h"

int main(int, char** argv) {
  auto x = relayquant::empty({1}, "float32");
  *static_cast<float*>(x.data_ptr()) = 5;
  auto run = [&](relayquant::Model& model) {
    std::printf("%g\\n", *static_cast<float*>(model.run("main", {x})[0].data_ptr()));
  };
  relayquant::Model first(argv[1]);
  run(first);
  std::filesystem::rename(argv[2], argv[1]);
  relayquant::Model second(argv[1]);
  run(second);
  run(first);
}
"""


def test_model__of_a_path_is_the_file_that_lies_there_now(tmp_path):
    @I.ir_module
    class Double:
        @R.function
        def main(x: R.Tensor((1,), "float32")):
            return R.add(x, x)

    @I.ir_module
    class Square:
        @R.function
        def main(x: R.Tensor((1,), "float32")):
            return R.multiply(x, x)

    folder = rq.export_bundle(Double, tmp_path / "deploy")
    rq.compile(Square).export_library(str(tmp_path / "new.so"))
    words = (folder / "model.so", tmp_path / "new.so")
    assert run_program(RELOAD, folder, tmp_path, *words).split() == ["10", "25", "10"]


def run_program(code: str, folder: Path, place: Path, *words) -> str:
    """Build a program with the files of a bundle, and return what it prints."""
    (place / "program.cpp").write_text(code)
    places = [f"-I{folder}/example", f"-I{folder}/include", f"-L{folder}/lib"]
    needed = ["-ltvm_ffi", "-ltvm_runtime", f"-Wl,--no-as-needed,-rpath,{folder}/lib"]
    command = ["g++", "-std=c++17", *places, "program.cpp", "-o", "program", *needed[::-1]]
    subprocess.run(command, cwd=place, check=True)
    command = [*map(str, (place / "program", *words))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
#include <cstdio>
#include "relayquant.h"

int main(int count, char** words) {
  for (int at = 1; at < count; ++at) {
    try {
      relayquant::Model model(words[at]);
      std::printf("opened\\n");
    } catch (const std::exception& error) {
      std::printf("%s\\n", error.what());
    }
  }
}
"""


def test_model__of_a_folder_names_the_file_in_it(tmp_path):
    folder, other = rq.export_bundle(STREAM, tmp_path / "deploy"), tmp_path / "other"
    other.mkdir()
    words = (folder, other, tmp_path / "none", folder / "model.so")
    assert run_program(OPEN, folder, tmp_path, *words).splitlines() == [
        f"{folder} is a folder. Pass the library in it: {folder}/model.so",
        f"{other} is a folder. Pass the library in it: {other}/model.so, which it lacks. "
        "export_bundle writes it",
        f"There is no file {tmp_path}/none",
        "opened",
    ]


GO_BACK = """
#include <cstdio>
#include "relayquant.h"

int main(int, char** argv) {
  relayquant::Model model(argv[1]);
  auto rows = relayquant::empty({1, 1, 1, 16}, "float32");
  auto place = relayquant::empty({1}, "int32");
  std::memset(rows.data_ptr(), 0, relayquant::count_bytes(rows));
  auto run = [&](int32_t at, float value) {
    *static_cast<int32_t*>(place.data_ptr()) = at;
    *static_cast<float*>(rows.data_ptr()) = value;
    std::printf("%g\\n", *static_cast<float*>(model.run("main", {rows, place})[0].data_ptr()));
  };
  const void* first = model.state()["cache"].data_ptr();
  if (first == model.state()["cache"].data_ptr()) std::printf("no copies\\n");
  run(0, 1);
  auto saved = model.state();
  run(1, 2);
  run(2, 4);
  model.set_state("cache", saved["cache"]);
  run(3, 8);
  for (auto& [name, value] : {std::pair{"none", rows}, std::pair{"cache", rows}}) {
    try {
      model.set_state(name, value);
    } catch (const std::exception& error) {
      std::printf("%s\\n", error.what());
    }
  }
}
"""


def test_model__goes_back_to_a_state_that_kernels_change_in_place(tmp_path):
    @I.ir_module
    class Cache:
        @R.function
        def main(
            rows: R.Tensor((1, 1, 1, 16), "float32"),
            at: R.Tensor((1,), "int32"),
            cache: R.Tensor((1, 1, 4, 16), "float32"),
        ):
            with R.dataflow():
                new = R.qnn.update_cache(cache, rows, at)
                result = (R.sum(new), new)
                R.output(result)
            return result

    stream = rq.with_state(Cache, [rq.StateValue("cache", (1, 1, 4, 16), "float32")])
    folder = rq.export_bundle(stream, tmp_path / "deploy")
    assert run_program(GO_BACK, folder, tmp_path, folder / "model.so").splitlines() == [
        *("1", "3", "7", "9"),
        "The model has no state 'none'",
        "State 'cache' is float32 (1, 1, 1, 16); the model takes float32 (1, 1, 4, 16)",
    ]
