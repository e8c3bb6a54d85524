"""`relayquant lint`: find problems of calibration data before it is used."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import relayquant as rq
from relayquant.analysis.linting.lint import find_unchecked
from relayquant.cli.data import open_data, read_classes
from relayquant.cli.files import load_options
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.plots.text import findings_table


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    check_options(options)
    labels = None if options.labels is None else read_classes(options)
    mod, params = output.run("read model", load_options, options)
    data = open_data(options, mod, params)
    findings = output.run("check data", rq.lint, mod, params, data, labels)
    output.print(findings_table(findings, title=f"{options.data} for {options.model}"))
    if labels is None and options.data.is_dir():
        for name in find_unchecked(mod, params):
            output.print(
                f"Normalization of the pictures for {name!r} was not checked: no batch norm "
                "follows the first layer. Add --labels to check it."
            )
    counts = Counter(finding.severity.value for finding in findings)
    output.add_values(
        **{severity.value: counts[severity.value] for severity in rq.analysis.Severity}
    )
    output.add_table("findings", findings)
    if options.growth:
        rows: list[dict[str, Any]] = []
        for name, curve in rq.analysis.measure_growth(mod, params, data).items():
            steps = ", ".join(f"{share:.0%} after {samples}" for samples, share in curve)
            output.print(f"range of {name}: {steps}")
            rows += [{"input": name, "samples": count, "share": share} for count, share in curve]
        output.add_table("growth", rows)
    is_clean = all(finding.severity is rq.analysis.Severity.INFO for finding in findings)
    return ExitCode.OK if is_clean else ExitCode.FOUND
