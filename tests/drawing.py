"""How many examples a drawn test takes: the profile scales the count that stands at the test."""

from __future__ import annotations

from hypothesis import settings

#: Examples of a test that names no count.
FULL, QUICK = 100, 20


def count_examples(full: int, fraction: int = FULL // QUICK) -> int:
    """`full` examples in the profiles `full` and `drawn`, that part of them in `quick`: a fifth."""
    is_full = settings.default.max_examples >= FULL
    return full if is_full else max(1, full // fraction)
