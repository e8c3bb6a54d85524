"""lower_float: float operators -> calls of float kernels; the counterpart of `integer`.

Weights are packed.

Runs before LegalizeOps, on float modules and on the float operators of quantized modules. The
kernels of convolutions (already in the kernels' layout) and of matrix products also compute the
bias, residual, relu or clip that follows. Operators without a kernel are left for the generic
schedule. Constant weights are packed here. Other weights are packed by a kernel at run time, for
example in a calibration graph whose scales are parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, IRModule
from tvm.target import Target

from relayquant.codegen.kernels.floating.bf16 import (
    Bf16Conv2d,
    make_bf16_conv2d,
    pack_bf16,
    plan_bf16,
    read_bf16_conv2d,
    read_bf16_dense,
)
from relayquant.codegen.kernels.floating.bf16_matmul import (
    Bf16Matmul,
    make_bf16_matmul,
    read_bf16_matmul,
)
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d, make_conv2d_packing
from relayquant.codegen.kernels.floating.convolution.free import (
    FreeFloatConv2d,
    count_packed,
    make_free_conv2d,
    make_free_packing,
    pack_free_conv2d,
)
from relayquant.codegen.kernels.floating.convolution.free_depthwise import make_free_depthwise
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    pack_conv2d,
    packed_conv2d_size,
)
from relayquant.codegen.kernels.floating.convolution.transposed import (
    FloatConv2dTranspose,
    make_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.floating.convolution.winograd import (
    make_winograd,
    pack_winograd,
    prefers_winograd,
)
from relayquant.codegen.kernels.floating.gemm import (
    FloatDense,
    FloatMatmul,
    make_batch_matmul,
    make_dense,
    pack_dense,
)
from relayquant.codegen.kernels.floating.matmul_transposed_b import FEW_ROWS, FloatDots, make_dots
from relayquant.codegen.kernels.floating.stored import Stored
from relayquant.codegen.kernels.floating.tile import (
    FEWEST_CHANNELS,
    FloatCopy,
    FloatEpilogue,
    FloatIsa,
    choose_float_isa,
    make_copy,
)
from relayquant.codegen.kernels.integer.pool import MaxPool2d, build_max_pool2d
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.windows import ConvWindows
from relayquant.codegen.lowering.concat import find_columns, list_missing
from relayquant.codegen.lowering.curve import follow_curve
from relayquant.codegen.lowering.engine import (
    BlockView,
    Kernel,
    KernelRule,
    Lowered,
    Operand,
    lower_functions,
)
from relayquant.codegen.lowering.integer.elementwise import make_window
from relayquant.codegen.lowering.integer.linear import order_transposed_weight
from relayquant.codegen.lowering.joined_slices import read_joined_slices
from relayquant.codegen.lowering.kernel_call import build_for_batch, split_batch, vector
from relayquant.codegen.lowering.narrow_values import StoringKernel, store_narrow
from relayquant.codegen.tuning.tuner import ChooseFloatSchedule, keep_float_estimate
from relayquant.ir.rewrite.conv_view import Conv2dView, ConvView
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain, float_takes, follow_epilogue
from relayquant.ir.rewrite.expressions import (
    is_float32,
    op_name,
    same_extents,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.graph import static_size
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import Skip, decline, make_rule

#: Layouts of data and weights for the convolution kernels.
CONV_LAYOUT = ("NHWC", "OHWI")
#: The same for convolutions of sequences.
SEQUENCE_LAYOUT = ("NWC", "OWI")
#: The same for transposed convolutions, whose weights are rearranged when they are packed.
CONV_TRANSPOSE_LAYOUT = ("NHWC", "IOHW")
#: Kernels take a bias as an array with one number per channel, so the bias has to be constant.
TAKES = float_takes(GenericConst)


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


def make_max_pool2d(
    spec: MaxPool2d, _isa: FloatIsa, name: str, symbolic: bool = False
) -> tirx.PrimFunc:
    """Make a PrimFunc(x, y) of a pool. With `symbolic`, the batch size is known at run time."""
    return build_for_batch(lambda: build_max_pool2d(spec, name), symbolic, (0, 1))


MAKERS: dict[str, Any] = {
    "float_conv2d": make_conv2d,
    "float_winograd": make_winograd,
    "float_conv2d_packing": make_conv2d_packing,
    "float_conv2d_transpose": make_conv2d_transpose,
    "float_copy": make_copy,
    "float_max_pool2d": make_max_pool2d,
    "float_max_pool2d_of_images": partial(make_max_pool2d, symbolic=True),
    "float_dense": make_dense,
    "float_free_conv2d": make_free_conv2d,
    "float_free_depthwise": make_free_depthwise,
    "float_free_packing": make_free_packing,
    "float_batch_matmul": make_batch_matmul,
    "float_dots": make_dots,
}


@dataclass(frozen=True, eq=False)
class ConvOperands:
    """What a convolution reads, in the layout of the kernels; sequences as images of height 1.

    Attributes:
        shape: Of the data, NHWC.
        kernel: Shape of the weights, OHWI.
        numbers: Strides, padding, dilation and groups.
        is_sequence: Whether the tensors have no height.
    """

    shape: list[Any]
    kernel: list[Any]
    numbers: Conv2dView
    is_sequence: bool

    @staticmethod
    def read(call: Call) -> ConvOperands | Skip:
        """Read a nn.conv2d or nn.conv1d. Skip for other layouts and types than the kernels take."""
        view = ConvView.of(call)
        layouts = view.layout, view.kernel_layout, view.out_layout
        if layouts not in [(*each, each[0]) for each in (CONV_LAYOUT, SEQUENCE_LAYOUT)]:
            return Skip(f"layout {'/'.join(layouts)}")
        if not all(is_float32(each) for each in (*call.args, call)):
            return decline("not float32 of known rank")
        shape, kernel = (shape_of(each) for each in call.args)
        is_sequence = len(shape) == 3
        if is_sequence:
            one = tirx.IntImm("int64", 1)
            shape, kernel = [shape[0], one, *shape[1:]], [kernel[0], one, *kernel[1:]]
        return ConvOperands(shape, kernel, view.as_2d(), is_sequence)


def read_conv2d(call: Call) -> FloatConv2d | Skip:
    """Read the specification of a nn.conv2d in the layout of the kernels, for one image; or of a
    nn.conv1d, as a convolution of height 1.

    Returns:
        Skip with the reason if no kernel computes it.
    """
    found = ConvOperands.read(call)
    if isinstance(found, Skip):
        return found
    numbers = found.numbers
    sizes = static_sizes([*found.shape[1:], *found.kernel])
    if sizes is None:
        return decline("a size other than the batch is symbolic")
    height, width, channels, outputs, kh, kw, _ = sizes
    spec = FloatConv2d(
        1,
        height,
        width,
        channels,
        outputs,
        (kh, kw),
        numbers.strides,
        numbers.padding,
        numbers.dilation,
        numbers.groups,
        is_sequence=found.is_sequence,
    )
    if min(spec.group_out, outputs) < FEWEST_CHANNELS and not spec.is_depthwise:
        return decline("too few channels")
    if min(spec.padding) < 0:
        return decline("the padding is negative")
    if min(spec.out_size) < 1:
        return decline("the result is empty")
    return spec


def read_conv2d_transpose(call: Call) -> FloatConv2dTranspose | Skip:
    """Read the specification of a nn.conv2d_transpose, for one image and in any layout of the data.

    Returns:
        Skip with the reason if no kernel computes it.
    """
    data, weight = call.args
    view = ConvView.of(call)
    if sorted(view.layout) != sorted("NHWC") or view.out_layout != view.layout:
        return Skip(f"layout {view.layout}/{view.out_layout}")
    if not (is_float32(data) and is_float32(weight) and isinstance(weight, GenericConst)):
        return decline("not float32 of known rank, or the weights are not constant")
    extents = dict(zip(view.layout, shape_of(data), strict=True))
    sizes = static_sizes([extents[letter] for letter in "HWC"])
    if sizes is None:
        return decline("a size other than the batch is symbolic")
    kernel = dict(zip(view.kernel_layout, map(int, weight.ty.shape.values), strict=True))
    numbers = view.as_2d()
    if kernel["O"] < FEWEST_CHANNELS:
        return decline("too few channels")
    if min(numbers.padding) < 0:
        return decline("the padding is negative")
    return FloatConv2dTranspose(
        1,
        *sizes,
        kernel["O"] * numbers.groups,
        (kernel["H"], kernel["W"]),
        numbers.strides,
        numbers.padding,
        numbers.dilation,
        numbers.groups,
        numbers.output_padding,
    )


@dataclass(frozen=True, eq=False)
class FloatContext:
    """Context of the float rules: a block, the instruction set and symbolic extents."""

    block: BlockView
    isa: FloatIsa
    choose_schedule: ChooseFloatSchedule = keep_float_estimate
    symbols: dict[str, tirx.Var] = field(default_factory=dict)

    def symbol(self, extent: Any) -> Any:
        """Return a constant extent as an int, or the variable for a symbolic extent."""
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        name = "n" if isinstance(extent, tirx.Var) else f"n{len(self.symbols)}"
        return self.symbols.setdefault(str(extent), tirx.Var(name, "int64"))

    def make_kernel(self, kind: str, spec: Any) -> Kernel:
        """Make the kernel `kind` (a name in MAKERS) for `spec`, with symbols known by name."""
        return Kernel(kind, repr(spec), lambda: MAKERS[kind](spec, self.isa, kind))

    @property
    def bf16(self) -> Bf16Isa | None:
        """Instructions of products with operands of bfloat16. None: they stay float32."""
        return self.isa.bf16

    def make_storing_kernel(self, kind: str, spec: Any, fields: Mapping[int, str]) -> Kernel:
        """Make the kernel for a `spec` with a field `stored`."""
        own = self.make_kernel(kind, spec)

        def choose(stored: Stored) -> Kernel:
            return self.make_kernel(kind, replace(spec, stored=stored))

        return StoringKernel(own.name, own.spec, own.build, choose, fields, is_product=False)

    def follow(self, root: relax.Var, channels: int) -> EpilogueChain:
        """Find the operators after a product that its kernel also computes."""
        start = EpilogueChain((root,), root.ty.ndim - 1, channels)
        block = self.block
        return follow_epilogue(block, start, TAKES, is_free=block.is_free)

    def choose_epilogue(self, chain: EpilogueChain) -> tuple[relax.Var | None, FloatEpilogue]:
        """Choose the epilogue of a product, and the concatenation that its kernel writes into."""
        bias, residual = chain.bias is not None, chain.residual is not None
        found = None if residual else find_columns(self.block, chain.last, "relax.concat")
        concat, columns = found or (None, None)
        return concat, FloatEpilogue(bias, residual, chain.low, chain.high, columns)

    def pack_at_run_time(
        self,
        kind: str,
        spec: FloatConv2d | FreeFloatConv2d,
        weight: relax.Expr,
        root: relax.Var,
        size: int,
    ) -> Lowered:
        """Call the kernel that packs weights which are no constant, to `size` elements. They are
        named after the result `root` of the convolution.
        """
        packing = self.make_kernel(kind, replace(spec, epilogue=FloatEpilogue()))
        packed = relax.DataflowVar(f"{root.name}_packed", relax.TensorType([size], "float32"))
        return Lowered((packed,), packing, (weight,))


def lower_conv2d(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.conv2d and nn.conv1d in the layout of the kernels."""
    call = context.block.values[root]
    data, weight = call.args
    spec = read_conv2d(call)
    if isinstance(spec, Skip):
        return spec
    chain = context.follow(root, spec.out_channels)
    concat, epilogue = context.choose_epilogue(chain)
    joined = None
    if spec.is_depthwise and not spec.is_sequence:
        data, joined = read_joined_slices(context.block.call_of, data)
    batch = context.symbol(shape_of(call.args[0])[0])
    spec = replace(spec, batch=batch, epilogue=epilogue, joined=joined)
    if context.bf16 is not None and isinstance(weight, GenericConst) and not spec.is_depthwise:
        narrow = read_bf16_conv2d(spec)
        return call_bf16(context, chain, narrow, data, weight.value.numpy(), concat)
    isa = context.isa
    kind, before = "float_conv2d", ()
    packed: Operand
    if isinstance(weight, GenericConst) and prefers_winograd(spec, isa):
        kind = "float_winograd"
        packed = pack_winograd(weight.value.numpy(), spec, isa)
    elif isinstance(weight, GenericConst):
        if not spec.is_depthwise:
            spec = replace(spec, schedule=context.choose_schedule(spec, isa))
        packed = pack_conv2d(weight.value.numpy(), spec, isa)
    else:
        size = packed_conv2d_size(spec, isa)
        packing = context.pack_at_run_time("float_conv2d_packing", spec, weight, root, size)
        packed, before = packing.output, (packing,)
    kernel = context.make_kernel(kind, spec)
    if spec.is_depthwise:
        operand = 2 + epilogue.bias
        fields = {0: "data", **({operand: "residual"} if epilogue.residual else {})}
        kernel = context.make_storing_kernel(kind, spec, fields)
    return replace(call_product(chain, kernel, data, packed, concat), before=before)


def read_free_conv2d(call: Call) -> FreeFloatConv2d | Skip:
    """Read the specification of a nn.conv2d of images of free height or width, or of a nn.conv1d of
    sequences of free length, in the layout of the kernels.

    Returns:
        Skip with the reason if no kernel computes it.
    """
    found = ConvOperands.read(call)
    if isinstance(found, Skip):
        return found
    numbers = found.numbers
    sizes = static_sizes([found.shape[-1], *found.kernel])
    if sizes is None:
        return decline("the number of channels, or a size of the weights, is symbolic")
    if static_sizes(found.shape[1:]) is not None:
        return Skip("the images have a known size")
    if min(numbers.padding) < 0:
        return decline("the padding is negative")
    channels, outputs, kh, kw, _ = sizes
    windows = ConvWindows(
        channels,
        (kh, kw),
        numbers.strides,
        numbers.padding,
        numbers.dilation,
        "float32",
        groups=numbers.groups,
        is_sequence=found.is_sequence,
    )
    return FreeFloatConv2d(windows, outputs)


def lower_free_conv2d(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.conv2d over images of free height or width, or nn.conv1d over sequences of free
    length. A convolution with one tap is a dense layer.
    """
    call = context.block.values[root]
    data, weight = call.args
    spec = read_free_conv2d(call)
    if isinstance(spec, Skip):
        return spec
    chain = context.follow(root, spec.outputs)
    concat, epilogue = context.choose_epilogue(chain)
    spec, isa, before = replace(spec, epilogue=epilogue), context.isa, ()
    packed: Operand
    if isinstance(weight, GenericConst):
        packed = pack_free_conv2d(weight.value.numpy(), spec, isa)
    else:
        size = count_packed(spec, isa)
        packing = context.pack_at_run_time("float_free_packing", spec, weight, root, size)
        packed, before = packing.output, (packing,)
    if spec.windows.is_pixel:
        # Equal layers share one kernel, so symbols have the same names in all of them.
        letters, extents = "nhw"[: data.ty.ndim - 1], shape_of(data)[:-1]
        rows = [
            static_size(extent) or tirx.Var(letter, "int64")
            for letter, extent in zip(letters, extents, strict=True)
        ]
        dense = FloatDense((*rows, spec.windows.channels), spec.outputs, epilogue)
        kernel = context.make_kernel("float_dense", dense)
    else:
        kind = "float_free_depthwise" if spec.is_depthwise else "float_free_conv2d"
        kernel = context.make_kernel(kind, spec)
    return replace(call_product(chain, kernel, data, packed, concat), before=before)


def lower_conv2d_transpose(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.conv2d_transpose in the layout of the kernels, with constant weights."""
    call = context.block.values[root]
    data, weight = call.args
    spec = read_conv2d_transpose(call)
    if isinstance(spec, Skip):
        return spec
    if str(call.attrs.data_layout) != CONV_TRANSPOSE_LAYOUT[0]:
        return Skip(f"layout {call.attrs.data_layout}")
    chain = context.follow(root, spec.out_channels)
    batch = context.symbol(shape_of(data)[0])
    concat, epilogue = context.choose_epilogue(chain)
    spec = replace(spec, batch=batch, epilogue=epilogue)
    taps = order_transposed_weight(weight.value.numpy(), str(call.attrs.kernel_layout), spec.groups)
    packed = pack_conv2d_transpose(taps, spec, context.isa)
    kernel = context.make_kernel("float_conv2d_transpose", spec)
    return call_product(chain, kernel, data, packed, concat)


def lower_matmul(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower matmul, with constant weights or of two values."""
    call = context.block.values[root]
    data, weight = call.args
    if not all(is_float32(e) for e in (data, weight, root)):
        return decline("not float32 of known rank")
    shape, other = shape_of(data), shape_of(weight)
    if len(shape) < 2 or len(other) < 2:
        return decline("vectors")
    if any(static_size(extent) == 0 for extent in (*shape, *other)):
        return decline("no elements")
    dots = read_dots(context, shape, weight)
    if dots is not None:
        spec, stored = dots
        return Lowered((root,), context.make_kernel("float_dots", spec), (data, stored))
    outputs = static_sizes(other[-1:])
    if outputs is None or outputs[0] < FEWEST_CHANNELS:
        return decline("a symbolic number of channels, or too few")
    leading = tuple(context.symbol(extent) for extent in shape[:-1])
    inner = context.symbol(shape[-1])
    if len(other) == 2 and isinstance(weight, GenericConst):
        chain = context.follow(root, outputs[0])
        concat, epilogue = context.choose_epilogue(chain)
        # The run time checks that a symbolic depth is the depth of the weights.
        spec = FloatDense((*leading, int(other[0])), outputs[0], epilogue)
        narrow = read_bf16_dense(spec)
        if context.bf16 is not None and narrow is not None:
            taps = np.ascontiguousarray(weight.value.numpy().T)
            return call_bf16(context, chain, narrow, data, taps, concat)
        spec = replace(spec, schedule=context.choose_schedule(spec, context.isa))
        packed = pack_dense(weight.value.numpy().T, spec, context.isa)
        kernel = context.make_kernel("float_dense", spec)
        return call_product(chain, kernel, data, packed, concat)
    shared = len(other) == 2
    if not shared and not same_extents(shape[:-2], other[:-2]):
        return decline("batch dimensions are broadcast")
    matmul = FloatMatmul(leading[:-1], leading[-1], inner, outputs[0], shared)
    narrow = None if context.bf16 is None else read_bf16_matmul(matmul, context.bf16)
    if narrow is not None:
        return call_bf16_matmul(context, root, narrow, data, weight)
    return Lowered((root,), context.make_kernel("float_batch_matmul", matmul), (data, weight))


def read_dots(
    context: FloatContext, shape: list[Any], weight: relax.Expr
) -> tuple[FloatDots, relax.Expr] | None:
    """Read x @ permute_dims(w) as dot products along the last axes of x and w.

    Returns:
        The specification and w. None if there is no such transposition, or if there are many rows
            and their number is known: then the transposition is worth its time.
    """
    call = context.block.call_of(weight)
    if call is None or op_name(call) != "relax.permute_dims":
        return None
    stored, ndim = call.args[0], len(shape)
    order, other = list_permutation(call), shape_of(weight)
    if len(order) != ndim or order[-2] != ndim - 1 or not is_float32(stored):
        return None
    if not same_extents(shape[:-2], other[:-2]) or static_sizes(shape[-1:]) is None:
        return None
    rows, outputs = context.symbol(shape[-2]), context.symbol(other[-1])
    if isinstance(rows, int) and isinstance(outputs, int) and rows > FEW_ROWS:
        return None
    batch = tuple(context.symbol(extent) for extent in shape[:-2])
    return FloatDots(batch, rows, int(shape[-1]), outputs, tuple(order)), stored


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


def call_product(
    chain: EpilogueChain,
    kernel: Kernel,
    data: relax.Expr,
    packed: Operand,
    concat: relax.Var | None,
) -> Lowered:
    """Call the kernel of a product with everything it takes over."""
    operands: list[Operand] = [data, packed]
    if chain.bias is not None:
        operands.append(np.ascontiguousarray(vector(chain.bias, chain.channels)))
    if chain.residual is not None:
        operands.append(chain.residual)
    return Lowered(chain.vars, kernel, tuple(operands), concat=concat)


def call_bf16(
    context: FloatContext,
    chain: EpilogueChain,
    spec: Bf16Conv2d,
    data: relax.Expr,
    weight: np.ndarray,
    concat: relax.Var | None,
) -> Lowered:
    """Call the kernel of a product with operands of bfloat16. `weight` is float32, OHWI or OI.

    The kernel also computes a curve behind the product.
    """
    isa, inside = context.bf16, chain.vars
    assert isa is not None
    if concat is None:
        more, curve = follow_curve(context.block, chain.last)
        inside = *inside, *more
        epilogue = replace(spec.conv.epilogue, curve=curve)
        spec = replace(spec, conv=replace(spec.conv, epilogue=epilogue))
    name, plan = "bf16_conv2d", plan_bf16(spec, isa)

    def choose(stored: Stored) -> Kernel:
        conv = replace(spec.conv, stored=stored)
        chosen, own = replace(spec, conv=conv), plan.with_stored(stored)
        return Kernel(name, repr(chosen), lambda: make_bf16_conv2d(chosen, isa, name, own))

    plain = choose(Stored())
    fields = {0: "data", **({3: "residual"} if chain.residual is not None else {})}
    kernel = StoringKernel(name, plain.spec, plain.build, choose, fields, is_product=True)
    bias = None if chain.bias is None else vector(chain.bias, chain.channels)
    operands: list[Operand] = [data, *pack_bf16(weight, bias, spec, isa, plan)]
    if chain.residual is not None:
        operands.append(chain.residual)
    return Lowered(inside, kernel, tuple(operands), concat=concat)


def call_bf16_matmul(
    context: FloatContext, root: relax.Var, spec: Bf16Matmul, data: relax.Expr, weight: relax.Expr
) -> Lowered:
    """Call the kernel of a product of two values, with operands of bfloat16, and a curve."""
    isa, name = context.bf16, "bf16_batch_matmul"
    assert isa is not None
    inside, curve = follow_curve(context.block, root)
    axes = [read_axes(context, operand) for operand in (data, weight)]
    spec = replace(spec, curve=curve).permute(*axes, isa)
    operands = (
        operand if used is None else context.block.call_of(operand).args[0]
        for operand, used in ((data, spec.x_axes), (weight, spec.w_axes))
    )
    kernel = Kernel(name, repr(spec), lambda: make_bf16_matmul(spec, isa, name))
    return Lowered((root, *inside), kernel, tuple(operands))


def read_axes(context: FloatContext, operand: relax.Expr) -> tuple[int, ...] | None:
    """Read the axes of a permute_dims that only one value reads. None for any other operand."""
    call = context.block.call_of(operand)
    if call is None or op_name(call) != "relax.permute_dims":
        return None
    is_read_once = context.block.only_user(operand) is not None
    return tuple(list_permutation(call)) if is_read_once else None


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
