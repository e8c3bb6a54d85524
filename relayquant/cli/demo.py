"""`relayquant demo`: quantizes the built-in digits model and measures what it cost and gained."""

from __future__ import annotations

import argparse
from typing import Any

import relayquant as rq
from relayquant.analysis.size import count_constant_bytes
from relayquant.cli.arguments import add_backend, check_options
from relayquant.cli.files import bind_weights
from relayquant.cli.measure import time_interleaved
from relayquant.demo import load_digits
from relayquant.errors import format_count
from relayquant.report import ProgressReport, ledger_table, make_console, summary_table
from relayquant.runtime import Executor


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo", help="quantize and measure the built-in example", description=__doc__
    )
    add_backend(parser)
    parser.add_argument(
        "--batch", type=int, default=64, help="digits in one timed run (default: 64)"
    )
    parser.add_argument("--runs", type=int, default=50, help="timed runs of each (default: 50)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_options(options, counts={"--batch": options.batch, "--runs": options.runs})
    demo = load_digits()
    mod, params = rq.load(demo.model_path)
    with ProgressReport() as progress:
        qmod = rq.quantize(
            mod, params, demo.calibration, backend=options.backend, callbacks=(progress,)
        )
    modules = {"float": bind_weights(mod, params), "int8": qmod}
    models = {name: Executor(rq.compile(module)) for name, module in modules.items()}
    timed = demo.images[: options.batch]
    seconds = time_interleaved(list(models.values()), [timed], options.runs)

    console = make_console()
    console.print(ledger_table(rq.ledger(qmod).to_dict()["operators"], title="operators"))
    for (name, model), median in zip(models.items(), seconds, strict=True):
        right = model.run("main", [demo.images])[0].argmax(1) == demo.labels
        values = {
            "accuracy": f"{right.mean():.2%} of {format_count(len(right), 'held-out digit')}",
            "constants": f"{count_constant_bytes(modules[name]) / 1000:.1f} kB",
            "speed": f"{median / len(timed) * 1e6:.2f} microseconds per digit "
            f"(median of {options.runs} interleaved runs)",
        }
        console.print(summary_table(values, title=name))
    console.print(f"int8 runs at {seconds[0] / seconds[1]:.2f} times the speed of float")
    return 0
