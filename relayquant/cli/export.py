"""`relayquant export`: a quantized module as another kind of file, which the ending of -o names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import check_options
from relayquant.cli.files import load_module
from relayquant.cli.output import ENDINGS, check_ending, write_module


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export", help="write a module as ONNX, Relay or a library", description=__doc__
    )
    parser.add_argument("model", type=Path, help="the .json of a quantized module")
    kinds = ", ".join(ENDINGS)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=f"with {kinds}"
    )
    parser.add_argument("--target", help="for a library (default: this machine)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    check_ending(options.output)
    check_options(options, outputs=(options.output,))
    for path in write_module(load_module(options.model), options.output, options.target):
        answer.add_file(path)
    return ExitCode.OK
