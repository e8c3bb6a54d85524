"""Plan + parameters -> reference form -> QNN form -> expanded -> folded, each a function."""

from relayquant.conversion.adopt import add_ledger, adopt_reference
from relayquant.conversion.expand import AFFINE_RULES, AffineRule, expand_affine
from relayquant.conversion.fold import fold_qnn
from relayquant.conversion.interface import (
    describe_interface,
    request_interface,
    set_interface,
)
from relayquant.conversion.qnn_form import realize_qnn
from relayquant.conversion.reference_form import build_reference

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
