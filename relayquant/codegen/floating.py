"""lower_float: float operators -> calls of float kernels, weights packed; the counterpart of
`integer`.

Runs before LegalizeOps on float modules, and on what is float in quantized ones. Convolutions, in
the layout of the kernels already, and matrix products take what follows them (bias, residual, relu
or clip) into their kernel; whatever has no kernel is left for the generic schedule. Weights that
are constants are packed here; others, as those of a calibration graph whose scales are parameters,
are packed by a kernel at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import BaseFunc, Call, GenericConst, IRModule, Op
from tvm.target import Target

from relayquant.codegen.kernels.emit import IS_SCHEDULED
from relayquant.codegen.kernels.floating.conv import (
    FloatConv2d,
    make_conv2d,
    make_conv2d_packing,
    pack_conv2d,
    packed_conv2d_size,
)
from relayquant.codegen.kernels.floating.conv_transpose import (
    FloatConv2dTranspose,
    make_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.floating.gemm import (
    FloatDense,
    FloatMatmul,
    make_batch_matmul,
    make_dense,
    pack_dense,
)
from relayquant.codegen.kernels.floating.matmul_transposed_b import FEW_ROWS, FloatDots, make_dots
from relayquant.codegen.kernels.floating.tile import (
    FEWEST_CHANNELS,
    FloatCopy,
    FloatEpilogue,
    FloatIsa,
    choose_float_isa,
    make_copy,
)
from relayquant.codegen.kernels.floating.winograd import (
    make_winograd,
    pack_winograd,
    prefers_winograd,
)
from relayquant.codegen.kernels.integer.pool import MaxPool2d, build_max_pool2d
from relayquant.codegen.rules.elementwise import make_window
from relayquant.codegen.rules.kernel_call import build_for_batch, split_batch, vector
from relayquant.codegen.rules.linear import order_transposed_weight
from relayquant.ir.dialect.cost import MACS_ATTR, count_macs
from relayquant.ir.rewrite.epilogue_pattern import Tail, float_takes, follow_tail
from relayquant.ir.rewrite.expressions import (
    FunctionGraph,
    expand_padding,
    is_float32,
    op_name,
    pair,
    same_extents,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.rule import (
    OnSkip,
    Rule,
    Skip,
    decline,
    fire_first,
    log_skip,
    make_rule,
    select_rules,
)

#: Layout of data and weights that the convolution kernels take.
CONV_LAYOUT = ("NHWC", "OHWI")
#: The same of transposed convolutions, whose weights are turned when they are packed.
CONV_TRANSPOSE_LAYOUT = ("NHWC", "IOHW")
#: relax::OpPatternKind::kOpaque: FuseOps must not put anything into a finished kernel
OPAQUE = 8
#: Kernels get a bias as an array, one number per channel, so that it has to be known.
TAKES = float_takes(GenericConst)


@dataclass(frozen=True, eq=False)
class PlacedCall:
    """A call of a kernel that writes its columns of the result of `concat`: the value `name`."""

    name: str
    kernel: tvm.ir.GlobalVar
    args: tuple[relax.Expr, ...]
    concat: relax.Var


#: The values that a kernel computes, and the bindings or calls that do so.
Lowered = tuple[Sequence[relax.Var], list[relax.Binding | PlacedCall]]


def lower_float(mod: IRModule, target: Target, on_skip: OnSkip = log_skip) -> IRModule:
    """Replace float32 conv2d, conv2d_transpose and max_pool2d, in the layout of the kernels, and
    matmul of every Relax function by calls of kernels, packed for them.

    Products that only a concatenation of channels reads are written where they belong in it.
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
            func = mark_kernel(MAKERS[kind](spec, self.isa, kind), macs)
            self._made[key] = self.builder.add_func(func, kind)
        return self._made[key]


def mark_kernel(func: tirx.PrimFunc, macs: int) -> BaseFunc:
    """A finished kernel of `macs` multiply-adds as a module takes it: no pass fuses or schedules
    it, and the module names it.
    """
    # Opaque: FuseTIR cannot merge a kernel that has no blocks with its neighbours.
    marks = {"op_pattern": OPAQUE, IS_SCHEDULED: True, MACS_ATTR: macs}
    return func.without_attr("global_symbol").with_attrs(marks)


def make_max_pool2d(
    spec: MaxPool2d, _isa: FloatIsa, name: str, symbolic: bool = False
) -> tirx.PrimFunc:
    """PrimFunc(x, y) of a pool, of as many images as there are if the batch is `symbolic`."""
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
    "float_batch_matmul": make_batch_matmul,
    "float_dots": make_dots,
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
        pair(attrs.dilation),
        groups,
        pair(attrs.output_padding),
    )


def find_extents(concat: Call) -> list[int] | None:
    """The extents that a concatenation along the last axis of float32 puts side by side; None where
    it is of anything else.
    """
    parts = concat.args[0]
    if op_name(concat) != "relax.concat" or not isinstance(parts, relax.Tuple):
        return None
    if concat.attrs.axis is None or not all(is_float32(part) for part in parts.fields):
        return None
    shapes = [shape_of(part) for part in parts.fields]
    if int(concat.attrs.axis) not in (-1, len(shapes[0]) - 1):
        return None
    return static_sizes([shape[-1] for shape in shapes])


class Join:
    """A concatenation that kernels write into, while its block is rewritten."""

    def __init__(self, parts: int) -> None:
        #: the parts that kernels write where they belong
        self.placed: set[relax.Var] = set()
        #: how many parts are not written yet
        self.missing = parts
        #: the tensor with what is written
        self.written: relax.Var | None = None


class FunctionLowering:
    """Rewrites the dataflow blocks of one function."""

    def __init__(self, func: relax.Function, kernels: Kernels, on_skip: OnSkip) -> None:
        self.func, self.kernels, self.on_skip = func, kernels, on_skip
        self.graph = FunctionGraph(func)
        self.builder = kernels.builder
        self.symbols: dict[str, tirx.Var] = {}
        #: values that some kernel computes already: a sum of two products belongs to one of them
        self.claimed: set[relax.Var] = set()
        #: concatenations of which kernels write a part
        self.joins: dict[relax.Var, Join] = {}
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
        replaced: dict[relax.Var, list[relax.Binding | PlacedCall]] = {}
        dropped: set[relax.Var] = set()
        for binding in bindings:
            call = self.graph.call_of(binding.var)
            rules = select_rules(FLOAT_RULES, op_name(call) if call is not None else "")
            tried = ((rule, binding.var) for rule in rules)
            found = fire_first(tried, self, binding.var.name, self.on_skip)
            if found is None:
                continue
            covered, new = found[1]
            replaced[covered[-1]] = new
            dropped.update(covered[:-1])
        result: list[relax.Binding] = []
        for binding in bindings:
            if binding.var in self.joins:
                result.extend(self.copy_rest(binding.var))
            elif binding.var not in dropped:
                for new in replaced.get(binding.var, [binding]):
                    result.append(self.write(new) if isinstance(new, PlacedCall) else new)
        return result

    # ---- concatenations that kernels write into -------------------------------------------------

    def find_columns(self, tail: Tail) -> tuple[relax.Var, tuple[int, int]] | None:
        """The concatenation that alone reads the result of a kernel, and the columns (first, count)
        that the result is of it.
        """
        concat = self.graph.only_user(tail.last)
        if concat is None or concat not in self.inside or tail.residual is not None:
            return None
        call = self.graph.call_of(concat)
        extents = find_extents(call) if call is not None else None
        if call is None or extents is None:
            return None
        at = next(i for i, part in enumerate(call.args[0].fields) if part.same_as(tail.last))
        return concat, (sum(extents[:at]), sum(extents))

    def write(self, placed: PlacedCall) -> relax.Binding:
        """concat(f(x), ...)  ->  t = call_tir(f into columns of t, x), where it is the first; then
        t' = call_tir_inplace(f, x, t); the last of them is the result.
        """
        concat, join = placed.concat, self.joins[placed.concat]
        join.missing -= 1
        var = relax.DataflowVar(placed.name, concat.ty) if join.missing else concat
        if join.written is None:
            binding = self.bind(var, placed.kernel, list(placed.args))
        else:
            args = [*placed.args, join.written]
            call = relax.op.call_tir_inplace(placed.kernel, args, len(args) - 1, var.ty)
            binding = relax.VarBinding(var, self.builder.normalize(call))
        join.written = var
        return binding

    def copy_rest(self, concat: relax.Var) -> list[relax.Binding]:
        """The parts of a concatenation that no kernel writes there are copied."""
        call = self.graph.values[concat]
        extents, first, bindings = find_extents(call) or [], 0, []
        for part, extent in zip(call.args[0].fields, extents, strict=True):
            if part not in self.joins[concat].placed:
                leading = tuple(self.symbol(size) for size in shape_of(part)[:-1])
                spec = FloatCopy((*leading, extent), (first, sum(extents)))
                kernel = self.kernels.get("float_copy", spec)
                bindings.append(
                    self.write(PlacedCall(f"{concat.name}_part", kernel, (part,), concat))
                )
            first += extent
        return bindings

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
        if min(spec.out_size) < 1:
            return decline("the result is empty")
        tail = self.follow(root, outputs)
        concat, epilogue = self.choose_epilogue(tail)
        spec = replace(spec, epilogue=epilogue)
        isa = self.kernels.isa
        kind, before = "float_conv2d", list[relax.Binding | PlacedCall]()
        packed: relax.Expr
        if isinstance(weight, GenericConst) and prefers_winograd(spec, isa):
            kind = "float_winograd"
            packed = relax.const(pack_winograd(weight.value.numpy(), spec, isa))
        elif isinstance(weight, GenericConst):
            packed = relax.const(pack_conv2d(weight.value.numpy(), spec, isa))
        else:
            bare = replace(spec, epilogue=FloatEpilogue())
            packing = self.kernels.get("float_conv2d_packing", bare)
            ty = relax.TensorType([packed_conv2d_size(spec, isa)], "float32")
            packed = relax.DataflowVar(f"{root.name}_packed", ty)
            before.append(self.bind(packed, packing, [weight]))
        kernel_var = self.kernels.get(kind, spec, count_macs(call))
        product = self.bind_product(tail, kernel_var, data, packed, concat)
        return tail.vars, [*before, product]

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
        concat, epilogue = self.choose_epilogue(tail)
        spec = replace(spec, batch=batch, epilogue=epilogue)
        taps = order_transposed_weight(
            weight.value.numpy(), str(call.attrs.kernel_layout), spec.groups
        )
        packed = relax.const(pack_conv2d_transpose(taps, spec, self.kernels.isa))
        kernel = self.kernels.get("float_conv2d_transpose", spec, count_macs(call))
        return tail.vars, [self.bind_product(tail, kernel, data, packed, concat)]

    def lower_matmul(self, root: relax.Var) -> Lowered | Skip:
        """matmul by constants, and of two values."""
        call = self.graph.values[root]
        data, weight = call.args
        if not all(is_float32(e) for e in (data, weight, root)):
            return decline("not float32 of known rank")
        shape, other = shape_of(data), shape_of(weight)
        if len(shape) < 2 or len(other) < 2:
            return decline("vectors")
        dots = self.read_dots(shape, weight)
        if dots is not None:
            spec, stored = dots
            kernel = self.kernels.get("float_dots", spec, count_macs(call))
            return (root,), [self.bind(root, kernel, [data, stored])]
        outputs = static_sizes(other[-1:])
        if outputs is None or outputs[0] < FEWEST_CHANNELS:
            return decline("a symbolic number of channels, or too few")
        leading = tuple(self.symbol(extent) for extent in shape[:-1])
        inner = self.symbol(shape[-1])
        if len(other) == 2 and isinstance(weight, GenericConst):
            tail = self.follow(root, outputs[0])
            concat, epilogue = self.choose_epilogue(tail)
            spec = FloatDense((*leading, inner), outputs[0], epilogue)
            packed = relax.const(pack_dense(weight.value.numpy().T, spec, self.kernels.isa))
            kernel = self.kernels.get("float_dense", spec, count_macs(call))
            return tail.vars, [self.bind_product(tail, kernel, data, packed, concat)]
        shared = len(other) == 2
        if not shared and not same_extents(shape[:-2], other[:-2]):
            return decline("batch dimensions are broadcast")
        matmul = FloatMatmul(leading[:-1], leading[-1], inner, outputs[0], shared)
        kernel = self.kernels.get("float_batch_matmul", matmul, count_macs(call))
        return (root,), [self.bind(root, kernel, [data, weight])]

    def read_dots(
        self, shape: list[Any], weight: relax.Expr
    ) -> tuple[FloatDots, relax.Expr] | None:
        """x @ permute_dims(w), along whose last axis products are added up: (what computes it of w,
        w). None where there is no such transposition, or where rows are many and their number is
        known, for which it is worth its time.
        """
        call = self.graph.call_of(weight) if isinstance(weight, relax.Var) else None
        if call is None or op_name(call) != "relax.permute_dims":
            return None
        stored, ndim = call.args[0], len(shape)
        axes = call.attrs.axes
        order = [int(a) for a in axes] if axes is not None else [*reversed(range(ndim))]
        other = shape_of(weight)
        if len(order) != ndim or order[-2] != ndim - 1 or not is_float32(stored):
            return None
        if not same_extents(shape[:-2], other[:-2]) or static_sizes(shape[-1:]) is None:
            return None
        rows, outputs = self.symbol(shape[-2]), self.symbol(other[-1])
        if isinstance(rows, int) and isinstance(outputs, int) and rows > FEW_ROWS:
            return None
        batch = tuple(self.symbol(extent) for extent in shape[:-2])
        return FloatDots(batch, rows, int(shape[-1]), outputs, tuple(order)), stored

    def choose_epilogue(self, tail: Tail) -> tuple[relax.Var | None, FloatEpilogue]:
        """What the kernel of a product does with its sums, and the concatenation it writes into."""
        concat, columns = self.find_columns(tail) or (None, None)
        bias, residual = tail.bias is not None, tail.residual is not None
        return concat, FloatEpilogue(bias, residual, tail.low, tail.high, columns)

    def lower_max_pool2d(self, root: relax.Var) -> Lowered | Skip:
        """nn.max_pool2d in the layout of the kernels."""
        call = self.graph.values[root]
        (data,) = call.args
        attrs, layout = call.attrs, CONV_LAYOUT[0]
        if str(attrs.layout) != layout or str(attrs.out_layout) not in ("", layout):
            return Skip(f"layout {attrs.layout}/{attrs.out_layout}")
        shape = split_batch(data)
        if shape is None or not is_float32(data):
            return decline("not float32, or a size other than the batch is symbolic")
        spec = MaxPool2d(make_window(call, shape[1]), "float32")
        kind = "float_max_pool2d_of_images" if shape[0] else "float_max_pool2d"
        return (root,), [self.bind(root, self.kernels.get(kind, spec), [data])]

    def bind_product(
        self,
        tail: Tail,
        kernel: tvm.ir.GlobalVar,
        data: relax.Expr,
        packed: relax.Expr,
        concat: relax.Var | None,
    ) -> relax.Binding | PlacedCall:
        args = [data, packed]
        if tail.bias is not None:
            args.append(relax.const(np.ascontiguousarray(vector(tail.bias, tail.channels))))
        if tail.residual is not None:
            args.append(tail.residual)
        if concat is None:
            return self.bind(tail.last, kernel, args)
        parts = self.graph.values[concat].args[0].fields
        self.joins.setdefault(concat, Join(len(parts))).placed.add(tail.last)
        return PlacedCall(tail.last.name, kernel, tuple(args), concat)

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
    make_rule(FunctionLowering.lower_max_pool2d, "relax.nn.max_pool2d"),
)
