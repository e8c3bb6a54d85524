"""`relayquant sensitivity`: which operators lose accuracy, each quantized alone.

With --keep, a configuration that leaves the worst ones in float, for `quantize --config`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.base.storage.files import write_text
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import (
    add_backend,
    add_effort,
    add_model,
    check_options,
    read_backend,
)
from relayquant.cli.data import add_data, open_data
from relayquant.cli.files import load_model
from relayquant.errors import ConfigError, format_count
from relayquant.plots import sensitivity_table

#: operators that are printed without --all
SHOWN = 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sensitivity", help="rank operators by the accuracy they cost", description=__doc__
    )
    add_model(parser)
    add_data(parser)
    add_backend(parser)
    add_effort(parser)
    parser.add_argument(
        "--samples", type=int, default=64, metavar="N", help="samples to measure on (default: 64)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    parser.add_argument(
        "--keep", type=int, metavar="N", help="write a configuration with N operators in float"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.json", help="where --keep writes to"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    if (options.keep is None) != (options.output is None):
        raise ConfigError(
            "--keep N and -o FILE.json go together: give both, or none of them.", code="RQ102"
        )
    counts = {"--samples": options.samples, "--keep": options.keep}
    check_options(options, counts=counts, outputs=(options.csv, options.output))
    mod, params = load_model(options.model, options.shape, options.input)
    data = open_data(options, mod, params)
    with answer.open_progress() as progress:
        prepared = rq.prepare(
            mod,
            params,
            None,
            read_backend(options.backend),
            dataset=data,
            effort=options.effort,
            callbacks=(progress,),
        )
        most = sum(operator.quantized for operator in prepared.plan.operators)
        if options.keep is not None and options.keep > most:
            raise ConfigError(
                f"--keep is {options.keep}; the model has {format_count(most, 'operator')} to "
                "rank.",
                code="RQ102",
            )
        prepared = rq.calibrate(prepared, data, callbacks=(progress,))
        report = rq.sensitivity(prepared, data, samples=options.samples, callbacks=(progress,))
    answer.note(metric=report.metric, score=report.score, samples=report.samples)
    answer.add_table("operators", report.rows)
    shown = None if answer.show_all else SHOWN
    answer.say(sensitivity_table(report, title=str(options.model), rows=shown))
    if options.csv is not None:
        write_text(options.csv, report.to_csv())
        answer.add_file(options.csv)
    if options.keep is not None:
        text = json.dumps(report.to_mapping(options.keep).to_dict(), indent=1)
        write_text(options.output, text)
        answer.add_file(options.output)
    return ExitCode.OK
