"""lower_float: float operators -> calls of float kernels, weights packed; the counterpart of
`integer`.

Runs before LegalizeOps on float modules, and on what is float in quantized ones. Convolutions, in
the layout of the kernels already, and matrix products take what follows them (bias, residual, relu
or clip) into their kernel; whatever has no kernel is left for the generic schedule. Weights that
are constants are packed here; others, as those of a calibration graph whose scales are parameters,
are packed by a kernel at run time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, IRModule, Op
from tvm.target import Target

from relayquant.codegen.rules.kernel_call import vector
from relayquant.codegen.rules.linear import order_transposed_weight
from relayquant.dialect.cost import MACS_ATTR, count_macs
from relayquant.kernels.emit import IS_SCHEDULED
from relayquant.kernels.floating.conv import (
    FloatConv2d,
    make_conv2d,
    make_conv2d_packing,
    pack_conv2d,
    packed_conv2d_size,
)
from relayquant.kernels.floating.conv_transpose import (
    FloatConv2dTranspose,
    make_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.kernels.floating.gemm import (
    FloatDense,
    FloatMatmul,
    make_batch_matmul,
    make_dense,
    pack_dense,
)
from relayquant.kernels.floating.tile import (
    FEWEST_CHANNELS,
    FloatEpilogue,
    FloatIsa,
    choose_float_isa,
)
from relayquant.rewrite.expressions import (
    FunctionGraph,
    expand_padding,
    is_float32,
    op_name,
    pair,
    same_extents,
    shape_of,
    static_sizes,
)
from relayquant.rewrite.rule import (
    OnSkip,
    Rule,
    Skip,
    decline,
    fire_first,
    log_skip,
    make_rule,
    select_rules,
)
from relayquant.rewrite.tail import Tail, float_takes, follow_tail

#: Layout of data and weights that the convolution kernels take.
CONV_LAYOUT = ("NHWC", "OHWI")
#: The same of transposed convolutions, whose weights are turned when they are packed.
CONV_TRANSPOSE_LAYOUT = ("NHWC", "IOHW")
#: relax::OpPatternKind::kOpaque: FuseOps must not put anything into a finished kernel
OPAQUE = 8
#: Kernels get a bias as an array, one number per channel, so that it has to be known.
TAKES = float_takes(GenericConst)


#: A product with its tail, and the bindings that compute it.
Lowered = tuple[Tail, list[relax.Binding]]


def lower_float(mod: IRModule, target: Target, on_skip: OnSkip = log_skip) -> IRModule:
    """Replace float32 conv2d, conv2d_transpose, in the layout of the kernels, and matmul of every
    Relax function by calls of packed kernels.

    Inputs, outputs and names of the functions stay. Batch extents may be symbolic. Operators with
    other dtypes, with dynamic inner extents, or outside dataflow blocks stay as they are; `on_skip`
    hears why.
    """
    kernels = Kernels(mod, choose_float_isa(target))
    for gvar, func in list(mod.functions_items()):
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            kernels.builder.update_func(gvar, FunctionLowering(func, kernels, on_skip).run())
    mod = relax.transform.Normalize()(kernels.builder.get())
    relax.analysis.well_formed(mod)
    return mod


class Kernels:
    """The kernels of one module: each distinct specification is generated once."""

    def __init__(self, mod: IRModule, isa: FloatIsa) -> None:
        self.builder = relax.BlockBuilder(mod)
        self.isa = isa
        self._made: dict[tuple[str, str], tvm.ir.GlobalVar] = {}

    def get(self, kind: str, spec: Any, macs: int = 0) -> tvm.ir.GlobalVar:
        """Global variable of the kernel `kind` (a name in MAKERS) for `spec`, with MACS_ATTR."""
        key = kind, repr(spec)
        if key not in self._made:
            func = MAKERS[kind](spec, self.isa, kind).without_attr("global_symbol")
            # Opaque: FuseTIR cannot merge a kernel that has no blocks with its neighbours.
            func = func.with_attrs({"op_pattern": OPAQUE, IS_SCHEDULED: True, MACS_ATTR: macs})
            self._made[key] = self.builder.add_func(func, kind)
        return self._made[key]


MAKERS: dict[str, Any] = {
    "float_conv2d": make_conv2d,
    "float_conv2d_packing": make_conv2d_packing,
    "float_conv2d_transpose": make_conv2d_transpose,
    "float_dense": make_dense,
    "float_batch_matmul": make_batch_matmul,
}


def read_conv2d_transpose(call: Call) -> FloatConv2dTranspose | Skip:
    """What a nn.conv2d_transpose computes, for one image and in any layout of the data; or why no
    kernel does.
    """
    data, weight = call.args
    attrs = call.attrs
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    if sorted(data_layout) != sorted("NHWC") or str(attrs.out_layout) not in ("", data_layout):
        return Skip(f"layout {data_layout}/{attrs.out_layout}")
    if not (is_float32(data) and is_float32(weight) and isinstance(weight, GenericConst)):
        return decline("not float32 of known rank, or weights that are no constants")
    extents = dict(zip(data_layout, shape_of(data), strict=True))
    sizes = static_sizes([extents[letter] for letter in "HWC"])
    if sizes is None:
        return decline("a size other than the batch is symbolic")
    kernel = dict(zip(kernel_layout, map(int, weight.ty.shape.values), strict=True))
    groups = int(attrs.groups)
    if kernel["O"] < FEWEST_CHANNELS:
        return decline("too few channels")
    if min(expand_padding(attrs.padding)) < 0:
        return decline("the padding is negative")
    return FloatConv2dTranspose(
        1,
        *sizes,
        kernel["O"] * groups,
        (kernel["H"], kernel["W"]),
        pair(attrs.strides),
        expand_padding(attrs.padding),
        pair(attrs.output_padding),
        pair(attrs.dilation),
        groups,
    )


def make_epilogue(tail: Tail) -> FloatEpilogue:
    """What the kernel of a product does with its sums."""
    return FloatEpilogue(tail.bias is not None, tail.residual is not None, tail.low, tail.high)


class FunctionLowering:
    """Rewrites the dataflow blocks of one function."""

    def __init__(self, func: relax.Function, kernels: Kernels, on_skip: OnSkip) -> None:
        self.func, self.kernels, self.on_skip = func, kernels, on_skip
        self.graph = FunctionGraph(func)
        self.builder = kernels.builder
        self.symbols: dict[str, tirx.Var] = {}
        #: values that some kernel computes already: a sum of two products belongs to one of them
        self.claimed: set[relax.Var] = set()
        #: values of the block that is rewritten
        self.inside: set[relax.Var] = set()

    def run(self) -> relax.Function:
        """The function with its products replaced."""
        blocks = []
        for block in self.func.body.blocks:
            if isinstance(block, relax.DataflowBlock):
                block = relax.DataflowBlock(self.rewrite(block.bindings))
            blocks.append(block)
        body = relax.SeqExpr(blocks, self.func.body.body)
        func = self.func
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)

    def rewrite(self, bindings: list[relax.Binding]) -> list[relax.Binding]:
        """Bindings of one block; a kernel call stands where the last absorbed value stood."""
        self.inside = {binding.var for binding in bindings}
        replaced: dict[relax.Var, list[relax.Binding]] = {}
        dropped: set[relax.Var] = set()
        for binding in bindings:
            call = self.graph.call_of(binding.var)
            rules = select_rules(FLOAT_RULES, op_name(call) if call is not None else "")
            tried = ((rule, binding.var) for rule in rules)
            found = fire_first(tried, self, binding.var.name, self.on_skip)
            if found is None:
                continue
            tail, new = found[1]
            replaced[tail.last] = new
            dropped.update(tail.vars[:-1])
        result: list[relax.Binding] = []
        for binding in bindings:
            new = replaced.get(binding.var)
            if new is not None:
                result.extend(new)
            elif binding.var not in dropped:
                result.append(binding)
        return result

    def follow(self, root: relax.Var, channels: int) -> Tail:
        """The product and what its kernel takes over."""
        tail = follow_tail(
            self.graph,
            Tail((root,), root.ty.ndim - 1, channels),
            TAKES,
            is_free=lambda user: user in self.inside and user not in self.claimed,
            on_skip=self.on_skip,
        )
        self.claimed.update(tail.vars)
        return tail

    def lower_conv2d(self, root: relax.Var) -> Lowered | Skip:
        """nn.conv2d in the layout of the kernels."""
        call = self.graph.values[root]
        data, weight = call.args
        attrs = call.attrs
        layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
        if layouts != (*CONV_LAYOUT, CONV_LAYOUT[0]):
            return Skip(f"layout {'/'.join(layouts)}")
        if not all(is_float32(e) for e in (data, weight, root)):
            return decline("not float32 of known rank")
        shape, kernel = shape_of(data), shape_of(weight)
        sizes = static_sizes([*shape[1:], *kernel])
        if sizes is None:
            return decline("a size other than the batch is symbolic")
        height, width, channels, outputs, kh, kw, _ = sizes
        spec = FloatConv2d(
            self.symbol(shape[0]),
            height,
            width,
            channels,
            outputs,
            (kh, kw),
            pair(attrs.strides),
            expand_padding(attrs.padding),
            pair(attrs.dilation),
            int(attrs.groups),
        )
        if min(spec.group_out, outputs) < FEWEST_CHANNELS and not spec.is_depthwise:
            return decline("too few channels")
        if min(spec.padding) < 0:
            return decline("the padding is negative")
        tail = self.follow(root, outputs)
        spec = replace(spec, epilogue=make_epilogue(tail))
        isa = self.kernels.isa
        before: list[relax.Binding] = []
        if isinstance(weight, GenericConst):
            packed: relax.Expr = relax.const(pack_conv2d(weight.value.numpy(), spec, isa))
        else:
            bare = replace(spec, epilogue=FloatEpilogue())
            packing = self.kernels.get("float_conv2d_packing", bare)
            ty = relax.TensorType([packed_conv2d_size(spec, isa)], "float32")
            packed = relax.DataflowVar(f"{root.name}_packed", ty)
            before.append(self.bind(packed, packing, [weight]))
        kernel_var = self.kernels.get("float_conv2d", spec, count_macs(call))
        return tail, [*before, self.bind_product(tail, kernel_var, data, packed)]

    def lower_conv2d_transpose(self, root: relax.Var) -> Lowered | Skip:
        """nn.conv2d_transpose in the layout of the kernels, by constants."""
        call = self.graph.values[root]
        data, weight = call.args
        spec = read_conv2d_transpose(call)
        if isinstance(spec, Skip):
            return spec
        if str(call.attrs.data_layout) != CONV_TRANSPOSE_LAYOUT[0]:
            return Skip(f"layout {call.attrs.data_layout}")
        tail = self.follow(root, spec.out_channels)
        batch = self.symbol(shape_of(data)[0])
        spec = replace(spec, batch=batch, epilogue=make_epilogue(tail))
        taps = order_transposed_weight(
            weight.value.numpy(), str(call.attrs.kernel_layout), spec.groups
        )
        packed = relax.const(pack_conv2d_transpose(taps, spec, self.kernels.isa))
        kernel = self.kernels.get("float_conv2d_transpose", spec, count_macs(call))
        return tail, [self.bind_product(tail, kernel, data, packed)]

    def lower_matmul(self, root: relax.Var) -> Lowered | Skip:
        """matmul by constants, and of two values."""
        call = self.graph.values[root]
        data, weight = call.args
        if not all(is_float32(e) for e in (data, weight, root)):
            return decline("not float32 of known rank")
        shape, other = shape_of(data), shape_of(weight)
        inner = static_sizes([shape[-1], *other[-2:]])
        if len(shape) < 2 or len(other) < 2 or inner is None or inner[2] < FEWEST_CHANNELS:
            return decline("vectors, symbolic sizes, or too few channels")
        leading = tuple(self.symbol(extent) for extent in shape[:-1])
        if len(other) == 2 and isinstance(weight, GenericConst):
            tail = self.follow(root, inner[2])
            spec = FloatDense((*leading, inner[0]), inner[2], make_epilogue(tail))
            packed = relax.const(pack_dense(weight.value.numpy().T, spec, self.kernels.isa))
            kernel = self.kernels.get("float_dense", spec, count_macs(call))
            return tail, [self.bind_product(tail, kernel, data, packed)]
        rows = leading[-1]
        shared = len(other) == 2
        if not isinstance(rows, int):
            return decline("the number of rows is symbolic")
        if not shared and not same_extents(shape[:-2], other[:-2]):
            return decline("batch dimensions are broadcast")
        matmul = FloatMatmul(leading[:-1], rows, inner[0], inner[2], shared)
        kernel = self.kernels.get("float_batch_matmul", matmul, count_macs(call))
        return Tail((root,), len(shape) - 1, inner[2]), [self.bind(root, kernel, [data, weight])]

    def bind_product(
        self, tail: Tail, kernel: tvm.ir.GlobalVar, data: relax.Expr, packed: relax.Expr
    ) -> relax.Binding:
        args = [data, packed]
        if tail.bias is not None:
            args.append(relax.const(np.ascontiguousarray(vector(tail.bias, tail.channels))))
        if tail.residual is not None:
            args.append(tail.residual)
        return self.bind(tail.last, kernel, args)

    def bind(
        self, var: relax.Var, kernel: tvm.ir.GlobalVar, args: list[relax.Expr]
    ) -> relax.Binding:
        """var = call_tir(kernel, args), of the type `var` has."""
        call = Call(Op.get("relax.call_tir"), [kernel, relax.Tuple(args)], None, [var.ty])
        return relax.VarBinding(var, self.builder.normalize(call))

    def symbol(self, extent: Any) -> Any:
        """An int, or for a symbolic extent the variable that stands for it in kernels."""
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        name = "n" if isinstance(extent, tirx.Var) else f"n{len(self.symbols)}"
        return self.symbols.setdefault(str(extent), tirx.Var(name, "int64"))


FLOAT_RULES: tuple[Rule[FunctionLowering, relax.Var, Lowered], ...] = (
    make_rule(FunctionLowering.lower_conv2d, "relax.nn.conv2d"),
    make_rule(FunctionLowering.lower_conv2d_transpose, "relax.nn.conv2d_transpose"),
    make_rule(FunctionLowering.lower_matmul, "relax.matmul"),
)
