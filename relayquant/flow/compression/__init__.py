"""Weight compression: float module -> the same module with weights in few bits, in groups."""

from relayquant.flow.compression.compress import compress_weights

__all__ = ["compress_weights"]
