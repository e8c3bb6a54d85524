"""Define-by-run, calibration: a call of the model is run and recorded on a `Tape`.

A tape can be run again by itself: control flow has been decided, and what came from outside is
stored. So nothing is observed while the user's code runs, and calibration sees what it needs,
whatever the regions turn out to be once all calls are known.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]

from relayquant.base.storage.files import TEMPORARY, writing
from relayquant.errors import ModelError
from relayquant.ir.rewrite.lifetimes import find_ends
from relayquant.torch.define_by_run.arguments import (
    SINGLE,
    FlatArguments,
    ResultForm,
    is_equal,
    join_arguments,
    read_result,
    split_arguments,
)
from relayquant.torch.define_by_run.call_sites import CallSite, SiteKey, SiteTable
from relayquant.torch.define_by_run.forwards import ModuleCall
from relayquant.torch.define_by_run.functions import (
    DROPOUT,
    RANDOM,
    SIZED_BY_VALUES,
    SubmoduleFunction,
    changes_statistics,
    find_pure,
    may_write,
    replaces_memory,
)


class TensorFile:
    """Tensors on disk, in a temporary file that goes with this object. Several threads may use
    it.
    """

    def __init__(self) -> None:
        with writing("temporary files", TEMPORARY):
            self._file = tempfile.TemporaryFile(prefix="relayquant-")  # noqa: SIM115
        #: each tensor: where it lies, its shape and dtype; or it, of a dtype that numpy has not
        self._rows: list[tuple[int, tuple[int, ...], np.dtype[Any]] | torch.Tensor] = []
        self._end = 0
        self._is_at_end = True
        self._moving = threading.Lock()  # the file has one position

    def append(self, tensor: torch.Tensor) -> int:
        """Store a tensor as it is now; its number."""
        value = tensor.detach()
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):
            array = None
        with self._moving:
            if array is None:
                self._rows.append(value.clone())
            else:
                if not self._is_at_end:
                    self._file.seek(self._end)
                    self._is_at_end = True
                flat = np.ascontiguousarray(array).reshape(-1)
                self._file.write(flat.view(np.uint8))
                self._rows.append((self._end, array.shape, array.dtype))
                self._end += flat.nbytes
            return len(self._rows) - 1

    def read(self, number: int) -> torch.Tensor:
        """The tensor that has a number, a new one each time."""
        row = self._rows[number]
        if isinstance(row, torch.Tensor):
            return row.clone()
        start, shape, dtype = row
        array = np.empty(shape, dtype)
        with self._moving:
            self._is_at_end = False
            self._file.seek(start)
            self._file.readinto(array.reshape(-1).view(np.uint8))
        return torch.from_numpy(array)


@dataclass(frozen=True, slots=True)
class ValueForm:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> ValueForm:
        """Those of a tensor."""
        return ValueForm(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class ModelConstant:
    """A parameter or buffer of the model, or a tensor that is as constant, by its id."""

    number: int


@dataclass(frozen=True, eq=False, slots=True)
class OutsideTensor:
    """A tensor that a call read and that was there before it: an attribute, a global, a closure's.

    Attributes:
        tensor: The tensor, which may be gone.
        version: How often it had been written into.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int

    def find(self) -> torch.Tensor | None:
        """The tensor, if somebody holds it and nobody has written into it since."""
        tensor = self.tensor()
        is_kept = tensor is not None and self.version == read_version(tensor) != UNCOUNTED
        return tensor if is_kept else None


#: What a step reads: number of a value of the tape, or a constant.
Operand = int | ModelConstant


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A function and its arguments, with slots for its tensors."""

    function: Callable[..., Any]
    arguments: Any  # (args, kwargs)

    def run(self, tensors: Any) -> Any:
        """What it returns for these tensors."""
        args, kwargs = join_arguments(self.arguments, tensors)
        return self.function(*args, **kwargs)


@dataclass(frozen=True, eq=False, slots=True)
class TapeStep:
    """One call of an operator.

    Attributes:
        site: Which operator.
        call: What was called.
        pure: The same without writing into an argument, where a graph can hold it; None: it can
            not, and the operator stays in PyTorch.
        target: Whether it returns its first tensor, into which it has written.
        operands: What its tensors are.
        form: What it returns; None for what is no tensor.
        results: Numbers of the values it returns.
        is_drawn: Whether it gives another result each time: `results` are stored, and it is not
            run again.
        is_same: Whether it returns its first tensor as it is, as `contiguous` may: the same tensor.
        written: Tensors, by their place among the operands, that it writes into and does not
            return, and the numbers of what they hold afterwards.
    """

    site: CallSite
    call: Call
    pure: Call | None
    target: bool
    operands: tuple[Operand, ...]
    form: ResultForm | None
    results: tuple[int, ...]
    is_drawn: bool = False
    is_same: bool = False
    written: tuple[tuple[int, int], ...] = ()

    @property
    def writes(self) -> bool:
        """Whether it changes a tensor."""
        return self.target or bool(self.written)

    def list_values(self) -> list[int]:
        """Numbers of the values that it reads, returns or writes."""
        numbers = (*self.operands, *self.results, *(value for _, value in self.written))
        return [number for number in numbers if isinstance(number, int)]


@dataclass(frozen=True, eq=False, slots=True)
class KnownOperator:
    """How an operator was called last.

    Attributes:
        step: That call.
        repeated: Its function, where a call of it with equal arguments is a repetition; None where
            each has to be looked at by itself.
        flat: These arguments; without meaning where `repeated` is None.
    """

    step: TapeStep
    repeated: Callable[..., Any] | None
    flat: FlatArguments

    @staticmethod
    def of(name: str, step: TapeStep, is_alias: bool) -> KnownOperator:
        """That of the function with this name; `is_alias`: it shows the memory of a tensor."""
        call = step.call
        is_own = is_alias or step.is_drawn or step.writes or may_write(name, call.arguments[1])
        is_alike = not is_own and step.form in (None, SINGLE)
        flat = FlatArguments.of(call.arguments) if is_alike else None
        return KnownOperator(step, flat and call.function, flat or FlatArguments((), {}))


class Tape:
    """One call of the model.

    Attributes:
        rows: What ran, in order, as steps that are alike but for operands and results.
        numbers: These, of all rows: operands of the first, its results, operands of the second ...
        forms: Of every value.
        stored: Number of a value that came from outside -> its number in the file.
        arguments: Arguments of the call, with slots.
        inputs: Tensors among them: their numbers in the file.
        sizes: Shapes of these tensors.
        entries: Number of a value -> number of the tensor among the arguments that it was.
        results: Values that the model returned, tensor by tensor, None for one that is none of
            the tape's; and `given`, their numbers in the file. Where these are asked for.
        outside: Number of a value -> the tensor that it was, of those that are no arguments or
            constants and that the call has not made: state from before.
        eager: Operators that only PyTorch can run: they make views of what is written into.
        rewritten: Operators that have returned a tensor as it is, which was then written into.
        alive: Values that still exist when the call is over: results, and state.
    """

    def __init__(self) -> None:
        self.rows: list[TapeStep] = []
        self.numbers: list[Operand] = []
        self.forms: list[ValueForm] = []
        self.stored: dict[int, int] = {}
        self.arguments: Any = None
        self.inputs: tuple[int, ...] = ()
        self.sizes: tuple[tuple[int, ...], ...] = ()
        self.entries: dict[int, int] = {}
        self.results: tuple[int | None, ...] = ()
        self.given: tuple[int, ...] = ()
        self.outside: dict[int, OutsideTensor] = {}
        self.eager: set[CallSite] = set()
        self.rewritten: set[CallSite] = set()
        self.alive: frozenset[int] = frozenset()

    def append(self, step: TapeStep) -> None:
        """A step that has run."""
        self.rows.append(step)
        self.numbers += (*step.operands, *step.results)

    @property
    def has_state(self) -> bool:
        """Whether the call read what was there before it, and is no constant."""
        return bool(self.outside)

    def copy(self) -> Tape:
        """Another tape of the same call."""
        twin = copy.copy(self)
        vars(twin).pop("steps", None)
        twin.forms, twin.stored, twin.outside = [*self.forms], {**self.stored}, {**self.outside}
        return twin

    def add_form(self, form: ValueForm) -> int:
        """The number of a further value."""
        self.forms.append(form)
        return len(self.forms) - 1

    @functools.cached_property
    def steps(self) -> tuple[TapeStep, ...]:
        """All that ran; of a tape that is finished."""
        numbers = iter(self.numbers)

        def read(count: int) -> Any:
            return tuple(itertools.islice(numbers, count))

        return tuple(
            replace(row, operands=read(len(row.operands)), results=read(len(row.results)))
            for row in self.rows
        )


class ModelConstants:
    """Parameters and buffers of a model, which are constants as long as nobody writes into them.

    Attributes:
        names, tensors: By id of the tensor.
        current: id -> how often it had been written into, and the constant, of those that are as
            they were.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.names: dict[int, str] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.current: dict[int, tuple[int, ModelConstant]] = {}
        self._outside: dict[int, OutsideTensor] = {}
        for root, module in modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if torch.nn.parameter.is_lazy(tensor):
                    raise ModelError(
                        f"Parameter {name!r} has no shape yet, as its module is lazy. Call the "
                        "model once with example inputs before you prepare it.",
                        code="RQ208",
                    )
                number = id(tensor)
                self.names.setdefault(number, f"{root}.{name}" if root else name)
                self.tensors[number] = tensor
                self.current[number] = read_version(tensor), ModelConstant(number)

    def find_current(self) -> set[int]:
        """ids of the parameters and buffers that nobody has written into."""
        return {
            number
            for number, (version, _) in self.current.items()
            if version == read_version(self.tensors[number])
        }

    def keep_before_write(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written into: steps that read it so far read a copy."""
        number = id(tensor)
        if self.current.pop(number, None) is not None:
            self.tensors[number] = tensor.detach().clone()

    def note_outside(self, tensor: torch.Tensor) -> OutsideTensor:
        """A tensor that a call reads as it is now: the same object for the same one."""
        known, version = self._outside.get(id(tensor)), read_version(tensor)
        if known is None or known.tensor() is not tensor or known.version != version:
            known = self._outside[id(tensor)] = OutsideTensor(weakref.ref(tensor), version)
        return known

    def add(self, tensor: torch.Tensor, name: str) -> ModelConstant:
        """A tensor that turned out to be constant; the same one for the same tensor."""
        number = id(tensor)
        self.tensors.setdefault(number, tensor)
        if number not in self.names:
            while name in self.names.values() or hasattr(torch.nn.Module, name.split(".")[-1]):
                name += "_"  # a plain attribute may have the name of a method
            self.names[number] = name
        return ModelConstant(number)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows the memory of another."""
    return tensor._base is not None


def shares_memory(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a result begins where one of the tensors does that it is made of, and is no view."""
    if result._base is not None:
        return False
    place = result.data_ptr()
    return place != 0 and any(tensor.data_ptr() == place for tensor in tensors)


#: version of a tensor that does not count how often it is written into
UNCOUNTED = -1


def read_version(tensor: torch.Tensor) -> int:
    """How often a tensor was written into; `UNCOUNTED` for those that do not count it."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def read_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """That of each."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return list(map(read_version, tensors))


#: types of results that may hold tensors
_TENSORS = (torch.Tensor, tuple, list)


class RecordedCall(TorchFunctionMode):
    """Records what runs under it.

    A loop records the same calls again and again: what is equal is kept once, and known by a look
    at the arguments that are no tensors.
    """

    def __init__(
        self,
        sites: SiteTable,
        constants: ModelConstants,
        file: TensorFile,
        arguments: Sequence[torch.Tensor],
        order: Sequence[CallSite] | None = None,
        parts: Mapping[int, ModuleCall] | None = None,
        known: dict[SiteKey, KnownOperator] | None = None,
    ) -> None:
        super().__init__()
        self.order, self._parts = order, parts or {}
        #: of each operator, how it was called last
        self._known = {} if known is None else known
        self.sites, self.constants, self.file = sites, constants, file
        self.tape = Tape()
        #: id of a tensor -> (the tensor, which may be gone, number of its value)
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        #: id of a tensor -> (the tensor, which may be gone, operators that have made views of it)
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], set[CallSite]]] = {}
        #: id of a tensor -> (the tensor, operators that have returned it as it is)
        self._same: dict[int, tuple[weakref.ref[torch.Tensor], set[CallSite]]] = {}
        #: operators that have returned such a tensor without making a view
        self._aliasing: set[CallSite] = set()
        self._forms: dict[tuple[torch.Size, torch.dtype], ValueForm] = {}
        #: id of a tensor that the call was given or has made without another -> the tensor
        self._own = {id(tensor): weakref.ref(tensor) for tensor in arguments}
        self._arguments = {id(tensor): i for i, tensor in reversed([*enumerate(arguments)])}

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """The call of a standalone or custom module; None for any other."""
        return self._parts.get(id(module))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_asking = self.sites.names[func]
        if is_asking:
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        key = self.sites.find_key(frame, name)
        known = self._known.get(key)
        if known is not None and known.repeated is func and not torch.is_autocast_enabled("cpu"):
            same = known.flat.match(args, kwargs)
            if same:
                return self.repeat(known.step, name, args, kwargs, same)
        tensors: list[torch.Tensor] = []
        arguments = split_arguments((args, kwargs), tensors)
        if not tensors:
            result = func(*args, **kwargs)  # may make a tensor, which is an input of what follows
            read = read_result(result)
            self._own.update((id(t), weakref.ref(t)) for t in (read[1] if read else ()))
            return result
        site = self.sites.add(key, frame)
        if self.order is not None:
            check_order(self.order, len(self.tape.rows), site)
        is_following = changes_statistics(func, name, args, kwargs)
        for tensor in tensors if is_following else tensors[: may_write(name, kwargs)]:
            self.constants.keep_before_write(tensor)
        versions = read_versions(tensors)
        operands = tuple(self.find_operands(tensors, versions))
        result = func(*args, **kwargs)
        call = Call(func, arguments)
        step = self.make_step(site, name, call, tensors, operands, versions, result)
        if known is not None and has_equal_call(known.step, step):
            step = replace(step, call=known.step.call, pure=known.step.pure)
        else:
            self._known[key] = KnownOperator.of(name, step, site in self._aliasing)
        self.tape.append(step)
        return result

    def repeat(
        self, step: TapeStep, name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
    ) -> Any:
        """The result of an operator that is called as in `step`, but for its tensors."""
        if self.order is not None:
            check_order(self.order, len(self.tape.rows), step.site)
        versions = read_versions(tensors)
        operands = self.find_operands(tensors, versions)
        result = step.call.function(*args, **kwargs)
        is_tensor = isinstance(result, torch.Tensor)
        is_alike = is_tensor if step.form else not isinstance(result, _TENSORS)
        tape = self.tape
        if is_alike and is_tensor:
            is_alike = not step.is_same and not shares_memory(result, tensors)
        if not is_alike or read_versions(tensors) != versions:
            tape.append(
                self.make_step(
                    step.site, name, step.call, tensors, tuple(operands), versions, result
                )
            )
            return result
        # A loop comes here at each operator. Numbers are held by lists: objects of their own would
        # be looked through by Python's garbage collector, again and again.
        tape.rows.append(step)
        tape.numbers += operands
        if is_tensor:
            if result._base is not None:
                self.add_view(result._base, step.site)
            tape.numbers.append(self.add_value(result))
        return result

    def make_step(
        self,
        site: CallSite,
        name: str,
        call: Call,
        tensors: Sequence[torch.Tensor],
        operands: tuple[Operand, ...],
        versions: Sequence[int],
        result: Any,
    ) -> TapeStep:
        """The step that a call was.

        Args:
            name: Of the function.
            operands, versions: Of its tensors, before it ran.
        """
        func, (_, kwargs) = call.function, call.arguments
        after = read_versions(tensors)
        written = [i for i, version in enumerate(versions) if after[i] != version]
        if replaces_memory(func, name):
            written = [0]
        form, outputs = read_result(result) or (None, [])
        is_part = isinstance(
            func, SubmoduleFunction
        )  # it is called once, and what it gives is stored
        is_drawn = is_part or name in RANDOM
        is_drawn |= name in DROPOUT and bool(kwargs.get("training", True))
        is_cast = torch.is_autocast_enabled("cpu")  # what it gives depends on where it is called
        is_drawn |= is_cast
        gives_first = bool(outputs) and outputs[0] is tensors[0]
        is_target, is_same = gives_first and bool(written), gives_first and not written
        if is_same:
            self.note_same(tensors[0], site)
        for i in written:
            self.tape.rewritten.update(self.find_same(tensors[i]))
        reason, advice = explain_eager(call, name, tensors, outputs, is_cast, is_drawn)
        pure = None
        if reason:
            site.reason, site.advice = reason, advice
        elif not written:
            pure = strip_inplace(call, name)
        elif written == [0] and is_target and not self.has_aliases(tensors[0]):
            pure = find_pure_call(call, name)
        if written and pure is None and not is_part:
            site.reason = "it writes into a tensor that others may look at"
        for i in written if pure is None else ():
            self.keep_views(tensors[i])
        for tensor in outputs:
            if is_view(tensor):
                self.add_view(tensor._base, site)
            for other in tensors:
                self.join_aliases(tensor, other, site)
        results = tuple(map(self.add_value, outputs))
        if is_drawn:
            for tensor, value in zip(outputs, results, strict=True):
                self.tape.stored[value] = self.file.append(tensor)
        changed = tuple(
            (i, self.add_value(tensors[i])) for i in written if not (is_target and i == 0)
        )
        for i, value in changed if is_drawn else ():
            self.tape.stored[value] = self.file.append(tensors[i])
        return TapeStep(
            site, call, pure, is_target, operands, form, results, is_drawn, is_same, changed
        )

    def find_operands(
        self, tensors: Sequence[torch.Tensor], versions: Sequence[int]
    ) -> list[Operand]:
        """What tensors are that were written into so often."""
        constants, values = self.constants.current, self._values
        found: list[Operand] = []
        for i, tensor in enumerate(tensors):
            number = id(tensor)
            if number in constants and constants[number][0] == versions[i]:
                found.append(constants[number][1])
            elif number in values and values[number][0]() is tensor:
                found.append(values[number][1])
            else:
                found.append(self.add_input(tensor))
        return found

    def add_input(self, tensor: torch.Tensor) -> int:
        """A number for a tensor that is met for the first time: it comes from outside."""
        own = self._own.get(id(tensor))
        value = self.add_value(tensor)
        if own is None or own() is not tensor:
            self.tape.outside[value] = self.constants.note_outside(tensor)
        self.tape.stored[value] = self.file.append(tensor)
        argument = self._arguments.get(id(tensor))
        if argument is not None:
            self.tape.entries[value] = argument
        return value

    def note_results(self, tensors: Sequence[torch.Tensor]) -> None:
        """The model has returned these."""
        known = [self._values.get(id(tensor)) for tensor in tensors]
        self.tape.results = tuple(
            row[1] if row is not None and row[0]() is tensor else None
            for row, tensor in zip(known, tensors, strict=True)
        )
        self.tape.given = tuple(map(self.file.append, tensors))

    def add_value(self, tensor: torch.Tensor) -> int:
        """A number for what a tensor holds from now on."""
        key = tensor.shape, tensor.dtype
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = ValueForm.of(tensor)
        value = self.tape.add_form(form)
        self._values[id(tensor)] = weakref.ref(tensor), value
        return value

    def note_same(self, tensor: torch.Tensor, site: CallSite) -> None:
        """An operator has returned a tensor as it is."""
        self._same[id(tensor)] = weakref.ref(tensor), self.find_same(tensor) | {site}

    def find_same(self, tensor: torch.Tensor) -> set[CallSite]:
        """Operators that have returned a tensor as it is."""
        known = self._same.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else set()

    def keep_views(self, tensor: torch.Tensor) -> None:
        """A tensor was written into: other tensors that show its memory have to stay views of it,
        which the values of an integer module are not.
        """
        base = tensor._base if is_view(tensor) else tensor
        for site in self.find_views(base):
            site.reason = site.reason or "it shows memory that is written into"
            self.tape.eager.add(site)

    def has_aliases(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor may show the same memory."""
        return tensor.is_inference() or tensor._is_view() or bool(self.find_views(tensor))

    def join_aliases(self, tensor: torch.Tensor, other: torch.Tensor, site: CallSite) -> None:
        """An operator has returned a tensor: one that shows the memory of another without being a
        view of it, as `detach` and `data` do, shares the views of that one.
        """
        place = tensor.data_ptr()
        if tensor is other or not place or place != other.data_ptr() or is_view(tensor):
            return
        base = other._base if is_view(other) else other
        self.add_view(base, site)
        self._views[id(tensor)] = weakref.ref(tensor), self.find_views(base)
        self._aliasing.add(site)

    def add_view(self, base: torch.Tensor, site: CallSite) -> None:
        """An operator has made a view of a tensor."""
        sites = self.find_views(base)
        if not sites:
            self._views[id(base)] = weakref.ref(base), sites
        sites.add(site)

    def find_views(self, base: torch.Tensor) -> set[CallSite]:
        """Operators that have made views of a tensor; not of one that was at its address before,
        whose views are gone with it.
        """
        known = self._views.get(id(base))
        return known[1] if known is not None and known[0]() is base else set()

    def finish(self) -> Tape:
        """The tape, once the call is over and what it returned is held."""
        self.tape.alive = frozenset(
            value for tensor, value in self._values.values() if tensor() is not None
        )
        return self.tape


def explain_eager(
    call: Call,
    name: str,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    is_cast: bool,
    is_drawn: bool,
) -> tuple[str, str]:
    """(why no graph can hold a call, what to do about it), whatever it writes into; "" if one can.

    Args:
        name: Of the function.
        tensors, results: What it was given, and what it returned.
        is_cast: Whether it was called under autocast.
        is_drawn: Whether it gives another result each time.
    """
    if isinstance(call.function, SubmoduleFunction):
        return call.function.reason, ""
    if changes_statistics(call.function, name, *call.arguments):
        return "running statistics follow what it is given", "Call it in evaluation mode."
    if not results:
        return "its result is no tensor", ""
    if is_cast:
        advice = "Calibrate and convert the model outside of autocast."
        return "torch.autocast decides what it computes in", advice
    if is_drawn:
        return "it draws random numbers", ""
    if name in SIZED_BY_VALUES:
        return "the values decide the size of its result", ""
    if any(tensor.dtype is torch.bfloat16 for tensor in (*tensors, *results)):
        return "it computes with bfloat16", ""
    return "", ""


def find_pure_call(call: Call, name: str) -> Call | None:
    """The call that computes what this one writes into its first tensor; None if there is none."""
    template, kwargs = call.arguments
    found = find_pure(call.function, name, kwargs)
    return None if found is None else Call(found[0], (template, found[1]))


def strip_inplace(call: Call, name: str) -> Call:
    """A call that has written nothing without the word that it may: of a dropout that does
    nothing. `x.data` is `x.detach()`, which a graph can hold.
    """
    if name == "data":
        return Call(torch.Tensor.detach, call.arguments)
    is_marked = bool(call.arguments[1].get("inplace"))
    return (find_pure_call(call, name) if is_marked else None) or call


def replay(
    tape: Tape,
    constants: ModelConstants,
    file: TensorFile,
    observe: Callable[[int, TapeStep, list[torch.Tensor]], None],
) -> None:
    """Run a tape again; `observe` is told of each step's number and of the tensors it reads."""
    values: dict[int, torch.Tensor] = {}

    def find(operand: Operand) -> torch.Tensor:
        if isinstance(operand, ModelConstant):
            return constants.tensors[operand.number]
        if operand not in values:
            values[operand] = file.read(tape.stored[operand])
        return values[operand]

    ends = find_ends(step.list_values() for step in tape.steps)
    with torch.no_grad():
        for i, step in enumerate(tape.steps):
            tensors = [find(operand) for operand in step.operands]
            observe(i, step, tensors)
            if step.is_drawn or (step.form is None and not step.writes):
                continue  # results that are stored; what was no tensor has decided what follows
            read = read_result(step.call.run(tensors))
            values.update(zip(step.results, read[1] if read else (), strict=True))
            values.update((value, tensors[k]) for k, value in step.written)
            for value in ends[i]:
                values.pop(value, None)


def has_equal_call(step: TapeStep, other: TapeStep) -> bool:
    """Whether two steps call the same, and the same without writing."""
    a, b = step.call, other.call
    is_alike = a.function is b.function and (step.pure is None) == (other.pure is None)
    return is_alike and is_equal(a.arguments, b.arguments)


def check_order(order: Sequence[CallSite], number: int, site: CallSite) -> None:
    """That a call passes the operators of the first one, in its order (`strict_order`).

    Raises:
        ModelError: it does not.
    """
    if number >= len(order) or order[number] is not site:
        expected = str(order[number]) if number < len(order) else "the end of the call"
        raise ModelError(
            f"strict_order: operator {number} of this call is {site}; of the first call it was "
            f"{expected}. Prepare the model without strict_order where control flow depends on the "
            "data.",
            code="RQ208",
        )
