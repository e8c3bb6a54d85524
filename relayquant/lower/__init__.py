"""QNN module -> scheduled TIR for a target."""

from relayquant.lower.eager import EagerModule
from relayquant.lower.passes import make_pipeline
from relayquant.lower.target import host_config, resolve_target

__all__ = ["EagerModule", "host_config", "make_pipeline", "resolve_target"]
