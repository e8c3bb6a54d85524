"""Extents of convolutions, integer and float: the base of their specifications."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConvShape(ABC):
    """Extents that ordinary and transposed convolutions share: data NHWC, weights OHWI.

    `padding` is (top, left, bottom, right). The batch is a number, or a `tirx.Var` if the kernels
    take any number of images.
    """

    batch: Any
    height: int
    width: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    @abstractmethod
    def out_size(self) -> tuple[int, int]:
        """(OH, OW)."""

    @property
    def in_shape(self) -> tuple[Any, int, int, int]:
        """NHWC."""
        return self.batch, self.height, self.width, self.in_channels

    @property
    def out_shape(self) -> tuple[Any, int, int, int]:
        """NHWC."""
        return (self.batch, *self.out_size, self.out_channels)

    @property
    def group_in(self) -> int:
        """Input channels of a group."""
        return self.in_channels // self.groups

    @property
    def group_out(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """OHWI."""
        return (self.out_channels, *self.kernel, self.group_in)


@dataclass(frozen=True)
class JoinedSlices:
    """Slices of volumes whose rows are the rows of images: a convolution over the depth, too.

    Row y of image i belongs to volume i // images. It is row y // taps of the slice
    i % images * stride + y % taps * dilation.
    """

    slices: int  #: slices of a volume
    images: int  #: images of a volume: slices of the result
    taps: int  #: slices of an image
    stride: int
    dilation: int

    def find_row(self, image: Any, row: Any, height: int) -> Any:
        """Return the number of a row among the rows of all slices, for images of this height."""
        volume, first = image // self.images, image % self.images * self.stride
        stored = volume * self.slices + first + row % self.taps * self.dilation
        return stored * (height // self.taps) + row // self.taps


@dataclass(frozen=True)
class Conv2dShape(ConvShape):
    """Extents of an ordinary convolution.

    With `joined` the data are volumes (N, D, H, W, C) and the images exist only as rows of their
    slices. Only depthwise kernels read them.
    """

    joined: JoinedSlices | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.joined is not None and not self.is_depthwise:
            raise ValueError(
                f"Joined slices of a convolution with groups={self.groups} and in_channels="
                f"{self.in_channels}; allowed: depthwise convolutions."
            )

    @property
    def stored_shape(self) -> tuple[Any, ...]:
        """Shape of the data: `in_shape`, or (N, D, H, W, C) for slices that are joined."""
        if self.joined is None:
            return self.in_shape
        rows, joined = self.height // self.joined.taps, self.joined
        batch = self.batch // joined.images
        return batch, joined.slices, rows, self.width, self.in_channels

    def find_row(self, image: Any, row: Any) -> Any:
        """Return the number of a row of an image among all rows of the data."""
        if self.joined is None:
            return image * self.height + row
        return self.joined.find_row(image, row, self.height)

    @property
    def padded_size(self) -> tuple[int, int]:
        """(H, W) with the padding."""
        top, left, bottom, right = self.padding
        return self.height + top + bottom, self.width + left + right

    @property
    def out_size(self) -> tuple[int, int]:
        """(OH, OW)."""
        oh, ow = (
            (size - (k - 1) * d - 1) // s + 1
            for size, k, d, s in zip(
                self.padded_size, self.kernel, self.dilation, self.strides, strict=True
            )
        )
        return oh, ow

    @property
    def is_depthwise(self) -> bool:
        """Whether there are several groups of one input channel and one output channel each."""
        return self.groups > 1 and self.groups == self.in_channels == self.out_channels
