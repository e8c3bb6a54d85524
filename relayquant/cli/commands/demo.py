"""`relayquant demo`: quantize the built-in digits model and measure accuracy and speed."""

from __future__ import annotations

import argparse

import relayquant as rq
from relayquant.base.runtime import Machine
from relayquant.cli.measure import time_interleaved
from relayquant.cli.options import check_options, read_backend
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.demo import load_digits
from relayquant.errors import format_count
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.plots.text import summary_table


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    check_options(options, counts={"--batch": options.batch, "--repeat": options.repeat})
    demo = load_digits()
    mod, params = rq.load(demo.model_path)
    with output.open_progress() as progress:
        qmod = rq.quantize(
            mod,
            params,
            demo.calibration,
            backend=read_backend(options.backend),
            callbacks=(progress,),
        )
    modules = {"float": bind_model((mod, params)), "int8": qmod}
    models = {name: Machine(rq.compile(module)) for name, module in modules.items()}
    timed = demo.images[: options.batch]
    seconds = time_interleaved(list(models.values()), [timed], options.repeat)
    ratio = seconds[0] / seconds[1]
    rows = []
    for (name, model), median in zip(models.items(), seconds, strict=True):
        right = model.run("main", [demo.images])[0].argmax(1) == demo.labels
        size = count_constant_bytes(modules[name])
        rows.append(
            {"name": name, "accuracy": right.mean(), "bytes": size, "seconds": median / len(timed)}
        )
        values = {
            "accuracy": f"{right.mean():.2%} of {format_count(len(right), 'held-out digit')}",
            "constants": f"{size / 1000:.1f} kB",
            "speed": f"{median / len(timed) * 1e6:.2f} microseconds per digit "
            f"(median of {options.repeat} interleaved runs)",
        }
        output.print(summary_table(values, title=name))
    output.add_table("models", rows)
    output.add_values(speedup=ratio)
    output.print(f"int8 runs at {ratio:.2f} times the speed of float")
    output.add_ledger(rq.ledger(qmod), title="operators")
    return ExitCode.OK
