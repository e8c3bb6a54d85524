"""lower_masked_attention: attention of float32, operator by operator -> one kernel.

    y = softmax(x @ permute_dims(k) * factor + mask) @ v    ->    y = kernel(x, k, v, mask)

The factor and the mask may be missing. Runs before `integer`, which has a kernel for softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from relayquant.codegen.kernels.attention.masked import (
    LARGEST_FLOAT,
    MaskedAttention,
    choose_vectors,
    make_masked_attention,
    saves_time,
)
from relayquant.codegen.kernels.floating.tile import FLOAT_BYTES, FloatIsa, choose_float_isa
from relayquant.codegen.kernels.permutation import Permutation, make_moved_rows
from relayquant.codegen.lowering.engine import (
    BlockView,
    Kernel,
    KernelRule,
    Lowered,
    lower_functions,
)
from relayquant.ir.rewrite.expressions import (
    is_float32,
    op_name,
    same_type,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import Skip, decline, make_rule

MATMUL = "relax.matmul"


@dataclass(frozen=True, eq=False)
class MaskedBlock:
    """Context of the rule: a block, and the vectors of its kernels."""

    block: BlockView
    isa: FloatIsa


def lower_masked_attention(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Replace attention of known sizes in every function by kernels for the target."""
    if target.kind.name != "llvm":
        return mod
    isa = choose_float_isa(target)
    return lower_functions(mod, RULES, lambda block: MaskedBlock(block, isa))


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores up to their softmax.

    Attributes:
        vars: The values, the last one is the softmax.
        factor: What multiplies the products, or None.
        mask: What is added, or None.
    """

    vars: tuple[relax.Var, ...]
    factor: float | None = None
    mask: relax.Expr | None = None


def follow_scores(block: BlockView, product: relax.Var) -> Scores | None:
    """Return the values up to the softmax of the products, if nothing else reads them."""
    scores, last = Scores((product,)), product
    while (var := block.only_user(last)) is not None and block.is_free(var):
        call = block.call_of(var)
        name = op_name(call)
        scores = replace(scores, vars=(*scores.vars, var))
        if call is None or not same_type(var, product):
            return None
        if name == "relax.nn.softmax":
            is_last = int(call.attrs.axis) % product.ty.ndim == product.ty.ndim - 1
            return scores if is_last else None
        others = [arg for arg in call.args if not arg.same_as(last)]
        if len(others) != 1 or scores.mask is not None:
            return None
        if name == "relax.add":
            scores = replace(scores, mask=others[0])
        elif scores.factor is None and (factor := read_factor(name, call.args[1], others[0])):
            scores = replace(scores, factor=factor)
        else:
            return None
        last = var
    return None


def read_factor(name: str, second: relax.Expr, other: relax.Expr) -> float | None:
    """Return the float32 number by which an operator multiplies. None: it does something else.

    A division is the same only by a power of two.
    """
    value = constant_value(other)
    if value is None or value.size != 1 or not np.isfinite(value).all() or not value.all():
        return None
    number = float(value.reshape(-1)[0])
    if name == "relax.multiply":
        return number
    is_exact = name == "relax.divide" and second.same_as(other) and np.frexp(number)[0] == 0.5
    return 1 / number if is_exact and abs(1 / number) <= LARGEST_FLOAT else None


def lower_attention(context: MaskedBlock, root: relax.Var) -> Lowered | Skip:
    """Lower the product of rows with keys, and all up to the product with values."""
    block = context.block
    x, columns = block.values[root].args
    scores = follow_scores(block, root)
    product = None if scores is None else block.only_user(scores.vars[-1])
    if scores is None or product is None or op_name(block.values[product]) != MATMUL:
        return decline("not the scores of attention")
    powers, values = block.values[product].args
    operands = [x, columns, values, product]
    if not powers.same_as(scores.vars[-1]) or not all(map(is_float32, operands)):
        return decline("not of float32, or the softmax is not the first operand")
    shapes = [static_sizes(shape_of(each)) for each in (*operands, root)]
    if any(shape is None or len(shape) < 2 for shape in shapes):
        return decline("a size is symbolic")
    (*batch, rows, inner), (*others, _, keys), (*last, _, width) = shapes[:3]  # pyright: ignore[reportGeneralTypeIssues]
    if not batch == others == last:
        return decline("batch dimensions are broadcast")
    spec = MaskedAttention(tuple(batch), rows, keys, inner, width, scores.factor)
    mask = scores.mask
    if mask is not None:
        extents = static_sizes(shape_of(mask)) if is_float32(mask) else None
        if not extents or extents[-1] != keys or len(extents) > len(batch) + 2:
            return decline("the mask is not of float32 and of all keys")
        spec = replace(spec, mask=tuple(extents))
    if not choose_vectors(spec, context.isa):
        return decline("too few rows, keys or numbers of a head, or too many keys")
    if not saves_time(spec, context.isa):
        return decline("separate kernels are as fast")
    found = read_keys(block, columns)
    if isinstance(found, Skip):
        return found
    stored, before = found
    kernel = Kernel("masked_attention", spec, lambda: make_masked_attention(spec, context.isa))
    vars_ = (*scores.vars, product)
    return Lowered(
        vars_, kernel, (x, stored, values, *(() if mask is None else (mask,))), before=before
    )


def read_keys(
    block: BlockView, columns: relax.Expr
) -> tuple[relax.Expr, tuple[Lowered, ...]] | Skip:
    """Return keys (*batch, keys, inner) of their transposition, and the kernel that makes them."""
    call = block.call_of(columns)
    if call is None or op_name(call) != "relax.permute_dims":
        return decline("the keys are not transposed")
    source = call.args[0]
    *axes, inner, keys = list_permutation(call)
    order = (*axes, keys, inner)
    if order == tuple(range(len(order))):
        return source, ()
    shape = static_sizes(shape_of(source))
    if shape is None or inner != len(order) - 1:
        return decline("the numbers of a key do not lie side by side")
    spec = Permutation(tuple(shape), order, "float32", FLOAT_BYTES)
    stored = relax.DataflowVar("keys", relax.TensorType(spec.out_shape, "float32"))
    kernel = Kernel("moved_rows", spec, lambda: make_moved_rows(spec))
    return stored, (Lowered((stored,), kernel, (source,)),)


RULES: tuple[KernelRule[MaskedBlock], ...] = (make_rule(lower_attention, MATMUL),)
