"""Backends as tables: which patterns they run, their dtypes, how they quantize by default."""

from relayquant.backends.accelerator import ACCELERATOR
from relayquant.backends.arm import ARM
from relayquant.backends.generic import GENERIC
from relayquant.backends.select import BACKENDS, default_backend, find_backend, resolve_backend
from relayquant.backends.x86 import X86, X86_7BIT

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
