"""Specifications of convolution and dense kernels, and their packed constants."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.conv_shape import Conv2dShape
from relayquant.codegen.kernels.expansion import Expanded
from relayquant.codegen.kernels.integer.epilogue import Epilogue, has_small_results
from relayquant.errors import format_count


@dataclass(frozen=True)
class Tile:
    """Register tile: rows x cols pixels by `blocks` vectors of channels, `chains` partial sums."""

    rows: int
    cols: int
    blocks: int
    chains: int = 1
    sharing: int = 1  #: pixels whose sums share a vector

    @property
    def pixels(self) -> int:
        return self.rows * self.cols

    @property
    def sums(self) -> int:
        """Vectors of sums, of one chain."""
        return self.pixels * self.blocks // self.sharing


@dataclass(frozen=True)
class KernelSchedule:
    """How a convolution is computed. The result is the same for all schedules."""

    tile: Tile | None = None  #: None: the tile with the smallest estimated time
    transforms: bool = False  #: by Winograd's transforms instead of directly


@dataclass(frozen=True)
class Conv2d(Conv2dShape):
    """A quantized convolution with static shapes. Padded pixels hold `in_zero_point`."""

    in_dtype: str = "uint8"
    in_zero_point: int = 0
    epilogue: Epilogue = field(default_factory=Epilogue)
    tile: Tile | None = None  #: tile to use; None: the one with the smallest estimated time
    #: (first channel of y that is written, channels of y); None: all are written. Not for depthwise
    #: convolutions, and without a residual.
    columns: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_dtype not in ("uint8", "int8", "int16"):
            raise ValueError(f"Conv2d: in_dtype is {self.in_dtype!r}; allowed: uint8, int8, int16.")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"Conv2d: {self.in_channels} input and "
                f"{format_count(self.out_channels, 'output channel')} cannot divide into "
                f"{format_count(self.groups, 'group')}.",
            )
        if min(self.out_size) < 1:
            raise ValueError(
                f"Conv2d: a {self.kernel} kernel with dilation {self.dilation} does not fit into "
                f"{self.height}x{self.width} with padding {self.padding}.",
            )
        if self.columns is not None and (self.is_depthwise or self.epilogue.residual):
            raise ValueError(
                "Conv2d: a depthwise convolution, or one with a residual, has columns; allowed: "
                "columns of other convolutions.",
            )

    @property
    def result_channels(self) -> int:
        """Channels of y."""
        return self.out_channels if self.columns is None else self.columns[1]

    @property
    def first_result(self) -> int:
        """The first of the channels of y that are written."""
        return 0 if self.columns is None else self.columns[0]

    @property
    def macs(self) -> int:
        """Multiply-adds of one call."""
        return int(np.prod(self.out_shape) * np.prod(self.weight_shape[1:]))


@dataclass(frozen=True)
class Dense:
    """y[m, n] = epilogue(bias[n] + sum_k x[m, k] * w[n, k]); x (M, K), w (N, K), y (M, N)."""

    rows: int
    in_features: int
    out_features: int
    in_dtype: str = "uint8"
    in_zero_point: int = 0
    epilogue: Epilogue = field(default_factory=Epilogue)
    tile: Tile | None = None  #: as in `Conv2d`

    def as_conv2d(self) -> Conv2d:
        """Return the same product as a 1x1 convolution over a row of pixels."""
        return Conv2d(
            batch=1,
            height=1,
            width=self.rows,
            in_channels=self.in_features,
            out_channels=self.out_features,
            kernel=(1, 1),
            in_dtype=self.in_dtype,
            in_zero_point=self.in_zero_point,
            epilogue=self.epilogue,
            tile=self.tile,
        )


#: Shape of an argument of a kernel.
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Constants:
    """Constants of a product as its operator has them, with kernel zero point 0.

    Attributes:
        weight: (O, KH, KW, I / groups) int8; (N, K) of a dense layer.
        bias: (O,) int32, scale s_in * s_w[c]; without the zero point correction.
        multiplier: (O,) or () float32; s_in * s_w[c] / s_out, or s_in * s_w[c] to dequantize. None
            if accumulators are stored. (2, O) with a curve: s_in * s_w[c], and what its results are
            multiplied by; with a slope: what is below 0 is multiplied by the second.
    """

    weight: NDArray[np.int8]
    bias: NDArray[np.int32]
    multiplier: NDArray[np.float32] | np.float32 | None

    def as_conv2d(self) -> Constants:
        """Return the constants of a dense layer with the weight as a 1x1 convolution has it."""
        return replace(self, weight=self.weight[:, None, None, :])


@dataclass(frozen=True)
class PackedWeights:
    """Constant operands of a kernel in argument order; see `pack_conv2d`."""

    weight: NDArray[np.integer] | Expanded  #: flat, in the order the kernel reads
    bias: NDArray[np.int32]  #: with the input zero point folded in
    #: None if the kernel stores accumulators. With two of each channel, all first ones come first.
    multiplier: NDArray[np.float32] | None

    def operands(self) -> list[NDArray | Expanded]:
        """List the operands after the data argument of the kernel."""
        constants: list[NDArray | Expanded] = [self.weight, self.bias]
        return constants if self.multiplier is None else [*constants, self.multiplier]

    def arguments(self) -> list[NDArray]:
        """List the operands as the kernel reads them, with expanded weights."""
        return [each.expand() if isinstance(each, Expanded) else each for each in self.operands()]


def fold_zero_point(
    bias: NDArray[np.int32], weight: NDArray[np.int8], zero_point: int
) -> NDArray[np.int32]:
    """Compute bias - zero_point * sum(weight) per output channel; weight (C, ...), bias (C,).

    The kernel then multiplies stored activations, and padding holds the zero point. Sums wrap
    modulo 2**32 like the accumulators they initialize.
    """
    sums = weight.reshape(len(weight), -1).astype("int64").sum(axis=1)
    return (bias.astype("int64") - zero_point * sums).astype("uint32").view("int32")


def pack_channels(
    spec: Conv2d, constants: Constants, zero_point_shift: int, order: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
    """Return the bias with the zero point folded in, and the multiplier, in the order `order`.

    `order` holds flat channel numbers. Numbers outside the channels give 0.

    Raises:
        ValueError: A shape does not fit, or the multiplier is missing or not allowed.
    """
    channels, weight = spec.out_channels, constants.weight
    bias, multiplier = constants.bias, constants.multiplier
    if weight.shape != spec.weight_shape or weight.dtype != np.int8:
        raise ValueError(
            f"Weights are {weight.dtype} {weight.shape}, expected int8 OHWI {spec.weight_shape}.",
        )
    if bias.shape != (channels,):
        raise ValueError(f"The bias has shape {bias.shape}, expected ({channels},).")
    has_multiplier = spec.epilogue.has_multiplier
    if has_multiplier != (multiplier is not None):
        wanted = "needs a" if has_multiplier else "takes no"
        raise ValueError(
            f"A kernel that stores {spec.epilogue.output.value} values {wanted} multiplier.",
        )
    folded = fold_zero_point(bias, weight, spec.in_zero_point + zero_point_shift)
    exists = (order >= 0) & (order < channels)
    index = np.where(exists, order, 0)
    folded = np.where(exists, folded[index], 0).astype("int32")
    if multiplier is None:
        return folded, None
    multiplier, count = np.asarray(multiplier, "float32"), spec.epilogue.multipliers
    allowed = ((), (1,), (channels,)) if count == 1 else ((count, channels),)
    if multiplier.shape not in allowed:
        raise ValueError(
            f"The multiplier has shape {multiplier.shape}, expected "
            f"{' or '.join(map(str, allowed))}.",
        )
    is_small = spec.epilogue.is_small and spec.epilogue.curve is None
    if is_small and not has_small_results(multiplier, spec.epilogue):
        raise ValueError(
            f"The epilogue has is_small, but the multiplier reaches {np.abs(multiplier).max()}. "
            "Allowed: up to 0.5. Build the kernel without is_small.",
        )
    multiplier = np.broadcast_to(multiplier, (count, channels))[:, index]
    return folded, np.where(exists, multiplier, 0).astype("float32").reshape(-1)
