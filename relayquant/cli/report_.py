"""`relayquant report`: a page of what quantization did to a model. Open it in a browser.

Without --quantized the model is quantized first, as `relayquant quantize` does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import (
    add_backend,
    add_effort,
    add_model,
    check_options,
    read_backend,
)
from relayquant.cli.data import add_data, make_top1, open_data
from relayquant.cli.files import load_model, load_module
from relayquant.errors import DataError
from relayquant.plots.page import check_installed, count_shares


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write a page of what quantization did",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "the float model")
    add_data(parser)
    parser.add_argument(
        "--quantized", type=Path, metavar="FILE.json", help="the module that was made of it"
    )
    parser.add_argument(
        "--other", type=Path, metavar="FILE.json", help="another module, to be shown beside it"
    )
    add_backend(parser)
    add_effort(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.html", help="default: MODEL with .html"
    )
    parser.add_argument(
        "--latency", action="store_true", help="compile both models, and time them and each kernel"
    )
    parser.add_argument(
        "--samples", type=int, default=32, metavar="N", help="measured on so many (default: 32)"
    )
    parser.add_argument(
        "--labels", type=Path, metavar="FILE.txt", help="classes, for the share of right answers"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    output = options.output or options.model.with_suffix(".html")
    check_options(options, counts={"--samples": options.samples}, outputs=(output,))
    check_installed()
    if options.labels is not None and not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.", code="RQ301")
    mod, params = load_model(options.model, options.shape, options.input)
    data = open_data(options, mod, params)
    backend = read_backend(options.backend)
    other = None if options.other is None else load_module(options.other)
    with answer.open_progress() as progress:
        if options.quantized is not None:
            qmod = load_module(options.quantized)
        else:
            qmod = rq.quantize(
                mod,
                params,
                data,
                backend=backend,
                effort=options.effort,
                callbacks=(progress,),
            )
        report = rq.make_report(
            mod,
            qmod,
            data,
            params,
            backend=backend,
            metric=None if options.labels is None else make_top1(options),
            latency=options.latency,
            other=other,
            samples=options.samples,
            title=options.model.name,
            callbacks=(progress,),
        )
    report.save(output)
    data = report.data
    gaps = data.compare.outputs
    answer.note(samples=data.compare.samples, shares=count_shares(data), bytes=data.sizes)
    answer.note(score=data.score, latencies=data.latencies or None)
    answer.add_table("outputs", [{"sqnr": g.sqnr, "disagreement": g.disagreement} for g in gaps])
    suggestion = data.suggestion.names if data.suggestion else ()
    answer.add_table("suggestion", [{"name": name, "dtype": "float32"} for name in suggestion])
    answer.say(str(report))
    answer.add_file(output)
    return ExitCode.OK
