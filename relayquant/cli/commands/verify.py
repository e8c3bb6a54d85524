"""`relayquant verify`: compare a compiled module with the numpy reference."""

from __future__ import annotations

import argparse

from relayquant.cli.data import open_data
from relayquant.cli.files import load_module
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode, make_plain
from relayquant.data import count_samples, open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import format_count
from relayquant.flow.evaluation import compile_to_verify
from relayquant.stages.streams import follow_state


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    check_options(options, counts={"--samples": options.samples})
    mod = load_module(options.qmodel)
    inputs = describe_inputs(mod)
    data = open_dataset(follow_state(mod, open_data(options, mod, None)), inputs)
    data = take_samples(data, options.samples)
    reports, samples = [], 0
    verifier = compile_to_verify(mod, options.target)
    for number, batch in enumerate(data):
        found = verifier.compare(batch)
        reports.append(found)
        samples += count_samples(batch)
        if not found.is_equal:
            output.print(f"batch {number}: {found}")
    is_equal = all(found.is_equal for found in reports)
    output.add_values(is_equal=is_equal, samples=samples)
    output.add_values(compared=sum(found.compared for found in reports))
    rows = [
        {"batch": number, **make_plain(difference)}
        for number, found in enumerate(reports)
        for difference in found.differences
    ]
    output.add_table("differences", rows)
    if is_equal:
        compared = format_count(sum(found.compared for found in reports), "value")
        output.print(f"bit for bit as the reference: {compared}, {format_count(samples, 'sample')}")
    return ExitCode.OK if is_equal else ExitCode.FOUND
