"""Float or QNN operators on nothing -> constants, before there are kernels.

Tiles, panels and parts of kernels are counted from sizes, which must be 1 or more for that.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.ir.rewrite.expressions import op_name, shape_of
from relayquant.ir.rewrite.function import mutate_functions
from relayquant.ir.rewrite.graph import static_size, tensor_dtype

#: Operators that add up products, which are 0 if there is nothing to add.
PRODUCTS = frozenset(
    f"relax.{name}"
    for name in (
        "matmul",
        *(f"nn.conv{n}d" for n in (1, 2, 3)),
        *(f"nn.conv{n}d_transpose" for n in (1, 2, 3)),
        *(f"qnn.conv{n}d" for n in (1, 2)),
        "qnn.conv2d_transpose",
        "qnn.dense",
        "qnn.batch_matmul",
    )
)
#: Operators that read elements at indices.
READERS = ("relax.take", "relax.gather_elements", "relax.gather_nd")
#: Operators that refuse an axis of size 0, whatever the size of their result.
STRICT = frozenset(("relax.argmax", "relax.argmin"))


def fill_empty_values(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite operators whose result has no element, and sums of no products, to zeros.

    Raises:
        ModelError: An operator reads elements of an axis that has none.
    """
    return mutate_functions(mod, Filling(mod))


@relax.expr_functor.mutator
class Filling(relax.PyExprMutator):
    """Mutator that replaces calls on nothing."""

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        name = op_name(visited) if isinstance(visited, Call) else ""
        if not is_on_tensors(name) or not isinstance(call.ty, relax.TensorType):
            return visited
        if has_no_element(call) or (name in PRODUCTS and any(map(has_no_element, call.args[:2]))):
            return relax.op.zeros(relax.ShapeExpr(shape_of(call)), tensor_dtype(call))
        refuse_empty_axis(name, call)
        return visited


def is_on_tensors(name: str) -> bool:
    """Whether an operator computes a tensor of tensors, and nothing else."""
    return name.startswith(("relax.qnn.", "relax.nn.", "relax.image.")) or (
        name.count(".") == 1 and not name.startswith("relax.call_") and name not in STRICT
    )


def has_no_element(value: relax.Expr) -> bool:
    """Whether a value is a tensor with an axis of size 0, known when the model is compiled."""
    return 0 in map(static_size, shape_of(value))


def refuse_empty_axis(name: str, call: Call) -> None:
    """Raise an error if elements of an axis of size 0 are read.

    Raises:
        ModelError: The axis has no element, whatever the index.
    """
    if name in READERS and 0 in [static_size(size) for size in list_read_sizes(name, call)]:
        raise ModelError(
            f"Operator {name} reads an axis of size 0, which has no element, whatever the index. "
            "Give the axis a size of 1 or more.",
            code="RQ206",
        )


def list_read_sizes(name: str, call: Call) -> list[Any]:
    """Return the sizes of the axes that the indices of a call count."""
    data, indices = map(shape_of, call.args)
    if not data:
        return []
    if name == "relax.gather_nd":
        first = int(call.attrs.batch_dims)
        depth = static_size(indices[-1]) if indices else None
        return data[first : first + (depth or 0)]
    axis = call.attrs.axis
    return data if axis is None else [data[int(axis)]]
