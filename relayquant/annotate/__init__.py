"""Float module + backend + configuration -> plan."""

from relayquant.annotate.annotator import annotate
from relayquant.annotate.review import review_plan

__all__ = ["annotate", "review_plan"]
