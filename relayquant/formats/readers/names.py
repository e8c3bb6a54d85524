"""Last step of every reader: exact value names, and a record of the source node of each value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.function import SOURCES_ATTR

#: Prefix of values that a reader named, until `name_values` removes it. Names that a frontend
#: invents ("lv1") have no colon, so a tensor of the model may also be called "lv1".
MARK = "value:"


@dataclass(frozen=True)
class SourceNode:
    """A node of the source model: its name (may be ""), its operator type, and the names of the
    constants it reads.

    Constants of the highest rank come first: a weight before its bias.
    """

    node: str
    op: str
    constants: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Convert to the form in `SOURCES_ATTR`."""
        row: dict[str, Any] = {"node": self.node, "op": self.op}
        return row | {"constants": list(self.constants)} if self.constants else row


def name_values(mod: tvm.IRModule, sources: Mapping[str, SourceNode]) -> tvm.IRModule:
    """Remove `MARK` from names, name the values that a frontend left unnamed, and write the
    attribute `relayquant.sources`.

    Values without `MARK` are helpers that the frontend emitted between two named values:
        lv = f(x); value:conv1 = lv             ->  conv1 = f(x)
        lv = f(x); value:conv1 = g(lv)          ->  conv1.1 = f(x); conv1 = g(conv1.1)
    A helper gets its name from a value that reads it. Unused helpers are removed.
    """
    editor = Editor(mod)
    for var in editor.order():
        # emit_output binds the result to an extra value: gv = value:y; return gv.
        # A match_cast of a value stays: it defines the sizes that are known at run time only.
        is_alias = isinstance(editor.values[var], relax.Var) and not editor.is_cast(var)
        if is_alias and not var.name.startswith(MARK):
            editor.replace(var, editor.values[var])
    exact: dict[relax.Var, str] = {
        var: var.name.removeprefix(MARK) for var in editor.values if var.name.startswith(MARK)
    }
    for var, name in list(exact.items()):
        value = editor.values[var]
        if isinstance(value, relax.Var) and value in editor.values and value not in exact:
            editor.replace(var, value)
            exact[value] = name
            del exact[var]
    owners = dict(exact)
    for var in reversed(editor.order()):
        if var not in owners:
            # A helper's reader comes later and has an owner by now. main may also return a helper.
            owners[var] = next((owners[user] for user in editor.users(var)), "value")
    taken = {*exact.values(), *sources, *(param.name for param in editor.params)}
    record: dict[str, dict[str, Any]] = {}
    for var in editor.order():
        owner = owners[var]
        name, count = exact.get(var), 0
        while name is None:
            count += 1
            candidate = f"{owner}.{count}"
            name = None if candidate in taken else candidate
        taken.add(name)
        editor.names[var] = name
        if owner in sources:
            record[name] = sources[owner].to_dict()
    return editor.build({SOURCES_ATTR: json.dumps(record)})
