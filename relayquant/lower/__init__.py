"""QNN module -> scheduled TIR for a target."""

from relayquant.lower.eager import EagerModule, Recording, Replay
from relayquant.lower.passes import make_pipeline
from relayquant.lower.target import host_config, resolve_target

__all__ = ["EagerModule", "Recording", "Replay", "host_config", "make_pipeline", "resolve_target"]
