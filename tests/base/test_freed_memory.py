"""Memory of large arrays waits for the next ones."""

import gc
import subprocess
import sys

import numpy as np

from relayquant.base.freed_memory import FreedMemory
from relayquant.base.runtime import MOST_REUSED_BYTES, empty_aligned, find_address


def test_take__memory_is_reused_once_no_view_is_left():
    memory = FreedMemory(1 << 20)
    first = np.frombuffer(memory.take(1000), "uint8")
    place, part = find_address(first), first[10:20].reshape(2, 5)
    del first
    other = np.frombuffer(memory.take(1000), "uint8")
    assert find_address(other) != place  # a view is left
    del part
    gc.collect()
    again = np.frombuffer(memory.take(600), "uint8")
    assert (find_address(again), again.size) == (place, 1000)


def test_take__memory_of_twice_the_size_or_more_is_left_for_larger_arrays():
    memory = FreedMemory(1 << 20)
    kept = [memory.take(size) for size in (4000, 2500, 2000)]
    del kept
    assert [len(memory.take(size)) for size in (1200, 1000)] == [2000, 1000]


def test_give__what_waited_longest_goes_back_to_the_system():
    memory = FreedMemory(3000)
    for size in (1000, 1500, 2000):
        memory.take(size)
    assert [each.nbytes for each in memory.waiting] == [2000]
    memory.take(4000)
    assert not memory.waiting


def test_empty_aligned__large_arrays_are_aligned_and_share_memory_one_after_the_other():
    shape = (MOST_REUSED_BYTES // 4 + 1000,)
    first = empty_aligned(shape, "float32")
    place = find_address(first)
    assert place % 64 == 0
    first[-1] = 1
    second = empty_aligned(shape, "float32")
    second[-1] = 2
    assert first[-1] == 1
    del first
    assert find_address(empty_aligned(shape, "float32")) == place


def test_take__memory_that_is_given_meanwhile_moves_no_other():
    """Python may collect garbage within `take`, in the thread that holds the lock."""
    memory, waiting = FreedMemory(5000), []

    class Dying(np.ndarray):
        @property
        def nbytes(self):
            if waiting:
                memory._give(waiting.pop())
            return super().nbytes

    memory.waiting = (np.empty(1000, "uint8"), np.empty(3900, "uint8").view(Dying))
    waiting.append(np.empty(900, "uint8"))
    assert len(memory.take(3800)) == 3900
    assert not waiting


def test_take__in_a_child_of_a_process_whose_other_thread_holds_the_lock():
    program = """
import os, threading
from relayquant.base.freed_memory import large_memory
memory, held, done = large_memory(), threading.Event(), threading.Event()
def hold():
    with memory._lock:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    os._exit(len(memory.take(7)))
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert run.stdout == "7\n"
