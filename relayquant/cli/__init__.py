"""The command line: each subcommand is one file and one call of the public functions.

A model file without a command: what it is, and what can be done with it. A mistake of the user's is
one line on standard error and exit code 2; `--debug` shows where it was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from relayquant.cli import (
    backend,
    bench,
    compare,
    compile_,
    completion,
    demo,
    describe,
    export,
    inspect_,
    lint,
    plot,
    quantize,
    report_,
    search,
    sensitivity,
    verify,
)
from relayquant.cli.answer import MEANINGS, Answer, ExitCode
from relayquant.errors import ConfigError, ModelError, RelayQuantError

COMMANDS = (
    demo,
    lint,
    quantize,
    search,
    report_,
    compile_,
    export,
    verify,
    compare,
    sensitivity,
    plot,
    inspect_,
    bench,
    backend,
    completion,
)
#: what every command takes, before it and behind it, and what it says of that
SWITCHES = {
    "--json": "print one JSON document in place of text",
    "--quiet": "print nothing but errors and warnings",
    "--all": "print a line for everything, not only for what stands out",
    "--debug": "show the traceback of an error, not only its message",
}


class Parser(argparse.ArgumentParser):
    """Its errors are those of this package."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)", code="RQ102")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed options and an
    `Answer`.
    """
    parser = Parser(
        prog="relayquant",
        description="Quantize neural networks after training, for Apache TVM. `relayquant MODEL` "
        "says what a file is and what can be done with it.",
        epilog="\n".join(["exit codes:", *(f"  {code:>3}  {MEANINGS[code]}" for code in ExitCode)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = metadata.version("relayquant")
    parser.add_argument("--version", action="version", version=f"relayquant {version}")
    add_switches(parser)
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for command in COMMANDS:
        command.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_switches(subparser)
    return parser


def build_file_parser() -> argparse.ArgumentParser:
    """The parser of `relayquant MODEL`."""
    parser = Parser(prog="relayquant", description=describe.__doc__)
    describe.add_arguments(parser)
    add_switches(parser)
    parser.set_defaults(command="describe")
    return parser


def add_switches(parser: argparse.ArgumentParser) -> None:
    """`SWITCHES`: absent behind a command, they do not undo those before it."""
    group = parser.add_argument_group("what is printed")
    for switch, text in SWITCHES.items():
        group.add_argument(switch, action="store_true", default=argparse.SUPPRESS, help=text)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """The options of what was typed: of a command, or of a file without one.

    Raises:
        ConfigError: it cannot be understood.
        ModelError: there is neither a command nor a file of that name.
    """
    first = next((word for word in words if not word.startswith("-")), "")
    parser = build_parser()
    known = {name for action in parser._actions for name in action.choices or ()}
    if first and first not in known:
        if Path(first).is_file():
            return build_file_parser().parse_args(words)
        if Path(first).suffix:
            raise ModelError(
                f"There is no file {first}, and no command of that name.", code="RQ201"
            )
    return parser.parse_args(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: that of the process) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Also what cannot be parsed is answered in the form that was asked for.
    is_debug = "--debug" in words
    answer = Answer(
        is_quiet="--quiet" in words, is_json="--json" in words, show_all="--all" in words
    )

    def hear_warning(message: Warning | str, *_: object, **__: object) -> None:
        """In the place of `warnings.showwarning`, which names a line of Python."""
        answer.warnings.append(" ".join(str(message).split()))
        print_line(f"warning: {message}")

    code = ExitCode.INTERNAL_ERROR
    try:
        with warnings.catch_warnings():
            if not is_debug:
                warnings.showwarning = hear_warning
            options = parse_words(words)
            answer.command = options.command
            code = options.run(options, answer)
        answer.finish(code)
        sys.stdout.flush()
    except BrokenPipeError:
        # What Python flushes when it ends is to go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CUT_OFF
    except KeyboardInterrupt as stop:
        return fail(answer, ExitCode.INTERRUPTED, stop)
    except Exception as error:
        if is_debug:
            raise
        if isinstance(error, RelayQuantError | OSError):
            return fail(answer, ExitCode.USER_ERROR, error, "error: ")
        kind = f"internal error: {type(error).__name__}: "
        return fail(answer, ExitCode.INTERNAL_ERROR, error, kind, " (--debug shows where)")
    return code


def fail(
    answer: Answer, code: ExitCode, error: BaseException, before: str = "", behind: str = ""
) -> ExitCode:
    """Say why a command ended, for people and for machines."""
    text = " ".join(str(error).split()) or "interrupted"
    print_line(f"{before}{text}{behind}")
    kind = error.code if isinstance(error, RelayQuantError) else ""
    answer.error = {"type": type(error).__name__, "code": kind, "message": text}
    answer.finish(code)
    return code


def print_line(text: str) -> None:
    """One line on standard error."""
    print(f"relayquant: {' '.join(text.split())}", file=sys.stderr)
