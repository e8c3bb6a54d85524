"""Annotation: prepared float module + backend + configuration -> plan."""

from relayquant.stages.annotation.annotator import annotate, plan_without
from relayquant.stages.annotation.bias import add_biases
from relayquant.stages.annotation.validate import review_plan

__all__ = ["add_biases", "annotate", "plan_without", "review_plan"]
