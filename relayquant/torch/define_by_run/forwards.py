"""Define-by-run, converted: modules of PyTorch whose `forward` first asks the code that runs.

While a converted model runs, and only then, such a module has a `ModuleForward` of its own in the
place of its class's `forward`. What calls it from elsewhere, from another thread for one, gets the
class's.
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
    """A place in the code that calls a module, where its operators may be taken at once."""

    def play(self, caller: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns; None where its own code has to run."""
        ...

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look at what the module's own code is about to be called with; None if that says nothing
        new.
        """
        ...

    def end(self, caller: Any) -> None:
        """The module's own code has run."""
        ...

    def learn(self, lesson: Any, result: Any) -> None:
        """Look at what it gave for that."""
        ...


class Caller(Protocol):
    """What runs a model's code, for one call."""

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """The place that calls a module, its innermost frame given; None where it has none."""
        ...


class _Running(threading.local):
    caller: Caller | None = None


#: what this thread runs
RUNNING = _Running()
_CHANGING = threading.Lock()


class ModuleForward:
    """Stands in for the `forward` of one module.

    Attributes:
        users: Calls of converted models that have put it there.
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
            lesson = call.begin(caller, args, kwargs)
            try:
                result = type(module).forward(module, *args, **kwargs)
            finally:
                call.end(caller)
            if lesson is not None:
                call.learn(lesson, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """A copy of the module, made while the model runs, has the `forward` of its class."""
        twin = memo[id(self.module)]
        return MethodType(type(twin).forward, twin)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether a module runs code of PyTorch's alone: a class of `torch.nn`, nothing replaced, no
    modules within.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    forward = type(module).forward
    names = type(module).__module__, getattr(forward, "__module__", "")
    is_torch = all(name.startswith("torch.nn.modules.") for name in names)
    return is_torch and "forward" not in module.__dict__ and not module._modules


@contextlib.contextmanager
def replacing_forwards(forwards: Sequence[ModuleForward], caller: Caller) -> Iterator[None]:
    """Have modules ask `caller`, as long as the context lasts."""
    if not forwards:
        yield
        return
    before = RUNNING.caller
    placed: list[ModuleForward] = []
    try:
        with _CHANGING:
            for forward in forwards:
                there = forward.module.__dict__.setdefault("forward", forward)
                if type(there) is ModuleForward:  # else something that the user has put there
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
