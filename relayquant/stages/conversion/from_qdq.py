"""Reader of QDQ models of other tools: their quantize and dequantize operators -> the form that
realize understands, and a ledger.

A model that comes with quantize and dequantize operators has no plan. Each quantize is hoisted to
the operator that computes its value. Each dequantize is sunk to the operators that read it. Biases
are converted to units of their accumulators. Then every operator between them is found by its
pattern (`qnn_form.find_dequantized`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import QParams, Rounding
from relayquant.config import BackendConfig
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.legality import is_integer_operator
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.ledger import Ledger, LedgerRow, write_ledger
from relayquant.ir.ops import QuantOp
from relayquant.ir.ops.base import accumulator_qparams, make_parameters
from relayquant.ir.ops.callbacks import run_check, run_match
from relayquant.ir.ops.conv import CONV_FAMILIES
from relayquant.ir.ops.conv import output_axis as conv_output_axis
from relayquant.ir.ops.find import find_pattern, find_register
from relayquant.ir.ops.passed_over import find_passed_over
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.rewrite import (
    Emitter,
    Graph,
    Match,
    Pattern,
    Rule,
    Skip,
    apply_rules,
)
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype
from relayquant.ir.rewrite.moves import MOVES
from relayquant.stages.conversion.bias import BIAS_LIMIT, LEAST_SHARE, has_units, is_lost
from relayquant.stages.conversion.names import name_integers
from relayquant.stages.conversion.propagate import (
    AFFINE_RULES,
    clip_bounds,
    hoist_clamp,
    hoist_pad,
    relu_bounds,
    repeat_call,
    sink_dequantize,
)
from relayquant.stages.conversion.qnn_form import (
    decline_dequantized,
    find_dequantized,
    find_output_qparams,
    read_dequantize,
    read_operands,
    read_qparams,
)

#: operators that move or select values: a quantize gives the same result before and behind them
MOVERS = (*MOVES, "relax.strided_slice", "relax.nn.max_pool2d", "relax.nn.max_pool1d")

#: the ledger's text for the source of the parameters
SOURCE_RULE = "quantized in the source model"


def adopt_reference(mod: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """Move quantize and dequantize operators next to the operators that compute.

    The input is a canonical module with quantize and dequantize anywhere. The function of the
    module stays the same.
    """
    hoists = [hoist_clamp("relax.nn.relu", relu_bounds), hoist_clamp("relax.clip", clip_bounds)]
    hoists.append(hoist_pad())
    hoisted = apply_rules(mod, [*hoists, *(hoist_mover(op) for op in MOVERS)])
    sinks = [sink_dequantize(rule) for rule in (*backend.affine_rules, *AFFINE_RULES)]
    sunk = apply_rules(hoisted, sinks)
    return apply_rules(sunk, list(quantize_biases()))


def hoist_mover(op: str) -> Rule:
    """quantize(move(x)) -> move(quantize(x)) if an operator computes x and nothing else reads
    it.
    """
    data, scale, zero_point = wildcard(), wildcard(), wildcard()
    moved = is_op(op)(data, varg_default_wildcard=True)
    pattern = Pattern(is_op("relax.qnn.quantize")(moved, scale, zero_point), {"data": data})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        quantize = match.graph.values[match.root]
        qparams = read_qparams(quantize, str(quantize.attrs.out_dtype))
        source = match.parts["data"]
        if qparams is None or qparams.is_per_channel:
            return Skip("the parameters are variables, or per channel")
        if match.graph.call_of(source) is None or not match.graph.has_one_user(source):
            return Skip("the value is used elsewhere, or is an input")
        if match.graph.op_name(source) == DEQUANTIZE:
            return Skip("the value is dequantized; its dequantize is sunk instead")
        integers = qnn.quantize(
            emitter.get(source),
            *make_parameters(qparams),
            out_dtype=qparams.dtype,
            rounding=Rounding(str(quantize.attrs.rounding)),
        )
        call = emitter.get(match.call(op))
        return repeat_call(call, emitter.emit(integers, f"{match.name}.unmoved"))

    return Rule(f"hoist quantize over {op}", pattern, rewrite)


def quantize_biases() -> Iterable[Rule]:
    """linear(dequantize(x), dequantize(w)) + b -> ... + dequantize(b int32), in units of the
    accumulator.

    b is a float constant, or a constant that was quantized in other units.
    """
    for op in (*(family.op for family in CONV_FAMILIES), "relax.matmul"):
        data, weight, bias = wildcard(), wildcard(), wildcard()
        pattern = Pattern(
            is_op("relax.add")(is_op(op)(data, weight), bias),
            {"data": data, "weight": weight, "bias": bias},
        )
        yield Rule(f"bias of {op}", pattern, quantize_bias)


def quantize_bias(emitter: Emitter, match: Match) -> relax.Expr | Skip:
    """The rewrite of `quantize_biases`."""
    graph, bias = match.graph, match.parts["bias"]
    data, weight = (read_dequantize(graph, match.parts[name]) for name in ("data", "weight"))
    if data is None or weight is None or constant_value(weight.value) is None:
        return Skip("data or weight is not quantized")
    if data.qparams.scale.size > 1:
        return Skip("sums of products have no units: their data has a scale for each channel")
    quantized = read_dequantize(graph, bias)
    integers = constant_value(quantized.value) if quantized is not None else None
    real = constant_value(bias)
    if quantized is not None and integers is not None:
        axis = -1 if quantized.qparams.axis is None else quantized.qparams.axis
        scale, zero_point = quantized.qparams.scale, quantized.qparams.zero_point
        real = numpy_qnn.dequantize(integers, scale, zero_point, axis=axis)
    if real is None or str(real.dtype) != "float32":
        return Skip("the bias is not a float32 constant")
    rank = match.root.ty.ndim
    axis = rank - 1 if match.find_call("relax.matmul") is not None else conv_output_axis(match)
    padded = real.reshape((1,) * (rank - real.ndim) + real.shape)
    if any(size != 1 for at, size in enumerate(padded.shape) if at != axis):
        return Skip("the added constant is not a bias per output channel")
    units = accumulator_qparams(data.qparams, weight.qparams, axis)
    steps = units.scale.astype("float64").reshape(units_shape(units, rank))
    is_wide = quantized is not None and tensor_dtype(quantized.value) == "int32"
    if quantized is not None and is_wide and has_units(quantized.qparams, steps.reshape(-1)):
        return Skip("the bias has the units of the accumulator")
    exact = padded.astype("float64")
    scaled = exact / steps
    if not np.isfinite(scaled).all() or np.abs(scaled).max(initial=0.0) > BIAS_LIMIT:
        return Skip("the bias is too large for int32 in units of the accumulator")
    output = find_output_qparams(graph, match.root)
    largest = float(np.abs(exact).max(initial=0.0)) * LEAST_SHARE
    if is_lost(exact, steps, largest if output is None else float(output.scale.min())):
        return Skip("the bias is smaller than the units of the accumulator")
    value = qnn.dequantize(
        relax.const(np.rint(scaled).astype("int32"), "int32"),
        relax.const(units.scale, "float32"),
        relax.const(0, "int32"),
        axis=axis,
    )
    (linear,) = match.inner
    return relax.op.add(emitter.get(linear), emitter.emit(value, f"{match.name}.bias"))


def units_shape(units: QParams, rank: int) -> list[int]:
    """Return the shape in which one scale per channel broadcasts against a tensor of this rank."""
    if units.axis is None or not units.is_per_channel:
        return []
    return shape_along(units.axis, rank)


def add_ledger(
    mod: tvm.IRModule, adopted: tvm.IRModule, canonical: tvm.IRModule, backend: BackendConfig
) -> tvm.IRModule:
    """Add a ledger to `mod`, the integer module made of `adopted`. The ledger has every operator
    of `canonical`, and the values of `mod` get their names from it.
    """
    graph, source, final = Graph(adopted), Graph(canonical), Graph(mod)
    found: dict[str, tuple[QuantOp, Match]] = {}
    for _, (pattern, match) in find_dequantized(graph, backend):
        found.update((var.name, (pattern, match)) for var in match.vars)
    owners = {graph.vars[name]: taken for name, taken in found.items()}
    passed = {
        var.name: rows
        for var, rows in find_passed_over(graph, backend, owners, decline_dequantized).items()
    }
    inner = {
        var.name
        for name, (_, match) in found.items()
        for var in match.inner
        if var.name in source.vars and name == match.name
    }
    rows = []
    for binding in source.bindings:
        call, name = source.call_of(binding.var), binding.var.name
        if call is None or is_integer_operator(call_name(call)) or name in inner:
            continue
        if stays_float(source, final, binding.var):
            reason = explain_float(graph, backend, name)
            rows.append(describe_float(source, binding.var, reason))
        elif name in found:
            row = describe_quantized(source, graph, binding.var, *found[name])
            rows.append(replace(row, accumulator=find_register(final, name)))
        else:
            row = describe_moved(source, binding.var)
            rows.append(replace(row, accumulator=find_register(final, name)))
    rows = [
        replace(
            row,
            passed_over=tuple(p for p in passed.get(row.name, ()) if p.reason != row.reason),
        )
        for row in rows
    ]
    ledger = Ledger(tuple(rows), backend.name)
    return name_integers(write_ledger(mod, ledger))


def moves_integers(source: Graph, var: relax.Var) -> bool:
    """Whether a value of the source model is 8-bit and computed from 8-bit values by moving
    them.
    """
    dtype, call = tensor_dtype(var), source.call_of(var)
    return (
        dtype in ("int8", "uint8")
        and call is not None
        and any(tensor_dtype(arg) == dtype for arg in call.args)
    )


def stays_float(source: Graph, final: Graph, var: relax.Var) -> bool:
    """Whether the operator of a source value computes floats in the `final` module, or does not
    work on quantized values at all.
    """
    left = final.vars.get(var.name)
    is_left = left is not None and final.op_name(left) == source.op_name(var)
    if left is not None and is_left and tensor_dtype(left).startswith("float"):
        return True
    return not (moves_integers(source, var) or tensor_dtype(var).startswith("float"))


def describe_float(source: Graph, var: relax.Var, reason: str) -> LedgerRow:
    """Return the ledger row of an operator that stays in float."""
    return LedgerRow(
        var.name,
        source.op_name(var).removeprefix("relax."),
        False,
        "",
        tensor_dtype(var),
        reason,
        "pass the module and data to relayquant.quantize to calibrate what is missing",
        (var.name,),
    )


def describe_quantized(
    source: Graph, graph: Graph, var: relax.Var, pattern: QuantOp, match: Match
) -> LedgerRow:
    """Return the ledger row of an operator that a pattern matched in the adopted module's
    `graph`.
    """
    qparams = find_output_qparams(graph, match.root)
    return LedgerRow(
        var.name,
        pattern.op.removeprefix("relax."),
        True,
        pattern.name,
        "int32" if qparams is None else qparams.dtype,
        values=tuple(each.name for each in match.vars if each.name in source.vars),
        scale=() if qparams is None else tuple(qparams.scale.reshape(-1).tolist()),
        zero_point=() if qparams is None else tuple(qparams.zero_point.reshape(-1).tolist()),
        rule=SOURCE_RULE,
    )


def describe_moved(source: Graph, var: relax.Var) -> LedgerRow:
    """Return the ledger row of an operator without a pattern that moves integers or was removed."""
    op = source.op_name(var)
    return LedgerRow(
        var.name,
        op.removeprefix("relax."),
        True,
        op.split(".")[-1],
        tensor_dtype(var) if moves_integers(source, var) else "",
        values=(var.name,),
        rule=SOURCE_RULE,
    )


def explain_float(graph: Graph, backend: BackendConfig, name: str) -> str:
    """Return why an operator of an adopted module has no integer form."""
    var = graph.vars.get(name)
    if var is None or graph.call_of(var) is None:
        return "it has no integer form with the parameters of the source model"
    declined = f"backend {backend.name!r} has no pattern for {graph.op_name(var)}"
    for row in backend.patterns:
        pattern = find_pattern(backend, row.pattern.name)
        match = run_match(pattern, graph, var)
        if match is None:
            continue
        skip = run_check(row, match)
        if skip is not None:
            declined = skip.reason
            continue
        operands = read_operands(graph, pattern, match)
        if isinstance(operands, Skip):
            return operands.reason
        if find_output_qparams(graph, var) is None:
            return "its result is not quantized in the source model"
        dtypes = sorted({operand.qparams.dtype for operand in operands.values()})
        return f"no integer operator takes operands of these dtypes: {', '.join(dtypes)}"
    return declined
