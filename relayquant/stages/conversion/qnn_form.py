"""Reference form -> QNN form: the realize callback of each quantized operator replaces the float
operators.

conv(dequantize(x), dequantize(w)) + dequantize(b) -> dequantize(qnn.conv2d(x, w, ...) + b)
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.base.qtypes import QParams, Role
from relayquant.config import Accumulator, BackendConfig, PatternConfig
from relayquant.errors import ConfigError, QnnError
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE, QUANTIZE
from relayquant.ir.ledger import Ledger, LedgerRow, find_ledger, write_ledger
from relayquant.ir.ops import Operand, Output, Quantized, QuantOp, RealizeContext
from relayquant.ir.ops.base import DynamicContext, RunTimeQuantized
from relayquant.ir.ops.callbacks import (
    describe_place,
    run_axis,
    run_check,
    run_match,
    run_realize,
    run_realize_dynamic,
)
from relayquant.ir.ops.find import find_pattern, find_register, order_rows
from relayquant.ir.rewrite import Emitter, Graph, Match, Skip, rewrite_main
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype
from relayquant.stages.conversion.bias import find_bias_conflict

#: operators that bring an accumulator into range
NARROWING = ("relax.clip", "relax.left_shift", "relax.right_shift")


def realize_qnn(mod: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """Return a module in which every operator that the ledger calls quantized works on integers.

    A module without a ledger (written by hand, or read from a QDQ model) is realized wherever a
    pattern of the backend finds all its operands dequantized. An operator whose callback declines
    stays in float, and the ledger says why.

    Raises:
        ConfigError: the ledger names a pattern that the backend does not have.
    """
    ledger = find_ledger(mod)
    if ledger is not None:
        mod = join_accumulators(mod, ledger)
    graph = Graph(mod)
    accumulators = {
        row.name: Accumulator.parse(row.accumulator)
        for row in (ledger.quantized if ledger is not None else ())
        if row.is_narrow
    }
    dynamic = {
        row.name for row in (ledger.quantized if ledger is not None else ()) if row.is_dynamic
    }
    matches = dict(
        find_planned(graph, backend) if ledger is not None else find_dequantized(graph, backend)
    )
    inner = {var for _, match in matches.values() for var in match.inner}
    refused: list[tuple[str, Skip]] = []

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr | None:
        if binding.var in inner:
            return None
        if binding.var not in matches:
            return emitter.get(binding.value)
        pattern, match = matches[binding.var]
        if match.name in dynamic:
            outcome = realize_dynamic_match(graph, emitter, pattern, match)
        else:
            outcome = realize_match(
                graph,
                emitter,
                pattern,
                match,
                accumulators.get(match.name),
                is_planned=ledger is not None,
            )
        if not isinstance(outcome, Skip):
            return outcome
        refused.append((match.name, outcome))
        for var in match.inner:
            emitter.bind(var, emitter.get(graph.values[var]))
        return emitter.get(binding.value)

    result = rewrite_main(mod, visit)
    if ledger is None:
        return result
    final, found = Graph(result), ledger
    for name, skip in refused:
        found = found.with_refusal(name, skip.reason, skip.advice)
    for row in found.quantized:
        if not row.accumulator and (register := find_register(final, row.name)):
            found = found.with_accumulator(row.name, register)
    return result if found is ledger else write_ledger(result, found)


def join_accumulators(mod: tvm.IRModule, ledger: Ledger) -> tvm.IRModule:
    """Remove the narrow accumulators of the reference form. They are in the middle of patterns, and
    the realize callbacks apply them to integers.

    v = dequantize(narrow(quantize(real))) -> v = real
    """
    narrowed = {value for row in ledger.quantized if row.is_narrow for value in row.values}
    if not narrowed:
        return mod
    graph = Graph(mod)

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        call = graph.call_of(binding.var)
        if binding.var.name in narrowed and call is not None:
            real = find_real(graph, call)
            if real is not None:
                return emitter.get(graph.values[real])
        return emitter.get(binding.value)

    return rewrite_main(mod, visit)


def find_real(graph: Graph, call: Call) -> relax.Var | None:
    """Return `real` of dequantize(clip or shifts(quantize(real))), None for any other call."""
    if graph.op_name(call) != DEQUANTIZE:
        return None
    inner = graph.call_of(call.args[0])
    while inner is not None and graph.op_name(inner) in NARROWING:
        inner = graph.call_of(inner.args[0])
    if inner is None or graph.op_name(inner) != QUANTIZE or str(inner.attrs.out_dtype) != "int32":
        return None
    real = inner.args[0]
    return real if isinstance(real, relax.Var) and real in graph.values else None


def find_planned(
    graph: Graph, backend: BackendConfig
) -> Iterator[tuple[relax.Var, tuple[QuantOp, Match]]]:
    """Return (root, (pattern, match)) for the operators that the ledger calls quantized.

    Raises:
        ConfigError: a pattern matches the float operators, but not with dequantized operands.
    """
    ledger = find_ledger(graph.mod)
    for row in ledger.quantized if ledger is not None else ():
        var = graph.vars.get(row.name)
        if var is None or var not in graph.values:
            continue
        pattern = find_pattern(backend, row.pattern)
        if pattern.realize is None:
            continue
        match = run_match(pattern, graph, var)
        if match is None and is_float_still(graph, row):
            raise ConfigError(
                f"{describe_place(pattern, row.name, 'pattern.match')}: it matched the float "
                "operators, but does not match them with dequantized operands, so they would stay "
                "in float. Write wildcard() for each operand.",
                code="RQ106",
            )
        if match is not None:
            yield var, (pattern, match)


def is_float_still(graph: Graph, row: LedgerRow) -> bool:
    """Whether the pattern of a row should have matched: its operators still compute in float.

    False for operators of a standalone module, which become integers before the module around them,
    and for data with parameters of the run time, which float operators may round before the match.
    """
    if row.is_dynamic:
        return False
    found = [graph.vars.get(name) for name in row.values]
    return all(
        var is not None
        and tensor_dtype(var) == "float32"
        and not graph.op_name(var).startswith("relax.qnn.")
        for var in found
    )


def find_dequantized(
    graph: Graph, backend: BackendConfig
) -> Iterator[tuple[relax.Var, tuple[QuantOp, Match]]]:
    """Return (root, (pattern, match)) wherever all operands of a pattern are dequantized, and
    the result is quantized if the pattern needs parameters for it.
    """
    taken: set[relax.Var] = set()
    for rows in order_rows(backend):
        for binding in reversed(graph.bindings):
            for row in rows if binding.var not in taken else ():
                pattern = find_pattern(backend, row.pattern.name)
                match = run_match(pattern, graph, binding.var)
                if match is None or not taken.isdisjoint(match.vars):
                    continue
                if decline_dequantized(row, match) is None:
                    taken.update(match.vars)
                    yield binding.var, (pattern, match)
                    break


def decline_dequantized(row: PatternConfig, match: Match) -> Skip | None:
    """Return why a row does not take a match, given the parameters in the module; None if it
    does.
    """
    pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
    if pattern.realize is None:
        return Skip("it has no realize callback: its operators move integers as they are")
    skip = run_check(row, match)
    if skip is not None:
        return skip
    if pattern.output is Output.OWN and find_output_qparams(match.graph, match.root) is None:
        return Skip("its result is not quantized in the source model")
    operands = read_operands(match.graph, pattern, match)
    return operands if isinstance(operands, Skip) else None


def realize_match(
    graph: Graph,
    emitter: Emitter,
    pattern: QuantOp,
    match: Match,
    accumulator: Accumulator | None,
    *,
    is_planned: bool,
) -> relax.Expr | Skip:
    """Run the realize callback on one match."""
    operands = read_operands(graph, pattern, match)
    if isinstance(operands, Skip):
        return operands
    operands = {
        name: Quantized(emitter.get(operand.value), operand.qparams)
        for name, operand in operands.items()
    }
    output = find_output_qparams(graph, match.root)
    try:
        return run_realize(pattern, RealizeContext(emitter, match, operands, output, accumulator))
    except QnnError as error:
        if is_planned:
            where = describe_place(pattern, match.name, "realize")
            raise ConfigError(f"{where} raised QnnError: {error}", code="RQ106") from error
        # Only a model that was quantized elsewhere has dtypes that no plan would mix.
        return Skip(f"its integer form is not allowed: {error}")


def realize_dynamic_match(
    graph: Graph, emitter: Emitter, pattern: QuantOp, match: Match
) -> relax.Expr | Skip:
    """Run the callback for dynamic parameters on one match."""
    call = graph.call_of(match.parts["data"])
    if call is not None and graph.op_name(call) == "relax.reshape":  # rows of a tensor of any rank
        call = graph.call_of(call.args[0])
    if call is None or graph.op_name(call) != DEQUANTIZE:
        return Skip("operand data is not dequantized")
    weight = read_dequantize(graph, match.parts["weight"])
    if weight is None:
        return Skip("operand weight is not dequantized by constant parameters")
    data = RunTimeQuantized(*(emitter.get(arg) for arg in call.args[:3]))
    weight = Quantized(emitter.get(weight.value), weight.qparams)
    bias = emitter.get(match.parts["bias"]) if "bias" in match.parts else None
    return run_realize_dynamic(pattern, DynamicContext(emitter, match, data, weight, bias))


def read_operands(graph: Graph, pattern: QuantOp, match: Match) -> dict[str, Quantized] | Skip:
    """Return the integer side of every operand. A tuple is split into name.0, name.1."""
    found: dict[str, Quantized] = {}
    for operand in pattern.operands:
        expr = match.parts[operand.name]
        parts = (
            [(f"{operand.name}.{i}", part) for i, part in enumerate(expr.fields)]
            if isinstance(expr, relax.Tuple)
            else [(operand.name, expr)]
        )
        for name, part in parts:
            quantized = read_dequantize(graph, part)
            if quantized is None:
                return Skip(f"operand {name} is not dequantized by constant parameters")
            conflict = find_channel_conflict(pattern, operand, match, quantized.qparams)
            if conflict is not None:
                return conflict
            found[name] = quantized
    return find_bias_conflict(pattern, found) or found


def find_channel_conflict(
    pattern: QuantOp, operand: Operand, match: Match, qparams: QParams
) -> Skip | None:
    """Decline parameters per index of an axis that no integer operator takes per index.

    Either sums of products run over the axis, or the result has other channels. The units of a bias
    are checked separately.
    """
    if operand.role is Role.BIAS or qparams.scale.size == 1:
        return None
    axis = run_axis(pattern, operand, match) if operand.role is Role.WEIGHT else None
    if qparams.axis == axis:
        return None
    allowed = "one set for the tensor"
    if axis is not None:
        allowed = f"one set for each index of axis {axis}, or {allowed}"
    return Skip(
        f"operand {operand.name} has parameters for each index of its axis {qparams.axis}; integer "
        f"operators take {allowed}",
        f"quantize {operand.name} in the source model with {allowed}",
    )


def read_dequantize(graph: Graph, expr: relax.Expr) -> Quantized | None:
    """Return q and its parameters if `expr` is dequantize(q, constant, constant)."""
    call = graph.call_of(expr)
    if call is None or graph.op_name(call) != DEQUANTIZE:
        return None
    qparams = read_qparams(call, str(call.args[0].ty.dtype))
    return Quantized(call.args[0], qparams) if qparams is not None else None


def read_qparams(call: Call, dtype: str) -> QParams | None:
    """Return the parameters of a quantize or dequantize; None if they are variables."""
    scale, zero_point = constant_value(call.args[1]), constant_value(call.args[2])
    if scale is None or zero_point is None:
        return None
    axis = None
    if scale.ndim or zero_point.ndim:
        axis = int(call.attrs.axis) % call.args[0].ty.ndim
        length = max(scale.size, zero_point.size)
        scale, zero_point = (make_vector(v, length) for v in (scale, zero_point))
    return QParams(scale, zero_point, dtype, axis)


def make_vector(array, length: int):
    """Return a scalar or vector parameter as a vector."""
    return array.reshape(-1).repeat(length) if array.size == 1 else array


def find_output_qparams(graph: Graph, var: relax.Var) -> QParams | None:
    """Return the parameters of the quantize that is a value's only reader, else None."""
    if not graph.has_one_user(var):
        return None
    call = graph.call_of(graph.users[var][0])
    if call is None or graph.op_name(call) != QUANTIZE:
        return None
    return read_qparams(call, str(call.attrs.out_dtype))
