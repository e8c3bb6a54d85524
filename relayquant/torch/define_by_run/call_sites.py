"""Define-by-run: module path and place in the code of a call -> its operator (`CallSite`)."""

from __future__ import annotations

import dis
import enum
import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from relayquant.torch.define_by_run.forwards import ModuleForward
from relayquant.torch.define_by_run.functions import FunctionNames

#: calls a module's `forward`
CALL_MODULE = torch.nn.Module._call_impl.__code__
#: calls `CALL_MODULE`
WRAP_CALL = torch.nn.Module._wrapped_call_impl.__code__
#: code between a module's caller and its `forward`
_TRANSPARENT = (
    WRAP_CALL,
    ModuleForward.__call__.__code__,
    # code that runs hooks. Hooks come and go, but the operator stays the same.
    *(code for code in CALL_MODULE.co_consts if isinstance(code, CodeType)),
)
#: folders of code that is not the user's
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

#: Identity of an operator: (id of the module, name of the function, places inside the module,
#: places around it). A place is (id of a code object, instruction). Places are ordered from the
#: call outwards to the user's module. A module that was created after preparation, for example in
#: each call, is identified by its class and the places around it.
SiteKey = tuple[Any, ...]


class CodeKind(enum.Enum):
    """Kind of a code object in the stack of a call."""

    USER = enum.auto()
    LIBRARY = enum.auto()  #: code of PyTorch or of this package: a place, like the user's code
    TRANSPARENT = enum.auto()  #: does not help to identify the operator
    MODULE = enum.auto()  #: calls a module's `forward`
    ROOT = enum.auto()  #: calls the model


# This runs for each operator. Module globals are faster than enum members.
_USER, _LIBRARY, _MODULE, _ROOT = (
    CodeKind.USER, CodeKind.LIBRARY, CodeKind.MODULE, CodeKind.ROOT,
)  # fmt: skip


class CallSite:
    """An operator of the user's code.

    Attributes:
        module: Path of the innermost module that runs it, "" for the model itself.
        operator: Name of the PyTorch function.
        file, line, function: The user's code that calls it, or the PyTorch module that calls it.
        reason, advice: Why it stays in PyTorch, and what to do about it. "" if it is not known to
            stay there.
    """

    def __init__(self, module: str, operator: str, file: str, line: int, function: str) -> None:
        self.module, self.operator = module, operator
        self.file, self.line, self.function = file, line, function
        self.reason = self.advice = ""

    def __str__(self) -> str:
        where = f"module {self.module!r}" if self.module else "the model"
        return f"{self.operator} in {where} ({self.place})"

    @property
    def place(self) -> str:
        """File, line and function."""
        return f"{self.file}:{self.line}, {self.function}"


class SiteTable:
    """All call sites of one model. A call is identified by its stack."""

    def __init__(self, model: Callable[..., Any], root: CodeType) -> None:
        self.modules = find_modules(model)
        self.submodules = [each for module in self.modules.values() for each in module.modules()]
        self.paths = name_modules(self.modules)
        self.names = FunctionNames()
        self.sites: dict[SiteKey, CallSite] = {}
        #: id of a code object -> its kind; the objects must stay alive
        self._kinds = {id(root): CodeKind.ROOT, id(CALL_MODULE): CodeKind.MODULE}
        self._kinds.update((id(code), CodeKind.TRANSPARENT) for code in _TRANSPARENT)
        self._codes: list[CodeType] = [root]
        #: places that are equivalent to another place
        self._folded: dict[tuple[int, int], tuple[int, int]] = {}
        self._root = root

    def find_key(self, frame: FrameType | None, operator: str) -> SiteKey:
        """Return the key of a call of `operator` from `frame`.

        The key holds all places between the call and the surrounding `forward` of the user's
        module, each once, so a recursive function has the same operators at any depth. Places
        outside the innermost module are stored separately.
        """
        places, end, is_inside = self.walk(frame, False)
        if end is None:
            return None, operator, join_places(places), ()
        module = find_called(end)
        is_known = id(module) in self.paths
        outer = () if is_inside and is_known else self.find_outer(end.f_back)
        owner = id(module) if is_known else type(module)
        return owner, operator, join_places(places), outer

    def find_outer(self, frame: FrameType | None) -> tuple[tuple[int, int], ...]:
        """Return the places between a module call, with the given innermost frame, and the
        user's `forward` around it.
        """
        return join_places(self.walk(frame, True)[0])

    def walk(
        self, frame: FrameType | None, passes_libraries: bool
    ) -> tuple[list[tuple[int, int]], FrameType | None, bool]:
        """Walk from a frame outwards to the call of the surrounding module, or of the model.

        Args:
            passes_libraries: Whether to continue at a module without any user code.

        Returns:
            The places on the way, the frame that calls the module (None: the model itself), and
            whether one of the places is the user's.
        """
        kinds, folded = self._kinds, self._folded
        places: list[tuple[int, int]] = []
        is_inside = False
        while frame is not None:
            code = frame.f_code
            number = id(code)
            kind = kinds.get(number) or self.add_code(code)
            if kind is _USER or kind is _LIBRARY:
                is_inside = is_inside or kind is _USER
                place = number, frame.f_lasti
                places.append(folded.get(place, place))
            elif kind is _MODULE:
                if is_inside or not passes_libraries:
                    return places, frame, is_inside
            elif kind is _ROOT:
                break
            frame = frame.f_back
        return places, None, is_inside

    def add_code(self, code: CodeType) -> CodeKind:
        """Classify a new code object."""
        kind = _LIBRARY if code.co_filename.startswith(_LIBRARIES) else _USER
        self._codes.append(code)
        self._folded.update(fold_places(code))
        self._kinds[id(code)] = kind
        return kind

    def add(self, key: SiteKey, frame: FrameType | None) -> CallSite:
        """Return the site of a key, and add it if it is new."""
        site = self.sites.get(key)
        if site is None:
            # with several threads, the first one wins
            site = self.sites.setdefault(key, self.describe(key, frame))
        return site

    def describe(self, key: SiteKey, frame: FrameType | None) -> CallSite:
        """Describe the call with this key. Its place is the innermost user code."""
        first = frame
        while frame is not None and frame.f_code is not self._root:
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                first = frame
                break
            frame = frame.f_back
        path = self.paths.get(key[0], "") if key[0] is not None else ""
        if first is None:
            return CallSite(path, key[1], "?", 0, "?")
        code = first.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 has the longer one
        return CallSite(path, key[1], os.path.basename(code.co_filename), first.f_lineno, name)


def fold_places(code: CodeType) -> dict[tuple[int, int], tuple[int, int]]:
    """For Python 3.11, where a call is two instructions: map the place of the first to the place of
    the second.

    Builtins (`abs(x)`, `list(map(layer, x))`) are called by the second instruction while the code
    is new, and by the first after some runs.
    """
    first, call = dis.opmap.get("PRECALL"), dis.opmap.get("CALL")
    found: dict[tuple[int, int], tuple[int, int]] = {}
    if first is None:
        return found
    calls = [at for at in range(0, len(code.co_code), 2) if code.co_code[at] in (first, call)]
    for at, following in itertools.pairwise(calls):
        if code.co_code[at] == first:
            found[id(code), at] = id(code), following
    return found


def find_called(frame: FrameType) -> Any:
    """Return the module that a frame of `CALL_MODULE` calls."""
    outer = frame.f_back
    if outer is not None and outer.f_code is WRAP_CALL:
        frame = outer  # the frame with fewer variables, since all of them are copied to a dict
    return frame.f_locals["self"]


def join_places(places: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the places, each once."""
    return tuple(places) if len(places) < 2 else tuple(dict.fromkeys(places))


def find_modules(model: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    """Find the modules of a model and the names under which the model refers to them.

    "" for the model itself, variables that a function refers to, or attributes of the object of a
    method.
    """
    if isinstance(model, torch.nn.Module):
        return {"": model}
    function = getattr(model, "__func__", model)
    owner = getattr(model, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return {"": owner}
    if owner is None and not inspect.isroutine(model):  # a callable object
        owner, function = model, type(model).__call__
    variables: dict[str, Any] = dict(getattr(owner, "__dict__", {}))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        variables = {**found.globals, **found.nonlocals, **variables}
    return {name: value for name, value in variables.items() if isinstance(value, torch.nn.Module)}


def join_modules(model: Callable[..., Any]) -> torch.nn.Module:
    """Make one module that holds a model's modules at their paths."""
    modules = find_modules(model)
    return modules[""] if "" in modules else torch.nn.ModuleDict(modules)


def name_modules(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Map id of a module to its path."""
    return {
        id(part): join_path(root, path)
        for root, module in reversed(modules.items())
        for path, part in module.named_modules()
    }


def join_path(*parts: str) -> str:
    """Join "decoder" and "gru" to "decoder.gru". Empty parts are left out."""
    return ".".join(part for part in parts if part)
