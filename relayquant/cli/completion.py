"""`relayquant completion`: a script that lets a shell complete commands, options and file names.

relayquant completion bash > ~/.local/share/bash-completion/completions/relayquant
relayquant completion zsh > DIRECTORY_OF_FPATH/_relayquant
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relayquant.cli.answer import Answer, ExitCode
from relayquant.errors import MissingDependencyError

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print what completes commands in a shell",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    try:
        import shtab
    except ImportError as error:
        raise MissingDependencyError(
            "Completion needs shtab, which is not installed: pip install relayquant[completion].",
            code="RQ503",
        ) from error
    from relayquant.cli import build_parser

    parser = build_parser()
    for action in list_actions(parser):
        if action.type is Path or action.dest == "backend":
            is_folder = action.metavar == "FOLDER"
            action.complete = shtab.DIRECTORY if is_folder else shtab.FILE  # pyright: ignore
    script = shtab.complete(parser, options.shell)
    answer.note(shell=options.shell, script=script)
    answer.say(script)
    return ExitCode.OK


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and of all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from list_actions(subparser)
