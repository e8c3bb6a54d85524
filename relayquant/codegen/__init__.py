"""QNN module -> scheduled TIR for a target."""

from relayquant.codegen.passes import make_pipeline
from relayquant.codegen.tuning import open_tuner

__all__ = ["make_pipeline", "open_tuner"]
