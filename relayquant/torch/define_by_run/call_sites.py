"""Define-by-run: which operator a call is, by module path and place in the code -> `CallSite`."""

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

#: what calls a module's `forward`
CALL_MODULE = torch.nn.Module._call_impl.__code__
#: what calls that
WRAP_CALL = torch.nn.Module._wrapped_call_impl.__code__
#: code that stands between a module's caller and its `forward`
_TRANSPARENT = (
    WRAP_CALL,
    ModuleForward.__call__.__code__,
    # where there are hooks, which come and go without the operator being another one
    *(code for code in CALL_MODULE.co_consts if isinstance(code, CodeType)),
)
#: where code lies that is not the user's
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

#: What two calls of one operator have in common: (id of the module, name of the function, places
#: within the module, places around it); a place is (id of a code object, instruction), and they go
#: from the call outwards to the user's module. A module that the model did not have when it was
#: prepared, as its code may make one in each call, is known by its class and the places around it.
SiteKey = tuple[Any, ...]


class CodeKind(enum.Enum):
    """What a code object is, to a look through the stack of a call."""

    USER = enum.auto()
    LIBRARY = enum.auto()  #: PyTorch's or ours: a place like those of the user's
    TRANSPARENT = enum.auto()  #: says nothing of which operator it is
    MODULE = enum.auto()  #: calls a module's `forward`
    ROOT = enum.auto()  #: calls the model


# The look is taken at each operator: names of the module are found faster than members.
_USER, _LIBRARY, _MODULE, _ROOT = (
    CodeKind.USER, CodeKind.LIBRARY, CodeKind.MODULE, CodeKind.ROOT,
)  # fmt: skip


class CallSite:
    """An operator of the user's code.

    Attributes:
        module: Path of the innermost module that runs it, "" for the model itself.
        operator: Name of the function of PyTorch.
        file, line, function: The user's code that calls it, or the module of PyTorch that does.
        reason, advice: Why it stays in PyTorch, and what to do about it; "" as long as nothing
            says that it does.
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
    """All call sites of one model, found by the stack of a call."""

    def __init__(self, model: Callable[..., Any], root: CodeType) -> None:
        self.modules = find_modules(model)
        self.parts = [part for module in self.modules.values() for part in module.modules()]
        self.paths = name_modules(self.modules)
        self.names = FunctionNames()
        self.sites: dict[SiteKey, CallSite] = {}
        #: id of a code object -> what it is; the objects must stay alive
        self._kinds = {id(root): CodeKind.ROOT, id(CALL_MODULE): CodeKind.MODULE}
        self._kinds.update((id(code), CodeKind.TRANSPARENT) for code in _TRANSPARENT)
        self._codes: list[CodeType] = [root]
        #: places that are the same as another
        self._folded: dict[tuple[int, int], tuple[int, int]] = {}
        self._root = root

    def find_key(self, frame: FrameType | None, operator: str) -> SiteKey:
        """The key of a call of `operator`, whose caller is `frame`.

        It holds all places between the call and the `forward` of the user's module around it, one
        time each: a function that calls itself has the same operators at any depth. Those outside
        of the innermost module stand apart.
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
        """The places between the call of a module, whose innermost frame is given, and the
        `forward` of the user's module around it.
        """
        return join_places(self.walk(frame, True)[0])

    def walk(
        self, frame: FrameType | None, passes_libraries: bool
    ) -> tuple[list[tuple[int, int]], FrameType | None, bool]:
        """From a frame outwards to the call of the module around it, or of the model.

        Args:
            passes_libraries: Whether to go on at a module none of whose code is the user's.

        Returns:
            The places between, the frame that calls the module (None: the model itself), and
            whether a place is the user's.
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
        """What a code is that was not met before."""
        kind = _LIBRARY if code.co_filename.startswith(_LIBRARIES) else _USER
        self._codes.append(code)
        self._folded.update(fold_places(code))
        self._kinds[id(code)] = kind
        return kind

    def add(self, key: SiteKey, frame: FrameType | None) -> CallSite:
        """The site of a key; a new one where it has none."""
        site = self.sites.get(key)
        if site is None:
            site = self.sites.setdefault(key, self.describe(key, frame))  # threads: the first
        return site

    def describe(self, key: SiteKey, frame: FrameType | None) -> CallSite:
        """What is said of the call with this key: its place is the innermost code of the user's."""
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
    """Of Python 3.11, where a call is two instructions: the place of the first -> of the second.
    Builtins (`abs(x)`, `list(map(layer, x))`) are called by the second as long as the code is new,
    by the first once it has run some times.
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
    """The module that is called by a frame of `CALL_MODULE`."""
    outer = frame.f_back
    if outer is not None and outer.f_code is WRAP_CALL:
        frame = outer  # it has fewer variables, all of which are made a dict of
    return frame.f_locals["self"]


def join_places(places: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Places, one time each."""
    return tuple(places) if len(places) < 2 else tuple(dict.fromkeys(places))


def find_modules(model: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    """The modules that a model is made of, by the name under which it finds them: "" for itself,
    the variables that a function refers to, the attributes of an object whose method it is.
    """
    if isinstance(model, torch.nn.Module):
        return {"": model}
    function = getattr(model, "__func__", model)
    owner = getattr(model, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return {"": owner}
    if owner is None and not inspect.isroutine(model):  # an object that can be called
        owner, function = model, type(model).__call__
    variables: dict[str, Any] = dict(getattr(owner, "__dict__", {}))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        variables = {**found.globals, **found.nonlocals, **variables}
    return {name: value for name, value in variables.items() if isinstance(value, torch.nn.Module)}


def join_modules(model: Callable[..., Any]) -> torch.nn.Module:
    """One module that holds those of a model at their paths."""
    modules = find_modules(model)
    return modules[""] if "" in modules else torch.nn.ModuleDict(modules)


def name_modules(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """id of a module -> its path."""
    return {
        id(part): join_path(root, path)
        for root, module in reversed(modules.items())
        for path, part in module.named_modules()
    }


def join_path(*parts: str) -> str:
    """ "decoder" and "gru" -> "decoder.gru"; empty parts are left out."""
    return ".".join(part for part in parts if part)
