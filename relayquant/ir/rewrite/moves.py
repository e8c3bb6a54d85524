"""Operators that only move elements, as lists: what rules of every stage look through."""

from __future__ import annotations

#: same elements in the same order, other shape
RESHAPES = (
    "relax.reshape",
    "relax.flatten",
    "relax.nn.batch_flatten",
    "relax.squeeze",
    "relax.expand_dims",
)
#: same elements, each once
MOVES = (*RESHAPES, "relax.permute_dims")
