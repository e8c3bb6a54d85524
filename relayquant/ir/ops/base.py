"""The row type of the operator tables: pattern, operands, and one callback for each stage.

`check` runs when the plan is made. `simulate` runs when the calibration graph is built. `realize`
runs when the reference form (dequantize - float op - quantize) becomes integer operators.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import ConstantPattern

from relayquant.base.arguments import check_fields
from relayquant.base.grouping import GroupedWeight, GroupFormat, quantize_groups
from relayquant.base.qtypes import INTEGER_LIMITS, QParams, QSpec, Role
from relayquant.config import Accumulator, Overflow
from relayquant.errors import ConfigError, suggest_name
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.accumulator_range import (
    PRODUCTS,
    SUM_DTYPES,
    choose_accumulator_dtype,
)
from relayquant.ir.rewrite import Emitter, Match, Matcher, Pattern, Skip, check_attributes
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype
from relayquant.ir.rewrite.pattern import refuse_dpl

#: last part of the names of exact accumulators, the accumulator with bias first
TOTALS = ("biased", "acc")
#: last part of the names of an accumulator in a narrow register, and of its intermediate value
NARROW, SHIFTED = "narrow", "shifted"
#: why an operator whose result is rounded stays in float
NO_PARAMETERS = "the result has no parameters, since no quantized operator consumes it"


class Kind(enum.Enum):
    """What makes an operator worth quantizing."""

    ANCHOR = "anchor"  #: does the heavy work: quantized if possible
    FOLLOWER = "follower"  #: quantized if all inputs are, or between quantized operators
    CONNECTOR = "connector"  #: loses accuracy with 8 bits: quantized only if all neighbours are
    SHARING = (
        "sharing"  #: moves values without changing them: the output keeps the input's parameters
    )


class Output(enum.Enum):
    """Where the parameters of the result come from."""

    OWN = "own"  #: the integer operator needs them
    WHEN_WANTED = (
        "when wanted"  #: an int32 accumulator, dequantized unless a consumer takes integers
    )
    SHARED = "shared"  #: the input's parameters


@check_fields
@dataclass(frozen=True, eq=False)
class Operand:
    """A quantized part of the pattern.

    Attributes:
        name: Its name in the pattern. A row with a bias names its operands "data", "weight" and
            "bias".
        role: What it is. A weight or a bias is a constant.
        axis: Match -> channel axis of a weight. Without one, the weight has one scale. A bias has
            the scales of the accumulator, along the row's `accumulator_axis`.
    """

    name: str
    role: Role = Role.ACTIVATION
    axis: Callable[[Match], int | None] | None = None


def make_parameters(qparams: QParams) -> tuple[relax.Expr, relax.Expr]:
    """Return scale and zero point as constants, float32 and int32."""
    return relax.const(qparams.scale, "float32"), relax.const(qparams.zero_point, "int32")


@dataclass(frozen=True, eq=False)
class Quantized:
    """An operand in affine space: an integer expression and its parameters."""

    value: relax.Expr
    qparams: QParams

    @property
    def scale(self) -> relax.Expr:
        return self.parameters[0]

    @property
    def zero_point(self) -> relax.Expr:
        return self.parameters[1]

    @property
    def parameters(self) -> tuple[relax.Expr, relax.Expr]:
        """Scale and zero point, as most operators of the dialect take them."""
        return make_parameters(self.qparams)

    def dequantize(self) -> relax.Expr:
        """Return the real value, float32."""
        axis = -1 if self.qparams.axis is None else self.qparams.axis
        return qnn.dequantize(self.value, *self.parameters, axis=axis)


@dataclass(frozen=True, eq=False)
class SimulateContext:
    """Argument of a simulate callback: the match, and its operands as expressions of the new
    function.
    """

    emitter: Emitter
    match: Match
    operands: Mapping[str, relax.Expr]
    #: real accumulator with bias -> its value in the accumulator of the hardware
    narrow: Callable[[relax.Expr], relax.Expr] | None = None

    def emit(self, expr: relax.Expr, suffix: str) -> relax.Expr:
        """Bind an intermediate value, named after the operator."""
        return self.emitter.emit(expr, f"{self.match.name}.{suffix}")


@dataclass(frozen=True, eq=False)
class RealizeContext:
    """Argument of a realize callback: operands in affine space, and the parameters of the output,
    if any.
    """

    emitter: Emitter
    match: Match
    operands: Mapping[str, Quantized]
    output: QParams | None
    accumulator: Accumulator | None = None

    def emit(self, expr: relax.Expr, suffix: str) -> relax.Expr:
        """Bind an intermediate value, named after the operator."""
        return self.emitter.emit(expr, f"{self.match.name}.{suffix}")

    def accumulate(
        self, product: Callable[[str], relax.Expr], weight: np.ndarray | None = None
    ) -> relax.Expr:
        """Emit the sum of products with bias, in the accumulator.

        Without a narrow accumulator, the sum is exact: int32 if no input can overflow it, else
        int64.

        Args:
            product: Accumulator dtype -> the product, without the bias.
            weight: The constant that will replace the second operand, if it is not constant yet.

        Raises:
            ConfigError: `product` returned another operator, or one of an unbound expression.
        """
        call, bias = product(SUM_DTYPES[0]), None
        if isinstance(call, Call):
            check_product(call)
        if "bias" in self.operands:
            bias = self.operands["bias"].value
        added = None if bias is None else constant_value(bias)
        dtype = SUM_DTYPES[-1]
        if isinstance(call, Call) and (bias is None or added is not None):
            dtype = choose_accumulator_dtype(call, weight, added)
        total = self.emit(product(dtype), "acc")
        if bias is not None:
            if added is not None:
                bias = relax.const(added.astype(dtype), dtype)
            elif dtype != tensor_dtype(bias):
                bias = self.emit(relax.op.astype(bias, dtype), "bias")
            total = self.emit(relax.op.add(total, bias), "biased")
        if self.accumulator is None:
            return total
        return self.emit(narrow_integer(self.emit, total, self.accumulator), NARROW)


def check_product(call: Call) -> None:
    """Raise ConfigError for what is no product, or has operands without a type."""
    name = getattr(call.op, "name", "a call")
    if name not in PRODUCTS:
        raise ConfigError(
            f"accumulate: product returned {name}; allowed: {', '.join(PRODUCTS)}, or what "
            "context.emit returned. accumulate adds the bias.",
            code="RQ106",
        )
    if not all(isinstance(part.ty, relax.TensorType) for part in call.args):
        raise ConfigError(
            f"accumulate: an operand of {name} is an expression. Bind it before: "
            "context.emit(expression, 'part').",
            code="RQ106",
        )


@dataclass(frozen=True, eq=False)
class RunTimeQuantized:
    """An operand in affine space with parameters that the model computes at run time.

    Scale float32 () and zero point int32 () are values of the graph. For data (M, K), each of them
    may be (M,).
    """

    value: relax.Expr
    scale: relax.Expr
    zero_point: relax.Expr

    @property
    def is_row(self) -> bool:
        """Whether each row has a separate scale."""
        return self.scale.ty.ndim == 1


@dataclass(frozen=True, eq=False)
class DynamicContext:
    """Argument of a realize_dynamic callback.

    It holds the data with run-time parameters, the constant weight in affine space, and the float32
    bias, if there is one.
    """

    emitter: Emitter
    match: Match
    data: RunTimeQuantized
    weight: Quantized
    bias: relax.Expr | None

    def emit(self, expr: relax.Expr, suffix: str) -> relax.Expr:
        """Bind an intermediate value, named after the operator."""
        return self.emitter.emit(expr, f"{self.match.name}.{suffix}")

    def dequantize(self, accumulator: relax.Expr, axis: int) -> relax.Expr:
        """Dequantize an accumulator with zero point 0 to float32 and add the bias.

        The scale is the run-time data scale times the weight scale. The weight has one scale, or
        one for each index of `axis`. If the data has a scale for each row, the accumulator is (M,
        N), and N is the last axis of the result.
        """
        accumulator = self.emit(accumulator, "acc")
        if self.data.is_row:
            rows = qnn.dequantize(accumulator, self.data.scale, relax.const(0, "int32"), axis=0)
            weights = relax.const(np.array(self.weight.qparams.scale), "float32")
            value = relax.op.multiply(self.emit(rows, "rows"), weights)
            if self.match.root.ty.ndim != 2:
                value = relax.op.reshape(self.emit(value, "flat"), self.match.root.ty.shape)
            return self.add_bias(value)
        units = np.broadcast_to(self.weight.qparams.scale, (int(accumulator.ty.shape[axis]),))
        scale = self.emit(
            relax.op.multiply(self.data.scale, relax.const(np.array(units), "float32")), "scale"
        )
        value = qnn.dequantize(accumulator, scale, relax.const(0, "int32"), axis=axis)
        return self.add_bias(value)

    def add_bias(self, value: relax.Expr) -> relax.Expr:
        """Add the bias, if there is one, to a float32 value."""
        if self.bias is None:
            return value
        return relax.op.add(self.emit(value, "real"), self.bias)


@dataclass(frozen=True, eq=False)
class IntegerRows:
    """Rows of data (..., K) as integers.

    All are values of the graph: int8 (..., K), scale and zero point float32 (..., 1). A zero point
    of None is 0.
    """

    value: relax.Expr
    scale: relax.Expr
    zero_point: relax.Expr | None = None


@dataclass(frozen=True, eq=False)
class GroupedContext:
    """Argument of a realize_grouped callback.

    It holds the data as float32 or as integer rows, the grouped weight with one row per output, and
    the float32 bias, if there is one.
    """

    emitter: Emitter
    match: Match
    data: relax.Expr | IntegerRows
    weight: GroupedWeight
    bias: relax.Expr | None

    def emit(self, expr: relax.Expr, suffix: str) -> relax.Expr:
        """Bind an intermediate value, named after the operator."""
        return self.emitter.emit(expr, f"{self.match.name}.{suffix}")


def group_weight(array: np.ndarray, spec: QSpec) -> GroupedWeight:
    """Quantize a weight (K, N) in groups, as (N, K). Each group gets the scale with the smallest
    error.
    """
    return quantize_groups(array.T, GroupFormat.of(spec))


@check_fields
@dataclass(frozen=True, eq=False)
class QuantOp:
    """One quantizable operator (or fused pattern).

    Attributes:
        name: Unique name of the pattern, e.g. "conv2d_bias_relu".
        op: The main Relax operator. A QConfigMapping can select it by this name.
        pattern: The operators in the prepared float graph.
        operands: The quantized parts of the pattern.
        kind, output: See `Kind` and `Output`.
        simulate: SimulateContext -> new value of the root. The default repeats the float operators.
        realize: RealizeContext -> float value of the root, computed in affine space (usually a
            dequantize), or Skip. None for SHARING operators, which the allow-list handles, and for
            operators with an affine rule.
        check: Match -> Skip with a reason if the match cannot be quantized, else None.
        attributes: Names of the attributes that the row honours, for all its operators. A match is
            declined if another attribute differs from its default.
        accumulator_axis: Match -> axis of the result along which the accumulator is per-channel, or
            None. The field is None for rows without sums of products. The first two operands are
            the factors. simulate passes the sum with bias through `context.narrow`. realize makes
            the sum by `context.accumulate`.
        realize_dynamic: DynamicContext -> float32 value of the root, for data with run-time
            parameters. The operands are "data", "weight" and optionally "bias". None if not
            supported.
        realize_grouped: GroupedContext -> float32 value of the root, for grouped weights. The
            operands are "data", "weight" (K, N) and optionally "bias". None if not supported.
        has_affine_rule: Whether the row comes from an `AffineRule`, which computes it.
        feeds_back: Whether the weight multiplies the operator's own result, as in a recurrent
            layer. There is no operand "data".
    """

    name: str
    op: str
    pattern: Matcher
    operands: tuple[Operand, ...]
    kind: Kind = Kind.FOLLOWER
    output: Output = Output.OWN
    realize: Callable[[RealizeContext], relax.Expr | Skip] | None = None
    simulate: Callable[[SimulateContext], relax.Expr] = field(
        default=lambda context: repeat_match(context)
    )
    check: Callable[[Match], Skip | None] = field(default=lambda match: None)
    accumulator_axis: Callable[[Match], int | None] | None = None
    realize_dynamic: Callable[[DynamicContext], relax.Expr | Skip] | None = None
    realize_grouped: Callable[[GroupedContext], relax.Expr | Skip] | None = None
    attributes: tuple[str, ...] = ()
    has_affine_rule: bool = False
    feeds_back: bool = False

    def __post_init__(self) -> None:
        refuse_dpl(self.pattern, f"QuantOp {self.name!r}: pattern")
        named = set(self.pattern.parts) if isinstance(self.pattern, Pattern) else None
        missing = [] if named is None else [o.name for o in self.operands if o.name not in named]
        if missing:
            raise ConfigError(
                f"QuantOp {self.name!r}: operand {missing[0]!r} is not a named part of its "
                f"pattern. {suggest_name(missing[0], named or ())}",
                code="RQ106",
            )
        nodes = self.pattern.parts if isinstance(self.pattern, Pattern) else {}
        for operand in self.operands:
            if isinstance(nodes.get(operand.name), ConstantPattern):
                raise ConfigError(
                    f"QuantOp {self.name!r}: operand {operand.name!r} is_const(), which never "
                    "matches a quantized operand: it is the result of a dequantize. Write "
                    "wildcard(). Role.WEIGHT and Role.BIAS already ask for a constant.",
                    code="RQ106",
                )
        allowed = self.pattern.op_names if isinstance(self.pattern, Pattern) else ()
        if allowed and self.op not in allowed:  # code, and open patterns, may match any operator
            raise ConfigError(
                f"QuantOp {self.name!r}: op is {self.op!r}, an operator that its pattern does not "
                f"have. {suggest_name(self.op, allowed)}",
                code="RQ106",
            )
        for operand in self.operands:
            if operand.role is Role.BIAS and operand.axis is not None:
                raise ConfigError(
                    f"QuantOp {self.name!r}: operand {operand.name!r} is a bias, which has no axis "
                    "of its own. Give the axis of its channels in the result as accumulator_axis.",
                    code="RQ106",
                )
        named = {operand.name: operand.role for operand in self.operands}
        if Role.BIAS in named.values():
            kept = {"data": Role.ACTIVATION, "weight": Role.WEIGHT, "bias": Role.BIAS}
            lacking = [
                f"{name!r} of {role}" for name, role in kept.items() if named.get(name) != role
            ]
            lacking += ["accumulator_axis"] if self.accumulator_axis is None else []
            if lacking:
                raise ConfigError(
                    f"QuantOp {self.name!r}: a bias is added to the sums of data and weight, in "
                    f"their scale; the row lacks {' and '.join(lacking)}.",
                    code="RQ106",
                )
        if self.realize is None and self.kind is not Kind.SHARING and not self.has_affine_rule:
            raise ConfigError(
                f"QuantOp {self.name!r}: realize=None is allowed only for Kind.SHARING and for an "
                f"operator with an AffineRule. For {self.kind}, pass a function of RealizeContext.",
                code="RQ106",
            )

    def find_refusal(self, match: Match) -> Skip | None:
        """Return why this match cannot be quantized, or None if it can."""
        calls = [call for var in match.vars if (call := match.graph.call_of(var)) is not None]
        skip = check_attributes(calls, self.attributes, f"pattern {self.name!r}")
        return skip if skip is not None else self.check(match)

    def operand(self, name: str) -> Operand:
        """Return an operand by name. Raise KeyError for an unknown name."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise KeyError(f"pattern {self.name!r} has no operand {name!r}")


def repeat_match(context: SimulateContext) -> relax.Expr:
    """Repeat the matched operators on the operands of the context.

    This is the default simulate callback.
    """
    match = context.match
    replaced: list[tuple[relax.Expr, relax.Expr]] = [
        (match.parts[name], new) for name, new in context.operands.items()
    ]

    def translate(expr: relax.Expr) -> relax.Expr:
        for old, new in replaced:
            if expr.same_as(old):
                return new
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([translate(part) for part in expr.fields])
        return context.emitter.get(expr)

    total = find_total(match)
    for var in match.vars:
        call = match.graph.values[var]
        value = with_operands(call, [translate(arg) for arg in call.args])
        if context.narrow is not None and var.same_as(total):
            value = context.narrow(value)
        if var is match.root or var.same_as(match.root):
            return value
        replaced.append((var, context.emitter.bind(var, value)))
    raise ValueError(f"match at {match.name!r} does not end at its root")


def translate_qparams(qparams: QParams, dtype: str) -> QParams:
    """Translate parameters to another dtype that represents the same real values.

    If the integers would not fit, the zero point is shifted:

    uint8 zero point 128 -> int8 zero point 0; int8 -> int16 unchanged.
    """
    if qparams.dtype == dtype:
        return qparams
    (low, high), (new_low, new_high) = INTEGER_LIMITS[qparams.dtype], INTEGER_LIMITS[dtype]
    is_inside = (new_low <= low and high <= new_high) or (low <= new_low and new_high <= high)
    shift = 0 if is_inside else new_low - low
    zero_point = np.clip(qparams.zero_point + shift, new_low, new_high)
    return QParams(qparams.scale, zero_point, dtype, qparams.axis)


def change_dtype(context: RealizeContext, operand: Quantized, to: QParams, name: str) -> Quantized:
    """Convert `operand` to `to`, its parameters in another dtype.

    The conversion is exact, but saturates if the new dtype is narrower.
    """
    value = convert_dtype(operand, to)
    return operand if value is operand.value else Quantized(context.emit(value, name), to)


def convert_dtype(operand: Quantized, to: QParams) -> relax.Expr:
    """Return the integers of `operand` as integers of `to`, unchanged if the dtypes are equal."""
    if operand.qparams.dtype == to.dtype:
        return operand.value
    parameters = *operand.parameters, *Quantized(operand.value, to).parameters
    return qnn.requantize(operand.value, *parameters, out_dtype=to.dtype)


def make_product(
    operator: Callable[..., relax.Expr], lhs: Quantized, rhs: Quantized, **attributes: Any
) -> Callable[[str], relax.Expr]:
    """Return a function from the dtype of the sums to a convolution or matrix product."""
    scales, zero_points = zip(lhs.parameters, rhs.parameters, strict=True)
    return lambda dtype: operator(
        lhs.value, rhs.value, *zero_points, *scales, **attributes, out_dtype=dtype
    )


def count_values(dtype: str) -> int:
    """Count the integers of a dtype."""
    low, high = INTEGER_LIMITS[dtype]
    return high - low + 1


def compute_in_one_dtype(
    context: RealizeContext,
    operands: Sequence[Quantized],
    compute: Callable[[Sequence[Quantized], Quantized], relax.Expr],
) -> relax.Expr | Skip:
    """Run an integer operator that needs one dtype for operands and result, and dequantize.

    Operands and result are computed in the wider of both dtypes. Operands are widened to it, or the
    result is narrowed. Both conversions are exact, so that the result is rounded once.
    """
    out = context.output
    if out is None:
        return Skip(NO_PARAMETERS)
    data = operands[0].qparams.dtype
    dtype = out.dtype if count_values(out.dtype) >= count_values(data) else data
    operands = [
        change_dtype(context, part, translate_qparams(part.qparams, dtype), f"operand{i}")
        for i, part in enumerate(operands)
    ]
    inner = Quantized(operands[0].value, translate_qparams(out, dtype))
    value = context.emit(compute(operands, inner), "int")
    return change_dtype(context, Quantized(value, inner.qparams), out, "out").dequantize()


def find_total(match: Match) -> relax.Var:
    """Return the value of a match that is the sum of products, with the bias if there is one."""
    bias = match.parts.get("bias")
    for var in match.vars if bias is not None else ():
        if any(arg.same_as(bias) for arg in match.graph.values[var].args):
            return var
    return match.vars[0]


def narrow_integer(
    emit: Callable[[relax.Expr, str], relax.Expr], value: relax.Expr, accumulator: Accumulator
) -> relax.Expr:
    """Narrow an exact int32 or int64 sum to an accumulator. The result is int32.

    A saturating accumulator clips. A wrapping one is computed by a shift left and a shift right.
    """
    dtype = tensor_dtype(value)
    if accumulator.overflow is Overflow.SATURATE:
        bounds = (tvm.tirx.IntImm(dtype, limit) for limit in accumulator.limits)
        held = relax.op.clip(value, *bounds)
    else:
        width = np.iinfo(dtype).bits - accumulator.bits
        shift = relax.const(np.array(width, dtype), dtype)
        held = relax.op.right_shift(emit(relax.op.left_shift(value, shift), SHIFTED), shift)
    return held if dtype == "int32" else relax.op.astype(emit(held, SHIFTED), "int32")


def repeat_activation(
    context: RealizeContext | DynamicContext | GroupedContext, value: relax.Expr
) -> relax.Expr:
    """Apply the relu or clip of the match to `value`. Without one, return `value`."""
    graph, root = context.match.graph, context.match.root
    call = graph.call_of(root)
    if call is None or graph.op_name(root) not in ACTIVATIONS:
        return value
    value = context.emit(value, "linear")
    return with_operands(call, [value, *call.args[1:]])


#: activation functions that fuse into the operator before them: they only clamp
ACTIVATIONS = ("relax.nn.relu", "relax.clip")


def accumulator_qparams(data: QParams, weight: QParams, axis: int | None) -> QParams:
    """Return the parameters of an accumulator: scale = data scale x weight scale (float32), zero
    point 0.

    Their dtype is int32, also for an int64 accumulator.

    If the weight is per-channel, there is one scale per channel along `axis` of the output.
    """
    # The product of two tiny scales would underflow to 0. The values that they scale are about 0
    # too.
    product = data.scale.astype("float64") * weight.scale
    scale = np.maximum(product.astype("float32"), np.finfo("float32").tiny)
    return QParams(scale, np.zeros(scale.shape, "int32"), "int32", axis if scale.ndim else None)
