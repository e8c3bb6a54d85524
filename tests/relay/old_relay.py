"""A TVM that still has Relay, if RELAYQUANT_OLD_TVM names its Python."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

OLD_PYTHON = os.environ.get("RELAYQUANT_OLD_TVM", "")

needs_old_relay = pytest.mark.skipif(
    not OLD_PYTHON, reason="RELAYQUANT_OLD_TVM names no Python that has a TVM with Relay"
)


def run_old_python(script: str, *arguments: str) -> Any:
    """What a script prints last, as JSON.

    Raises:
        subprocess.CalledProcessError: it failed; what it printed is in the error.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [OLD_PYTHON, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])
