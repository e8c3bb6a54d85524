"""ONNX reader: computes the size of a model with its functions expanded.

A function may call others, so a few bytes can stand for any number of operators: 28 functions that
each call the next one twice are 2^28. The size is computed before anything is expanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx

from relayquant.errors import ModelError

#: limits: operators of a model after the expansion, and depth of calls
MAX_NODES, MAX_DEPTH = 200_000, 200

#: (domain, name, overload)
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Size:
    """Size of a part of a model after the expansion."""

    nodes: int
    bytes: int
    depth: int


def check_expansion(model: onnx.ModelProto, max_bytes: int) -> None:
    """Check that the functions of a model can be expanded and that the result is not too large.

    Raises:
        ModelError: a function calls itself, directly or through others, or the expanded model has
            more than `MAX_NODES` operators or `max_bytes` bytes. Names the function.
    """
    functions = {
        (function.domain, function.name, getattr(function, "overload", "")): function
        for function in model.functions
    }
    sizes: dict[Key, Size] = {}
    for key in sort_by_calls(functions):
        sizes[key] = measure(functions[key].node, sizes)
        check_size(sizes[key], f"Function {key[1]!r}", max_bytes)
    check_size(measure(model.graph.node, sizes), "The model", max_bytes)


def sort_by_calls(functions: dict[Key, onnx.FunctionProto]) -> Iterator[Key]:
    """Sort the functions so that each comes after the functions it calls. ModelError if there is no
    such order.

    Not recursive: a chain of calls may be as long as the file allows.
    """
    calls = {
        key: [call for node in list_nodes(function.node) if (call := find_key(node)) in functions]
        for key, function in functions.items()
    }
    done: set[Key] = set()
    for start in functions:
        path = {start: iter(calls[start])} if start not in done else {}
        while path:
            last = next(reversed(path))
            call = next(path[last], None)
            if call is None:
                del path[last]
                done.add(last)
                yield last
            elif call in path:
                raise ModelError(
                    f"Function {call[1]!r} of the model calls itself, directly or through others. "
                    "ONNX allows no recursion.",
                    code="RQ502",
                )
            elif call not in done:
                path[call] = iter(calls[call])


def measure(nodes: Iterable[onnx.NodeProto], sizes: dict[Key, Size]) -> Size:
    """Return the size of nodes. The size of every function they call must be known."""
    count = size = depth = 0
    for node in list_nodes(nodes):
        called = sizes.get(find_key(node))
        count += 1 if called is None else called.nodes
        size += node.ByteSize() if called is None else called.bytes
        depth = max(depth, 0 if called is None else called.depth + 1)
    return Size(count, size, depth)


def check_size(size: Size, what: str, max_bytes: int) -> None:
    """Raise ModelError if the expanded `what` is too large."""
    for name, found, most in (
        ("operators", size.nodes, MAX_NODES),
        ("bytes", size.bytes, max_bytes),
        ("levels of calls", size.depth, MAX_DEPTH),
    ):
        if found > most:
            raise ModelError(
                f"{what} has {found} {name} once the functions that it calls are expanded; "
                f"allowed: {most}.",
                code="RQ202",
            )


def list_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """List all nodes, including branches and loop bodies."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                waiting.extend(inner.node)


def find_key(node: onnx.NodeProto) -> Key:
    """Return the key of the function that a node calls. None if it calls none."""
    return node.domain, node.op_type, getattr(node, "overload", "")
