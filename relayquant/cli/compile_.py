"""`relayquant compile`: a quantized module or a float model becomes a shared library."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.base.storage.files import write_whole
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import add_model, add_tune, check_options
from relayquant.cli.files import bind_weights, load_model
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.errors import ConfigError
from relayquant.ir.ledger import find_ledger
from relayquant.stages.conversion.partial import has_quantized_values


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compile", help="compile to a library", description=__doc__)
    add_model(parser, "a module's .json, or a float model")
    parser.add_argument(
        "--target", help='for instance "llvm -mcpu=cascadelake" (default: this machine)'
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.so", help="default: MODEL with .so"
    )
    add_tune(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    output = options.output or options.model.with_suffix(".so")
    if output.suffix not in (".so", ".dylib", ".dll"):
        raise ConfigError(
            f"-o {output}: a library is written as .so, .dylib or .dll.", code="RQ102"
        )
    check_options(options, outputs=(output,))
    target = resolve_target(options.target)
    mod = bind_weights(*load_model(options.model, options.shape, options.input))
    if find_ledger(mod) is None and has_quantized_values(mod):
        # Quantized by another tool, with its own parameters: integers as the target takes them.
        mod = rq.lower(mod, rq.default_backend(target))
    executable = rq.compile(mod, target=target, tune=options.tune)
    write_whole(output, lambda path: executable.export_library(str(path)))
    answer.add_file(output)
    return ExitCode.OK
