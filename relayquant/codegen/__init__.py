"""QNN module -> scheduled TIR for a target."""

from relayquant.codegen.passes import make_pipeline

__all__ = ["make_pipeline"]
