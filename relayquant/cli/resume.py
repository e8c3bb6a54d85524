"""Files from which an interrupted command resumes."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayquant.base.storage.files import writing
from relayquant.base.storage.lock import hold_beside
from relayquant.stages.calibration.checkpoint import remove_checkpoint

#: options that do not change the computed values, so that work can resume with other ones
FREE_OPTIONS = frozenset(
    {
        *("command", "json", "quiet", "all", "debug"),
        *("report", "save_config", "workers", "time_limit", "checkpoint"),
    }
)


@dataclass(frozen=True)
class ResumeState:
    """Where one command keeps its intermediate results.

    Attributes:
        path: The checkpoint folder of a calibration, or the JSON file of a search.
        is_search: Whether it is the file of a search.
        is_own: Whether the user gave no path. Then the path is next to the output, and its name has
            a digest of the options, so that another command does not read it.
    """

    path: Path
    is_search: bool
    is_own: bool

    @staticmethod
    def of(options: argparse.Namespace, output: Path, *, is_search: bool = False) -> ResumeState:
        """Choose the place for a command with these options that writes `output`.

        Raises:
            FileError: the user's folder cannot be created.
        """
        folder = options.checkpoint
        if folder is None:
            kind = "search" if is_search else "checkpoint"
            name = f"{output.name}.{kind}-{digest_options(options)}"
            return ResumeState(output.with_name(name), is_search, True)
        if is_search:
            with writing(folder, "--checkpoint must be a writable folder."):
                folder.mkdir(exist_ok=True)
        return ResumeState(folder / "search.json" if is_search else folder, is_search, False)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `relayquant.quantize`."""
        return {"search_state" if self.is_search else "checkpoint": self.path}

    def remove(self) -> None:
        """Remove files that are not needed any more, unless another process works with them. A
        finished calibration has removed its own.
        """
        if self.is_search:
            with hold_beside(self.path) as is_free:
                if is_free:
                    self.path.unlink(missing_ok=True)
            if not self.is_own and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()
        elif self.path.is_dir():
            remove_checkpoint(self.path)

    @contextmanager
    def keep(self) -> Iterator[None]:
        """On Ctrl-C, say how to resume. On any other error, remove files that the user did not ask
        for.

        Raises:
            KeyboardInterrupt: again, with that message.
        """
        try:
            yield
        except KeyboardInterrupt as stop:
            text = "interrupted; nothing was kept, because calibration had not started or was over"
            if self.path.exists():
                text = (
                    f"interrupted; the work so far is in {self.path}. Run the same command again "
                    "to resume"
                )
            raise KeyboardInterrupt(text) from stop
        except Exception:
            if self.is_own:
                self.remove()
            raise


def digest_options(options: argparse.Namespace) -> str:
    """Return an eight-letter digest of the options, and of the data and model files as they are
    now.
    """
    parts = []
    for name, value in sorted(vars(options).items()):
        if name not in FREE_OPTIONS:
            stamp = ""
            if isinstance(value, Path) and value.is_file():
                found = value.stat()
                stamp = f"{found.st_size} {found.st_mtime_ns}"
            parts.append(f"{name}={value!r} {stamp}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
