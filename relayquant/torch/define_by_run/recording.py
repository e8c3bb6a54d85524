"""Define-by-run, calibration: run a call of the model and record it on a `Tape`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]

from relayquant.errors import ModelError
from relayquant.torch.define_by_run.arguments import (
    SINGLE,
    FlatArguments,
    is_equal,
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
from relayquant.torch.define_by_run.tape import (
    Call,
    ModelConstants,
    Operand,
    Tape,
    TapeStep,
    ValueForm,
    is_view,
    read_versions,
)
from relayquant.torch.define_by_run.tensor_file import TensorFile

#: functions that compute gradients of what was computed before
DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


@dataclass(frozen=True, eq=False, slots=True)
class KnownOperator:
    """The last call of an operator.

    Attributes:
        step: The recorded step.
        repeated: Its function, if a call with equal arguments is a repetition. None if each call
            must be examined.
        flat: Its arguments. Unused if `repeated` is None.
    """

    step: TapeStep
    repeated: Callable[..., Any] | None
    flat: FlatArguments

    @staticmethod
    def of(name: str, step: TapeStep, is_alias: bool) -> KnownOperator:
        """Make it for the function with this name. `is_alias`: its result shares the memory of
        a tensor.
        """
        call = step.call
        is_own = is_alias or step.is_drawn or step.writes or may_write(name, call.arguments[1])
        is_alike = not is_own and step.form in (None, SINGLE)
        flat = FlatArguments.of(call.arguments) if is_alike else None
        return KnownOperator(step, flat and call.function, flat or FlatArguments((), {}))


def shares_memory(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a result starts at the same memory as one of its operands, and is not a view."""
    if result._base is not None:
        return False
    place = result.data_ptr()
    return place != 0 and any(tensor.data_ptr() == place for tensor in tensors)


#: types of results that may hold tensors
_TENSORS = (torch.Tensor, tuple, list)


class RecordedCall(TorchFunctionMode):
    """Records the calls made under it.

    A loop records the same calls again and again. Equal calls are stored once, and recognized by
    their arguments that are not tensors.
    """

    def __init__(
        self,
        sites: SiteTable,
        constants: ModelConstants,
        file: TensorFile,
        arguments: Sequence[torch.Tensor],
        order: Sequence[CallSite] | None = None,
        submodule_calls: Mapping[int, ModuleCall] | None = None,
        known: dict[SiteKey, KnownOperator] | None = None,
    ) -> None:
        super().__init__()
        self.order, self._submodule_calls = order, submodule_calls or {}
        #: last call of each operator
        self._known = {} if known is None else known
        self.sites, self.constants, self.file = sites, constants, file
        self.tape = Tape()
        #: id of a tensor -> (the tensor, which may no longer exist, number of its value)
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        #: id of a tensor -> (the tensor, which may no longer exist, operators that made views of
        #: it)
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], set[CallSite]]] = {}
        #: id of a tensor -> (the tensor, operators that returned it unchanged)
        self._same: dict[int, tuple[weakref.ref[torch.Tensor], set[CallSite]]] = {}
        #: operators that returned such a tensor without making a view
        self._aliasing: set[CallSite] = set()
        self._forms: dict[tuple[torch.Size, torch.dtype], ValueForm] = {}
        #: id of a tensor that the call got, or made from no other tensor -> the tensor
        self._own = {id(tensor): weakref.ref(tensor) for tensor in arguments}
        self._arguments = {id(tensor): i for i, tensor in reversed([*enumerate(arguments)])}

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """Find the call of a standalone or custom module. None for any other module."""
        return self._submodule_calls.get(id(module))

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
            # may make a tensor, which is an input of later operators
            result = func(*args, **kwargs)
            read = read_result(result)
            self._own.update((id(t), weakref.ref(t)) for t in (read[1] if read else ()))
            return result
        site = self.sites.add(key, frame)
        check_derivative(func, tensors, site)
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
        """Return the result of an operator that is called as in `step`, with other tensors."""
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
        # A loop runs this for each operator. Numbers are kept in lists, because Python's garbage
        # collector would scan separate objects again and again.
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
        """Make the step of a call.

        Args:
            name: Name of the function.
            operands, versions: Operands and versions of its tensors before it ran.
        """
        func, (_, kwargs) = call.function, call.arguments
        after = read_versions(tensors)
        written = [i for i, version in enumerate(versions) if after[i] != version]
        if replaces_memory(func, name):
            written = [0]
        form, outputs = read_result(result) or (None, [])
        is_part = isinstance(func, SubmoduleFunction)  # it is called once, and its result is stored
        is_drawn = is_part or name in RANDOM
        is_drawn |= name in DROPOUT and bool(kwargs.get("training", True))
        is_cast = torch.is_autocast_enabled("cpu")  # its result depends on where it is called
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
            site.reason = "it writes into a tensor that other code may read"
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
        """Find the operands for tensors with these versions."""
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
        """Return a number for a tensor seen for the first time: it comes from outside."""
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
        """Record what the model returned."""
        known = [self._values.get(id(tensor)) for tensor in tensors]
        self.tape.results = tuple(
            row[1] if row is not None and row[0]() is tensor else None
            for row, tensor in zip(known, tensors, strict=True)
        )
        self.tape.given = tuple(map(self.file.append, tensors))

    def add_value(self, tensor: torch.Tensor) -> int:
        """Return a number for the value of a tensor from now on."""
        key = tensor.shape, tensor.dtype
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = ValueForm.of(tensor)
        value = self.tape.add_form(form)
        self._values[id(tensor)] = weakref.ref(tensor), value
        return value

    def note_same(self, tensor: torch.Tensor, site: CallSite) -> None:
        """Record that an operator returned a tensor unchanged."""
        self._same[id(tensor)] = weakref.ref(tensor), self.find_same(tensor) | {site}

    def find_same(self, tensor: torch.Tensor) -> set[CallSite]:
        """Find operators that returned a tensor unchanged."""
        known = self._same.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else set()

    def keep_views(self, tensor: torch.Tensor) -> None:
        """Keep views of a tensor that was written into as views: their operators stay in PyTorch.

        Values of an integer module are not views.
        """
        base = tensor._base if is_view(tensor) else tensor
        for site in self.find_views(base):
            site.reason = site.reason or "it shows memory that is written into"
            self.tape.eager.add(site)

    def has_aliases(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor may share the memory."""
        return tensor.is_inference() or tensor._is_view() or bool(self.find_views(tensor))

    def join_aliases(self, tensor: torch.Tensor, other: torch.Tensor, site: CallSite) -> None:
        """Record the result of an operator that shares another tensor's memory without being a
        view.

        As `detach` and `data`. It shares the views of that tensor.
        """
        place = tensor.data_ptr()
        if tensor is other or not place or place != other.data_ptr() or is_view(tensor):
            return
        base = other._base if is_view(other) else other
        self.add_view(base, site)
        self._views[id(tensor)] = weakref.ref(tensor), self.find_views(base)
        self._aliasing.add(site)

    def add_view(self, base: torch.Tensor, site: CallSite) -> None:
        """Record that an operator made a view of a tensor."""
        sites = self.find_views(base)
        if not sites:
            self._views[id(base)] = weakref.ref(base), sites
        sites.add(site)

    def find_views(self, base: torch.Tensor) -> set[CallSite]:
        """Find operators that made views of a tensor.

        Views of an earlier tensor at the same address do not count: they no longer exist.
        """
        known = self._views.get(id(base))
        return known[1] if known is not None and known[0]() is base else set()

    def finish(self) -> Tape:
        """Return the tape after the call, while its result is still held."""
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
    """Return (why no graph can hold a call, what to do about it), apart from writes. "" if a graph
    can.

    Args:
        name: Name of the function.
        tensors, results: Its operands and results.
        is_cast: Whether it was called under autocast.
        is_drawn: Whether its result is different each time.
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
    """Find a call that computes what this one writes into its first tensor. None if there is
    none.
    """
    template, kwargs = call.arguments
    found = find_pure(call.function, name, kwargs)
    return None if found is None else Call(found[0], (template, found[1]))


def strip_inplace(call: Call, name: str) -> Call:
    """Replace a call that wrote nothing by its pure form.

    For example an in-place dropout in evaluation mode. `x.data` becomes `x.detach()`, which a graph
    can hold.
    """
    if name == "data":
        return Call(torch.Tensor.detach, call.arguments)
    is_marked = bool(call.arguments[1].get("inplace"))
    return (find_pure_call(call, name) if is_marked else None) or call


def has_equal_call(step: TapeStep, other: TapeStep) -> bool:
    """Whether two steps have equal calls, and equal pure calls."""
    a, b = step.call, other.call
    is_alike = a.function is b.function and (step.pure is None) == (other.pure is None)
    return is_alike and is_equal(a.arguments, b.arguments)


def check_derivative(func: Any, tensors: Sequence[torch.Tensor], site: CallSite) -> None:
    """Check that an operator computes a value from values: no gradient, nothing under `torch.func`.

    Raises:
        ModelError: it does not.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if func in DERIVATIVES or any(map(is_wrapped, tensors)):
        raise ModelError(
            f"{site} computes a gradient, or runs under torch.func (grad, vmap and the like): such "
            "operators cannot be recorded. Write the derivative as operators, and an axis of the "
            "batch or a `for` instead of vmap.",
            code="RQ208",
        )


def check_order(order: Sequence[CallSite], number: int, site: CallSite) -> None:
    """Check that a call runs the operators of the first call in the same order (`strict_order`).

    Raises:
        ModelError: it does not.
    """
    if number >= len(order) or order[number] is not site:
        expected = str(order[number]) if number < len(order) else "the end of the call"
        raise ModelError(
            f"strict_order: operator {number} of this call is {site}; of the first call it was "
            f"{expected}. If control flow depends on the data, prepare the model without "
            "strict_order.",
            code="RQ208",
        )
