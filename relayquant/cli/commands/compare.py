"""`relayquant compare`: the difference between the outputs of a float model and its quantized
module.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import relayquant as rq
from relayquant.base.runtime import Machine
from relayquant.base.storage.files import write_text
from relayquant.cli.data import open_data
from relayquant.cli.files import load_model, load_module
from relayquant.cli.measure import compare_outputs
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode, make_plain
from relayquant.data import count_samples, open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import ModelError
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.entry import name_main
from relayquant.plots.pictures import check_picture, plot_error_by_depth
from relayquant.plots.text import compare_table, summary_table


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    outputs = options.csv, options.plot
    check_options(options, counts={"--samples": options.samples}, outputs=outputs)
    if options.plot is not None:
        check_picture(options.plot)
    mod = name_main(bind_model(load_model(options.model, options.shape, options.input)))
    qmod = name_main(load_module(options.qmodel))
    inputs, quantized_inputs = describe_inputs(mod), describe_inputs(qmod)
    if [info.name for info in inputs] != [info.name for info in quantized_inputs]:
        raise ModelError(
            f"{options.model} has the inputs {[info.name for info in inputs]}, {options.qmodel} "
            f"{[info.name for info in quantized_inputs]}: these are different models.",
            code="RQ205",
        )
    dataset = open_dataset(open_data(options, mod, None), inputs)
    if options.samples is not None:
        dataset = take_samples(dataset, options.samples)
    executors = [Machine(rq.compile(module)) for module in (mod, qmod)]
    # [batch][model][output] -> [model][output], with all batches in one array
    runs = [
        [executor.run("main", [*batch.values()]) for executor in executors] for batch in dataset
    ]
    expected, actual = (
        [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
        for outputs in zip(*runs, strict=True)
    )
    rows = compare_outputs(expected, actual)
    samples = sum(count_samples(batch) for batch in dataset)
    output.add_values(samples=samples)
    output.add_table("outputs", [{"output": i, **make_plain(row)} for i, row in enumerate(rows)])
    for index, row in enumerate(rows):
        values: dict[str, Any] = {
            "samples": samples,
            "largest error": row.max_error,
            "SQNR [dB]": row.sqnr,
        }
        if row.top1 is not None:
            values["same top-1"] = f"{row.top1:.2%}"
        output.print(summary_table(values, title=f"output {index}"))
    if options.values or options.csv is not None or options.plot is not None:
        report = rq.compare(mod, None, qmod, dataset)
        output.add_table("values", report.rows)
        if options.values:
            output.print(compare_table(report, title="values", show_all=output.show_all))
        if options.csv is not None:
            write_text(options.csv, report.to_csv())
            output.add_file(options.csv)
        if options.plot is not None:
            plot_error_by_depth(report, options.plot)
            output.add_file(options.plot)
    return ExitCode.OK
