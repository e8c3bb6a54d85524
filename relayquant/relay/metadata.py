"""Relay reader: the node graph in which TVM before 0.20 saved objects as JSON.

    {"root": i, "nodes": [{"type_key", "attrs" | "data" | "keys" | "repr_str"}], "b64ndarrays": []}

Attributes are texts: a number, or the index of another node. Node 0 is null. Whole modules
(`tvm.ir.save_json`) and the metadata section of a text have the same form.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from relayquant.errors import ModelError, format_count
from relayquant.relay.tensors import decode_tensor

#: Deepest nesting of arrays inside an attribute. Relay's attributes have at most 2 levels.
MAX_VALUE_DEPTH = 8


class NodeGraph:
    """Read-only access to the nodes. Every index and text is checked at its use.

    Raises:
        ModelError: the text is not JSON, or not a node graph.
    """

    def __init__(self, text: str, what: str) -> None:
        self.what = what
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{what} is not JSON, or is truncated: {error}.", code="RQ502"
            ) from error
        if not isinstance(document, dict):
            raise ModelError(f"{what} is JSON, but not a node graph of TVM.", code="RQ502")
        nodes, tensors = document.get("nodes"), document.get("b64ndarrays", [])
        if not isinstance(nodes, list) or not isinstance(tensors, list):
            raise ModelError(
                f"{what} is JSON, but not a node graph of TVM: it has no nodes.", code="RQ502"
            )
        self._nodes: list[Any] = nodes
        self._tensors: list[Any] = tensors
        self._decoded: dict[int, np.ndarray] = {}
        attrs = document.get("attrs")
        #: TVM's version, "" if the text does not contain it
        self.version = str(attrs.get("tvm_version", "")) if isinstance(attrs, dict) else ""
        self.root = self.index(document.get("root"), "root")

    def fail(self, index: int, message: str) -> ModelError:
        """Return an error that names the node."""
        return ModelError(f"{self.what}, node {index}: {message}", code="RQ502")

    def index(self, value: Any, part: str) -> int:
        """Return `value` as the index of a node."""
        try:
            index = int(value)
        except (TypeError, ValueError):
            index = -1
        if not 0 <= index < len(self._nodes):
            raise ModelError(
                f"{self.what}: {part} is {value!r}; allowed: the index of one of "
                f"{format_count(len(self._nodes), 'node')}.",
                code="RQ502",
            )
        return index

    def __len__(self) -> int:
        return len(self._nodes)

    def key(self, index: int) -> str:
        """Return the type key of a node. "" for null."""
        key = self._node(index).get("type_key")
        if not isinstance(key, str):
            raise self.fail(index, "it has no type_key.")
        return key

    def _node(self, index: int) -> dict[str, Any]:
        node = self._nodes[index]
        if not isinstance(node, dict):
            raise self.fail(index, "it is not an object.")
        return node

    def attr(self, index: int, name: str) -> str:
        """Return the text of an attribute."""
        attrs = self._node(index).get("attrs")
        value = attrs.get(name) if isinstance(attrs, dict) else None
        if not isinstance(value, str):
            raise self.fail(index, f"{self.key(index)} has no attribute {name!r}.")
        return value

    def has_attr(self, index: int, name: str) -> bool:
        attrs = self._node(index).get("attrs")
        return isinstance(attrs, dict) and name in attrs

    def attr_names(self, index: int) -> list[str]:
        """Return the attribute names of a node."""
        attrs = self._node(index).get("attrs")
        return list(attrs) if isinstance(attrs, dict) else []

    def child(self, index: int, name: str) -> int:
        """Return the index of the node that an attribute refers to."""
        return self.index(self.attr(index, name), f"attribute {name!r} of node {index}")

    def integer(self, index: int, name: str) -> int:
        """Return the number in an attribute."""
        text = self.attr(index, name)
        try:
            return int(text)
        except ValueError as error:
            raise self.fail(index, f"attribute {name!r} is {text!r}, not an integer.") from error

    def items(self, index: int) -> list[int]:
        """Return the indices of the elements of an Array, or of the values of a Map."""
        data = self._node(index).get("data", [])
        if self.key(index) not in ("Array", "Map") or not isinstance(data, list):
            raise self.fail(index, f"it is {self.key(index) or 'null'}, not an Array or Map.")
        return [self.index(item, f"an element of node {index}") for item in data]

    def keys(self, index: int) -> list[str]:
        """Return the keys of a Map from text."""
        keys = self._node(index).get("keys", [])
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise self.fail(index, "the keys of a Map must be texts.")
        if len(keys) != len(self.items(index)):
            raise self.fail(index, "a Map needs one value for each key.")
        return keys

    def text(self, index: int) -> str:
        """Return the text of a String, an operator or a boxed number."""
        value = self._node(index).get("repr_str", "")
        if not isinstance(value, str):
            raise self.fail(index, "repr_str must be a text.")
        return value

    def tensor(self, index: int, name: str = "data") -> np.ndarray:
        """Return the array that an attribute of a relay.Constant refers to."""
        number = self.integer(index, name)
        if not 0 <= number < len(self._tensors):
            raise self.fail(index, f"there is no tensor {number} of {len(self._tensors)}.")
        if number not in self._decoded:
            try:
                data = base64.b64decode(self._tensors[number], validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise self.fail(index, f"tensor {number} is not base64: {error}.") from error
            self._decoded[number] = decode_tensor(data, f"{self.what}, tensor {number}")
        return self._decoded[number]

    def value(self, index: int, depth: int = 0) -> Any:
        """Return a number, text, tuple or None: the values that attributes and metadata can hold.

        None stands for anything else (a device, a target, a symbolic dimension).
        """
        key = self.key(index)
        try:
            if key in ("IntImm", "FloatImm"):
                text = self.attr(index, "value")
                return int(text) if key == "IntImm" else float(text)
            if key in ("runtime.BoxInt", "runtime.BoxBool"):
                return int(self.text(index))
            if key == "runtime.BoxFloat":
                return float(self.text(index))
        except ValueError as error:
            raise self.fail(index, f"{key} does not hold a number: {error}.") from error
        if key in ("runtime.String", "StringImm"):
            return self.text(index) if key == "runtime.String" else self.attr(index, "value")
        if key == "Array":
            if depth >= MAX_VALUE_DEPTH:
                raise self.fail(index, f"arrays are nested deeper than {MAX_VALUE_DEPTH}.")
            return tuple(self.value(item, depth + 1) for item in self.items(index))
        return None


class Metadata:
    """The metadata section of a text: the values of `meta[key][index]`.

    Args:
        text: The section after its heading. None for a text without one.
    """

    def __init__(self, text: str | None) -> None:
        self._graph = None if text is None else NodeGraph(text, "The metadata section")

    def node(self, key: str, position: int) -> tuple[NodeGraph, int]:
        """Return the graph and the index of a node in it.

        Raises:
            ModelError: there is no section, or no such entry.
        """
        if self._graph is None:
            raise ModelError(
                f"meta[{key}][{position}] stands for a value that this text does not hold: it was "
                "printed without its metadata section. Print it with astext(show_meta_data=True), "
                "or save the module with tvm.ir.save_json.",
                code="RQ502",
            )
        graph = self._graph
        entries: dict[str, int] = {}
        if graph.key(graph.root) == "Map":
            keys: Sequence[str] = graph.keys(graph.root)
            entries = dict(zip(keys, graph.items(graph.root), strict=True))
        if key not in entries:
            raise ModelError(
                f"The metadata section has no {key!r}, only: {', '.join(entries) or 'nothing'}.",
                code="RQ502",
            )
        nodes = graph.items(entries[key])
        if not 0 <= position < len(nodes):
            raise ModelError(
                f"The metadata section has {format_count(len(nodes), 'entry')} for {key!r}, none "
                f"of them {position}.",
                code="RQ502",
            )
        return graph, nodes[position]
