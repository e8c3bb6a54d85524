"""Search for weights: module -> the tensors that are weights of products or embedding tables. It
runs before anything is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.errors import format_count
from relayquant.flow.compression.sources import SourceKey, WeightSource, read_constant
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.rewrite.constants import LARGEST
from relayquant.ir.rewrite.function import list_functions, read_sources
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.moves import list_permutation

#: a tensor, and whether its axes are swapped
WeightKey: TypeAlias = tuple[SourceKey, bool]

#: operator that a weight may pass on its way to a product
TRANSPOSE = "relax.permute_dims"

#: operator whose rows choose a weight; those that read choices, and the place of these operands
EXPERTS = "relax.qnn.expert_dense"
CHOICES = {EXPERTS: 1, "relax.qnn.grouped_expert_dense": 2}
#: why a product stays in float whose results choose
CHOOSES = "its results choose experts, and rounded ones would choose others"
#: Modes of take that `qnn.grouped_take` supports. "fast" reads memory outside of the table at a
#: wrong index. As in `quantize`, it then counts from the end, which is what frontends mean.
BOUNDED_MODES = frozenset({"fast", "wrap", "clip"})


#: why a product stays in float whose rows are of any size
UNKNOWN_SHAPE = "the shape of its data is not known"

#: returns the tensor behind a constant or a parameter, if there is one
FindSource: TypeAlias = Callable[[relax.Expr], WeightSource | None]


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One operator that reads a weight.

    Attributes:
        function: Name of its function.
        name: Name of the value it computes.
        op: "matmul", "take" or "expert_dense"; "call_tir" for a kernel of the module, which is
            refused.
        var: Variable of that value.
        data: The other operand.
        source: The weight, as stored in the module.
        is_transposed: Whether the rows (outputs) of the weight are the columns of the source.
        reason: Why it cannot be compressed; "" if it can.
        is_clipped: Whether indices beyond the table read its first or last row.
        constants: Names of the constants of its node in the source model, the weight first.
        smoothing: Factors (K,) of the columns, by which the data is divided. None: 1.
    """

    function: str
    name: str
    op: str
    var: relax.Var
    data: relax.Expr
    source: WeightSource
    is_transposed: bool = False
    reason: str = ""
    is_clipped: bool = False
    constants: tuple[str, ...] = ()
    smoothing: np.ndarray | None = None

    @property
    def place(self) -> str:
        """Description of the place, for messages."""
        return f"{self.op} at {self.name!r} of {self.function!r}"

    @property
    def key(self) -> WeightKey:
        """Key of the tensor and its form. Uses with equal keys share one compressed weight."""
        return self.source.key, self.is_transposed

    @property
    def advice(self) -> str:
        """Advice for a use that cannot be compressed; "" if there is none."""
        if self.reason and self.op == "call_tir":
            return (
                "Compute it with relax.op.matmul by a stack of matrices, one for each expert, or "
                "by those that relax.op.take gathers."
            )
        if self.reason == UNKNOWN_SHAPE:
            return "Give its data sizes, symbolic ones by R.match_cast if a run alone knows them."
        if self.reason and self.reason == explain_numbers(self.source):
            key = self.source.key
            name = key if isinstance(key, str) else next(iter(self.constants), "")
            return (
                f"Check {f'the constant {name!r}' if name else 'the weight'} in the file of the "
                "model, and how it was trained or converted."
            )
        if self.reason and len(self.source.shape) > 2:
            return (
                "A stack (experts, K, N) is split or gathered where its values are finite, the "
                "data has one matrix or as many as the stack, known before it runs, and no "
                "function calls the one that reads it."
            )
        return ""

    def refuse(self, reason: str) -> WeightUse:
        """Return the use with a reason for staying in float."""
        return replace(self, reason=self.reason or reason)

    @property
    def array(self) -> np.ndarray:
        """Return the weight (N, K) times `smoothing`. The rows are outputs of a product, or the
        rows of a table. See `WeightSource.array`.
        """
        array = self.source.array
        array = array.T if self.is_transposed else array
        return array if self.smoothing is None else array * self.smoothing

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K) of the weight, without reading its values."""
        rows, columns = self.source.shape
        return (columns, rows) if self.is_transposed else (rows, columns)


def find_weights(mod: tvm.IRModule, params: Mapping[relax.Var, WeightSource]) -> list[WeightUse]:
    """Find every operator of every function that reads a weight, in the order of the functions'
    names.

    Args:
        params: Values of the functions' parameters; see `open_params`.
    """
    uses: list[WeightUse] = []
    constants: dict[SourceKey, WeightSource] = {}  # each is read once

    def find_source(expr: relax.Expr) -> WeightSource | None:
        if isinstance(expr, relax.Var):
            return params.get(expr)
        if not isinstance(expr, GenericConst) or not isinstance(expr.value, tvm.runtime.Tensor):
            return None
        source = read_constant(expr.value)
        return constants.setdefault(source.key, source)

    for gvar, func in list_functions(mod).items():
        rows = read_sources(func)
        for use in find_in_function(gvar.name_hint, func, find_source):
            names = rows.get(use.name, {}).get("constants", ())
            uses.append(replace(use, constants=tuple(names)))
    return uses


def find_in_function(
    function: str, func: relax.Function, find_source: FindSource
) -> Iterator[WeightUse]:
    """Find the weights of one function."""
    values: dict[relax.Var, relax.Expr] = {}
    choosing = find_choosing(func, find_source)
    for binding in iterate_bindings(func):
        value = binding.value
        values[binding.var] = value
        if not isinstance(value, Call):
            continue
        op = call_name(value)
        if op == "relax.matmul":
            found = resolve(values, value.args[1], find_source)
            if found is not None:
                source, is_swapped = found
                # The last axis of a product's weight is its outputs.
                reason = CHOOSES if binding.var in choosing else explain_matmul(value, source)
                yield WeightUse(
                    function, binding.var.name, "matmul", binding.var, value.args[0], source,
                    not is_swapped, reason,
                )  # fmt: skip
        elif op == EXPERTS:
            found = resolve(values, value.args[2], find_source)
            if found is not None and not found[1]:
                yield WeightUse(
                    function, binding.var.name, "expert_dense", binding.var, value.args[0],
                    found[0], reason=explain_matmul(value, found[0]),
                )  # fmt: skip
        elif op == "relax.take":
            found = resolve(values, value.args[0], find_source)
            if found is not None and len(found[0].shape) >= 2:
                yield WeightUse(
                    function, binding.var.name, "take", binding.var, value.args[1], found[0],
                    found[1], explain_take(value, found[0]), str(value.attrs.mode) == "clip",
                )  # fmt: skip
        elif op == "relax.call_tir":
            for operand in value.args[1].fields if isinstance(value.args[1], relax.Tuple) else ():
                found = resolve(values, operand, find_source)
                if found is not None and len(found[0].shape) >= 2:
                    reason = f"a kernel of the module's own, {value.args[0].name_hint!r}, reads it"
                    yield WeightUse(
                        function, binding.var.name, "call_tir", binding.var, operand, found[0],
                        reason=reason,
                    )  # fmt: skip


def find_choosing(func: relax.Function, find_source: FindSource) -> set[relax.Var]:
    """Find the products whose results choose the experts of rows, behind any other operators."""
    values = {binding.var: binding.value for binding in iterate_bindings(func)}
    reached: list[relax.Expr] = []
    for call in values.values():
        op = call_name(call) if isinstance(call, Call) else None
        if op in CHOICES:
            reached.append(call.args[CHOICES[op]])
        elif op == "relax.take":
            table = resolve(values, call.args[0], find_source)
            if table is not None and table[0].is_stack:
                reached.append(call.args[1])
    found: set[relax.Var] = set()
    seen: set[relax.Var] = set()
    while reached:
        var = reached.pop()
        if not isinstance(var, relax.Var) or var in seen or var not in values:
            continue
        seen.add(var)
        value = values[var]
        if isinstance(value, Call) and call_name(value) == "relax.matmul":
            found.add(var)
        else:
            reached.extend(relax.analysis.free_vars(value))
    return found


def resolve(
    values: Mapping[Any, Any], expr: relax.Expr, find_source: FindSource
) -> tuple[WeightSource, bool] | None:
    """Return (the float tensor behind an operand, whether its last two axes are swapped), else
    None.
    """
    found = follow_swaps(values, expr)
    if found is None:
        return None
    source = find_source(found[0])
    return (source, found[1]) if source and source.dtype.startswith("float") else None


def follow_swaps(values: Mapping[Any, Any], expr: relax.Expr) -> tuple[relax.Expr, bool] | None:
    """Follow an operand through aliases and swaps of its last two axes.

    Returns (the operand's origin, whether an odd number of swaps was found); None if another
    operator computes it.

    Args:
        values: Variable -> value of the function's bindings.
    """
    is_swapped = False
    while expr in values:
        value = values[expr]
        if isinstance(value, relax.Var | GenericConst):
            expr = value
        elif isinstance(value, Call) and swaps_matrices(value):
            expr, is_swapped = value.args[0], not is_swapped
        else:
            return None
    return expr, is_swapped


def swaps_matrices(call: Call) -> bool:
    """Whether a call swaps the last two axes of its operand, and no others."""
    if call_name(call) != TRANSPOSE:
        return False
    rank = call.args[0].ty.ndim
    return rank >= 2 and list_permutation(call) == [*range(rank - 2), rank - 1, rank - 2]


def explain_matmul(call: Call, source: WeightSource) -> str:
    """Return why a product with a weight cannot be compressed; "" if it can."""
    if len(source.shape) != 2:
        return f"its weight has {format_count(len(source.shape), 'dimension')}, not 2"
    if {str(call.ty.dtype), str(call.args[0].ty.dtype), source.dtype} != {"float32"}:
        return "it does not compute in float32"
    if not isinstance(call.args[0].ty.shape, relax.ShapeExpr):
        return UNKNOWN_SHAPE
    return explain_values(source)


def explain_take(call: Call, source: WeightSource) -> str:
    """Return why rows cannot be taken from a compressed table; "" if they can."""
    axis = call.attrs.axis
    if len(source.shape) != 2:
        return f"its table has {format_count(len(source.shape), 'dimension')}, not 2"
    if axis is None or int(axis) != 0:
        return "it does not take rows"
    if source.dtype != "float32":
        return f"its table is {source.dtype}"
    if str(call.args[1].ty.dtype) not in ("int32", "int64"):
        return f"its indices are {call.args[1].ty.dtype}"
    if str(call.attrs.mode) not in BOUNDED_MODES:
        return f"its indices are bounded by mode {str(call.attrs.mode)!r}"
    return explain_values(source)


def explain_values(source: WeightSource) -> str:
    """Return why the values of a weight cannot be compressed; "" if they can."""
    if not all(source.shape):
        return "its weight is empty"
    return explain_numbers(source)


def explain_numbers(source: WeightSource) -> str:
    """Return which values of a weight are not usable numbers; "" if all are usable."""
    if source.not_finite:
        return f"its weight has {format_count(source.not_finite, 'value')} not finite"
    if huge := source.counts[1]:
        return (
            f"its weight has {format_count(huge, 'value')} beyond {LARGEST:.2g}, whose squares "
            "float32 does not hold"
        )
    return ""
