"""The command line: each subcommand is one file and one call of the public functions.

A model file without a command: what it is, and what can be done with it. A mistake of the user's is
one line on standard error and exit code 2; `--debug` shows where it was found.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from relayquant.cli import (
    bench,
    compare,
    compile_,
    demo,
    describe,
    export,
    inspect_,
    lint,
    quantize,
    report_,
    sensitivity,
    verify,
)
from relayquant.errors import RelayQuantError

#: Exit code of a mistake in what the user gave, as argparse has it.
USER_ERROR = 2
#: Exit code of anything else that goes wrong: EX_SOFTWARE of sysexits.h.
INTERNAL_ERROR = 70
#: Exit code after Ctrl-C, as shells have it: 128 + SIGINT.
INTERRUPTED = 130


COMMANDS = (
    demo,
    lint,
    quantize,
    report_,
    compile_,
    export,
    verify,
    compare,
    sensitivity,
    inspect_,
    bench,
)


class Parser(argparse.ArgumentParser):
    """Its errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        print_line(f"error: {message} (see {self.prog} --help)")
        self.exit(USER_ERROR)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed options."""
    parser = Parser(
        prog="relayquant", description="Quantize neural networks after training, for Apache TVM."
    )
    version = metadata.version("relayquant")
    parser.add_argument("--version", action="version", version=f"relayquant {version}")
    parser.set_defaults(debug=False)
    add_debug(parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_debug(subparser)
    return parser


def add_debug(parser: argparse.ArgumentParser) -> None:
    """`--debug`, before the command and behind it: absent in the one does not undo the other."""
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error, not only its message",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: that of the process) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) == 1 and Path(words[0]).is_file():
        options = argparse.Namespace(run=describe.run, model=Path(words[0]), debug=False)
    else:
        options = build_parser().parse_args(words)
    try:
        with warnings.catch_warnings():
            if not options.debug:
                warnings.showwarning = show_warning
            return options.run(options)
    except KeyboardInterrupt as stop:
        if stop.args:
            print_line(str(stop))
        return INTERRUPTED
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, RelayQuantError | OSError):
            print_line(f"error: {error}")
            return USER_ERROR
        print_line(f"internal error: {type(error).__name__}: {error} (--debug shows where)")
        return INTERNAL_ERROR


def print_line(text: str) -> None:
    """One line on standard error."""
    print(f"relayquant: {' '.join(text.split())}", file=sys.stderr)


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """In the place of `warnings.showwarning`, which names a line of Python."""
    print_line(f"warning: {message}")
