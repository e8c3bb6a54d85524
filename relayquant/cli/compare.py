"""`relayquant compare`: how near the outputs of a float model and its quantized module are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.base.storage.files import write_text
from relayquant.cli.answer import Answer, ExitCode, make_plain
from relayquant.cli.arguments import add_model, check_options
from relayquant.cli.data import add_data, open_data
from relayquant.cli.files import bind_weights, load_model, load_module
from relayquant.cli.measure import compare_outputs
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ModelError
from relayquant.ir.rewrite.entry import name_main
from relayquant.plots import summary_table
from relayquant.plots.pictures import check_picture, plot_error_by_depth
from relayquant.plots.text import compare_table


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare", help="compare a quantized module with its float model", description=__doc__
    )
    add_model(parser, "the float model")
    parser.add_argument("quantized", type=Path, help="the .json of its quantized module")
    add_data(parser)
    parser.add_argument("--batches", type=int, metavar="N", help="use the first N batches only")
    parser.add_argument("--values", action="store_true", help="also: which values inside are off")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write these lines as CSV")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw SQNR along the depth")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    outputs = options.csv, options.plot
    check_options(options, counts={"--batches": options.batches}, outputs=outputs)
    if options.plot is not None:
        check_picture(options.plot)
    mod = bind_weights(*load_model(options.model, options.shape, options.input))
    qmod = name_main(load_module(options.quantized))
    inputs, quantized_inputs = describe_inputs(mod), describe_inputs(qmod)
    if [info.name for info in inputs] != [info.name for info in quantized_inputs]:
        raise ModelError(
            f"{options.model} has the inputs {[info.name for info in inputs]}, {options.quantized} "
            f"{[info.name for info in quantized_inputs]}: these are different models.",
            code="RQ205",
        )
    dataset = open_dataset(open_data(options, mod, None), inputs)
    if options.batches is not None:
        dataset = dataset.head(options.batches)
    executors = [Executor(rq.compile(module)) for module in (mod, qmod)]
    # [batch][model][output] -> [model][output], all batches in one array
    runs = [
        [executor.run("main", [*batch.values()]) for executor in executors] for batch in dataset
    ]
    expected, actual = (
        [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
        for outputs in zip(*runs, strict=True)
    )
    rows = compare_outputs(expected, actual)
    answer.note(batches=len(runs))
    answer.add_table("outputs", [{"output": i, **make_plain(row)} for i, row in enumerate(rows)])
    for index, row in enumerate(rows):
        values: dict[str, Any] = {
            "batches": len(runs),
            "largest error": row.max_error,
            "SQNR [dB]": row.sqnr,
        }
        if row.top1 is not None:
            values["same top-1"] = f"{row.top1:.2%}"
        answer.say(summary_table(values, title=f"output {index}"))
    if options.values or options.csv is not None or options.plot is not None:
        report = rq.compare(mod, qmod, dataset)
        answer.add_table("values", report.rows)
        if options.values:
            answer.say(compare_table(report, title="values", show_all=answer.show_all))
        if options.csv is not None:
            write_text(options.csv, report.to_csv())
            answer.add_file(options.csv)
        if options.plot is not None:
            plot_error_by_depth(report, options.plot)
            answer.add_file(options.plot)
    return ExitCode.OK
