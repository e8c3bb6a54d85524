"""`relayquant plot`: one picture, as .png, .svg or .pdf.

ranges       histograms of weights and activations, with the ranges that calibration chose
sensitivity  what each operator costs at the outputs when it alone is quantized
error        SQNR of every value along the depth (takes --quantized, or quantizes)
latency      time of a run, float and int8 (takes --quantized, or quantizes)
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

import relayquant as rq
from relayquant.analysis.latency import measure_latency
from relayquant.analysis.outputs import order_inputs
from relayquant.analysis.sensitivity import take_samples
from relayquant.base.runtime import Executor
from relayquant.cli.answer import Answer, ExitCode, make_plain
from relayquant.cli.arguments import (
    add_backend,
    add_effort,
    add_model,
    check_options,
    read_backend,
)
from relayquant.cli.data import add_data, open_data
from relayquant.cli.files import bind_weights, load_model, load_module
from relayquant.cli.measure import bind_run
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.ir.rewrite.entry import name_main
from relayquant.plots import ProgressReport
from relayquant.plots.pictures import check_picture, collect_ranges
from relayquant.plots.pictures import draw_ranges as draw_figure
from relayquant.stages.prepared import PreparedModel

#: turns of each model when times are measured
TURNS = 20


class Picture(enum.Enum):
    """What is drawn; the module's text says what that is."""

    RANGES = "ranges"
    SENSITIVITY = "sensitivity"
    ERROR = "error"
    LATENCY = "latency"


@dataclass(frozen=True)
class Job:
    """What a picture is made of."""

    options: argparse.Namespace
    mod: tvm.IRModule
    data: Any
    progress: ProgressReport

    def calibrate(self) -> PreparedModel:
        """The calibrated model."""
        options, callbacks = self.options, (self.progress,)
        prepared = rq.prepare(
            self.mod,
            None,
            None,
            read_backend(options.backend),
            dataset=self.data,
            effort=options.effort,
            callbacks=callbacks,
        )
        return rq.calibrate(prepared, self.data, callbacks=callbacks)

    def quantize(self) -> tvm.IRModule:
        """The module of --quantized, or a new one."""
        if self.options.quantized is not None:
            return name_main(load_module(self.options.quantized))
        prepared = self.calibrate()
        return rq.lower(rq.convert_to_reference(prepared), prepared.backend)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="draw ranges, sensitivity, error or latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("picture", choices=[kind.value for kind in Picture], help="see above")
    add_model(parser, "the float model")
    add_data(parser)
    parser.add_argument(
        "--quantized", type=Path, metavar="FILE.json", help="the module that was made of it"
    )
    add_backend(parser)
    add_effort(parser)
    parser.add_argument(
        "--samples", type=int, default=32, metavar="N", help="measured on so many (default: 32)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.png", help="default: MODEL with .PICTURE.png"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    kind = Picture(options.picture)
    output = options.output or options.model.with_suffix(f".{kind.value}.png")
    if options.quantized is not None and kind not in (Picture.ERROR, Picture.LATENCY):
        raise ConfigError(
            f"--quantized: {kind.value} is drawn of a model calibrated here.", code="RQ102"
        )
    check_options(options, counts={"--samples": options.samples}, outputs=(output,))
    check_picture(output)
    mod, params = load_model(options.model, options.shape, options.input)
    data = open_data(options, mod, params)
    with answer.open_progress() as progress:
        rows = DRAW[kind](Job(options, bind_weights(mod, params), data, progress), output)
    answer.note(picture=kind.value)
    answer.add_table(kind.value, rows)
    answer.add_file(output)
    return ExitCode.OK


def draw_ranges(job: Job, output: Path) -> list[Any]:
    prepared, samples = job.calibrate(), job.options.samples
    found = collect_ranges(prepared, job.data, samples=samples)
    draw_figure(found, output)
    return [
        {"name": r.name, "unit": r.unit, "chosen": r.chosen, "outside": r.outside} for r in found
    ]


def draw_sensitivity(job: Job, output: Path) -> list[Any]:
    report = rq.sensitivity(
        job.calibrate(), job.data, samples=job.options.samples, callbacks=(job.progress,)
    )
    rq.plot_sensitivity(report, output)
    return [*report.rows]


def draw_error(job: Job, output: Path) -> list[Any]:
    data = open_dataset(job.data, describe_inputs(job.mod))
    batches = take_samples(data, job.options.samples)
    report = rq.compare(job.mod, job.quantize(), batches)
    rq.plot_error_by_depth(report, output)
    return [*report.rows]


def draw_latency(job: Job, output: Path) -> list[Any]:
    batch = next(iter(open_dataset(job.data, describe_inputs(job.mod))))
    runs = {
        name: bind_run(Executor(rq.compile(module)), order_inputs(module, batch))
        for name, module in {"float": job.mod, "int8": job.quantize()}.items()
    }
    latencies = measure_latency(runs, TURNS)
    rq.plot_latency(latencies, output)
    return [{"name": name, **make_plain(row)} for name, row in latencies.items()]


DRAW: dict[Picture, Callable[[Job, Path], list[Any]]] = {
    Picture.RANGES: draw_ranges,
    Picture.SENSITIVITY: draw_sensitivity,
    Picture.ERROR: draw_error,
    Picture.LATENCY: draw_latency,
}
