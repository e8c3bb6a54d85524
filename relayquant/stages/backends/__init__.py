"""Backends as tables: the patterns they run, their dtypes and their default quantization."""

from relayquant.stages.backends.accelerator import ACCELERATOR
from relayquant.stages.backends.arm import ARM
from relayquant.stages.backends.generic import GENERIC
from relayquant.stages.backends.select import (
    BACKENDS,
    find_backend,
    get_backend_config,
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
    "find_backend",
    "get_backend_config",
    "resolve_backend",
]
