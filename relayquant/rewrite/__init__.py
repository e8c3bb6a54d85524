"""Rewriting of Relax functions: a read-only graph view, patterns with named parts, one binding
walker, rules.

Knows Relax and nothing of quantization.
"""

from relayquant.rewrite.attributes import check_attributes
from relayquant.rewrite.graph import Graph
from relayquant.rewrite.pattern import Match, Matcher, Pattern
from relayquant.rewrite.rule import Rule, Skip, apply_rules
from relayquant.rewrite.walker import Emitter, rewrite_main

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
    "rewrite_main",
]
