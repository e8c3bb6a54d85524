"""Memory of large arrays that were freed -> memory of the next ones.

glibc reuses up to 32 MB (see `runtime.keep_freed_memory`). It asks the system for more each time,
and the system clears every page: a third of a calibration whose values are larger.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from typing import Any

import numpy as np


class FreedMemory:
    """Memory that waits for the next array, at most `most` bytes. Any thread may call.

    An array may die in the thread that holds the lock, when Python collects garbage. So `waiting`
    is replaced and never changed: what is given meanwhile is at worst let go of.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: tuple[np.ndarray, ...] = ()  # the one freed last at the end
        self.unlock()

    def unlock(self) -> None:
        """Forget who holds the lock. After a fork this may be a thread that the child lacks."""
        self._lock = threading.RLock()

    def take(self, size: int) -> Any:
        """Return a buffer of at least `size` bytes and less than twice as many. Once nothing views
        it, its memory waits here.
        """
        with self._lock:
            waiting, self.waiting = self.waiting, ()
            fitting = (each for each in waiting if size <= each.nbytes < 2 * size)
            memory = min(fitting, key=lambda each: each.nbytes, default=None)
            self.waiting = tuple(each for each in waiting if each is not memory)
        memory = np.empty(size, "uint8") if memory is None else memory
        buffer = (ctypes.c_char * memory.nbytes).from_buffer(memory)
        weakref.finalize(buffer, self._give, memory).atexit = False
        return buffer

    def _give(self, memory: np.ndarray) -> None:
        """Keep the memory, and let go of what has waited longest."""
        with self._lock:
            waiting = (*self.waiting, memory)
            while sum(each.nbytes for each in waiting) > self.most:
                waiting = waiting[1:]
            self.waiting = waiting


#: bytes that wait in this process, until it ends
MOST_BYTES = 1 << 28


@functools.cache
def large_memory() -> FreedMemory:
    """Return the memory that waits in this process."""
    memory = FreedMemory(MOST_BYTES)
    os.register_at_fork(after_in_child=memory.unlock)
    return memory
