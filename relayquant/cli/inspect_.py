"""`relayquant inspect`: what a quantized module has in float and why (--all: every operator), or
the operators of a float model.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import add_model
from relayquant.cli.files import load_model
from relayquant.errors import format_count
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.ir.rewrite.graph import Graph
from relayquant.plots import summary_table


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("inspect", help="show what is in a model", description=__doc__)
    add_model(parser, "a module's .json, or a float model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    mod, _ = load_model(options.model, options.shape, options.input)
    ledger = find_ledger(mod)
    size = count_constant_bytes(mod)
    answer.note(path=options.model, bytes=size)
    if ledger is not None:
        answer.add_ledger(ledger, title=str(options.model))
    else:
        graph = Graph(mod)
        names = [graph.op_name(binding.var) for binding in graph.bindings]
        counts = Counter(name.removeprefix("relax.") for name in names if name)
        rows = [{"op": op, "count": count} for op, count in counts.most_common()]
        answer.note(operators=sum(counts.values()))
        answer.add_table("operators", rows)
        title = f"{options.model}: operators"
        answer.say(summary_table(dict(counts.most_common()), title=title))
    answer.say(f"constants: {format_count(size, 'byte')}")
    return ExitCode.OK
