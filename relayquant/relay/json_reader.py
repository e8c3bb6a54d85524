"""Relay reader: the JSON of `tvm.ir.save_json` (TVM 0.7 to 0.19) -> `relay.syntax`.

A JSON file holds a graph with shared nodes. Each value gets the number that TVM's printer would
give it, so a module has the same names when it is read from its text or its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from relayquant.errors import ModelError
from relayquant.ir.rewrite.function import find_free_name
from relayquant.relay import syntax
from relayquant.relay.attributes import Attrs, read_json_attrs
from relayquant.relay.metadata import NodeGraph
from relayquant.relay.syntax import Location
from relayquant.relay.text_reader import MAX_DIM

#: Deepest nesting of functions, branches and types.
MAX_DEPTH = 64

#: Largest average number of reads per node. A node inside several branches or functions is read for
#: each of them.
MAX_COPIES = 4

#: Nodes that are part of a value without a number of their own.
_INLINE = ("relay.Var", "relay.Constant", "GlobalVar", "relay.GlobalVar")


def is_relay_json(text: str) -> bool:
    """Return whether a text is the JSON of a Relay module (TVM before 0.20).

    Relax modules use "root_index" and "type" instead of "root" and "type_key".
    """
    return re.match(r'\s*\{\s*"root"\s*:\s*\d', text) is not None


def parse_json(text: str, operators: Mapping[str, Attrs]) -> tuple[syntax.Module, str]:
    """Read the module in a JSON text, and the version of TVM that wrote it ("" if the text does not
    contain it).

    Args:
        operators: Attributes of the known operators. Attributes of other operators are left out.

    Raises:
        ModelError: the text is not a Relay module. Names the node.
    """
    graph = NodeGraph(text, "The Relay JSON")
    key = graph.key(graph.root)
    if key == "relay.Function":
        main = _FunctionReader(graph, operators).function(graph.root)
        return syntax.Module({"main": main}), graph.version
    if key != "IRModule":
        raise ModelError(
            f"The Relay JSON holds {key or 'null'}, not a module or a function.", code="RQ502"
        )
    entries = graph.items(graph.child(graph.root, "functions"))
    functions: dict[str, syntax.Function] = {}
    for name, value in zip(entries[::2], entries[1::2], strict=False):
        if graph.key(value) != "relay.Function":
            raise graph.fail(value, f"{graph.key(value)} is not a Relay function.")
        functions[_global_name(graph, name)] = _FunctionReader(graph, operators).function(value)
    return syntax.Module(functions), graph.version


def _global_name(graph: NodeGraph, node: int) -> str:
    return graph.text(graph.child(node, "name_hint"))


class _FunctionReader:
    """Reads one function of the module, with its inner functions."""

    def __init__(self, graph: NodeGraph, operators: Mapping[str, Attrs]) -> None:
        self.graph = graph
        self.operators = operators
        self.count = 0  #: last number that was assigned
        self.made = 0  #: number of expressions read
        self.names: dict[int, str] = {}  #: node of a variable -> its name here
        self.taken: set[str] = set()

    def function(
        self, node: int, outer: dict[int, syntax.Expr] | None = None, depth: int = 0
    ) -> syntax.Function:
        graph = self.graph
        params = tuple(self.param(each) for each in graph.items(graph.child(node, "params")))
        scope = dict(outer or {})
        for each, param in zip(graph.items(graph.child(node, "params")), params, strict=True):
            scope[each] = syntax.Ref(param.name, param.where)
        return syntax.Function(
            params,
            self.block(graph.child(node, "body"), scope, depth),
            self.type(graph.child(node, "ret_type")),
            self.function_attrs(node),
            Location(node=node),
        )

    def function_attrs(self, node: int) -> dict[str, Any]:
        graph = self.graph
        attrs = graph.child(node, "attrs")
        if not graph.key(attrs) or not graph.has_attr(attrs, "__dict__"):
            return {}
        entries = graph.child(attrs, "__dict__")
        values = [graph.value(item) for item in graph.items(entries)]
        return dict(zip(graph.keys(entries), values, strict=True))

    def param(self, node: int) -> syntax.Param:
        if self.graph.key(node) != "relay.Var":
            raise self.graph.fail(node, f"{self.graph.key(node)} is not a variable.")
        kind = self.type(self.graph.child(node, "type_annotation"))
        return syntax.Param(self.name(node), kind, Location(node=node))

    def name(self, node: int) -> str:
        """Return the variable's name, or "x1" if another variable is already called "x"."""
        if node not in self.names:
            graph = self.graph
            hint = graph.text(graph.child(graph.child(node, "vid"), "name_hint")) or "v"
            name = find_free_name(hint, self.taken, "")
            self.taken.add(name)
            self.names[node] = name
        return self.names[node]

    # -- values ------------------------------------------------------------------------------------

    def block(self, node: int, scope: dict[int, syntax.Expr], depth: int = 0) -> syntax.Block:
        """Return the statements that a value needs, and the value."""
        if depth > MAX_DEPTH:
            raise self.graph.fail(node, f"functions are nested deeper than {MAX_DEPTH}.")
        graph = self.graph
        statements: list[syntax.Statement] = []
        lets: set[int] = set()
        while graph.key(node) == "relay.Let":
            if node in lets:
                raise graph.fail(node, "it contains itself.")
            lets.add(node)
            value = self.reach(graph.child(node, "value"), scope, statements, depth)
            var = self.param(graph.child(node, "var"))
            statements.append(syntax.Bind(var.name, value, True, var.type, Location(node=node)))
            scope[graph.child(node, "var")] = syntax.Ref(var.name, var.where)
            node = graph.child(node, "body")
        result = self.reach(node, scope, statements, depth)
        return syntax.Block(tuple(statements), result, Location(node=node))

    def reach(
        self,
        root: int,
        scope: dict[int, syntax.Expr],
        statements: list[syntax.Statement],
        depth: int,
    ) -> syntax.Expr:
        """Return the expression of `root`. Expressions that it uses are added to `statements`, once
        each.

        The order is the one of TVM's printer: first the inner parts of a node, then the node.
        """
        waiting, opened, closed = [root], set[int](), set[int]()
        while waiting:
            node = waiting[-1]
            if node in closed or node in scope:
                waiting.pop()
            elif node in opened:
                for part in self.parts(node):
                    if part not in scope:
                        scope[part] = self.bind(part, scope, statements, depth)
                closed.add(node)
                waiting.pop()
            else:
                opened.add(node)
                parts = self.parts(node)
                circle = (opened - closed).intersection(parts)
                if circle:
                    raise self.graph.fail(min(circle), "it contains itself.")
                waiting += [part for part in reversed(parts) if part not in scope]
        if root in scope or self.graph.key(root) in _INLINE:
            return scope[root] if root in scope else self.bind(root, scope, statements, depth)
        return self.make(root, scope, depth)

    def bind(
        self,
        node: int,
        scope: dict[int, syntax.Expr],
        statements: list[syntax.Statement],
        depth: int,
    ) -> syntax.Expr:
        where = Location(node=node)
        if self.graph.key(node) == "relay.Var":
            statements.append(syntax.FreeVar(self.param(node)))
            return syntax.Ref(self.name(node), where)
        value = self.make(node, scope, depth)
        if self.graph.key(node) in _INLINE:
            return value
        name = str(self.count)
        self.count += 1
        statements.append(syntax.Bind(name, value, where=where))
        return syntax.Ref(name, where)

    def parts(self, node: int) -> list[int]:
        """Return the nodes that a value uses, in the order of TVM's printer."""
        graph = self.graph
        key = graph.key(node)
        if key == "relay.Call":
            callee = graph.child(node, "op")
            args = graph.items(graph.child(node, "args"))
            return args if graph.key(callee) == "Op" else [*args, callee]
        if key == "relay.Tuple":
            return graph.items(graph.child(node, "fields"))
        if key == "relay.TupleGetItem":
            return [graph.child(node, "tuple_value")]
        if key == "relay.If":
            return [graph.child(node, "cond")]
        return []

    def make(self, node: int, scope: dict[int, syntax.Expr], depth: int) -> syntax.Expr:
        graph, where = self.graph, Location(node=node)
        key = graph.key(node)
        self.made += 1
        if self.made > MAX_COPIES * len(graph) + 1000:
            raise graph.fail(node, "branches and functions share so much that it cannot be read.")
        parts = [scope[part] for part in self.parts(node)]
        if key == "relay.Call":
            callee = graph.child(node, "op")
            if graph.key(callee) != "Op":
                return syntax.FunctionCall(parts[-1], tuple(parts[:-1]), where)
            name, attrs = graph.text(callee), graph.child(node, "attrs")
            known = self.operators.get(name)
            written = read_json_attrs(known, graph, attrs) if known and graph.key(attrs) else {}
            return syntax.OpCall(name, tuple(parts), written, where)
        if key == "relay.Tuple":
            return syntax.TupleExpr(tuple(parts), where)
        if key == "relay.TupleGetItem":
            return syntax.GetItem(parts[0], graph.integer(node, "index"), where)
        if key == "relay.Constant":
            return syntax.Constant(graph.tensor(node), where)
        if key.endswith("GlobalVar"):
            return syntax.GlobalRef(_global_name(graph, node), where)
        if key == "relay.If":
            branches = [
                self.block(graph.child(node, name), dict(scope), depth + 1)
                for name in ("true_branch", "false_branch")
            ]
            return syntax.If(parts[0], branches[0], branches[1], where)
        if key == "relay.Function":
            return self.function(node, scope, depth + 1)
        if key == "relay.Let":
            return self.block(node, dict(scope), depth + 1)
        # Match, Ref and other nodes without a counterpart are reported with all unsupported
        # operators.
        return syntax.OpCall(key or "null", (), {}, where)

    # -- types -------------------------------------------------------------------------------------

    def type(self, node: int, depth: int = 0) -> syntax.Type | None:
        graph = self.graph
        key = graph.key(node)
        if not key:
            return None
        if depth > MAX_DEPTH:
            raise graph.fail(node, f"types are nested deeper than {MAX_DEPTH}.")
        if key == "relay.TensorType":
            shape = tuple(self.dim(item) for item in graph.items(graph.child(node, "shape")))
            return syntax.TensorType(shape, graph.attr(node, "dtype"))
        if key == "TupleType":
            fields = [
                self.type(item, depth + 1) for item in graph.items(graph.child(node, "fields"))
            ]
            return syntax.TupleType(tuple(each or syntax.OpaqueType("?") for each in fields))
        return syntax.OpaqueType(key)

    def dim(self, node: int) -> int | None:
        value = self.graph.value(node)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value <= MAX_DIM:
            raise self.graph.fail(node, f"a dimension is {value}; allowed: 0 to {MAX_DIM}.")
        return value
