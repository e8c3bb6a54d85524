"""What `conftest.py` adds to pytest."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "outcome"), [(-1, "1 skipped"), (600, "1 passed")])
def test_until__tests_that_would_begin_later_are_skipped_and_counted(seconds, outcome):
    test = f"{Path(__file__).with_name('test_error_codes.py')}::test_pages__one_for_each_code"
    options = ["-q", "-p", "no:cacheprovider", f"--until={time.time() + seconds}"]
    command = [sys.executable, "-m", "pytest", *options, "-o", "addopts=", test]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert outcome in run.stdout
    assert ("1 tests did not run: no time left" in run.stdout) is (seconds < 0)
