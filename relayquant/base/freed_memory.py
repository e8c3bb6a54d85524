"""Memory of large arrays that were freed -> memory of the next ones.

glibc reuses up to 32 MB (see `runtime.keep_freed_memory`). It asks the system for more each time,
and the system clears every page: a third of a calibration whose values are larger.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any

import numpy as np


class FreedMemory:
    """Memory that waits for the next array, at most `most` bytes. Any thread may call."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: list[np.ndarray] = []  # the one freed last at the end
        # An array may die in the thread that holds the lock, when Python collects garbage.
        self._lock = threading.RLock()

    def take(self, size: int) -> Any:
        """Return a buffer of at least `size` bytes and less than twice as many. Once nothing views
        it, its memory waits here.
        """
        with self._lock:
            sizes = [memory.nbytes for memory in self.waiting]
            fitting = [each for each in sizes if size <= each < 2 * size]
            memory = self.waiting.pop(sizes.index(min(fitting))) if fitting else None
        memory = np.empty(size, "uint8") if memory is None else memory
        buffer = (ctypes.c_char * memory.nbytes).from_buffer(memory)
        weakref.finalize(buffer, self._give, memory).atexit = False
        return buffer

    def _give(self, memory: np.ndarray) -> None:
        """Keep the memory, and let go of what has waited longest."""
        with self._lock:
            self.waiting.append(memory)
            while sum(each.nbytes for each in self.waiting) > self.most:
                self.waiting.pop(0)


#: bytes that wait in this process
MOST_WAITING_BYTES = 1 << 28


@functools.cache
def large_memory() -> FreedMemory:
    """Return the memory that waits in this process."""
    return FreedMemory(MOST_WAITING_BYTES)
