"""Float module + plan + parameters -> reference form: dequantize - float operator - quantize around
every operator.

v = conv(x, w) + b -> v = conv(dequantize(x.q), dequantize(w_int8)) + dequantize(b_int32); v.q =
quantize(v); v.dq = dequantize(v.q). It runs on any target. Backends are lowered from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import (
    INTEGER_LIMITS,
    QParams,
    QSpec,
    Role,
    Rounding,
    choose_qparams,
    conform_scale,
)
from relayquant.errors import ConfigError, format_count
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.ledger import build_ledger, find_ledger, ledger_attrs
from relayquant.ir.ops import Quantized, QuantOp, SimulateContext
from relayquant.ir.ops.base import (
    NARROW,
    GroupedContext,
    IntegerRows,
    accumulator_qparams,
    group_weight,
    make_parameters,
    narrow_integer,
    repeat_match,
)
from relayquant.ir.ops.callbacks import (
    describe_place,
    run_accumulator_axis,
    run_axis,
    run_realize_grouped,
)
from relayquant.ir.ops.dynamic import quantize_rows_at_run_time, round_at_run_time
from relayquant.ir.ops.find import find_pattern, match_operator, operand_constant
from relayquant.ir.ops.planned_walk import PlannedWalk
from relayquant.ir.plan import OperatorPlan
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.rewrite import Emitter, Graph, Match, Skip, rewrite_main
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.stages.conversion.bias import BIAS_LIMIT, LEAST_SHARE, refine_units
from relayquant.stages.conversion.propagate import clip_integer
from relayquant.stages.prepared import PreparedModel


def build_reference(prepared: PreparedModel) -> tvm.IRModule:
    """Return the reference form of a calibrated model, with its ledger.

    Raises:
        ConfigError: some values have no parameters yet.
    """
    builder = _ReferenceBuilder(prepared)
    dtypes = {name: tensor_dtype(var) for name, var in builder.graph.vars.items()}
    macs = {binding.var.name: count_macs(binding.value) for binding in builder.graph.bindings}
    ledger = build_ledger(
        prepared.plan, builder.parameters, prepared.backend.name, dtypes, prepared.observers, macs
    )
    before = find_ledger(prepared.mod)
    if before is not None:  # a part of the model was quantized before
        ledger = ledger.with_finished(before)
    ledger = replace(
        ledger,
        effort=prepared.effort,
        choices=dict(prepared.choices),
        inputs=prepared.inputs,
        outputs=prepared.outputs,
    )
    return rewrite_main(
        prepared.mod,
        builder.visit,
        before=builder.quantize_inputs,
        attrs=ledger_attrs(ledger),
    )


class _ReferenceBuilder(PlannedWalk):
    """State of one conversion: the dequantized view of every value."""

    def __init__(self, prepared: PreparedModel) -> None:
        super().__init__(Graph(prepared.mod), prepared.plan, prepared.backend)
        self.constants = prepared.constants
        self.parameters = fit_weight_scales(prepared, self.graph)
        self.dynamic_views: dict[tuple[str, QSpec], relax.Expr] = {}
        #: value -> integers and scales of its rows
        self.rows: dict[tuple[relax.Expr, QSpec], IntegerRows] = {}

    def add_views(self, emitter: Emitter, name: str, value: relax.Expr) -> relax.Expr:
        """Quantize `value` for each of its groups and return the first dequantized view."""
        first = value
        for i, key in enumerate(self.plan.value_groups.get(name, ())):
            prefix = name if i == 0 else f"{name}:{self.parameters[key].dtype}"
            spec = self.plan.group(key).info.spec
            view = self.round_trip(emitter, first, self.parameters[key], prefix, spec.limits)
            self.views[name, key] = view
            if i == 0:
                first = view
        return first

    def round_trip(
        self,
        emitter: Emitter,
        value: relax.Expr,
        qparams: QParams,
        name: str,
        limits: tuple[int, int],
    ) -> relax.Expr:
        """Return dequantize(quantize(value)), with a clip between if not the whole dtype is
        used.
        """
        axis, pair = -1 if qparams.axis is None else qparams.axis, make_parameters(qparams)
        quantized = qnn.quantize(value, *pair, axis=axis, out_dtype=qparams.dtype)
        if limits != INTEGER_LIMITS[qparams.dtype]:
            quantized = clip_integer(emitter.emit(quantized, f"{name}.unclipped"), *limits)
        quantized = emitter.emit(quantized, f"{name}.q")
        return emitter.emit(qnn.dequantize(quantized, *pair, axis=axis), f"{name}.dq")

    def repeat_operator(self, emitter: Emitter, operator: OperatorPlan) -> relax.Expr:
        """Repeat the float operator on dequantized operands."""
        pattern = find_pattern(self.backend, operator.pattern)
        match = match_operator(self.graph, self.backend, operator)
        if operator.grouped is not None:
            return self.group_operator(emitter, pattern, match, operator)
        keys = dict(operator.operands)
        operands: dict[str, relax.Expr] = {}
        for operand in pattern.operands:
            expr = match.parts[operand.name]
            if isinstance(expr, relax.Tuple):
                fields = [
                    self.constant_view(emitter, part, operator.name, f"{operand.name}.{i}")
                    if constant_value(part) is not None
                    else self.view(emitter, part, keys.get(f"{operand.name}.{i}"))
                    for i, part in enumerate(expr.fields)
                ]
                operands[operand.name] = relax.Tuple(fields)
            elif operand.role is Role.ACTIVATION and operator.dynamic is not None:
                operands[operand.name] = self.dynamic_view(emitter, expr, operator.dynamic)
            elif operand.role is Role.BIAS and operator.dynamic is not None:
                array = find_constant(self.constants, match, operand.name)
                operands[operand.name] = relax.const(array, "float32")
            elif operand.role is Role.ACTIVATION:
                operands[operand.name] = self.view(emitter, expr, keys.get(operand.name))
            else:
                limits = None
                if operand.role is Role.WEIGHT:
                    qparams = self.parameters[keys[operand.name]]
                    limits = self.plan.group(keys[operand.name]).info.spec.limits
                else:
                    qparams = bias_qparams(pattern, match, operator, self.parameters)
                    bias = find_constant(self.constants, match, operand.name)
                    step = self.find_step(operator, bias)
                    still = self.find_still(pattern, match, operator)
                    qparams = refine_units(qparams, bias, step, still)
                operands[operand.name] = self.dequantized_constant(
                    emitter, match, operand.name, qparams, limits, keys.get(operand.name)
                )
        narrow = None
        if operator.accumulator is not None and pattern.accumulator_axis is not None:
            narrow = self.make_narrow(emitter, match, pattern, operator)
        return repeat_match(SimulateContext(emitter, match, operands, narrow))

    def find_step(self, operator: OperatorPlan, bias: np.ndarray) -> float | None:
        """Return the finest step of an operator's result. None if the result is not quantized,
        unless the data was zero on all samples. Then the bias is the whole result, so a step is
        needed.
        """
        keys = self.plan.value_groups.get(operator.name, ())
        if keys:
            return min(float(self.parameters[key].scale.min()) for key in keys)
        return (
            float(np.abs(bias).max(initial=0)) * LEAST_SHARE if self.is_unseen(operator) else None
        )

    def is_unseen(self, operator: OperatorPlan) -> bool:
        """Whether the data of an operator was zero on all samples."""
        data = dict(operator.operands)["data"]
        return self.parameters[data] == choose_qparams(0.0, 0.0, self.plan.group(data).info.spec)

    def find_still(
        self, pattern: QuantOp, match: Match, operator: OperatorPlan
    ) -> np.ndarray | bool:
        """Whether the sums of an operator are 0 on all samples, because its integer weights or
        its data are 0. For all channels or for each.
        """
        if self.is_unseen(operator):
            return True
        operand = pattern.operand("weight")
        qparams = self.parameters[dict(operator.operands)["weight"]]
        weight = quantize_constant(find_constant(self.constants, match, "weight"), qparams)
        zero = qparams.zero_point
        if qparams.axis is not None and zero.ndim:
            zero = zero.reshape(shape_along(qparams.axis, weight.ndim))
        axis = run_axis(pattern, operand, match)
        return find_extent(weight.astype("int64") - zero, axis) == 0

    def group_operator(
        self, emitter: Emitter, pattern: QuantOp, match: Match, operator: OperatorPlan
    ) -> relax.Expr:
        """Return the operator on float data, or on rows of integers, with a weight in groups."""
        assert operator.grouped is not None
        bias = None
        if "bias" in match.parts:
            bias = relax.const(find_constant(self.constants, match, "bias"), "float32")
        weight = group_weight(operand_constant(match, "weight"), operator.grouped)
        data = emitter.get(match.parts["data"])
        if operator.dynamic is not None:
            data = self.quantize_rows(emitter, data, operator.dynamic)
        context = GroupedContext(emitter, match, data, weight, bias)
        value = run_realize_grouped(pattern, context)
        if isinstance(value, Skip):
            raise ConfigError(
                f"{describe_place(pattern, match.name, 'realize')}: {value.reason}", code="RQ106"
            )
        return value

    def quantize_rows(self, emitter: Emitter, data: relax.Expr, spec: QSpec) -> IntegerRows:
        """Return the rows of a value as integers. All readers that want them in this form share
        them.
        """
        name = getattr(data, "name", "data")

        def emit(expr: relax.Expr, suffix: str) -> relax.Expr:
            return emitter.emit(expr, f"{name}.{suffix}")

        if (data, spec) not in self.rows:
            self.rows[data, spec] = quantize_rows_at_run_time(emit, data, spec)
        return self.rows[data, spec]

    def make_narrow(
        self, emitter: Emitter, match: Match, pattern: QuantOp, operator: OperatorPlan
    ) -> Callable[[relax.Expr], relax.Expr]:
        """v -> dequantize(clip or wrap(quantize(v))), with int32 in units of the accumulator."""
        keys, accumulator = dict(operator.operands), operator.accumulator
        data, weight = (self.parameters[keys[part.name]] for part in pattern.operands[:2])
        qparams = sum_qparams(pattern, match, data, weight)
        axis = -1 if qparams.axis is None else qparams.axis

        def narrow(value: relax.Expr) -> relax.Expr:
            if accumulator is None:
                return value
            real = emitter.emit(value, f"{match.name}.real")
            wide = qnn.quantize(real, *make_parameters(qparams), axis=axis, out_dtype="int32")
            wide = emitter.emit(wide, f"{match.name}.wide")

            def emit(expr: relax.Expr, suffix: str) -> relax.Expr:
                return emitter.emit(expr, f"{match.name}.{suffix}")

            total = emit(narrow_integer(emit, wide, accumulator), NARROW)
            return Quantized(total, qparams).dequantize()

        return narrow

    def constant_view(
        self, emitter: Emitter, constant: relax.Expr, name: str, operand: str
    ) -> relax.Expr:
        """Return a constant that is moved together with computed operands, dequantized from
        integers with the result's parameters. If the result has none, the constant stays as it
        is.
        """
        for key in self.plan.value_groups.get(name, ())[:1]:
            limits = self.plan.group(key).info.spec.limits
            where = f"{name}.{operand}"
            return self.round_trip(emitter, constant, self.parameters[key], where, limits)
        return constant

    def dynamic_view(self, emitter: Emitter, expr: relax.Expr, spec: QSpec) -> relax.Expr:
        """Return dequantize(quantize(value)) with dynamic parameters. All readers share it."""
        if not isinstance(expr, relax.Var):
            return emitter.get(expr)
        if (expr.name, spec) not in self.dynamic_views:
            name = f"{expr.name}.{spec.dtype}"

            def emit(value: relax.Expr, suffix: str) -> relax.Expr:
                return emitter.emit(value, f"{name}.{suffix}")

            self.dynamic_views[expr.name, spec] = round_at_run_time(emit, emitter.get(expr), spec)
        return self.dynamic_views[expr.name, spec]

    def dequantized_constant(
        self,
        emitter: Emitter,
        match: Match,
        operand: str,
        qparams: QParams,
        limits: tuple[int, int] | None,
        key: str | None,
    ) -> relax.Expr:
        """Return dequantize(integer constant) with integers within `limits`. If a bias has a
        group, it is first rounded by the group's parameters.
        """
        array = find_constant(self.constants, match, operand)
        if key is not None and self.plan.group(key).info.role is Role.BIAS:
            array = round_constant(array, self.parameters[key], self.plan.group(key).info.spec)
        values = quantize_constant(array, qparams)
        if limits is not None:
            values = np.clip(values, *limits)
        expr = Quantized(relax.const(values, qparams.dtype), qparams).dequantize()
        return emitter.emit(expr, f"{match.name}.{operand}")


def find_constant(constants: Mapping[str, np.ndarray], match: Match, operand: str) -> np.ndarray:
    """Return the constant that calibration fitted in place of an operand (a fitted weight is on
    its grid), else the operand.
    """
    fitted = constants.get(f"{match.name}:{operand}")
    return operand_constant(match, operand) if fitted is None else fitted


def quantize_constant(array: np.ndarray, qparams: QParams) -> np.ndarray:
    """Return a constant in affine space, within the limits of its dtype."""
    return numpy_qnn.quantize(
        array.astype("float32"),
        qparams.scale,
        qparams.zero_point,
        axis=-1 if qparams.axis is None else qparams.axis,
        out_dtype=qparams.dtype,
        rounding=Rounding.TONEAREST_EVEN,
    )


def round_constant(array: np.ndarray, qparams: QParams, spec: QSpec) -> np.ndarray:
    """Return a constant on the grid of its parameters, float32."""
    values = np.clip(quantize_constant(array, qparams), *spec.limits)
    axis = -1 if qparams.axis is None else qparams.axis
    return numpy_qnn.dequantize(values, qparams.scale, qparams.zero_point, axis=axis)


def bias_qparams(
    pattern: QuantOp, match: Match, operator: OperatorPlan, parameters: Mapping[str, QParams]
) -> QParams:
    """Return the accumulator's parameters for a bias: int32, zero point 0, scale = data scale x
    weight scale.
    """
    keys = dict(operator.operands)
    data, weight = parameters[keys["data"]], parameters[keys["weight"]]
    units = sum_qparams(pattern, match, data, weight)
    if units.axis is None:
        return units
    # The constant may have fewer dimensions than the result it is added to.
    return replace(units, axis=units.axis + match.parts["bias"].ty.ndim - match.root.ty.ndim)


def sum_qparams(pattern: QuantOp, match: Match, data: QParams, weight: QParams) -> QParams:
    """Return the accumulator's parameters along the axes of the result.

    Raises:
        ConfigError: The row does not say which axis of the result has the channels of the weight.
    """
    axis, shape = run_accumulator_axis(pattern, match), tensor_shape(match.root)
    channels = weight.scale.size
    size = shape[axis] if axis is not None and shape is not None else None
    if weight.scale.ndim and (axis is None or (isinstance(size, int) and size != channels)):
        found = "" if size is None else f", an axis of {size}"
        raise ConfigError(
            f"{describe_place(pattern, match.name, 'accumulator_axis')} returned {axis!r}{found}; "
            f"allowed: the axis of the result that has the {format_count(channels, 'channel')} "
            "of the weight.",
            code="RQ106",
        )
    return accumulator_qparams(data, weight, axis)


def fit_weight_scales(prepared: PreparedModel, graph: Graph) -> dict[str, QParams]:
    """Return parameters whose weight scales suit the accumulator's scale and the bias.

    A channel with almost zero weights gets a tiny scale. Then its accumulator's scale, data scale x
    weight scale, would underflow float32, or the bias in these units would overflow int32. The
    weights of the channel are rounded to zero anyway, so a larger scale costs nothing. If all
    weights are zero, any scale is correct, and the bias decides: with weight scale 1, the bias
    would have steps of the data's scale.
    """
    parameters = dict(prepared.require_parameters())
    for operator in prepared.plan.operators:
        keys = dict(operator.operands)
        if not {"data", "weight"} <= keys.keys():
            continue
        data, weight = parameters[keys["data"]], parameters[keys["weight"]]
        least = np.float64(np.finfo("float32").tiny) / data.scale.astype("float64")
        pattern = find_pattern(prepared.backend, operator.pattern)
        scale = weight.scale
        if any(operand.role is Role.BIAS for operand in pattern.operands):
            match = match_operator(graph, prepared.backend, operator)
            bias = find_constant(prepared.constants, match, "bias").astype("float64")
            bias = np.abs(bias).reshape(-1)
            if not weight.is_per_channel or bias.size != weight.scale.size:
                bias = bias.max()
            counted = bias / data.scale.astype("float64")
            least = np.maximum(least, counted / BIAS_LIMIT)
            array = find_constant(prepared.constants, match, "weight")
            is_free = (find_extent(array, weight.axis) == 0) & (bias > 0)
            scale = np.where(is_free, counted / bias_limit(operator), scale)
        least = np.nextafter(least.astype("float32"), np.float32(np.inf))
        spec = prepared.plan.group(keys["weight"]).info.spec
        scale = conform_scale(np.maximum(scale, least), spec).astype("float32")
        parameters[keys["weight"]] = QParams(scale, weight.zero_point, weight.dtype, weight.axis)
    return parameters


def bias_limit(operator: OperatorPlan) -> int:
    """Return half of the range that an operator's accumulator holds."""
    if operator.accumulator is None:
        return BIAS_LIMIT
    return min(operator.accumulator.limits[1] // 2, BIAS_LIMIT)


def find_extent(array: np.ndarray, axis: int | None) -> np.ndarray:
    """Return the largest magnitude of an array, or at each index of an axis."""
    others = tuple(i for i in range(array.ndim) if axis is None or i != axis % array.ndim)
    return np.abs(array).max(axis=others, initial=0)
