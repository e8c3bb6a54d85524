"""Float module + backend + configuration -> plan."""

from relayquant.stages.annotation.annotator import annotate
from relayquant.stages.annotation.validate import review_plan

__all__ = ["annotate", "review_plan"]
