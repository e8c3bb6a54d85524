"""`relayquant quantize`: float model and calibration data -> quantized module."""

from __future__ import annotations

import argparse
import json
from typing import Any

import relayquant as rq
from relayquant.base.storage.files import ARCHIVE_SUFFIX, write_text
from relayquant.cli.data import open_data
from relayquant.cli.files import check_ending, load_options, write_module
from relayquant.cli.options import check_options, name_words
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.cli.quantizing import (
    check_search,
    open_workers,
    read_dtypes,
    read_quantizing,
    read_search,
)
from relayquant.cli.resume import ResumeState
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.errors import ConfigError
from relayquant.plots.build import build_report
from relayquant.plots.page import check_installed
from relayquant.plots.report_data import ReportSettings


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    path = options.output or options.model.with_suffix(f".int8{ARCHIVE_SUFFIX}")
    check_ending(path)
    check_search(options)
    check_modes(options)
    outputs = path, options.report, options.save_config
    check_options(options, counts={"--workers": options.workers}, outputs=outputs)
    if options.target is not None:
        resolve_target(options.target)
    if options.report is not None:
        check_installed()
    settings = read_settings(options)
    mod, params = output.run("read model", load_options, options)
    data = open_data(options, mod, params)
    kept = ResumeState.of(options, path, is_search=options.metric is not None)
    with output.open_progress() as progress:
        with kept.keep(), open_workers(options.workers) as executor:
            settings |= {} if executor is None else {"workers": executor}
            qmod = rq.quantize(
                mod, params, data, callbacks=(progress,), **settings, **kept.arguments
            )
        ledger = rq.ledger(qmod)
        output.add_ledger(ledger)
        for written in output.run(f"write {path.name}", write_module, qmod, path, options.target):
            output.add_file(written)
        if options.report is not None:
            asked = ReportSettings(
                metric=settings.get("metric"),
                backend=settings["backend"],
                title=f"{options.model.name}, quantized",
                words=name_words(options, path),
            )
            report = build_report(mod, params, qmod, data, asked, callbacks=(progress,))
            report.save(options.report)
            output.add_file(options.report)
    if ledger.search is not None and options.save_config is not None:
        text = json.dumps(ledger.search.mapping, indent=1)
        write_text(options.save_config, text)
        output.add_file(options.save_config)
    if ledger.search is not None and not ledger.search.is_met:
        return ExitCode.FOUND
    kept.remove()
    return ExitCode.OK


def read_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Read all options into arguments of `relayquant.quantize`."""
    return {
        **read_quantizing(options),
        **read_search(options),
        "input_dtypes": read_dtypes(options.input_dtype, "--input-dtype"),
        "output_dtypes": read_dtypes(options.output_dtype, "--output-dtype"),
        "strict": options.strict,
        "guard": rq.config.Guard(options.guard) if options.guard else None,
        "only_if_faster": options.only_if_faster,
    }


def check_modes(options: argparse.Namespace) -> None:
    """Check for options that exclude each other.

    Raises:
        ConfigError: two options exclude each other.
    """
    dtypes = {"--input-dtype": options.input_dtype, "--output-dtype": options.output_dtype}
    given = {"--strict": options.strict, "--workers": options.workers, **dtypes}
    named = [name for name, value in given.items() if value]
    if options.metric is not None and named:
        raise ConfigError(
            f"--metric cannot be combined with {' and '.join(named)}, because it quantizes "
            "several times and may put any operator back to float. Run `quantize --metric "
            "--save-config FILE.json` first, then `quantize --config FILE.json` with these "
            "options.",
            code="RQ102",
        )
