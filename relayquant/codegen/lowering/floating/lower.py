"""lower_float: float operators -> calls of float kernels; the counterpart of `integer`.

Runs before LegalizeOps, on float modules and on the float operators of quantized modules. The
kernels of convolutions (already in the kernels' layout) and of matrix products also compute the
bias, residual, relu or clip that follows. Operators without a kernel are left for the generic
schedule. Constant weights are packed here. Other weights are packed by a kernel at run time, for
example in a calibration graph whose scales are parameters.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import relax
from tvm.ir import IRModule
from tvm.target import Target

from relayquant.codegen.kernels.floating.tile import FloatCopy, choose_float_isa
from relayquant.codegen.kernels.integer.pool import MaxPool2d
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.lowering.concat import list_missing
from relayquant.codegen.lowering.engine import BlockView, KernelRule, Lowered, lower_functions
from relayquant.codegen.lowering.floating.context import FloatContext
from relayquant.codegen.lowering.floating.convolution import (
    CONV_LAYOUT,
    lower_conv2d,
    lower_conv2d_transpose,
    lower_free_conv2d,
)
from relayquant.codegen.lowering.floating.matmul import lower_matmul
from relayquant.codegen.lowering.integer.elementwise import make_window
from relayquant.codegen.lowering.kernel_call import split_batch
from relayquant.codegen.lowering.narrow_values import store_narrow
from relayquant.codegen.tuning.tuner import ChooseFloatSchedule, keep_float_estimate
from relayquant.ir.rewrite.expressions import is_float32, shape_of
from relayquant.ir.rewrite.rule import Skip, decline, make_rule


def lower_float(
    mod: IRModule,
    target: Target,
    bf16: Bf16Isa | None = None,
    choose_schedule: ChooseFloatSchedule = keep_float_estimate,
) -> IRModule:
    """Replace float32 convolutions, max pools and matmuls of every function by calls of kernels.

    Convolutions and pools have to be in the layout of the kernels. If only a concatenation of
    channels reads a product, the kernel writes straight into the result of the concatenation.
    Inputs, outputs and names of the functions stay. Batch extents may be symbolic. Operators with
    other dtypes, with dynamic inner extents, or outside dataflow blocks stay as they are.

    With `bf16`, products have operands in bfloat16 and use these instructions.
    Values that only such products read are stored in bfloat16; see `narrow_values`.
    `choose_schedule` chooses how products of float32 are computed.
    """
    isa = replace(choose_float_isa(target), bf16=bf16)

    def refine(calls: list[Lowered], block: BlockView) -> list[Lowered]:
        return calls if bf16 is None else store_narrow(calls, block)

    return lower_functions(
        mod,
        FLOAT_RULES,
        lambda block: FloatContext(block, isa, choose_schedule),
        refine=refine,
    )


def lower_max_pool2d(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.max_pool2d in the layout of the kernels."""
    call = context.block.values[root]
    (data,) = call.args
    attrs, layout = call.attrs, CONV_LAYOUT[0]
    if str(attrs.layout) != layout or str(attrs.out_layout) not in ("", layout):
        return Skip(f"layout {attrs.layout}/{attrs.out_layout}")
    shape = split_batch(data)
    if shape is None or not is_float32(data):
        return decline("not float32, or a size other than the batch is symbolic")
    spec = MaxPool2d(make_window(call, shape[1]), "float32")
    kind = "float_max_pool2d_of_images" if shape[0] else "float_max_pool2d"
    return Lowered((root,), context.make_storing_kernel(kind, spec, {0: "data"}), (data,))


def copy_parts(context: FloatContext, concat: relax.Var) -> Lowered | Skip:
    """Copy those inputs of a concatenation that no kernel writes in place; see `list_missing`."""
    missing = list_missing(context.block, concat)
    if isinstance(missing, Skip):
        return missing
    *leading, total = map(context.symbol, shape_of(concat))
    copies = list[Lowered]()
    for part, (first, size) in missing:
        kernel = context.make_kernel("float_copy", FloatCopy((*leading, size), (first, total)))
        copies.append(Lowered((concat,), kernel, (part,), concat=concat))
    return replace(copies[-1], before=tuple(copies[:-1]))


FLOAT_RULES: tuple[KernelRule[FloatContext], ...] = (
    make_rule(lower_conv2d, "relax.nn.conv2d", "relax.nn.conv1d"),
    make_rule(lower_free_conv2d, "relax.nn.conv2d", "relax.nn.conv1d"),
    make_rule(lower_conv2d_transpose, "relax.nn.conv2d_transpose"),
    make_rule(lower_matmul, "relax.matmul"),
    make_rule(lower_max_pool2d, "relax.nn.max_pool2d"),
    make_rule(copy_parts, "relax.concat"),
)
