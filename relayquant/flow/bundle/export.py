"""Module or executable -> a folder that runs without a compiler.

bundle.json   functions, inputs, outputs, state, preprocessing, sizes and digests of the files
model.so      the compiled model
lib/          TVM's runtime for the target
include/      its headers, for C++
example/      a C++ program that runs the model
python/       the package relayquant_runtime, which runs the folder from Python
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import tvm_ffi

import relayquant_runtime
from relayquant.base.arguments import check_arguments
from relayquant.base.storage.files import check_folder, replace_folder, writing
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.library.mmap_constants import MappedExecutable
from relayquant.data.images import Preprocessing
from relayquant.data.item import InputInfo
from relayquant.errors import ConfigError, format_count, warn_user
from relayquant.flow.bundle.runtime_libraries import PACKAGES, RuntimeLibraries, find_runtime
from relayquant.ir.rewrite.bind import Model
from relayquant.stages.compilation import compile
from relayquant_runtime.bundle import FORMAT, MANIFEST, RUNTIME_FOLDER, digest_file

LIBRARY = "model.so"
#: The C++ example, in the package relayquant_runtime.
EXAMPLE = "cpp"


@check_arguments
def export_bundle(
    mod: Model | MappedExecutable,
    folder: str | os.PathLike[str],
    target: Any = None,
    *,
    preprocessing: str | None = None,
    runtime: str | os.PathLike[str] | None = None,
) -> Path:
    """Write all that a model needs where it runs into one folder: the compiled library, TVM's
    runtime for the target, a description as JSON, and a C++ program that runs it.

    `relayquant_runtime.Library(folder)` runs it from Python. The folder is written beside its place
    and then renamed; a bundle that is there already is replaced.

    Args:
        mod: A quantized or float module, or what `compile` returned.
        folder: The folder to write.
        target: As for `compile`. None for an executable, which has one.
        preprocessing: How pictures become the input, as for --preprocess: "imagenet", or
            "size=256,mean=0.5:0.5:0.5". It is written into the JSON.
        runtime: A folder with the wheels of apache-tvm and apache-tvm-ffi for the target, or with
            their libraries. None: the installed packages, if the target is this machine's kind of
            CPU; otherwise the bundle has none, which warns.

    Returns:
        The folder.

    Raises:
        ConfigError: the target or the preprocessing is not known, or `runtime` lacks a library.
        FileError: the folder cannot be written, or holds something else.
        MissingDependencyError: there is no linker for the target.
    """
    if isinstance(mod, MappedExecutable) and target is not None:
        raise ConfigError(
            "export_bundle: target is given, and an executable has one. Leave it out.",
            code="RQ102",
        )
    path, target = Path(folder), resolve_target(target)
    check_folder(path, MANIFEST)  # before compiling, which takes long
    executable = mod if isinstance(mod, MappedExecutable) else compile(mod, target)
    libraries = find_runtime(executable.target, None if runtime is None else Path(runtime))
    manifest = describe_bundle(executable, preprocessing, libraries)
    replace_folder(
        path, MANIFEST, lambda place: write_files(place, executable, libraries, manifest)
    )
    for sentence in libraries.missing:
        warn_user(f"{path} has no runtime of TVM. {sentence}", code="RQ503")
    return path


def describe_bundle(
    executable: MappedExecutable, preprocessing: str | None, libraries: RuntimeLibraries
) -> dict[str, Any]:
    """Describe the bundle as plain data, all but its files."""
    described = executable.describe_interface()
    inputs = described["functions"].get(described["entry"], {"inputs": []})["inputs"]
    return {
        "format": FORMAT,
        "library": LIBRARY,
        **described,
        "preprocessing": describe_preprocessing(preprocessing, inputs),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "missing": [*libraries.missing],
    }


def describe_preprocessing(text: str | None, inputs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Describe preprocessing as plain data, with what the shape of the input decides filled in.

    "size" is the length of the shorter side after resizing, and "crop" [height, width] of what is
    cut from the middle. Without a size in the text nothing is cut: "crop" is None, and the picture
    is stretched to "size", [height, width]. Resizing is bilinear. The input is
    (pixel / scale - mean) / std of each channel.

    Raises:
        ConfigError: the text is not known, or the model has several inputs.
        DataError: the input does not take pictures.
    """
    if text is None:
        return None
    if len(inputs) != 1:
        raise ConfigError(
            f"preprocessing is {text!r}, and the model has {format_count(len(inputs), 'input')}; "
            "allowed: a model with one input, a picture.",
            code="RQ102",
        )
    (row,) = inputs
    given = Preprocessing.parse(text)
    info = InputInfo(row["name"], tuple(row["shape"]), row["dtype"])
    layout, channels, height, width = given.read_shape(info)
    sides = [given.crop, given.crop] if given.crop else [height, width]
    size, crop = (sides, None) if given.size is None else (given.size, sides)
    order = given.order.value if given.order else ("grey" if channels == 1 else "rgb")
    return {
        **asdict(given),
        "size": size,
        "crop": crop,
        "order": order,
        "layout": layout.value,
    }


def write_files(
    folder: Path,
    executable: MappedExecutable,
    libraries: RuntimeLibraries,
    manifest: dict[str, Any],
) -> None:
    """Write the files of a bundle into an empty folder."""
    with writing(folder):
        executable.export_library(str(folder / LIBRARY))
        for name, data in libraries.files.items():
            place = folder / RUNTIME_FOLDER / name
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(data)
        headers = {
            "tvm": Path(tvm_ffi.libinfo.find_include_path()),
            "dlpack": Path(tvm_ffi.libinfo.find_dlpack_include_path()),
        }
        for name, place in headers.items():
            copy_files(place / name, folder / "include" / name)
        source = Path(relayquant_runtime.__file__).parent
        copy_files(source / EXAMPLE, folder / "example")
        python = folder / "python" / source.name
        copy_files(source, python, without={"__pycache__", EXAMPLE})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        rows = {
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": digest_file(path),
            }
            for path in files
        }
        text = json.dumps({**manifest, "files": rows}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def copy_files(source: Path, place: Path, without: Collection[str] = ()) -> None:
    """Copy a folder, without files and folders of some names. It stops at the first error, which
    `shutil.copytree` does not: on a full disk that would list every file and no cause.
    """
    for path in source.rglob("*"):
        inner = path.relative_to(source)
        if path.is_file() and not set(without) & {*inner.parts}:
            copy = place / inner
            with writing(copy):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
