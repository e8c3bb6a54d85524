"""Arguments that several commands take, alike in all of them -> a parser that knows them.

TVM is not imported here, as in `parsers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from relayquant.base.storage.files import decode_json

# Enums of stages that cannot be imported here. A test compares them.
EFFORTS = ("fast", "balanced", "best")
PRECISIONS = ("float32", "bf16")
PRESETS = ("imagenet", "caffe", "tflite", "cifar", "unit")

#: bytes of each unit that --max-size accepts
UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


class ArgumentParent(Protocol):
    """What arguments are added to: a parser, or a group of it."""

    def add_argument(self, *names: str, **settings: Any) -> Any: ...


def add_model(
    parser: ArgumentParent,
    text: str = "float model: .onnx, .tflite, .pt2, .relay, .gguf, or a module's .rqm or .json",
) -> None:
    """Add `MODEL`, a model file."""
    parser.add_argument("model", type=Path, metavar="MODEL", help=text)


def add_inputs(parser: ArgumentParent) -> None:
    """Add `--shape` and `--input`."""
    parser.add_argument(
        "--shape",
        type=parse_shape,
        action="append",
        default=[],
        metavar="NAME=1,3,224,224",
        help="set the shape of an input; a name (NAME=N,80) makes a size symbolic; may be repeated",
    )
    parser.add_argument(
        "--input",
        type=parse_input,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace an input by a constant: a number or a list ([1, 2]); may be repeated",
    )


def add_qmodel(parser: ArgumentParent, *, required: bool = True, text: str = "") -> None:
    """Add `QMODEL`, a quantized module."""
    nargs = None if required else "?"
    parser.add_argument(
        "qmodel",
        type=Path,
        nargs=nargs,
        metavar="QMODEL",
        help=f"quantized module, .rqm or .json{text}",
    )


def add_data(parser: ArgumentParent, *, required: bool = True, text: str = "") -> None:
    """Add `--data FILE.npz or FOLDER`, and `--preprocess`."""
    parser.add_argument(
        "--data",
        type=Path,
        required=required,
        metavar="DATA",
        help="representative inputs: an .npz with one array for each model input, samples along "
        f"axis 0; for one input also an .npy; or a folder of pictures{text}",
    )
    parser.add_argument(
        "--preprocess",
        metavar="SPEC",
        help=f"preprocessing of pictures: {', '.join(PRESETS)}; or with changes, such as "
        "imagenet,size=232,crop=224 or mean=0.5:0.5:0.5,std=0.5 (keys: size, crop, scale, mean, "
        "std, order, layout; default: guessed from the model)",
    )


def add_labels(parser: ArgumentParent, text: str) -> None:
    """Add `--labels FILE.txt`."""
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE.txt",
        help=f"{text}: a file with a line 'NAME CLASS' for each picture, or 'CLASS' for each "
        "sample",
    )


def add_samples(
    parser: ArgumentParent, text: str, default: int | None, default_text: str = ""
) -> None:
    """Add `--samples N`."""
    parser.add_argument(
        "--samples",
        type=int,
        default=default,
        metavar="N",
        help=f"{text} the first N samples (default: {default_text or default})",
    )


def add_backend(parser: ArgumentParent) -> None:
    """Add `--backend NAME or FILE.json`."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="kernels that run the model: x86, x86-7bit (faster without VNNI, less accurate), "
        "arm, generic, accelerator, or your own FILE.json (see `relayquant inspect --help`; "
        "default: for this machine)",
    )


def add_effort(parser: ArgumentParent) -> None:
    """Add `--effort LEVEL`."""
    parser.add_argument(
        "--effort",
        choices=EFFORTS,
        default="balanced",
        help="time spent on accuracy (default: balanced)",
    )


def add_target(parser: ArgumentParent, text: str) -> None:
    """Add `--target TARGET`."""
    parser.add_argument("--target", help=f"{text}, e.g. 'llvm -mcpu=cascadelake'")


def add_tune(parser: ArgumentParent) -> None:
    """Add `--tune [FILE]`, as `tune` of `relayquant.compile`."""
    parser.add_argument(
        "--tune",
        nargs="?",
        const=True,
        default=False,
        type=Path,
        metavar="FILE",
        help="time the best few schedules of every layer on this machine (some seconds) and "
        "cache the times, in FILE if given",
    )


def add_precision(parser: ArgumentParent) -> None:
    """Add `--precision`, as `precision` of `relayquant.compile`."""
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="operands of float convolutions and matrix products (default: as quantized, else "
        "float32); bf16 needs a CPU with instructions for it",
    )


def add_work(parser: ArgumentParent) -> None:
    """Add `--workers N` and `--checkpoint FOLDER`."""
    parser.add_argument(
        "--workers", type=int, metavar="N", help="use N processes (default: threads)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="resume from this folder after an interruption",
    )


def add_choice(parser: ArgumentParent, option: str, choices: Sequence[str], text: str) -> None:
    """Add an option with so many choices that they are listed beside its name."""
    parser.add_argument(
        option, choices=choices, metavar="NAME", help=f"{text}; NAME: {', '.join(choices)}"
    )


def add_output(parser: ArgumentParent, metavar: str, text: str, **more: Any) -> None:
    """Add `-o FILE`."""
    parser.add_argument("-o", "--output", type=Path, metavar=metavar, help=text, **more)


def add_plot(parser: ArgumentParent, text: str) -> None:
    """Add `--plot FILE`."""
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help=f"plot {text} (.png, .svg or .pdf)"
    )


def add_csv(parser: ArgumentParent) -> None:
    """Add `--csv FILE`."""
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")


def split_name(text: str) -> tuple[str, str]:
    """Split NAME=VALUE into (name, value). Names may contain an equals sign, values may not."""
    name, mark, value = text.rpartition("=")
    if not mark or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=...")
    return name, value


def parse_shape(text: str) -> tuple[str, tuple[int | str, ...]]:
    """Parse NAME=1,N,224 into (name, shape): sizes, and names of symbolic sizes."""
    name, value = split_name(text)
    sizes = [size.strip() for size in value.split(",")]
    if not all(size.isidentifier() or (size.isdecimal() and int(size) > 0) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no valid shape for {name!r}; allowed: integers above 0 or names, "
            "separated by commas"
        )
    return name, tuple(int(size) if size.isdecimal() else size for size in sizes)


def parse_input(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE into (name, value), the value as JSON."""
    name, value = split_name(text)
    try:
        return name, decode_json(value)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no valid value for {name!r}; allowed: a number, true, false, or a list "
            "such as [1, 2]"
        ) from error


def parse_size(text: str) -> int:
    """Parse a size such as 1500000, 1.5MB or 2GB into bytes."""
    number = text.rstrip("kMGB")
    try:
        size = int(float(number) * UNITS[text[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; allowed: a number above 0, in bytes or with "
            f"{', '.join([*UNITS][2:])}"
        )
    return size
