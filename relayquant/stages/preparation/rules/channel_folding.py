"""Rules that fold per-channel affine operators (batch norm, bias, scale) into the weights of the
operator before them.

All arithmetic is float64. The result is rounded once to the dtype of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.base.axes import shape_along
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.norms import find_batch_norm, fits, read_batch_norm
from relayquant.stages.preparation.rules.tensors import (
    FLOATS,
    channel_values,
    make_const,
    spatial_axes,
)

CONVS = ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")
TRANSPOSED = ("relax.nn.conv1d_transpose", "relax.nn.conv2d_transpose", "relax.nn.conv3d_transpose")
MATMUL = "relax.matmul"
ARITHMETIC = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")


@dataclass(frozen=True, eq=False)
class ChannelAffine:
    """value = data * scale + shift along one axis; None means scale 1 and shift 0. Both are
    float64 (C,).
    """

    data: relax.Var
    scale: np.ndarray | None
    shift: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Product:
    """A conv or matmul with constant weight, with the bias add and the zero pad behind it if
    there are any.
    """

    var: relax.Var
    call: Call
    axis: int  #: channel axis of the output
    channels: int
    bias_var: relax.Var | None = None
    pad_var: relax.Var | None = None

    @property
    def is_bare(self) -> bool:
        return self.bias_var is None and self.pad_var is None

    @property
    def last(self) -> relax.Var:
        """The value behind bias and pad."""
        return [link for link in (self.var, self.bias_var, self.pad_var) if link is not None][-1]


def fold_channel_affine(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """batch_norm(pad?(conv(x, w) + b?)) -> pad?(conv(x, w * s) + b * s) + t.

    The rule also takes every other per-channel affine operator behind a conv or matmul: multiply,
    divide, subtract, add, with operands in either order. s = gamma / sqrt(variance + epsilon), t =
    beta - mean * s. The factors must be constants, and the values between must have no other
    reader. Consecutive adds become one: conv(x, w) + b + t -> conv(x, w) + (b + t).
    """
    found = _find_product(editor, var)
    if found is None:
        return decline("no per-channel affine operator behind a product with constant weight")
    product, affine = found
    weight_dtype = tensor_dtype(product.call.args[1])
    if tensor_dtype(var) != weight_dtype or weight_dtype not in FLOATS:
        return decline("the dtypes of weight and result differ, or are not float")
    bias = _read_bias(editor, product)
    if affine.scale is None:
        return _fold_shift(editor, var, product, affine, bias)
    return _fold_scale(editor, var, product, affine, bias)


def _fold_shift(
    editor: Editor,
    var: relax.Var,
    product: Product,
    affine: ChannelAffine,
    bias: np.ndarray | None,
) -> relax.Expr | Skip:
    """conv + b + t -> conv + (b + t). Bring conv + t into canonical form: the constant is second
    and has shape [1, C, 1, 1] or (N,).
    """
    if product.pad_var is not None:
        return decline("a pad is between")
    total = affine.shift if bias is None else bias + affine.shift
    constant = make_bias(total, product, tensor_dtype(var))
    if product.bias_var is None and _is_add_of(editor, var, product.var, constant):
        return decline("it is canonical")
    return relax.op.add(product.var, constant)


def _fold_scale(
    editor: Editor,
    var: relax.Var,
    product: Product,
    affine: ChannelAffine,
    bias: np.ndarray | None,
) -> relax.Expr | Skip:
    dtype = tensor_dtype(var)
    weight = _scale_weight(product, affine.scale)
    if not fits(weight, dtype):
        return decline("the scaled weights are infinite")
    shift = affine.shift
    if bias is not None:
        bias = bias * affine.scale
        if product.pad_var is None:
            bias, shift = (bias if shift is None else bias + shift), None
    elif product.pad_var is None:
        bias, shift = shift, None
    args = [product.call.args[0], make_const(weight, dtype)]
    value = Call(product.call.op, args, product.call.attrs)
    pending: list[tuple[relax.Var, Any]] = [(product.var, lambda _: value)]
    if bias is not None:
        bias_const = make_bias(bias, product, dtype)
        anchor = product.bias_var if product.bias_var is not None else var
        pending.append((anchor, lambda data: relax.op.add(data, bias_const)))
    if product.pad_var is not None:
        pad = editor.call_of(product.pad_var)
        pending.append((product.pad_var, lambda data: Call(pad.op, [data], pad.attrs)))
    if shift is not None:
        shift_const = make_bias(shift, product, dtype)
        pending.append((var, lambda data: relax.op.add(data, shift_const)))
    data: relax.Expr = product.var
    for anchor, make in pending[:-1]:
        # No new value equals a value of the source model, so none may keep its name.
        data = editor.define(anchor, make(data), f"{editor.names[anchor]}.folded", origin=anchor)
    return pending[-1][1](data)


def fold_behind_concat(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """batch_norm(concat(conv(x, v), conv(y, w))) -> concat(conv(x, v * s1) + t1, conv(y, w * s2) +
    t2). Each part has its own channels of s and t, see `fold_channel_affine`.

    The rule takes every per-channel affine operator behind products with constant weights that are
    joined along their channels, if nothing else reads one of them.
    """
    for data in list_candidates(editor, var):
        parts = read_joined(editor, data)
        if not parts:
            continue
        axis, channels = parts[0].axis, sum(part.channels for part in parts)
        whole = Product(data, editor.call_of(data), axis, channels)
        affine = read_affine(editor, var, data, whole)
        dtypes = {tensor_dtype(each) for part in parts for each in (var, part.call.args[1])}
        if affine is None or len(dtypes) > 1 or not dtypes <= set(FLOATS):
            continue
        cuts = np.cumsum([part.channels for part in parts])[:-1]
        scales, shifts = (
            [None] * len(parts) if factors is None else np.split(factors, cuts)
            for factors in (affine.scale, affine.shift)
        )
        triples = zip(parts, scales, shifts, strict=True)
        owns = [ChannelAffine(part.last, *own) for part, *own in triples]
        if not all(map(can_scale, parts, scales)):
            return decline("the scaled weights are infinite")
        joined = [_apply_affine(editor, *pair) for pair in zip(parts, owns, strict=True)]
        return relax.op.concat(joined, axis)
    return decline("no per-channel affine operator behind joined products with constant weights")


def can_scale(product: Product, scale: np.ndarray | None) -> bool:
    """Whether the dtype of a product holds its scaled weights."""
    return scale is None or fits(_scale_weight(product, scale), tensor_dtype(product.var))


def _apply_affine(editor: Editor, part: Product, affine: ChannelAffine) -> relax.Var:
    """Define what an affine operator makes of a product without a pad."""
    bias = _read_bias(editor, part)
    if affine.scale is None:
        total = affine.shift if bias is None else bias + affine.shift
        expr = relax.op.add(part.var, make_bias(total, part, tensor_dtype(part.var)))
    else:
        expr = _fold_scale(editor, part.last, part, affine, bias)
    name = f"{editor.names[part.last]}.folded"
    return editor.define(part.last, expr, name, origin=part.last)


# -- reading ---------------------------------------------------------------------------------------


def read_joined(editor: Editor, var: relax.Var) -> list[Product]:
    """Read a concat of products along their channels. Empty if it is none, or if something else
    reads it or one of them.
    """
    call = editor.call_of(var)
    if editor.op_name(var) != "relax.concat" or not editor.has_one_use(var):
        return []
    found: list[Product] = []
    for part in getattr(call.args[0], "fields", ()):
        product = read_chain(editor, part)
        if product is None or product.pad_var is not None:
            return []
        links = [link for link in (product.var, product.bias_var) if link is not None]
        if not all(map(editor.has_one_use, links)):
            return []
        if product.axis != int(call.attrs.axis) % var.ty.ndim:
            return []
        found.append(product)
    return found


def _read_bias(editor: Editor, product: Product) -> np.ndarray | None:
    """Return the bias of each channel, if a product has one."""
    bias = product.bias_var
    return None if bias is None else channel_operand(editor.call_of(bias), product)


def _find_product(editor: Editor, var: relax.Var) -> tuple[Product, ChannelAffine] | None:
    """Return the conv or matmul that the per-channel affine value `var` is computed from."""
    for data in list_candidates(editor, var):
        product = read_chain(editor, data)
        if product is None:
            continue
        affine = read_affine(editor, var, data, product)
        if affine is None:
            continue
        # An add right behind the product does not change the product, so other readers are allowed.
        if affine.scale is None and product.is_bare:
            return product, affine
        chain = (product.var, product.bias_var, product.pad_var)
        if all(editor.has_one_use(link) for link in chain if link is not None):
            return product, affine
    return None


def list_candidates(editor: Editor, var: relax.Var) -> list[relax.Var]:
    """List the value that `var` may be a per-channel affine function of, if there is one."""
    call = editor.call_of(var)
    if call is None:
        norm = find_batch_norm(editor, var)
        return [norm.args[0]] if norm is not None and isinstance(norm.args[0], relax.Var) else []
    if call.op.name not in ARITHMETIC:
        return []
    left, right = call.args
    if isinstance(left, relax.Var) and constant_value(right) is not None:
        return [left]
    if isinstance(right, relax.Var) and constant_value(left) is not None:
        return [right]
    return []


def read_chain(editor: Editor, var: relax.Expr) -> Product | None:
    """Read a pad?(add?(product)) chain that ends at `var`."""
    pad_var = bias_var = None
    if editor.op_name(var) == "relax.nn.pad":
        call = editor.call_of(var)
        if call.attrs.pad_mode != "constant" or call.attrs.pad_value != 0:
            return None
        pad_var, var = var, call.args[0]
    if editor.op_name(var) == "relax.add":
        call = editor.call_of(var)
        if not isinstance(call.args[0], relax.Var) or constant_value(call.args[1]) is None:
            return None
        bias_var, var = var, call.args[0]
    call = editor.call_of(var)
    product = _read_product(editor, var)
    if product is None:
        return None
    product = Product(var, call, *product, bias_var, pad_var)
    if bias_var is not None and channel_operand(editor.call_of(bias_var), product) is None:
        return None
    if pad_var is not None:
        widths = editor.call_of(pad_var).attrs.pad_width
        if widths[2 * product.axis] != 0 or widths[2 * product.axis + 1] != 0:
            return None
    return product


def _read_product(editor: Editor, var: relax.Expr) -> tuple[int, int] | None:
    """Return (channel axis, channels) of a conv or matmul with constant float weight."""
    name = editor.op_name(var)
    if name not in (*CONVS, *TRANSPOSED, MATMUL):
        return None
    call = editor.call_of(var)
    shape = tensor_shape(var)
    weight = constant_value(call.args[1])
    if shape is None or weight is None or str(weight.dtype) not in FLOATS:
        return None
    if name == MATMUL:
        axis = len(shape) - 1
        if weight.ndim != 2 or constant_value(call.args[0]) is not None or axis < 0:
            return None
    else:
        layout = call.attrs.out_layout or call.attrs.data_layout
        if spatial_axes(layout) is None or not call.attrs.kernel_layout.isupper():
            return None
        axis = layout.index("C")
        groups = call.attrs.groups if name in TRANSPOSED else 1
        if weight.shape[call.attrs.kernel_layout.index("O")] * groups != shape[axis]:
            return None
    channels = shape[axis]
    return (axis, channels) if isinstance(channels, int) else None


def channel_operand(call: Call, product: Product) -> np.ndarray | None:
    return channel_values(call.args[1], call.args[0].ty.ndim, product.axis, product.channels)


def read_affine(
    editor: Editor, var: relax.Var, data: relax.Var, product: Product
) -> ChannelAffine | None:
    """Read `var` as an affine function of `data` along the product's channels."""
    call = editor.call_of(var)
    if call is None:
        norm = read_batch_norm(editor, var)
        if norm is None or norm[1] != product.axis:
            return None
        return ChannelAffine(data, norm[2], norm[3])
    is_left = data.same_as(call.args[0])
    operand = call.args[1] if is_left else call.args[0]
    values = channel_values(operand, data.ty.ndim, product.axis, product.channels)
    if values is None or tensor_dtype(operand) != tensor_dtype(data):
        return None
    name = editor.op_name(var)
    if name == "relax.add":
        return ChannelAffine(data, None, values)
    if name == "relax.subtract":
        return (
            ChannelAffine(data, None, -values)
            if is_left
            else ChannelAffine(data, -np.ones_like(values), values)
        )
    if name == "relax.multiply":
        return ChannelAffine(data, values, None)
    if is_left and (values != 0).all():
        return ChannelAffine(data, 1.0 / values, None)
    return None


# -- writing ---------------------------------------------------------------------------------------


def _scale_weight(product: Product, scale: np.ndarray) -> np.ndarray:
    """Return the float64 weight times scale along its output channels."""
    weight = constant_value(product.call.args[1]).astype("float64")
    name = product.call.op.name
    if name == MATMUL:
        return weight * scale
    layout = product.call.attrs.kernel_layout
    out_axis = layout.index("O")
    if name in TRANSPOSED:
        # Weight (I, O / groups): output channel g * (O / groups) + o reads the inputs of group g
        # only.
        groups = product.call.attrs.groups
        in_axis = layout.index("I")
        moved = np.moveaxis(weight, (in_axis, out_axis), (0, 1))
        grouped = moved.reshape(groups, -1, *moved.shape[1:])
        factors = scale.reshape(groups, 1, -1, *[1] * (grouped.ndim - 3))
        scaled = (grouped * factors).reshape(moved.shape)
        return np.moveaxis(scaled, (0, 1), (in_axis, out_axis))
    return weight * scale.reshape(shape_along(out_axis, weight.ndim))


def make_bias(values: np.ndarray, product: Product, dtype: str) -> relax.Expr:
    """Return the canonical bias: [1, C, 1, 1] (NCHW), [1, 1, 1, C] (NHWC), (N,) behind matmul."""
    if product.call.op.name == MATMUL:
        return make_const(values, dtype)
    shape = shape_along(product.axis, product.var.ty.ndim)
    return make_const(values.reshape(shape), dtype)


def _is_add_of(editor: Editor, var: relax.Var, data: relax.Var, constant: relax.Expr) -> bool:
    call = editor.call_of(var)
    return (
        call is not None
        and editor.op_name(var) == "relax.add"
        and data.same_as(call.args[0])
        and constant_value(call.args[1]).shape == constant_value(constant).shape
    )
