"""`relayquant sensitivity`: the accuracy that each operator costs when only it is quantized."""

from __future__ import annotations

import argparse
import json

import relayquant as rq
from relayquant.base.storage.files import write_text
from relayquant.cli.data import open_data
from relayquant.cli.files import load_options
from relayquant.cli.options import check_options, read_backend
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.errors import ConfigError, format_count
from relayquant.plots.pictures import check_picture, plot_sensitivity
from relayquant.plots.text import sensitivity_table

#: operators that are printed without --all
SHOWN = 20


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    if (options.keep is None) != (options.output is None):
        raise ConfigError(
            "--keep N and -o FILE.json need each other: give both or neither.", code="RQ102"
        )
    counts = {"--samples": options.samples, "--keep": options.keep}
    check_options(options, counts=counts, outputs=(options.csv, options.output, options.plot))
    if options.plot is not None:
        check_picture(options.plot)
    mod, params = output.run("read model", load_options, options)
    data = open_data(options, mod, params)
    with output.open_progress() as progress:
        prepared = rq.prepare(
            mod,
            params,
            data,
            backend=read_backend(options.backend),
            effort=options.effort,
            callbacks=(progress,),
        )
        most = sum(operator.quantized for operator in prepared.plan.operators)
        if options.keep is not None and options.keep > most:
            raise ConfigError(
                f"--keep is {options.keep}; allowed: at most {format_count(most, 'operator')}, "
                "the number that can be ranked.",
                code="RQ102",
            )
        prepared = rq.calibrate(prepared, data, callbacks=(progress,))
        report = rq.sensitivity(prepared, data, samples=options.samples, callbacks=(progress,))
    output.add_values(metric=report.metric, score=report.score, samples=report.samples)
    output.add_table("operators", report.rows)
    shown = None if output.show_all else SHOWN
    output.print(sensitivity_table(report, title=str(options.model), rows=shown))
    if options.csv is not None:
        write_text(options.csv, report.to_csv())
        output.add_file(options.csv)
    if options.plot is not None:
        plot_sensitivity(report, options.plot)
        output.add_file(options.plot)
    if options.keep is not None:
        text = json.dumps(report.to_mapping(options.keep).to_dict(), indent=1)
        write_text(options.output, text)
        output.add_file(options.output)
    return ExitCode.OK
