"""Convolutions and products with weights, and their epilogues -> steps that call float kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.tirx import PrimFunc

from relayquant.base.runtime import align_array, empty_aligned, view_aligned
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import LastMade, Operand
from relayquant.codegen.eager.steps.windows import find_planes, find_windows, lay_planes, pad_images
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d, count_macs
from relayquant.codegen.kernels.floating.convolution.winograd import (
    make_winograd,
    pack_winograd,
    prefers_winograd,
)
from relayquant.codegen.kernels.floating.gathered import (
    Extents,
    GatheredDepthwise,
    GatheredProduct,
    make_depthwise,
    make_product,
)
from relayquant.codegen.kernels.floating.planar import PlanarProduct, make_planar
from relayquant.codegen.kernels.floating.tile import FEWEST_CHANNELS, FloatEpilogue, FloatIsa
from relayquant.errors import ModelError
from relayquant.ir.reference.frame import Frame
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain
from relayquant.ir.rewrite.expressions import shape_of, static_sizes
from relayquant.ir.rewrite.rule import Skip, decline

CONVOLUTIONS = ("relax.nn.conv2d", "relax.nn.conv1d")
INTEGER_CONVOLUTIONS = ("relax.qnn.conv2d", "relax.qnn.conv1d")
#: Number of data shapes that a product is prepared for at a time.
MOST_SHAPES = 64
#: Multiply-adds of a sample from which on a kernel for its size is worth compiling: a calibration
#: of 50 samples then gains the quarter of a second that this takes.
SHAPED_MACS = 2**29


@dataclass(frozen=True)
class Convolution:
    """How a convolution with one or two spatial axes becomes a convolution in NHWC and OHWI.

    Attributes:
        axis, channels: Channel axis and number of channels of the result.
        data_axes: Axes of data and result in the order N, spatial, C.
        weight_axes: Axes of the weight in the order O, spatial, I.
        spec: The convolution of the images of a sample, one if their number is symbolic. Height and
            width are 0 if one of them is symbolic.
    """

    axis: int
    channels: int
    data_axes: tuple[int, ...]
    weight_axes: tuple[int, ...]
    spec: FloatConv2d

    @cached_property
    def logical_axes(self) -> tuple[int, ...]:
        """The inverse permutation of `data_axes`."""
        return tuple(int(axis) for axis in np.argsort(self.data_axes))

    @staticmethod
    def of(call: Call) -> Convolution | Skip:
        """Read a convolution call, or return the reason why there is no kernel."""
        view = ConvView.of(call)
        data, kernel, spatial = view.layout, view.kernel_layout, view.letters
        if view.out_layout != data or sorted(data) != sorted(view.order):
            return Skip(f"layout {data} to {view.out_layout}")
        if sorted(kernel) != sorted(f"O{spatial}I"):
            return Skip(f"layout {kernel} of the weight")
        shape = static_sizes(shape_of(call.args[1]))
        if shape is None:
            return decline("a size of the weight is symbolic")
        weight = dict(zip(kernel, shape, strict=True))
        extents = dict(zip(data, shape_of(call.args[0]), strict=True))
        inputs = static_sizes([extents["C"]])
        if inputs is None:
            return decline("the number of channels is symbolic")
        taps = (weight.get("H", 1), weight["W"])
        size = static_sizes([extents.get("H", 1), extents["W"]]) or (0, 0)
        (images,), flat = static_sizes([extents["N"]]) or [1], view.as_2d()
        spec = FloatConv2d(
            max(images, 1), *size, inputs[0], weight["O"], taps, flat.strides, flat.padding,
            flat.dilation, flat.groups,
        )  # fmt: skip
        if min(spec.padding) < 0:
            return decline("the padding is negative")
        return Convolution(
            data.index("C"),
            weight["O"],
            tuple(data.index(letter) for letter in view.order),
            tuple(kernel.index(letter) for letter in f"O{spatial}I"),
            spec,
        )

    def find_images(self, sizes: Sequence[int]) -> tuple[int, FloatConv2d]:
        """Return data of these sizes (N, spatial, C) as so many images of a convolution."""
        if self.spec.is_pointwise:
            return math.prod(sizes[:-1]), replace(self.spec, height=1, width=1)
        height, width = (1, *sizes[1:-1])[-2:]
        return sizes[0], replace(self.spec, height=height, width=width)

    def to_kernel(self, array: np.ndarray) -> np.ndarray:
        """Return a view of data or residual in the order (N, spatial, C)."""
        return array.transpose(self.data_axes)

    def to_rows(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight as (groups, outputs of a group, K)."""
        rows = weight.transpose(self.weight_axes)
        return rows.reshape(self.spec.groups, self.spec.group_out, -1)

    def out_shape(self, sizes: Sequence[int], spec: FloatConv2d) -> tuple[int, ...]:
        """Return the result shape (N, spatial, C)."""
        if spec.is_pointwise:
            return (*sizes[:-1], spec.out_channels)
        height, width = spec.out_size
        spatial = (height, width) if len(sizes) == 4 else (width,)
        return (sizes[0], *spatial, spec.out_channels)

    def from_kernel(self, array: np.ndarray) -> np.ndarray:
        """Return a view of the result (N, spatial, C) in its logical layout."""
        return array.transpose(self.logical_axes)


@dataclass(frozen=True)
class Matmul:
    """A product of data (..., K) with a weight (K, N), or (N, K) if it is transposed."""

    axis: int
    channels: int
    inner: int
    is_transposed: bool = False

    @property
    def spec(self) -> FloatConv2d:
        """The product as a convolution of images of one pixel."""
        return FloatConv2d(1, 1, 1, self.inner, self.channels, (1, 1))

    @staticmethod
    def of(call: Call, params: set[relax.Var]) -> Matmul | Skip:
        """Read a matmul call, or return the reason why there is no kernel."""
        data, weight = call.args
        if not (isinstance(weight, GenericConst) or weight in params):
            return decline("the weight is computed: numpy is faster")
        sizes = static_sizes(shape_of(weight))
        rank = len(shape_of(data))
        if rank < 2 or sizes is None or len(sizes) != 2 or sizes[1] < FEWEST_CHANNELS:
            return decline("vectors, several matrices, symbolic sizes, or too few channels")
        return Matmul(rank - 1, sizes[1], sizes[0])

    @staticmethod
    def of_dense(call: Call) -> Matmul | Skip:
        """Read a `qnn.dense` call, whose weight is (N, K)."""
        sizes, rank = static_sizes(shape_of(call.args[1])), len(shape_of(call.args[0]))
        if rank < 2 or sizes is None or sizes[0] < FEWEST_CHANNELS:
            return decline("vectors, symbolic sizes, or too few channels")
        return Matmul(rank - 1, *sizes, is_transposed=True)

    def find_images(self, sizes: Sequence[int]) -> tuple[int, FloatConv2d]:
        """Return data of these sizes (..., K) as so many images of a convolution."""
        return math.prod(sizes[:-1]), self.spec

    def to_kernel(self, array: np.ndarray) -> np.ndarray:
        """Return data or residual unchanged."""
        return array

    def to_rows(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight as (1, outputs, K)."""
        return (weight if self.is_transposed else weight.T)[None]

    def out_shape(self, sizes: Sequence[int], _spec: FloatConv2d) -> tuple[int, ...]:
        """Return the shape of the result."""
        return (*sizes[:-1], self.channels)

    def from_kernel(self, array: np.ndarray) -> np.ndarray:
        """Return the result unchanged."""
        return array


@dataclass(frozen=True, eq=False)
class ProductCall:
    """Kernel calls for data of one shape.

    Attributes:
        spec: The data as images of a convolution; their shape is `data_view`.
        out_shape: Shape of the result in memory.
        steps: Where the elements of a window are.
        starts: Where the results of each vector are.
        parts: For each call where the windows are, and the sizes.
    """

    spec: FloatConv2d
    data_view: tuple[int, ...]
    out_shape: tuple[int, ...]
    steps: Any
    starts: Any
    parts: tuple[tuple[Any, Any], ...]


class ProductWeight:
    """A weight, packed for each kernel when it first runs."""

    def __init__(self, runner: ProductRunner, weight: np.ndarray) -> None:
        self.runner, self.weight = runner, weight

    @property
    def rows(self) -> np.ndarray:
        """The weight as (groups, outputs of a group, K)."""
        return self.runner.layout.to_rows(self.weight)

    @cached_property
    def gathered(self) -> Any:
        """The tensor for the kernel of any shape."""
        return view_flat(self.runner.panels.pack(self.rows))

    @cached_property
    def transformed(self) -> Any:
        """The tensor for Winograd's kernels."""
        spec, isa = self.runner.layout.spec, self.runner.kernels.isa
        return view_flat(pack_winograd(self.rows, spec, isa).expand())


class ProductRunner:
    """Runs a product of any data shape on a kernel. Data and results have the order (N, spatial,
    C).

    Attributes:
        key: The kernel, which depends on the number of outputs only; or Winograd's, for the image
            size of the model.
        is_winograd: Whether it is Winograd's.
        is_planar: Whether data and results lie in planes, one for each channel.
    """

    def __init__(
        self,
        name: str,
        layout: Convolution | Matmul,
        kernels: KernelCache,
        bounds: tuple[float | None, float | None] = (None, None),
        *,
        has_residual: bool = False,
        is_exact: bool = False,
    ) -> None:
        """Choose the kernel.

        Args:
            name, layout, kernels: Of the product.
            bounds: What results are clipped to.
            has_residual: Whether `multiply` gets one.
            is_exact: Whether all sums are integers, which Winograd's transforms would round.
        """
        self.name, self.layout, self.kernels = name, layout, kernels
        spec, isa = layout.spec, kernels.isa
        self.panels: GatheredDepthwise | GatheredProduct | PlanarProduct
        planar = choose_planar(spec, isa)
        self.is_planar = planar is not None
        if planar is not None:
            self.panels, make = planar, make_planar
        elif spec.is_depthwise:
            self.panels, make = GatheredDepthwise.choose(spec.out_channels, isa), make_depthwise
        else:
            self.panels, make = GatheredProduct.choose(spec.group_out, isa), make_product
        self.key = KernelKey(make, self.panels)
        groups = spec.groups, spec.group_out
        self.starts = view_flat(self.panels.list_starts(*groups))
        self.origins = view_flat(self.panels.list_origins(*groups, spec.group_in))
        low, high = bounds
        epilogue = FloatEpilogue(bias=True, residual=has_residual, low=low, high=high)
        shaped = None if is_exact else choose_winograd(replace(spec, epilogue=epilogue), isa)
        self.is_winograd = shaped is not None
        if shaped is not None:
            self.is_planar = False
            self.key = KernelKey(make_winograd_of_any_batch, shaped)
        limits = -math.inf if low is None else low, math.inf if high is None else high
        self.limits = view_flat(np.array(limits, "float32"))
        self.no_bias = view_flat(np.zeros(layout.channels, "float32"))
        #: shape of data -> kernel calls
        self.calls: dict[tuple[int, ...], ProductCall] = {}

    @cached_property
    def kernel(self) -> Callable[..., None]:
        """The compiled kernel."""
        return self.kernels.get(self.key)

    def multiply(
        self,
        x: np.ndarray,
        weight: ProductWeight,
        bias: Any = None,
        residual: np.ndarray | None = None,
        zero_point: np.float32 | None = None,
    ) -> np.ndarray:
        """Multiply data by a weight, add tensor and array, and clip. The data may be integers with
        a zero point.
        """
        call = self.calls.get(x.shape)
        if call is None:
            if len(self.calls) == MOST_SHAPES:
                self.calls.clear()
            call = self.calls[x.shape] = self.plan_call(x.shape, residual is not None)
        y = empty_aligned(call.out_shape, "float32")
        made = np.moveaxis(y, 1, -1) if self.is_planar else y
        if not y.size or not x.size:
            return made
        lay = lay_planes if self.is_planar else pad_images
        images = lay(x.reshape(call.data_view), call.spec, zero_point)
        if residual is not None and self.is_planar:
            residual = np.moveaxis(residual, -1, 1)
        kernel, result = self.kernel, view_aligned(y.reshape(-1))
        bias = self.no_bias if bias is None else bias
        added = result if residual is None else view_flat(residual)
        if self.is_winograd:  # It counts the images, so they stay apart.
            others = [bias] if residual is None else [bias, added]
            kernel(view_aligned(images), weight.transformed, *others, result)
            return made
        data, packed = view_flat(images), weight.gathered
        for rows, sizes in call.parts:
            kernel(data, rows, call.steps, packed, bias, added, result, call.starts, self.origins,
                   sizes, self.limits)  # fmt: skip
        return made

    def plan_call(self, sizes: tuple[int, ...], has_residual: bool) -> ProductCall:
        """Plan the kernel calls for data of the shape `sizes` (N, spatial, C).

        Raises:
            ModelError: The result is empty, as in the numpy form of a convolution.
        """
        images, spec = self.layout.find_images(sizes)
        if min(spec.out_size) < 1:
            raise ModelError(
                f"value {self.name!r}: a convolution with a {spec.kernel} kernel "
                f"leaves nothing of data of {spec.height} x {spec.width}. Pass larger inputs, or "
                "pad them in the model.",
                code="RQ206",
            )
        out_shape = self.layout.out_shape(sizes, spec)
        data_view = images, *spec.in_shape[1:]
        if self.is_planar:
            planes, pixels = find_planes(spec, self.panels.lanes), math.prod(spec.out_size)
            result_size = pixels * spec.out_channels
            extents = Extents(
                images, planes.image_size, result_size, pixels, has_residual=has_residual
            )
            return ProductCall(
                spec,
                data_view,
                (out_shape[0], out_shape[-1], *out_shape[1:-1]),
                view_flat(planes.steps),
                view_flat(planes.starts),
                ((view_flat(planes.rows), view_flat(extents.array)),),
            )
        windows = find_windows(spec)
        parts = windows.plan_calls(images, spec.out_channels, has_residual)
        return ProductCall(
            spec,
            data_view,
            out_shape,
            view_flat(windows.steps),
            self.starts,
            tuple((view_flat(rows), view_flat(extents.array)) for rows, extents in parts),
        )


def choose_planar(spec: FloatConv2d, isa: FloatIsa) -> PlanarProduct | None:
    """Return the tile of pixels for a convolution whose outputs fill no vector, if its rows of
    results do. None if its width is symbolic: the kernel is chosen before the data is known.
    """
    is_wide = spec.width > 0 and spec.out_size[1] >= isa.lanes
    if spec.groups > 1 or spec.kernel == (1, 1) or not is_wide:
        return None
    return PlanarProduct.choose(spec.out_channels, isa)


def choose_winograd(spec: FloatConv2d, isa: FloatIsa) -> FloatConv2d | None:
    """Return the convolution of padded images if Winograd's kernel for them is worth compiling.

    The model decides, not the data: results do not depend on how samples are batched, and data of
    many sizes does not compile many kernels. A sample of several images, as the slices of a volume,
    counts all of them. None if the image size is symbolic.
    """
    if not (spec.height and spec.width):
        return None
    height, width = spec.padded_size
    padded = replace(spec, batch=None, height=height, width=width, padding=(0, 0, 0, 0))
    is_large = min(padded.out_size) > 0 and count_macs(spec) >= SHAPED_MACS
    return padded if is_large and prefers_winograd(padded, isa) else None


def make_winograd_of_any_batch(spec: FloatConv2d, isa: FloatIsa, name: str) -> PrimFunc:
    """Make Winograd's kernel. It reads the number of images from the shape of the data."""
    return make_winograd(replace(spec, batch=tirx.Var("n", "int64")), isa, name)


class ProductStep:
    """A product and the operators after it, run on a kernel. The packed weight is kept.

    `bias` is None for a product without a bias, and `residual` if nothing is added to it.
    """

    def __init__(
        self,
        layout: Convolution | Matmul,
        chain: EpilogueChain,
        result: relax.Var,
        data: Operand,
        weight: Operand,
        bias: Operand | None,
        residual: Operand | None,
        kernels: KernelCache,
    ) -> None:
        self.layout, self.chain, self.result = layout, chain, result
        self.data, self.weight, self.bias, self.residual = data, weight, bias, residual
        self.product = ProductRunner(
            result.name,
            layout,
            kernels,
            (chain.low, chain.high),
            has_residual=residual is not None,
        )
        self.packed, self.known_bias = LastMade(), LastMade()

    def run(self, frame: Frame) -> None:
        """Compute the last value of the chain."""
        bias = residual = None
        if self.bias is not None:
            bias = self.known_bias.get(frame, [self.bias], self.view_bias)
        if self.residual is not None:
            residual = self.layout.to_kernel(self.residual.read(frame))
        x = self.layout.to_kernel(self.data.read(frame))
        weight = self.packed.get(frame, [self.weight], self.pack)
        y = self.product.multiply(x, weight, bias, residual)
        frame.values[self.result] = self.layout.from_kernel(y)

    def view_bias(self, bias: np.ndarray) -> Any:
        """Return the bias as a tensor."""
        return view_flat(np.broadcast_to(bias.reshape(-1), (self.layout.channels,)))

    def pack(self, weight: np.ndarray) -> ProductWeight:
        """Return the weight for the kernels."""
        return ProductWeight(self.product, weight)


class IntegerProductStep:
    """A product of integers whose sums float32 holds exactly, run on a float kernel. The result has
    the same bits as in `reference.qnn`.

    Attributes:
        zero_point: Of the data.
        weights: One, or parts whose sums are added as integers, see `split_weight`.
        dtype: Of the result. float32 if its reader takes the integers so.
    """

    def __init__(
        self,
        layout: Convolution | Matmul,
        result: relax.Var,
        data: Operand,
        zero_point: int,
        weights: Sequence[np.ndarray],
        dtype: str,
        kernels: KernelCache,
    ) -> None:
        self.layout, self.result, self.data = layout, result, data
        self.zero_point, self.dtype = np.float32(zero_point), dtype
        self.product = ProductRunner(result.name, layout, kernels, is_exact=True)
        self.weights = [ProductWeight(self.product, weight) for weight in weights]

    def run(self, frame: Frame) -> None:
        """Compute the sums."""
        x = self.layout.to_kernel(self.data.read(frame))
        first, *others = self.weights
        y = self.product.multiply(x, first, zero_point=self.zero_point)
        if self.dtype != "float32":
            y = y.astype("int32").astype(self.dtype, copy=False)
        for weight in others:
            part = self.product.multiply(x, weight, zero_point=self.zero_point)
            np.add(y, part, out=y, casting="unsafe", dtype=self.dtype)
        frame.values[self.result] = self.layout.from_kernel(y)


def view_flat(array: np.ndarray) -> Any:
    """Return a flat tensor of an array in C order; it shares the memory where it can."""
    return view_aligned(align_array(array).reshape(-1))
