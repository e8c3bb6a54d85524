"""Shape of a product's data -> the tables by which kernels find the operands of results."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from relayquant.base.runtime import align_array, empty_aligned
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.gathered import Extents, Table

#: Rows of a table, if an image has fewer. More would only take memory.
TABLE_ROWS = 4096
#: Below this many channels, planes are copied one by one to where channels are last.
FEW_CHANNELS = 8


@dataclass(frozen=True, eq=False)
class WindowTables:
    """Windows of one image, whose data lie in the order H, W, C with the padding.

    Attributes:
        rows: Where the window of each result begins in the image.
        steps: Where the elements of a window are.
        image_size: Elements of the image.
    """

    rows: Table
    steps: Table
    image_size: int

    def plan_calls(
        self, images: int, pitch: int, has_residual: bool
    ) -> Iterator[tuple[Table, Extents]]:
        """Return rows and extents of the calls for this many images, whose results have `pitch`
        channels. Small images share a table.
        """
        pixels = len(self.rows)
        together = max(min(TABLE_ROWS // pixels, images), 1)
        whole, rest = divmod(images, together)
        steps = (together * self.image_size, together * pixels * pitch)
        yield self.repeat(together), Extents(whole, *steps, pitch, 0, 0, has_residual)
        if rest:
            first = (whole * steps[0], whole * steps[1])
            yield self.repeat(rest), Extents(1, *steps, pitch, *first, has_residual)

    def repeat(self, images: int) -> Table:
        """Return the rows of several images."""
        starts = np.arange(images, dtype="int64")[:, None] * self.image_size
        return (starts + self.rows).reshape(-1).astype("int32")


@functools.lru_cache(maxsize=256)
def find_windows(spec: FloatConv2d) -> WindowTables:
    """Return the windows of an image of `spec`. Only its geometry matters."""
    (height, width), (oh, ow), channels = spec.padded_size, spec.out_size, spec.in_channels
    (kh, kw), (sh, sw), (dh, dw) = spec.kernel, spec.strides, spec.dilation
    rows = (np.arange(oh)[:, None] * (sh * width) + np.arange(ow) * sw) * channels
    taps = (np.arange(kh)[:, None] * (dh * width) + np.arange(kw) * dw) * channels
    inputs = np.arange(spec.group_in)
    steps = (taps[..., None] + inputs).reshape(-1)
    return WindowTables(
        rows.reshape(-1).astype("int32"), steps.astype("int32"), height * width * channels
    )


@dataclass(frozen=True, eq=False)
class PlaneTables:
    """Windows of one image, whose data lie in planes with the padding; see `lay_planes`.

    Attributes:
        rows: Where each vector of neighbouring pixels begins in the data.
        starts: Where in a plane of results. The last vector of a row overlaps the one before it.
        steps: Where the elements of a window are.
        image_size: Elements of the image.
    """

    rows: Table
    starts: Table
    steps: Table
    image_size: int


@functools.lru_cache(maxsize=256)
def find_planes(spec: FloatConv2d, lanes: int) -> PlaneTables:
    """Return the windows of an image of `spec`, whose results have at least `lanes` columns."""
    (height, width), (oh, ow), channels = spec.padded_size, spec.out_size, spec.in_channels
    (kh, kw), (sh, sw), (dh, dw) = spec.kernel, spec.strides, spec.dilation
    columns = -(-width // sw)
    pitch = sw * columns
    first = np.minimum(np.arange(0, ow, lanes), ow - lanes)
    place, phase = np.divmod(np.arange(kw) * dw, sw)
    taps = (np.arange(kh)[:, None] * (dh * pitch) + phase * columns + place)[..., None]
    tables = (
        np.arange(oh)[:, None] * (sh * pitch) + first,
        np.arange(oh)[:, None] * ow + first,
        taps + np.arange(channels) * (height * pitch),
    )
    rows, starts, steps = (table.reshape(-1).astype("int32") for table in tables)
    return PlaneTables(rows, starts, steps, channels * height * pitch)


def lay_planes(
    images: np.ndarray, spec: FloatConv2d, zero_point: np.float32 | None = None
) -> np.ndarray:
    """Return images (N, H, W, C) in the memory order N, C, H, phase, W / stride, with the padding
    of `spec`. A phase holds the columns that are a stride apart, so that the pixels that a tap of
    neighbouring windows reads are neighbours. Integers are read less their zero point.
    """
    (height, width), (top, left, _, _), stride = spec.padded_size, spec.padding, spec.strides[1]
    below, right = top + spec.height, left + spec.width
    columns = -(-width // stride)
    shape = len(images), spec.in_channels, height, columns * stride
    is_plain = stride == 1
    planes = (empty_aligned if is_plain else np.empty)(shape, "float32")
    planes[:, :, :top], planes[:, :, below:] = 0, 0
    planes[:, :, top:below, :left], planes[:, :, top:below, right:] = 0, 0
    inside, data = planes[:, :, top:below, left:right], images.transpose(0, 3, 1, 2)
    if zero_point is None:
        inside[...] = data
    else:
        np.subtract(data, zero_point, out=inside, dtype="float32")
    if is_plain:
        return planes
    return align_array(planes.reshape(*shape[:3], columns, stride).swapaxes(-1, -2))


def pad_images(
    images: np.ndarray, spec: FloatConv2d, zero_point: np.float32 | None = None
) -> np.ndarray:
    """Return images (N, H, W, C) in this memory order, with the padding of `spec`. Integers are
    read less their zero point.
    """

    def read(part: np.ndarray, to: np.ndarray) -> None:
        if zero_point is None:
            to[...] = part
        else:  # one pass over memory, a few numbers of other types at a time
            np.subtract(part, zero_point, out=to, dtype="float32")

    if not any(spec.padding):
        if zero_point is None:
            return align_array(images)
        centred = empty_aligned(images.shape, "float32")
        read(images, centred)
        return centred
    (height, width), (top, left, _, _) = spec.padded_size, spec.padding
    padded = empty_aligned((len(images), height, width, spec.in_channels), "float32")
    below, right = top + spec.height, left + spec.width
    padded[:, :top], padded[:, below:] = 0, 0
    padded[:, top:below, :left], padded[:, top:below, right:] = 0, 0
    inside = padded[:, top:below, left:right]
    if spec.in_channels < FEW_CHANNELS and images.strides[-1] > images.strides[-2]:
        for channel in range(spec.in_channels):  # planes: numpy would copy a few numbers at a time
            read(images[..., channel], inside[..., channel])
    else:
        read(images, inside)
    return padded
