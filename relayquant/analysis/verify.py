"""verify: does the compiled module compute what the numpy reference computes? Bit for bit on
integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, PrimType, TupleType

from relayquant.base.runtime import CompileModule, Executor, as_shape, as_tensor
from relayquant.errors import format_count
from relayquant.ir.reference import run_values
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.inputs import bind_inputs
from relayquant.ir.reference.interpreter import ExecutedBinding, record_value
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype

#: Larger than the lower quartile by more, values are no terms of the same sums.
MOST_TIMES = 1000

#: Operators whose float32 results are the same bits in compiled code: each element is rounded as
#: stated, or moved; norms and softmax state the order of their sums, and softmax its exponential.
#: Others have a tolerance: sums have an order, functions are polynomials.
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
    """One value in which compiled code and reference differ.

    Attributes:
        name: Stable name of the value.
        dtype: Its dtype.
        mismatches: Number of elements that differ (integers: at all; floats: beyond the tolerance).
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
    """All differences, in topological order, and how many values were compared.

    Attributes:
        differences: Values that differ.
        compared: How many values were compared.
        ties: How many integers were rounded from floats that lie, within the tolerance of floats,
            on both sides of a tie: there both may be right. What follows is compared with what
            comes of those of the compiled code.
    """

    differences: tuple[ValueDifference, ...]
    compared: int
    ties: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        """One line for each value that differs, and how many were compared."""
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
        """The first value that differs: where to look."""
        return self.differences[0] if self.differences else None


class Verifier:
    """Compares compiled code with the numpy reference, on any number of inputs.

    Two compilations are compared: the module as it is, by its results, and the module with every
    integer value as an additional result, so that the first difference has a name.

    Args:
        mod: The module; compiled when it is first compared, once.
        compile_module: Compiles for this machine.
        rtol, atol: Tolerances of float values, by each element and by the largest of its array (of
            `MOST_TIMES` the lower quartile of those that are not 0 at most), or 1 where that is
            smaller: sums round by their largest terms. Integers must be equal.
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
    def tapped(self) -> Executor:
        """The module with every integer as an additional result."""
        return Executor(self.compile_module(expose_values(self.graph.mod, self.names)))

    @cached_property
    def compiled(self) -> Executor:
        """The module as it is, but that the model is called main."""
        return Executor(self.compile_module(self.graph.mod))

    def compare(self, inputs: Any) -> VerifyReport:
        """Compare on inputs as for `relayquant.reference.run`.

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
    """An input of type `ty` as the interpreter holds it -> as compiled code takes it."""
    if isinstance(ty, TupleType):
        return tuple(map(as_argument, ty.fields, value))
    if isinstance(ty, relax.ShapeType):
        return as_shape(value)
    return value if isinstance(ty, PrimType) else as_tensor(value)


def find_rounded(graph: Graph) -> dict[relax.Var, relax.Var]:
    """Integers that are rounded from floats with a tolerance -> these floats."""
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
    if call_name(value) == "relax.nn.softmax" and tensor_dtype(value.args[0]) != "float32":
        return False
    return call_name(value) in EXACT


class Ties:
    """Takes the integers of compiled code where floats within the tolerance round to either.

    Attributes:
        count: How many it took.
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
        """The value of a step, with the integers of compiled code where they are as right."""
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
    """How far each of some floats may be off: by itself, and by the largest, which others that are
    far smaller have no part in, such as the -10^9 of a mask.
    """
    sizes = np.abs(np.where(np.isfinite(floats), floats, 0)).astype("float64")
    some = sizes[sizes > 0]
    most = MOST_TIMES * np.quantile(some, 0.25, method="lower") if some.size else 0.0
    return rtol * sizes + atol * max(min(sizes.max(initial=1), most), 1)


def find_results(graph: Graph) -> Iterator[tuple[str, np.ndarray | None]]:
    """(name, None) of the tensors that main returns, in order; (name, value) of constants."""
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
    """Values whose arrays differ."""
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
