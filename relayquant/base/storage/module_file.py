"""Relax modules in files: the JSON of `tvm.ir.save_json`, or an archive that stores tensors as raw
bytes. Both readers expect that a file may be damaged.

    {"root_index": i, "nodes": [{"type": key, "data": ...}, ...], "metadata": {}}

In JSON, a tensor is a text with four characters per three bytes. An archive (`storage.archive`)
holds the same graph, deflated. There, the data of a large tensor is the number of an entry of the
archive, and 4-bit weights take half a byte each.

TVM's own reader checks types and trusts the rest of the text. Deep nesting or an object that holds
itself ends the process, and the sizes of a tensor decide how much memory is allocated. So the text
is checked first: an object must come after all objects that it holds, and a tensor must have as
many bytes as its sizes say. TVM's reflection says which fields hold objects.
"""

from __future__ import annotations

import base64
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base import _tvm
from relayquant.base.arguments import check_arguments
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.files import ARCHIVE_SUFFIX, decode_json, reading
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
TENSOR = "ffi.Tensor"
#: Smaller tensors stay in the graph, because an entry of an archive would take more bytes.
SMALL_TENSOR = 1024
#: Data that TVM writes before the sizes of a tensor: a magic number and a reserved field of 8 bytes
#: each, the device, the rank, and the dtype. After the sizes comes the number of bytes.
TENSOR_HEAD = struct.Struct("<QQiiiBBH")
TENSOR_MAGIC = 0xDD5E40F096B4A13F
MAX_RANK = 32

#: Containers: their data is a list of references.
CONTAINERS = ("ffi.Array", "ffi.List", "ffi.Map", "ffi.Dict")
#: Types of fields whose values are stored inline, without a reference.
INLINE = ("int", "float", "bool", "DataType", "Device")
#: Types of fields that may hold nothing. In any other field nothing ends the process.
NULLABLE = ("Any", "Optional", "ir.Attrs", "ir.Span")
#: Fields that TVM declares as "Any", with the type that they must have.
NARROWED = {("ir.GenericConst", "value"): "ffi.Tensor"}


def parse_module(text: str) -> tvm.IRModule:
    """Read the module in a JSON text, inside `files.reading`.

    Raises:
        ValueError, RecursionError: the text is not JSON, is nested too deeply, or holds something
            else. TVM may raise any error of its C++ code.
    """
    check_graph(decode_json(text, allow_nan=True))
    module = tvm.ir.load_json(text)
    if not isinstance(module, tvm.IRModule):
        raise ValueError(f"it holds a {type(module).__name__}, not a module")
    for function in module.functions.values():
        if isinstance(function, relax.Function):  # an expression or type may be missing inside
            relax.analysis.post_order_visit(function, lambda _: None)
    return module


@check_arguments
def save_module(mod: tvm.IRModule, path: PathLike) -> Path:
    """Write a module, float or quantized, to an archive with the ending .rqm. The graph is the one
    of `tvm.ir.save_json`, with weights as raw bytes. `relayquant.load` reads it.

    Returns:
        The path.

    Raises:
        ModelError: the path has another ending.
        FileError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    if path.suffix != ARCHIVE_SUFFIX:
        raise ModelError(
            f"save_module: {path} does not end in {ARCHIVE_SUFFIX}, by which `load` knows what it "
            f"is. Name it {path.with_suffix(ARCHIVE_SUFFIX).name}.",
            code="RQ101",
        )
    document = json.loads(tvm.ir.save_json(mod))
    arrays: dict[str, np.ndarray] = {}
    for node in document["nodes"]:
        if node["type"] == TENSOR and len(node["data"]) > SMALL_TENSOR:
            arrays[str(len(arrays))] = np.frombuffer(base64.b64decode(node["data"]), "uint8")
            node["data"] = len(arrays) - 1
    graph = json.dumps(document, separators=(",", ":")).encode()
    arrays[GRAPH] = np.frombuffer(zlib.compress(graph), "uint8")
    write_archive(path, KIND, Archive({"graph_bytes": len(graph)}, arrays))
    return path


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
            return parse_module(unpack_graph(read_archive(path, KIND, WHAT, ModelError)))
        return parse_module(path.read_text(encoding="utf-8"))


def unpack_graph(archive: Archive) -> str:
    """Restore the JSON text of an archive's graph. ValueError if it is damaged."""
    size = archive.header.get("graph_bytes")
    if not is_index(size, MAX_GRAPH_BYTES):
        raise ValueError(f"its graph has {size!r} bytes; allowed: up to {MAX_GRAPH_BYTES}")
    reader = zlib.decompressobj()
    # Inflate only as many bytes as the header says, and one more to detect excess data.
    text = reader.decompress(archive.arrays[GRAPH].tobytes(), int(str(size)) + 1)
    if len(text) != size or not reader.eof:
        raise ValueError(f"its graph is not what its header says: {format_count(size, 'byte')}")
    document = decode_json(text, allow_nan=True)
    for node in list_nodes(document):
        if node.get("type") == TENSOR and not isinstance(node.get("data"), str):
            node["data"] = base64.b64encode(find_tensor(archive.arrays, node["data"])).decode()
    return json.dumps(document)


def find_tensor(arrays: Mapping[str, np.ndarray], index: Any) -> bytes:
    """Return the bytes of tensor number `index`. ValueError if it is missing or damaged."""
    found = arrays.get(str(index)) if is_index(index, len(arrays)) else None
    if found is None or found.dtype != np.uint8 or found.ndim != 1:
        raise ValueError(f"a tensor is entry {index!r}, which it does not have")
    return found.tobytes()


def check_tensor(text: Any) -> None:
    """Raise ValueError unless a text is a tensor with as many bytes as its sizes say."""
    if not isinstance(text, str):
        raise ValueError("it is not a text")
    data = base64.b64decode(text, validate=True)
    if len(data) < TENSOR_HEAD.size:
        raise ValueError(f"it has {format_count(len(data), 'byte')}")
    magic, _, _, _, rank, _, bits, lanes = TENSOR_HEAD.unpack_from(data)
    if magic != TENSOR_MAGIC or not 0 <= rank <= MAX_RANK:
        raise ValueError("it does not begin as tensors do")
    behind = TENSOR_HEAD.size + 8 * (rank + 1)
    *sizes, claimed = struct.unpack_from(f"<{rank + 1}q", data, TENSOR_HEAD.size)
    count = math.prod(max(size, 0) for size in sizes) * lanes
    # Elements of fewer than 8 bits are packed, except that a 1-bit bool takes a byte.
    fitting = {count * -(-bits // 8), -(-count * bits // 8)}
    if min(sizes, default=0) < 0 or claimed not in fitting or len(data) != behind + claimed:
        raise ValueError(
            f"shape {tuple(sizes)} of {bits} bits needs {format_count(max(fitting), 'byte')}, it "
            f"has {len(data) - behind}"
        )


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
