"""What a command prints.

People read it as it comes. With --json, machines get one document of one schema at the end, even if
the command failed.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, TypeVar

from relayquant.base.storage.files import writing
from relayquant.base.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from relayquant.data import Batch, Dataset
    from relayquant.ir.ledger import Ledger
    from relayquant.plots.progress import ProgressReport

# Help and mistakes are printed without TVM, so printing code is imported where it is used.

P = ParamSpec("P")
R = TypeVar("R")

#: Version of the document. It grows when a key is renamed or removed, not when one is added.
SCHEMA = 1


class ExitCode(enum.IntEnum):
    """Exit codes of commands; `docs/reference/commands.md` says when one ends with which."""

    OK = 0
    FOUND = 1
    USER_ERROR = 2
    INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130  # the shells' convention: 128 + SIGINT
    CUT_OFF = 141  # the shells' convention: 128 + SIGPIPE


@contextmanager
def printing() -> Iterator[None]:
    """Hand what is printed inside the `with` block on at once.

    Raises:
        FileError: Standard output cannot be written.
        BrokenPipeError: Its reader is gone.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        with writing("standard output"):
            raise


def discard(stream: TextIO) -> None:
    """Let what is printed on a stream that cannot be written go nowhere. What Python still holds of
    it would raise the same error at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class CommandOutput:
    """Output of one command: printed at once on standard output, or as JSON at the end.

    Attributes:
        command: Its name.
        summary: Name -> number or text.
        tables: Name -> rows, each a dict.
        files: Written files.
        warnings, error: Set by `main`.
        is_quiet: Whether only errors are printed.
        is_json: Whether a JSON document is printed instead of text.
        show_all: Whether to print every row of a table.
    """

    def __init__(
        self,
        command: str = "",
        *,
        is_quiet: bool = False,
        is_json: bool = False,
        show_all: bool = False,
    ) -> None:
        self.command = command
        self.is_quiet, self.is_json, self.show_all = is_quiet, is_json, show_all
        self.summary: dict[str, Any] = {}
        self.tables: dict[str, list[Any]] = {}
        self.files: list[Path] = []
        self.warnings: list[str] = []
        self.error: dict[str, str] | None = None

    def print(self, *what: RenderableType) -> None:
        """Print lines and tables for people."""
        if not self.is_quiet and not self.is_json:
            from relayquant.plots.text import make_console

            console = make_console()
            with printing():
                for part in what:
                    console.print(part)

    def add_values(self, **values: Any) -> None:
        """Add numbers and texts for machines."""
        self.summary.update(values)

    def add_table(self, name: str, rows: Iterable[Any]) -> None:
        """Add rows for machines, dicts or dataclasses."""
        self.tables[name] = [*rows]

    def add_file(self, path: Path) -> None:
        """Report a written file, for people and machines."""
        self.files.append(path)
        self.print(f"wrote {path}")

    def add_ledger(self, ledger: Ledger, title: str = "") -> None:
        """Report what was quantized, for people and machines: the count, operators in float and
        why, findings.

        With --all, people get every operator.
        """
        from relayquant.plots.text import ledger_table, list_findings

        data = ledger.to_dict()
        self.add_table("operators", data.pop("operators"))
        self.add_values(operators=len(ledger.rows), quantized=len(ledger.quantized), **data)
        self.print(
            ledger_table(self.tables["operators"], title, show_all=self.show_all),
            *list_findings(ledger),
        )

    def open_progress(self) -> ProgressReport:
        """Open progress on standard error: bars on a terminal, else a line every few seconds."""
        from relayquant.plots.progress import ProgressReport

        return ProgressReport(quiet=self.is_quiet)

    def run(self, step: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a step of a command. While it runs, its name is shown."""
        from relayquant.base.events import CallbackList

        with self.open_progress() as progress:
            return CallbackList.of(progress).run_stage(step, function, *args, **kwargs)

    def follow(self, step: str, data: Dataset) -> Iterator[Batch]:
        """Yield the batches of a data set, and show how many of them are done."""
        from relayquant.base.events import CallbackList

        with self.open_progress() as progress:
            yield from CallbackList.of(progress).follow(step, data, data.length, "batch")

    def make_document(self, code: ExitCode) -> dict[str, Any]:
        """Build the JSON document."""
        return {
            "schema": SCHEMA,
            "relayquant": __version__,
            "command": self.command,
            "exit_code": int(code),
            "error": self.error,
            "warnings": self.warnings,
            "summary": make_plain(self.summary),
            "tables": make_plain(self.tables),
            "files": make_plain(self.files),
        }

    def finish(self, code: ExitCode) -> None:
        """Print the document, if it was asked for."""
        if self.is_json:
            # JSON has neither NaN nor infinity, and some readers are strict.
            with printing():
                json.dump(self.make_document(code), sys.stdout, indent=1, allow_nan=False)
                sys.stdout.write("\n")


def make_plain(value: Any) -> Any:
    """Convert a value for JSON.

    NaN becomes null, an infinity "Infinity" or "-Infinity". Python and JavaScript convert these
    texts to numbers.
    """
    if isinstance(value, enum.Enum):
        return make_plain(value.value)
    if hasattr(value, "tolist"):  # a numpy array or number
        value = value.tolist()
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): make_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return {name: make_plain(getattr(value, name)) for name in shown}
    if isinstance(value, list | tuple | set | frozenset):
        return [make_plain(item) for item in value]
    return str(value)
