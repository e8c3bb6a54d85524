"""lower_row_norms: layer norms and RMS norms along rows -> one kernel each.

If a product quantizes the rows, the kernel writes the integers too. A sum of two tensors before the
norm is in its kernel, unless the kernel of a product computes it. Runs before `grouped`, which
would lower the quantization of rows to another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule
from tvm.target import Target

from relayquant.codegen.kernels.floating.row_norm import RowNorm, make_row_norm
from relayquant.codegen.kernels.isa.select import has_bf16_tiles
from relayquant.codegen.lowering.engine import (
    BlockView,
    Kernel,
    KernelRule,
    Lowered,
    lower_functions,
)
from relayquant.codegen.lowering.kernel_call import find_known
from relayquant.ir.rewrite.expressions import (
    is_float32,
    op_name,
    read_number,
    same_extents,
    same_type,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.ir.rewrite.rule import Skip, decline, make_rule

QUANTIZE_ROWS = "relax.qnn.quantize_rows"
NO_ROWS = decline("not of float32 rows of known length")


#: Float products, whose kernels add a residual.
PRODUCTS = frozenset({"relax.matmul", *(f"relax.nn.conv{n}d" for n in (1, 2, 3))})


@dataclass(frozen=True, eq=False)
class NormBlock:
    """Context of the rules.

    `products`: operators whose kernels add a residual to their results.
    """

    block: BlockView
    products: frozenset[str]


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """The values from a norm to the quantized integers of its rows.

    The last value is the pair of integers and scales.

    `keeps_result`: whether anything else reads the float rows.
    """

    vars: tuple[relax.Var, ...]
    keeps_result: bool


def lower_row_norms(mod: IRModule, target: Target) -> IRModule:
    """Replace norms along rows of known length, in dataflow blocks, by kernels.

    Leading extents may be symbolic. Targets other than LLVM CPUs keep the operators.
    """
    if target.kind.name != "llvm":
        return mod
    # Rows that may be rounded to bfloat16 are multiplied by a kernel that adds a residual.
    grouped = {"relax.qnn.grouped_dense"} if has_bf16_tiles(target) else set()
    products = PRODUCTS | grouped
    return lower_functions(mod, NORM_RULES, lambda block: NormBlock(block, products))


def call_norm(
    context: NormBlock,
    vars_: tuple[relax.Var, ...],
    spec: RowNorm,
    operands: tuple[relax.Expr, ...],
) -> Lowered:
    """Call a norm kernel: x = a + b; y = norm(x); t = quantize_rows(y)  ->  t = kernel(a, b)

    If others read x and y too: k = kernel(a, b); x = k[0]; y = k[1]; t = (k[2], k[3]).
    """
    block, results = context.block, [vars_[-1]]
    found = find_quantized(block, vars_[-1])
    if found is not None:
        pair = found.vars[-1]
        rows = list_leading(block.values[pair].args[0])
        spec = replace(spec, rows=rows, keeps_result=found.keeps_result)
        results = [vars_[-1], pair] if found.keeps_result else [pair]
    data, *factors = operands
    is_apart = not any(factor.same_as(data) for factor in factors)
    if isinstance(data, relax.Var) and is_apart and (addends := find_addends(context, data)):
        inside = sum(user in vars_ for user in block.users_of(data))
        keeps_sum = inside < block.graph.count_uses(data)
        if not keeps_sum or can_precede(block, factors):
            spec = replace(spec, is_sum=True, keeps_sum=keeps_sum)
            operands, vars_ = (*addends, *factors), (data, *vars_)
            results = [data, *results] if keeps_sum else results
    vars_ = vars_ if found is None else (*vars_, *found.vars)
    kernel = Kernel("row_norm", spec, lambda: make_row_norm(spec))
    return Lowered(vars_, kernel, operands, tuple(results) if len(results) > 1 else ())


def can_precede(block: BlockView, factors: Sequence[relax.Expr]) -> bool:
    """Whether a norm can be computed where its sum is bound.

    The block may bind a factor, or match a size that the norm's rows have, only later.
    """
    has_sizes = any(isinstance(binding, relax.MatchCast) for binding in block.bindings)
    return not has_sizes and not any(factor in block.values for factor in factors)


def find_addends(context: NormBlock, data: relax.Var) -> tuple[relax.Expr, ...] | None:
    """Return a and b of a sum a + b of this block, if no other kernel computes it."""
    block = context.block
    call = block.call_of(data) if data in block.values else None
    if call is None or op_name(call) != "relax.add" or not block.is_free(data):
        return None
    if not all(same_type(arg, data) for arg in call.args):
        return None
    return None if any(ends_product(context, arg) for arg in call.args) else tuple(call.args)


def ends_product(context: NormBlock, expr: relax.Expr) -> bool:
    """Whether a value is the result of a product, or of its sum with constants."""
    call = context.block.call_of(expr)
    while call is not None and op_name(call) == "relax.add":
        others = [arg for arg in call.args if not isinstance(arg, GenericConst)]
        call = context.block.call_of(others[0]) if len(others) == 1 else None
    return call is not None and op_name(call) in context.products


def lower_layer_norm(context: NormBlock, var: relax.Var) -> Lowered | Skip:
    """Lower nn.layer_norm along the last axis."""
    call = context.block.values[var]
    if not (call.attrs.center and call.attrs.scale):
        return decline("scale or offset is missing; preparation adds it")
    return lower_norm(context, var, call.args[1:], is_centred=True)


def lower_rms_norm(context: NormBlock, var: relax.Var) -> Lowered | Skip:
    """Lower nn.rms_norm along the last axis."""
    return lower_norm(context, var, context.block.values[var].args[1:], is_centred=False)


def lower_norm(
    context: NormBlock, var: relax.Var, factors: Sequence[relax.Expr], is_centred: bool
) -> Lowered | Skip:
    """Lower a norm operator with the attributes that both operators share."""
    call = context.block.values[var]
    spec = read_rows(call.args[0], float(call.attrs.epsilon))
    if spec is None:
        return NO_ROWS
    if [*map(int, call.attrs.axes)] not in ([-1], [len(spec.leading)]):
        return decline("not along the last axis")
    found = [read_vector(factor, spec.features) for factor in factors]
    vectors = tuple(each for each in found if each is not None)
    if len(vectors) != len(factors):
        return decline("scale or offset is not a float32 vector")
    spec = replace(spec, is_centred=is_centred, bias=is_centred)
    return call_norm(context, (var,), spec, (call.args[0], *vectors))


def lower_root_mean_square(context: NormBlock, var: relax.Var) -> Lowered | Skip:
    """Lower x / sqrt(mean(x * x) + e) [* w], or x * rsqrt(...), from the mean `var` on."""
    block = context.block
    mean = block.values[var]
    square = mean.args[0]
    data = read_square(block, square)
    spec = None if data is None else read_rows(data, 0.0)
    if data is None or spec is None:
        return NO_ROWS
    axes = mean.attrs.axis
    if axes is None or [*map(int, axes)] not in ([-1], [len(spec.leading)]):
        return decline("not along the last axis")
    if not mean.attrs.keepdims or block.only_user(square) != var:
        return decline("something else reads the squares, or the mean drops the axis")
    vars_ = [square, var]
    added = follow(block, vars_, "relax.add")
    epsilon = None if added is None else read_added(added)
    root = follow(block, vars_, "relax.sqrt", "relax.rsqrt")
    if epsilon is None or root is None:
        return decline("not the root of the mean plus a number")
    divides = op_name(root) == "relax.sqrt"
    scaled = follow(block, vars_, "relax.divide" if divides else "relax.multiply")
    orders = [(data, vars_[-2])] if divides else [(data, vars_[-2]), (vars_[-2], data)]
    if scaled is None or not any(
        all(a.same_as(b) for a, b in zip(scaled.args, order, strict=True)) for order in orders
    ):
        return decline("the root does not scale the rows")
    weight = follow_weight(block, vars_, spec.features)
    if not same_type(vars_[-1], data):
        return decline("epsilon has more axes than the rows")
    spec = replace(spec, epsilon=epsilon, divides=divides, weight=weight is not None)
    operands = (data,) if weight is None else (data, weight)
    return call_norm(context, tuple(vars_), spec, operands)


def follow(block: BlockView, vars_: list[relax.Var], *names: str) -> Call | None:
    """Append the only reader of the last value and return its call.

    None if it is another operator.
    """
    user = block.only_user(vars_[-1])
    call = None if user is None else block.call_of(user)
    if user is None or call is None or op_name(call) not in names:
        return None
    vars_.append(user)
    return call


def follow_weight(block: BlockView, vars_: list[relax.Var], features: int) -> relax.Expr | None:
    """Append the only reader of the last value if it multiplies by a vector; return the vector."""
    last, user = vars_[-1], block.only_user(vars_[-1])
    if user is None or op_name(block.values[user]) != "relax.multiply":
        return None
    others = [arg for arg in block.values[user].args if not arg.same_as(last)]
    weight = read_vector(others[0], features) if len(others) == 1 else None
    if weight is not None:
        vars_.append(user)
    return weight


def read_rows(data: relax.Expr, epsilon: float) -> RowNorm | None:
    """Make the norm of rows without factors.

    None if they are not float32 or have unknown length.
    """
    if not is_float32(data):
        return None
    width = static_sizes(shape_of(data)[-1:])
    if width is None or width[0] < 1:
        return None
    return RowNorm(list_leading(data), width[0], epsilon)


def list_leading(data: relax.Expr) -> tuple[int | None, ...]:
    """List the extents before the last axis of a tensor of known rank.

    None for an extent known only at run time.
    """
    return find_known((tensor_shape(data) or ())[:-1])


def read_vector(factor: relax.Expr, features: int) -> relax.Expr | None:
    """Read a factor with one number for each element of a row, as an array with one axis."""
    if not is_float32(factor) or static_sizes(shape_of(factor)[-1:]) != [features]:
        return None
    if isinstance(factor, GenericConst):
        values = factor.value.numpy()
        if values.size != features:
            return None
        return factor if values.ndim == 1 else relax.const(np.ascontiguousarray(values.reshape(-1)))
    return factor if len(shape_of(factor)) == 1 else None


def read_added(call: Call) -> float | None:
    """Read the scalar constant that a sum adds to its other operand."""
    for arg in call.args:
        if isinstance(arg, GenericConst) and str(arg.ty.dtype) == "float32":
            return read_number(arg)
    return None


def read_square(block: BlockView, var: relax.Expr) -> relax.Expr | None:
    """Return x if the value is x * x, or x to the power of 2."""
    call = block.call_of(var)
    if call is None:
        return None
    if op_name(call) == "relax.multiply" and call.args[0].same_as(call.args[1]):
        return call.args[0]
    if op_name(call) == "relax.power" and read_number(call.args[1]) == 2:
        return call.args[0]
    return None


def find_quantized(block: BlockView, result: relax.Var) -> QuantizedRows | None:
    """Find the operator that quantizes the rows of a norm, directly or after a reshape."""
    is_alone = block.only_user(result) is not None
    for user in block.users_of(result):
        name = op_name(block.values[user])
        if name == QUANTIZE_ROWS:
            return QuantizedRows((user,), not is_alone)
        if name != "relax.reshape" or not same_extents(shape_of(user)[-1:], shape_of(result)[-1:]):
            continue
        for reader in block.users_of(user):
            if op_name(block.values[reader]) == QUANTIZE_ROWS:
                goes = block.only_user(user) is not None
                return QuantizedRows((user, reader) if goes else (reader,), not (is_alone and goes))
    return None


NORM_RULES: tuple[KernelRule[NormBlock], ...] = (
    make_rule(lower_layer_norm, "relax.nn.layer_norm"),
    make_rule(lower_rms_norm, "relax.nn.rms_norm"),
    make_rule(lower_root_mean_square, "relax.mean"),
)
