"""QNN module -> scheduled TIR for a target."""

from relayquant.lower.passes import make_pipeline

__all__ = ["make_pipeline"]
