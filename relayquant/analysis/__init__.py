"""Measurements on modules: two modules and data in, numbers out."""

from relayquant.analysis.accumulators import (
    AccumulatorReport,
    AccumulatorRow,
    fit_scales,
    measure_accumulators,
)
from relayquant.analysis.compare import CompareReport, CompareRow, compare_modules
from relayquant.analysis.verify import ValueDifference, Verifier, VerifyReport

__all__ = [
    "AccumulatorReport",
    "AccumulatorRow",
    "CompareReport",
    "CompareRow",
    "ValueDifference",
    "Verifier",
    "VerifyReport",
    "compare_modules",
    "fit_scales",
    "measure_accumulators",
]
