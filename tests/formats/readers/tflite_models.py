"""Small TFLite files for the tests, written table by table: no converter is at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayquant.base.packing import pack_codes

#: Stands for the place of the first constant until the tables have been written.
PLACE = 0x5A5A5A5A5A5A5A00


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model: a constant if it has values, sparse if these are those of the rows and
    columns that are not 0 (CSR): (row ends, columns). `scale` is (scale, zero point), maybe with an
    axis. Operators may write a variable. A signature has -1 for sizes that the model leaves open.
    """

    name: str
    shape: Sequence[int]
    dtype: str = "float32"
    values: np.ndarray | None = None
    csr: tuple[Sequence[int], Sequence[int]] | None = None
    scale: tuple[float, int] | tuple[float, int, int] | None = None
    variable: bool = False
    signature: Sequence[int] = ()


@dataclass(frozen=True)
class Operator:
    """A call of tensors by name or number; an input "" is left out. `options` is the name of a
    table, `fields` are its fields: numbers, text and lists of integers. A kind that TFLite does not
    have is a custom operator, whose options are `custom`.
    """

    kind: str
    inputs: Sequence[str | int]
    outputs: Sequence[str | int]
    options: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    custom: bytes = b""


@dataclass(frozen=True)
class Subgraph:
    """A graph of a model that operators of the first graph call."""

    tensors: Sequence[Tensor]
    operators: Sequence[Operator]
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()


def write_model(
    path: Path,
    tensors: Sequence[Tensor],
    operators: Sequence[tuple[str, Sequence[str], str] | Operator],
    inputs: Sequence[str],
    outputs: Sequence[str],
    others: Sequence[Subgraph] = (),
    is_new: bool = False,
) -> Path:
    """Write a model; a tuple is an operator without options: (its name, inputs, output).

    `is_new`: as newer writers do, the values of constants stand behind the tables, and the numbers
    of operators in the newer field alone.
    """
    tflite = pytest.importorskip("tflite")
    flatbuffers = pytest.importorskip("flatbuffers")
    builder = flatbuffers.Builder(0)
    calls = [
        Operator(each[0], each[1], [each[2]]) if isinstance(each, tuple) else each
        for each in operators
    ]
    graphs = [Subgraph(tensors, calls, inputs, outputs), *others]

    def make_table(kind: str, **fields):
        getattr(tflite, f"{kind}Start")(builder)
        for name, value in fields.items():
            getattr(tflite, f"{kind}Add{name}")(builder, value)
        return getattr(tflite, f"{kind}End")(builder)

    def make_numbers(values, dtype="int32"):
        return builder.CreateNumpyVector(np.asarray(values, dtype))

    def make_tables(start, tables):
        start(builder, len(tables))
        for table in reversed(tables):
            builder.PrependUOffsetTRelative(table)
        return builder.EndVector()

    def make_sparsity(tensor):
        ends, columns = (make_table("Int32Vector", Values=make_numbers(row)) for row in tensor.csr)
        vector = tflite.SparseIndexVector.Int32Vector
        rows = make_table("DimensionMetadata", Format=0, DenseSize=tensor.shape[0])
        entries = make_table(
            "DimensionMetadata",
            Format=1,
            ArraySegmentsType=vector,
            ArraySegments=ends,
            ArrayIndicesType=vector,
            ArrayIndices=columns,
        )
        order = make_numbers([0, 1])
        both = make_tables(tflite.SparsityParametersStartDimMetadataVector, [rows, entries])
        return make_table("SparsityParameters", TraversalOrder=order, DimMetadata=both)

    def make_scale(scale, zero_point, axis=0):
        scales, zeros = make_numbers([scale], "float32"), make_numbers([zero_point], "int64")
        parts = {"Scale": scales, "ZeroPoint": zeros, "QuantizedDimension": axis}
        return make_table("QuantizationParameters", **parts)

    def make_field(value):
        if isinstance(value, str):
            return builder.CreateString(value)
        if isinstance(value, np.ndarray):
            return builder.CreateNumpyVector(value)
        return make_numbers(value) if isinstance(value, Sequence) else value

    def make_tensor(tensor):
        buffer = 0
        if tensor.values is not None:
            data = pack_values(tensor)
            if is_new:
                buffers.append(make_table("Buffer", Offset=PLACE + len(behind), Size=len(data)))
                behind.append(data)
            else:
                buffers.append(make_table("Buffer", Data=builder.CreateByteVector(data)))
            buffer = len(buffers) - 1
        fields = {
            **({"Name": builder.CreateString(tensor.name)} if tensor.name else {}),
            "Shape": make_numbers(tensor.shape),
            **({"ShapeSignature": make_numbers(tensor.signature)} if tensor.signature else {}),
            **({"Sparsity": make_sparsity(tensor)} if tensor.csr else {}),
            **({"Quantization": make_scale(*tensor.scale)} if tensor.scale else {}),
        }
        kind = getattr(tflite.TensorType, tensor.dtype.upper())
        marks = {"IsVariable": True} if tensor.variable else {}
        return make_table("Tensor", Type=kind, Buffer=buffer, **marks, **fields)

    def make_call(call, index):
        parts = {
            "Inputs": make_numbers([index[name] for name in call.inputs]),
            "Outputs": make_numbers([index[name] for name in call.outputs]),
        }
        if call.options:
            fields = {name: make_field(value) for name, value in call.fields.items()}
            second = call.options.startswith(("Stablehlo", "StableHLO", "Dilate"))
            union = tflite.BuiltinOptions2 if second else tflite.BuiltinOptions
            prefix = "BuiltinOptions2" if second else "BuiltinOptions"
            parts[prefix] = make_table(call.options, **fields)
            parts[f"{prefix}Type"] = getattr(union, call.options)
        if call.custom:
            parts["CustomOptions"] = builder.CreateByteVector(call.custom)
        return make_table("Operator", OpcodeIndex=kinds.index(call.kind), **parts)

    def make_graph(graph):
        index = {at: at for at in range(len(graph.tensors))} | {"": -1}
        index |= {tensor.name: at for at, tensor in enumerate(graph.tensors) if tensor.name}
        entries = [make_tensor(tensor) for tensor in graph.tensors]
        tables = [make_call(call, index) for call in graph.operators]
        parts = {
            "Tensors": make_tables(tflite.SubGraphStartTensorsVector, entries),
            "Inputs": make_numbers([index[name] for name in graph.inputs]),
            "Outputs": make_numbers([index[name] for name in graph.outputs]),
            "Operators": make_tables(tflite.SubGraphStartOperatorsVector, tables),
        }
        return make_table("SubGraph", **parts)

    kinds = list(dict.fromkeys(call.kind for graph in graphs for call in graph.operators))
    buffers, behind = [make_table("Buffer")], []
    tables = [make_graph(graph) for graph in graphs]
    codes = []
    for kind in kinds:
        number = getattr(tflite.BuiltinOperator, kind, tflite.BuiltinOperator.CUSTOM)
        is_custom = number == tflite.BuiltinOperator.CUSTOM
        codes.append(
            make_table(
                "OperatorCode",
                BuiltinCode=number,
                DeprecatedBuiltinCode=0 if is_new else min(127, number),
                Version=1,
                **({"CustomCode": builder.CreateString(kind)} if is_custom else {}),
            )
        )
    parts = {
        "OperatorCodes": make_tables(tflite.ModelStartOperatorCodesVector, codes),
        "Subgraphs": make_tables(tflite.ModelStartSubgraphsVector, tables),
        "Buffers": make_tables(tflite.ModelStartBuffersVector, buffers),
    }
    builder.Finish(make_table("Model", Version=3, **parts), b"TFL3")
    data = bytes(builder.Output())
    for at, values in enumerate(behind):
        place, found = (PLACE + at).to_bytes(8, "little"), len(data).to_bytes(8, "little")
        assert data.count(place) == 1
        data = data.replace(place, found) + values
    path.write_bytes(data)
    return path


def pack_values(tensor: Tensor) -> bytes:
    """The values of a constant as they lie in a file."""
    if tensor.dtype == "int4":
        return pack_codes(np.asarray(tensor.values).reshape(-1) & 15, 4).tobytes()
    return np.asarray(tensor.values, tensor.dtype).tobytes()
