"""Float module + backend + configuration -> plan."""

from relayquant.annotate.annotator import annotate

__all__ = ["annotate"]
