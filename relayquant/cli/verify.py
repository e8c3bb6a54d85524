"""`relayquant verify`: does a compiled module compute what the numpy reference does? Bit for bit.

Exit code 1 where it does not.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from relayquant.cli.answer import Answer, ExitCode, make_plain
from relayquant.cli.arguments import check_options
from relayquant.cli.data import add_data, open_data
from relayquant.cli.files import load_module
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import format_count
from relayquant.flow.evaluation import compile_to_verify


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare compiled code with the reference, bit for bit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="the .json of a quantized module")
    add_data(parser)
    parser.add_argument("--target", help="one that this machine can run (default: this machine)")
    parser.add_argument(
        "--batches", type=int, default=1, metavar="N", help="run so many batches (default: 1)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    check_options(options, counts={"--batches": options.batches})
    mod = load_module(options.model)
    inputs = describe_inputs(mod)
    data = open_dataset(open_data(options, mod, None), inputs)
    reports = []
    verifier = compile_to_verify(mod, options.target)
    for number, batch in enumerate(islice(data, options.batches)):
        found = verifier.compare(batch)
        reports.append(found)
        if not found.is_equal:
            answer.say(f"batch {number}: {found}")
    is_equal = all(found.is_equal for found in reports)
    answer.note(is_equal=is_equal, batches=len(reports))
    answer.note(compared=sum(found.compared for found in reports))
    rows = [
        {"batch": number, **make_plain(difference)}
        for number, found in enumerate(reports)
        for difference in found.differences
    ]
    answer.add_table("differences", rows)
    batches = format_count(len(reports), "batch")
    if is_equal:
        compared = format_count(sum(found.compared for found in reports), "value")
        answer.say(f"bit for bit as the reference: {compared}, {batches}")
    return ExitCode.OK if is_equal else ExitCode.FOUND
