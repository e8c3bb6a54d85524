"""Float or QNN operators on nothing -> constants, before there are kernels.

Tiles, panels and parts of kernels are counted from sizes, which must be 1 or more for that.
"""

from __future__ import annotations

from collections.abc import Callable
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
#: Operators that read or write elements of their first operand at indices, the second one.
AT_INDICES = (
    "relax.take",
    "relax.gather_elements",
    "relax.gather_nd",
    "relax.scatter_elements",
    "relax.scatter_nd",
    "relax.vision.roi_align",
)
#: Operators that refuse an axis of size 0, whatever the size of their result.
STRICT = frozenset(("relax.argmax", "relax.argmin"))


def fill_empty_values(mod: tvm.IRModule, describe_misfit: Callable[[Call], str]) -> tvm.IRModule:
    """Rewrite operators whose result has no element, and sums of no products, to zeros.

    Those for which `describe_misfit` returns a text stay: their sizes are an error.

    Raises:
        ModelError: An index counts an axis of size 0.
    """
    return mutate_functions(mod, Filling(mod, describe_misfit))


@relax.expr_functor.mutator
class Filling(relax.PyExprMutator):
    """Mutator that replaces calls on nothing."""

    def __init__(self, mod: tvm.IRModule, describe_misfit: Callable[[Call], str]) -> None:
        super().__init__(mod)
        self.describe_misfit = describe_misfit

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        name = op_name(visited) if isinstance(visited, Call) else ""
        if name in AT_INDICES:
            refuse_empty_axis(name, call)
        if not is_on_tensors(name) or not isinstance(call.ty, relax.TensorType):
            return visited
        adds_nothing = name in PRODUCTS and any(map(has_no_element, call.args[:2]))
        if not (adds_nothing or has_no_element(call)) or self.describe_misfit(call):
            return visited
        return relax.op.zeros(relax.ShapeExpr(shape_of(call)), tensor_dtype(call))


def is_on_tensors(name: str) -> bool:
    """Whether an operator computes a tensor of tensors, and nothing else."""
    return name.startswith(("relax.qnn.", "relax.nn.", "relax.image.")) or (
        name.count(".") == 1 and not name.startswith("relax.call_") and name not in STRICT
    )


def has_no_element(value: relax.Expr) -> bool:
    """Whether a value is a tensor with an axis of size 0, known when the model is compiled."""
    return 0 in map(static_size, shape_of(value))


def refuse_empty_axis(name: str, call: Call) -> None:
    """Raise an error if an index counts an axis of size 0: compiled code would read or write memory
    of others.

    Raises:
        ModelError: The axis has no element, whatever the index.
    """
    if has_no_element(call.args[1]):  # there is no index
        return
    if 0 in map(static_size, list_indexed_sizes(name, call)):
        raise ModelError(
            f"Operator {name} is given indices of an axis of size 0, which has no element, "
            "whatever the index. Give the axis a size of 1 or more.",
            code="RQ206",
        )


def list_indexed_sizes(name: str, call: Call) -> list[Any]:
    """Return the sizes of the axes of the first operand whose elements have an index."""
    data, indices = shape_of(call.args[0]), shape_of(call.args[1])
    if not data or name.endswith("_elements"):
        return data  # a place of the indices is one of the data, but for one axis
    if name == "relax.vision.roi_align":
        return data[:1]
    if name.endswith("_nd"):
        first = int(getattr(call.attrs, "batch_dims", 0))
        depth = static_size(indices[-1]) if indices else None
        return data[first : first + (depth or 0)]
    axis = call.attrs.axis
    return data if axis is None else [data[int(axis)]]
