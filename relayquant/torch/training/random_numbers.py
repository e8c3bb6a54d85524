"""Find where a PyTorch module draws random numbers in training mode: dropout, and whole layers that
are left out.

Training computes the graph of evaluation mode, which draws no random numbers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from relayquant.errors import format_count, warn_user

#: Number of modules in a message.
MOST_NAMES = 5


def warn_random(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Warn that a module draws random numbers in training mode, and where."""
    places = find_random(module, args, kwargs)
    if not places:
        return
    shown = ", ".join(repr(path) if path else "the model itself" for path in places[:MOST_NAMES])
    more = len(places) - MOST_NAMES
    shown += f" and {format_count(more, 'module')} more" if more > 0 else ""
    warn_user(
        f"In training mode the module draws random numbers, as dropout does ({shown}). The "
        "trainable module leaves them out: it computes what evaluation mode computes. If that "
        "overfits, augment the data, or train for fewer steps.",
        code="RQ206",
    )


def find_random(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> list[str]:
    """Return the paths of the submodules that draw random numbers in training mode, found by
    running a copy. If it cannot run, only modules of dropout are found.
    """
    found = dict.fromkeys(
        path for path, part in module.named_modules() if isinstance(part, _DropoutNd) and part.p > 0
    )
    # It may fail for any reason: a batch norm refuses a batch of one, a copy may be impossible.
    with contextlib.suppress(Exception):
        twin = copy.deepcopy(module).train()
        watch = DrawWatch(twin)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), watch:
            try:
                twin(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs or {})))
            finally:
                found |= watch.found
    return list(found)


class DrawWatch(TorchDispatchMode):
    """Records which submodules call operators that draw random numbers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self.running: list[str] = []
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, path=path: self.running.append(path))
            part.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def leave(self) -> None:
        """Note that the innermost submodule has returned."""
        self.running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.setdefault(self.running[-1] if self.running else "")
        return func(*args, **(kwargs or {}))
