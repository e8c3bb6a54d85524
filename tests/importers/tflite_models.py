"""Small TFLite files for the tests, written table by table: no converter is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model: a constant if it has values, sparse if these are those of the rows and
    columns that are not 0 (CSR): (row ends, columns).
    """

    name: str
    shape: Sequence[int]
    dtype: str = "float32"
    values: np.ndarray | None = None
    csr: tuple[Sequence[int], Sequence[int]] | None = None


def write_model(
    path: Path,
    tensors: Sequence[Tensor],
    operators: Sequence[tuple[str, Sequence[str], str]],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> Path:
    """Write a model of one graph; an operator is (its name, inputs, output), without options."""
    tflite = pytest.importorskip("tflite")
    flatbuffers = pytest.importorskip("flatbuffers")
    builder = flatbuffers.Builder(0)
    index = {tensor.name: at for at, tensor in enumerate(tensors)}

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

    buffers = [make_table("Buffer")]
    entries = []
    for tensor in tensors:
        buffer = 0
        if tensor.values is not None:
            data = np.asarray(tensor.values, tensor.dtype).tobytes()
            vector = builder.CreateByteVector(data)
            buffers.append(make_table("Buffer", Data=vector))
            buffer = len(buffers) - 1
        fields = {
            "Name": builder.CreateString(tensor.name),
            "Shape": make_numbers(tensor.shape),
            **({"Sparsity": make_sparsity(tensor)} if tensor.csr else {}),
        }
        kind = getattr(tflite.TensorType, tensor.dtype.upper())
        entries.append(make_table("Tensor", Type=kind, Buffer=buffer, **fields))
    kinds = list(dict.fromkeys(kind for kind, _, _ in operators))
    codes = [
        make_table(
            "OperatorCode",
            BuiltinCode=getattr(tflite.BuiltinOperator, kind),
            DeprecatedBuiltinCode=min(127, getattr(tflite.BuiltinOperator, kind)),
            Version=1,
        )
        for kind in kinds
    ]
    calls = []
    for kind, reads, result in operators:
        taken, given = make_numbers([index[name] for name in reads]), make_numbers([index[result]])
        calls.append(
            make_table("Operator", OpcodeIndex=kinds.index(kind), Inputs=taken, Outputs=given)
        )
    parts = {
        "Tensors": make_tables(tflite.SubGraphStartTensorsVector, entries),
        "Inputs": make_numbers([index[name] for name in inputs]),
        "Outputs": make_numbers([index[name] for name in outputs]),
        "Operators": make_tables(tflite.SubGraphStartOperatorsVector, calls),
    }
    graphs = make_tables(tflite.ModelStartSubgraphsVector, [make_table("SubGraph", **parts)])
    parts = {
        "OperatorCodes": make_tables(tflite.ModelStartOperatorCodesVector, codes),
        "Subgraphs": graphs,
        "Buffers": make_tables(tflite.ModelStartBuffersVector, buffers),
    }
    builder.Finish(make_table("Model", Version=3, **parts), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path
