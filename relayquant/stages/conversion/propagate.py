"""QDQ propagation: sinks dequantize and hoists quantize through operators that have a form in
affine space.

op(dequantize(q)) -> dequantize(op'(q)), by the rule of op in the allow-list. A clamp moves the
other way where possible: quantize(relu(x)) -> clip(quantize(x)). This is exact, because quantize is
monotonic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, Op
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.arguments import check_fields
from relayquant.base.qtypes import INTEGER_LIMITS, QParams, Rounding
from relayquant.base.user_calls import call_user
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.recurrent import has_integer_weight
from relayquant.ir.ledger import Ledger, find_ledger, write_ledger
from relayquant.ir.ops import Kind, Operand, Output, Quantized, QuantOp
from relayquant.ir.ops.base import make_parameters
from relayquant.ir.ops.build import unary_pattern
from relayquant.ir.ops.callbacks import describe, describe_tensor, has_shape_of
from relayquant.ir.ops.shape import (
    ATTRIBUTES,
    check_indices,
    check_nearest,
    check_sharing,
    check_windows,
)
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.rewrite import (
    Emitter,
    Graph,
    Match,
    Pattern,
    Rule,
    Skip,
    apply_rules,
    check_attributes,
)
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation, same_axis
from relayquant.stages.conversion.joined_input import quantize_before_joining
from relayquant.stages.conversion.qnn_form import read_dequantize, read_qparams


@check_fields
@dataclass(frozen=True, eq=False)
class AffineRule:
    """How an operator is computed in affine space.

    `rewrite(call, operand)` gets the float call and its first operand in affine space, in new
    expressions. It returns the result in affine space, or a Skip whose reason goes into the ledger.
    The result's value may be any integer expression with the shape of the float result.

    Attributes:
        op: The Relax operator, e.g. "relax.flip".
        rewrite: See above.
        attributes: Names of the attributes that the rule honours. A call with another attribute
            away from its default is left in float.
        shares_parameters: Whether the result always has the operand's parameters, as for an
            operator that moves or selects values. False: the result is calibrated separately, and
            the rule may return any parameters.
    """

    op: str
    rewrite: Callable[[Call, Quantized], Quantized | Skip]
    attributes: tuple[str, ...] = ()
    shares_parameters: bool = True

    def __post_init__(self) -> None:
        if self.op not in Op.list_op_names():
            raise ConfigError(
                f"AffineRule: op is {self.op!r}, which TVM does not have; allowed: the full name "
                "of an operator, such as 'relax.flip'.",
                code="RQ106",
            )

    @cached_property
    def pattern(self) -> QuantOp:
        """The operator row by which a plan quantizes the operator if the backend has no other
        row. `BackendConfig.with_affine_rule` adds it.
        """
        kind = Kind.SHARING if self.shares_parameters else Kind.FOLLOWER
        output = Output.SHARED if self.shares_parameters else Output.OWN
        return QuantOp(
            f"{self.op.removeprefix('relax.')} (affine rule)", self.op, unary_pattern(self.op),
            (Operand("data"),), kind, output, None, check=check_sharing,
            attributes=self.attributes, has_affine_rule=True,
        )  # fmt: skip


def repeat_call(call: Call, value: relax.Expr) -> relax.Expr:
    """Return the call on another first operand."""
    return with_operands(call, [value, *call.args[1:]])


def keep_parameters(call: Call, operand: Quantized) -> Quantized | Skip:
    """op(q) with unchanged parameters, if they are per tensor."""
    if operand.qparams.is_per_channel:
        return Skip("parameters are per channel, the operator may move the channels")
    return Quantized(repeat_call(call, operand.value), operand.qparams)


def keep_channels(call: Call, operand: Quantized) -> Quantized | Skip:
    """op(q) for an operator that leaves every axis in place."""
    return Quantized(repeat_call(call, operand.value), operand.qparams)


def keep_nearest(call: Call, operand: Quantized) -> Quantized | Skip:
    """resize(q) by nearest neighbour, with unchanged parameters."""
    return check_nearest(call) or keep_parameters(call, operand)


def keep_pooled(call: Call, operand: Quantized) -> Quantized | Skip:
    """max_pool(q) with unchanged parameters, which may be per channel."""
    axis = operand.qparams.axis
    if axis is not None and str(call.attrs.layout)[axis] not in "NC":
        return Skip("parameters are per index of an axis that the windows reach over")
    return check_windows(call) or keep_channels(call, operand)


def keep_taken(call: Call, operand: Quantized) -> Quantized | Skip:
    """take(q, indices) with unchanged parameters."""
    return check_indices(call) or keep_parameters(call, operand)


def move_axis(find_axis: Callable[[Call, int], int | None]) -> Callable:
    """Return the rule of an operator that moves the channel axis to `find_axis(call, axis)`. The
    rule declines if that is None.
    """

    def rewrite(call: Call, operand: Quantized) -> Quantized | Skip:
        qparams = operand.qparams
        if qparams.is_per_channel and qparams.axis is not None:
            axis = find_axis(call, qparams.axis)
            if axis is not None:
                qparams = qparams.with_axis(axis)
            elif qparams.scale.size == 1:  # one channel: equivalent to per-tensor parameters
                scale, zero_point = qparams.scale.reshape(()), qparams.zero_point.reshape(())
                qparams = QParams(scale, zero_point, qparams.dtype)
            else:
                return Skip("the channel axis does not survive")
        return Quantized(repeat_call(call, operand.value), qparams)

    return rewrite


def axis_after_permute(call: Call, axis: int) -> int | None:
    """Return the position of `axis` in the permutation."""
    return list_permutation(call).index(axis)


def axis_after_reshape(call: Call, axis: int) -> int | None:
    """Return the axis of the result that holds the same elements in the same order; None if the
    axis is split or merged.
    """
    before, after = tensor_shape(call.args[0]), tensor_shape(call)
    return None if before is None or after is None else same_axis(before, after, axis)


def relu_to_clip(call: Call, operand: Quantized) -> Quantized | Skip:
    """relu(q) -> clip(q, zero point, largest)."""
    zero_points = np.unique(operand.qparams.zero_point)
    if zero_points.size != 1:
        return Skip("zero points differ between channels")
    dtype = operand.qparams.dtype
    value = clip_integer(operand.value, int(zero_points[0]), INTEGER_LIMITS[dtype][1])
    return Quantized(value, operand.qparams)


def clip_to_clip(call: Call, operand: Quantized) -> Quantized | Skip:
    """clip(q, low, high) -> clip with both bounds quantized, rounded to the nearest step."""
    qparams = operand.qparams
    if qparams.is_per_channel:
        return Skip("bounds differ between channels")
    low, high = clip_bounds(call, qparams)
    least, most = (real_value(limit, qparams) for limit in INTEGER_LIMITS[qparams.dtype])
    if float(call.args[1].value) > most or float(call.args[2].value) < least:
        return Skip("it clips at a value that its operand's integers do not reach")
    return Quantized(clip_integer(operand.value, low, high), operand.qparams)


def pad_with_quantized(call: Call, operand: Quantized) -> Quantized | Skip:
    """pad(q) with the padding value quantized; 0 becomes the zero point. Other modes copy values.

    The rule declines a value between two integers or outside of the range. If the result is
    quantized, `hoist_pad` handles the operator.
    """
    if operand.qparams.is_per_channel:
        return Skip("parameters are per channel, the padding would need a value for each")
    if str(call.attrs.pad_mode) != "constant":
        return Quantized(repeat_call(call, operand.value), operand.qparams)
    real = float(call.attrs.pad_value)
    value = quantize_scalar(real, operand.qparams)
    step = float(operand.qparams.scale)
    if not abs(real_value(value, operand.qparams) - real) <= GRID_TOLERANCE * step:
        return Skip("no integer of its operand stands for the value it pads with")
    return Quantized(pad_integer(call, operand.value, value), operand.qparams)


def pad_integer(call: Call, data: relax.Expr, value: int) -> relax.Expr:
    """The float pad on integers."""
    width = [int(i) for i in call.attrs.pad_width]
    return relax.op.nn.pad(data, width, "constant", value)


#: distance from an integer, in steps, that float32 arithmetic may add to an exact real value
GRID_TOLERANCE = 2.0**-6

#: reason if a rule cannot be tried; it says nothing about the rule
NOT_DEQUANTIZED = Skip("the operand is not dequantized by constant parameters")

#: The allow-list: the form of each operator in affine space. An operator that is not listed stops
#: the propagation.
AFFINE_RULES: tuple[AffineRule, ...] = tuple(
    AffineRule(op, rewrite, ATTRIBUTES.get(op, ()))
    for op, rewrite in (
        ("relax.nn.relu", relu_to_clip),
        ("relax.clip", clip_to_clip),
        ("relax.nn.pad", pad_with_quantized),
        ("relax.nn.max_pool2d", keep_pooled),
        ("relax.nn.max_pool1d", keep_pooled),
        ("relax.reshape", move_axis(axis_after_reshape)),
        ("relax.squeeze", move_axis(axis_after_reshape)),
        ("relax.expand_dims", move_axis(axis_after_reshape)),
        ("relax.permute_dims", move_axis(axis_after_permute)),
        ("relax.strided_slice", keep_parameters),
        ("relax.broadcast_to", keep_parameters),
        ("relax.take", keep_taken),
        ("relax.gather_elements", keep_parameters),
        ("relax.gather_nd", keep_parameters),
        ("relax.tile", keep_parameters),
        ("relax.image.resize2d", keep_nearest),
        ("relax.max", keep_parameters),
        ("relax.min", keep_parameters),
    )
)


def expand_affine(mod: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """Move quantize and dequantize outwards as far as the allow-list allows.

    Operators that the ledger keeps in float are not touched. If no rule could handle an operator
    that was planned to run on integers, the result's ledger says why.
    """
    ledger = find_ledger(mod)
    kept = (
        {value for row in ledger.floating for value in row.values} if ledger is not None else set()
    )
    rules = [
        hoist_clamp("relax.nn.relu", relu_bounds, kept),
        hoist_clamp("relax.clip", clip_bounds, kept),
        hoist_pad(kept),
        quantize_before_joining(),
    ]
    planned = {id(row.pattern) for row in backend.patterns}
    rules += [
        sink_dequantize(rule, kept, rule.shares_parameters and id(rule.pattern) in planned)
        for rule in (*backend.affine_rules, *AFFINE_RULES)
    ]
    declined: dict[str, Skip] = {}

    def on_skip(_rule: str, name: str, skip: Skip) -> None:
        # If several rules match, the user's rule is first.
        if declined.get(name, NOT_DEQUANTIZED) is NOT_DEQUANTIZED:
            declined[name] = skip

    expanded = apply_rules(mod, rules, on_skip=on_skip)
    return expanded if ledger is None else record_declined(expanded, ledger, declined)


def record_declined(
    mod: tvm.IRModule, ledger: Ledger, declined: Mapping[str, Skip]
) -> tvm.IRModule:
    """Correct the ledger: operators that are still float operators are not called quantized."""
    graph = Graph(mod)
    corrected = ledger
    for row in ledger.quantized:
        var = graph.vars.get(row.name)
        is_same = var in graph.values and graph.op_name(var) == f"relax.{row.op}"
        if is_same and tensor_dtype(var).startswith("float"):
            if has_integer_weight(graph.values[var]):
                continue
            skip = declined.get(row.name, Skip("the allow-list has no rule for it"))
            corrected = corrected.with_refusal(row.name, skip.reason, skip.advice)
    return mod if corrected is ledger else write_ledger(mod, corrected)


def has_same_grid(a: QParams, b: QParams) -> bool:
    """Whether integers of both represent the same real values. The channels may be on another
    axis.
    """
    same = np.array_equal(a.scale, b.scale) and np.array_equal(a.zero_point, b.zero_point)
    return same and a.dtype == b.dtype


def check_affine(emitter: Emitter, outcome: object, root: relax.Var, where: str) -> Quantized:
    """Return a rule's value in affine space, with its type.

    Raises:
        ConfigError: It is none, or has another shape, or another dtype than its parameters.
    """
    is_quantized = isinstance(outcome, Quantized) and isinstance(outcome.qparams, QParams)
    if not is_quantized or not isinstance(outcome.value, relax.Expr):
        raise ConfigError(
            f"{where} returned {describe(outcome)}; allowed: a Skip(reason), or a "
            "Quantized(expression, QParams).",
            code="RQ106",
        )
    value = call_user(where, lambda: emitter.normalize(outcome.value, root.name))
    if not has_shape_of(value, root) or tensor_dtype(value) != outcome.qparams.dtype:
        raise ConfigError(
            f"{where} returned {describe_tensor(value)} with parameters of "
            f"{outcome.qparams.dtype}; allowed: integers of the parameters' dtype and the shape "
            f"of the float result, {describe_tensor(root)}.",
            code="RQ106",
        )
    return Quantized(value, outcome.qparams)


def sink_dequantize(
    affine: AffineRule, kept: Set[str] = frozenset(), is_shared: bool = False
) -> Rule:
    """Return the rewrite rule op(dequantize(q)) -> dequantize(op'(q)).

    Args:
        is_shared: Whether the plan relies on `affine.shares_parameters`.
    """
    data = wildcard()
    pattern = Pattern(is_op(affine.op)(data, varg_default_wildcard=True), {"data": data})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        if match.name in kept:
            return Skip("kept in float by the plan")
        quantized = read_dequantize(match.graph, match.parts["data"])
        if quantized is None:
            return NOT_DEQUANTIZED
        skip = check_attributes(
            [match.graph.values[match.root]], affine.attributes, "the rule of the allow-list"
        )
        if skip is not None:
            return skip
        # The call in terms of the new function, because a rule repeats it on other data.
        call = emitter.builder.normalize(emitter.get(match.graph.values[match.root]))
        operand = Quantized(emitter.get(quantized.value), quantized.qparams)
        where = f"Operator {match.name!r}: affine rule for {affine.op!r}"
        outcome = call_user(where, lambda: affine.rewrite(call, operand))
        if isinstance(outcome, Skip):
            return outcome
        outcome = check_affine(emitter, outcome, match.root, where)
        if is_shared and not has_same_grid(outcome.qparams, operand.qparams):
            raise ConfigError(
                f"{where} returned other parameters than those of the operand, which the plan "
                "gives the result. Write AffineRule(..., shares_parameters=False): the result is "
                "calibrated on its own then.",
                code="RQ106",
            )
        value = emitter.emit(outcome.value, f"{match.name}.int")
        return Quantized(value, outcome.qparams).dequantize()

    return Rule(f"sink dequantize through {affine.op}", pattern, rewrite)


def hoist_clamp(
    op: str, bounds: Callable[[Call, QParams], tuple[int, int]], kept: Set[str] = frozenset()
) -> Rule:
    """quantize(clamp(x)) -> clip(quantize(x)); exact, because quantize is monotonic."""

    def clamp(call: Call, value: relax.Expr, qparams: QParams) -> relax.Expr:
        return clip_integer(value, *bounds(call, qparams))

    return hoist_quantize(op, clamp, "unclipped", kept)


def hoist_pad(kept: Set[str] = frozenset()) -> Rule:
    """quantize(pad(x, value)) -> pad(quantize(x), quantize(value)); exact, in any parameters."""

    def pad(call: Call, value: relax.Expr, qparams: QParams) -> relax.Expr:
        if str(call.attrs.pad_mode) != "constant":
            return repeat_call(call, value)
        return pad_integer(call, value, quantize_scalar(float(call.attrs.pad_value), qparams))

    return hoist_quantize("relax.nn.pad", pad, "unpadded", kept)


def hoist_quantize(
    op: str,
    repeat: Callable[[Call, relax.Expr, QParams], relax.Expr],
    suffix: str,
    kept: Set[str],
) -> Rule:
    """Return the rule quantize(op(x)) -> repeat(op, quantize(x), parameters), per tensor."""
    data, scale, zero_point = wildcard(), wildcard(), wildcard()
    pattern = Pattern(
        is_op("relax.qnn.quantize")(is_op(op)(data, varg_default_wildcard=True), scale, zero_point),
        {"data": data, "scale": scale, "zero_point": zero_point},
    )

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        if any(var.name in kept for var in match.inner):
            return Skip("kept in float by the plan")
        quantize = match.graph.values[match.root]
        qparams = read_qparams(quantize, str(quantize.attrs.out_dtype))
        if qparams is None or qparams.is_per_channel:
            return Skip("the parameters are variables, or per channel")
        value = qnn.quantize(
            emitter.get(match.parts["data"]),
            *make_parameters(qparams),
            axis=int(quantize.attrs.axis),
            out_dtype=qparams.dtype,
            rounding=Rounding(str(quantize.attrs.rounding)),
        )
        call = emitter.get(match.call(op))
        return repeat(call, emitter.emit(value, f"{match.name}.{suffix}"), qparams)

    return Rule(f"hoist quantize over {op}", pattern, rewrite)


def relu_bounds(call: Call, qparams: QParams) -> tuple[int, int]:
    """Return the bounds of a relu: it keeps values at or above the zero point."""
    return int(qparams.zero_point), INTEGER_LIMITS[qparams.dtype][1]


def clip_bounds(call: Call, qparams: QParams) -> tuple[int, int]:
    """Return both bounds of a clip, quantized and saturated."""
    low, high = (quantize_scalar(float(arg.value), qparams) for arg in call.args[1:3])
    return low, high


def quantize_scalar(value: float, qparams: QParams) -> int:
    """Return one real value in affine space; infinities saturate."""
    array = np.array(value, "float32")
    return int(
        numpy_qnn.quantize(
            array,
            qparams.scale,
            qparams.zero_point,
            out_dtype=qparams.dtype,
            rounding=Rounding.TONEAREST_EVEN,
        )
    )


def real_value(value: int, qparams: QParams) -> float:
    """Return the real value of an integer with per-tensor parameters."""
    return (value - int(qparams.zero_point)) * float(qparams.scale)


def clip_integer(value: relax.Expr, low: int, high: int) -> relax.Expr:
    """Clip an integer tensor; no operator if the bounds are the limits of its dtype."""
    dtype = str(value.ty.dtype) if isinstance(value.ty, relax.TensorType) else ""
    if dtype and (low, high) == INTEGER_LIMITS[dtype]:
        return value
    return relax.op.clip(
        value, tvm.tirx.IntImm(dtype or "int64", low), tvm.tirx.IntImm(dtype or "int64", high)
    )
