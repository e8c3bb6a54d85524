"""What a search tries and what it finds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm

from relayquant.config import QConfigMapping
from relayquant.flow.refine.prepared_edit import describe_mapping

#: what an operator is put back to
FLOAT, WIDE = "float32", "int16"


@dataclass(frozen=True)
class Choice:
    """What an integer module is built with.

    Attributes:
        reverted: Operators that are put back.
        dtype: What they are put back to.
        widened: Operators on integers whose weights of few bits have all bits instead.
    """

    reverted: tuple[str, ...] = ()
    dtype: str = FLOAT
    widened: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found.

    Attributes:
        mod: The quantized module.
        mapping: The QConfigMapping that makes it, for `quantize(..., qconfig_mapping=...)`.
        reverted: Names of the operators that were put back, the most sensitive first.
        dtype: What they were put back to: "float32", or where that was enough "int16".
        widened: Names of the operators on integers whose weights of few bits have 8 instead.
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
    widened: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """One choice of operators that are put back, and the metric of its integer module."""

    choice: Choice
    score: float
    is_met: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Higher is better: within the bound with few operators in float, or changed at all; else
        near it.
        """
        if not self.is_met:
            return (0, self.score)
        count = len(self.choice.reverted)
        in_float = count if self.choice.dtype == FLOAT else 0
        return (1, -in_float, -count - len(self.choice.widened))


def describe_best(trial: Trial, mapping: QConfigMapping) -> dict[str, Any]:
    """The best trial for the file: what `QConfigMapping.from_dict` reads is under "mapping"; None
    where the mapping holds a callable.
    """
    return {
        "reverted": list(trial.choice.reverted),
        "dtype": trial.choice.dtype,
        "widened": list(trial.choice.widened),
        "score": trial.score,
        "is_met": trial.is_met,
        "mapping": describe_mapping(mapping),
    }
