"""lower_float: float operators -> calls of float kernels, weights packed; the counterpart of
`integer`.

Runs before LegalizeOps on float modules, and on what is float in quantized ones. Convolutions, in
the layout of the kernels already, and matrix products take what follows them (bias, residual, relu
or clip) into their kernel; whatever has no kernel is left for the generic schedule. Weights that
are constants are packed here; others, as those of a calibration graph whose scales are parameters,
are packed by a kernel at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, IRModule, Op
from tvm.target import Target

from relayquant.dialect.cost import MACS_ATTR, count_macs
from relayquant.kernels.emit import IS_SCHEDULED
from relayquant.kernels.floating.conv import (
    FloatConv2d,
    make_conv2d,
    make_conv2d_packing,
    pack_conv2d,
    packed_conv2d_size,
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
    CLAMPS,
    Readers,
    expand_padding,
    is_float32,
    list_bindings,
    op_name,
    pair,
    read_scalar,
    same_extents,
    same_type,
    shape_of,
    static_sizes,
    take_clamp,
)

#: Layout of data and weights that the convolution kernels take.
CONV_LAYOUT = ("NHWC", "OHWI")
#: relax.op.OpPatternKind.kOpaque
OPAQUE = 8


def lower_float(mod: IRModule, target: Target) -> IRModule:
    """Replace float32 conv2d, in the layout of the kernels, and matmul of every Relax function by
    calls of packed kernels.

    Inputs, outputs and names of the functions stay. Batch extents may be symbolic. Operators with
    other dtypes, with dynamic inner extents, or outside dataflow blocks stay as they are.
    """
    kernels = Kernels(mod, choose_float_isa(target))
    for gvar, func in list(mod.functions_items()):
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            kernels.builder.update_func(gvar, FunctionLowering(func, kernels).run())
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
    "float_dense": make_dense,
    "float_batch_matmul": make_batch_matmul,
}


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product and what its kernel takes over, found so far."""

    root: relax.Var
    last: relax.Var
    channels: int
    bias: np.ndarray | None = None
    residual: relax.Expr | None = None
    low: float | None = None
    high: float | None = None
    absorbed: tuple[relax.Var, ...] = ()

    @property
    def epilogue(self) -> FloatEpilogue:
        return FloatEpilogue(self.bias is not None, self.residual is not None, self.low, self.high)


class FunctionLowering:
    """Rewrites the dataflow blocks of one function."""

    def __init__(self, func: relax.Function, kernels: Kernels) -> None:
        self.func, self.kernels = func, kernels
        bindings = list(list_bindings(func))
        self.values: dict[relax.Var, relax.Expr] = {b.var: b.value for b in bindings}
        self.readers = Readers(func, bindings)
        self.builder = kernels.builder
        self.symbols: dict[str, tirx.Var] = {}
        #: values that some kernel computes already: a sum of two products belongs to one of them
        self.claimed: set[relax.Var] = set()

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
        inside = {binding.var for binding in bindings}
        replaced: dict[relax.Var, list[relax.Binding]] = {}
        dropped: set[relax.Var] = set()
        for binding in bindings:
            lowered = self.lower_product(binding.var, inside)
            if lowered is None:
                continue
            product, new = lowered
            replaced[product.last] = new
            dropped.update(v for v in [product.root, *product.absorbed] if v is not product.last)
        result: list[relax.Binding] = []
        for binding in bindings:
            new = replaced.get(binding.var)
            if new is not None:
                result.extend(new)
            elif not any(binding.var.same_as(var) for var in dropped):
                result.append(binding)
        return result

    # ---- finding ---------------------------------------------------------------------------------

    def lower_product(
        self, root: relax.Var, inside: set[relax.Var]
    ) -> tuple[Product, list[relax.Binding]] | None:
        """The kernel call for the product bound to `root`; None if it is none, or has no kernel."""
        call = self.values[root]
        name = op_name(call)
        if name == "relax.nn.conv2d":
            return self.lower_conv2d(root, call, inside)
        if name == "relax.matmul":
            return self.lower_matmul(root, call, inside)
        return None

    def absorb(self, root: relax.Var, channels: int, inside: set[relax.Var]) -> Product:
        """Follow the only reader of each value: bias, then residual, then relu or clip."""
        product = Product(root, root, channels)
        while product.high is None:
            user = self.readers.find_only(product.last)
            if user is None or user not in inside:
                break
            longer = None if user in self.claimed else self.take(product, user)
            if longer is None:
                break
            self.claimed.add(user)
            product = replace(longer, last=user, absorbed=(*product.absorbed, user))
        return product

    def take(self, product: Product, user: relax.Var) -> Product | None:
        """`product` with what `user` computes; None if the kernel cannot compute it."""
        call = self.values[user]
        name, clipped = op_name(call), product.low is not None
        if not same_type(user, product.root):
            return None
        if name == "relax.add" and not clipped:
            other = call.args[1] if call.args[0].same_as(product.last) else call.args[0]
            return take_sum(product, other, len(shape_of(user)))
        if name in CLAMPS and not clipped:
            return take_clamp(product, call)
        if name == "relax.maximum" and not clipped:
            low = read_scalar(call.args[1])
            return None if low is None else replace(product, low=low)
        if name == "relax.minimum":
            high = read_scalar(call.args[1])
            return None if high is None else replace(product, high=high)
        return None

    # ---- kernels ---------------------------------------------------------------------------------

    def lower_conv2d(
        self, root: relax.Var, call: Call, inside: set[relax.Var]
    ) -> tuple[Product, list[relax.Binding]] | None:
        data, weight = call.args
        attrs = call.attrs
        layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
        if layouts != (*CONV_LAYOUT, CONV_LAYOUT[0]):
            return None
        if not all(is_float32(e) for e in (data, weight, root)):
            return None
        shape, kernel = shape_of(data), shape_of(weight)
        sizes = static_sizes([*shape[1:], *kernel])
        if sizes is None:
            return None
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
            return None
        if min(spec.padding) < 0:
            return None
        product = self.absorb(root, outputs, inside)
        spec = replace(spec, epilogue=product.epilogue)
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
        return product, [*before, self.bind_product(product, kernel_var, data, packed)]

    def lower_matmul(
        self, root: relax.Var, call: Call, inside: set[relax.Var]
    ) -> tuple[Product, list[relax.Binding]] | None:
        data, weight = call.args
        if not all(is_float32(e) for e in (data, weight, root)):
            return None
        shape, other = shape_of(data), shape_of(weight)
        inner = static_sizes([shape[-1], *other[-2:]])
        if len(shape) < 2 or len(other) < 2 or inner is None or inner[2] < FEWEST_CHANNELS:
            return None
        leading = tuple(self.symbol(extent) for extent in shape[:-1])
        if len(other) == 2 and isinstance(weight, GenericConst):
            product = self.absorb(root, inner[2], inside)
            spec = FloatDense((*leading, inner[0]), inner[2], product.epilogue)
            packed = relax.const(pack_dense(weight.value.numpy().T, spec, self.kernels.isa))
            kernel = self.kernels.get("float_dense", spec, count_macs(call))
            return product, [self.bind_product(product, kernel, data, packed)]
        rows = leading[-1]
        shared = len(other) == 2
        if not isinstance(rows, int):
            return None
        if not shared and not same_extents(shape[:-2], other[:-2]):
            return None
        matmul = FloatMatmul(leading[:-1], rows, inner[0], inner[2], shared)
        product = Product(root, root, inner[2])
        kernel = self.kernels.get("float_batch_matmul", matmul, count_macs(call))
        return product, [self.bind(root, kernel, [data, weight])]

    def bind_product(
        self, product: Product, kernel: tvm.ir.GlobalVar, data: relax.Expr, packed: relax.Expr
    ) -> relax.Binding:
        args = [data, packed]
        if product.bias is not None:
            args.append(relax.const(product.bias))
        if product.residual is not None:
            args.append(product.residual)
        return self.bind(product.last, kernel, args)

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


def take_sum(product: Product, other: relax.Expr, rank: int) -> Product | None:
    """`product` plus `other`: a constant bias, or a residual of the same shape."""
    if isinstance(other, GenericConst):
        bias = read_bias(other, product.channels, rank)
        if bias is None or product.bias is not None or product.residual is not None:
            return None
        return replace(product, bias=bias)
    if product.residual is None and same_type(other, product.root):
        return replace(product, residual=other)
    return None


def read_bias(value: GenericConst, channels: int, rank: int) -> np.ndarray | None:
    """A constant that adds one number per channel of the last axis, as (channels,)."""
    array = value.value.numpy()
    if array.ndim > rank or array.size not in (1, channels) or array.dtype != np.float32:
        return None
    if array.size == channels and array.ndim and array.shape[-1] != channels:
        return None
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (channels,)))
