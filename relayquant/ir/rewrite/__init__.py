"""Rewriting of Relax functions: a read-only graph view, patterns with named parts, one binding
walker, rules.

It depends on Relax only, not on quantization.
"""

from relayquant.ir.rewrite.attributes import check_attributes
from relayquant.ir.rewrite.graph import Graph
from relayquant.ir.rewrite.pattern import Match, Matcher, Pattern
from relayquant.ir.rewrite.rule import Rule, Skip, apply_rules
from relayquant.ir.rewrite.walker import Emitter, expose_values, rewrite_main

__all__ = [
    "Emitter",
    "Graph",
    "Match",
    "Matcher",
    "Pattern",
    "Rule",
    "Skip",
    "apply_rules",
    "check_attributes",
    "expose_values",
    "rewrite_main",
]
