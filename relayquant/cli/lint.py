"""`relayquant lint`: what looks wrong with calibration data, before it is used.

Exit code 1 where something does, other than a mere hint.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.analysis.lint import find_unchecked
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import add_model, check_options
from relayquant.cli.data import add_data, open_data, read_classes
from relayquant.cli.files import load_model
from relayquant.plots import findings_table


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "lint", help="look for mistakes in calibration data", description=__doc__
    )
    add_model(parser)
    add_data(parser)
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE.txt",
        help="classes, as for quantize: also how often the float model is right, and whether it is "
        "more often so with pictures prepared in another way",
    )
    parser.add_argument(
        "--growth",
        action="store_true",
        help="also: after how many samples the range of an input stops growing",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    check_options(options)
    labels = None if options.labels is None else read_classes(options)
    mod, params = load_model(options.model, options.shape, options.input)
    data = open_data(options, mod, params)
    findings = rq.lint(mod, params, data, labels)
    answer.say(findings_table(findings, title=f"{options.data} for {options.model}"))
    if labels is None and options.data.is_dir():
        for name in find_unchecked(mod, params):
            answer.say(
                f"Whether pictures for {name!r} are normalized as in training cannot be seen: no "
                "batch norm follows the first layer. --labels tells."
            )
    counts = Counter(finding.severity.value for finding in findings)
    answer.note(**{severity.value: counts[severity.value] for severity in rq.Severity})
    answer.add_table("findings", findings)
    if options.growth:
        rows: list[dict[str, Any]] = []
        for name, curve in rq.measure_growth(mod, params, data).items():
            steps = ", ".join(f"{share:.0%} after {samples}" for samples, share in curve)
            answer.say(f"range of {name}: {steps}")
            rows += [{"input": name, "samples": count, "share": share} for count, share in curve]
        answer.add_table("growth", rows)
    is_clean = all(finding.severity is rq.Severity.INFO for finding in findings)
    return ExitCode.OK if is_clean else ExitCode.FOUND
