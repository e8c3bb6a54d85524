"""The walk over a planned float module, in which simulate and convert emit its values.

Operators in a narrow float dtype:

v = op(x, w) -> v.float16 = op(float16(x), float16(w)); v = float32(v.float16).

A float16 reader of v reads v.float16. The casts between neighbours are then unused and are removed.
An operator with several roundings works in float32 on operands that are rounded to float16. Its
result is rounded once: v.float16 = float16(op(float32(float16(x)))).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.config import BackendConfig
from relayquant.ir.plan import OperatorPlan, Plan
from relayquant.ir.rewrite import Emitter, Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype

#: Operators with at most one rounding. float16 gives the same bits as float32 rounded to float16
#: (Figueroa, "When is double rounding innocuous?", SIGNUM 1995, for + - * / and the square root).
#: In other operators, the number of float16 roundings depends on the code of TVM or numpy.
ROUNDED_ONCE = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "negative", "abs"),
        *("sqrt", "floor", "ceil", "round", "trunc", "sign", "clip", "max", "min", "where"),
        *("nn.relu", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d", "nn.pad"),
        *("reshape", "flatten", "squeeze", "expand_dims", "permute_dims", "strided_slice"),
        *("concat", "split", "take", "tile", "repeat", "broadcast_to", "flip", "stack"),
        *("gather_elements", "gather_nd", "scatter_elements", "scatter_nd"),
    )
)
#: operators that sum products in float32 for every operand dtype
SUMMING = {
    "relax.matmul": relax.op.matmul,
    "relax.nn.conv1d": relax.op.nn.conv1d,
    "relax.nn.conv2d": relax.op.nn.conv2d,
    "relax.nn.conv2d_transpose": relax.op.nn.conv2d_transpose,
}


class NarrowFloats:
    """State of one rewrite: the narrow value of each float32 value."""

    def __init__(self, plan: Plan) -> None:
        self.dtypes = {value: op.compute for op in plan.operators for value in op.values}
        self.narrow: dict[tuple[relax.Expr, str], relax.Expr] = {}
        #: the float32 value that equals a narrow value
        self.rounded: dict[tuple[relax.Expr, str], relax.Expr] = {}

    def repeat(self, emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        """Emit the operator of a binding in the new function, in the dtype of the plan."""
        value, dtype = emitter.get(binding.value), self.dtypes.get(binding.var.name, "")
        if not dtype or not isinstance(value, Call):
            return value
        name = binding.var.name
        result = self.compute(emitter, value, dtype, name)
        if tensor_dtype(result) != dtype:
            return value  # a tuple of results, or an operator with a fixed dtype
        wide = emitter.bind(binding.var, relax.op.astype(result, "float32"))
        self.narrow[wide, dtype], self.rounded[wide, dtype] = result, wide
        return wide

    def compute(self, emitter: Emitter, call: Call, dtype: str, name: str) -> relax.Expr:
        """Emit the call on narrow operands. Its result is rounded once, to `dtype`."""
        if call.op.name not in SUMMING and call.op.name not in ROUNDED_ONCE:
            args = [self.round(emitter, arg, dtype) for arg in call.args]
            wide = emitter.emit(Call(call.op, args, call.attrs, call.ty_args), f"{name}.wide")
            if tensor_dtype(wide) != "float32":
                return wide
            return emitter.emit(relax.op.astype(wide, dtype), f"{name}.{dtype}")
        args = [self.cast(emitter, arg, dtype) for arg in call.args]
        if call.op.name in SUMMING:
            names = [f.name for f in type(call.attrs).__tvm_ffi_type_info__.fields]
            attrs = {n: getattr(call.attrs, n) for n in names} | {"out_dtype": "float32"}
            total = emitter.emit(SUMMING[call.op.name](*args, **attrs), f"{name}.sum")
            return emitter.emit(relax.op.astype(total, dtype), f"{name}.{dtype}")
        return emitter.emit(Call(call.op, args, call.attrs, call.ty_args), f"{name}.{dtype}")

    def cast(self, emitter: Emitter, expr: relax.Expr, dtype: str) -> relax.Expr:
        """Cast a float32 operand to `dtype`, once for all readers. Other operands stay."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.cast(emitter, part, dtype) for part in expr.fields])
        array = constant_value(expr)
        if array is not None:
            is_real = array.dtype == np.float32
            return relax.const(array.astype(dtype), dtype) if is_real else expr
        if tensor_dtype(expr) != "float32":
            return expr
        if (expr, dtype) not in self.narrow:
            name = getattr(expr, "name", "value")
            cast = emitter.emit(relax.op.astype(expr, dtype), f"{name}.{dtype}")
            self.narrow[expr, dtype] = cast
        return self.narrow[expr, dtype]

    def round(self, emitter: Emitter, expr: relax.Expr, dtype: str) -> relax.Expr:
        """Round an operand to `dtype` and return it in float32."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.round(emitter, part, dtype) for part in expr.fields])
        if tensor_dtype(expr) != "float32":
            return expr
        if (expr, dtype) not in self.rounded:
            wide = relax.op.astype(self.cast(emitter, expr, dtype), "float32")
            name = getattr(expr, "name", "value")
            self.rounded[expr, dtype] = emitter.emit(wide, f"{name}.rounded")
        return self.rounded[expr, dtype]


class PlannedWalk(ABC):
    """State of one walk. Its methods are callbacks of `rewrite_main`."""

    def __init__(self, graph: Graph, plan: Plan, backend: BackendConfig) -> None:
        self.graph, self.plan, self.backend = graph, plan, backend
        self.operators = {op.name: op for op in plan.operators if op.quantized and op.pattern}
        self.inner = {name for op in self.operators.values() for name in op.values[:-1]}
        self.floats = NarrowFloats(plan)
        self.views: dict[tuple[str, str], relax.Expr] = {}  # (value, group key) -> rounded value

    @abstractmethod
    def add_views(self, emitter: Emitter, name: str, value: relax.Expr) -> relax.Expr:
        """Round `value` for each of its groups. Return the first view, or the value itself if it
        has no group.
        """

    @abstractmethod
    def repeat_operator(self, emitter: Emitter, operator: OperatorPlan) -> relax.Expr:
        """Return a quantized operator on its operands, rounded as the plan says."""

    def quantize_inputs(self, emitter: Emitter) -> None:
        for param in self.graph.func.params:
            self.add_views(emitter, param.name, param)

    def visit(self, emitter: Emitter, binding: relax.VarBinding) -> relax.Expr | None:
        name = binding.var.name
        if name in self.inner:
            return None
        operator = self.operators.get(name)
        if operator is None:
            value = self.floats.repeat(emitter, binding)
        else:
            value = self.repeat_operator(emitter, operator)
        if name not in self.plan.value_groups:
            return value
        bound = emitter.bind(binding.var, value)
        view = self.add_views(emitter, name, bound)
        # The result of a float operator stays exact for its float consumers.
        return view if operator is not None and not operator.has_float_data else bound

    def view(self, emitter: Emitter, expr: relax.Expr, key: str | None) -> relax.Expr:
        """Return a computed operand as its group rounds it; unchanged if it has no group."""
        if key is None or not isinstance(expr, relax.Var):
            return emitter.get(expr)
        return self.views[expr.name, key]
