"""The command line. `grammar` says what commands take, `commands` has one module for each command.

A user's mistake is one line on standard error and exit code 2. `--debug` shows the traceback.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType

from relayquant.cli.output import CommandOutput, ExitCode, discard
from relayquant.cli.parsers import check_files, parse_words
from relayquant.cli.wording import name_options
from relayquant.errors import FileError, RelayQuantError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit code.

    Without `argv`, the process is the command, and Ctrl-C may end it.
    """
    if argv is not None:
        return run_command(list(argv))
    is_main = threading.current_thread() is threading.main_thread()
    try:
        return run_command(sys.argv[1:], is_process=True)
    finally:
        if is_main:
            # All is done and told. While Python ends, Ctrl-C would only print a traceback.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_command(words: list[str], *, is_process: bool = False) -> int:
    """Run one command and return its exit code. See `main`."""
    # Parse errors are also reported in the requested format.
    is_debug = "--debug" in words
    output = CommandOutput(
        is_quiet="--quiet" in words, is_json="--json" in words, show_all="--all" in words
    )

    def hear_warning(message: Warning | str, *_: object, **__: object) -> None:
        """Replace `warnings.showwarning`, which prints a line of Python code."""
        text = name_options(" ".join(str(message).split()))
        output.warnings.append(text)
        print_line(f"warning: {text}")

    code = ExitCode.INTERNAL_ERROR
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed in the shell by >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # As on standard error: a name that the terminal's encoding lacks ends no command. In the
        # locale "C", Python prints the bytes of a name as they are.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            if not is_debug:
                warnings.showwarning = hear_warning
            options = parse_words(words)
            output.command = options.command
            check_files(options)
            # Imported late: help and mistakes are answered without TVM.
            with holding_interrupts(output if is_process else None):
                command = import_module(f"relayquant.cli.commands.{options.command}")
            code = command.run(options, output)
        output.finish(code)
    except BrokenPipeError:
        return ExitCode.CUT_OFF
    except KeyboardInterrupt as stop:
        # `python -m` ends by the signal instead of the code if the signal met a text that `exec`
        # runs, until it runs another one.
        exec("")
        return fail(output, ExitCode.INTERRUPTED, stop)
    except Exception as error:
        if is_debug:
            raise
        if isinstance(error, RelayQuantError | OSError):
            return fail(output, ExitCode.USER_ERROR, error, "error: ")
        kind = f"internal error: {type(error).__name__}: "
        return fail(output, ExitCode.INTERNAL_ERROR, error, kind, " (--debug shows where)")
    return code


def stop_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does, and ignore Ctrl-C from then on: a second one would
    end what removes temporary files and processes.
    """
    signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


@contextmanager
def holding_interrupts(output: CommandOutput | None) -> Iterator[None]:
    """Let modules be imported whole: Ctrl-C comes at the end, and a second one ends the process.

    Extensions in C that are interrupted while they are imported end the process by a signal, or
    leave half a numpy behind, whose errors name something else. With an `output`, Ctrl-C ends the
    process at once, because imports take seconds on a busy machine and nothing has begun.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []

    def hold(number: int, _: object) -> None:
        if output is not None:
            signal.signal(number, signal.SIG_IGN)
            os._exit(fail(output, ExitCode.INTERRUPTED, KeyboardInterrupt()))
        pressed.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if output is None else stop_once)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def fail(
    output: CommandOutput, code: ExitCode, error: BaseException, before: str = "", behind: str = ""
) -> ExitCode:
    """Report why a command failed, for people and for machines. If these cannot be told, people are
    told that, too.
    """
    text = name_options(" ".join(str(error).split())) or "interrupted"
    kind = error.code if isinstance(error, RelayQuantError) else ""
    output.error = {"type": type(error).__name__, "code": kind, "message": text}
    try:
        output.finish(code)
    except BrokenPipeError:
        code = ExitCode.CUT_OFF
    except FileError as unwritten:
        behind += f" {unwritten}"
    print_line(f"{before}{text}{behind}")
    return code


def print_line(text: str) -> None:
    """Print one line on standard error. If that cannot be written, the exit code is all there is to
    say.
    """
    try:
        print(f"relayquant: {' '.join(text.split())}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
