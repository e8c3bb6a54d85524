"""A compiled language model -> text."""

from relayquant.flow.generation.generator import Generator, Piece, StopReason
from relayquant.flow.generation.sampling import TokenSampling

__all__ = ["Generator", "Piece", "StopReason", "TokenSampling"]
