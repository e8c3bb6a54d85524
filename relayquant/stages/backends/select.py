"""Choice of a backend: by name, or by target."""

from __future__ import annotations

from typing import Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.codegen.kernels.isa.target import Architecture, find_architecture, resolve_target
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, suggest_name
from relayquant.ir.ledger import find_ledger
from relayquant.stages.backends.accelerator import ACCELERATOR
from relayquant.stages.backends.arm import ARM
from relayquant.stages.backends.generic import GENERIC
from relayquant.stages.backends.x86 import X86, X86_7BIT

BACKENDS: tuple[BackendConfig, ...] = (X86, X86_7BIT, ARM, GENERIC, ACCELERATOR)


def resolve_backend(backend: BackendConfig | str | None) -> BackendConfig:
    """Return a backend from its name or the BackendConfig itself. None means the backend of this
    machine.

    Raises:
        ConfigError: no backend has this name.
    """
    if backend is None:
        return get_backend_config()
    if isinstance(backend, BackendConfig):
        return backend
    for known in BACKENDS:
        if known.name == backend:
            return known
    names = [known.name for known in BACKENDS]
    raise ConfigError(
        f"There is no backend {backend!r}. {suggest_name(str(backend), names)} "
        "Or pass a BackendConfig of your own.",
        code="RQ101",
    )


def find_backend(mod: tvm.IRModule, backend: BackendConfig | str | None) -> BackendConfig:
    """Return the given backend, or the backend in the module's ledger. Without a ledger, return the
    backend of this machine.

    Raises:
        ConfigError: no backend of that name is built in.
    """
    ledger = find_ledger(mod)
    if backend is not None or ledger is None:
        return resolve_backend(backend)
    for known in BACKENDS:
        if known.name == ledger.backend:
            return known
    raise ConfigError(
        f"The module was prepared for backend {ledger.backend!r}, whose patterns it does not hold. "
        "Pass the BackendConfig as well, or lower what calibrate returned: that holds it.",
        code="RQ105",
    )


@check_arguments
def get_backend_config(name: str | None = None, *, target: Any = None) -> BackendConfig:
    """Return a backend by its name. Without a name, return the backend whose activations suit the
    kernels of `target`.

    Args:
        name: "x86", "x86-7bit", "arm", "generic" or "accelerator".
        target: As for `relayquant.compile`: None for this machine, a Target, a dict or a string.

    Raises:
        ConfigError: no backend has this name, TVM does not accept the target, or both are given.
    """
    if name is not None:
        if target is not None:
            raise ConfigError(
                "get_backend_config takes the name of a backend or a target, not both.",
                code="RQ102",
            )
        return resolve_backend(name)
    backends = {
        Architecture.X86: X86,
        Architecture.AARCH64: ARM,
        Architecture.ARM32: ARM,
        Architecture.OTHER: GENERIC,
    }
    return backends[find_architecture(resolve_target(target))]
