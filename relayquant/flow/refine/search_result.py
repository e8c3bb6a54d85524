"""What a search tries and what it finds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm

from relayquant.config import QConfigMapping
from relayquant.flow.refine.prepared_edit import describe_mapping

#: what an operator is put back to
FLOAT, WIDE, WIDER_WEIGHTS = "float32", "int16", "int8"


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found.

    Attributes:
        mod: The quantized module.
        mapping: The QConfigMapping that makes it, for `quantize(..., qconfig_mapping=...)`.
        reverted: Names of the operators that were put back, the most sensitive first.
        dtype: What they were put back to: "float32", or where that was enough "int16", or "int8",
            if only their weights of few bits have more.
        score: The metric of `mod`.
        float_score: The metric of the float model against itself.
        is_met: Whether score >= float_score - max_drop.
        trials: How many modules were built and measured.
    """

    mod: tvm.IRModule = field(repr=False)
    mapping: QConfigMapping = field(repr=False)
    reverted: tuple[str, ...]
    score: float
    float_score: float
    is_met: bool
    trials: int
    dtype: str = FLOAT


@dataclass(frozen=True)
class Trial:
    """One choice of operators that are put back, and the metric of its integer module."""

    names: tuple[str, ...]
    dtype: str
    score: float
    is_met: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Higher is better: within the bound with few operators in float, or put back at all; else
        near it.
        """
        if not self.is_met:
            return (0, self.score)
        return (1, -len(self.names) if self.dtype == FLOAT else 0, -len(self.names))


def describe_best(trial: Trial, mapping: QConfigMapping) -> dict[str, Any]:
    """The best trial for the file: what `QConfigMapping.from_dict` reads is under "mapping"; None
    where the mapping holds a callable.
    """
    return {
        "reverted": list(trial.names),
        "dtype": trial.dtype,
        "score": trial.score,
        "is_met": trial.is_met,
        "mapping": describe_mapping(mapping),
    }
