"""`relayquant quantize`: a float model and calibration data in, a quantized module out.

The ending of -o says what is written: .json (the module), .so (compiled for --target), .onnx (QDQ),
.relay (Relay text, and .params beside it). Ctrl-C leaves a checkpoint from which the same command
goes on. --group-size makes only weights small, 4 bits in groups, and needs no data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import tvm

import relayquant as rq
from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import add_model, check_options
from relayquant.cli.data import add_data, open_data
from relayquant.cli.files import MODULE_SUFFIX, load_model
from relayquant.cli.output import check_ending, write_module
from relayquant.cli.quantizing import (
    add_quantizing,
    add_search,
    check_search,
    open_workers,
    read_dtypes,
    read_quantizing,
    read_search,
)
from relayquant.cli.resume import KeptWork
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.errors import ConfigError
from relayquant.plots.page import check_installed


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="quantize a model file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_data(parser, required=False)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: MODEL with .int8.json"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a report, too")
    add_quantizing(parser)
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="with --weights int4: N weights have one scale, data stays float (language models)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="an operator left in float is an error"
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
    add_search(parser)
    parser.add_argument(
        "--keep-faster",
        action="store_true",
        help="measure, and keep operators in float that this machine runs faster so",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="calibrate in so many processes (default: threads)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    output = options.output or options.model.with_suffix(f".int8{MODULE_SUFFIX}")
    check_ending(output)
    check_search(options)
    check_modes(options)
    counts = {"--workers": options.workers, "--group-size": options.group_size}
    check_options(options, counts=counts, outputs=(output, options.report))
    if options.target is not None:
        resolve_target(options.target)
    if options.report is not None:
        check_installed()
    settings = read_settings(options)
    mod, params = load_model(options.model, options.shape, options.input)
    if options.group_size is not None:
        qmod = rq.compress_weights(mod, params, bits=4, group_size=options.group_size)
        answer.add_ledger(rq.ledger(qmod))
        write_all(qmod, output, options, answer)
        return ExitCode.OK
    data = open_data(options, mod, params)
    kept = KeptWork.of(options, output)
    with answer.open_progress() as progress:
        with kept.keep(), open_workers(options.workers) as executor:
            settings |= {} if executor is None else {"executor": executor}
            qmod = rq.quantize(
                mod, params, data, callbacks=(progress,), **settings, **kept.arguments
            )
        ledger = rq.ledger(qmod)
        answer.add_ledger(ledger)
        write_all(qmod, output, options, answer)
        if options.report is not None:
            report = rq.make_report(
                mod,
                qmod,
                data,
                params,
                metric=settings.get("metric"),
                backend=settings["backend"],
                title=f"{options.model.name}, quantized",
                callbacks=(progress,),
            )
            report.save(options.report)
            answer.add_file(options.report)
    if ledger.search is not None and not ledger.search.is_met:
        return ExitCode.FOUND
    kept.remove()
    return ExitCode.OK


def read_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `relayquant.quantize`, of all options."""
    return {
        **read_quantizing(options),
        **read_search(options),
        "input_dtypes": read_dtypes(options.input_dtype, "--input-dtype"),
        "output_dtypes": read_dtypes(options.output_dtype, "--output-dtype"),
        "strict": options.strict,
        "guard": rq.Guard(options.guard) if options.guard else None,
        "keep_faster": options.keep_faster,
    }


def write_all(
    qmod: tvm.IRModule, output: Path, options: argparse.Namespace, answer: Answer
) -> None:
    """The module as -o says."""
    for path in write_module(qmod, output, options.target):
        answer.add_file(path)


def check_modes(options: argparse.Namespace) -> None:
    """What does not go together, by the names that options have here.

    Raises:
        ConfigError: two options exclude each other, or data is missing.
    """
    dtypes = {"--input-dtype": options.input_dtype, "--output-dtype": options.output_dtype}
    given = {"--strict": options.strict, "--workers": options.workers, **dtypes}
    named = [name for name, value in given.items() if value]
    if options.metric is not None and named:
        raise ConfigError(
            "--metric quantizes several times and may put any operator back to float; not "
            f"together with {' and '.join(named)}. `relayquant search` first, then `quantize "
            "--config` with them.",
            code="RQ102",
        )
    if options.group_size is None:
        if options.data is None:
            raise ConfigError(
                "quantize needs --data; only with --group-size it does without.", code="RQ102"
            )
        return
    if options.weights != "int4":
        raise ConfigError("--group-size: say --weights int4, too.", code="RQ102")
    others = {"--data": options.data, "--config": options.config, "--metric": options.metric}
    others |= {"--report": options.report, "--observer": options.observer} | given
    named = [name for name, value in others.items() if value]
    if named:
        raise ConfigError(
            "--group-size makes weights small and leaves all else in float; not together with "
            f"{' and '.join(named)}.",
            code="RQ102",
        )
