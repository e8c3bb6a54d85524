"""Second stage: one canonical form of the float module, whatever frontend it came from."""

from relayquant.stages.preparation.canonical import PHASES, prepare_module

__all__ = ["PHASES", "prepare_module"]
