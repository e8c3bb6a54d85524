"""QNN module -> scheduled TIR for a target."""

from relayquant.lower.passes import make_pipeline
from relayquant.lower.target import host_config, resolve_target

__all__ = ["host_config", "make_pipeline", "resolve_target"]
