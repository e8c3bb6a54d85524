"""Define-by-run, converted: run the user's code again, with its regions as integer modules.

An operator of a region computes nothing when the code calls it. It returns a `DeferredTensor`,
which knows its shape. At the region's last operator the module is called, and all its values are
computed. Between two regions they stay integers if the boundary is integer. Any other code that
reads a value gets a float tensor.

The Python code between two operators can take longer than a small model computes. So the next
expected operator is recognized by its place, and whole PyTorch modules are handled at once
(`module_calls`).
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
from relayquant.errors import DataError, ModelError, warn_user
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
from relayquant.torch.define_by_run.recording import check_order
from relayquant.torch.define_by_run.regions import Form, Input, Inside, Source
from relayquant.torch.define_by_run.tape import ModelConstants, is_view

#: what to do about inputs that calibration never saw
ADVICE = (
    "Call the prepared model with such inputs and convert it again; a size that differs between "
    "calls of calibration may have any value afterwards"
)


class CompiledModule:
    """A compiled module that takes and returns PyTorch tensors without copies."""

    def __init__(self, executable: Any) -> None:
        stop_spinning()
        self._main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        #: number of tensors in a flat row of results; 0 if it is not one, None before the first
        #: call
        self._count: int | None = None
        #: numbers of the outputs that must be copied; None before the first call
        self._shared: list[int] | None = None
        self._calling = threading.Lock()  # TVM's virtual machine has one stack

    def call(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for these inputs.

        Raises:
            DataError: an input is not in memory of the CPU, is sparse, or has complex numbers.
            RuntimeError, TypeError, ValueError: an input has another shape or dtype.
        """
        check_threads()
        try:
            tensors = list(map(align, inputs))
        except RuntimeError as error:
            raise describe_unreadable(inputs) from error
        with self._calling:
            result = self._main(*tensors)
            if self._count is None:  # indexing is the fastest way to unpack results
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
    """Find outputs that share memory with an input or an earlier output.

    Operators such as `clone` or a reshape compute nothing, but code may write into their result.
    """
    places = {tensor.data_ptr() for tensor in inputs}
    found: list[int] = []
    for number, tensor in enumerate(outputs):
        place = tensor.data_ptr()
        if place and place in places:
            found.append(number)
        places.add(place)
    return found


#: (row of results, number) -> the element, without the bounds check of indexing
_take_part = tvm_ffi.get_global_func("ffi.ArrayGetItem")
_TENSORS = (torch.Tensor, tvm.runtime.Tensor)


def flatten_parts(result: Any) -> list[Any]:
    """Flatten a result to its tensors: one, or rows of them at any depth."""
    if isinstance(result, tvm_ffi.Array):
        return [tensor for part in result for tensor in flatten_parts(part)]
    return [result]


def import_tensor(tensor: Any) -> torch.Tensor:
    """Convert a result to a PyTorch tensor. With inputs, TVM returns PyTorch tensors itself."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    return torch._C._from_dlpack(tensor.__dlpack__())


class RegionRunner:
    """A callable region, with the expected arguments of each operator."""

    def __init__(self, run: QuantizedRegion, constants: ModelConstants) -> None:
        self.run, self.constants = run, constants
        self.region = run.region
        self.module = CompiledModule(run.executable)
        self._forms: dict[tuple[int, Any], list[tuple[tuple[int, ...], Any]]] = {}
        self.is_fixed = all(None not in form.shape for form in self.region.forms)
        #: whether all results of the module are float
        self.is_float = not any(run.outputs)
        self.fixed_forms = [(form.shape, form.dtype) for form in self.region.forms]
        self.places: tuple[Place, ...] = ()  # of its operators
        #: number of the last operator's result, if it is one float tensor of the module
        self.last: int | None = None
        last = self.region.steps[-1]
        if last.step.form == SINGLE and not last.step.target:
            floats = zip(self.region.outputs, run.outputs, strict=True)
            if (last.results[0], None) in floats:
                self.last = last.results[0]

    def find_forms(self, number: int, tensors: Sequence[torch.Tensor]) -> Any:
        """Find shapes and dtypes of a step's results for these input shapes."""
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
    """Return a tensor whose memory compiled code can read directly.

    Raises:
        RuntimeError: there is no such memory, or it has complex numbers, whose dtype ends the
            process where TVM describes it.
    """
    if not tensor.is_cpu or tensor.is_complex():
        raise RuntimeError("the tensor has no memory that compiled code can read")
    if tensor.requires_grad or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def describe_unreadable(tensors: Sequence[torch.Tensor]) -> DataError:
    """Make the error for inputs of which `align` refused one."""
    kinds = ", ".join(
        f"{form} ({tensor.device}, {str(tensor.layout).removeprefix('torch.')})"
        for tensor in tensors
        for form in [describe_tensors([tensor])]
    )
    return DataError(
        f"The inputs are {kinds}; allowed: real numbers in memory of the CPU (cpu, strided). "
        "Convert them with x.cpu(), x.to_dense() or torch.view_as_real(x).",
        code="RQ302",
    )


class RegionPass:
    """One execution of a region by the user's code.

    Attributes:
        position: Number of the next operator.
        inputs: Inputs of the region so far.
        values: Values that it has returned, by number. None for values that nobody got.
    """

    def __init__(self, runner: RegionRunner, code: RunningCode) -> None:
        self.runner, self.code = runner, code
        self.position = 0
        self.inputs: list[torch.Tensor | None] = [None] * len(runner.region.inputs)
        self.values: list[DeferredTensor | None] = [None] * len(runner.region.forms)
        self._floats: dict[int, torch.Tensor] = {}

    def take(self, arguments: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the next operator is called as in calibration. Keeps its inputs.

        `arguments` is None if they are known to be equal.
        """
        step = self.runner.region.steps[self.position]
        if arguments is not None and not is_equal(arguments, step.step.call.arguments):
            return False
        if len(tensors) != len(step.sources):
            return False
        return all(map(self.take_source, tensors, step.sources))

    def take_source(self, tensor: torch.Tensor, source: Source) -> bool:
        """Whether a tensor is the expected operand of an operator. An input is kept."""
        if type(source) is Inside:
            return (
                type(tensor) is DeferredTensor
                and tensor.region_pass is self
                and tensor.number == source.number
            )
        if type(source) is Input:
            known = self.inputs[source.number]
            if known is not None:
                return known is tensor
            if not is_form(tensor, self.runner.region.inputs[source.number]):
                return False
            self.inputs[source.number] = tensor
            return True
        return id(tensor) == source.number

    def advance(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result of the operator that `take` accepted."""
        region = self.runner.region
        step = region.steps[self.position]
        self.position += 1
        is_last = self.position == len(region.steps)
        is_own = step.step.is_same and type(step.sources[0]) is Inside
        if step.step.target or is_own:
            # It writes into a value of this region, or returns it: the same tensor, but a new
            # value.
            value = tensors[0]
            self.values[value.number] = None
            value.number = step.results[0]
            self.values[value.number] = value
            result = value
        elif is_last and self.runner.last is not None and not self.code.defers:
            return self.finish()[self.runner.last]
        else:
            forms = self.runner.find_forms(self.position - 1, tensors)
            result = step.step.form.build(
                [self.defer(k, form) for k, form in zip(step.results, forms, strict=True)]
            )
        if is_last:
            self.finish()
        return result

    def pass_over(self, end: int, numbers: Sequence[int], form: ResultForm) -> Any:
        """Continue at operator `end`. The code gets the values with these numbers."""
        runner = self.runner
        self.position = end
        is_last = end == len(runner.region.steps)
        if is_last and runner.last is not None and numbers == (runner.last,) and not form.kind:
            return self.finish()[runner.last]
        result = form.build([self.defer(k, runner.fixed_forms[k]) for k in numbers])
        if is_last:
            self.finish()
        return result

    def defer(self, number: int, form: tuple[tuple[int, ...], Any]) -> DeferredTensor:
        """Return a value of the region that is not computed yet."""
        value = self.code.pool.make((self.runner, number), form, self, number)
        self.values[number] = value
        return value

    def finish(self) -> dict[int, torch.Tensor]:
        """Call the module and compute the values that are read elsewhere. Returns its float
        results by number.
        """
        self.code.region_pass = None
        runner = self.runner
        run, numbers = runner.run, runner.region.outputs
        with torch._C.DisableTorchFunction():
            outputs = runner.module.call(list(map(convert_input, self.inputs, run.inputs)))
        if runner.is_float:
            floats = dict(zip(numbers, outputs, strict=True))
            for number, result in floats.items():
                value = self.values[number]
                if value is not None:
                    value.floats = result
                    if not self.code.defers:
                        value.region_pass = (
                            None  # earlier inputs and values of the region may be freed
                        )
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
                value.region_pass = None
        self.values = []
        return floats

    def compute_in_float(self) -> dict[int, torch.Tensor]:
        """Compute all values that the code has reached in PyTorch, by number.

        This leaves the region: its other operators run in PyTorch too.
        """
        if self.code.region_pass is self:
            self.code.leave_region()
        if not self._floats:
            steps = self.runner.region.steps[: self.position]
            inputs = [None if tensor is None else take_real(tensor) for tensor in self.inputs]
            values: dict[int, torch.Tensor] = {}
            for _ in run_steps(steps, self.runner.constants, inputs, values):
                pass
            self._floats = values  # at once: another thread may ask
        return self._floats


def is_form(tensor: torch.Tensor, form: Form) -> bool:
    """Whether a tensor has the dtype and sizes of an input."""
    if type(tensor) is DeferredTensor:
        shape, dtype = tensor.form
    else:
        with torch._C.DisableTorchFunction():  # reading a shape is not an operator
            shape, dtype = tensor.shape, tensor.dtype
    if dtype != form.dtype or len(shape) != len(form.shape):
        return False
    if shape == form.shape:
        return True
    return all(want is None or size == want for size, want in zip(shape, form.shape, strict=True))


def convert_input(tensor: Any, qparams: QParams | None) -> torch.Tensor:
    """Convert a tensor for a region: to float, or to integers with a boundary's parameters."""
    if qparams is None:
        return take_real(tensor)
    if type(tensor) is DeferredTensor and tensor.integers is not None:
        integers, held = tensor.integers
        if held is qparams:
            return integers
    return quantize_tensor(take_real(tensor), qparams)


class RunningCode(TorchFunctionMode):
    """Runs the user's code with its regions as integer modules, for one call."""

    def __init__(
        self,
        sites: SiteTable,
        places: Mapping[SiteKey, Place],
        unseen: Unseen,
        order: Sequence[CallSite] | None,
        warned: set[CallSite],
        pool: ValuePool,
        calls: Mapping[Any, ModuleCall],
        submodule_calls: Mapping[int, ModuleCall],
    ) -> None:
        super().__init__()
        self.sites, self.places, self.unseen, self.order = sites, places, unseen, order
        self.pool, self._calls, self._submodule_calls = pool, calls, submodule_calls
        #: whether values of regions keep their identity after they are computed
        self.defers = False
        self._depth = torch._C._len_torch_function_stack() + 1
        self.region_pass: RegionPass | None = None
        self._warned = warned  # operators with a warning so far
        self._count = 0  # number of operators so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_asking = self.sites.names[func]
        if is_asking:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in NUMBERS and type(args[0]) is torch.Tensor and self.order is None:
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        region_pass = self.region_pass
        if region_pass is not None and self.order is None:
            expected = region_pass.runner.places[region_pass.position]
            if expected.function is func and expected.is_at(frame):
                # Function, place and operands identify the operator: outer frames need not be
                # checked.
                found = expected.match(args, kwargs)
                if found is not None and region_pass.take(None, found):
                    return region_pass.advance(found)
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
        if place.runner is None:
            return self.run_in_float(func, name, args, kwargs, tensors)
        is_next = region_pass is not None and region_pass.runner is place.runner
        if region_pass is not None and not (is_next and region_pass.position == place.number):
            region_pass.compute_in_float()
            region_pass = None
        if region_pass is None:
            if place.number:
                self.report_path(place.site)
                return self.run_in_float(func, name, args, kwargs, tensors)
            region_pass = self.region_pass = RegionPass(place.runner, self)
        if not region_pass.take(arguments, tensors):
            self.report_arguments(place, tensors)
            return self.run_in_float(func, name, args, kwargs, tensors)
        return region_pass.advance(tensors)

    def find_call(self, module: torch.nn.Module, frame: FrameType) -> ModuleCall | None:
        """Find the known place of a module call, by its innermost frame. None if there is none,
        or a hook runs in between.
        """
        call = self._submodule_calls.get(id(module))
        if call is not None:
            return call
        if self.order is not None or frame.f_code is not CALL_MODULE:
            return None
        return self._calls.get((id(module), self.sites.find_outer(frame)))

    def is_innermost(self) -> bool:
        """Whether this mode sees operators first, before any mode of the user."""
        return torch._C._len_torch_function_stack() == self._depth

    def run_in_float(
        self,
        func: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Run an operator that stays in PyTorch, on float tensors."""
        if may_write(name, kwargs):
            if self.region_pass is not None and any(
                t is tensors[0] for t in self.region_pass.inputs
            ):
                self.region_pass.compute_in_float()
            if isinstance(tensors[0], DeferredTensor):
                compute(tensors[0])
                tensors[0].integers = None
        result = func(*take_real(args), **take_real(kwargs))
        crossing = [t for t in tensors if isinstance(t, DeferredTensor) and t.integers is not None]
        _, results = (read_result(result) if crossing else None) or (None, [])
        for tensor in crossing:
            place = compute(tensor).data_ptr()
            if any(is_view(each) or each.data_ptr() == place for each in results):
                tensor.integers = None  # a write through the view would not reach the integers
        return result

    def leave_region(self) -> None:
        """Leave the current region before its end."""
        if self.region_pass is not None:
            steps = self.region_pass.runner.region.steps
            site = steps[min(self.region_pass.position, len(steps) - 1)].step.site
            self.region_pass = None
            self.report_path(site)

    def report_path(self, site: CallSite) -> None:
        """Warn that calls reached or left an operator on a path that calibration did not take."""
        if site not in self._warned:
            self._warned.add(site)
            warn_user(
                f"The code reached {site} on a path that calibration never took. The operators of "
                "that region are computed in PyTorch, in float. Call the prepared model with "
                "inputs that take this path, and convert it again.",
                code="RQ208",
            )

    def report_arguments(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """Report an operator call with other sizes or constants than in calibration."""
        if self.region_pass is not None and self.region_pass.position:
            self.region_pass.compute_in_float()
        self.region_pass = None
        text = (
            f"{place.site} is called with {describe_tensors(tensors)}, or constants, that "
            f"calibration never saw there. {ADVICE}"
        )
        if self.unseen is Unseen.ERROR:
            raise ModelError(f"{text}. With unseen='float' it stays in PyTorch.", code="RQ208")
        if place.site not in self._warned:
            self._warned.add(place.site)
            warn_user(f"{text}. It stays in PyTorch, in float.", code="RQ208")

    def report_unseen(self, site: CallSite, result: object) -> None:
        """Report an operator that calibration never reached.

        Raises:
            ModelError: it computes floats, and `unseen` is ERROR.
        """
        if self.unseen is Unseen.FLOAT or not has_floats(result):
            return
        raise ModelError(
            f"Calibration never reached {site}. Call the prepared model with inputs that reach it "
            "and convert it again; or prepare it with unseen='float', which leaves the operator "
            "in PyTorch.",
            code="RQ208",
        )


@dataclass(frozen=True, eq=False)
class Place:
    """Where an operator of the code runs: its number in a region, or in PyTorch if `runner` is
    None.

    Attributes:
        arguments: Its expected arguments, if they can be compared directly.
        function: The called function.
        caller, instruction: id of the calling code, and the instruction in it.
    """

    site: CallSite
    runner: RegionRunner | None = None
    number: int = 0
    arguments: FlatArguments | None = None
    function: Any = None
    caller: int = 0
    instruction: int = -1

    def is_at(self, frame: FrameType) -> bool:
        """Whether the innermost code of a call is the place of the operator."""
        return frame.f_lasti == self.instruction and id(frame.f_code) == self.caller

    def match(self, args: Any, kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """Return the tensors of a call with the arguments of calibration. None if the arguments
        may differ.
        """
        return None if self.arguments is None else self.arguments.match(args, kwargs)


def describe_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Describe dtypes and shapes for messages, as "float32 (3, 8), int64 (3,)"."""
    return ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in tensors
    )


def has_floats(result: object) -> bool:
    """Whether a result holds a float tensor."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        for leaf in pytree.tree_leaves(result)
    )
