"""`relayquant quantize`: a float model and calibration data in, a quantized module out.

The ending of -o says what is written: .json (the module), .so (compiled for --target), .onnx (QDQ),
.relay (Relay text, and .params beside it).
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.backends import resolve_backend
from relayquant.cli.arguments import add_backend, add_effort, add_model, check_options
from relayquant.cli.data import add_data, make_top1, open_data
from relayquant.cli.files import MODULE_SUFFIX, load_mapping, load_model
from relayquant.cli.output import check_ending, write_module
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, DataError, format_count
from relayquant.kernels.isa.target import resolve_target
from relayquant.ledger import Ledger
from relayquant.report import ProgressReport, ledger_table, list_findings, make_console
from relayquant.report.page import check_installed

#: what `--observer` names
OBSERVERS = {
    "minmax": rq.MinMax(),
    "average-max": rq.AverageMax(),
    "moving-average": rq.MovingAverageMinMax(),
    "percentile": rq.Percentile(),
    "mse": rq.MSE(),
    "kl": rq.KLDivergence(),
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="quantize a model file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_data(parser)
    add_backend(parser)
    parser.add_argument("--target", help="what it will run on, e.g. 'llvm -mcpu=cascadelake'")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: MODEL with .int8.json"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a report, too")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.json",
        help="a QConfigMapping: which operators are quantized how (see `sensitivity --keep`)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="an operator left in float is an error"
    )
    add_effort(parser)
    parser.add_argument(
        "--observer", choices=list(OBSERVERS), help="how ranges are picked (default: by --effort)"
    )
    parser.add_argument(
        "--weights", choices=["int8", "int4"], help="integers of weights (default: int8)"
    )
    for side in ("input", "output"):
        parser.add_argument(
            f"--{side}-dtype",
            action="append",
            default=[],
            metavar="[NAME=]DTYPE",
            help=f"the module's {side}s as integers, e.g. uint8; may be repeated",
        )
    parser.add_argument(
        "--guard",
        choices=[action.value for action in rq.Guard],
        help="when the outputs do not follow the float model: put operators back to float, warn, "
        "or do not look (default: revert; warn with --effort fast)",
    )
    parser.add_argument(
        "--metric",
        choices=["top1"],
        help="put back to float what it takes to keep this within --max-drop (needs --labels)",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE.txt",
        help="classes: a line 'NAME CLASS' for each picture, or a line 'CLASS' for each sample",
    )
    parser.add_argument("--max-drop", type=float, metavar="X", help="default: 0.01")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end of the search")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="go on from here after an interruption"
    )
    parser.add_argument(
        "--keep-faster",
        action="store_true",
        help="measure, and keep operators in float that this machine runs faster so",
    )
    parser.add_argument("--all", action="store_true", help="print a line for every operator")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    output = options.output or options.model.with_suffix(f".int8{MODULE_SUFFIX}")
    check_ending(output)
    check_metric_options(options)
    check_options(options, outputs=(output, options.report))
    if options.report is not None:
        check_installed()
    backend = options.backend
    if backend is None and options.target is not None:
        backend = rq.default_backend(resolve_target(options.target))
    mapping = None if options.config is None else load_mapping(options.config)
    if options.weights == "int4":
        if mapping is not None:
            raise ConfigError("--weights and --config: say it in the configuration.")
        mapping = make_int4(resolve_backend(backend))
    mod, params = load_model(options.model, options.shape, options.input)
    data = open_data(options, mod, params)
    search: dict[str, Any] = {}
    if options.metric is not None:
        search = {"metric": make_top1(options), "budget": options.budget}
        if options.max_drop is not None:
            search["max_drop"] = options.max_drop
    with ProgressReport(quiet=options.quiet) as progress:
        try:
            qmod = rq.quantize(
                mod,
                params,
                data,
                backend=backend,
                qconfig_mapping=mapping,
                calibration=OBSERVERS.get(options.observer),
                effort=options.effort,
                input_dtypes=read_dtypes(options.input_dtype, "--input-dtype"),
                output_dtypes=read_dtypes(options.output_dtype, "--output-dtype"),
                checkpoint=options.checkpoint,
                callbacks=(progress,),
                strict=options.strict,
                guard=rq.Guard(options.guard) if options.guard else None,
                keep_faster=options.keep_faster,
                **search,
            )
        except KeyboardInterrupt as stop:
            if options.checkpoint is None or not options.checkpoint.exists():
                raise
            raise KeyboardInterrupt(
                f"What was done is in {options.checkpoint}: the same command goes on from there."
            ) from stop
        written = write_module(qmod, output, options.target)
        if options.report is not None:
            report = rq.make_report(
                mod,
                qmod,
                data,
                params,
                metric=search.get("metric"),
                backend=backend,
                title=f"{options.model.name}, quantized",
                callbacks=(progress,),
            )
            report.save(options.report)
            written.append(options.report)
    if not options.quiet:
        print_ledger(rq.ledger(qmod), show_all=options.all)
        for path in written:
            make_console().print(f"wrote {path}")
    return 0


def check_metric_options(options: argparse.Namespace) -> None:
    """Options of the search go together.

    Raises:
        ConfigError: one is missing.
        DataError: there is no file of labels.
    """
    if (options.metric is None) != (options.labels is None):
        raise ConfigError("--metric and --labels go together: give both, or none of them.")
    given = [
        name
        for name, value in {"--max-drop": options.max_drop, "--budget": options.budget}.items()
        if value is not None
    ]
    if options.metric is None and given:
        raise ConfigError(f"{' and '.join(given)}: nothing is searched without --metric.")
    if options.labels is not None and not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.")


def make_int4(backend: BackendConfig) -> rq.QConfigMapping:
    """The backend's own configuration, with weights of -7 to 7."""
    default = backend.default_qconfig
    if default is None:
        raise ConfigError(f"--weights int4: backend {backend.name!r} has no default to change.")
    spec = replace(default.weight.spec, quant_min=-7, quant_max=7)
    narrow = replace(default, weight=rq.TensorConfig(spec, rq.MSE()))
    return rq.QConfigMapping().set_global(narrow)


def read_dtypes(given: list[str], option: str) -> dict[str | int, str] | None:
    """{name: dtype} of "NAME=DTYPE", or {0: dtype} of "DTYPE"."""
    found: dict[str | int, str] = {}
    for text in given:
        name, _, dtype = text.rpartition("=")
        if not re.fullmatch(r"u?int(8|16)", dtype):
            raise ConfigError(f"{option} {text}: allowed: uint8, int8, int16, or NAME=uint8.")
        found[name or 0] = dtype
    return found or None


def print_ledger(ledger: Ledger, *, show_all: bool) -> None:
    """A line that counts, then what stayed in float; every operator where that is asked for."""
    console = make_console()
    rows = ledger.to_dict()["operators"]
    shown = rows if show_all else [row for row in rows if not row["quantized"]]
    console.print(
        f"{len(ledger.quantized)} of {format_count(len(rows), 'operator')} quantized"
        + ("" if show_all or not shown else "; in float are:")
    )
    if shown:
        console.print(ledger_table(shown, count=False))
    for line in list_findings(ledger):
        console.print(line)
