"""Relax modules in files: the JSON of `tvm.ir.save_json`, or an archive that stores tensors as raw
bytes. Both readers expect that a file may be damaged.

    {"root_index": i, "nodes": [{"type": key, "data": ...}, ...], "metadata": {}}

In JSON, a tensor is a text with four characters per three bytes. An archive (`storage.archive`)
holds the same graph, deflated. There, the data of a large tensor is the number of an entry of the
archive, and 4-bit weights take half a byte each. TVM writes and reads a graph with a small tensor,
a placeholder, in each large constant. So weights are copied once, and never turned into text:

    save: constants -> placeholders -> JSON -> numbers of entries; tensors -> entries
    load: numbers of entries -> placeholders -> JSON -> constants <- tensors <- entries

TVM's own reader checks types and trusts the rest of the text. Deep nesting or an object that holds
itself ends the process, and the sizes of a tensor decide how much memory is allocated. So the text
is checked first: an object must come after all objects that it holds, and a tensor must have as
many bytes as its sizes say. TVM's reflection says which fields hold objects.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax
from tvm.ir import GenericConst

from relayquant.base import _tvm
from relayquant.base.arguments import check_arguments
from relayquant.base.storage.archive import MAX_ENTRIES, Archive, read_archive, write_archive
from relayquant.base.storage.files import ARCHIVE_SUFFIX, decode_json, reading
from relayquant.base.storage.tensor_bytes import (
    check_tensor,
    count_bytes,
    encode_tensor,
    is_plain,
    is_written_by_tvm,
    pack_tensor,
    read_head,
    unpack_tensor,
)
from relayquant.errors import ModelError, format_count

PathLike = str | os.PathLike[str]

KIND = "relayquant.module.1"
WHAT = "module written by relayquant"
#: The first bytes of every zip archive (PKWARE, APPNOTE.TXT 4.3.7). JSON never begins with them.
ARCHIVE_HEAD = b"PK\x03\x04"
#: The entry of the graph. The entries of tensors are "0", "1", ...
GRAPH = "graph"
#: Largest graph in bytes, without its tensors. No module has a larger one.
MAX_GRAPH_BYTES = 1 << 30
TENSOR, CONSTANT = "ffi.Tensor", "ir.GenericConst"
#: Smaller tensors, in bytes, stay in the graph: an entry of an archive would take more.
SMALL_TENSOR = 700
#: Shape of a placeholder, with more axes than weights have. Its element is the number of an entry.
PLACEHOLDER = (1,) * 10

#: Containers: their data is a list of references.
CONTAINERS = ("ffi.Array", "ffi.List", "ffi.Map", "ffi.Dict")
#: Types of fields whose values are stored inline, without a reference.
INLINE = ("int", "float", "bool", "DataType", "Device")
#: Types of fields that may hold nothing. In any other field nothing ends the process.
NULLABLE = ("Any", "Optional", "ir.Attrs", "ir.Span")
#: Fields that TVM declares as "Any", with the type that they must have.
NARROWED = {(CONSTANT, "value"): TENSOR}


def parse_module(text: str) -> tvm.IRModule:
    """Read the module in a JSON text, inside `files.reading`.

    Raises:
        ValueError, RecursionError: the text is not JSON, is nested too deeply, or holds something
            else. TVM may raise any error of its C++ code.
    """
    module = parse_graph(text)
    check_functions(module)
    return module


def parse_graph(text: str) -> tvm.IRModule:
    """Read the module in a JSON text, whose constants may be placeholders. See `parse_module`."""
    check_graph(decode_json(text, allow_nan=True))
    module = tvm.ir.load_json(text)
    if not isinstance(module, tvm.IRModule):
        raise ValueError(f"it holds a {type(module).__name__}, not a module")
    return module


def check_functions(module: tvm.IRModule) -> None:
    """Raise ValueError for a constant whose tensor has not the type that it declares: kernels read
    memory as it is declared. TVM raises ValueError for a variable that nothing defines.
    """

    def check(expr: Any) -> None:
        if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
            check_constant(expr)

    for function in module.functions.values():
        if isinstance(function, relax.Function):  # an expression or type may be missing inside
            relax.analysis.post_order_visit(function, check)
    relax.analysis.well_formed(module, check_ty=False)


def check_constant(constant: GenericConst) -> None:
    """Raise ValueError unless the tensor of a constant has the type that the constant declares."""
    ty, tensor = constant.ty, constant.value
    shape, dtype = tuple(tensor.shape), tensor.dtype
    declared = ty.shape if isinstance(ty, relax.TensorType) else None
    sizes = [getattr(size, "value", None) for size in getattr(declared, "values", ())]
    if declared is None or tuple(sizes) != shape or str(ty.dtype) != str(dtype):
        raise ValueError(f"a constant of type {ty} has a tensor of {dtype} and shape {shape}")


@check_arguments
def save_module(mod: tvm.IRModule, path: PathLike) -> Path:
    """Write a module, float or quantized, to an archive with the ending .rqm. The graph is the one
    of `tvm.ir.save_json`, with weights as raw bytes. `relayquant.load` reads it.

    Returns:
        The path.

    Raises:
        ModelError: the path has another ending, or an attribute holds a tensor whose elements have
            fewer than 8 bits, or lanes.
        FileError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    if path.suffix != ARCHIVE_SUFFIX:
        raise ModelError(
            f"save_module: {path} does not end in {ARCHIVE_SUFFIX}, by which `load` knows what it "
            f"is. Name it {path.with_suffix(ARCHIVE_SUFFIX).name}.",
            code="RQ101",
        )
    small, tensors = take_tensors(mod)
    numbers = {encode_tensor(make_placeholder(i)): i for i in range(len(tensors))}
    document = json.loads(tvm.ir.save_json(small))
    for node in document["nodes"]:
        if node["type"] == TENSOR:
            node["data"] = numbers.get(node["data"], node["data"])
            check_kept(node["data"])
    graph = json.dumps(document, separators=(",", ":")).encode()
    entries = Entries(tensors, np.frombuffer(zlib.compress(graph), "uint8"))
    write_archive(path, KIND, Archive({"graph_bytes": len(graph)}, entries))
    return path


def check_kept(data: str | int) -> None:
    """Raise ModelError if a tensor that stays in the graph cannot be read again."""
    try:
        if isinstance(data, str):
            check_tensor(data)
    except ValueError as error:
        raise ModelError(
            f"save_module: a tensor that is no constant (in an attribute) cannot be written: "
            f"{error}. Leave it out.",
            code="RQ101",
        ) from None


@dataclass(frozen=True, eq=False)
class Entries(Mapping[str, NDArray[np.uint8]]):
    """The entries of a module's archive. The bytes of a tensor are copied when they are read."""

    tensors: Sequence[tvm.runtime.Tensor]
    graph: NDArray[np.uint8]

    def __getitem__(self, name: str) -> NDArray[np.uint8]:
        return self.graph if name == GRAPH else pack_tensor(self.tensors[int(name)])

    def __iter__(self) -> Iterator[str]:
        return iter((*map(str, range(len(self.tensors))), GRAPH))

    def __len__(self) -> int:
        return len(self.tensors) + 1


def make_placeholder(index: int) -> tvm.runtime.Tensor:
    """Return the tensor that stands for entry number `index`."""
    return tvm.runtime.tensor(np.full(PLACEHOLDER, index, "uint64"))


def is_placeholder(tensor: tvm.runtime.Tensor) -> bool:
    """Whether a tensor looks like one that stands for an entry."""
    return tuple(tensor.shape) == PLACEHOLDER and tensor.dtype == "uint64"


def map_constants(
    mod: tvm.IRModule, convert: Callable[[tvm.runtime.Tensor], tvm.runtime.Tensor]
) -> tvm.IRModule:
    """Return the module with other tensors in its constants, of the same types as before. Places
    that share a constant share the new one.
    """
    known: dict[GenericConst, GenericConst] = {}

    def visit(constant: GenericConst) -> GenericConst:
        if constant not in known:
            old = constant.value
            new = convert(old) if isinstance(old, tvm.runtime.Tensor) else old
            changed = GenericConst(new, constant.ty, constant.span)
            known[constant] = constant if new is old else changed
        return known[constant]

    return tvm_ffi.structural_map(mod, (GenericConst, visit))


def take_tensors(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[tvm.runtime.Tensor]]:
    """Return the module with placeholders in its large constants, and their tensors."""
    tensors: list[tvm.runtime.Tensor] = []
    places: dict[Any, tvm.runtime.Tensor] = {}

    def take(tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        dtype = tensor.dtype
        is_text = is_written_by_tvm(dtype.bits, dtype.lanes) and not is_placeholder(tensor)
        if not is_plain(tensor) or (is_text and count_bytes(tensor) <= SMALL_TENSOR):
            return tensor
        key = (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype))
        if key not in places:
            places[key] = make_placeholder(len(tensors))
            tensors.append(tensor)
        return places[key]

    return map_constants(mod, take), tensors


def read_module(path: Path) -> tvm.IRModule:
    """Read the module in a file, an archive or JSON. The file name does not matter.

    Raises:
        ModelError: the file does not exist, or holds something else.
    """
    if not path.is_file():
        raise ModelError(f"There is no module file {path}.", code="RQ201")
    with reading(path, WHAT, ModelError):
        with path.open("rb") as file:
            is_archive = file.read(len(ARCHIVE_HEAD)) == ARCHIVE_HEAD
        if is_archive:
            return unpack_module(read_archive(path, KIND, WHAT, ModelError))
        return parse_module(path.read_text(encoding="utf-8"))


def unpack_module(archive: Archive) -> tvm.IRModule:
    """Make the module of an archive. ValueError and others if it is damaged, see `parse_module`."""
    document, arrays = unpack_graph(archive), dict(archive.arrays)
    del archive  # the bytes of each tensor are freed as soon as it is made
    nodes, made = list_nodes(document), {}
    inline = find_shared_tensors(nodes)
    for at, node in enumerate(nodes):
        if node.get("type") == TENSOR and not isinstance(node.get("data"), str):
            index = node["data"]
            data = find_tensor(arrays, index)
            read_head(data)
            if at in inline:
                node["data"] = base64.b64encode(data).decode()
            else:
                node["data"] = encode_tensor(make_placeholder(index))

    def restore(tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        if not is_placeholder(tensor):
            return tensor
        index = int(tensor.numpy().item())
        if index not in made:
            made[index] = unpack_tensor(find_tensor(arrays, index))
            del arrays[str(index)]
        return made[index]

    module = map_constants(parse_graph(json.dumps(document)), restore)
    check_functions(module)
    return module


def unpack_graph(archive: Archive) -> Any:
    """Return the JSON of an archive's graph. ValueError if it is damaged."""
    size = archive.header.get("graph_bytes")
    if not is_index(size, MAX_GRAPH_BYTES):
        raise ValueError(f"its graph has {size!r} bytes; allowed: up to {MAX_GRAPH_BYTES}")
    reader = zlib.decompressobj()
    # Inflate only as many bytes as the header says, and one more to detect excess data.
    text = reader.decompress(archive.arrays[GRAPH].tobytes(), int(str(size)) + 1)
    if len(text) != size or not reader.eof:
        raise ValueError(f"its graph is not what its header says: {format_count(size, 'byte')}")
    return decode_json(text, allow_nan=True)


def find_shared_tensors(nodes: Sequence[Mapping[str, Any]]) -> set[Any]:
    """Return the numbers of nodes that anything but a constant holds, and perhaps more: a number in
    a field may be just a number.
    """
    found: set[Any] = set()
    for node in nodes:
        data = node.get("data")
        if node.get("type") != CONSTANT and isinstance(data, list | dict):
            values = data.values() if isinstance(data, dict) else data
            found.update(value for value in values if isinstance(value, int))
    return found


def find_tensor(arrays: Mapping[str, np.ndarray], index: Any) -> NDArray[np.uint8]:
    """Return the bytes of tensor number `index`. ValueError if it is missing or damaged."""
    found = arrays.get(str(index)) if is_index(index, MAX_ENTRIES) else None
    if found is None or found.dtype != np.uint8 or found.ndim != 1:
        raise ValueError(f"a tensor is entry {index!r}, which it does not have")
    return found


def list_nodes(document: Any) -> list[dict[str, Any]]:
    """Return the nodes of a saved graph. ValueError if it has none."""
    nodes = document["nodes"] if isinstance(document, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise ValueError("it has no list of nodes")
    return nodes


def check_graph(document: Any) -> None:
    """Raise ValueError unless every object of a saved graph holds only objects before it."""
    nodes = list_nodes(document)
    kinds = [str(node.get("type")) for node in nodes]
    if not is_index(document["root_index"], len(nodes)):
        raise ValueError(
            f"its root is {document['root_index']!r} of {format_count(len(nodes), 'node')}"
        )
    for at, node in enumerate(nodes):
        try:
            check_node(kinds[at], node.get("data"), kinds, at)
        except ValueError as error:
            raise ValueError(f"node {at} ({kinds[at]}): {error}") from None


def check_node(kind: str, data: Any, kinds: Sequence[str], at: int) -> None:
    """Raise ValueError unless the data of node number `at` refers only to earlier nodes."""
    if kind in CONTAINERS:
        if not isinstance(data, list) or not all(is_index(item, at) for item in data):
            raise ValueError("an element is not an earlier node")
        if kind in ("ffi.Map", "ffi.Dict") and len(data) % 2:
            raise ValueError("a key has no value")
        return
    if kind == TENSOR:
        check_tensor(data)
        return
    if not isinstance(data, dict):
        return
    fields = _tvm.find_fields(kind)
    for name, value in data.items():
        if fields.get(name, "int") in INLINE:
            continue
        if not is_index(value, at):
            raise ValueError(f"field {name!r} is {value!r}, which is not an earlier node")
        if kinds[value] == "None" and fields[name] not in NULLABLE:
            raise ValueError(f"field {name!r} holds nothing")
        if kinds[value] != NARROWED.get((kind, name), kinds[value]):
            raise ValueError(f"field {name!r} holds a {kinds[value]}")


def is_index(value: Any, end: int) -> bool:
    """Return whether `value` is the index of one of the first `end` nodes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
