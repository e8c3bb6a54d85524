"""A finding of lint."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from relayquant.base.arguments import check_fields


class Severity(enum.Enum):
    """Severity of a finding."""

    ERROR = "error"  #: calibration would refuse the data
    WARNING = "warning"  #: the quantized model is likely to be bad
    INFO = "info"  #: worth knowing


@check_fields
@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    Attributes:
        severity: See `Severity`.
        check: Name of the check: "data", "constant", "outliers", "scale", "layout", "channel",
            "order", "normalization", "labels", "batch", "samples", "growth", "duplicates".
        where: Name of the input, "" for the whole data set.
        what: What was seen.
        advice: What to do.
    """

    severity: Severity
    check: str
    where: str
    what: str
    advice: str

    def __str__(self) -> str:
        place = f"input {self.where!r}: " if self.where else ""
        return f"{self.severity.value}: {place}{self.what} {self.advice}"
