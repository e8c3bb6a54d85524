"""Texts of ours in a TVM that still has Relay: built and run by another Python.

The environment variable RELAYQUANT_OLD_TVM names that Python, of a TVM 0.10.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: of the environment
VARIABLE = "RELAYQUANT_OLD_TVM"

SCRIPT = Path(__file__).with_name("run_in_relay.py")


@dataclass(frozen=True)
class RealRelay:
    """A folder in which modules are left, and the Python that runs them."""

    python: str
    folder: Path

    def add(self, name: str, text: str, params: dict, inputs: dict[str, np.ndarray]) -> None:
        """Leave a module; inputs are stacked samples."""
        path = self.folder / f"{name}.relay"
        path.write_text(text)
        np.savez(path.with_suffix(".params.npz"), **params)
        np.savez(path.with_suffix(".inputs.npz"), **inputs)

    def run(self, *options: str) -> None:
        """Build and run all of them."""
        command = [self.python, str(SCRIPT), str(self.folder), *options]
        subprocess.run(command, check=True, capture_output=True)

    def read_outputs(self, name: str) -> list[np.ndarray]:
        """Stacked outputs of a module."""
        error = self.folder / f"{name}.error"
        assert not error.exists(), error.read_text()[-3000:]
        with np.load(self.folder / f"{name}.outputs.npz") as data:
            return [data[key] for key in data.files]

    def read_counts(self, name: str) -> dict[str, int]:
        """Matches of the patterns of CMSIS-NN, if `run` counted them."""
        return json.loads((self.folder / f"{name}.count.json").read_text())
