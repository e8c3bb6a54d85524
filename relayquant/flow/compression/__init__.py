"""Weights alone in few bits: float modules of any functions -> the same with grouped weights."""

from relayquant.flow.compression.compress import compress_weights

__all__ = ["compress_weights"]
