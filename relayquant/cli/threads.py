"""The number of threads that compiled code uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use this number of threads inside TVM, unless its pool was started already.

    Only the environment variable works: `runtime.config_threadpool` counts "fast" cores, and uses
    one thread if all cores are equal.
    """
    variable = "TVM_NUM_THREADS"
    before = os.environ.get(variable)
    os.environ[variable] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
