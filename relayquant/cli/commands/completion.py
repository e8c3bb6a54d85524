"""`relayquant --completion`: a script that lets a shell complete commands, options and file names.

relayquant --completion bash > ~/.local/share/bash-completion/completions/relayquant
relayquant --completion zsh > DIRECTORY_OF_FPATH/_relayquant
"""

from __future__ import annotations

import argparse
from pathlib import Path

from relayquant.base.optional import needed
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.cli.parsers import build_whole_parser, list_actions


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    with needed("Completion needs shtab, which is not installed", "relayquant[completion]"):
        import shtab
    parser = build_whole_parser()
    for action in list_actions(parser):
        if action.type is Path or action.dest in ("backend", "model"):
            is_folder = action.metavar == "FOLDER"
            action.complete = shtab.DIRECTORY if is_folder else shtab.FILE  # pyright: ignore
    script = shtab.complete(parser, options.completion)
    output.add_values(shell=options.completion, script=script)
    output.print(script)
    return ExitCode.OK
