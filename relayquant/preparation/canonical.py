"""Second stage: the list of rules that bring a float module into canonical form, and the function
that applies them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tvm

from relayquant.preparation.affine import (
    ARITHMETIC,
    NORMS,
    canonicalize_batch_norm,
    fill_norm_factors,
    fold_channel_affine,
    merge_constant_adds,
)
from relayquant.preparation.bind import bind_params, describe_weights
from relayquant.preparation.clamp import (
    CLAMPS,
    canonicalize_clamp,
    prelu_to_leaky_relu,
    where_to_prelu,
)
from relayquant.preparation.constants import fold_constants, fold_shapes
from relayquant.preparation.dense import (
    merge_reshapes,
    move_bias_inside,
    put_weight_second,
    squeeze_weight,
    unflatten_dense,
    vectors_to_matrices,
)
from relayquant.preparation.identity import (
    NEUTRAL,
    SAME_SHAPE,
    count_axes_from_front,
    project_tuple,
    put_constant_second,
    remove_alias,
    remove_neutral,
    remove_no_op,
    remove_single_concat,
    split_to_slice,
)
from relayquant.preparation.moves import bound_indices, stack_to_concat
from relayquant.preparation.pooling import (
    FLATTENS,
    WHOLE_MAP,
    WINDOWS,
    flatten_to_reshape,
    fold_pad,
    pool_to_mean,
)
from relayquant.preparation.quantized import (
    MOVES,
    QUANTIZE,
    center_weight,
    merge_equal,
    move_inside_dequantize,
    name_dialect,
)
from relayquant.preparation.recover import recover_call_tir
from relayquant.preparation.rule import ALIAS, PROJECTION, CanonicalRule, apply_phase
from relayquant.preparation.tensors import DEQUANTIZE
from relayquant.rewrite.editor import Editor
from relayquant.rewrite.share import share_constants
from relayquant.rewrite.sources import SOURCES_ATTR

#: Applied at every value, in this order.
RULES: tuple[CanonicalRule, ...] = (
    CanonicalRule(remove_alias, frozenset({ALIAS})),
    CanonicalRule(project_tuple, frozenset({PROJECTION})),
    CanonicalRule(split_to_slice, frozenset({PROJECTION})),
    CanonicalRule(count_axes_from_front, frozenset({"relax.squeeze"})),
    CanonicalRule(recover_call_tir, frozenset({"relax.call_tir"})),
    CanonicalRule(
        fold_shapes,
        frozenset(
            {"relax.shape_of", "relax.shape_to_tensor", "relax.tensor_to_shape", "relax.take"}
        ),
    ),
    CanonicalRule(bound_indices, frozenset({"relax.take"})),
    CanonicalRule(fold_constants),
    CanonicalRule(name_dialect, frozenset({"relax.quantize", "relax.dequantize"})),
    CanonicalRule(merge_equal, frozenset({QUANTIZE, DEQUANTIZE})),
    CanonicalRule(center_weight, frozenset({DEQUANTIZE})),
    CanonicalRule(move_inside_dequantize, frozenset(MOVES)),
    CanonicalRule(stack_to_concat, frozenset({"relax.stack"})),
    CanonicalRule(remove_single_concat, frozenset({"relax.concat"})),
    CanonicalRule(remove_no_op, frozenset(SAME_SHAPE)),
    CanonicalRule(flatten_to_reshape, frozenset(FLATTENS)),
    CanonicalRule(pool_to_mean, frozenset(WHOLE_MAP)),
    CanonicalRule(
        put_constant_second,
        frozenset({"relax.add", "relax.multiply", "relax.maximum", "relax.minimum"}),
    ),
    CanonicalRule(remove_neutral, frozenset(NEUTRAL)),
    CanonicalRule(vectors_to_matrices, frozenset({"relax.matmul"})),
    CanonicalRule(squeeze_weight, frozenset({"relax.matmul"})),
    CanonicalRule(put_weight_second, frozenset({"relax.matmul"})),
    CanonicalRule(merge_reshapes, frozenset({"relax.reshape"})),
    CanonicalRule(fold_channel_affine, frozenset({PROJECTION, *ARITHMETIC})),
    CanonicalRule(unflatten_dense, frozenset({"relax.reshape"})),
    CanonicalRule(move_bias_inside, frozenset({"relax.add"})),
    CanonicalRule(merge_constant_adds, frozenset({"relax.add"})),
    CanonicalRule(fill_norm_factors, frozenset(NORMS)),
    CanonicalRule(canonicalize_clamp, frozenset(CLAMPS)),
    CanonicalRule(where_to_prelu, frozenset({"relax.where"})),
    CanonicalRule(prelu_to_leaky_relu, frozenset({"relax.nn.prelu"})),
    CanonicalRule(fold_pad, frozenset(WINDOWS)),
)

#: What a phase leaves is what the next starts from: a batch norm is taken apart only where nothing
#: could take it.
PHASES: tuple[tuple[CanonicalRule, ...], ...] = (
    RULES,
    (CanonicalRule(canonicalize_batch_norm, frozenset({PROJECTION})), *RULES),
)


def prepare_module(mod: tvm.IRModule, params: Mapping[str, Any] | None = None) -> tvm.IRModule:
    """The canonical form of a float module; the input is not changed.

    The result has one Relax function `main` with one dataflow block in A-normal form. A value that
    equals one of the input keeps its name; attributes survive, `relayquant.sources` extended by
    the values that were added. Equal constants are one.

    Args:
        mod: A module with a Relax function main (see `name_main`), without control flow or side
            effects.
        params: Values to bind, by parameter name; None when they are bound already.

    Raises:
        ModelError: no function that is the model, control flow, or params that do not fit.
    """
    editor = Editor(mod)
    sources = json.loads(str(editor.attrs.get(SOURCES_ATTR, "{}")))
    editor.source_names = frozenset(sources)
    sources = sources or describe_weights(editor, params)
    bind_params(editor, params)
    for rules in PHASES:
        apply_phase(editor, rules)
    editor.prune()
    if not sources:
        return share_constants(editor.build())
    for name, origin in editor.origins.items():
        # A value that was added shares the source node of the value that it was made for.
        if origin in sources:
            sources[name] = sources[origin]
    return share_constants(editor.build({SOURCES_ATTR: json.dumps(sources)}))
