"""Readers: a branch that is chosen at run time -> both branches are computed, one result is taken.

    y = If(c, then_branch, else_branch)    ->    y = R.where(c, y of then, y of else)

`main` is one dataflow block, and operators inside control flow could not be quantized.
"""

from __future__ import annotations

from collections.abc import Iterable

import tvm_ffi
from tvm import relax

from relayquant.formats.readers.refusal import Refusal, describe
from relayquant.ir.rewrite.graph import tensor_shape


def make_scalar(bb: relax.BlockBuilder, condition: relax.Expr) -> relax.Expr:
    """Emit a condition with one element as a bool tensor ().

    Raises:
        Refusal: it is not one number.
    """
    shape = tensor_shape(condition)
    if shape is None or any(size != 1 for size in shape):
        raise Refusal(f"its condition has the shape {shape}; allowed: one number")
    return bb.emit(relax.op.reshape(condition, relax.ShapeExpr([])))


def choose_values(
    bb: relax.BlockBuilder,
    scalar: relax.Expr,
    pairs: Iterable[tuple[relax.Expr, relax.Expr]],
    remedy: str = "",
) -> list[relax.Expr]:
    """Emit of each pair the first value where the condition is true, else the second.

    Args:
        bb: The builder.
        scalar: The condition, bool ().
        pairs: Results of the two branches.
        remedy: What to do if they cannot be selected.

    Raises:
        Refusal: a pair is not two tensors of the same type and shape.
    """
    chosen = []
    for left, right in pairs:
        is_tensor = isinstance(left.ty, relax.TensorType)
        if not is_tensor or not tvm_ffi.structural_equal(left.ty, right.ty):
            raise Refusal(
                f"its condition is known at run time only, and its branches give {describe(left)} "
                f"and {describe(right)}; supported: tensors of the same type and shape, as both "
                "branches are computed",
                remedy,
            )
        same = left.same_as(right)
        chosen.append(left if same else bb.emit(relax.op.where(scalar, left, right)))
    return chosen
