"""For the command line: what long work leaves behind when it is interrupted, and goes on from."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayquant.base.storage.files import writing
from relayquant.stages.calibration.checkpoint import Workspace

#: options that change nothing that was computed, so that the work goes on with others
FREE_OPTIONS = frozenset(
    {
        *("command", "json", "quiet", "all", "debug"),
        *("report", "save_config", "workers", "time_limit", "checkpoint"),
    }
)


@dataclass(frozen=True)
class ResumeState:
    """Where the work of one command is kept.

    Attributes:
        path: The checkpoint of a calibration, a folder; or the JSON file of a search.
        is_search: Whether it is the file of a search.
        is_own: Whether the user named no place. Then the path is beside the output, and its name
            has a digest of the options, so that another command does not read it.
    """

    path: Path
    is_search: bool
    is_own: bool

    @staticmethod
    def of(options: argparse.Namespace, output: Path, *, is_search: bool = False) -> ResumeState:
        """Of a command with these options that writes `output`.

        Raises:
            FileError: the folder that the user named cannot be made.
        """
        folder = options.checkpoint
        if folder is None:
            kind = "search" if is_search else "checkpoint"
            name = f"{output.name}.{kind}-{digest_options(options)}"
            return ResumeState(output.with_name(name), is_search, True)
        if is_search:
            with writing(folder, "--checkpoint is to be a folder that can be written."):
                folder.mkdir(exist_ok=True)
        return ResumeState(folder / "search.json" if is_search else folder, is_search, False)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `relayquant.quantize`."""
        return {"search_state" if self.is_search else "checkpoint": self.path}

    def remove(self) -> None:
        """What is not needed any more; a calibration that ended has done so itself."""
        if self.is_search:
            self.path.unlink(missing_ok=True)
            if not self.is_own and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()
        elif self.path.is_dir():
            Workspace(self.path).remove()

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Ctrl-C inside says how to go on; what fails for another reason leaves nothing that the
        user did not ask for.

        Raises:
            KeyboardInterrupt: again, with that message.
        """
        try:
            yield
        except KeyboardInterrupt as stop:
            text = "interrupted; there was nothing to keep yet, or calibration was over"
            if self.path.exists():
                text = f"interrupted; what was done is in {self.path}: the same command goes on"
            raise KeyboardInterrupt(text) from stop
        except Exception:
            if self.is_own:
                self.remove()
            raise


def digest_options(options: argparse.Namespace) -> str:
    """Eight letters for what was asked, of which data and model, as they are now."""
    parts = []
    for name, value in sorted(vars(options).items()):
        if name not in FREE_OPTIONS:
            stamp = ""
            if isinstance(value, Path) and value.is_file():
                found = value.stat()
                stamp = f"{found.st_size} {found.st_mtime_ns}"
            parts.append(f"{name}={value!r} {stamp}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
