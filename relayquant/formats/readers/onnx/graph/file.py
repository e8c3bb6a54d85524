"""ONNX reader: reads a file, checks it before any conversion, and applies the shapes that the
caller gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import onnx
import onnx.inliner
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from relayquant.base.storage.files import PathLike, check_file, reading
from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.given_shapes import check_given_names, check_given_shape
from relayquant.ir.rewrite.function import find_free_name

#: Oldest opset whose broadcasting works as in numpy. Older models have axis attributes that TVM
#: ignores.
MIN_OPSET = 7

#: Largest plausible input or weight, in elements.
MAX_ELEMENTS = 2**40

#: What TVM's frontend takes as an operator in the name of a size.
OPERATOR = re.compile(r"//|[-+*/]")


def read_model(path: PathLike, max_bytes: int) -> onnx.ModelProto:
    """Read the model in a file, with data from external files.

    Raises:
        ModelError: the file does not exist, is too large, or holds something else.
    """
    path = check_file(path, max_bytes)
    with reading(path, "ONNX model", ModelError):
        model = onnx.load(str(path), load_external_data=False)
    if not model.HasField("graph"):
        raise ModelError(f"{str(path)!r} is not an ONNX model: it holds no graph.", code="RQ502")
    external = {
        name: external_file(path, tensor, name)
        for name, tensor in model_tensors(model)
        if uses_external_data(tensor)
    }
    if external:
        extra = sum(file.stat().st_size for file in set(external.values()))
        check_file(path, max_bytes, extra_bytes=extra)
        try:
            onnx.load_external_data_for_model(model, str(path.parent))
        except Exception as error:
            raise ModelError(
                f"External data of {str(path)!r} cannot be read: {error}", code="RQ502"
            ) from error
    return model


def model_tensors(model: onnx.ModelProto) -> Iterable[tuple[str, onnx.TensorProto]]:
    """Yield (name, tensor) of all constants of a model, including its functions."""
    for part in (model.graph, *model.functions):
        yield from all_tensors(part)


def all_tensors(
    graph: onnx.GraphProto | onnx.FunctionProto,
) -> Iterable[tuple[str, onnx.TensorProto]]:
    """Yield (name, tensor) of all constants of a graph, including inner graphs."""
    for tensor in graph.initializer if isinstance(graph, onnx.GraphProto) else ():
        yield tensor.name, tensor
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield f"{node.name}.{attribute.name}", attribute.t
            for tensor in attribute.tensors:
                yield f"{node.name}.{attribute.name}", tensor
            for inner in (attribute.g, *attribute.graphs):
                yield from all_tensors(inner)


def external_file(model_path: Path, tensor: onnx.TensorProto, name: str) -> Path:
    """Return the file of a tensor's external data. It must be in the folder of the model, or below
    it.
    """
    folder = model_path.parent.resolve()
    try:
        info = ExternalDataInfo(tensor)
        location, offset, length = info.location, int(info.offset or 0), int(info.length or 0)
        if min(offset, length) < 0:
            raise ValueError("offset and length must be non-negative")
        file = (folder / location).resolve()
        is_there = file.is_file()
    except (ValueError, OSError, RuntimeError) as error:
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} does not say where its data is: {error}.",
            code="RQ502",
        ) from error
    if not file.is_relative_to(folder):
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} has its data in {location!r}, outside of "
            "the model's folder. Move the data next to the model.",
            code="RQ502",
        )
    if not is_there:
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} has its data in {location!r}, which is "
            "missing.",
            code="RQ502",
        )
    size = file.stat().st_size
    if offset + length > size:  # Older releases of onnx allocate the memory first.
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} has its data in bytes {offset} to "
            f"{offset + length} of {location!r}, which has {format_count(size, 'byte')}. The file "
            "is truncated, or belongs to another model.",
            code="RQ502",
        )
    return file


def check_model(model: onnx.ModelProto) -> int:
    """Return the model's opset. ModelError unless the model is valid and was read with its external
    data.
    """
    for name, tensor in model_tensors(model):
        if uses_external_data(tensor):
            raise ModelError(
                f"Tensor {name!r} has its data in another file. Pass the path of the model instead "
                "of the ModelProto, or load it with onnx.load(path).",
                code="RQ502",
            )
    check_names(model.graph)
    check_types(model.graph)
    check_sizes(model.graph)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 1))
    if opset < MIN_OPSET:
        raise ModelError(
            f"The model uses opset {opset}; supported: {MIN_OPSET} and later. Convert it: "
            "onnx.version_converter.convert_version(model, 13).",
            code="RQ202",
        )
    seen: set[str] = set()
    for name in (name for node in model.graph.node for name in node.output if name):
        if name in seen:
            raise ModelError(
                f"The model is not valid ONNX: two nodes compute tensor {name!r}.", code="RQ502"
            )
        seen.add(name)
    return opset


def check_names(graph: onnx.GraphProto) -> None:
    """Raise ModelError for a name that is not text: protobuf returns names that are not UTF-8 as
    bytes.
    """
    for at, node in enumerate(graph.node):
        names = (node.name, node.op_type, node.domain, *node.input, *node.output)
        names = (*names, *(attribute.name for attribute in node.attribute))
        if not all(isinstance(name, str) for name in names):
            raise ModelError(
                f"Node number {at} of the model has a name that is not UTF-8.", code="RQ502"
            )
    values = (*graph.initializer, *graph.input, *graph.output)
    if not all(isinstance(value.name, str) for value in values):
        raise ModelError(
            "The model is not valid ONNX: a tensor has a name that is not UTF-8.", code="RQ502"
        )


def check_types(graph: onnx.GraphProto) -> None:
    """Raise ModelError for an input or a constant with a data type that ONNX does not have."""
    types = [(tensor.name, tensor.data_type) for tensor in graph.initializer]
    for info in graph.input:
        if info.type.HasField("tensor_type"):
            types.append((info.name, info.type.tensor_type.elem_type))
    known = set(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
    for name, found in types:
        if found not in known:
            raise ModelError(
                f"Tensor {name!r} has the data type {found}; allowed: the types of "
                f"onnx.TensorProto, {min(known)} to {max(known)}. Is the file damaged?",
                code="RQ502",
            )


def check_sizes(graph: onnx.GraphProto) -> None:
    """Raise ModelError for negative dimensions, and for inputs too large for any memory."""
    shapes = [(tensor.name, list(tensor.dims)) for tensor in graph.initializer]
    for info in graph.input:
        sizes = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        shapes.append((info.name, [0 if size == -1 else size for size in sizes]))
    for name, sizes in shapes:
        if any(size < 0 for size in sizes):
            raise ModelError(
                f"Tensor {name!r} has the shape {tuple(sizes)}; no size is below 0.", code="RQ502"
            )
        if math.prod(size or 1 for size in sizes) > MAX_ELEMENTS:
            raise ModelError(
                f"Tensor {name!r} has the shape {tuple(sizes)}, more than {MAX_ELEMENTS} elements. "
                "Is the file damaged?",
                code="RQ502",
            )


def find_fault(model: onnx.ModelProto) -> str:
    """Return the complaint of ONNX's checker about a model that could not be converted. "" if there
    is none.

    The checker alone is no reason to refuse a model, because it also complains of harmless faults,
    for example an output without a shape.
    """
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        return f" The model is not valid ONNX: {' '.join(str(error).split())}"
    return ""


def fix_shapes(
    graph: onnx.GraphProto,
    shapes: Mapping[str, Sequence[int | str]],
    constants: Iterable[str],
) -> list[onnx.ValueInfoProto]:
    """Copy the graph's inputs, except `constants`, with the wanted shapes. Every unnamed dimension,
    and one of -1 as PaddlePaddle writes it, gets a name.
    """
    weights = {*constants, *(tensor.name for tensor in graph.initializer)}
    inputs = [info for info in graph.input if info.name not in weights]
    names = [info.name for info in inputs]
    check_given_names(shapes, names)
    return [fix_shape(info, shapes.get(info.name)) for info in inputs]


def fix_shape(info: onnx.ValueInfoProto, wanted: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    """Copy an input with the wanted shape. With None, the shape stays. Every dimension has a size
    or a name afterwards.

    Raises:
        ModelError: the input is not a tensor, has no shape, or its shape contradicts `wanted`.
    """
    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"Input {info.name!r} is not a tensor. Sequences, maps and optionals are not "
            "supported.",
            code="RQ202",
        )
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    has_shape = copy.type.tensor_type.HasField("shape")
    if wanted is None and not has_shape:
        raise ModelError(
            f"Input {info.name!r} has no shape in the model. Give one: "
            f"shapes={{{info.name!r}: ('N', 3, 224, 224)}}.",
            code="RQ202",
        )
    shape = copy.type.tensor_type.shape
    for dim in shape.dim:
        if dim.dim_value == -1:
            dim.ClearField("value")
    if wanted is not None:
        known = [dim.dim_value or None for dim in shape.dim] if has_shape else None
        check_given_shape(info.name, wanted, known)
        while len(shape.dim) < len(wanted):
            shape.dim.add()
        for dim, size in zip(shape.dim, wanted, strict=True):
            if isinstance(size, str):
                dim.dim_param = size
            else:
                dim.dim_value = size
    for i, dim in enumerate(shape.dim):
        if not dim.HasField("dim_value") and not dim.dim_param.strip():
            dim.dim_param = f"{info.name}_dim{i}"
    return copy


def name_sizes(inputs: Sequence[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    """Copy inputs with plain names of symbolic sizes: "batch-size" -> "batch_size".

    ONNX gives a name no meaning. TVM's frontend computes it, from left to right, and fails for
    names that no size has. A sum or product of sizes that inputs have stays one: "past + 1".
    """
    copies = [onnx.ValueInfoProto() for _ in inputs]
    for copy, info in zip(copies, inputs, strict=True):
        copy.CopyFrom(info)
    every = [dim for info in copies for dim in info.type.tensor_type.shape.dim]
    dims = [dim for dim in every if not dim.HasField("dim_value")]
    taken = {dim.dim_param for dim in dims}
    plain = {name for name in taken if not OPERATOR.search(name) and not name.strip().isdigit()}
    chosen: dict[str, str] = {}
    for name in sorted(taken - plain):
        if not is_computed(name, plain):
            base = OPERATOR.sub("_", name) if OPERATOR.search(name) else f"size_{name.strip()}"
            chosen[name] = find_free_name(base, taken)
            taken.add(chosen[name])
    for dim in dims:
        dim.dim_param = chosen.get(dim.dim_param, dim.dim_param)
    return copies


def is_computed(name: str, plain: Collection[str]) -> bool:
    """Return whether the name of a size is a term of plain names and numbers that has the same
    value when computed from left to right.
    """
    operators = "".join(OPERATOR.findall(name)).replace("//", "/")
    parts = [part.strip() for part in OPERATOR.split(name)]
    is_known = all(part in plain or part.isdigit() for part in parts)
    return is_known and bool(plain.intersection(parts)) and not re.search(r"[-+].*[*/]", operators)


# -- conversion ------------------------------------------------------------------------------------
