"""Define-by-run, converted: the user's code runs again, and its regions are integer modules.

An operator of a region computes nothing when the code calls it: it returns a `DeferredTensor`,
which knows its shape. With the region's last operator the module is called and all of them have
values. From one region to the next these stay integers where the boundary is; code that looks at
one in any other way gets a float tensor.

What the code does between two operators is Python, and takes longer than small models compute: the
operator that a region expects next is known by a look at its place, and whole modules of PyTorch's
are taken at once (`module_calls`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import tvm
import tvm_ffi
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]
from tvm import relax

from relayquant.base.qtypes import QParams
from relayquant.base.runtime import ALIGNMENT, check_threads, stop_spinning
from relayquant.config import Unseen
from relayquant.errors import ModelError, warn_user
from relayquant.torch.define_by_run.arguments import (
    SINGLE,
    FlatArguments,
    ResultForm,
    is_equal,
    read_result,
    split_arguments,
)
from relayquant.torch.define_by_run.call_sites import CALL_MODULE, CallSite, SiteKey, SiteTable
from relayquant.torch.define_by_run.deferred import (
    DeferredTensor,
    ValuePool,
    compute,
    quantize_tensor,
    take_real,
)
from relayquant.torch.define_by_run.forwards import ModuleCall
from relayquant.torch.define_by_run.functions import NUMBERS, may_write
from relayquant.torch.define_by_run.graphs import run_steps
from relayquant.torch.define_by_run.quantized_regions import QuantizedRegion
from relayquant.torch.define_by_run.regions import Form, Input, Inside, Source
from relayquant.torch.define_by_run.tape import ModelConstants, check_order, is_view


class CompiledModule:
    """A compiled module that takes and gives tensors of PyTorch, without copies."""

    def __init__(self, executable: Any) -> None:
        stop_spinning()
        self._main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        #: of tensors in a flat row of results; 0 for what is none, None before the first call
        self._count: int | None = None
        #: numbers of the outputs that have to be copied; None before the first call
        self._shared: list[int] | None = None
        self._calling = threading.Lock()  # TVM's virtual machine has one stack

    def call(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs."""
        check_threads()
        tensors = list(map(align, inputs))
        with self._calling:
            result = self._main(*tensors)
            if self._count is None:  # taking results apart by number is the fastest way
                is_row = isinstance(result, tvm_ffi.Array)
                is_flat = is_row and all(isinstance(part, _TENSORS) for part in result)
                self._count = len(result) if is_flat else 0
            count = self._count
            if count:
                results = [_take_part(result, i) for i in range(count)]
            else:
                results = flatten_parts(result)
        outputs = list(map(import_tensor, results))
        if self._shared is None:
            self._shared = find_shared(tensors, outputs)
        for number in self._shared:
            outputs[number] = outputs[number].clone()
        return outputs


def find_shared(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the outputs that are an input, or an output before, in memory: what gives a value
    as it is (`clone`, a reshape) computes nothing, and code may write into what it returns.
    """
    places = {tensor.data_ptr() for tensor in inputs}
    found: list[int] = []
    for number, tensor in enumerate(outputs):
        place = tensor.data_ptr()
        if place and place in places:
            found.append(number)
        places.add(place)
    return found


#: (row of results, number) -> that one; without the look at the number that indexing takes
_take_part = tvm_ffi.get_global_func("ffi.ArrayGetItem")
_TENSORS = (torch.Tensor, tvm.runtime.Tensor)


def flatten_parts(result: Any) -> list[Any]:
    """The tensors of a result: one, or rows of them at any depth."""
    if isinstance(result, tvm_ffi.Array):
        return [tensor for part in result for tensor in flatten_parts(part)]
    return [result]


def import_tensor(tensor: Any) -> torch.Tensor:
    """A result as a tensor of PyTorch: where inputs are, TVM gives such by itself."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    return torch._C._from_dlpack(tensor.__dlpack__())


class RegionPlayer:
    """A region that is ready to be called: what each of its operators expects."""

    def __init__(self, run: QuantizedRegion, constants: ModelConstants) -> None:
        self.run, self.constants = run, constants
        self.region = run.region
        self.module = CompiledModule(run.executable)
        self._forms: dict[tuple[int, Any], list[tuple[tuple[int, ...], Any]]] = {}
        self.is_fixed = all(None not in form.shape for form in self.region.forms)
        #: whether all that the module gives is float
        self.is_float = not any(run.outputs)
        self.fixed_forms = [(form.shape, form.dtype) for form in self.region.forms]
        self.places: tuple[Place, ...] = ()  # of its operators
        #: number of the last operator's result, where it is one float tensor of the module
        self.last: int | None = None
        last = self.region.steps[-1]
        if last.step.form == SINGLE and not last.step.target:
            floats = zip(self.region.outputs, run.outputs, strict=True)
            if (last.results[0], None) in floats:
                self.last = last.results[0]

    def find_forms(self, number: int, tensors: Sequence[torch.Tensor]) -> Any:
        """Shapes and dtypes of the results of a step, for tensors of these shapes."""
        step = self.region.steps[number]
        if self.is_fixed:
            return [self.fixed_forms[k] for k in step.results]
        with torch._C.DisableTorchFunctionSubclass():
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        key = number, shapes
        if key not in self._forms:
            meta = [
                torch.empty(shape, dtype=t.dtype, device="meta")
                for t, shape in zip(tensors, shapes, strict=True)
            ]
            read = pytree.tree_leaves(step.call.run(meta))
            self._forms[key] = [(tuple(t.shape), t.dtype) for t in read if t is not None]
        return self._forms[key]


def align(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that compiled code can read where it lies."""
    if tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


class RegionPass:
    """One time that the code goes through a region.

    Attributes:
        position: Number of the operator that comes next.
        inputs: What the region has been given so far.
        values: What it has returned, by number; None for what nobody was given.
    """

    def __init__(self, player: RegionPlayer, code: RunningCode) -> None:
        self.player, self.code = player, code
        self.position = 0
        self.inputs: list[torch.Tensor | None] = [None] * len(player.region.inputs)
        self.values: list[DeferredTensor | None] = [None] * len(player.region.forms)
        self._floats: dict[int, torch.Tensor] = {}

    def take(self, arguments: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the next operator is called as in calibration; its inputs are kept. `arguments`
        is None where they are known to be those.
        """
        step = self.player.region.steps[self.position]
        if arguments is not None and not is_equal(arguments, step.step.call.arguments):
            return False
        if len(tensors) != len(step.sources):
            return False
        return all(map(self.take_source, tensors, step.sources))

    def take_source(self, tensor: torch.Tensor, source: Source) -> bool:
        """Whether a tensor is what an operator reads there; an input is kept."""
        if type(source) is Inside:
            return (
                type(tensor) is DeferredTensor
                and tensor.passing is self
                and tensor.number == source.number
            )
        if type(source) is Input:
            known = self.inputs[source.number]
            if known is not None:
                return known is tensor
            if not is_form(tensor, self.player.region.inputs[source.number]):
                return False
            self.inputs[source.number] = tensor
            return True
        return id(tensor) == source.number

    def advance(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the operator that `take` took."""
        region = self.player.region
        step = region.steps[self.position]
        self.position += 1
        is_last = self.position == len(region.steps)
        is_own = step.step.is_same and type(step.sources[0]) is Inside
        if step.step.target or is_own:
            # It writes into a value of this region, or returns it: the same tensor, another value.
            value = tensors[0]
            self.values[value.number] = None
            value.number = step.results[0]
            self.values[value.number] = value
            result = value
        elif is_last and self.player.last is not None and not self.code.defers:
            return self.finish()[self.player.last]
        else:
            forms = self.player.find_forms(self.position - 1, tensors)
            result = step.step.form.build(
                [self.defer(k, form) for k, form in zip(step.results, forms, strict=True)]
            )
        if is_last:
            self.finish()
        return result

    def pass_over(self, end: int, numbers: Sequence[int], form: ResultForm) -> Any:
        """Go on at operator `end`; the values of these numbers are what the code gets."""
        player = self.player
        self.position = end
        is_last = end == len(player.region.steps)
        if is_last and player.last is not None and numbers == (player.last,) and not form.kind:
            return self.finish()[player.last]
        result = form.build([self.defer(k, player.fixed_forms[k]) for k in numbers])
        if is_last:
            self.finish()
        return result

    def defer(self, number: int, form: tuple[tuple[int, ...], Any]) -> DeferredTensor:
        """A value of the region that is not computed yet."""
        value = self.code.pool.make((self.player, number), form, self, number)
        self.values[number] = value
        return value

    def finish(self) -> dict[int, torch.Tensor]:
        """Call the module: the values that are read elsewhere get their numbers. Those that it
        gives in float, by number.
        """
        self.code.passing = None
        player = self.player
        run, numbers = player.run, player.region.outputs
        with torch._C.DisableTorchFunction():
            outputs = player.module.call(list(map(take_grid, self.inputs, run.inputs)))
        if player.is_float:
            floats = dict(zip(numbers, outputs, strict=True))
            for number, result in floats.items():
                value = self.values[number]
                if value is not None:
                    value.floats = result
                    if not self.code.defers:
                        value.passing = None  # what the region was given, and was before, may go
            self.values = []
            return floats
        integers = dict(zip(run.exact, outputs[len(numbers) :], strict=True))
        floats = {}
        for k, (number, qparams) in enumerate(zip(numbers, run.outputs, strict=True)):
            value = self.values[number]
            if qparams is None or k in integers:
                floats[number] = outputs[k]
            if value is None:
                continue
            if number in floats:
                value.floats = floats[number]
            if qparams is not None:
                value.integers = integers.get(k, outputs[k]), qparams
            if not self.code.defers:
                value.passing = None
        self.values = []
        return floats

    def compute_in_float(self) -> dict[int, torch.Tensor]:
        """All values that the code has come to, in PyTorch, by number. The region is left: its
        other operators run in PyTorch too.
        """
        if self.code.passing is self:
            self.code.leave_run()
        if not self._floats:
            steps = self.player.region.steps[: self.position]
            inputs = [None if tensor is None else take_real(tensor) for tensor in self.inputs]
            values: dict[int, torch.Tensor] = {}
            for _ in run_steps(steps, self.player.constants, inputs, values):
                pass
            self._floats = values  # at once: another thread may ask
        return self._floats


def is_form(tensor: torch.Tensor, form: Form) -> bool:
    """Whether a tensor has dtype and sizes of an input."""
    if type(tensor) is DeferredTensor:
        shape, dtype = tensor.form
    else:
        with torch._C.DisableTorchFunction():  # a look at a shape is no operator
            shape, dtype = tensor.shape, tensor.dtype
    if dtype != form.dtype or len(shape) != len(form.shape):
        return False
    if shape == form.shape:
        return True
    return all(want is None or size == want for size, want in zip(shape, form.shape, strict=True))


def take_grid(tensor: Any, qparams: QParams | None) -> torch.Tensor:
    """What a region takes: a float tensor, or integers on the grid of a boundary."""
    if qparams is None:
        return take_real(tensor)
    if type(tensor) is DeferredTensor and tensor.integers is not None:
        integers, grid = tensor.integers
        if grid is qparams:
            return integers
    return quantize_tensor(take_real(tensor), qparams)


class RunningCode(TorchFunctionMode):
    """Runs the user's code with its regions as integer modules; for one call."""

    def __init__(
        self,
        sites: SiteTable,
        places: Mapping[SiteKey, Place],
        unseen: Unseen,
        order: Sequence[CallSite] | None,
        warned: set[CallSite],
        pool: ValuePool,
        calls: Mapping[Any, ModuleCall],
        parts: Mapping[int, ModuleCall],
    ) -> None:
        super().__init__()
        self.sites, self.places, self.unseen, self.order = sites, places, unseen, order
        self.pool, self._calls, self._parts = pool, calls, parts
        #: whether values of regions are to say which they are, though their numbers are known
        self.defers = False
        self._depth = torch._C._len_torch_function_stack() + 1
        self.passing: RegionPass | None = None
        self._warned = warned  # operators that were spoken of
        self._count = 0  # operators so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_asking = self.sites.names[func]
        if is_asking:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in NUMBERS and type(args[0]) is torch.Tensor and self.order is None:
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        passing = self.passing
        if passing is not None and self.order is None:
            expected = passing.player.places[passing.position]
            if expected.function is func and expected.is_at(frame):
                # What it computes, of what, says which operator it is: no need to look further out.
                found = expected.match(args, kwargs)
                if found is not None and passing.take(None, found):
                    return passing.advance(found)
        key = self.sites.find_key(frame, name)
        place = self.places.get(key)
        arguments = None
        tensors = None
        if place is not None:
            tensors = place.match(args, kwargs)
        if tensors is None:
            tensors = []
            arguments = split_arguments((args, kwargs), tensors)
        if not tensors:
            return func(*args, **kwargs)
        if place is None:
            result = self.run_in_float(func, name, args, kwargs, tensors)
            self.report_unseen(self.sites.describe(key, frame), result)
            return result
        if self.order is not None:
            check_order(self.order, self._count, place.site)
            self._count += 1
        if place.player is None:
            return self.run_in_float(func, name, args, kwargs, tensors)
        is_next = passing is not None and passing.player is place.player
        if passing is not None and not (is_next and passing.position == place.number):
            passing.compute_in_float()
            passing = None
        if passing is None:
            if place.number:
                self.report_way(place.site)
                return self.run_in_float(func, name, args, kwargs, tensors)
            passing = self.passing = RegionPass(place.player, self)
        if not passing.take(arguments, tensors):
            self.report_arguments(place, tensors)
            return self.run_in_float(func, name, args, kwargs, tensors)
        return passing.advance(tensors)

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """The place that calls a module, whose innermost frame is given; None if it has none, or a
        hook stands between.
        """
        part = self._parts.get(id(module))
        if part is not None:
            return part
        if self.order is not None or frame.f_code is not CALL_MODULE:
            return None
        return self._calls.get((id(module), self.sites.find_outer(frame)))

    def is_innermost(self) -> bool:
        """Whether operators come here first: no mode of the user's sees them before."""
        return torch._C._len_torch_function_stack() == self._depth

    def run_in_float(
        self,
        func: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """An operator that stays in PyTorch, on float tensors."""
        if may_write(name, kwargs):
            if self.passing is not None and any(t is tensors[0] for t in self.passing.inputs):
                self.passing.compute_in_float()
            if isinstance(tensors[0], DeferredTensor):
                compute(tensors[0])
                tensors[0].integers = None
        result = func(*take_real(args), **take_real(kwargs))
        crossing = [t for t in tensors if isinstance(t, DeferredTensor) and t.integers is not None]
        _, results = (read_result(result) if crossing else None) or (None, [])
        for tensor in crossing:
            place = compute(tensor).data_ptr()
            if any(is_view(each) or each.data_ptr() == place for each in results):
                tensor.integers = None  # what is written through a view would not come to them
        return result

    def leave_run(self) -> None:
        """What was deferred of the current run does not come to its end."""
        if self.passing is not None:
            steps = self.passing.player.region.steps
            site = steps[min(self.passing.position, len(steps) - 1)].step.site
            self.passing = None
            self.report_way(site)

    def report_way(self, site: CallSite) -> None:
        """Calls came to an operator, or left it, another way than in calibration."""
        if site not in self._warned:
            self._warned.add(site)
            warn_user(
                f"The code comes to {site} on a way that calibration never took: the operators of "
                "that region are computed in PyTorch, in float. Call the prepared model with "
                "inputs that take this way, and convert it again.",
                code="RQ208",
            )

    def report_arguments(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """An operator is called with other sizes or constants than in calibration."""
        if self.passing is not None and self.passing.position:
            self.passing.compute_in_float()
        self.passing = None
        forms = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for tensor in tensors
        )
        text = (
            f"{place.site} is called with {forms}, or constants, that calibration never saw there. "
            "Call the prepared model with inputs that do so and convert it again; a "
            "size that differs between calls of calibration may have any value afterwards"
        )
        if self.unseen is Unseen.ERROR:
            raise ModelError(f"{text}. With unseen='float' it stays in PyTorch.", code="RQ208")
        if place.site not in self._warned:
            self._warned.add(place.site)
            warn_user(f"{text}. It stays in PyTorch, in float.", code="RQ208")

    def report_unseen(self, site: CallSite, result: object) -> None:
        """Calibration never came to an operator.

        Raises:
            ModelError: it computes floats, and `unseen` is ERROR.
        """
        if self.unseen is Unseen.FLOAT or not has_floats(result):
            return
        raise ModelError(
            f"Calibration never came to {site}. Call the prepared model with inputs that reach it "
            "and convert it again; or prepare it with unseen='float', which leaves the operator in "
            "PyTorch.",
            code="RQ208",
        )


@dataclass(frozen=True, eq=False)
class Place:
    """Where an operator of the code runs: number of it in a region; in PyTorch if `player` is None.

    Attributes:
        arguments: Those it is called with, where they can be compared as they come.
        function: What is called.
        caller, instruction: id of the code that calls it, and where in that code.
    """

    site: CallSite
    player: RegionPlayer | None = None
    number: int = 0
    arguments: FlatArguments | None = None
    function: Any = None
    caller: int = 0
    instruction: int = -1

    def is_at(self, frame: FrameType) -> bool:
        """Whether the innermost code of a call is that of the operator."""
        return frame.f_lasti == self.instruction and id(frame.f_code) == self.caller

    def match(self, args: Any, kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """The tensors of a call that has the arguments of calibration; None where that is to be
        seen.
        """
        return None if self.arguments is None else self.arguments.match(args, kwargs)


def has_floats(result: object) -> bool:
    """Whether a result holds a tensor of floats."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        for leaf in pytree.tree_leaves(result)
    )
