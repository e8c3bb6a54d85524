"""For the command line: arguments that several commands take, alike in all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import relayquant as rq


def add_model(parser: argparse.ArgumentParser) -> None:
    """`MODEL`, a float model."""
    parser.add_argument("model", type=Path, help="float model: .onnx, .tflite, or a module's .json")


def add_data(parser: argparse.ArgumentParser) -> None:
    """`--data FILE.npz`."""
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE.npz",
        help="representative inputs: one array for each input of the model, samples first",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """`--backend NAME`."""
    parser.add_argument("--backend", default="x86", help="whose kernels will run it (default: x86)")


def add_effort(parser: argparse.ArgumentParser) -> None:
    """`--effort LEVEL`."""
    parser.add_argument(
        "--effort",
        choices=[level.value for level in rq.Effort],
        default=rq.Effort.BALANCED.value,
        help="work that goes into accuracy (default: balanced)",
    )
