"""Annotation: prepared float module + backend + configuration -> plan."""

from relayquant.stages.annotation.annotator import annotate
from relayquant.stages.annotation.bias import add_biases
from relayquant.stages.annotation.validate import review_plan

__all__ = ["add_biases", "annotate", "review_plan"]
