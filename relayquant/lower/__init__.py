"""QNN module -> scheduled TIR for a target."""

from relayquant.lower.passes import make_pipeline
from relayquant.lower.target import resolve_target

__all__ = ["make_pipeline", "resolve_target"]
