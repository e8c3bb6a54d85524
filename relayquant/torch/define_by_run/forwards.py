"""Define-by-run, converted: replace the `forward` of PyTorch modules while a converted model runs.

During the run, such a module has a `ModuleForward` in place of its class's `forward`. It asks the
running code first. Callers from elsewhere, for example another thread, get the class's `forward`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, MethodType
from typing import Any, Protocol

import torch  # pyright: ignore[reportMissingImports]


class ModuleCall(Protocol):
    """A place in the code that calls a module, whose operators may be handled at once."""

    def play(self, caller: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the module's result. None if its own code has to run."""
        ...

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look at the arguments before the module's own code runs. None if there is nothing to
        learn.
        """
        ...

    def end(self, caller: Any) -> None:
        """End a call in which the module's own code ran."""
        ...

    def learn(self, recorded: Any, result: Any) -> None:
        """Look at the result for the arguments that `begin` saw."""
        ...


class Caller(Protocol):
    """Runs a model's code, for one call."""

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """Find the known place of a module call by its innermost frame. None without one."""
        ...


class _Running(threading.local):
    caller: Caller | None = None


#: caller that this thread runs
RUNNING = _Running()
_CHANGING = threading.Lock()


class ModuleForward:
    """Replaces the `forward` of one module.

    Attributes:
        users: Number of running calls of converted models that use it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.users = module, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, caller = self.module, RUNNING.caller
        call = None if caller is None else caller.find_call(module, sys._getframe(1))
        if call is None:
            return type(module).forward(module, *args, **kwargs)
        result = call.play(caller, args, kwargs)
        if result is None:
            recorded = call.begin(caller, args, kwargs)
            try:
                result = type(module).forward(module, *args, **kwargs)
            finally:
                call.end(caller)
            if recorded is not None:
                call.learn(recorded, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """Copy as the class's `forward`: a copy of the module made during a run must not keep
        this object.
        """
        twin = memo[id(self.module)]
        return MethodType(type(twin).forward, twin)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether a module runs only PyTorch code: a `torch.nn` class, nothing replaced, no
    submodules.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    forward = type(module).forward
    names = type(module).__module__, getattr(forward, "__module__", "")
    is_torch = all(name.startswith("torch.nn.modules.") for name in names)
    return is_torch and "forward" not in module.__dict__ and not module._modules


@contextlib.contextmanager
def replacing_forwards(forwards: Sequence[ModuleForward], caller: Caller) -> Iterator[None]:
    """Let modules ask `caller` inside the context."""
    if not forwards:
        yield
        return
    before = RUNNING.caller
    placed: list[ModuleForward] = []
    try:
        with _CHANGING:
            for forward in forwards:
                there = forward.module.__dict__.setdefault("forward", forward)
                if type(there) is ModuleForward:  # otherwise the user has replaced it
                    there.users += 1
                    placed.append(there)
        RUNNING.caller = caller
        yield
    finally:
        RUNNING.caller = before
        with _CHANGING:
            for forward in placed:
                forward.users -= 1
                state = forward.module.__dict__
                if not forward.users and state.get("forward") is forward:
                    del state["forward"]
