"""Rules of the canonical form and the function that applies them: float module -> canonical
float module.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import tvm
from tvm import relax

from relayquant.base.user_calls import call_user
from relayquant.errors import ConfigError
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.ops.callbacks import check_value
from relayquant.ir.rewrite import Emitter, Match, Rule, Skip, apply_rules
from relayquant.ir.rewrite.bind import bind_params, describe_weights
from relayquant.ir.rewrite.constants import share_constants
from relayquant.ir.rewrite.editor import Clamp, Editor
from relayquant.ir.rewrite.entry import name_main
from relayquant.ir.rewrite.function import SOURCES_ATTR
from relayquant.ir.rewrite.index_limits import LIMITS_ATTR, find_index_limits
from relayquant.ir.rewrite.moves import MOVES
from relayquant.ir.rewrite.rule import make_rule
from relayquant.stages.preparation.cells.join import join_cells
from relayquant.stages.preparation.engine import ALIAS, PROJECTION, CanonicalRule, apply_phase
from relayquant.stages.preparation.finite import check_constants
from relayquant.stages.preparation.rules.branches import join_branches
from relayquant.stages.preparation.rules.channel_folding import (
    ARITHMETIC,
    fold_behind_concat,
    fold_channel_affine,
)
from relayquant.stages.preparation.rules.clamp import (
    CLAMPS,
    canonicalize_clamp,
    clamp_inside_concat,
    prelu_to_leaky_relu,
    where_to_prelu,
)
from relayquant.stages.preparation.rules.constants import (
    fold_constants,
    fold_shapes,
    merge_constant_adds,
)
from relayquant.stages.preparation.rules.data_movement import bound_indices, stack_to_concat
from relayquant.stages.preparation.rules.dense import (
    merge_reshapes,
    move_bias_inside,
    put_weight_second,
    read_matrix_once,
    split_stack,
    squeeze_weight,
    unflatten_dense,
    vectors_to_matrices,
)
from relayquant.stages.preparation.rules.identity import (
    NEUTRAL,
    REPEATED,
    SAME_SHAPE,
    choose_side,
    count_axes_from_front,
    merge_equal,
    project_tuple,
    put_constant_second,
    remove_alias,
    remove_neutral,
    remove_no_op,
    remove_single_concat,
    split_to_slice,
)
from relayquant.stages.preparation.rules.norms import (
    NORMS,
    canonicalize_batch_norm,
    fill_norm_factors,
)
from relayquant.stages.preparation.rules.pooling import (
    FLATTENS,
    WHOLE_MAP,
    WINDOWS,
    flatten_to_reshape,
    fold_pad,
    pool_to_mean,
    widen_average,
)
from relayquant.stages.preparation.rules.quantized import (
    center_weight,
    move_inside_dequantize,
    name_dialect,
)
from relayquant.stages.preparation.rules.raise_tir import recover_call_tir
from relayquant.stages.preparation.rules.volumes import (
    AVG_POOL3D,
    CONV3D,
    MAX_POOL3D,
    MOVED,
    TRANSPOSED,
    avg_pool3d_to_avg_pool2d,
    conv3d_to_conv2d,
    conv3d_transpose_to_conv2d_transpose,
    join_volumes,
    max_pool3d_to_max_pool2d,
    move_before_volume,
    transpose_with_bias,
)

#: applied at every value, in this order
RULES: tuple[CanonicalRule, ...] = (
    make_rule(remove_alias, ALIAS),
    make_rule(project_tuple, PROJECTION),
    make_rule(split_to_slice, PROJECTION),
    make_rule(count_axes_from_front, "relax.squeeze", "relax.permute_dims"),
    make_rule(recover_call_tir, "relax.call_tir"),
    make_rule(
        fold_shapes,
        "relax.shape_of",
        "relax.shape_to_tensor",
        "relax.tensor_to_shape",
        "relax.take",
    ),
    make_rule(bound_indices, "relax.take"),
    make_rule(fold_constants),
    make_rule(name_dialect, "relax.quantize", "relax.dequantize"),
    make_rule(merge_equal, *REPEATED),
    make_rule(center_weight, DEQUANTIZE),
    make_rule(move_inside_dequantize, *MOVES),
    make_rule(stack_to_concat, "relax.stack"),
    make_rule(remove_single_concat, "relax.concat"),
    make_rule(remove_no_op, *SAME_SHAPE),
    make_rule(flatten_to_reshape, *FLATTENS),
    make_rule(pool_to_mean, *WHOLE_MAP),
    make_rule(put_constant_second, "relax.add", "relax.multiply", "relax.maximum", "relax.minimum"),
    make_rule(remove_neutral, *NEUTRAL),
    make_rule(vectors_to_matrices, "relax.matmul"),
    make_rule(squeeze_weight, "relax.matmul"),
    make_rule(read_matrix_once, "relax.matmul"),
    make_rule(split_stack, "relax.matmul"),
    make_rule(put_weight_second, "relax.matmul"),
    make_rule(merge_reshapes, "relax.reshape"),
    make_rule(fold_channel_affine, PROJECTION, *ARITHMETIC),
    make_rule(fold_behind_concat, PROJECTION, *ARITHMETIC),
    make_rule(unflatten_dense, "relax.reshape"),
    make_rule(move_bias_inside, "relax.add"),
    make_rule(merge_constant_adds, "relax.add"),
    make_rule(join_branches, "relax.add"),
    make_rule(fill_norm_factors, *NORMS),
    make_rule(canonicalize_clamp, *CLAMPS),
    make_rule(clamp_inside_concat, *CLAMPS),
    make_rule(choose_side, "relax.where"),
    make_rule(where_to_prelu, "relax.where"),
    make_rule(prelu_to_leaky_relu, "relax.nn.prelu"),
    make_rule(fold_pad, *WINDOWS),
    make_rule(widen_average, "relax.nn.avg_pool1d"),
)

#: operators on volumes -> the rules that turn them into operators on images
VOLUME_RULES: dict[str, tuple[CanonicalRule, ...]] = {
    CONV3D: (make_rule(conv3d_to_conv2d, CONV3D),),
    TRANSPOSED: (
        make_rule(conv3d_transpose_to_conv2d_transpose, TRANSPOSED),
        make_rule(transpose_with_bias, "relax.add"),
    ),
    MAX_POOL3D: (make_rule(max_pool3d_to_max_pool2d, MAX_POOL3D),),
    AVG_POOL3D: (make_rule(avg_pool3d_to_avg_pool2d, AVG_POOL3D),),
}
#: operators between them that also run on images
IMAGE_RULES: tuple[CanonicalRule, ...] = (
    make_rule(move_before_volume, *MOVED),
    make_rule(join_volumes, "relax.concat"),
)

#: Each phase starts from the result of the phase before. A batch norm is expanded only if no
#: operator could absorb it. By then a convolution of volumes has its weights.
PHASES: tuple[tuple[CanonicalRule, ...], ...] = (
    RULES,
    (make_rule(canonicalize_batch_norm, PROJECTION), *RULES),
    (*chain.from_iterable(VOLUME_RULES.values()), *IMAGE_RULES, *RULES),
)


def prepare_module(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    *,
    keep: Collection[str] = (),
    needs_finite: bool = False,
) -> tvm.IRModule:
    """Return the canonical form of a float module; the input is not changed.

    The result has one Relax function `main` with one dataflow block in A-normal form. A value that
    equals a value of the input keeps its name. Attributes are kept, and `relayquant.sources` gets
    rows for the added values. Equal constants become one.

    Args:
        mod: A module with a Relax function main (see `name_main`), without control flow or side
            effects.
        params: Values to bind, by parameter name; None if they are bound already.
        keep: Names of operators on volumes that stay because the backend has rows for them.
        needs_finite: Refuse weights and biases that are not usable numbers (`check_constants`).

    Raises:
        ModelError: no function is the model, the module has control flow, params do not fit, or,
            with `needs_finite`, weights or biases are not usable numbers.
    """
    editor = Editor(mod)
    limits = find_index_limits(name_main(mod)["main"])
    noted = {LIMITS_ATTR: json.dumps(limits)} if limits else {}
    sources = json.loads(str(editor.attrs.get(SOURCES_ATTR, "{}")))
    editor.source_names = frozenset(sources)
    sources = sources or describe_weights(editor, params)
    bind_params(editor, params)
    if needs_finite:
        editor.prune()
        check_constants(editor, sources)
    kept = set(chain.from_iterable(VOLUME_RULES.get(op, ()) for op in keep))
    for number, rules in enumerate(PHASES):
        apply_phase(editor, [rule for rule in rules if rule not in kept])
        if not number:
            join_cells(editor)
    editor.prune()
    if not sources:
        return share_constants(editor.build(noted))
    for name, origin in editor.origins.items():
        # An added value has the source node of the value that it was made for.
        if origin in sources:
            sources[name] = sources[origin]
    for name, parts in editor.clamps.items():
        # Training follows each of them: they have different gradients at their bounds.
        own = [each for part in parts for each in list_parts(sources, part)]
        if name in sources:
            sources[name] = {**sources[name], "clamps": own}
    return share_constants(editor.build({SOURCES_ATTR: json.dumps(sources), **noted}))


def list_parts(sources: Mapping[str, Any], part: Clamp) -> list[list[Any]]:
    """Return rows [operator, operator of the source model, low, high]. Several for a clamp that
    was merged already when the module was prepared before.
    """
    row = sources.get(part.name, {})
    return row.get("clamps") or [[part.operator, row.get("op", ""), part.low, part.high]]


# --- the user's rules ---------------------------------------------------------------------------

#: A user's rule that makes one operator of what a backend wants to see as one
#: (`BackendConfig.with_fuser`).
Fuser = Rule[Emitter, Match, relax.Expr]


def apply_fusers(mod: tvm.IRModule, fusers: Sequence[Fuser], keep: Collection[str]) -> tvm.IRModule:
    """Apply the backend's fusers until none fires, and bring the module into canonical form again.

    Args:
        keep: As for `prepare_module`.

    Raises:
        ConfigError: a fuser failed, returned a value that cannot replace the match, or never stops
            firing.
    """
    if not fusers:
        return mod
    try:
        fused = apply_rules(mod, [guard_fuser(fuser) for fuser in fusers])
    except RuntimeError as error:
        raise ConfigError(f"BackendConfig.fusers: {error}", code="RQ106") from error
    return prepare_module(fused, keep=keep)


def guard_fuser(fuser: Fuser) -> Fuser:
    """Wrap a fuser so that its errors name the fuser and the operator."""

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        where = f"Operator {match.name!r}, fuser {fuser.name!r}"
        value = call_user(where, lambda: fuser.rewrite(emitter, match))
        if isinstance(value, Skip):
            return value
        return check_value(emitter, value, match.root, where, "a Skip(reason), or an expression")

    return replace(fuser, rewrite=rewrite)
