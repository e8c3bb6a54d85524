"""TVM's ConvertLayout, corrected for operators that it gets wrong; the first step of `layout`.

The pass reads operator properties from a registry that the whole process shares, also with other
threads and with passes of the user. So the registry stays as it is, and the bindings are rewritten
before and after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import relax, tirx
from tvm.ir import Call, IRModule, Op, Type

from relayquant.codegen.lowering.floating.convolution import read_conv2d_transpose
from relayquant.codegen.rewrites.transposed_blocks import makes_blocks
from relayquant.ir.reference.relax.row import list_axes
from relayquant.ir.rewrite.casts import CALL_PACKED, hide_cast, show_cast
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.expressions import is_float32, op_name, read_number
from relayquant.ir.rewrite.function import map_functions
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.rule import Skip

#: binding -> its replacements, in order; the last one binds the same variable
Rewrite = Callable[[relax.Binding], Sequence[relax.Binding]]

#: prefix of the names under which calls are hidden
HIDDEN = "relayquant.hidden."
#: Operators legalized in one layout only, or whose result (a tuple or of another rank) or operand
#: (updates of the rank of the data, but of other axes) fails the pass.
ONE_LAYOUT = (
    "relax.nn.conv1d_transpose",
    "relax.nn.conv3d",
    "relax.nn.conv3d_transpose",
    "relax.nn.rms_norm",
    "relax.nn.dropout",
    "relax.image.resize3d",
    "relax.scatter_nd",
    "relax.stack",
)
#: Operators on two tensors, element by element.
TWO_OPERANDS = frozenset(
    f"relax.{name}"
    for name in ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum")
)
#: Convolutions that TVM legalizes in few layouts -> one of them, of data and weights.
CHANNELS_FIRST = {
    "relax.nn.conv3d": ("NCDHW", "OIDHW"),
    "relax.nn.conv1d_transpose": ("NCW", "IOW"),
    "relax.nn.conv2d_transpose": ("NCHW", "IOHW"),
    "relax.nn.conv3d_transpose": ("NCDHW", "IODHW"),
}
#: layouts for which resize2d has a legalization
RESIZE_LAYOUTS = ("NCHW", "NHWC")


def convert_with_exceptions(mod: IRModule, layouts: Mapping[str, Sequence[str]]) -> IRModule:
    """Apply `relax.transform.ConvertLayout(layouts)` to a module without changing its results.

    The pass gives the operands of unknown calls their original layout back. So a call that has to
    keep its layout is hidden: y = f(x) -> y = call_pure_packed("relayquant.hidden.0", x) -> (after
    the pass) y = f(x). match_cast is hidden too, since the pass forgets to replace its operand.
    """
    hidden: list[Call] = []

    def hide(binding: relax.Binding) -> Sequence[relax.Binding]:
        call = binding.value
        if isinstance(binding, relax.MatchCast):
            return [relax.VarBinding(binding.var, hide_cast(binding))]
        if not keeps_layout(call):
            return split_clip(flatten_number(count_axes(binding)))
        name = relax.ExternFunc(f"{HIDDEN}{len(hidden)}")
        hidden.append(call)
        packed = Call(Op.get(CALL_PACKED), [name, *call.args], None, [call.ty])
        return [relax.VarBinding(binding.var, packed)]

    def show(binding: relax.Binding) -> Sequence[relax.Binding]:
        call = binding.value
        if cast := show_cast(binding):
            return [cast]
        callee = call.args[0] if op_name(call) == CALL_PACKED else None
        name = callee.global_symbol if isinstance(callee, relax.ExternFunc) else ""
        if not name.startswith(HIDDEN):
            return turn_resize(binding)
        old = hidden[int(name.removeprefix(HIDDEN))]
        return [rebind(binding, Call(old.op, call.args[1:], old.attrs, old.ty_args))]

    hiding = rewrite_bindings(rewrite_bindings(mod, pin_output), hide)
    converted = relax.transform.ConvertLayout(dict(layouts))(hiding)
    return rewrite_bindings(converted, show)


def keeps_layout(call: relax.Expr) -> bool:
    """Whether a call has to keep its layout, though ConvertLayout would change it.

    These are the operators of `ONE_LAYOUT` and
    - a transposed convolution without a kernel
    - a normalization over several axes: the pass does not reorder the axes of scale and offset
    - repeat without an axis, which flattens its operand
    - an operator with only scalar operands: the pass looks for a dimension.
    """
    name = op_name(call)
    if name in ONE_LAYOUT or (name == "relax.nn.layer_norm" and len(call.attrs.axes) > 1):
        return True
    if name == "relax.nn.conv2d_transpose":
        return isinstance(read_conv2d_transpose(call), Skip) and not makes_blocks(call)
    if name == "relax.repeat" and call.attrs.axis is None:
        return True
    types = [arg.ty for arg in call.args] if name.startswith("relax.") else []
    return bool(types) and all(isinstance(ty, relax.TensorType) and ty.ndim == 0 for ty in types)


def put_channels_first(binding: relax.Binding) -> Sequence[relax.Binding]:
    """conv2d_transpose(x, w), NHWC -> permute_dims(conv2d_transpose(permute_dims(x),
    permute_dims(w))), NCHW, where the call has to keep a layout that TVM does not legalize.
    """
    call, name = binding.value, binding.var.name
    if op_name(call) not in CHANNELS_FIRST or not keeps_layout(call):
        return [binding]
    layouts, view = CHANNELS_FIRST[op_name(call)], ConvView.of(call)
    is_served = op_name(call) == "relax.nn.conv3d" and view.out_layout == view.layout
    if is_served or (view.layout, view.kernel_layout, view.out_layout) == (*layouts, layouts[0]):
        return [binding]
    operands = [
        bind_inner(f"{name}_{new.lower()}", relax.op.permute_dims(arg, list(map(old.index, new))))
        for arg, old, new in zip(call.args, (view.layout, view.kernel_layout), layouts, strict=True)
    ]
    more = {"output_padding": view.output_padding} if "transpose" in op_name(call) else {}
    convolved = getattr(relax.op.nn, op_name(call).removeprefix("relax.nn."))(
        *(each.var for each in operands),
        strides=view.strides,
        padding=view.padding,
        dilation=view.dilation,
        groups=view.groups,
        data_layout=layouts[0],
        kernel_layout=layouts[1],
        out_dtype=call.attrs.out_dtype,
        **more,
    )
    inner = bind_inner(f"{name}_result", convolved)
    back = relax.op.permute_dims(inner.var, list(map(layouts[0].index, view.out_layout)))
    return [*operands, inner, rebind(binding, back)]


def pin_output(binding: relax.Binding) -> Sequence[relax.Binding]:
    """Pin the type of an output that has a computed size.

    y = f(x) -> y_pinned = f(x); y = match_cast(y_pinned, type of y). Elements of a tuple are
    treated alike. The pass infers types again without knowing that sizes are not negative. It turns
    min(5, n) into min(5, n) - min(0, n), and must not change the type of an output.
    """
    var, value = binding.var, binding.value
    if isinstance(var, relax.DataflowVar) or isinstance(binding, relax.MatchCast):
        return [binding]
    if not isinstance(value, relax.Tuple):
        if not has_computed_size(var.ty):
            return [binding]
        inner = relax.DataflowVar(f"{var.name}_pinned", var.ty)
        return [relax.VarBinding(inner, value), relax.MatchCast(var, inner, var.ty)]
    pinned: list[relax.Binding] = []
    fields = list(value.fields)
    for index, part in enumerate(fields):
        if isinstance(part, relax.Var) and has_computed_size(part.ty):
            fields[index] = relax.DataflowVar(f"{part.name}_pinned", part.ty)
            pinned.append(relax.MatchCast(fields[index], part, part.ty))
    return [*pinned, relax.VarBinding(var, relax.Tuple(fields))]


def has_computed_size(ty: Type) -> bool:
    """Whether a size of a tensor, or of a tensor in a tuple, is neither a number nor a variable."""
    if isinstance(ty, relax.TupleType):
        return any(map(has_computed_size, ty.fields))
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return False
    return any(not isinstance(size, tirx.Var | tirx.IntImm) for size in ty.shape.values)


def count_axes(binding: relax.Binding) -> relax.Binding:
    """Count the axes of squeeze from 0. The pass takes negative ones as places in memory."""
    call = binding.value
    if op_name(call) != "relax.squeeze" or call.attrs.axis is None:
        return binding
    axes = list_axes(call.attrs.axis, call.args[0].ty.ndim)
    return rebind(binding, relax.op.squeeze(call.args[0], axes))


def flatten_number(binding: relax.Binding) -> relax.Binding:
    """Give a constant with one number, beside a tensor of at least its rank, the rank 0.

    ConvertLayout keeps the original layout where operands have different ranks, but for rank 0.
    """
    call = binding.value
    if op_name(call) not in TWO_OPERANDS:
        return binding
    for at, other in ((0, 1), (1, 0)):
        value, rank = constant_value(call.args[at]), call.args[other].ty.ndim
        if value is not None and value.size == 1 and 0 < value.ndim <= rank:
            operands = list(call.args)
            operands[at] = relax.const(value.reshape(()), str(value.dtype))
            return rebind(binding, Call(call.op, operands, call.attrs, call.ty_args))
    return binding


def split_clip(binding: relax.Binding) -> Sequence[relax.Binding]:
    """Split clip(x, a, b) -> minimum(maximum(x, a), b) on float32.

    ConvertLayout knows no layout for clip and would put a transpose before and after each.
    """
    call = binding.value
    if op_name(call) != "relax.clip" or not is_float32(binding.var):
        return [binding]
    low, high = (read_number(arg) for arg in call.args[1:3])
    if low is None or high is None:
        return [binding]
    name = f"{binding.var.name}_low"
    raised = bind_inner(name, relax.op.maximum(call.args[0], relax.const(low, "float32")))
    lowered = relax.op.minimum(raised.var, relax.const(high, "float32"))
    return [raised, rebind(binding, lowered)]


def turn_resize(binding: relax.Binding) -> Sequence[relax.Binding]:
    """Convert a resize2d(x) in another layout to permute_dims(resize2d(permute_dims(x))) in NHWC.

    Other layouts occur when a sequence became an image of one row.
    """
    call = binding.value
    if op_name(call) != "relax.image.resize2d" or str(call.attrs.layout) in RESIZE_LAYOUTS:
        return [binding]
    layout, name = str(call.attrs.layout), binding.var.name
    axes = [layout.index(axis) for axis in "NHWC"]
    turned = bind_inner(f"{name}_nhwc", relax.op.permute_dims(call.args[0], axes))
    resized = bind_inner(f"{name}_resized", resize_in("NHWC", turned.var, call))
    back = relax.op.permute_dims(resized.var, ["NHWC".index(axis) for axis in layout])
    return [turned, resized, rebind(binding, back)]


def resize_in(layout: str, data: relax.Expr, call: Call) -> relax.Expr:
    """Return the resize2d of `call`, of the same images in another layout."""
    attrs = call.attrs
    return relax.op.image.resize2d(
        data,
        call.args[1],
        roi=[float(bound) for bound in attrs.roi],
        layout=layout,
        method=attrs.method,
        coordinate_transformation_mode=attrs.coordinate_transformation_mode,
        rounding_method=attrs.rounding_method,
        cubic_alpha=attrs.cubic_alpha,
        cubic_exclude=attrs.cubic_exclude,
        extrapolation_value=attrs.extrapolation_value,
        out_dtype=attrs.out_dtype,
    )


def rewrite_bindings(mod: IRModule, rewrite: Rewrite) -> IRModule:
    """Replace every binding in a dataflow block by the bindings that `rewrite` returns."""

    def change(func: relax.Function) -> relax.Function:
        if not isinstance(func.body, relax.SeqExpr):
            return func
        blocks = [
            relax.DataflowBlock([new for old in block.bindings for new in rewrite(old)])
            if isinstance(block, relax.DataflowBlock)
            else block
            for block in func.body.blocks
        ]
        body = relax.SeqExpr(blocks, func.body.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)

    return relax.transform.Normalize()(map_functions(mod, change))


def rebind(binding: relax.Binding, value: relax.Expr) -> relax.Binding:
    """Bind the same variable to another value, by a binding of the same kind."""
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(binding.var, value, binding.ty)
    return relax.VarBinding(binding.var, value)


def bind_inner(name: str, value: relax.Expr) -> relax.VarBinding:
    """Bind a new variable `name` with the type of `value`."""
    value = relax.BlockBuilder().normalize(value)
    return relax.VarBinding(relax.DataflowVar(name, value.ty), value)
