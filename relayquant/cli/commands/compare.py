"""`relayquant compare`: the difference between the outputs of a float model and its quantized
module.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

import relayquant as rq
from relayquant.analysis.outputs import (
    GapSums,
    Interface,
    OutputGap,
    find_agreement,
    order_inputs,
)
from relayquant.analysis.quiet_outputs import find_least_energies
from relayquant.base.runtime import Machine
from relayquant.base.storage.files import write_text
from relayquant.cli.commands.inspect import describe_outputs
from relayquant.cli.data import open_data
from relayquant.cli.files import load_module, load_options
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode, make_plain
from relayquant.data import StreamedDataset, count_samples, open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import ModelError
from relayquant.flow.refine.drift import StreamMeter
from relayquant.ir.agreement import Agreement, describe_sqnr
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.entry import name_main
from relayquant.plots.pictures import check_picture, plot_error_by_depth
from relayquant.plots.text import compare_table, summary_table
from relayquant.stages.preparation import prepare_module
from relayquant.stages.streams import open_streams


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    outputs = options.csv, options.plot
    check_options(options, counts={"--samples": options.samples}, outputs=outputs)
    if options.plot is not None:
        check_picture(options.plot)
    mod = name_main(bind_model(output.run("read model", load_options, options)))
    qmod = name_main(load_module(options.qmodel))
    inputs, quantized_inputs = describe_inputs(mod), describe_inputs(qmod)
    if [info.name for info in inputs] != [info.name for info in quantized_inputs]:
        raise ModelError(
            f"{options.model} has the inputs {[info.name for info in inputs]}, {options.qmodel} "
            f"{[info.name for info in quantized_inputs]}: these are different models.",
            code="RQ205",
        )
    streams = open_streams(mod, None, open_data(options, mod, None))
    dataset = open_dataset(streams, inputs)
    if options.samples is not None:
        dataset = take_samples(dataset, options.samples)
    machines = {
        name: Machine(output.run(f"compile {name}", rq.compile, module))
        for name, module in {"float model": mod, "quantized module": qmod}.items()
    }
    interface, samples = Interface.of(qmod), 0
    sums = GapSums(find_least_energies(prepare_module(mod)))
    for batch in output.follow("compare", dataset):
        expected = machines["float model"].run("main", order_inputs(mod, batch))
        integers = order_inputs(qmod, interface.to_inputs(batch))
        got = interface.to_real(machines["quantized module"].run("main", integers))
        check_shapes(expected, got)
        sums.update(expected, got, count_samples(batch))
        samples += count_samples(batch)
    gaps = sums.gaps
    agreement = find_agreement(gaps, samples)
    output.add_values(samples=samples, agreement=make_plain(agreement))
    names = [name for name, *_ in describe_outputs(mod)]
    rows = [describe_gap(*row) for row in zip(range(len(gaps)), names, gaps, strict=True)]
    output.add_table("outputs", rows)
    for name, gap in zip(names, gaps, strict=True):
        values: dict[str, Any] = {"agreement": str(find_agreement([gap], samples))}
        values["largest error"] = gap.largest
        output.print(summary_table(values, title=f"output {name}"))
    # Samples of a part of the data are no sequences.
    if isinstance(streams, StreamedDataset) and options.samples is None:
        meter = StreamMeter.of(mod, streams)
        if meter is not None:
            sqnr = output.run("compare sequences", meter.measure, qmod)
            output.add_values(stream_sqnr=make_plain(sqnr))
            output.print(f"at the end of sequences: {describe_sqnr(sqnr)}")
    output.print(describe_other(qmod, agreement))
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


def check_shapes(expected: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> None:
    """Raise ModelError if the numbers of outputs or their shapes differ."""
    shapes = [[array.shape for array in arrays] for arrays in (expected, got)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"The outputs have the shapes {shapes[0]} and {shapes[1]}: these are different models.",
            code="RQ205",
        )


def describe_gap(number: int, name: str, gap: OutputGap) -> dict[str, Any]:
    """Return a row of the table `outputs`. `top1` is the share of equal answers."""
    top1 = gap.equal / gap.samples if gap.samples else None
    row = {"output": number, "name": name, "max_error": gap.largest, "sqnr": gap.sqnr, "top1": top1}
    return make_plain(row)


def describe_other(qmod: tvm.IRModule, agreement: Agreement) -> str:
    """Return what `quantize` measured, if that differs, so that both can be told apart."""
    ledger = find_ledger(qmod)
    if ledger is None or ledger.guard is None or ledger.guard.agreement == agreement:
        return ""
    return f"quantize measured {ledger.guard.agreement}"
