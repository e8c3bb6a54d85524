"""After a first result: what a search has measured so far, in one JSON file that is written whole
after every measurement. A search that was interrupted goes on from it; its best mapping can be used
at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tvm

from relayquant.base.storage.files import decode_json, read_text, reading, write_text
from relayquant.errors import ConfigError

FORMAT = "relayquant.refine.search.1"
#: bytes; a ranking of 100,000 operators has less
MAX_SIZE = 1 << 26


class SearchState:
    """Scores by operator and by trial; kept in memory only when there is no path.

    Attributes:
        ranking: Operator -> SQNR in dB when it alone is quantized.
        trials: Name of a trial (see `trial_key`) -> the metric of its integer module.
        basis: What was measured on, by what it is called; see `check_basis`.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.ranking: dict[str, float] = {}
        self.trials: dict[str, float] = {}
        self.best: dict[str, Any] = {}
        self.basis: dict[str, str] = {}

    @staticmethod
    def open(path: str | Path | None, fingerprint: str) -> SearchState:
        """What is in the file, or nothing yet; then the file is made.

        Raises:
            DataError: the file is no search state, or damaged.
            ConfigError: it is that of another model, data or setting.
            FileError: it cannot be written.
        """
        state = SearchState(None if path is None else Path(path), fingerprint)
        if state.path is None:
            return state
        if not state.path.exists():
            state.save()
            return state
        with reading(state.path, "search state", advice="Delete it, or name another file."):
            # The SQNR of an operator may be infinite, and is written so.
            data = decode_json(read_text(state.path, MAX_SIZE), allow_nan=True)
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}")
            known = str(data["fingerprint"])
            state.ranking = {str(k): float(v) for k, v in data["ranking"].items()}
            state.trials = {str(k): float(v) for k, v in data["trials"].items()}
            state.best = dict(data["best"])
            state.basis = {str(k): str(v) for k, v in data["basis"].items()}
        if known != fingerprint:
            raise ConfigError(
                f"{state.path} is the state of a search with another model, backend, effort, "
                "configuration or bound. Delete it, or name another file.",
                code="RQ502",
            )
        return state

    def check_basis(self, basis: Mapping[str, str]) -> None:
        """Note what scores depend on besides the settings: hashes of data by name.

        Raises:
            ConfigError: the scores in the file are from other ones; names them.
        """
        other = [name for name, value in basis.items() if self.basis.get(name, value) != value]
        if other:
            raise ConfigError(
                f"{self.path} is the state of a search with other {' and other '.join(other)}, so "
                "its scores do not count here. Delete it, or name another file; data must come in "
                "the same order each time.",
                code="RQ502",
            )
        self.basis |= basis
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all; nothing without a path."""
        if self.path is None:
            return
        data = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "ranking": self.ranking,
            "trials": self.trials,
            "best": self.best,
            "basis": self.basis,
        }
        text = json.dumps(data, indent=1)
        write_text(self.path, text)


def trial_key(names: Collection[str], dtype: str, widened: Collection[str] = ()) -> str:
    """One text for the operators that are put back, what they are put back to, and those whose
    weights get all bits.
    """
    parts = [dtype, *sorted(names)] if names else []
    return json.dumps([*parts, sorted(widened)] if widened else parts)


def make_fingerprint(mod: tvm.IRModule, settings: Mapping[str, Any]) -> str:
    """A hash of the prepared model, weights included, and the settings of the search."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(tvm.ir.save_json(mod).encode())
    digest.update(repr(sorted(settings.items())).encode())
    return digest.hexdigest()
