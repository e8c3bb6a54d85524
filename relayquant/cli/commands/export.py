"""`relayquant export`: write a module as another kind of file."""

from __future__ import annotations

import argparse

import relayquant as rq
from relayquant.base.storage.files import check_folder
from relayquant.cli.files import check_ending, load_options, write_module
from relayquant.cli.grammar import LIBRARIES
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.config import Precision
from relayquant.errors import ConfigError
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.entry import is_language_model, name_main
from relayquant.stages.conversion.partial import has_quantized_values
from relayquant_runtime.bundle import MANIFEST


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    path = options.output
    is_bundle = not path.suffix
    if not is_bundle:
        check_ending(path)
    is_compiled = is_bundle or path.suffix in LIBRARIES
    given = {
        "--target": options.target is not None,
        "--tune": options.tune is not False,
        "--precision": options.precision is not None,
    }
    named = [name for name, is_given in given.items() if is_given]
    if named and not is_compiled:
        raise ConfigError(
            f"{' and '.join(named)}: only a library is compiled; say -o FILE.so.", code="RQ102"
        )
    bundle = {"runtime": options.runtime, "preprocessing": options.preprocess}
    if any(value is not None for value in bundle.values()) and not is_bundle:
        raise ConfigError(
            f"--runtime and --preprocess are for a folder, and -o {path} is a file. Leave them "
            "out, or say -o FOLDER.",
            code="RQ102",
        )
    if is_bundle:
        check_folder(path, MANIFEST)
    check_options(options, outputs=() if is_bundle else (path,))
    target = resolve_target(options.target) if is_compiled else None
    mod = bind_model(output.run("read model", load_options, options))
    has_main = not is_language_model(mod)
    if has_main:
        mod = name_main(mod)
    if has_main and is_compiled and find_ledger(mod) is None and has_quantized_values(mod):
        # Quantized by another tool with other parameters: lower it to integers for the target.
        mod = rq.lower(mod, rq.get_backend_config(target=target))
    precision = Precision(options.precision) if options.precision else None
    if is_bundle:
        executable = output.run(
            "compile", rq.compile, mod, target, tune=options.tune, precision=precision
        )
        output.add_file(rq.export_bundle(executable, path, **bundle))
        return ExitCode.OK
    for written in output.run(
        f"write {path.name}", write_module, mod, path, target, options.tune, precision
    ):
        output.add_file(written)
    return ExitCode.OK
