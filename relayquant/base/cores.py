"""Cores and threads of this process. Nothing is loaded for it."""

from __future__ import annotations

import os


def count_cores() -> int:
    """Count the cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux only. Elsewhere all cores count.
    return (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()) or 1


def count_threads() -> int:
    """Count the threads that this process may keep busy: TVM_NUM_THREADS, or else its cores."""
    wanted = os.environ.get("TVM_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return count_cores()
