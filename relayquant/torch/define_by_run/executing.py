"""Define-by-run, converted: the user's code runs again, and its straight runs are integer modules.

An operator of a run computes nothing when the code calls it: it returns a `DeferredTensor`, which
knows its shape. With the run's last operator the module is called and all of them have values.
From one run to the next these stay integers where the border is; code that looks at one in any
other way gets a float tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import tvm
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]
from tvm import relax

from relayquant.errors import ModelError, warn_user
from relayquant.qtypes import INTEGER_LIMITS, QParams
from relayquant.runtime import ALIGNMENT, check_threads, flatten_result, stop_spinning
from relayquant.torch.define_by_run.arguments import FlatArguments, is_equal, split_arguments
from relayquant.torch.define_by_run.blocks import Form, Input, Inside
from relayquant.torch.define_by_run.call_sites import CallSite, SiteKey, SiteTable
from relayquant.torch.define_by_run.entry import Unseen
from relayquant.torch.define_by_run.functions import NUMBERS, is_metadata, may_write, name_function
from relayquant.torch.define_by_run.graphs import run_steps
from relayquant.torch.define_by_run.runs import QuantizedRun
from relayquant.torch.define_by_run.tape import ModelConstants, check_order, is_view


class DeferredTensor(torch.Tensor):
    """A value of a run: shape and dtype now, its numbers when the run is through.

    Attributes:
        passing: The pass of the run that computes it.
        form: Shape and dtype.
        number: Which value of the run.
        floats: Its numbers, once they are needed in float.
        integers: Its numbers on the grid of a border.
    """

    passing: RunPass
    number: int
    form: tuple[tuple[int, ...], Any]
    floats: torch.Tensor | None
    integers: tuple[torch.Tensor, QParams] | None

    @staticmethod
    def make(shape: Sequence[int], dtype: Any, passing: RunPass, number: int) -> DeferredTensor:
        """A value that is not computed yet."""
        value = torch.Tensor._make_wrapper_subclass(DeferredTensor, shape, dtype=dtype)
        value.form = tuple(shape), dtype
        value.begin(passing, number)
        return value

    def begin(self, passing: RunPass, number: int) -> None:
        """It is a value of this pass, not computed yet."""
        self.passing, self.number = passing, number
        self.floats = self.integers = None

    # Questions that code asks often: answered here, they do not pass PyTorch's dispatch.

    def dim(self) -> int:
        return len(self.form[0])

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self.form[0])
        return shape if dim is None else shape[dim]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func, name_function(func)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*take_real(args), **take_real(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*take_real(args), **take_real(kwargs or {}))


def take_real(value: Any) -> Any:
    """`value` with float tensors in place of deferred ones, at any depth."""
    if isinstance(value, DeferredTensor):
        return compute(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([take_real(each) for each in value])
    if kind is dict:
        return {key: take_real(each) for key, each in value.items()}
    if kind is slice:
        return slice(*map(take_real, (value.start, value.stop, value.step)))
    return value


def compute(value: DeferredTensor) -> torch.Tensor:
    """The numbers of a value, in float; what no module gives is computed in PyTorch."""
    if value.floats is None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if value.integers is not None:
                tensor, qparams = value.integers
                integers = tensor.to(torch.int32) - int(qparams.zero_point)
                value.floats = integers * float(qparams.scale)
            else:
                value.floats = value.passing.compute_in_float()[value.number]
    return value.floats


class CompiledModule:
    """A compiled module that takes and gives tensors of PyTorch, without copies."""

    def __init__(self, executable: Any) -> None:
        stop_spinning()
        self._main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        self._calling = threading.Lock()  # TVM's virtual machine has one stack

    def call(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs."""
        check_threads()
        tensors = [tvm.runtime.from_dlpack(align(tensor)) for tensor in inputs]
        with self._calling:
            results = flatten_result(self._main(*tensors))
        return [torch._C._from_dlpack(result.__dlpack__()) for result in results]


class RunPlayer:
    """A run that is ready to be called: what each of its operators expects."""

    def __init__(self, run: QuantizedRun, constants: ModelConstants) -> None:
        self.run, self.constants = run, constants
        self.block = run.block
        self.module = CompiledModule(run.executable)
        self._forms: dict[tuple[int, Any], list[tuple[tuple[int, ...], Any]]] = {}
        self.is_fixed = all(None not in form.shape for form in self.block.forms)
        self._fixed = [
            [(self.block.forms[k].shape, self.block.forms[k].dtype) for k in step.results]
            for step in self.block.steps
        ]
        #: values of a pass before, by number
        self._made: dict[int, DeferredTensor] = {}

    def make_value(
        self, number: int, shape: tuple[int, ...], dtype: Any, passing: RunPass
    ) -> DeferredTensor:
        """A value that is not computed yet: a new one, or that of a pass before which nobody
        holds any more.
        """
        value = self._made.get(number)
        # Here, in the table and as the argument: nobody else.
        if value is not None and sys.getrefcount(value) == 3 and value.form == (shape, dtype):
            form = value.form
            value.__dict__.clear()  # also what the user's code has set
            value.form = form
            value.begin(passing, number)
            return value
        value = self._made[number] = DeferredTensor.make(shape, dtype, passing, number)
        return value

    def find_forms(self, number: int, tensors: Sequence[torch.Tensor]) -> Any:
        """Shapes and dtypes of the results of a step, for tensors of these shapes."""
        step = self.block.steps[number]
        if self.is_fixed:
            return self._fixed[number]
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


def quantize_tensor(tensor: torch.Tensor, qparams: QParams) -> torch.Tensor:
    """What `qnn.quantize` computes: half to even, one division."""
    low, high = INTEGER_LIMITS[qparams.dtype]
    steps = torch.nan_to_num(tensor / float(qparams.scale))  # NaN gives the zero point
    rounded = torch.round(steps) + int(qparams.zero_point)
    return rounded.clamp(low, high).to(getattr(torch, qparams.dtype))


class RunPass:
    """One time that the code goes through a run."""

    def __init__(self, player: RunPlayer, code: RunningCode) -> None:
        self.player, self.code = player, code
        self.position = 0
        self.inputs: list[torch.Tensor | None] = [None] * len(player.block.inputs)
        self.values: list[DeferredTensor | None] = [None] * len(player.block.forms)
        self._floats: dict[int, torch.Tensor] = {}

    def take(self, arguments: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the next operator is called as in calibration; its inputs are kept. `arguments`
        is None where they are known to be those.
        """
        step = self.player.block.steps[self.position]
        if arguments is not None and not is_equal(arguments, step.step.call.arguments):
            return False
        if len(tensors) != len(step.sources):
            return False
        for tensor, source in zip(tensors, step.sources, strict=True):
            if isinstance(source, Inside):
                if type(tensor) is not DeferredTensor or tensor.passing is not self:
                    return False
                if tensor.number != source.number:
                    return False
            elif isinstance(source, Input):
                known = self.inputs[source.number]
                if known is None:
                    if not is_form(tensor, self.player.block.inputs[source.number]):
                        return False
                    self.inputs[source.number] = tensor
                elif known is not tensor:
                    return False
            elif id(tensor) != source.number:
                return False
        return True

    def advance(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the operator that `take` took."""
        block = self.player.block
        step = block.steps[self.position]
        if step.step.target:  # it writes into a value of this run: the same tensor, another value
            value = tensors[0]
            self.values[value.number] = None
            value.number = step.results[0]
            self.values[value.number] = value
            result = value
        else:
            forms = self.player.find_forms(self.position, tensors)
            made = [
                self.player.make_value(number, shape, dtype, self)
                for (shape, dtype), number in zip(forms, step.results, strict=True)
            ]
            for value in made:
                self.values[value.number] = value
            result = step.step.form.build(made)
        self.position += 1
        if self.position == len(block.steps):
            self.finish()
        return result

    def finish(self) -> None:
        """Call the module: the values that are read elsewhere get their numbers."""
        self.code.passing = None
        run = self.player.run
        with torch._C.DisableTorchFunction():
            inputs = [
                take_grid(tensor, qparams)
                for tensor, qparams in zip(self.inputs, run.inputs, strict=True)
            ]
            outputs = self.player.module.call(inputs)
        numbers = self.player.block.outputs
        integers = dict(zip(run.exact, outputs[len(numbers) :], strict=True))
        for k, (number, qparams) in enumerate(zip(numbers, run.outputs, strict=True)):
            value = self.values[number]
            if value is None:
                continue
            if qparams is None or k in integers:
                value.floats = outputs[k]
            if qparams is not None:
                value.integers = integers.get(k, outputs[k]), qparams
        self.values = []

    def compute_in_float(self) -> dict[int, torch.Tensor]:
        """All values that the code has come to, in PyTorch, by number. The run is left: its other
        operators run in PyTorch too.
        """
        if self.code.passing is self:
            self.code.leave_run()
        if not self._floats:
            steps = self.player.block.steps[: self.position]
            inputs = [None if tensor is None else take_real(tensor) for tensor in self.inputs]
            for _ in run_steps(steps, self.player.constants, inputs, self._floats):
                pass
        return self._floats


def is_form(tensor: torch.Tensor, form: Form) -> bool:
    """Whether a tensor has dtype and sizes of an input."""
    if type(tensor) is DeferredTensor:
        shape, dtype = tensor.form
    else:
        shape, dtype = tensor.shape, tensor.dtype
    if dtype != form.dtype or len(shape) != len(form.shape):
        return False
    if shape == form.shape:
        return True
    return all(want is None or size == want for size, want in zip(shape, form.shape, strict=True))


def take_grid(tensor: Any, qparams: QParams | None) -> torch.Tensor:
    """What a run takes: a float tensor, or integers on the grid of a border."""
    if qparams is None:
        return take_real(tensor)
    if type(tensor) is DeferredTensor and tensor.integers is not None:
        integers, grid = tensor.integers
        if grid is qparams:
            return integers
    return quantize_tensor(take_real(tensor), qparams)


class RunningCode(TorchFunctionMode):
    """Runs the user's code with its straight runs as integer modules; for one call."""

    def __init__(
        self,
        sites: SiteTable,
        places: Mapping[SiteKey, Place],
        unseen: Unseen,
        order: Sequence[CallSite] | None,
        warned: set[CallSite],
    ) -> None:
        super().__init__()
        self.sites, self.places, self.unseen, self.order = sites, places, unseen, order
        self.passing: RunPass | None = None
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
        key = self.sites.find_key(frame, name)
        place = self.places.get(key)
        arguments = None
        tensors = None
        if place is not None and place.arguments is not None:
            tensors = place.arguments.match(args, kwargs)
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
        passing = self.passing
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
            passing = self.passing = RunPass(place.player, self)
        if not passing.take(arguments, tensors):
            self.report_arguments(place, tensors)
            return self.run_in_float(func, name, args, kwargs, tensors)
        return passing.advance(tensors)

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
        if isinstance(result, torch.Tensor) and is_view(result):
            for tensor in tensors:  # what is written through a view does not come to the integers
                if isinstance(tensor, DeferredTensor):
                    tensor.integers = None
        return result

    def leave_run(self) -> None:
        """What was deferred of the current run does not come to its end."""
        if self.passing is not None:
            steps = self.passing.player.block.steps
            site = steps[min(self.passing.position, len(steps) - 1)].step.site
            self.passing = None
            self.report_way(site)

    def report_way(self, site: CallSite) -> None:
        """Calls came to an operator, or left it, another way than in calibration."""
        if site not in self._warned:
            self._warned.add(site)
            warn_user(
                f"The code comes to {site} on a way that calibration never took: the operators of "
                "that straight run are computed in PyTorch, in float. Call the prepared model with "
                "inputs that take this way, and convert it again."
            )

    def report_arguments(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """An operator is called with other sizes or constants than in calibration."""
        if self.passing is not None and self.passing.position:
            self.passing.compute_in_float()
        self.passing = None
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        text = (
            f"{place.site} gets shapes {shapes}, or constants, that calibration never saw there. "
            "Call the prepared model with inputs that do so and convert it again; a "
            "size that differs between calls of calibration may have any value afterwards"
        )
        if self.unseen is Unseen.ERROR:
            raise ModelError(f"{text}. With unseen='float' it stays in PyTorch.")
        if place.site not in self._warned:
            self._warned.add(place.site)
            warn_user(f"{text}. It stays in PyTorch, in float.")

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
            "PyTorch."
        )


@dataclass(frozen=True, eq=False)
class Place:
    """Where an operator of the code runs: number of it in a run; in PyTorch if `player` is None.

    `arguments` are those it is called with, where they can be compared as they come.
    """

    site: CallSite
    player: RunPlayer | None = None
    number: int = 0
    arguments: FlatArguments | None = None


def has_floats(result: object) -> bool:
    """Whether a result holds a tensor of floats."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        for leaf in pytree.tree_leaves(result)
    )
