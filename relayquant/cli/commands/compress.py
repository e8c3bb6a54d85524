"""`relayquant compress`: store weights of matrix products and embeddings in few bits."""

from __future__ import annotations

import argparse

import relayquant as rq
from relayquant.base.storage.files import ARCHIVE_SUFFIX
from relayquant.cli.data import open_data
from relayquant.cli.files import check_ending, load_options, write_module
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.cli.quantizing import open_workers
from relayquant.cli.resume import ResumeState
from relayquant.codegen.kernels.isa.target import resolve_target


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    path = options.output or options.model.with_suffix(f".int{options.bits}{ARCHIVE_SUFFIX}")
    check_ending(path)
    counts = {"--group-size": options.group_size, "--workers": options.workers}
    check_options(options, counts=counts, outputs=(path,))
    if options.target is not None:
        resolve_target(options.target)
    mod, params = output.run("read model", load_options, options)
    data = open_data(options, mod, params)
    kept = ResumeState.of(options, path)
    progress, workers = output.open_progress(), open_workers(options.workers)
    with progress, kept.keep(), workers as executor:
        qmod = rq.compress_weights(
            mod,
            params,
            data,
            bits=options.bits,
            group_size=options.group_size,
            is_symmetric=options.scheme == "symmetric",
            embedding_bits=options.embedding_bits,
            effort=options.effort,
            max_size=options.max_size,
            workers=executor,
            callbacks=(progress,),
            **kept.arguments,
        )
    output.add_ledger(rq.ledger(qmod))
    for written in output.run(f"write {path.name}", write_module, qmod, path, options.target):
        output.add_file(written)
    kept.remove()
    return ExitCode.OK
