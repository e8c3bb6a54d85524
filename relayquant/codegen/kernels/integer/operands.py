"""Operands of the convolution kernels: arguments, the prepared image, and the store of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.conv_shape import Conv2dShape
from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_BYTES,
    alloc_workspace,
    constant,
    convert_activation,
    declare_arguments,
    emit_shared_loop,
    emit_vector_loop,
    load_vector,
    loop_over,
    store_vector,
)
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.integer.saturating_pack import (
    emit_narrow_residuals,
    emit_narrow_store,
)
from relayquant.codegen.kernels.integer.specs import Conv2d, Shape
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, join


@dataclass(frozen=True)
class Operands:
    """Operands of a convolution as flat buffers; None if the epilogue takes none.

    `multiplier` is one number for all channels, or a buffer of all first multipliers, and of all
    second ones if there are two of each channel. `row_term`, one int32 per pixel, is
    added to all its channels.
    """

    data: Buffer
    weight: Buffer
    bias: Buffer
    multiplier: Buffer | float | None
    residual: Buffer | None
    out: Buffer
    row_term: Buffer | None = None


@dataclass(frozen=True)
class Image:
    """NHWC activations in the dtype of the dot product, including padding."""

    data: Buffer
    height: int
    width: int


@dataclass(frozen=True)
class Placement:
    """Where a convolution reads and writes, if it is part of another one.

    Output pixel (y, x) goes to (y * stride + offset) of an image of `size`. Its window starts at
    `origin` in the input. `first_weight` counts weight vectors, `first_channel` lanes.
    """

    size: tuple[int, int]
    origin: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    offset: tuple[int, int] = (0, 0)
    first_weight: int = 0
    first_channel: int = 0


@dataclass(frozen=True)
class PanelPosition:
    """Where a panel of weights, its constants and its channels are."""

    channels: list[Expr]  #: of each vector in a pixel of y; all the same when results are packed
    constants: Expr  #: of the first multiplier
    bias: Expr  #: of the first number of the bias
    first_vector: Expr  #: number of the first vector of weights


def locate_panel(
    plan: ConvPlan, place: Placement, n: Expr, group: Expr, panel: Expr
) -> PanelPosition:
    """Compute the offsets of a panel of image n.

    Packed results cover a panel, others a vector. The last of them is moved back within the group.
    """
    width = plan.panel_channels if plan.is_narrow else plan.isa.lanes
    channels = []
    for block in range(plan.tile.blocks):
        start = panel * plan.panel_channels + (0 if plan.is_narrow else block * plan.isa.lanes)
        if plan.panels * plan.panel_channels != plan.group_out:
            start = T.min(start, max(plan.group_out - width, 0))
        channels.append(group * plan.group_out + start + plan.first_result)
    weight_set = n if plan.weights_per_image else 0
    constants = (group * plan.panels + panel) * plan.panel_channels + place.first_channel
    number = (weight_set * plan.groups + group) * plan.panels + panel
    return PanelPosition(
        channels=channels,
        constants=constants,
        bias=weight_set * plan.channel_size + constants,
        first_vector=number * plan.panel_vectors + place.first_weight,
    )


def declare_operands(
    spec: Conv2d, isa: Isa, weight_size: int, channel_size: int, *shapes: Shape
) -> Operands:
    """Declare x, weight, bias[, multiplier][, residual], y, in this order.

    `shapes`: of x and of y. Without them, `spec` says what the shapes are.
    """
    channels, added = (channel_size,), spec.epilogue.residual
    own = (spec.stored_shape, (*spec.out_shape[:-1], spec.result_channels))
    x_shape, y_shape = shapes or own
    return Operands(
        *declare_arguments(
            ("x", x_shape, spec.in_dtype),
            ("weight", (weight_size,), isa.weight_dtype),
            ("bias", channels, "int32"),
            declare_multiplier(spec.epilogue, channel_size),
            ("residual", y_shape, added.dtype) if added else None,
            ("y", y_shape, spec.epilogue.dtype),
        )
    )


def emit_prepared_image(data: Buffer, spec: Conv2d, isa: Isa) -> Image:
    """Emit a copy of NHWC `data` in a workspace, in the form that the dot product reads.

    It is padded with the zero point. If `data` has another dtype than the dot product, its bytes
    become int16, or the top bit of each is flipped. A vector of slack at the end may be read.
    """
    dtype = isa.activation

    def convert(value: Expr, lanes: int) -> Expr:
        return convert_activation(value, spec.in_dtype, dtype, lanes)

    zero_point = spec.in_zero_point + isa.zero_point_shift(spec.in_dtype)
    return emit_image_copy(data, spec, dtype, zero_point, convert, COPY_BYTES)


def emit_prepared_rows(
    data: Buffer, copy: Buffer, width: int, first: Expr, count: Expr, is_worth: Expr | bool = False
) -> None:
    """Emit a copy of `count` rows from `first` on, in the dtype of the dot product.

    Threads share the rows if `is_worth`.
    """

    def emit_row(row: Expr) -> None:
        def move(at: Expr, lanes: int) -> None:
            value = load_vector(data, (first + row) * width + at, lanes)
            value = convert_activation(value, data.dtype, copy.dtype, lanes)
            store_vector(copy, value, row * width + at, lanes)

        emit_vector_loop(width, COPY_BYTES, move)

    emit_shared_loop(count, is_worth, emit_row)


def emit_image_copy(
    data: Buffer,
    spec: Conv2dShape,
    dtype: str,
    zero: int,
    convert: Callable[[Expr, int], Expr],
    most_lanes: int,
) -> Image:
    """Emit a copy of NHWC `data` in a workspace, padded with `zero`, and slack of a vector.

    Args:
        convert: (vector, lanes) -> vector of `dtype`.
        most_lanes: Lanes of the longest vector that `convert` takes.
    """
    batch, height, width, channels = spec.in_shape
    top, left, bottom, right = spec.padding
    rows, row = height + top + bottom, (left + width + right) * channels
    image = alloc_workspace(batch * rows * row + COPY_BYTES, dtype)
    threads = batch * rows * row >= PARALLEL_BYTES

    def fill(start: Expr, count: int) -> None:
        def store(at: Expr, lanes: int) -> None:
            store_vector(image, constant(dtype, zero, lanes), start + at, lanes)

        if count:
            emit_vector_loop(count, COPY_BYTES, store)

    def copy(start: Expr, source: Expr, count: int) -> None:
        def move(at: Expr, lanes: int) -> None:
            value = load_vector(data, source + at, lanes)
            store_vector(image, convert(value, lanes), start + at, lanes)

        emit_vector_loop(count, most_lanes, move)

    result = Image(image, rows, left + width + right)
    if not any(spec.padding) and spec.joined is None:
        lines = batch * height if batch * height > 1 else width  # a matrix is one line
        blocks = lines if batch * height * row // lines >= COPY_BYTES else 1
        with loop_over((blocks,), threads and blocks > 1) as (y,):
            size = batch * height * row // blocks
            copy(y * size, y * size, size)
        return result
    for count, first in ((top, 0), (bottom, top + height)):
        if count:
            with loop_over((batch,), False) as (n,):
                fill((n * rows + first) * row, count * row)
    with loop_over((batch, height), threads and batch * height > 1) as (n, y):
        start = (n * rows + top + y) * row
        fill(start, left * channels)
        copy(start + left * channels, spec.find_row(n, y) * width * channels, width * channels)
        fill(start + (left + width) * channels, right * channels)
    return result


def emit_store(
    operands: Operands,
    epilogue: Epilogue,
    acc: Expr,
    at: Expr,
    first: Expr,
    lanes: int,
    width: int,
) -> None:
    """Store `width` lanes of an accumulator vector at `at` of y. Its multipliers are at `first`."""
    residual = None
    if operands.residual is not None:
        residual = load_partial(operands.residual, at, lanes, width)
    factors = load_multipliers(operands, epilogue, first, lanes)
    value = epilogue.emit(acc, factors, residual, lanes)
    store_vector(operands.out, value, at, lanes, width)


def emit_narrow_vectors(
    isa: Isa,
    epilogue: Epilogue,
    operands: Operands,
    accs: list[Expr],
    targets: list[Expr],
    first: Expr,
    blocks: int,
    width: int,
) -> None:
    """Store up to four accumulators as packed bytes; see `saturating_pack`.

    `accs` are the `blocks` accumulators of each pixel, or set of pixels, one after the other.
    `targets` are the offsets of the pixels in y, each of `width` channels; or of the sets, if
    `width` counts all their channels. The multipliers of a pixel are at `first`.
    """
    lanes, reals = isa.accumulator_lanes, []
    residuals, moved = [None] * len(accs), 0
    if operands.residual is not None:
        residuals = emit_narrow_residuals(
            operands.residual, targets, lanes, len(accs), blocks, width
        )
        moved = 128 if operands.residual.dtype == "int8" else 0
    for i, (acc, residual) in enumerate(zip(accs, residuals, strict=True)):
        factors = load_multipliers(operands, epilogue, first + i % blocks * isa.lanes, isa.lanes)
        factors = [join([factor] * isa.pixels, lanes) for factor in factors]
        reals.append(epilogue.emit_real(acc, factors, residual, lanes, moved))
    emit_narrow_store(isa, epilogue, reals, operands.out, targets, blocks, width)


def declare_multiplier(epilogue: Epilogue, channel_size: int) -> tuple[str, Shape, str] | None:
    """Return name, shape and dtype of the multipliers. None if the kernel takes none."""
    count = epilogue.multipliers
    return ("multiplier", (count * channel_size,), "float32") if count else None


def load_multipliers(operands: Operands, epilogue: Epilogue, first: Expr, lanes: int) -> list[Expr]:
    """Load the multipliers of a vector of channels, of which the first is number `first`."""
    if operands.multiplier is None:
        return []
    if isinstance(operands.multiplier, float):
        return [constant("float32", operands.multiplier, lanes)]
    count = epilogue.multipliers
    step = operands.multiplier.shape[0] // count if count > 1 else 0
    return [load_vector(operands.multiplier, first + i * step, lanes) for i in range(count)]


def load_partial(buffer: Buffer, offset: Expr, lanes: int, width: int) -> Expr:
    """Load a vector, reading only the first `width` lanes from memory.

    The others repeat the last one.
    """
    if width == lanes:
        return load_vector(buffer, offset, lanes)
    scalars = [buffer.vload([offset + min(i, width - 1)]) for i in range(lanes)]
    return T.Shuffle(scalars, [T.int32(i) for i in range(lanes)])
