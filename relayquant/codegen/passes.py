"""QNN or float module -> scheduled TIR: the Relax pipeline that `relayquant.compile` uses.

It is passed to `tvm.compile`.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.target import Target

from relayquant.codegen.checks.inputs import create_input_checks
from relayquant.codegen.checks.shape_rules import describe_misfit
from relayquant.codegen.checks.shapes import create_shape_checks, find_shape_checks
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.isa.select import select_bf16
from relayquant.codegen.legalization.declared import list_legalizations
from relayquant.codegen.lowering.attention import lower_attention
from relayquant.codegen.lowering.floating.lower import lower_float
from relayquant.codegen.lowering.grouped import lower_grouped
from relayquant.codegen.lowering.integer.lower import has_integer_main, lower_integer
from relayquant.codegen.lowering.masked_attention import lower_masked_attention
from relayquant.codegen.lowering.recurrent import lower_recurrent
from relayquant.codegen.lowering.row_norms import lower_row_norms
from relayquant.codegen.rewrites.empty_values import fill_empty_values
from relayquant.codegen.rewrites.inner_sizes import settle_inner_sizes
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.rewrites.order import order_values
from relayquant.codegen.rewrites.split_int64_accumulation import split_int64_sums
from relayquant.codegen.rewrites.spread_images import mark_spreads
from relayquant.codegen.rewrites.transposed_blocks import make_pixel_blocks
from relayquant.codegen.rewrites.transposed_sequences import lay_sequences
from relayquant.codegen.rewrites.type_promotion import widen_types
from relayquant.codegen.rewrites.zero_point_correction import subtract_zero_points
from relayquant.codegen.schedule.composed_sizes import NAME_SIZES
from relayquant.codegen.schedule.flat_positions import create_flattening_pass
from relayquant.codegen.schedule.fusion import KEEP_APART, SIZES_FIRST
from relayquant.codegen.schedule.memory import PLAN_MEMORY
from relayquant.codegen.schedule.periods import create_hiding_pass
from relayquant.codegen.schedule.reduction_init import create_reduction_init_pass
from relayquant.codegen.schedule.reshapes import REWRITE_RESHAPES
from relayquant.codegen.schedule.schedule_pass import create_schedule_pass
from relayquant.codegen.schedule.vector_math import create_math_pass
from relayquant.codegen.schedule.wrapping import create_wrapping_pass
from relayquant.codegen.threads import add_pool
from relayquant.codegen.tuning.tuner import (
    ChooseFloatSchedule,
    ChooseSchedule,
    keep_estimate,
    keep_float_estimate,
)
from relayquant.config import Precision
from relayquant.ir.float_precision import find_float_precision
from relayquant.ir.fourier import write_products
from relayquant.ir.rewrite.casts import beside_casts


def make_pipeline(
    target: Target,
    choose_schedule: ChooseSchedule = keep_estimate,
    precision: Precision | None = None,
    keeps_rows: bool = False,
    choose_float: ChooseFloatSchedule = keep_float_estimate,
) -> tvm.transform.Pass:
    """Make a Relax pipeline for a target: kernels, legalization, schedules, TVM's own lowering.

    `precision` None: the one that the module asks for. `keeps_rows`: rows are rounded to 8 bits
    or, for attention, not at all, also where a function lets many of them be rounded to bfloat16.

    Raises:
        ConfigError: The target has no instructions for the precision.
    """

    def select(precision: Precision) -> Bf16Isa | None:
        return select_bf16(target) if precision is Precision.BF16 else None

    chosen = None if precision is None else select(precision)

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        bf16 = select(find_float_precision(mod)) if precision is None else chosen
        mod = settle_inner_sizes(write_products(mod))
        checks = find_shape_checks(mod)
        mod = fill_empty_values(mod, describe_misfit)
        if has_integer_main(mod):
            mod = split_int64_sums(subtract_zero_points(mod))
        mod = make_pixel_blocks(convert_layout(mark_spreads(lay_sequences(mod))))
        if bf16 is None:
            mod = lower_masked_attention(mod, target)
        mod = lower_integer(mod, target, choose_schedule)
        mod = lower_grouped(
            lower_row_norms(mod, target),
            target,
            keeps_rows=keeps_rows,
            rounds_floats=bf16 is not None,
        )
        mod = lower_recurrent(lower_attention(mod, target, keeps_rows=keeps_rows), target)
        mod = lower_float(
            widen_types(order_values(mod)), target, bf16=bf16, choose_schedule=choose_float
        )
        with target:
            return add_pool(make_lowering(target, create_shape_checks(checks))(mod), target)

    return tvm.transform.module_pass(run, opt_level=0, name="relayquant.codegen")  # pyright: ignore[reportReturnType]


def make_lowering(target: Target, check_shapes: tvm.transform.Pass) -> tvm.transform.Pass:
    """Make the passes after the choice of kernels: TVM's own pipeline, with some of ours in it."""
    return tvm.transform.Sequential(
        [
            # sort, topk and cumulative sums, which have no legalization
            relax.backend.DispatchSortScan(),
            relax.backend.DispatchSampling(),
            relax.transform.LegalizeOps(list_legalizations()),
            relax.transform.AnnotateTIROpPattern(),
            KEEP_APART,
            relax.transform.FuseOps(),
            beside_casts(relax.transform.FuseTIR()),
            SIZES_FIRST,
            NAME_SIZES,
            create_schedule_pass(target),
            create_reduction_init_pass(),
            create_math_pass(target),
            create_wrapping_pass(target),
            REWRITE_RESHAPES,
            create_flattening_pass(),
            create_hiding_pass(target),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            check_shapes,
            create_input_checks(target),
            relax.transform.CallTIRRewrite(),
            PLAN_MEMORY,
            relax.transform.LowerAllocTensor(),
            beside_casts(relax.transform.KillAfterLastUse()),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )
