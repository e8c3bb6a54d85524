"""lower_attention: rotary positions and caches of keys and values -> calls of kernels.

    c' = update_cache(c, rows, p)    ->    c' = call_tir_inplace(kernel, rows, p, c)

The cache is changed in place if nothing can see that: it is a parameter of a function that the user
calls, or the result of another update, and nothing else reads it. Otherwise it is copied first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from relayquant.codegen.kernels.attention.bf16 import make_attention_bf16, takes_tiles
from relayquant.codegen.kernels.attention.blocks import make_attention_blocks
from relayquant.codegen.kernels.attention.delta import Delta, make_delta
from relayquant.codegen.kernels.attention.new_rows import (
    Rotate,
    UpdateCache,
    make_rotate,
    make_update_cache,
)
from relayquant.codegen.kernels.attention.one_row import Attention, make_attention
from relayquant.codegen.kernels.floating.tile import FloatIsa, choose_float_isa
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.isa.select import select_fast_bf16
from relayquant.codegen.lowering.engine import (
    BlockView,
    Kernel,
    KernelRule,
    Lowered,
    lower_functions,
)
from relayquant.codegen.lowering.grouped_results import counts_many_rows
from relayquant.codegen.lowering.kernel_call import find_known
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, make_rule

UPDATE = "relax.qnn.update_cache"


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Context of the rules: a block, the vectors of its kernels, and who calls the function.

    `called`: parameters of functions that the module itself calls. They may be constants.
    `bf16`: products for many rows, which may be rounded to bfloat16. None if they may not.
    """

    block: BlockView
    isa: FloatIsa
    called: frozenset[relax.Var]
    bf16: Bf16Isa | None


def lower_attention(mod: tvm.IRModule, target: Target, keeps_rows: bool = False) -> tvm.IRModule:
    """Replace operators of attention in every Relax function by kernels for the target.

    Targets other than LLVM CPUs keep the operators. `keeps_rows`: no function may round rows to
    bfloat16.
    """
    if target.kind.name != "llvm":
        return mod
    isa, bf16 = choose_float_isa(target), None if keeps_rows else select_fast_bf16(target)
    inner = {call.op for call in list_calls(mod) if isinstance(call.op, tvm.ir.GlobalVar)}
    functions = (mod[gvar] for gvar in inner)
    called = frozenset(
        param for f in functions if isinstance(f, relax.Function) for param in f.params
    )
    return lower_functions(
        mod,
        ATTENTION_RULES,
        lambda block: AttentionBlock(block, isa, called, bf16),
        in_any_block=True,
    )


def read_extents(rows: relax.Expr) -> tuple[int | None, int | None, int, int] | Skip:
    """Return the extents of rows (B, R, heads, D)."""
    shape = tensor_shape(rows)
    if shape is None:
        return Skip("the shape of the rows is not known")
    batch, count, heads, width = find_known(shape)
    if not heads or not width:
        return Skip("the heads or the width of a head are symbolic")
    return batch, count, heads, width


def read_length(cache: relax.Expr, axis: int) -> int | Skip:
    """Return the number of positions of a cache or table."""
    shape = tensor_shape(cache)
    length = None if shape is None else shape[axis]
    return length if isinstance(length, int) and length else Skip("the length is symbolic")


def lower_rotate(context: AttentionBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.rotate."""
    x, cos, sin, positions = context.block.values[var].args
    extents, length = read_extents(x), read_length(cos, 0)
    half = read_length(cos, 1)
    for found in (extents, length, half):
        if isinstance(found, Skip):
            return found
    spec = Rotate(extents, length, half)  # pyright: ignore[reportArgumentType]
    kernel = Kernel("rotate", spec, lambda: make_rotate(spec, context.isa))
    return Lowered((var,), kernel, (x, cos, sin, positions))


def lower_update(context: AttentionBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.update_cache."""
    cache, rows, positions = context.block.values[var].args
    extents, length = read_extents(rows), read_length(cache, 2)
    for found in (extents, length):
        if isinstance(found, Skip):
            return found
    in_place = may_change(context, cache)
    spec = UpdateCache(extents, length, tensor_dtype(cache), in_place)  # pyright: ignore[reportArgumentType]
    name = "update_cache" if in_place else "copy_cache"
    kernel = Kernel(name, spec, lambda: make_update_cache(spec, context.isa))
    return Lowered((var,), kernel, (rows, positions, cache), changed=2 if in_place else None)


def lower_cached_attention(context: AttentionBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.cached_attention."""
    call = context.block.values[var]
    query, keys, key_scale, values, value_scale, positions = call.args
    extents, length = read_extents(query), read_length(keys, 2)
    for found in (extents, length):
        if isinstance(found, Skip):
            return found
    groups, dtype = tensor_shape(keys)[1], tensor_dtype(keys)  # pyright: ignore[reportOptionalSubscript]
    scales = [constant_value(scale) for scale in (key_scale, value_scale)]
    if tensor_dtype(values) != dtype:
        return Skip("keys and values have two dtypes")
    if dtype != "int8" and any(scale is None or scale != 1 for scale in scales):
        return Skip("a scale of a float cache is not 1")
    attrs = call.attrs
    spec = Attention(
        extents,  # pyright: ignore[reportArgumentType]
        groups,
        length,
        dtype,
        float(attrs.scale),
        int(attrs.window),
        float(attrs.soft_cap),
        len(attrs.sinks) > 0,
    )
    sinks = np.array([float(sink) for sink in attrs.sinks], "float32")
    shape = tensor_shape(query) or ()
    isa, bf16 = context.isa, context.bf16
    if spec.extents[1] == 1:
        kernel = Kernel("attention", spec, lambda: make_attention(spec, isa))
    elif bf16 and takes_tiles(spec) and counts_many_rows(context.block, shape[1:2]):
        kernel = Kernel("attention_bf16", spec, lambda: make_attention_bf16(spec, isa, bf16))
    else:
        kernel = Kernel("attention_blocks", spec, lambda: make_attention_blocks(spec, isa))
    operands = (keys, key_scale, values, value_scale) if dtype == "int8" else (keys, values)
    numbers = (relax.const(sinks),) if spec.has_sinks else ()
    return Lowered((var,), kernel, (query, *operands, positions, *numbers))


def lower_gated_delta(context: AttentionBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.gated_delta."""
    call = context.block.values[var]
    extents, keys = read_extents(call.args[2]), read_extents(call.args[1])
    for found in (extents, keys):
        if isinstance(found, Skip):
            return found
    spec = Delta(extents, *keys[2:], bool(call.attrs.is_tiled))  # pyright: ignore[reportArgumentType, reportIndexIssue]
    kernel = Kernel("gated_delta", spec, lambda: make_delta(spec, context.isa))
    return Lowered((var,), kernel, tuple(call.args))


def may_change(context: AttentionBlock, cache: relax.Expr) -> bool:
    """Whether a cache may be changed in place."""
    graph = context.block.graph
    if not isinstance(cache, relax.Var) or graph.count_uses(cache) != 1:
        return False
    is_own = cache in graph.params and cache not in context.called
    return is_own or op_name(context.block.call_of(cache)) == UPDATE


ATTENTION_RULES: tuple[KernelRule[AttentionBlock], ...] = (
    make_rule(lower_rotate, "relax.qnn.rotate"),
    make_rule(lower_update, UPDATE),
    make_rule(lower_cached_attention, "relax.qnn.cached_attention"),
    make_rule(lower_gated_delta, "relax.qnn.gated_delta"),
)
