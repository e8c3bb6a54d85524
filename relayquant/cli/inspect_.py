"""`relayquant inspect`: the ledger of a quantized module, or the operators of a float model."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from relayquant.analysis.size import count_constant_bytes
from relayquant.cli.arguments import add_model
from relayquant.cli.files import load_model
from relayquant.errors import format_count
from relayquant.ledger import find_ledger
from relayquant.report import ledger_table, list_findings, make_console, summary_table
from relayquant.rewrite.graph import Graph


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("inspect", help="show what is in a model", description=__doc__)
    add_model(parser, "a module's .json, or a float model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    mod, _ = load_model(options.model, options.shape, options.input)
    console = make_console()
    ledger = find_ledger(mod)
    if ledger is not None:
        console.print(ledger_table(ledger.to_dict()["operators"], title=str(options.model)))
        for line in list_findings(ledger):
            console.print(line)
    else:
        graph = Graph(mod)
        names = [graph.op_name(binding.var) for binding in graph.bindings]
        counts = Counter(name.removeprefix("relax.") for name in names if name)
        title = f"{options.model}: operators"
        console.print(summary_table(dict(counts.most_common()), title=title))
    console.print(f"constants: {format_count(count_constant_bytes(mod), 'byte')}")
    return 0
