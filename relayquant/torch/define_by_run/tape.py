"""Define-by-run, calibration: a call of the model is run and recorded on a `Tape`.

A tape can be run again by itself: control flow has been decided, and what came from outside is
stored. So nothing is observed while the user's code runs, and calibration sees what it needs,
whatever the straight runs turn out to be once all calls are known.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]

from relayquant.errors import ModelError
from relayquant.storage.files import TEMPORARY, writing
from relayquant.torch.define_by_run.arguments import (
    ResultForm,
    is_equal,
    join_arguments,
    read_result,
    split_arguments,
)
from relayquant.torch.define_by_run.call_sites import CallSite, SiteTable
from relayquant.torch.define_by_run.forwards import ModuleCall
from relayquant.torch.define_by_run.functions import (
    DROPOUT,
    RANDOM,
    SIZED_BY_VALUES,
    PartFunction,
    find_pure,
    may_write,
)


class TensorFile:
    """Tensors on disk, in a temporary file that goes with this object. Several threads may use
    it.
    """

    def __init__(self) -> None:
        with writing("temporary files", TEMPORARY):
            self._file = tempfile.TemporaryFile(prefix="relayquant-")  # noqa: SIM115
        self._kept: dict[int, torch.Tensor] = {}  # of dtypes that numpy has not
        self._end = 0
        self._moving = threading.Lock()  # the file has one position

    def append(self, tensor: torch.Tensor) -> int:
        """Store a tensor as it is now; where it lies."""
        value = tensor.detach()
        with self._moving:
            start = self._end
            try:
                array = value.numpy()
            except (TypeError, RuntimeError):
                self._kept[start] = value.clone()
                self._end += 1
                return start
            self._file.seek(start)
            np.lib.format.write_array(self._file, array, allow_pickle=False)
            self._end = self._file.tell()
        return start

    def read(self, start: int) -> torch.Tensor:
        """The tensor that was stored at a place, a new one each time."""
        if start in self._kept:
            return self._kept[start].clone()
        with self._moving:
            self._file.seek(start)
            return torch.from_numpy(np.lib.format.read_array(self._file, allow_pickle=False))


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
    """A parameter or buffer of the model, by its id."""

    number: int


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
    written: tuple[tuple[int, int], ...] = ()

    @property
    def writes(self) -> bool:
        """Whether it changes a tensor."""
        return self.target or bool(self.written)


class Tape:
    """One call of the model.

    Attributes:
        steps: In the order they ran.
        forms: Of every value.
        stored: Number of a value that came from outside -> where it lies in the file.
        arguments: Arguments of the call, with slots.
        inputs: Tensors among them: where they lie in the file.
        sizes: Shapes of these tensors.
        has_state: Whether it read a tensor that is no argument or constant and that it has not
            made: state from before.
        eager: Operators that only PyTorch can run: they make views of what is written into.
        alive: Values that still exist when the call is over: results, and state.
    """

    def __init__(self) -> None:
        self.steps: list[TapeStep] = []
        self.forms: list[ValueForm] = []
        self.stored: dict[int, int] = {}
        self.arguments: Any = None
        self.inputs: tuple[int, ...] = ()
        self.sizes: tuple[tuple[int, ...], ...] = ()
        self.has_state = False
        self.eager: set[CallSite] = set()
        self.alive: frozenset[int] = frozenset()


class ModelConstants:
    """Parameters and buffers of a model, which are constants as long as nobody writes into them."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.names: dict[int, str] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._written: set[int] = set()
        self._versions: dict[int, int] = {}
        for root, module in modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                number = id(tensor)
                self.names.setdefault(number, f"{root}.{name}" if root else name)
                self.tensors[number] = tensor
                self._versions[number] = read_version(tensor)
        self._constants = {number: ModelConstant(number) for number in self.tensors}

    def find(self, tensor: torch.Tensor) -> ModelConstant | None:
        """The constant that a tensor is; None where it is none."""
        number = id(tensor)
        if number not in self.tensors or number in self._written:
            return None
        is_same = read_version(tensor) == self._versions[number]
        return self._constants[number] if is_same else None

    def keep_before_write(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written into: steps that read it so far read a copy."""
        number = id(tensor)
        if number in self.tensors and number not in self._written:
            self.tensors[number] = tensor.detach().clone()
            self._written.add(number)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows the memory of another."""
    return not tensor.is_inference() and tensor._is_view() and tensor._base is not None


def read_version(tensor: torch.Tensor) -> int:
    """How often a tensor was written into; -1 for those that do not count it."""
    return -1 if tensor.is_inference() else tensor._version


class RecordedCall(TorchFunctionMode):
    """Records what runs under it.

    A loop records the same calls again and again: what is equal is kept once. Most of the time
    between operators would else go to Python's garbage collector, which looks through all of it.
    """

    def __init__(
        self,
        sites: SiteTable,
        constants: ModelConstants,
        file: TensorFile,
        arguments: Sequence[torch.Tensor],
        order: Sequence[CallSite] | None = None,
        parts: Mapping[int, ModuleCall] | None = None,
    ) -> None:
        super().__init__()
        self.order, self._parts = order, parts or {}
        self.sites, self.constants, self.file = sites, constants, file
        self.tape = Tape()
        #: id of a tensor -> (the tensor, which may be gone, number of its value)
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        #: id of a tensor -> (the tensor, which may be gone, operators that have made views of it)
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], set[CallSite]]] = {}
        #: of each operator, what was called last, and the same without writing
        self._calls: dict[CallSite, tuple[Call, Call | None]] = {}
        self._forms: dict[tuple[torch.Size, torch.dtype], ValueForm] = {}
        #: id of a tensor that the call was given or has made without another -> the tensor
        self._own = {id(tensor): weakref.ref(tensor) for tensor in arguments}

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """The call of a standalone or custom module; None for any other."""
        return self._parts.get(id(module))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_asking = self.sites.names[func]
        if is_asking:
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        arguments = split_arguments((args, kwargs), tensors)
        if not tensors:
            result = func(*args, **kwargs)  # may make a tensor, which is an input of what follows
            read = read_result(result)
            self._own.update((id(t), weakref.ref(t)) for t in (read[1] if read else ()))
            return result
        frame = sys._getframe(1)
        site = self.sites.add(self.sites.find_key(frame, name), frame)
        if self.order is not None:
            check_order(self.order, len(self.tape.steps), site)
        is_writer = may_write(name, kwargs)
        if is_writer:
            self.constants.keep_before_write(tensors[0])
        operands = tuple(map(self.find_operand, tensors))
        versions = [read_version(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        written = [i for i, version in enumerate(versions) if read_version(tensors[i]) != version]
        read = read_result(result)
        is_part = isinstance(func, PartFunction)  # it is called once, and what it gives is stored
        is_drawn = is_part or name in RANDOM
        is_drawn |= name in DROPOUT and bool(kwargs.get("training", True))
        is_target = bool(written) and read is not None and read[1][0] is tensors[0]
        pure = None
        call = Call(func, arguments)
        if is_part:
            site.reason = func.reason
        elif read is None:
            site.reason = "its result is no tensor"
        elif is_drawn:
            site.reason = "it draws random numbers"
        elif name in SIZED_BY_VALUES:
            site.reason = "the values decide the size of its result"
        elif not written:
            pure = call if not kwargs.get("inplace") else Call(*self.strip(func, name, arguments))
        elif written == [0] and is_target and not self.has_aliases(tensors[0]):
            found = find_pure(func, name, arguments[1])
            pure = Call(found[0], (arguments[0], found[1])) if found else None
        if written and pure is None and not is_part:
            site.reason = "it writes into a tensor that others may look at"
        for i in written if pure is None else ():
            self.keep_views(tensors[i])
        for tensor in read[1] if read else ():
            if is_view(tensor):
                self.add_view(tensor._base, site)
        results = () if read is None else tuple(self.add_value(tensor) for tensor in read[1])
        if is_drawn:
            for tensor, value in zip(read[1] if read else (), results, strict=True):
                self.tape.stored[value] = self.file.append(tensor)
        changed = tuple(
            (i, self.add_value(tensors[i])) for i in written if not (is_target and i == 0)
        )
        for i, value in changed if is_drawn else ():
            self.tape.stored[value] = self.file.append(tensors[i])
        form = None if read is None else read[0]
        call, pure = self.keep_calls(site, call, pure)
        self.tape.steps.append(
            TapeStep(site, call, pure, is_target, operands, form, results, is_drawn, changed)
        )
        return result

    def keep_calls(self, site: CallSite, call: Call, pure: Call | None) -> tuple[Call, Call | None]:
        """What was called, and the same without writing; those of the time before, if equal."""
        known = self._calls.get(site)
        if known is not None and known[0].function is call.function:
            is_alike = (known[1] is None) == (pure is None)
            if is_alike and is_equal(known[0].arguments, call.arguments):
                return known
        self._calls[site] = call, pure
        return call, pure

    def strip(self, func: Any, name: str, arguments: Any) -> tuple[Any, Any]:
        """A call that was to write in place, and has not: a dropout that does nothing."""
        found = find_pure(func, name, arguments[1])
        return (found[0], (arguments[0], found[1])) if found else (func, arguments)

    def find_operand(self, tensor: torch.Tensor) -> Operand:
        """What a tensor is; one that is met for the first time comes from outside."""
        constant = self.constants.find(tensor)
        if constant is not None:
            return constant
        known = self._values.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        own = self._own.get(id(tensor))
        self.tape.has_state |= own is None or own() is not tensor
        value = self.add_value(tensor)
        self.tape.stored[value] = self.file.append(tensor)
        return value

    def add_value(self, tensor: torch.Tensor) -> int:
        """A number for what a tensor holds from now on."""
        value = len(self.tape.forms)
        key = tensor.shape, tensor.dtype
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = ValueForm.of(tensor)
        self.tape.forms.append(form)
        self._values[id(tensor)] = weakref.ref(tensor), value
        return value

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

    ends = find_last_uses(tape)
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


def find_last_uses(tape: Tape) -> list[list[int]]:
    """Of each step, the values that no later one reads."""
    last: dict[int, int] = {}
    for i, step in enumerate(tape.steps):
        for value in (*step.operands, *step.results, *(value for _, value in step.written)):
            if isinstance(value, int):
                last[value] = i
    ends: list[list[int]] = [[] for _ in tape.steps]
    for value, i in last.items():
        ends[i].append(value)
    return ends


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
            "data."
        )
