"""Conversion, one function per step: plan + parameters -> reference form -> QNN form ->
propagated -> folded.
"""

from relayquant.stages.conversion.fold import fold_qnn
from relayquant.stages.conversion.from_qdq import add_ledger, adopt_reference
from relayquant.stages.conversion.io_dtypes import (
    describe_interface,
    request_interface,
    set_interface,
)
from relayquant.stages.conversion.propagate import AFFINE_RULES, AffineRule, expand_affine
from relayquant.stages.conversion.qnn_form import realize_qnn
from relayquant.stages.conversion.reference_form import build_reference

__all__ = [
    "AFFINE_RULES",
    "AffineRule",
    "add_ledger",
    "adopt_reference",
    "build_reference",
    "describe_interface",
    "expand_affine",
    "fold_qnn",
    "realize_qnn",
    "request_interface",
    "set_interface",
]
