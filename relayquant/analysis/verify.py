"""verify: compare a compiled module with the numpy reference. Integers must match bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, PrimType, TupleType

from relayquant.base.runtime import CompileModule, Machine, as_shape, as_tensor
from relayquant.errors import format_count
from relayquant.ir.dialect.qnn.recurrent import has_integer_weight
from relayquant.ir.reference import run_values
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.inputs import bind_inputs
from relayquant.ir.reference.interpreter import ExecutedBinding, record_value
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype

#: Values that exceed the lower quartile by more are not terms of the same sums.
MOST_TIMES = 1000

#: Operators whose float32 results have the same bits in compiled code. Each element is rounded as
#: specified, or moved. Norms and softmax specify the order of their sums, softmax also its
#: exponential. Other operators have a tolerance, because the order of sums varies and functions are
#: polynomials.
EXACT = frozenset(
    f"relax.{name}"
    for name in (
        *("qnn.dequantize", "qnn.quantize_rows", "nn.layer_norm", "nn.rms_norm", "nn.softmax"),
        *("nn.relu", "clip"),
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "negative", "abs"),
        *("where", "concat", "split", "take"),
        *("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "strided_slice"),
        *("nn.pad", "nn.max_pool2d", "max", "min", "flatten"),
    )
)


@dataclass(frozen=True)
class ValueDifference:
    """One value that differs between compiled code and reference.

    Attributes:
        name: Stable name of the value.
        dtype: Its dtype.
        mismatches: Number of differing elements. Integers: not equal. Floats: beyond the tolerance.
        size: Number of elements.
        max_difference: Largest absolute difference.
    """

    name: str
    dtype: str
    mismatches: int
    size: int
    max_difference: float


@dataclass(frozen=True)
class VerifyReport:
    """All differences in topological order, and the number of compared values.

    Attributes:
        differences: Values that differ.
        compared: Number of compared values.
        ties: Number of integers rounded from floats that lie, within the float tolerance, on both
            sides of a tie. Both roundings may be right. Later values are compared with results
            computed from the compiled code's integers.
    """

    differences: tuple[ValueDifference, ...]
    compared: int
    ties: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        """One line for each value that differs, and the number of compared values."""
        count = format_count(self.ties, "integer")
        ties = f"; floats at a tie were rounded to {count} either way" if self.ties else ""
        lines = [
            f"{found.name} ({found.dtype}): {found.mismatches} of "
            f"{format_count(found.size, 'element')} different, by up to {found.max_difference:.6g}"
            for found in self.differences
        ]
        return "\n".join(
            [
                *lines,
                f"{len(self.differences)} of {format_count(self.compared, 'value')} different "
                f"from the reference{ties}",
            ]
        )

    @property
    def first(self) -> ValueDifference | None:
        """The first value that differs."""
        return self.differences[0] if self.differences else None


class Verifier:
    """Compares compiled code with the numpy reference on any number of inputs.

    Two compilations are compared: the module as it is, by its results, and the module with every
    integer value as an additional result, so that the first difference has a name.

    Args:
        mod: The module. Compiled at the first comparison, once.
        compile_module: Compiles for this machine.
        rtol, atol: Tolerances of float values, relative to each element and to the largest element
            of its array (at most `MOST_TIMES` the lower quartile of the elements that are not 0),
            or to 1 if that is smaller, because sums round by their largest terms. Integers must be
            equal.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        compile_module: CompileModule,
        *,
        rtol: float = 1e-4,
        atol: float = 1e-5,
    ) -> None:
        self.graph = Graph(mod)
        self.rtol, self.atol = rtol, atol
        self.names = [
            binding.var.name
            for binding in self.graph.bindings
            if isinstance(binding.value, Call)
            and tensor_dtype(binding.var).startswith(("int", "uint"))
        ]
        self.compile_module = compile_module

    @cached_property
    def tapped(self) -> Machine:
        """The module with every integer as an additional result."""
        return Machine(self.compile_module(expose_values(self.graph.mod, self.names)))

    @cached_property
    def compiled(self) -> Machine:
        """The module as it is, with the model's function named main."""
        return Machine(self.compile_module(self.graph.mod))

    def compare(self, inputs: Any) -> VerifyReport:
        """Compare on inputs, as for `relayquant.reference.run`.

        Raises:
            DataError: the inputs do not fit the module.
        """
        graph, names, rtol, atol = self.graph, self.names, self.rtol, self.atol
        frame, params = Frame(graph.mod), graph.func.params
        bind_inputs(frame, params, inputs)
        given = {param.name: frame.values[param] for param in params}
        args = [as_argument(param.ty, frame.values[param]) for param in params]
        expected = run_values(graph.mod, given)
        tapped = self.tapped.call("main", args)
        pairs = list(zip(names, tapped[: len(names)], strict=True))
        ties = Ties(dict(pairs), find_rounded(graph), rtol, atol)
        if ties.rounded and any(find_differences(pairs, expected, rtol, atol)):
            expected = run_values(graph.mod, given, ties.settle)
        for name, value in given.items():
            record_value(expected, name, value)
        results = self.compiled.call("main", args)
        for (name, value), got in zip(find_results(graph), results, strict=True):
            if value is not None:
                expected[name] = value
            pairs.append((name, got))
        differences = tuple(find_differences(pairs, expected, rtol, atol))
        return VerifyReport(differences, len(pairs), ties.count)


def as_argument(ty: Any, value: Any) -> Any:
    """Convert an input of type `ty` from the interpreter's form to the form for compiled code."""
    if isinstance(ty, TupleType):
        return tuple(map(as_argument, ty.fields, value))
    if isinstance(ty, relax.ShapeType):
        return as_shape(value)
    return value if isinstance(ty, PrimType) else as_tensor(value)


def find_rounded(graph: Graph) -> dict[relax.Var, relax.Var]:
    """Map integers that are rounded from floats with a tolerance to these floats."""
    loose: set[relax.Var] = set()
    rounded: dict[relax.Var, relax.Var] = {}
    for binding in graph.bindings:
        operands = relax.analysis.free_vars(binding.value)
        is_loose = any(var in loose for var in operands)
        if tensor_dtype(binding.var).startswith(("int", "uint", "bool")):
            call = binding.value
            if graph.op_name(binding.var) == "relax.qnn.quantize" and call.args[0] in loose:
                rounded[binding.var] = call.args[0]
        elif is_loose or not is_exact(binding.value):
            loose.add(binding.var)
    return rounded


def is_exact(value: relax.Expr) -> bool:
    """Whether a float has the same bits in compiled code, if its operands have."""
    if not isinstance(value, Call):
        return True
    # A recurrent layer with a float weight has sums in no order that is specified.
    if call_name(value) == "relax.nn.softmax" and tensor_dtype(value.args[0]) != "float32":
        return False
    return call_name(value) in EXACT or has_integer_weight(value)


class Ties:
    """Adopts the compiled code's integers where floats within the tolerance can round either way.

    Attributes:
        count: Number of adopted integers.
    """

    def __init__(
        self,
        seen: dict[str, np.ndarray],
        rounded: dict[relax.Var, relax.Var],
        rtol: float,
        atol: float,
    ) -> None:
        self.seen, self.rounded, self.rtol, self.atol = seen, rounded, rtol, atol
        self.count = 0

    def settle(self, step: ExecutedBinding) -> Any:
        """Return the value of a step, with the compiled code's integers where they are equally
        right.
        """
        source, got = self.rounded.get(step.binding.var), self.seen.get(step.binding.var.name)
        if source is None or got is None or got.shape != step.value.shape:
            return step.value
        if (got == step.value).all():
            return step.value
        floats = step.evaluate(source)
        slack = find_slack(floats, self.rtol, self.atol)
        ends = [
            step.recompute(source, (floats + way * slack).astype(floats.dtype)) for way in (-1, 1)
        ]
        is_tie = (np.minimum(*ends) <= got) & (got <= np.maximum(*ends)) & (got != step.value)
        self.count += int(is_tie.sum())
        return np.where(is_tie, got, step.value).astype(step.value.dtype)


def find_slack(floats: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    """Return the tolerance of each float: its own part plus a part for the largest element.

    Elements that are far larger than the others, such as the -10^9 of a mask, do not count as the
    largest.
    """
    sizes = np.abs(np.where(np.isfinite(floats), floats, 0)).astype("float64")
    some = sizes[sizes > 0]
    most = MOST_TIMES * np.quantile(some, 0.25, method="lower") if some.size else 0.0
    return rtol * sizes + atol * max(min(sizes.max(initial=1), most), 1)


def find_results(graph: Graph) -> Iterator[tuple[str, np.ndarray | None]]:
    """Return (name, None) of the tensors that main returns, in order, and (name, value) of
    constants.
    """
    stack: list[relax.Expr] = [graph.func.body.body]
    count = 0
    while stack:
        expr = stack.pop()
        value = graph.values.get(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(value, relax.Tuple):
            stack += reversed(value.fields)
            continue
        array = constant_value(expr)
        yield (f"output {count}", array) if array is not None else (expr.name, None)
        count += 1


def find_differences(
    pairs: list[tuple[str, np.ndarray]],
    expected: dict[str, np.ndarray],
    rtol: float,
    atol: float,
) -> Iterator[ValueDifference]:
    """Find values whose arrays differ."""
    for name, got in pairs:
        want = expected[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            yield ValueDifference(name, str(got.dtype), got.size, got.size, float("inf"))
            continue
        if want.dtype.kind == "f":
            slack = find_slack(want, rtol, atol)
            wrong = ~np.isclose(got, want, rtol=0, atol=slack, equal_nan=True)
        else:
            wrong = got != want
        if wrong.any():
            gaps = np.abs(got[wrong].astype("float64") - want[wrong].astype("float64"))
            gap = float(np.where(np.isnan(gaps), np.inf, gaps).max())  # of NaN and a number
            yield ValueDifference(name, str(got.dtype), int(wrong.sum()), got.size, gap)
