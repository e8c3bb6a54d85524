"""The attributes of a convolution or pool, read once, with one number per axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import Call

from relayquant.errors import QnnError, format_count

SPATIAL_LETTERS = "DHW"

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Conv2dView:
    """The attributes along two spatial axes, height and width.

    Attributes:
        padding: (top, left, bottom, right).
        window: Window of a pool. 1 for a convolution.
        strides, dilation, output_padding, groups: As in `ConvView`.
    """

    window: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    output_padding: tuple[int, int]
    groups: int


@dataclass(frozen=True)
class ConvView:
    """A convolution, transposed convolution or pool, with any number of spatial axes, in any
    layout.

    An attribute that the operator does not have gets a neutral value: 1 group, a window of 1, no
    output padding.

    Attributes:
        layout: Layout of the data.
        kernel_layout: Layout of the weight. "" for a pool.
        out_layout: Layout of the result.
        letters: The spatial axes in the order of all numbers below: D, H, W.
        window: Window of a pool. 1 for a convolution.
        padding: The numbers before each axis, then the numbers behind each axis.
    """

    layout: str
    kernel_layout: str
    out_layout: str
    letters: str
    window: Ints
    strides: Ints
    padding: Ints
    dilation: Ints
    output_padding: Ints
    groups: int

    @staticmethod
    def of(call: Call) -> ConvView:
        """Return the view of a call. Raise as `read` does."""
        return ConvView.read(call.attrs)

    @staticmethod
    def read(attrs: Any) -> ConvView:
        """Read the view from attributes.

        Raises:
            QnnError: An attribute has neither one number nor one number per axis.
        """
        is_pool = hasattr(attrs, "pool_size")
        layout = str(attrs.layout if is_pool else attrs.data_layout)
        letters = "".join(letter for letter in SPATIAL_LETTERS if letter in layout)
        rank = len(letters)
        padding = split_padding(attrs.padding, rank)
        return ConvView(
            layout,
            "" if is_pool else str(attrs.kernel_layout),
            str(getattr(attrs, "out_layout", "") or layout),
            letters,
            expand_per_axis(getattr(attrs, "pool_size", (1,)), rank),
            expand_per_axis(attrs.strides, rank),
            (*(before for before, _ in padding), *(after for _, after in padding)),
            expand_per_axis(attrs.dilation, rank),
            expand_per_axis(getattr(attrs, "output_padding", (0,)), rank),
            1 if is_pool else int(attrs.groups),
        )

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.letters)

    @property
    def order(self) -> str:
        """The channels-last layout, as used by numpy: N, spatial, C."""
        return f"N{self.letters}C"

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """(before, after) for each spatial axis."""
        return tuple(zip(self.padding[: self.rank], self.padding[self.rank :], strict=True))

    def as_2d(self) -> Conv2dView:
        """Return the attributes along height and width.

        The view must have one or two spatial axes. A single axis is the width, with a height of 1.
        """
        missing = 2 - self.rank

        def pair(values: Ints, filler: int) -> tuple[int, int]:
            height, width = (*(filler,) * missing, *values)
            return height, width

        top, left = pair(self.padding[: self.rank], 0)
        bottom, right = pair(self.padding[self.rank :], 0)
        return Conv2dView(
            pair(self.window, 1),
            pair(self.strides, 1),
            (top, left, bottom, right),
            pair(self.dilation, 1),
            pair(self.output_padding, 0),
            self.groups,
        )


def get_spatial_letters(layout: str) -> str:
    """Return the spatial axes of a layout in the order D, H, W.

    Raises:
        QnnError: The layout has letters other than N C O I D H W, such as a packed layout
            ("NCHW4c").
    """
    if not set(layout) <= set("NCOI" + SPATIAL_LETTERS) or len(set(layout)) != len(layout):
        raise QnnError(
            f"layout {layout!r} is not supported; allowed: each of N, C (data) or O, I (kernel) "
            "and the spatial letters once, such as NCHW, NHWC, OIHW, HWIO, HWOI.",
            code="RQ601",
        )
    return "".join(letter for letter in SPATIAL_LETTERS if letter in layout)


def split_padding(padding: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Split 1, `rank` or 2 * `rank` numbers into (before, after) per spatial axis.

    With 2 * `rank` numbers, the numbers before come first.
    """
    values = [int(value) for value in padding]
    if len(values) == 1:
        values = values * (2 * rank)
    elif len(values) == rank:
        values = values * 2
    if len(values) != 2 * rank:
        raise QnnError(
            f"padding {list(padding)} has {format_count(len(values), 'number')}; allowed for "
            f"{format_count(rank, 'spatial axis')}: 1, {rank} or {2 * rank}.",
            code="RQ601",
        )
    return list(zip(values[:rank], values[rank:], strict=True))


def expand_per_axis(values: Sequence[int], rank: int) -> Ints:
    """Expand 1 or `rank` numbers, such as strides or dilation, to one per spatial axis."""
    numbers = tuple(int(value) for value in values)
    if len(numbers) not in (1, rank):
        raise QnnError(
            f"{list(numbers)} has {format_count(len(numbers), 'number')}; allowed: 1 or {rank}.",
            code="RQ601",
        )
    return numbers * rank if len(numbers) == 1 else numbers
