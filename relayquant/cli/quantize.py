"""`relayquant quantize`: a float model and calibration data in, a quantized module as JSON out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import tvm

import relayquant as rq
from relayquant.cli.arguments import add_backend, add_data, add_effort, add_model, check_options
from relayquant.cli.files import MODULE_SUFFIX, load_mapping, load_model, write_whole
from relayquant.errors import ConfigError
from relayquant.report import ProgressReport, ledger_table, list_findings, make_console


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("quantize", help="quantize a model file", description=__doc__)
    add_model(parser)
    add_data(parser)
    add_backend(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.json", help="default: MODEL with .int8.json"
    )
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
        "--guard",
        choices=[action.value for action in rq.Guard],
        help="when the outputs do not follow the float model: put operators back to float, warn, "
        "or do not look (default: revert; warn with --effort fast)",
    )
    parser.add_argument(
        "--keep-faster",
        action="store_true",
        help="measure, and keep operators in float that this machine runs faster so",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    output = options.output or options.model.with_suffix(".int8.json")
    if output.suffix != MODULE_SUFFIX:
        raise ConfigError(f"-o {output}: a quantized module is written as {MODULE_SUFFIX}.")
    check_options(options, outputs=(output,))
    mapping = None if options.config is None else load_mapping(options.config)
    mod, params = load_model(options.model, options.shape, options.input)
    with ProgressReport() as progress:
        qmod = rq.quantize(
            mod,
            params,
            options.data,
            backend=options.backend,
            qconfig_mapping=mapping,
            effort=options.effort,
            callbacks=(progress,),
            strict=options.strict,
            guard=rq.Guard(options.guard) if options.guard else None,
            keep_faster=options.keep_faster,
        )
    text = tvm.ir.save_json(qmod)
    write_whole(output, lambda path: path.write_text(text, encoding="utf-8"))
    console = make_console()
    ledger = rq.ledger(qmod)
    console.print(ledger_table(ledger.to_dict()["operators"]))
    for line in list_findings(ledger):
        console.print(line)
    console.print(f"wrote {output}")
    return 0
