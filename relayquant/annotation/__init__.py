"""Float module + backend + configuration -> plan."""

from relayquant.annotation.annotator import annotate
from relayquant.annotation.review import review_plan

__all__ = ["annotate", "review_plan"]
