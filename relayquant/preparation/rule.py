"""What a canonicalization rule is, and the loop that applies a list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import Call, Op

from relayquant.rewrite.editor import Editor

#: Kinds of values that are no operator call.
ALIAS, PROJECTION, CAST = "alias", "projection", "match_cast"


@dataclass(frozen=True)
class CanonicalRule:
    """One local rewrite, `before -> after` in the docstring of `edit`.

    `edit(editor, var)` is called for values of the kinds in `kinds` (operator names, or ALIAS,
    PROJECTION; empty for every operator), and returns whether it changed anything. A rule that
    declines must leave all as it was.
    """

    edit: Callable[[Editor, relax.Var], bool]
    kinds: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.edit.__name__


def kind_of(editor: Editor, var: relax.Var) -> str:
    """Operator name of the value of `var`, or ALIAS, PROJECTION, CAST; "" for anything else."""
    if editor.is_cast(var):
        return CAST
    value = editor.values[var]
    if isinstance(value, Call):
        return value.op.name if isinstance(value.op, Op) else ""
    if isinstance(value, relax.TupleGetItem):
        return PROJECTION
    return ALIAS if isinstance(value, relax.Var) else ""


def apply_phase(editor: Editor, rules: Sequence[CanonicalRule], *, max_edits: int = 100) -> None:
    """Apply rules in topological order until none fires; the first of `rules` that fires at a
    value wins.

    Raises:
        RuntimeError: a value was edited `max_edits` times in a row, so that two rules undo one
        another.
    """
    changed = True
    while changed:
        changed = False
        for var in editor.order():
            fired: list[str] = []
            while var in editor.values:
                rule = _fire(editor, var, rules)
                if rule is None:
                    break
                changed = True
                fired.append(rule.name)
                if len(fired) > max_edits:
                    raise RuntimeError(
                        f"Canonicalization does not settle at {editor.names[var]!r}: "
                        f"{sorted(set(fired[-4:]))} undo one another."
                    )


def _fire(editor: Editor, var: relax.Var, rules: Sequence[CanonicalRule]) -> CanonicalRule | None:
    kind = kind_of(editor, var)
    for rule in rules:
        if rule.kinds and kind not in rule.kinds:
            continue
        if not rule.kinds and not kind.startswith("relax."):
            continue
        if rule.edit(editor, var):
            return rule
    return None


def forward(editor: Editor, var: relax.Var, by: relax.Expr) -> bool:
    """Let the equal `by` stand for `var`; a name that main returns stays. Always changes something.

    y = identity(x), y returned and x not: x takes the name y, unless only x is a name of the
    source model (a block builder's gv = x names nothing).
    y = identity(x), both returned, or x a parameter or constant: y = x.
    """
    if not editor.is_output(var):
        editor.replace(var, by)
        return True
    if isinstance(by, relax.Var) and by in editor.values and not editor.is_output(by):
        name, source = editor.names[var], editor.names[by]
        is_alias = kind_of(editor, var) == ALIAS
        editor.replace(var, by)
        if name in editor.source_names or (source not in editor.source_names and not is_alias):
            editor.names[by] = name
            editor.origins[name] = source
        return True
    return editor.alias(var, by)
