"""Pictures as a model gets them -> the same pictures with other preprocessing.

The extremes tell how pixels of 0 to 255 became the values of a data set. Then each preset can be
tried on the model without the original pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relayquant.base.axes import shape_along
from relayquant.data.images import PRESETS, ChannelOrder, Preprocessing

#: allowed distance of the extremes from the values of pixels 0 and 255, as a share of their range
PIXEL_SLACK = 0.02
#: raw pixels, in addition to the presets
RAW = "scale=1"


@dataclass(frozen=True, eq=False)
class PixelForm:
    """A map from pixels to input values: pixel * gain + offset, by channel.

    Attributes:
        text: In the syntax of `--preprocess`. "" if only the extremes are known.
        gain, offset: By channel, (C,) float64, in the order of the input.
        is_reversed: Whether blue is first.
    """

    text: str
    gain: np.ndarray
    offset: np.ndarray
    is_reversed: bool = False

    @staticmethod
    def of(text: str, channels: int) -> PixelForm:
        """Parse a `--preprocess` text for this number of channels."""
        found = Preprocessing.parse(text)
        mean, std = (np.broadcast_to(np.array(v), (channels,)) for v in (found.mean, found.std))
        return PixelForm(
            text, 1 / (found.scale * std), -mean / std, found.order is ChannelOrder.BGR
        )

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The values of pixels 0 and 255, by channel."""
        return self.offset, self.gain * 255 + self.offset

    def is_same(self, other: PixelForm) -> bool:
        """Whether both give the same values, in any order of channels."""
        pairs = zip(self.ends, other.ends, strict=True)
        return all(
            np.allclose(a, b, atol=1e-6) or np.allclose(a, b[::-1], atol=1e-6) for a, b in pairs
        )

    def convert(self, array: np.ndarray, axis: int, target: PixelForm) -> np.ndarray:
        """Convert an input in this form, with channels on `axis`, to another form."""
        shape = shape_along(axis, array.ndim)
        pixels = (array - self.offset.reshape(shape)) / self.gain.reshape(shape)
        if self.is_reversed != target.is_reversed:
            pixels = np.flip(pixels, axis)
        values = pixels * target.gain.reshape(shape) + target.offset.reshape(shape)
        return np.ascontiguousarray(values, array.dtype)


def list_forms(channels: int) -> list[PixelForm]:
    """List the presets for this number of channels, and raw pixels. With three channels, in both
    orders.
    """
    texts = []
    for text in (*PRESETS, RAW):
        known = Preprocessing.parse(text)
        if {len(known.mean), len(known.std)} <= {1, channels}:
            texts += [text, reverse_text(text)] if channels == 3 else [text]
    return [PixelForm.of(text, channels) for text in texts]


def reverse_text(text: str) -> str:
    """Return the text for the other channel order, as `Preprocessing.parse` reads it."""
    known = Preprocessing.parse(text)
    parts = [text, "order=rgb" if known.order is ChannelOrder.BGR else "order=bgr"]
    for name, values in (("mean", known.mean), ("std", known.std)):
        if len(set(values)) > 1:
            parts.append(f"{name}={':'.join(f'{value:g}' for value in values[::-1])}")
    return ",".join(parts)


def find_form(lows: np.ndarray, highs: np.ndarray, forms: Sequence[PixelForm]) -> PixelForm:
    """Find the form that explains these extremes by channel: the nearest known form, or one without
    a name if none is near.
    """
    best, least = None, PIXEL_SLACK
    for form in forms:
        low, high = form.ends
        distance = np.maximum(abs(lows - low), abs(highs - high)) / (high - low)
        if distance.max() < least:
            best, least = form, float(distance.max())
    return best or PixelForm("", (highs - lows) / 255, lows.astype("float64"))
