"""Backends as tables: which patterns they run, their dtypes, how they quantize by default."""

from relayquant.stages.backends.accelerator import ACCELERATOR
from relayquant.stages.backends.arm import ARM
from relayquant.stages.backends.generic import GENERIC
from relayquant.stages.backends.select import (
    BACKENDS,
    default_backend,
    find_backend,
    resolve_backend,
)
from relayquant.stages.backends.x86 import X86, X86_7BIT

__all__ = [
    "ACCELERATOR",
    "ARM",
    "BACKENDS",
    "GENERIC",
    "X86",
    "X86_7BIT",
    "default_backend",
    "find_backend",
    "resolve_backend",
]
