"""Plan + parameters -> reference form -> QNN form -> expanded -> folded, each a function."""

from relayquant.convert.adopt import add_ledger, adopt_reference
from relayquant.convert.expand import AFFINE_RULES, AffineRule, expand_affine
from relayquant.convert.fold import fold_qnn
from relayquant.convert.interface import set_interface
from relayquant.convert.qnn_form import realize_qnn
from relayquant.convert.reference_form import build_reference

__all__ = [
    "AFFINE_RULES",
    "AffineRule",
    "add_ledger",
    "adopt_reference",
    "build_reference",
    "expand_affine",
    "fold_qnn",
    "realize_qnn",
    "set_interface",
]
