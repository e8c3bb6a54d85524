"""The Python of a TVM that still has Relay (see `real_relay`), to run code or a script in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from real_relay import VARIABLE

OLD_PYTHON = os.environ.get(VARIABLE, "")

needs_old_relay = pytest.mark.skipif(
    not OLD_PYTHON, reason=f"{VARIABLE} names no Python that has a TVM with Relay"
)


def run_old_python(*arguments: str) -> str:
    """What that Python prints when it is run with these arguments.

    Raises:
        subprocess.CalledProcessError: it failed; what it printed is in the error.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [OLD_PYTHON, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def run_old_code(code: str) -> Any:
    """What the code prints last, as JSON."""
    return json.loads(run_old_python("-c", code).splitlines()[-1])


def run_old_script(name: str, *arguments: str) -> None:
    """Run one of the scripts beside this file."""
    run_old_python(str(Path(__file__).with_name(name)), *arguments)
