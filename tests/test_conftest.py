"""What `conftest.py` adds to pytest."""

from __future__ import annotations

import re
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


@pytest.mark.slow
def test_until__begins_at_another_file_each_time():
    """On slow machines the last tests do not run: those are not the same ones in every run."""

    def list_files(until: float) -> list[str]:
        options = ["-q", "-p", "no:cacheprovider", "--collect-only", f"--until={until}"]
        command = [sys.executable, "-m", "pytest", *options, "-o", "addopts=", "tests/config"]
        folder = Path(__file__).parents[1]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        return list(dict.fromkeys(re.findall(r"^(tests/\S+\.py)::", run.stdout, re.MULTILINE)))

    now = int(time.time()) + 600
    orders = [list_files(now + at) for at in range(3)]
    assert len({order[0] for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1


@pytest.mark.slow
def test_instances__quick_ones_and_slow_ones_are_all():
    """One in five is quick, and the slow run takes the others, not an eighth."""

    def count(marker: str) -> int:
        options = ["-q", "-p", "no:cacheprovider", "--collect-only", "-o", "addopts=", "-m", marker]
        command = [sys.executable, "-m", "pytest", *options, f"{test}::test_row_norm__of_a_sum"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return run.stdout.count("::test_row_norm__of_a_sum[")

    test = Path(__file__).parent / "codegen/kernels/test_row_norm.py"
    instances = count("slow or not slow")
    assert 0 < count("not slow") < instances / 3
    assert count("not slow") + count("slow and not nightly") == instances
