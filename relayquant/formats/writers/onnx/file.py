"""ONNX writer, entry: a module in the reference form or with integers -> a QDQ ONNX file."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import tvm
from onnx import helper
from tvm import relax
from tvm.ir import Call

from relayquant.base.arguments import check_arguments
from relayquant.base.storage.files import write_whole
from relayquant.config import GroupedForm, RecurrentForm
from relayquant.errors import ModelError, format_count
from relayquant.formats.writers.onnx.accumulators import check_accumulators
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.data_movement import DATA_MOVEMENT_ROWS
from relayquant.formats.writers.onnx.formulas import FORMULA_ROWS
from relayquant.formats.writers.onnx.operators import (
    ELEMENT,
    FLOAT_ROWS,
    WIDER,
    Writer,
    write_wider,
)
from relayquant.formats.writers.onnx.order import ORDER_ROWS
from relayquant.formats.writers.onnx.places import PLACE_ROWS
from relayquant.formats.writers.onnx.qnn import QNN_WRITERS
from relayquant.formats.writers.onnx.recurrent import RECURRENT_WRITERS
from relayquant.formats.writers.onnx.sizes import SIZE_ROWS, define_sizes
from relayquant.ir.fourier import write_products
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.attributes import find_unmodelled
from relayquant.ir.rewrite.bind import Model, bind_model
from relayquant.ir.rewrite.graph import call_name, tensor_dtype, tensor_shape
from relayquant.stages.conversion.partial import has_quantized_values
from relayquant.stages.preparation import prepare_module

#: Relax operator -> its row
ROWS = FLOAT_ROWS | FORMULA_ROWS | DATA_MOVEMENT_ROWS | ORDER_ROWS | PLACE_ROWS | SIZE_ROWS
#: Operator -> its writer. Writers of the dialect write all attributes.
WRITERS: dict[str, Writer] = {
    **{op: row.write for op, row in ROWS.items()},
    **QNN_WRITERS,
    **RECURRENT_WRITERS,
}

#: Largest protobuf file.
MAX_BYTES = 2**31 - 1

#: Operators whose results are places, also those of accumulators of the same dtype.
PLACES = ("relax.argmax", "relax.argmin", "relax.argsort", "relax.topk", "relax.median")
#: Operators whose writers give a tensor for each part of a tuple.
IN_PARTS = ("relax.topk", "relax.median", "relax.nn.batch_norm")


@check_arguments
def export_onnx(
    mod: Model,
    path: str | os.PathLike[str],
    *,
    grouped: GroupedForm | str = GroupedForm.BLOCKS,
    recurrent: RecurrentForm | str = RecurrentForm.STEPS,
) -> Path:
    """Write a quantized model as ONNX with QuantizeLinear and DequantizeLinear.

    Args:
        mod: Result of `convert_to_reference`, `quantize` or `lower`, or a float module.
        path: The file. It is written completely or not at all.
        grouped: How products with grouped weights are written.
        recurrent: How recurrent layers with integer weights are written.

    Values keep their names. Weights are integers followed by DequantizeLinear, per channel along
    their axis. Biases are int32 with the scale of their accumulator. An integer module is written
    operator by operator, each as the float operator between dequantize and quantize. Recurrent
    layers with integer weights become Scan, because LSTM, GRU and RNN of ONNX do not round the
    hidden state in each step.

    Returns:
        The path.

    Raises:
        ModelError: operators cannot be expressed in ONNX (all are listed), or the model is larger
            than 2 GB.
    """
    path = Path(path)
    model = build_model(bring_to_form(write_products(bind_model(mod))), grouped, recurrent)
    size = model.ByteSize()
    if size > MAX_BYTES:
        raise ModelError(
            f"export_onnx: the model has {size} bytes, more than a file of ONNX can hold "
            f"({MAX_BYTES}).",
            code="RQ203",
        )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(
            f"export_onnx: ONNX refuses what was written: {error}", code="RQ203"
        ) from error
    write_whole(path, lambda temporary: temporary.write_bytes(model.SerializeToString()))
    return path


def build_model(
    mod: tvm.IRModule,
    grouped: GroupedForm = GroupedForm.BLOCKS,
    recurrent: RecurrentForm = RecurrentForm.STEPS,
) -> onnx.ModelProto:
    """Build the ONNX model of a module.

    Raises:
        ModelError: operators cannot be expressed in ONNX. All are listed.
    """
    graph = Graph(mod)
    check_operators(graph)
    builder = OnnxBuilder(graph, grouped, recurrent)
    for param in graph.func.params:
        store(builder, param, param.name)
    for binding in graph.bindings:
        var, value = binding.var, binding.value
        if var in builder.merged or isinstance(value, relax.Tuple | relax.ShapeExpr):
            continue
        if isinstance(var.ty, relax.ShapeType) and isinstance(value, relax.Var):
            define_sizes(builder, var, value)
            continue
        if isinstance(value, relax.TupleGetItem):  # other tuples were refused
            parts = builder.parts.get(value.tuple_value)
            if parts is None:
                builder.rows[var] = builder.rows[value.tuple_value]
            else:
                store(builder, var, builder.emit("Identity", [parts[value.index]], var.name))
            continue
        if isinstance(value, relax.Var):
            source = builder.tensor(value, var.name)
            store(builder, var, builder.emit("Identity", [source], var.name))
            continue
        if not isinstance(value, Call):
            array = builder.tensor(value, var.name)
            store(builder, var, builder.emit("Identity", [array], var.name))
            continue
        check_accumulators(builder, var, value)
        name = find_writer(builder, value)(builder, var, value)
        is_stored = var in builder.real or isinstance(var.ty, relax.TupleType)
        if not is_stored and not builder.merged & set(graph.users[var]):
            store(builder, var, name)
    outputs = [describe(builder, expr) for expr in list_results(graph)]
    nodes, constants = keep_needed(builder, [info.name for info in outputs])
    inputs = [describe(builder, param) for param in graph.func.params]
    proto = helper.make_graph(nodes, "relayquant", inputs, outputs, constants)
    domains = {node.domain for node in nodes} - {""}
    opsets = [helper.make_opsetid("", builder.opset)]
    opsets += [helper.make_opsetid(domain, 1) for domain in sorted(domains)]
    return helper.make_model(proto, opset_imports=opsets, ir_version=8 + 2 * (builder.opset > 20))


def find_writer(builder: OnnxBuilder, call: Call) -> Writer:
    """Return the writer of a call, in a wider type where ONNX Runtime has no kernel for its own."""
    op = call_name(call)
    if op not in WIDER or builder.is_accumulator(call.args[0]):
        return WRITERS[op]
    wide = WIDER[op].get(tensor_dtype(call.args[0]))
    return WRITERS[op] if wide is None else functools.partial(write_wider, WRITERS[op], wide)


def store(builder: OnnxBuilder, var: relax.Var, name: str) -> None:
    """Remember a tensor. For an accumulator (int32 or int64), it holds the real values, as there is
    no integer tensor of it in a QDQ file.
    """
    operands = getattr(builder.graph.values.get(var), "args", ())
    is_accumulator = builder.graph.op_name(var) not in PLACES and any(
        builder.is_accumulator(arg) and tensor_dtype(arg) == tensor_dtype(var) for arg in operands
    )
    if tensor_dtype(var).startswith("float") or is_accumulator:
        builder.real[var] = name
    else:
        builder.integers[var] = name


def bring_to_form(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the canonical form of a float module with operators that only this form has no more.
    Other modules stay as they are.
    """
    graph = Graph(mod)
    if not find_missing(graph) or has_quantized_values(mod):
        return mod
    return prepare_module(mod)


def find_missing(graph: Graph) -> dict[str, list[str]]:
    """Find the operators that ONNX cannot express: what each is, and the values that it gives."""
    missing: dict[str, list[str]] = {}
    for binding in graph.bindings:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and not has_parts(graph, value):
            missing.setdefault("a part of a tuple", []).append(binding.var.name)
            continue
        if not isinstance(value, Call):
            continue
        op, found = call_name(value), None
        if op in ROWS:
            found = find_unmodelled([value], ROWS[op].attributes.split())
        if op not in WRITERS or found is not None:
            what = op if found is None else f"{op} with {found.name}={found.value!r}"
            missing.setdefault(what, []).append(binding.var.name)
    return missing


def check_operators(graph: Graph) -> None:
    """Raise one ModelError for all operators that ONNX cannot express."""
    if missing := find_missing(graph):
        lines = [f"{op} ({', '.join(map(repr, at))})" for op, at in missing.items()]
        raise ModelError(
            f"export_onnx has no ONNX form for "
            f"{format_count(len(missing), 'operator')}: {'; '.join(lines)}. "
            "Export a part of the model without them, or replace them before quantizing.",
            code="RQ203",
        )


def has_parts(graph: Graph, value: relax.TupleGetItem) -> bool:
    """Return whether a value is a part of what a writer gives in parts."""
    return graph.op_name(value.tuple_value) in ("relax.qnn.quantize_rows", *IN_PARTS)


def list_results(graph: Graph) -> list[relax.Expr]:
    """List the results of main in order. A tuple is split."""
    body = graph.func.body.body
    value = graph.values.get(body) if isinstance(body, relax.Var) else body
    return list(value.fields) if isinstance(value, relax.Tuple) else [body]


def describe(builder: OnnxBuilder, expr: relax.Expr) -> onnx.ValueInfoProto:
    """Return name, dtype and shape of an input or output.

    Raises:
        ModelError: it is an accumulator.
    """
    name, dtype = builder.tensor(expr, "an output"), tensor_dtype(expr)
    if builder.is_accumulator(expr):
        raise ModelError(
            f"export_onnx: output {name!r} is an accumulator without quantization parameters.",
            code="RQ203",
        )
    shape = tensor_shape(expr)
    if shape is None and expr.ty.ndim >= 0:
        shape = [None] * expr.ty.ndim
    return helper.make_tensor_value_info(name, ELEMENT[dtype], shape)


def keep_needed(
    builder: OnnxBuilder, outputs: list[str]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return the (nodes, constants) that the outputs depend on."""
    needed = set(outputs)
    nodes = []
    for node in reversed(builder.nodes):
        if needed & set(node.output):
            nodes.append(node)
            needed.update(list_reads(node))
    constants = [tensor for tensor in builder.constants if tensor.name in needed]
    return nodes[::-1], constants


def list_reads(node: onnx.NodeProto) -> Iterator[str]:
    """List the tensors that a node and its body read."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from list_reads(inner)
