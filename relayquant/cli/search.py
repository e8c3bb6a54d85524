"""`relayquant search`: the fewest operators that have to stay in float for a metric to be kept.

Writes a configuration for `relayquant quantize --config`. `quantize --metric` does the same and
writes the module. Ctrl-C leaves a file from which the same command goes on. Exit code 1 where
nothing keeps the metric within --max-drop.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.base.storage.files import write_text
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import add_model, check_options
from relayquant.cli.data import add_data, open_data
from relayquant.cli.files import load_model
from relayquant.cli.quantizing import (
    add_quantizing,
    add_search,
    check_search,
    read_quantizing,
    read_search,
)
from relayquant.cli.resume import KeptWork


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "search",
        help="find what has to stay in float",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_data(parser)
    add_quantizing(parser)
    add_search(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.json", help="default: MODEL with .patch.json"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    output = options.output or options.model.with_suffix(".patch.json")
    if options.metric is None:
        options.metric = "agreement" if options.labels is None else "top1"
    check_search(options)
    check_options(options, outputs=(output,))
    quantizing = read_quantizing(options)
    mod, params = load_model(options.model, options.shape, options.input)
    data = open_data(options, mod, params)
    kept = KeptWork.of(options, output)
    with answer.open_progress() as progress, kept.keep():
        qmod = rq.quantize(
            mod,
            params,
            data,
            callbacks=(progress,),
            **quantizing,
            **read_search(options),
            **kept.arguments,
        )
    found = rq.ledger(qmod).search
    assert found is not None  # there is a metric
    text = json.dumps(found.mapping, indent=1)
    write_text(output, text)
    answer.note(metric=options.metric, score=found.score, float_score=found.float_score)
    answer.note(is_met=found.is_met, trials=found.trials)
    answer.add_table("reverted", [{"name": n, "dtype": found.dtype} for n in found.reverted])
    answer.say(str(found))
    answer.add_file(output)
    if not found.is_met:
        return ExitCode.FOUND
    kept.remove()
    return ExitCode.OK
