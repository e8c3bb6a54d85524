"""Beside lint: pictures as a model gets them -> the same pictures prepared in other known ways.

Extremes tell how pixels of 0 to 255 became what a data set holds; then each preset can be tried on
the model without the pictures themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relayquant.data.images import PRESETS, ChannelOrder, Preprocessing

#: how far from what pixels of 0 and 255 become extremes may be, as a share of their distance
PIXEL_SLACK = 0.02
#: pixels as they are, beside the presets
RAW = "scale=1"


@dataclass(frozen=True, eq=False)
class PixelForm:
    """One way in which pixels become an input: pixel * gain + offset, by channel.

    Attributes:
        text: As `--preprocess` takes it; "" where it is only known by its extremes.
        gain, offset: By channel, (C,) float64, in the order of the input.
        is_reversed: Whether blue is first.
    """

    text: str
    gain: np.ndarray
    offset: np.ndarray
    is_reversed: bool = False

    @staticmethod
    def of(text: str, channels: int) -> PixelForm:
        """What `Preprocessing.parse` reads, for so many channels."""
        found = Preprocessing.parse(text)
        mean, std = (np.broadcast_to(np.array(v), (channels,)) for v in (found.mean, found.std))
        return PixelForm(
            text, 1 / (found.scale * std), -mean / std, found.order is ChannelOrder.BGR
        )

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """What pixels of 0 and 255 become, by channel."""
        return self.offset, self.gain * 255 + self.offset

    def is_same(self, other: PixelForm) -> bool:
        """Whether both give the same values, in whatever order of channels."""
        pairs = zip(self.ends, other.ends, strict=True)
        return all(
            np.allclose(a, b, atol=1e-6) or np.allclose(a, b[::-1], atol=1e-6) for a, b in pairs
        )

    def convert(self, array: np.ndarray, axis: int, target: PixelForm) -> np.ndarray:
        """An input in this form, channels on `axis`, in another."""
        shape = [1] * array.ndim
        shape[axis] = -1
        pixels = (array - self.offset.reshape(shape)) / self.gain.reshape(shape)
        if self.is_reversed != target.is_reversed:
            pixels = np.flip(pixels, axis)
        values = pixels * target.gain.reshape(shape) + target.offset.reshape(shape)
        return np.ascontiguousarray(values, array.dtype)


def list_forms(channels: int) -> list[PixelForm]:
    """The presets that so many channels can have, and pixels as they are; of three channels both
    orders.
    """
    texts = []
    for text in (*PRESETS, RAW):
        known = Preprocessing.parse(text)
        if {len(known.mean), len(known.std)} <= {1, channels}:
            texts += [text, reverse_text(text)] if channels == 3 else [text]
    return [PixelForm.of(text, channels) for text in texts]


def reverse_text(text: str) -> str:
    """The same, with the channels in the other order: `text` as `Preprocessing.parse` reads it."""
    known = Preprocessing.parse(text)
    parts = [text, "order=rgb" if known.order is ChannelOrder.BGR else "order=bgr"]
    for name, values in (("mean", known.mean), ("std", known.std)):
        if len(set(values)) > 1:
            parts.append(f"{name}={':'.join(f'{value:g}' for value in values[::-1])}")
    return ",".join(parts)


def find_form(lows: np.ndarray, highs: np.ndarray, forms: Sequence[PixelForm]) -> PixelForm:
    """How pixels became values with these extremes, by channel: the nearest of the forms; one of no
    name where none is near.
    """
    best, least = None, PIXEL_SLACK
    for form in forms:
        low, high = form.ends
        distance = np.maximum(abs(lows - low), abs(highs - high)) / (high - low)
        if distance.max() < least:
            best, least = form, float(distance.max())
    return best or PixelForm("", (highs - lows) / 255, lows.astype("float64"))
