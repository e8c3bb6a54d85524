"""How many examples a drawn test takes: the profile scales the count that stands at the test."""

from __future__ import annotations

from hypothesis import settings

#: Examples of a test that names no count.
FULL, QUICK = 100, 20


def count_examples(full: int) -> int:
    """`full` examples in the profiles `full` and `drawn`, a fifth of them in `quick`."""
    return max(1, full * settings.default.max_examples // FULL)
