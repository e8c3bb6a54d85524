"""Dtypes of main's inputs and outputs: described before planning, and as the last step of lowering,
float -> integer where the user asked for it.

main(x: float32) { x.q = quantize(x) ... } -> main(x: uint8) { ... }, and out = dequantize(q);
return out -> return q. The parameters from calibration stay. Another 8-bit dtype than the model's
is an exact shift by 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS, QParams
from relayquant.errors import ConfigError, suggest_name
from relayquant.ir.dialect.qnn.quantization import QUANTIZE
from relayquant.ir.ledger import (
    InterfaceValue,
    LedgerRow,
    find_ledger,
    read_ledger,
    write_ledger,
)
from relayquant.ir.ops import Quantized
from relayquant.ir.ops.base import convert_dtype
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.graph import iterate_results, result_expr, tensor_dtype
from relayquant.stages.conversion.qnn_form import read_dequantize, read_qparams


def describe_interface(
    canonical: tvm.IRModule,
    input_dtypes: Mapping[str | int, str],
    output_dtypes: Mapping[str | int, str],
) -> tuple[tuple[InterfaceValue, ...], tuple[InterfaceValue, ...]]:
    """Return (inputs, outputs) of main, with the requested integer dtypes by name or index from 0.

    Raises:
        ConfigError: there is no such input or output, or no such integer dtype.
    """
    graph = Graph(canonical)
    inputs = [(param.name, tensor_dtype(param)) for param in graph.func.params]
    outputs = [
        (expr.name if isinstance(expr, tvm.relax.Var) else f"output {i}", tensor_dtype(expr))
        for i, expr in enumerate(iterate_results(result_expr(graph)))
    ]
    return (
        name_dtypes("input_dtypes", input_dtypes, inputs),
        name_dtypes("output_dtypes", output_dtypes, outputs),
    )


def request_interface(
    mod: tvm.IRModule,
    input_dtypes: Mapping[str | int, str],
    output_dtypes: Mapping[str | int, str],
) -> tvm.IRModule:
    """Write the requested dtypes, by name or index from 0, into an integer module's ledger.
    `set_interface` reads them there.

    Raises:
        ConfigError: there is no such input or output, or no such integer dtype.
    """
    if not input_dtypes and not output_dtypes:
        return mod
    inputs, outputs = describe_interface(mod, input_dtypes, output_dtypes)
    return write_ledger(mod, replace(read_ledger(mod), inputs=inputs, outputs=outputs))


def name_dtypes(
    what: str, dtypes: Mapping[str | int, str], values: Sequence[tuple[str, str]]
) -> tuple[InterfaceValue, ...]:
    """Return (name, dtype) for all inputs or outputs, with the requested dtypes by name or index.

    Raises:
        ConfigError: there is no such value, or no such integer dtype, or one is named twice.
    """
    names = [name for name, _ in values]
    asked: dict[str, str] = {}
    for key, dtype in dtypes.items():
        name = key
        if isinstance(key, int):
            if not 0 <= key < len(names):
                raise ConfigError(
                    f"{what} has index {key}; allowed: 0 to {len(names) - 1}.", code="RQ103"
                )
            name = names[key]
        if name not in names:
            raise ConfigError(f"{what} has no {name!r}. {suggest_name(name, names)}", code="RQ103")
        if dtype not in INTEGER_LIMITS:
            raise ConfigError(
                f"{what}[{key!r}]: {suggest_name(dtype, INTEGER_LIMITS)}", code="RQ103"
            )
        if name in asked:
            raise ConfigError(
                f"{what} names {name!r} twice: by name and by index {key!r}.", code="RQ103"
            )
        asked[name] = dtype
    return tuple(InterfaceValue(name, dtype, asked.get(name, "")) for name, dtype in values)


def set_interface(mod: tvm.IRModule) -> tvm.IRModule:
    """Give main the input and output dtypes that its ledger requests. The new ledger has their
    parameters.

    Raises:
        ConfigError: an input or output is not quantized, or has another width than requested.
    """
    ledger = find_ledger(mod)
    if ledger is None or not any(v.is_integer for v in (*ledger.inputs, *ledger.outputs)):
        return mod
    graph = Graph(mod)
    asked = [value for value in ledger.inputs if value.is_integer]
    inputs = {value.name: read_input(graph, value, ledger.rows) for value in asked}
    rewritten = replace_inputs(graph, inputs)
    rewritten, outputs = replace_outputs(rewritten, ledger.outputs)
    ledger = replace(
        ledger,
        inputs=tuple(v.with_qparams(inputs.get(v.name)) for v in ledger.inputs),
        outputs=tuple(v.with_qparams(outputs.get(v.name)) for v in ledger.outputs),
    )
    return write_ledger(rewritten, ledger)


def read_input(graph: Graph, value: InterfaceValue, rows: Sequence[LedgerRow]) -> QParams:
    """Return the parameters of an input in the requested dtype: the parameters of its first
    quantize, shifted.

    Raises:
        ConfigError: no operator reads it as integers. The message has the reasons of its readers'
            rows.
    """
    param = graph.vars[value.name]
    for user in graph.users[param]:
        call = graph.call_of(user)
        if call is not None and graph.op_name(user) == QUANTIZE and call.args[0].same_as(param):
            qparams = read_qparams(call, str(call.attrs.out_dtype))
            if qparams is not None and not qparams.is_per_channel:
                return shift_qparams(qparams, value.requested, f"input {value.name!r}")
    readers = {user.name for user in graph.users[param]}
    reasons = [
        f" {row.name!r} ({row.op}): {row.reason}."
        for row in rows
        if not row.quantized and readers.intersection(row.values)
    ]
    raise ConfigError(
        f"input_dtypes: input {value.name!r} is not quantized, since what reads it stays in float; "
        f"allowed: leave it out.{''.join(reasons)}",
        code="RQ103",
    )


def shift_qparams(qparams: QParams, dtype: str, where: str) -> QParams:
    """Express the same real values in another dtype of the same width: the scale stays and the zero
    point moves.

    Raises:
        ConfigError: the widths differ.
    """
    have, want = INTEGER_LIMITS[qparams.dtype], INTEGER_LIMITS[dtype]
    if have[1] - have[0] != want[1] - want[0]:
        near = [d for d, (a, b) in INTEGER_LIMITS.items() if b - a == have[1] - have[0]]
        raise ConfigError(
            f"{where} is {qparams.dtype} in the quantized model and cannot be {dtype}; allowed: "
            f"{', '.join(near)}. Another width needs a QConfig of that dtype for the operators at "
            "it.",
            code="RQ103",
        )
    return QParams(qparams.scale, qparams.zero_point + (want[0] - have[0]), dtype, qparams.axis)


def replace_inputs(graph: Graph, inputs: Mapping[str, QParams]) -> tvm.IRModule:
    """Give main integer inputs. Each reader gets the integers or their real values."""
    if not inputs:
        return graph.mod
    new = {
        name: relax.Var(name, relax.TensorType(graph.vars[name].ty.shape, qparams.dtype))
        for name, qparams in inputs.items()
    }
    real: dict[str, relax.Expr] = {}

    def before(emitter: Emitter) -> None:
        for name, qparams in inputs.items():
            value = emitter.emit(Quantized(new[name], qparams).dequantize(), f"{name}.real")
            real[name] = value
            emitter.replace(graph.vars[name], value)

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        call = graph.call_of(binding.var)
        if call is not None and graph.op_name(binding.var) == QUANTIZE:
            source = call.args[0]
            name = source.name if isinstance(source, relax.Var) else ""
            qparams = read_qparams(call, str(call.attrs.out_dtype))
            if name in inputs and qparams is not None and has_scale(qparams, inputs[name]):
                return convert_dtype(Quantized(new[name], inputs[name]), qparams)
        return emitter.get(binding.value)

    params = [new.get(param.name, param) for param in graph.func.params]
    return rewrite_main(graph.mod, visit, params=params, before=before)


def has_scale(qparams: QParams, interface: QParams) -> bool:
    """Whether a quantize of an input computes the integers that the user passes, up to a shift."""
    have, want = INTEGER_LIMITS[qparams.dtype], INTEGER_LIMITS[interface.dtype]
    if qparams.is_per_channel or have[1] - have[0] != want[1] - want[0]:
        return False
    return shift_qparams(qparams, interface.dtype, "input") == interface


def replace_outputs(
    mod: tvm.IRModule, values: tuple[InterfaceValue, ...]
) -> tuple[tvm.IRModule, dict[str, QParams]]:
    """Give main integer results, and return their parameters by name."""
    graph = Graph(mod)
    found: dict[str, QParams] = {}
    if not any(value.is_integer for value in values):
        return mod, found

    def convert(emitter: Emitter, expr: relax.Expr, old: relax.Expr, row: InterfaceValue):
        if not row.is_integer:
            return expr
        quantized = read_dequantize(graph, old)
        if quantized is None or quantized.qparams.is_per_channel:
            raise ConfigError(
                f"output_dtypes: output {row.name!r} has no integer form with one scale: what "
                "computes it stays in float. The ledger says why; leave the output out, or "
                "quantize its operator.",
                code="RQ103",
            )
        qparams = shift_qparams(quantized.qparams, row.requested, f"output {row.name!r}")
        found[row.name] = qparams
        value = convert_dtype(Quantized(emitter.get(quantized.value), quantized.qparams), qparams)
        return emitter.emit(value, f"{row.name}.out")

    def result(emitter: Emitter, out: relax.Expr) -> relax.Expr:
        rows = iter(values)

        def convert_all(old: relax.Expr) -> relax.Expr:
            if isinstance(old, relax.Tuple):
                return relax.Tuple([convert_all(field) for field in old.fields])
            return convert(emitter, emitter.get(old), old, next(rows))

        return convert_all(result_expr(graph))

    return rewrite_main(mod, lambda e, b: e.get(b.value), result=result), found
