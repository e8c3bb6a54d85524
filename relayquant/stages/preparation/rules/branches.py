"""Rule that joins convolutions of one value whose results are added: the branches that a network
has in training (RepVGG, MobileOne, RepViT, GhostNetV3).

All arithmetic is float64. Each sum is rounded to the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.channel_folding import (
    CONVS,
    Product,
    channel_operand,
    list_candidates,
    make_bias,
    read_affine,
    read_chain,
)
from relayquant.stages.preparation.rules.norms import fits
from relayquant.stages.preparation.rules.tensors import make_const

#: largest square of a weight over the mean of all of its channel. A value that is passed on beside
#: many small weights would leave them few of 8 bits: 64 leave 35 dB.
LARGEST_CREST = 64.0


@dataclass(frozen=True, eq=False)
class Branch:
    """What is added to a convolution of the same data.

    Attributes:
        weight: float64, like the convolution's weight, with the channels first: (O, I / groups,
            *kernel).
        bias: float64 (O,).
        begin: Pad before the data, of each spatial axis.
    """

    weight: np.ndarray
    bias: np.ndarray
    begin: tuple[int, ...]


def join_branches(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """conv(x, w) + b + conv(x, v) + c -> conv(x, w + v) + (b + c).

    A smaller kernel is padded with zeros. x * s + t is a branch too: a convolution whose kernel has
    one value. So is x itself beside a depthwise convolution. Beside any other it is a residual,
    which a convolution's kernel adds for nothing, and more exactly. The branches must have no other
    reader.
    """
    for product, other, rest in list_pairs(editor, var):
        joined = join(editor, product, other)
        if joined is None:
            continue
        value, bias = joined
        name = f"{editor.names[product.var].removesuffix('.joined')}.joined"
        data = editor.define(var, value, name, origin=product.var)
        total = relax.op.add(data, make_bias(bias, product, tensor_dtype(var)))
        if rest is None:
            return total
        return relax.op.add(rest, editor.define(var, total, name))
    return decline("not a sum of convolutions of one value")


def list_pairs(
    editor: Editor, var: relax.Var
) -> Iterator[tuple[Product, relax.Expr, relax.Expr | None]]:
    """List a convolution among the addends, another addend, and what else is added.

    Of (p + q) + r, r may be joined to p or to q.
    """
    left, right = editor.call_of(var).args
    for one, other in ((left, right), (right, left)):
        product = read_conv(editor, one)
        if product is None:
            continue
        yield product, other, None
        if editor.op_name(other) == "relax.add" and editor.has_one_use(other):
            first, second = editor.call_of(other).args
            yield product, first, second
            yield product, second, first


def read_conv(editor: Editor, var: relax.Expr) -> Product | None:
    """Read a convolution, and its bias if it has one, that nothing else reads."""
    product = read_chain(editor, var)
    if product is None or product.pad_var is not None or product.call.op.name not in CONVS:
        return None
    links = [link for link in (product.var, product.bias_var) if link is not None]
    return product if all(map(editor.has_one_use, links)) else None


def join(editor: Editor, product: Product, other: relax.Expr) -> tuple[Call, np.ndarray] | None:
    """Return the convolution that computes both, and its bias. None if there is none."""
    own = as_branch(editor, product)
    second = read_conv(editor, other)
    if second is None:
        added, call = read_scaled(editor, product, own, other), product.call
    elif has_same_steps(product, second):
        added = as_branch(editor, second)
        is_wider = find_window(second.call) > find_window(product.call)
        call = second.call if is_wider else product.call
        own, added = (added, own) if is_wider else (own, added)
    else:
        return None
    weight = None if added is None else add_kernels(own, added, ConvView.of(call).dilation)
    if weight is None:
        return None
    dtype = tensor_dtype(product.var)
    if not fits(weight, dtype) or find_crest(weight) > max(LARGEST_CREST, find_crest(own.weight)):
        return None
    axes = find_axes(call)
    moved = make_const(np.transpose(weight, np.argsort(axes)), dtype)
    return Call(call.op, [call.args[0], moved], call.attrs), own.bias + added.bias


def as_branch(editor: Editor, product: Product) -> Branch:
    """Return a convolution's weight and bias."""
    bias = np.zeros(product.channels)
    if product.bias_var is not None:
        bias = channel_operand(editor.call_of(product.bias_var), product)
    weight = constant_value(product.call.args[1]).astype("float64")
    axes = find_axes(product.call)
    view = ConvView.of(product.call)
    return Branch(np.transpose(weight, axes), bias, view.padding[: view.rank])


def read_scaled(editor: Editor, product: Product, own: Branch, value: relax.Expr) -> Branch | None:
    """Read x or x * s + t, with the x of the convolution, as a convolution."""
    data, view, var = product.call.args[0], ConvView.of(product.call), value
    shift, scale = np.zeros(product.channels), np.ones(product.channels)
    if any(step != 1 for step in view.strides) or view.out_layout != view.layout:
        return None
    if tensor_shape(data) != tensor_shape(product.var):
        return None
    while not var.same_as(data):
        sources = list_candidates(editor, var) if editor.has_one_use(var) else []
        affine = read_affine(editor, var, sources[0], product) if sources else None
        if affine is None:
            return None
        # value = scale * var + shift
        shift = shift if affine.shift is None else shift + scale * affine.shift
        scale = scale if affine.scale is None else scale * affine.scale
        var = affine.data
    if own.weight.shape[1] > 1 and not shift.any() and (scale == 1).all():
        return None  # see `join_branches`
    weight = np.zeros((*own.weight.shape[:2], *[1] * (own.weight.ndim - 2)))
    channels = np.arange(product.channels)
    weight[channels, channels % own.weight.shape[1]] = scale.reshape(-1, *[1] * (weight.ndim - 2))
    return Branch(weight, shift, (0,) * len(own.begin))


def has_same_steps(one: Product, other: Product) -> bool:
    """Whether two convolutions read the same data in the same steps, groups and layout. A kernel of
    one value has no dilation.
    """
    first, second = one.call, other.call
    is_point = min(find_window(first), find_window(second)) == 1
    views = [replace(ConvView.of(call), padding=()) for call in (first, second)]
    if is_point:
        views = [replace(view, dilation=()) for view in views]
    return (
        first.op.name == second.op.name
        and first.args[0].same_as(second.args[0])
        and views[0] == views[1]
        and tensor_shape(one.var) == tensor_shape(other.var)
    )


def find_window(call: Call) -> int:
    """The number of places that a kernel reads."""
    sizes = constant_value(call.args[1]).shape
    return int(np.prod([sizes[axis] for axis in find_axes(call)[2:]]))


def add_kernels(wide: Branch, small: Branch, dilation: tuple[int, ...]) -> np.ndarray | None:
    """Add a kernel to a wider one, at the place where it reads the same data. None if it reads
    data that the wider one does not read.
    """
    places = []
    sizes = zip(wide.weight.shape[2:], small.weight.shape[2:], strict=True)
    pads = zip(wide.begin, small.begin, dilation, strict=True)
    for (size, own), (pad, own_pad, step) in zip(sizes, pads, strict=True):
        first, rest = divmod(pad - own_pad, step)
        if rest or first < 0 or first + own > size:
            return None
        places.append(slice(first, first + own))
    weight = wide.weight.copy()
    weight[(slice(None), slice(None), *places)] += small.weight
    return weight


def find_axes(call: Call) -> list[int]:
    """The axes of a weight in the order O, I, then the spatial ones."""
    view = ConvView.of(call)
    return [view.kernel_layout.index(letter) for letter in f"OI{view.letters}"]


def find_crest(weight: np.ndarray) -> float:
    """The largest square of a weight over the mean square, of the channel where it is largest."""
    squares = np.square(weight.reshape(len(weight), -1))
    means = squares.mean(1)
    return float(np.max(squares.max(1) / np.where(means > 0, means, 1)))
