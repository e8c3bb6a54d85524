"""`relayquant backend`: what a backend can run; with -o as a file to change, for `--backend`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from relayquant.base.storage.files import write_text
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import check_options, read_backend
from relayquant.config import BackendConfig
from relayquant.plots.terminal_table import Column, Fit, FittedTable
from relayquant.stages.backends import resolve_backend


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "backend", help="say what a backend can run, or write it as a file", description=__doc__
    )
    parser.add_argument(
        "backend", nargs="?", metavar="NAME", help="or a FILE.json (default: this machine's)"
    )
    parser.add_argument(
        "pattern", nargs="?", metavar="OPERATOR", help="only this one, e.g. nn.conv2d"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="write it there")
    parser.set_defaults(run=run)


def operator_table(backend: BackendConfig) -> FittedTable:
    """A line for each operator, with all combinations of dtypes that any of its patterns runs."""
    found: dict[str, dict[str, None]] = {}
    for row in backend.patterns:
        dtypes = found.setdefault(row.pattern.op.removeprefix("relax."), {})
        dtypes.update(dict.fromkeys(dtype.description for dtype in row.dtypes))
    texts = ["; ".join(dtypes) for dtypes in found.values()]
    return FittedTable([Column("operator", [*found], Fit.NAME), Column("dtypes", texts)])


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    check_options(options, outputs=(options.output,))
    backend = resolve_backend(read_backend(options.backend))
    data = backend.to_dict()
    answer.add_table("patterns", data.pop("patterns"))
    answer.note(**data)
    if options.pattern is not None or answer.show_all:
        answer.say(backend.explain(options.pattern))
    else:
        answer.say(f"backend {backend.name} runs, on integers:", operator_table(backend))
    if options.output is not None:
        text = json.dumps(backend.to_dict(), indent=1)
        write_text(options.output, text)
        answer.add_file(options.output)
    return ExitCode.OK
