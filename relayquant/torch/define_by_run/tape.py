"""Define-by-run, calibration: one call of the model as steps that can be run again.

Control flow is decided, and values from outside are stored. So nothing is observed while the user's
code runs (`recording`). After all calls are known and the regions are found, calibration computes
the values that it needs.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from relayquant.errors import ModelError
from relayquant.ir.rewrite.lifetimes import find_ends
from relayquant.torch.define_by_run.arguments import (
    ResultForm,
    join_arguments,
    read_result,
)
from relayquant.torch.define_by_run.call_sites import CallSite
from relayquant.torch.define_by_run.tensor_file import TensorFile


@dataclass(frozen=True, slots=True)
class ValueForm:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> ValueForm:
        """Return the form of a tensor."""
        return ValueForm(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class ModelConstant:
    """A parameter or buffer of the model, or another constant tensor, by its id."""

    number: int


@dataclass(frozen=True, eq=False, slots=True)
class OutsideTensor:
    """A tensor that a call read and that existed before the call: an attribute, a global, a
    closure's variable.

    Attributes:
        tensor: The tensor, which may no longer exist.
        version: Number of writes into it at that time.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int

    def find(self) -> torch.Tensor | None:
        """Return the tensor if it still exists and nobody has written into it since."""
        tensor = self.tensor()
        is_kept = tensor is not None and self.version == read_version(tensor) != UNCOUNTED
        return tensor if is_kept else None


#: Operand of a step: number of a value of the tape, or a constant.
Operand = int | ModelConstant


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A function and its arguments, with slots for its tensors."""

    function: Callable[..., Any]
    arguments: Any  # (args, kwargs)

    def run(self, tensors: Any) -> Any:
        """Return the result for these tensors."""
        args, kwargs = join_arguments(self.arguments, tensors)
        return self.function(*args, **kwargs)


@dataclass(frozen=True, eq=False, slots=True)
class TapeStep:
    """One call of an operator.

    Attributes:
        site: The operator.
        call: The recorded call.
        pure: The same without writing into an argument, if a graph can hold it. None: it cannot,
            and the operator stays in PyTorch.
        target: Whether it returns its first tensor after writing into it.
        operands: Its tensors.
        form: Structure of its result. None for a result without tensors.
        results: Numbers of the values it returns.
        is_drawn: Whether the result is different each time. Then `results` are stored and it is not
            run again.
        is_same: Whether it returns its first tensor unchanged, as `contiguous` may: the same
            tensor.
        written: Tensors that it writes into and does not return, by position among the operands,
            and the numbers of their values afterwards.
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
        """Return the numbers of the values that it reads, returns or writes."""
        numbers = (*self.operands, *self.results, *(value for _, value in self.written))
        return [number for number in numbers if isinstance(number, int)]


class Tape:
    """One call of the model.

    Attributes:
        rows: Executed steps in order. Equal steps are the same object, without operands and
            results.
        numbers: Operands and results of all rows: operands of the first, its results, operands of
            the second ...
        forms: Form of every value.
        stored: Number of a value from outside -> its number in the file.
        arguments: Arguments of the call, with slots.
        inputs: Tensors among them: their numbers in the file.
        sizes: Shapes of these tensors.
        entries: Number of a value -> number of the argument tensor that it was.
        results: Values that the model returned, for each tensor; None for a tensor that is not on
            the tape. Only if requested.
        given: Numbers of these tensors in the file. Only if requested.
        outside: Number of a value -> tensor, for tensors that are state: not arguments, not
            constants, and not made by the call.
        eager: Operators that only PyTorch can run, because they make views of tensors that are
            written into.
        rewritten: Operators that have returned a tensor unchanged, which was then written into.
        alive: Values that still exist after the call: results, and state.
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
        """Append an executed step."""
        self.rows.append(step)
        self.numbers += (*step.operands, *step.results)

    @property
    def has_state(self) -> bool:
        """Whether the call read a tensor that existed before it and is not a constant."""
        return bool(self.outside)

    def copy(self) -> Tape:
        """Copy the tape."""
        twin = copy.copy(self)
        vars(twin).pop("steps", None)
        twin.forms, twin.stored, twin.outside = [*self.forms], {**self.stored}, {**self.outside}
        return twin

    def add_form(self, form: ValueForm) -> int:
        """Add a value and return its number."""
        self.forms.append(form)
        return len(self.forms) - 1

    @functools.cached_property
    def steps(self) -> tuple[TapeStep, ...]:
        """All steps of a finished tape."""
        numbers = iter(self.numbers)

        def read(count: int) -> Any:
            return tuple(itertools.islice(numbers, count))

        return tuple(
            replace(row, operands=read(len(row.operands)), results=read(len(row.results)))
            for row in self.rows
        )


class ModelConstants:
    """Parameters and buffers of a model. They are constants until somebody writes into them.

    Attributes:
        names, tensors: By id of the tensor.
        current: id -> (number of writes so far, constant), for unchanged tensors.
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
        """Find the ids of the parameters and buffers that nobody has written into."""
        return {
            number
            for number, (version, _) in self.current.items()
            if version == read_version(self.tensors[number])
        }

    def keep_before_write(self, tensor: torch.Tensor) -> None:
        """Copy a tensor before a write into it: earlier steps read the copy."""
        number = id(tensor)
        if self.current.pop(number, None) is not None:
            self.tensors[number] = tensor.detach().clone()

    def note_outside(self, tensor: torch.Tensor) -> OutsideTensor:
        """Return the object for a tensor that a call reads. The same object for the same tensor."""
        known, version = self._outside.get(id(tensor)), read_version(tensor)
        if known is None or known.tensor() is not tensor or known.version != version:
            known = self._outside[id(tensor)] = OutsideTensor(weakref.ref(tensor), version)
        return known

    def add(self, tensor: torch.Tensor, name: str) -> ModelConstant:
        """Add a tensor that turned out to be constant. The same constant for the same tensor."""
        number = id(tensor)
        self.tensors.setdefault(number, tensor)
        if number not in self.names:
            while name in self.names.values() or hasattr(torch.nn.Module, name.split(".")[-1]):
                name += "_"  # a plain attribute may have the name of a method
            self.names[number] = name
        return ModelConstant(number)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another."""
    return tensor._base is not None


#: version of a tensor whose writes are not counted
UNCOUNTED = -1


def read_version(tensor: torch.Tensor) -> int:
    """Return the number of writes into a tensor. `UNCOUNTED` if they are not counted."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def read_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version of each tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return list(map(read_version, tensors))


def replay(
    tape: Tape,
    constants: ModelConstants,
    file: TensorFile,
    observe: Callable[[int, TapeStep, list[torch.Tensor]], None],
) -> None:
    """Run a tape again. `observe` is called with the number and operands of each step."""
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
                # stored results; results that are not tensors have already decided control flow
                continue
            read = read_result(step.call.run(tensors))
            values.update(zip(step.results, read[1] if read else (), strict=True))
            values.update((value, tensors[k]) for k, value in step.written)
            for value in ends[i]:
                values.pop(value, None)
