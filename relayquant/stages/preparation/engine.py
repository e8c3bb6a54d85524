"""Canonicalization engine: the kinds of values that rules are tried at, and the loop that
applies a list of rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Call, GenericConst, Op

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.rule import Rule, fire_first, select_rules

#: edits of one value in a row that two rules may make before they are said to undo each other
MOST_EDITS = 100
#: kinds of values that are not operator calls
ALIAS, PROJECTION, CAST = "alias", "projection", "match_cast"

#: `rewrite(editor, var)` returns the value of `var` in canonical form. It may define new values
#: that the result is computed from.
CanonicalRule = Rule[Editor, relax.Var, relax.Expr]


def kind_of(editor: Editor, var: relax.Var) -> str:
    """Return the operator name of the value of `var`, or ALIAS, PROJECTION, CAST; "" for
    anything else.
    """
    if editor.is_cast(var):
        return CAST
    value = editor.values[var]
    if isinstance(value, Call):
        return value.op.name if isinstance(value.op, Op) else ""
    if isinstance(value, relax.TupleGetItem):
        return PROJECTION
    return ALIAS if isinstance(value, relax.Var) else ""


def apply_phase(editor: Editor, rules: Sequence[CanonicalRule]) -> None:
    """Apply rules in topological order until none fires. At each value the first of `rules` that
    fires wins.

    Raises:
        RuntimeError: a value was edited `MOST_EDITS` times in a row, so two rules undo each other.
    """
    of_kind: dict[str, list[CanonicalRule]] = {}
    changed = True
    while changed:
        changed = False
        for var in editor.order():
            fired: list[str] = []
            while var in editor.values:
                kind = kind_of(editor, var)
                if kind not in of_kind:
                    of_kind[kind] = select_rules(rules, kind)
                tried = ((rule, var) for rule in of_kind[kind])
                found = fire_first(tried, editor, editor.names[var])
                if found is None:
                    break
                rule, value = found
                put(editor, var, value)
                changed = True
                fired.append(rule.name)
                if len(fired) > MOST_EDITS:
                    raise RuntimeError(
                        f"Canonicalization does not settle at {editor.names[var]!r}: "
                        f"{sorted(set(fired[-4:]))} undo one another."
                    )


def put(editor: Editor, var: relax.Var, value: relax.Expr) -> None:
    """Replace the value of `var` by the equal `value`."""
    if isinstance(value, relax.Var | GenericConst):
        forward(editor, var, value)
    elif isinstance(value, relax.ShapeExpr):
        editor.replace(var, value)
    else:
        editor.redefine(var, value)


def forward(editor: Editor, var: relax.Var, by: relax.Expr) -> None:
    """Replace `var` by the equal `by`. A name that main returns stays.

    For y = identity(x) there are two cases:

    - y is returned and x is not: x takes the name y, unless only x is a name of the source model (a
      block builder's gv = x names nothing).
    - Both are returned, or x is a parameter or constant: y = x.
    """
    if not editor.is_output(var):
        editor.replace(var, by)
    elif isinstance(by, relax.Var) and by in editor.values and not editor.is_output(by):
        name, source = editor.names[var], editor.names[by]
        is_alias = kind_of(editor, var) == ALIAS
        editor.replace(var, by)
        if name in editor.source_names or (source not in editor.source_names and not is_alias):
            editor.names[by] = name
            editor.origins[name] = source
    else:
        editor.alias(var, by)
