"""Products with grouped weights -> what their kernels compute with them; part of `grouped`.

    y = grouped_dense(x, w); z = y + r                       ->    z = kernel(x, w, r)
    y = grouped_dense(x, w); z = silu(y[: n]) * y[n :]       ->    z = kernel(x, w)

Rows that a function lets be rounded to bfloat16 are read as floats:

    q, s = quantize_rows(x); y = grouped_dense(q, s, w)      ->    y = kernel(x, w)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import relax

from relayquant.codegen.kernels.grouped.plan import GroupedDense
from relayquant.codegen.lowering.engine import BlockView
from relayquant.codegen.lowering.joined_slices import read_cut, skip_reshapes
from relayquant.ir.float_precision import BF16_ROWS_ATTR
from relayquant.ir.rewrite.expressions import op_name, same_type
from relayquant.ir.rewrite.graph import tensor_shape

RESHAPE = "relax.reshape"


@dataclass(frozen=True, eq=False)
class GroupedProduct:
    """A product with what its kernel computes of its results.

    Attributes:
        vars: The values, the last one is the result.
        residual: The operand that is added, if there is one.
    """

    vars: tuple[relax.Var, ...]
    spec: GroupedDense
    residual: tuple[relax.Expr, ...] = ()


def counts_many_rows(block: BlockView, shape: tuple[int | str, ...]) -> bool:
    """Whether one of these extents is the one that the function says (`BF16_ROWS_ATTR`)."""
    many = str(block.graph.attrs.get(BF16_ROWS_ATTR, ""))
    return bool(many) and many in shape


def find_wide_rows(block: BlockView, rows: relax.Expr, scales: relax.Expr) -> relax.Expr | None:
    """Find the float rows of which `quantize_rows` made these integers, of the same shape, and
    these scales.

    None if they are something else, or not many.
    """
    shape = tensor_shape(rows)
    if shape is None or not counts_many_rows(block, shape[:-1]):
        return None
    pairs = []
    for place, part in enumerate((rows, scales)):
        source = skip_reshapes(block.call_of, part)
        item = block.values.get(source) if isinstance(source, relax.Var) else None
        if not isinstance(item, relax.TupleGetItem) or item.index != place:
            return None
        pairs.append(item.tuple_value)
    call = block.call_of(pairs[0]) if pairs[0].same_as(pairs[1]) else None
    if call is None or op_name(call) != "relax.qnn.quantize_rows":
        return None
    wide = call.args[0]
    reshaped = block.call_of(wide)
    if tensor_shape(wide) != shape and reshaped is not None and op_name(reshaped) == RESHAPE:
        wide = reshaped.args[0]
    return wide if tensor_shape(wide) == shape else None


def follow_sum(block: BlockView, product: GroupedProduct) -> GroupedProduct:
    """Return the product with the sum that alone reads its results."""
    var = product.vars[-1]
    user = block.only_user(var)
    # The sum of two products is in the kernel of the first one.
    if user is None or op_name(block.values[user]) != "relax.add" or not block.is_free(user):
        return product
    others = [each for each in block.values[user].args if not each.same_as(var)]
    if len(others) != 1 or not same_type(others[0], var) or not same_type(user, var):
        return product
    return replace(product, vars=(*product.vars, user), residual=(others[0],))


def follow_product(
    block: BlockView, var: relax.Var, spec: GroupedDense, can_gate: bool
) -> GroupedProduct:
    """Return the product with the gate that alone reads its results, if its kernel `can_gate`."""
    gated = follow_gate(block, var, spec.units // 2) if can_gate else None
    if gated is None:
        return GroupedProduct((var,), spec)
    return GroupedProduct(gated, replace(spec, is_gated=True))


def follow_gate(block: BlockView, var: relax.Var, half: int) -> tuple[relax.Var, ...] | None:
    """Return the values up to silu(first half) * second half, if nothing else reads them."""
    cuts = block.users_of(var)
    if len(cuts) != 2 or block.graph.count_uses(var) != 2:
        return None
    places = [read_cut(block.values[cut], 3, 2) for cut in cuts]
    kept = [None if place is None else place[1] for place in places]
    if kept != [range(half), range(half, 2 * half)]:
        return None
    gate, up = cuts
    silu, product = block.only_user(gate), block.only_user(up)
    if silu is None or product is None or block.only_user(silu) != product:
        return None
    names = [op_name(block.values[each]) for each in (silu, product)]
    is_gate = names == ["relax.nn.silu", "relax.multiply"]
    return (var, gate, up, silu, product) if is_gate else None
