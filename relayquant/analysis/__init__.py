"""Measurements on modules: two modules and data in, numbers out."""

from relayquant.analysis.compare import CompareReport, CompareRow, compare_modules
from relayquant.analysis.verify import ValueDifference, VerifyReport, verify_module

__all__ = [
    "CompareReport",
    "CompareRow",
    "ValueDifference",
    "VerifyReport",
    "compare_modules",
    "verify_module",
]
