"""Rows of neural network operators of Relax: products, pooling, normalization, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relayquant.ir.reference.relax.row import Row, align, own, to_ints

# Activations -----------------------------------------------------------------------------------


def prelu(xp: Any, args: list[Any], attrs: Any) -> Any:
    data, slope = args
    slope = align(xp, slope.reshape(-1), [int(attrs.axis)], data.ndim)
    return xp.scale_negatives(data, slope)


# Normalization ---------------------------------------------------------------------------------


def normalize(xp: Any, x: Any, axes: Sequence[int], epsilon: float) -> Any:
    """Compute (x - mean) * (1 / sqrt(variance + epsilon)) over `axes`."""
    x = xp.widen(x)
    centred = x - xp.mean_along(x, axes)
    variance = xp.mean_along(centred * centred, axes)
    return centred * xp.rsqrt(variance + float(epsilon))


def apply_affine(xp: Any, x: Any, args: list[Any], axes: Sequence[int], attrs: Any) -> Any:
    """Compute x * gamma + beta. The second and third argument are gamma and beta along `axes`."""
    if attrs.scale:
        x = x * align(xp, args[1], axes, x.ndim)
    if attrs.center:
        x = x + align(xp, args[2], axes, x.ndim)
    return x


def layer_norm(xp: Any, args: list[Any], attrs: Any) -> Any:
    axes = to_ints(attrs.axes)
    return apply_affine(xp, normalize(xp, args[0], axes, attrs.epsilon), args, axes, attrs)


def instance_norm(xp: Any, args: list[Any], attrs: Any) -> Any:
    normal = normalize(xp, args[0], to_ints(attrs.axes), attrs.epsilon)
    return apply_affine(xp, normal, args, (int(attrs.channel_axis),), attrs)


def group_norm(xp: Any, args: list[Any], attrs: Any) -> Any:
    data, groups, axis = args[0], int(attrs.num_groups), int(attrs.channel_axis) % args[0].ndim
    shape = tuple(data.shape)
    split = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    axes = [a % data.ndim for a in to_ints(attrs.axes)]
    # In the split array axes after the channel axis move by one; a group's channels are one of
    # them.
    moved = tuple(sorted({axis + 1, *(a + (a > axis) for a in axes if a != axis)}))
    normal = normalize(xp, data.reshape(split), moved, attrs.epsilon).reshape(shape)
    return apply_affine(xp, normal, args, (axis,), attrs)


def rms_norm(xp: Any, args: list[Any], attrs: Any) -> Any:
    x, axes = xp.widen(args[0]), to_ints(attrs.axes)
    root = xp.rsqrt(xp.mean_along(x * x, axes) + float(attrs.epsilon))
    return x * root * align(xp, args[1], axes, x.ndim)


def batch_norm(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Normalize with the moving statistics -> (result, moving mean, moving variance)."""
    data, _, _, mean, variance = args
    axes = (int(attrs.axis),)
    centred = xp.widen(data) - align(xp, mean, axes, data.ndim)
    spread = xp.widen(align(xp, variance, axes, data.ndim)) + float(attrs.epsilon)
    normal = centred / xp.sqrt(spread)
    return apply_affine(xp, normal, args, axes, attrs), mean, variance


def refuse_training(attrs: Any) -> str:
    text = (
        "training=True; allowed: False, with the moving statistics. Export the model in eval mode"
    )
    return text if attrs.training else ""


# Attention, shuffles ---------------------------------------------------------------------------


def attention(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Compute softmax(q k^T * scale) v. q, k and v have shape (batch, sequence, heads, size)."""
    q, k, v = (xp.permute(xp.widen(operand), (0, 2, 1, 3)) for operand in args[:3])
    scale = q.shape[-1] ** -0.5 if attrs.scale is None else float(attrs.scale)
    scores = q @ xp.permute(k, (0, 1, 3, 2)) * scale
    if len(args) > 3:
        scores = scores + args[3]
    return xp.permute(xp.plain_softmax(scores, -1) @ v, (0, 2, 1, 3))


def refuse_masks(attrs: Any) -> str:
    if attrs.causal_mask is None and attrs.window_size is None:
        return ""
    return f"causal_mask={attrs.causal_mask}, window_size={attrs.window_size}; allowed: neither"


def pixel_shuffle(xp: Any, args: list[Any], attrs: Any) -> Any:
    (data,), r = args, int(attrs.upscale_factor)
    *batch, channels, height, width = data.shape
    split = data.reshape((*batch, channels // (r * r), r, r, height, width))
    n = len(batch)
    moved = xp.permute(split, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return moved.reshape((*batch, channels // (r * r), height * r, width * r))


CONV = (
    "strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout",
    "out_dtype",
)  # fmt: skip
POOL = (
    "pool_size", "strides", "dilation", "padding", "ceil_mode", "count_include_pad", "layout",
    "out_layout",
)  # fmt: skip
ADAPTIVE = ("output_size", "layout", "out_layout")
ATTENTION = ("scale", "causal_mask", "window_size")
AFFINE = ("epsilon", "center", "scale")

ROWS: tuple[Row, ...] = (
    *(Row(f"nn.conv{n}d", own("convolve"), CONV) for n in (1, 2, 3)),
    *(
        Row(f"nn.conv{n}d_transpose", own("convolve_transposed"), (*CONV, "output_padding"))
        for n in (1, 2, 3)
    ),
    *(Row(f"nn.max_pool{n}d", own("max_pool"), POOL) for n in (1, 2, 3)),
    *(Row(f"nn.avg_pool{n}d", own("avg_pool"), POOL) for n in (1, 2, 3)),
    *(Row(f"nn.adaptive_avg_pool{n}d", own("adaptive_avg_pool"), ADAPTIVE) for n in (1, 2)),
    Row("matmul", own("multiply_matrices"), ("out_dtype",)),
    Row("nn.attention", attention, ATTENTION, refuse_masks),
    Row("nn.attention_bias", attention, ATTENTION, refuse_masks),
    Row("nn.batch_norm", batch_norm, ("axis", *AFFINE, "momentum", "training"), refuse_training),
    Row("nn.dropout", lambda xp, args, attrs: (args[0], xp.ones_like(args[0])), ("rate",)),
    Row("nn.group_norm", group_norm, ("num_groups", "channel_axis", "axes", *AFFINE)),
    Row("nn.instance_norm", instance_norm, ("channel_axis", "axes", *AFFINE)),
    Row("nn.layer_norm", layer_norm, ("axes", *AFFINE)),
    Row("nn.leakyrelu", own("leaky_relu"), ("alpha",)),
    Row("nn.log_softmax", own("log_softmax"), ("axis",)),
    Row("nn.pixel_shuffle", pixel_shuffle, ("upscale_factor",)),
    Row("nn.prelu", prelu, ("axis",)),
    Row("nn.rms_norm", rms_norm, ("axes", "epsilon")),
    Row("nn.softmax", own("softmax"), ("axis",)),
    Row(
        "vision.all_class_non_max_suppression",
        own("select_boxes"),
        ("output_format",),
        is_reference_only=True,
    ),
)
