"""Reads a Relax module as `tvm.ir.save_json` wrote it, from a file that may be damaged.

    {"root_index": i, "nodes": [{"type": key, "data": ...}, ...], "metadata": {}}

TVM's own reader checks types, and trusts its text beyond that: what is nested too deeply, and an
object that holds itself, end the process. So the text is looked at first: an object must stand
behind all that it holds. Which fields hold objects, TVM says by reflection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm

from relayquant import _tvm
from relayquant.errors import format_count
from relayquant.storage.files import decode_json

#: Containers: their data is a list of references.
CONTAINERS = ("ffi.Array", "ffi.List", "ffi.Map", "ffi.Dict")
#: What stands in the place of a reference, as JSON has it.
INLINE = ("int", "float", "bool", "DataType", "Device")
#: Fields of which TVM says "Any", and takes anything.
NARROWED = {("ir.GenericConst", "value"): "ffi.Tensor"}


def parse_module(text: str) -> tvm.IRModule:
    """The module in a JSON text, for use inside of `files.reading`.

    Raises:
        ValueError, RecursionError: it is no JSON or too deep, or holds something else; TVM raises
            whatever its C++ code happens to raise.
    """
    check_graph(decode_json(text, allow_nan=True))
    module = tvm.ir.load_json(text)
    if not isinstance(module, tvm.IRModule):
        raise ValueError(f"it holds a {type(module).__name__}, not a module")
    return module


def check_graph(document: Any) -> None:
    """ValueError unless every object of a saved graph holds objects before it only."""
    nodes = document["nodes"] if isinstance(document, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise ValueError("it has no list of nodes")
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
    """ValueError unless the data of node number `at` refers to nodes before it."""
    if kind in CONTAINERS:
        if not isinstance(data, list) or not all(is_index(item, at) for item in data):
            raise ValueError("an element is no node before it")
        if kind in ("ffi.Map", "ffi.Dict") and len(data) % 2:
            raise ValueError("a key has no value")
        return
    if not isinstance(data, dict):
        return
    fields = _tvm.find_fields(kind)
    for name, value in data.items():
        if fields.get(name, "int") in INLINE:
            continue
        if not is_index(value, at):
            raise ValueError(f"field {name!r} is {value!r}, which is no node before it")
        if kinds[value] != NARROWED.get((kind, name), kinds[value]):
            raise ValueError(f"field {name!r} holds a {kinds[value]}")


def is_index(value: Any, end: int) -> bool:
    """Whether `value` is the number of one of the first `end` nodes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
