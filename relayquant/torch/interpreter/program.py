"""Relax function -> steps of torch operators: the float or calibration graph that trains.

It holds no trainable tensor. `TorchProgram.run` gets the values of parameters and the rounding
functions, so one program serves a module, its copies, and all their states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.errors import DataError, ModelError, format_count
from relayquant.ir.dialect.qnn.recurrent import RECURRENT_OPERATORS
from relayquant.ir.reference.frame import Frame, match_shape
from relayquant.ir.reference.single_call import get_tensor_dtype
from relayquant.ir.rewrite.attributes import find_unmodelled, read_attributes
from relayquant.ir.rewrite.expressions import FunctionGraph, op_name
from relayquant.ir.rewrite.function import read_sources
from relayquant.ir.rewrite.graph import iterate_results
from relayquant.ir.rewrite.index_limits import describe_places, find_index_limits
from relayquant.ir.rewrite.lifetimes import find_ends
from relayquant.stages.prepared import CalibrationGraph
from relayquant.torch.interpreter.operators import TRAINED_ROWS, find_form, follow_clamps
from relayquant.torch.submodule_cut import Placeholder

#: (key of a group, channel axis, value) -> the value rounded by the group
Rounding = Callable[[str, int, torch.Tensor], torch.Tensor]
#: value -> its replacement, and parameters that change for later steps, by name
Visitor = Callable[[torch.Tensor], tuple[torch.Tensor, Mapping[str, Any]]]
#: (number of a placeholder, arguments of the call there) -> its results
Filler = Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
#: A trainable float32 constant: (value that reads it, number of the argument)
ConstantPlace = tuple[str, int]

#: Operators whose float32 constants train if they are tensors; constant numbers and masks define
#: the operator
WEIGHTED = (
    "relax.add",
    "relax.matmul",
    "relax.multiply",
    "relax.nn.conv1d",
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d",
    "relax.nn.conv2d_transpose",
    "relax.nn.conv3d",
    "relax.nn.conv3d_transpose",
    "relax.nn.group_norm",
    "relax.nn.instance_norm",
    "relax.nn.layer_norm",
    "relax.nn.prelu",
    "relax.nn.rms_norm",
    "relax.take",
)
#: A number at most this, in a sum, hides an element from a softmax: beside zeros, and beside any
#: numbers.
HIDING, HIDING_ANYWHERE = -100.0, -1e4


@dataclass(frozen=True, eq=False)
class Values:
    """State of one run: the value of every variable, and the arguments of the run."""

    frame: Frame
    constants: Mapping[GenericConst, torch.Tensor]
    slots: dict[relax.Var, Any]
    round_value: Rounding
    fill: Filler
    places: Mapping[str, int]


Reader = Callable[[Values], Any]


@dataclass(frozen=True, eq=False)
class TorchStep:
    """One value of the function, the code that computes it, and the values that are not read
    afterwards.
    """

    var: relax.Var
    compute: Reader
    reads: tuple[relax.Var, ...]
    dead: tuple[relax.Var, ...] = ()


@dataclass(frozen=True, eq=False)
class TorchProgram:
    """Function `main` of a calibration graph.

    Attributes:
        graph: The calibration graph.
        steps: In order.
        result: Reads the results of the function, without the arguments of placeholders.
        constants: The original constants of the function.
        trained: Trainable float32 constants, by the first place that reads each.
        places: Number of elements that an input of indices selects from, by its name.
    """

    graph: CalibrationGraph
    steps: tuple[TorchStep, ...]
    result: Reader
    constants: Mapping[GenericConst, torch.Tensor]
    trained: Mapping[ConstantPlace, GenericConst]
    inputs: tuple[relax.Var, ...] = ()
    by_name: Mapping[str, relax.Var] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> TorchProgram:
        """Return the same object: it never changes."""
        return self

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        constants: Mapping[GenericConst, torch.Tensor],
        round_value: Rounding,
        visit: Mapping[str, Visitor],
        fill: Filler = lambda number, taken: (),
    ) -> Any:
        """Run the function and return its result: a tensor, or a tuple.

        Args:
            visit: Functions that are called with values, by name.
            inputs, parameters, constants, round_value, fill: As for `begin`.

        Raises:
            DataError: the inputs do not fit the function.
        """
        values = self.begin(inputs, parameters, constants, round_value, fill)
        self.advance(values, self.steps, visit)
        return self.result(values)

    def begin(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        constants: Mapping[GenericConst, torch.Tensor],
        round_value: Rounding,
        fill: Filler = lambda number, taken: (),
    ) -> Values:
        """Return the state before the first step.

        Args:
            inputs: Inputs of the model, in order.
            parameters: Weights and biases by the name of their parameter of main.
            constants: Current values of `trained`.
            round_value: Rounds the values of a group.
            fill: Is called at placeholders.

        Raises:
            DataError: the inputs do not fit the function.
        """
        known = {**self.constants, **constants}
        values = Values(Frame(self.graph.mod), known, {}, round_value, fill, self.places)
        self.bind_inputs(values, inputs)
        for name, value in parameters.items():
            values.slots[self.by_name[name]] = value
        return values

    def advance(
        self,
        values: Values,
        steps: Sequence[TorchStep],
        visit: Mapping[str, Visitor] = MappingProxyType({}),
    ) -> None:
        """Run the next steps. `visit` as for `run`."""
        for step in steps:
            value = step.compute(values)
            if step.var.name in visit:
                value, changed = visit[step.var.name](value)
                values.slots.update((self.by_name[name], new) for name, new in changed.items())
            values.slots[step.var] = value
            for var in step.dead:
                values.slots.pop(var, None)

    def bind_inputs(self, values: Values, inputs: Sequence[torch.Tensor]) -> None:
        """Check the inputs, bind their sizes, and store them."""
        names = [var.name for var in self.inputs]
        if len(inputs) != len(names):
            raise DataError(
                f"The module takes {format_count(len(names), 'input')} ({', '.join(names)}), got "
                f"{len(inputs)}.",
                code="RQ302",
            )
        for var, value in zip(self.inputs, inputs, strict=True):
            bind_input(values, var, value)


def bind_input(values: Values, var: relax.Var, value: Any) -> None:
    """Check an input, bind its sizes, and store it.

    Raises:
        DataError: it does not fit the function.
    """
    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"Input {var.name!r} is a {type(value).__name__}; allowed: a torch.Tensor.",
            code="RQ302",
        )
    if isinstance(var.ty.shape, relax.ShapeExpr):
        match_shape(values.frame, var.name, var.ty.shape.values, tuple(value.shape))
    dtype = getattr(torch, get_tensor_dtype(var.ty))
    if value.dtype != dtype and value.is_floating_point() != dtype.is_floating_point:
        raise DataError(
            f"Input {var.name!r} is {value.dtype}; the model takes {dtype}.", code="RQ302"
        )
    check_places(values, var, value)
    values.slots[var] = value.to(dtype)


def check_places(values: Values, var: relax.Var, value: torch.Tensor) -> None:
    """Refuse an index that does not fit the tensor it selects from, as PyTorch does.

    Raises:
        DataError: there is one.
    """
    places = values.places.get(var.name)
    if places is not None and value.numel() and not -places <= value.min() <= value.max() < places:
        raise DataError(
            f"Input {var.name!r} holds indices from {value.min()} to {value.max()}; "
            f"{describe_places(places)}",
            code="RQ302",
        )


def build_program(
    graph: CalibrationGraph, placeholders: Sequence[Placeholder] = (), fixed: Collection[str] = ()
) -> TorchProgram:
    """Build the steps of a calibration graph, with or without placeholders.

    Constants from which the values `fixed` are computed do not train.

    Raises:
        ModelError: operators have no torch form; names all of them.
    """
    return ProgramBuilder(graph, fixed).build(placeholders)


class ProgramBuilder:
    """State of one build."""

    def __init__(self, graph: CalibrationGraph, fixed: Collection[str] = ()) -> None:
        self.graph, self.main, self.fixed = graph, graph.mod["main"], frozenset(fixed)
        self.view, self.sources = FunctionGraph(self.main), read_sources(self.main)
        self.keys = {v.dtype: key for key, v in graph.variables.items()}
        self.constants: dict[GenericConst, torch.Tensor] = {}
        self.trained: dict[ConstantPlace, GenericConst] = {}
        self.places: dict[GenericConst, ConstantPlace] = {}
        self.missing: dict[str, str] = {}

    def build(self, placeholders: Sequence[Placeholder] = ()) -> TorchProgram:
        steps = [step for binding in self.view.bindings if (step := self.make_step(binding))]
        if self.missing:
            listed = ", ".join(f"{op} ({name!r})" for op, name in sorted(self.missing.items()))
            raise ModelError(
                f"{format_count(len(self.missing), 'operator')} of the model cannot be trained: "
                f"{listed}. Allowed are the operators of relayquant.torch.interpreter.operators.",
                code="RQ206",
            )
        body = self.main.body
        result = body.body if isinstance(body, relax.SeqExpr) else body
        by_name = {var.name: var for var in self.main.params}
        inputs = [by_name[name] for name in self.graph.inputs]
        if placeholders:
            fields = self.list_results(result)
            filled = {inputs[i]: None for placeholder in placeholders for i in placeholder.given}
            steps += self.make_placeholder_steps(placeholders, inputs, fields)
            steps = order_steps(steps, {*self.main.params} - filled.keys())
            inputs = [var for var in inputs if var not in filled]
            taken = {i for placeholder in placeholders for i in placeholder.taken}
            own = [expr for i, expr in enumerate(fields) if i not in taken]
            result = own[0] if len(own) == 1 else relax.Tuple(own)
        kept = {*self.main.params, *relax.analysis.free_vars(result)}
        dead = find_ends(((step.var, *step.reads) for step in steps), kept)
        done = tuple(
            replace(step, dead=tuple(ended)) for step, ended in zip(steps, dead, strict=True)
        )
        return TorchProgram(
            self.graph,
            done,
            self.read(result),
            self.constants,
            self.trained,
            tuple(inputs),
            by_name,
            find_index_limits(self.main),
        )

    def list_results(self, result: relax.Expr) -> list[relax.Expr]:
        """List the results of the function."""
        bound = self.view.values.get(result) if isinstance(result, relax.Var) else None
        return list(iterate_results(bound if isinstance(bound, relax.Tuple) else result))

    def make_placeholder_steps(
        self,
        placeholders: Sequence[Placeholder],
        inputs: Sequence[relax.Var],
        results: Sequence[relax.Expr],
    ) -> list[TorchStep]:
        """Make steps that call placeholders, and steps that store their results."""
        steps: list[TorchStep] = []
        for number, placeholder in enumerate(placeholders):
            row = relax.Var(f"placeholder {number}", relax.TupleType([]))
            taken = [results[i] for i in placeholder.taken]
            readers = [self.read(expr) for expr in taken]

            def call(
                values: Values, number: int = number, readers: list[Reader] = readers
            ) -> Sequence[torch.Tensor]:
                return values.fill(number, [read(values) for read in readers])

            reads = (var for expr in taken for var in relax.analysis.free_vars(expr))
            steps.append(TorchStep(row, call, tuple(reads)))
            for place, i in enumerate(placeholder.given):

                def store(
                    values: Values, var: relax.Var = inputs[i], row: Any = row, place: int = place
                ) -> torch.Tensor:
                    bind_input(values, var, values.slots[row][place])
                    return values.slots[var]

                steps.append(TorchStep(inputs[i], store, (row,)))
        return steps

    def make_step(self, binding: Any) -> TorchStep | None:
        """Make the step of a binding. None for bindings inside a rounding."""
        var = binding.var
        if isinstance(binding, relax.MatchCast):
            compute = self.match_cast(binding)
        elif not isinstance(binding.value, Call):
            compute = self.read(binding.value)
        else:
            name = op_name(binding.value)
            if self.is_rounding(var):
                return None
            if name == "relax.qnn.simulated_dequantize":
                return self.make_rounding(var, binding.value)
            compute = self.make_call(binding.value, name, var)
        return TorchStep(var, compute, tuple(relax.analysis.free_vars(binding.value)))

    def is_rounding(self, var: relax.Var) -> bool:
        """Whether a value is part of a rounding that ends in a simulated_dequantize."""
        name = op_name(self.view.values[var])
        if name == "relax.qnn.simulated_quantize":
            return True
        if name not in ("relax.maximum", "relax.minimum"):
            return False
        first = self.view.values[var].args[0]
        return (
            isinstance(first, relax.Var) and first in self.view.values and self.is_rounding(first)
        )

    def make_rounding(self, var: relax.Var, call: Call) -> TorchStep:
        """Make one step of simulated_quantize - (maximum - minimum) - simulated_dequantize."""
        key, axis = self.keys[call.args[1]], int(call.attrs.axis)
        source = call.args[0]
        while op_name(self.view.values[source]) != "relax.qnn.simulated_quantize":
            source = self.view.values[source].args[0]
        data = self.view.values[source].args[0]
        read = self.read(data)

        def compute(values: Values) -> torch.Tensor:
            return values.round_value(key, axis, read(values))

        return TorchStep(var, compute, tuple(relax.analysis.free_vars(data)))

    def make_call(self, call: Call, name: str, var: relax.Var) -> Reader:
        """Make the function that computes a call of an operator."""
        operator = name.removeprefix("relax.")
        row = self.sources.get(var.name, {})
        function = find_form(operator, row.get("op", ""))
        if operator in ("clip", "nn.relu") and "clamps" in row:
            function = follow_clamps(row["clamps"])
        reason = self.explain_missing(call, operator)
        if function is None or reason:
            self.missing.setdefault(reason or operator or str(call.op), var.name)
            return lambda values: None
        if name in WEIGHTED and var.name not in self.fixed:
            for i, arg in enumerate(call.args):
                self.note_trained(arg, (var.name, i), name)
        if name in RECURRENT_OPERATORS and var.name not in self.fixed:
            self.note_trained(call.args[1], (var.name, 1), name)  # not the initial states
        attrs = SimpleNamespace(**read_attributes(call))
        readers = [self.read(arg) for arg in call.args]
        conform = make_conform(var.ty)

        def compute(values: Values) -> Any:
            return conform(function([read(values) for read in readers], attrs))

        return compute

    def explain_missing(self, call: Call, operator: str) -> str:
        """Name the operator and attribute of a call that its row does not model. "" if there is
        none.
        """
        row = TRAINED_ROWS.get(operator)
        if row is None:
            return ""
        unmodelled = find_unmodelled([call], row.attributes)
        refused = row.refuse(SimpleNamespace(**read_attributes(call)))
        return str(unmodelled) if unmodelled else f"{operator} has {refused}" if refused else ""

    def note_trained(self, expr: relax.Expr, place: ConstantPlace, name: str) -> None:
        """Mark a float32 constant that operator `name` reads as trainable if it is more than a
        number, and no mask. Once, even if several values read it.
        """
        if not isinstance(expr, GenericConst) or expr in self.places:
            return
        array = expr.value.numpy()
        if array.dtype == np.float32 and array.size > 1 and not is_mask(array, name):
            self.places[expr] = place
            self.trained[place] = expr

    def match_cast(self, binding: relax.MatchCast) -> Reader:
        """Bind the sizes of a value."""
        read, shape = self.read(binding.value), getattr(binding.ty, "shape", None)
        name = binding.var.name

        def compute(values: Values) -> Any:
            value = read(values)
            if isinstance(shape, relax.ShapeExpr):
                match_shape(values.frame, name, shape.values, tuple(value.shape))
            return value

        return compute

    def read(self, expr: relax.Expr) -> Reader:
        """Return a reader of an expression that computes nothing."""
        if isinstance(expr, relax.Var):
            return lambda values: values.slots[expr]
        if isinstance(expr, GenericConst):
            # A copy: TVM's memory must not be written to.
            self.constants.setdefault(expr, torch.from_numpy(np.array(expr.value.numpy())))
            return lambda values: values.constants[expr]
        if isinstance(expr, relax.Tuple):
            fields = [self.read(part) for part in expr.fields]
            return lambda values: tuple(part(values) for part in fields)
        if isinstance(expr, relax.TupleGetItem):
            source, index = self.read(expr.tuple_value), expr.index
            return lambda values: source(values)[index]
        if isinstance(expr, relax.ShapeExpr):
            return self.read_sizes(expr.values)
        if isinstance(expr.ty, tvm.ir.PrimType):
            (sizes,) = (self.read_sizes([expr]),)
            return lambda values: sizes(values)[0]
        raise ModelError(f"A {type(expr).__name__} has no torch form: {expr}.", code="RQ206")

    def read_sizes(self, dims: Sequence[Any]) -> Reader:
        """Return a reader of numbers, known or determined by the run."""
        known = Frame(self.graph.mod)
        sizes = tuple(known.evaluate_number(dim) for dim in dims)
        if None not in sizes:
            return lambda values: sizes
        return lambda values: tuple(values.frame.evaluate_number(dim) for dim in dims)


def order_steps(steps: Sequence[TorchStep], known: set[relax.Var]) -> list[TorchStep]:
    """Order steps so that each reads known values, as close to the original order as possible."""
    placed: list[TorchStep] = []
    waiting = list(steps)
    known = set(known)
    while waiting:
        later: list[TorchStep] = []
        for step in waiting:
            if known.issuperset(step.reads):
                placed.append(step)
                known.add(step.var)
            else:
                later.append(step)
        if len(later) == len(waiting):
            names = ", ".join(repr(step.var.name) for step in later)
            raise ModelError(f"Values {names} depend on themselves.", code="RQ206")
        waiting = later
    return placed


def is_mask(array: np.ndarray, name: str) -> bool:
    """Whether a constant of operator `name` hides elements, from a softmax by a sum or as 0 in a
    product. It is no weight: training would show what it hides.
    """
    if not np.isfinite(array).all():
        return True
    if name == "relax.multiply":
        return set(np.unique(array)) == {0, 1}
    hiding = array <= HIDING
    is_alone = hiding.any() and not array[~hiding].any()
    return name == "relax.add" and bool(is_alone or array.min(initial=0) <= HIDING_ANYWHERE)


def make_conform(ty: Any) -> Callable[[Any], Any]:
    """Make a function that converts a value to the dtype that TVM infers."""
    if not isinstance(ty, relax.TensorType) or not get_tensor_dtype(ty):
        return lambda value: value
    dtype = getattr(torch, get_tensor_dtype(ty))
    return lambda value: value if value.dtype == dtype else value.to(dtype)
