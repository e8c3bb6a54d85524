"""`relayquant report`: write a page on what quantization did to a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.base.storage.files import writing
from relayquant.cli.data import make_top1, open_data
from relayquant.cli.files import load_module, load_options
from relayquant.cli.options import check_options, name_words, read_backend
from relayquant.cli.output import CommandOutput, ExitCode, make_plain
from relayquant.errors import DataError
from relayquant.ir.rewrite.bind import bind_model
from relayquant.plots.build import Report, build_report
from relayquant.plots.page import check_installed
from relayquant.plots.pictures import (
    DrawnRange,
    check_picture,
    collect_ranges,
    draw_ranges,
    plot_error_by_depth,
    plot_latency,
    plot_sensitivity,
)
from relayquant.plots.report_data import ReportSettings
from relayquant.plots.verdict import Verdict


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    path = options.output or options.model.with_suffix(".html")
    check_options(options, counts={"--samples": options.samples}, outputs=(path,))
    check_installed()
    if options.pictures is not None:
        check_picture("ranges.png")
    if options.labels is not None and not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.", code="RQ301")
    if options.pictures is not None:
        with writing(options.pictures, "--pictures must be a writable folder."):
            options.pictures.mkdir(exist_ok=True)
    mod, params = output.run("read model", load_options, options)
    data = open_data(options, mod, params)
    backend = read_backend(options.backend)
    other = None if options.other is None else load_module(options.other)
    ranges: list[DrawnRange] = []
    with output.open_progress() as progress:
        if options.qmodel is not None:
            qmod = load_module(options.qmodel)
        else:
            qmod = rq.quantize(
                mod, params, data, backend=backend, effort=options.effort, callbacks=(progress,)
            )
        if options.pictures is not None:
            prepared = rq.prepare(
                mod, params, data, backend=backend, effort=options.effort, callbacks=(progress,)
            )
            prepared = rq.calibrate(prepared, data, callbacks=(progress,))
            ranges = collect_ranges(prepared, data, samples=options.samples)
        settings = ReportSettings(
            metric=None if options.labels is None else make_top1(options),
            latency=options.latency,
            other=None if other is None else bind_model(other),
            samples=options.samples,
            backend=backend,
            title=options.model.name,
            words=name_words(options, options.qmodel),
        )
        report = build_report(mod, params, qmod, data, settings, callbacks=(progress,))
    report.save(path)
    found = report.data
    gaps = found.compare.outputs
    verdict = Verdict.of(found)
    output.add_values(verdict=make_plain(verdict), agreement=make_plain(found.compare.agreement))
    output.add_values(samples=found.compare.samples, shares=found.shares, bytes=found.sizes)
    output.add_values(score=found.score, latencies=found.latencies or None)
    output.add_table("outputs", [{"sqnr": g.sqnr, "disagreement": g.disagreement} for g in gaps])
    suggestion = found.suggestion.names if found.suggestion else ()
    output.add_table("suggestion", [{"name": name, "dtype": "float32"} for name in suggestion])
    output.print(str(report))
    output.add_file(path)
    if options.pictures is not None:
        output.add_table("ranges", [describe_range(each) for each in ranges])
        for picture in draw_pictures(report, ranges, options.pictures):
            output.add_file(picture)
    return ExitCode.OK


def describe_range(drawn: DrawnRange) -> dict[str, Any]:
    """Return a row of the table `ranges`."""
    names = ("name", "unit", "chosen", "outside")
    return {name: getattr(drawn, name) for name in names}


def draw_pictures(report: Report, ranges: list[DrawnRange], folder: Path) -> list[Path]:
    """Draw each measurement into a file. Return the written files."""
    found = report.data
    drawn = {
        "ranges": (draw_ranges, ranges),
        "error": (plot_error_by_depth, found.compare if found.compare.rows else None),
        "sensitivity": (plot_sensitivity, found.ranking),
        "latency": (plot_latency, found.latencies),
    }
    paths = []
    for name, (draw, measured) in drawn.items():
        if measured:
            paths.append(folder / f"{name}.png")
            draw(measured, paths[-1])
    return paths
