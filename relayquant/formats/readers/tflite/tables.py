"""TensorFlow Lite reader: checks the tables of the flatbuffer before anything follows them, gives
each tensor a unique name, and reads what the package tflite does not: values behind the flatbuffer
and values of 4 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from relayquant.base.packing import count_bytes, unpack_codes
from relayquant.errors import ModelError, format_count

#: Largest tensor that a model may declare, in elements.
MAX_ELEMENTS = 2**31 - 1

#: Largest rank of a tensor.
MAX_RANK = 16

#: Types of TensorType that Relax supports, by name, and the bytes per element.
SIZES = {
    "FLOAT32": 4, "FLOAT16": 2, "INT32": 4, "UINT8": 1, "INT64": 8, "BOOL": 1, "INT16": 2,
    "COMPLEX64": 8, "INT8": 1, "UINT32": 4, "UINT64": 8,
}  # fmt: skip

#: Place of the newer field with an operator's number in its table.
NEW_CODE = 10

#: Types of handles and texts, which hold no numbers. Operators on them are refused by name.
OTHER_TYPES = frozenset({"STRING", "RESOURCE", "VARIANT"})


def open_model(tflite: Any, data: bytes) -> Any:
    """Return the root table as TFLite reads it.

    Tensor names are unique: TFLite identifies tensors by number, TVM's frontend by name, which may
    be missing or duplicate. The number of an operator may be in the newer of its two fields alone,
    which the package reads for large numbers only. The values of a buffer may stand behind the
    flatbuffer. Constants of 4 bits are given as int8.
    """
    from flatbuffers.number_types import Int32Flags

    int4, int8 = tflite.TensorType.INT4, tflite.TensorType.INT8

    class OperatorCode(tflite.OperatorCode):
        def BuiltinCode(self) -> int:
            place = self._tab.Offset(NEW_CODE)
            return int(self._tab.Get(Int32Flags, self._tab.Pos + place)) if place else 0

    class Buffer(tflite.Buffer):
        def is_outside(self) -> bool:
            return self.Offset() > 1  # 1 stands for a place that is filled in later

        def DataLength(self) -> int:
            return self.Size() if self.is_outside() else super().DataLength()

        def DataAsNumpy(self) -> Any:
            if not self.is_outside():
                return super().DataAsNumpy()
            return np.frombuffer(data, "uint8", self.Size(), self.Offset())

        def ends_in(self, size: int) -> bool:
            return not self.is_outside() or self.Offset() + self.Size() <= size

    class Tensor(tflite.Tensor):
        def Name(self) -> bytes:
            return self.name

        def Type(self) -> int:
            return int8 if self.is_packed() else super().Type()

        def Buffer(self) -> int:
            number = super().Buffer()
            return model.unpack(number, self.count()) if self.is_packed() else number

        def is_packed(self) -> bool:
            return super().Type() == int4 and model.Buffers(super().Buffer()).DataLength() > 0

        def count(self) -> int:
            return math.prod(self.Shape(axis) for axis in range(self.ShapeLength()))

    class SubGraph(tflite.SubGraph):
        def Tensors(self, j: int) -> Any:
            table = super().Tensors(j)
            if table is None or not 0 <= j < self.TensorsLength():
                raise ValueError(f"it refers to tensor {j} of {self.TensorsLength()}")
            tensor = view_table(table, Tensor())
            tensor.name = self.names[j].encode()
            return tensor

    class Model(tflite.Model):
        def Subgraphs(self, j: int) -> Any:
            if j not in self.graphs:
                table = super().Subgraphs(j)
                if table is None or not 0 <= j < self.SubgraphsLength():
                    raise ValueError(f"it refers to graph {j} of {self.SubgraphsLength()}")
                graph = view_table(table, SubGraph())
                graph.names = list_names(table)
                self.graphs[j] = graph
            return self.graphs[j]

        def OperatorCodes(self, j: int) -> Any:
            return view_table(super().OperatorCodes(j), OperatorCode())

        def Buffers(self, j: int) -> Any:
            if j in self.unpacked:
                return self.unpacked[j]
            if not 0 <= j < self.BuffersLength():
                raise ValueError(f"it refers to buffer {j} of {self.BuffersLength()}")
            return view_table(super().Buffers(j), Buffer())

        def unpack(self, j: int, count: int) -> int:
            """The number of the buffer with the 4-bit values of buffer j as int8."""
            place = self.BuffersLength() + j
            self.unpacked[place] = UnpackedBuffer(self.Buffers(j), count)
            return place

    model = Model()
    root = tflite.Model.GetRootAs(data, 0)
    model.graphs, model.unpacked = {}, {}
    model.Init(root._tab.Bytes, root._tab.Pos)
    return model


def view_table(table: Any, view: Any) -> Any:
    """Return `view`, an object of a class derived from the table's, on the same bytes."""
    view.Init(table._tab.Bytes, table._tab.Pos)
    return view


@dataclass(frozen=True)
class UnpackedBuffer:
    """A buffer of `count` signed values of 4 bits, as the bytes of int8."""

    packed: Any
    count: int

    def DataLength(self) -> int:
        length = self.packed.DataLength()
        return self.count if length == count_bytes(self.count, 4) else 2 * length

    def ends_in(self, size: int) -> bool:
        return self.packed.ends_in(size)

    def DataAsNumpy(self) -> np.ndarray:
        codes = unpack_codes(self.packed.DataAsNumpy(), 4, self.count)
        return (codes ^ 8) - np.uint8(8)


def list_names(graph: Any) -> list[str]:
    """Return a name for each tensor. The first tensor with a name keeps it."""
    names: list[str] = []
    taken: set[str] = set()
    for index in range(graph.TensorsLength()):
        given = graph.Tensors(index).Name()
        name = given.decode("utf-8", "replace") if given else f"tvmgen_tensor_{index}"
        while name in taken:
            name = f"{name}_{index}"
        taken.add(name)
        names.append(name)
    return names


def check_tables(model: Any, tflite: Any, size: int) -> None:
    """Check the references and sizes in the tables.

    Args:
        model: Result of `open_model`.
        tflite: The package.
        size: Size of the file in bytes.

    Raises:
        ValueError, struct.error, ...: the file is damaged.
        ModelError: the kind of an operator or a tensor is not supported.
    """
    for count in (
        model.OperatorCodesLength(),
        model.SubgraphsLength(),
        model.BuffersLength(),
    ):
        check_count(count, size)
    if not model.SubgraphsLength():
        raise ValueError("it has no graph")
    types = {number: name for name, number in list_members(tflite.TensorType)}
    kinds = {number: name for name, number in list_members(tflite.BuiltinOperator)}
    for index in range(model.SubgraphsLength()):
        graph = model.Subgraphs(index)
        for count in (
            graph.TensorsLength(),
            graph.OperatorsLength(),
            graph.InputsLength(),
            graph.OutputsLength(),
        ):
            check_count(count, size)
        for at in range(graph.TensorsLength()):
            check_tensor(model, graph.Tensors(at), types, size)
        check_indices(graph, graph.InputsAsNumpy(), 0)
        check_indices(graph, graph.OutputsAsNumpy(), 0)
        for at in range(graph.OperatorsLength()):
            check_operator(model, graph, graph.Operators(at), kinds)


def list_members(enum: Any) -> Iterator[tuple[str, int]]:
    """Return the members of an enumeration of the package by name."""
    return ((name, value) for name, value in vars(enum).items() if isinstance(value, int))


def check_count(count: int, size: int) -> None:
    """Raise ValueError for a vector that is longer than the file."""
    if not 0 <= 4 * count <= size:
        raise ValueError(f"a vector has {format_count(count, 'element')}, longer than the file")


def check_indices(graph: Any, indices: Any, least: int) -> None:
    """Raise ValueError for tensors that the graph does not have."""
    for index in np.atleast_1d(indices) if isinstance(indices, np.ndarray) else ():
        if not least <= index < graph.TensorsLength():
            raise ValueError(f"it refers to tensor {index} of {graph.TensorsLength()}")


def check_operator(model: Any, graph: Any, operator: Any, kinds: dict[int, str]) -> None:
    """Raise for an operator that TFLite does not have, or for invalid tensors."""
    if not 0 <= operator.OpcodeIndex() < model.OperatorCodesLength():
        raise ValueError(f"it refers to operator code {operator.OpcodeIndex()}")
    code = model.OperatorCodes(operator.OpcodeIndex())
    number = max(code.DeprecatedBuiltinCode(), code.BuiltinCode())
    if number not in kinds:
        raise ModelError(
            f"It has an operator of number {number}, which the installed package tflite does not "
            "know. Run: pip install --upgrade tflite",
            code="RQ202",
        )
    check_indices(graph, operator.InputsAsNumpy(), -1)
    check_indices(graph, operator.OutputsAsNumpy(), 0)


def check_tensor(model: Any, tensor: Any, types: dict[int, str], size: int) -> None:
    """Raise for an impossible shape, or a constant with the wrong number of bytes."""
    name, kind = tensor.name.decode(), types.get(tensor.Type(), str(tensor.Type()))
    if kind not in SIZES and kind not in OTHER_TYPES:
        raise ModelError(
            f"Tensor {name!r} has the type {kind}; supported: {', '.join(SIZES)}. Convert the "
            "model with another type.",
            code="RQ202",
        )
    if not 0 <= tensor.ShapeLength() <= MAX_RANK:
        raise ValueError(f"tensor {name!r} has {format_count(tensor.ShapeLength(), 'dimension')}")
    shape = [tensor.Shape(axis) for axis in range(tensor.ShapeLength())]
    if any(n < 0 for n in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"tensor {name!r} has the shape {shape}")
    if not 0 <= tensor.ShapeSignatureLength() <= MAX_RANK:
        count = format_count(tensor.ShapeSignatureLength(), "open or fixed size")
        raise ValueError(f"tensor {name!r} has {count}")
    for axis in range(tensor.ShapeSignatureLength()):
        tensor.ShapeSignature(axis)  # inside the file
    buffer = model.Buffers(tensor.Buffer())
    length = buffer.DataLength()
    if not 0 <= length <= 2 * size or not buffer.ends_in(size):
        raise ValueError(f"the values of tensor {name!r} have {format_count(length, 'byte')}")
    needed = math.prod(shape) * SIZES.get(kind, 0)
    if length and kind in SIZES and tensor.Sparsity() is None and length != needed:
        raise ValueError(
            f"the values of tensor {name!r} have {format_count(length, 'byte')}, {kind} of shape "
            f"{shape} needs {needed}"
        )


def list_codes(model: Any) -> Iterator[int]:
    """List the operator code numbers of all calls."""
    for index in range(model.SubgraphsLength()):
        graph = model.Subgraphs(index)
        for at in range(graph.OperatorsLength()):
            yield graph.Operators(at).OpcodeIndex()
