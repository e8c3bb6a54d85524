"""Tests on emulated Arm CPUs: the one machine they share.

RELAYQUANT_ARM_ENV names a folder made by `tools/setup_arm.sh`, or one to make. Without it the
folder is made in a temporary directory, which takes a minute and needs the network; without that
the tests that run code are skipped.
"""

from __future__ import annotations

import os

import pytest

# The exact numpy models of the kernels are there.
from emulator import Emulator, find_or_set_up


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The aarch64 environment; skips with a message where it cannot be had."""
    folder = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have a folder each, and share the one above.
    return find_or_set_up(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
