"""Preparation: float module of any frontend -> float module in canonical form."""

from relayquant.stages.preparation.canonical import PHASES, prepare_module

__all__ = ["PHASES", "prepare_module"]
