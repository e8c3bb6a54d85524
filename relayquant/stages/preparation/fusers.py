"""Second stage: rules of the user's, float to float, on the canonical module.

What a backend wants to see as one operator, and no rule of this package makes one: they stand
between `prepare_module` and the plan (`BackendConfig.with_fuser`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import tvm
from tvm import relax

from relayquant.errors import ConfigError
from relayquant.ir.ops.callbacks import call_user, check_value
from relayquant.ir.rewrite import Emitter, Match, Rule, Skip, apply_rules
from relayquant.stages.preparation.canonical import prepare_module

Fuser = Rule[Emitter, Match, relax.Expr]


def apply_fusers(
    mod: tvm.IRModule, fusers: Sequence[Fuser], keep: Collection[str] = ()
) -> tvm.IRModule:
    """The canonical module in which no fuser fires any more, canonical again; `keep` is as of
    `prepare_module`.

    Raises:
        ConfigError: a fuser failed, returned what cannot stand in the place of what it matched, or
            fires for ever.
    """
    if not fusers:
        return mod
    try:
        fused = apply_rules(mod, [guard_fuser(fuser) for fuser in fusers])
    except RuntimeError as error:
        raise ConfigError(f"BackendConfig.fusers: {error}", code="RQ106") from error
    return prepare_module(fused, keep=keep)


def guard_fuser(fuser: Fuser) -> Fuser:
    """The same rule; what goes wrong in it names it, and the operator."""

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        where = f"Operator {match.name!r}, fuser {fuser.name!r}"
        value = call_user(where, lambda: fuser.rewrite(emitter, match))
        if isinstance(value, Skip):
            return value
        return check_value(emitter, value, match.root, where, "a Skip(reason), or an expression")

    return replace(fuser, rewrite=rewrite)
