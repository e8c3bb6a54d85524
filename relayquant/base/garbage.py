"""The garbage collector in a long call: what was alive before is not looked through again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spare_older_objects() -> Iterator[None]:
    """Keep the garbage collector to objects that are made in this block.

    A full collection reads every object of the process: TVM's modules alone, and PyTorch's if they
    are imported, take longer than all else that a small model needs. Cycles that were garbage
    before are freed by collections after the block. A process that has frozen objects itself is
    left as it is, because they cannot be told apart afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
