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

from relayquant.base.runtime import align_array, empty_aligned, view_tensor
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import Operand
from relayquant.codegen.kernels.floating.conv import FloatConv2d, make_conv2d, pack_conv2d
from relayquant.codegen.kernels.floating.gemm import FloatDense, make_dense, pack_dense
from relayquant.codegen.kernels.floating.tile import FEWEST_CHANNELS, FloatEpilogue, FloatIsa
from relayquant.errors import ModelError
from relayquant.ir.reference.frame import Frame
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain
from relayquant.ir.rewrite.expressions import shape_of, static_sizes
from relayquant.ir.rewrite.rule import Skip, decline

CONVOLUTIONS = ("relax.nn.conv2d", "relax.nn.conv1d")
#: Means a batch (rows of a product) of any size in the specification of a kernel.
ANY = 0
#: Number of data shapes that a product is prepared for at a time.
MOST_SHAPES = 64


def make_any_conv2d(spec: FloatConv2d, isa: FloatIsa, name: str) -> tirx.PrimFunc:
    """Make the kernel of a convolution for any batch."""
    return make_conv2d(for_any_batch(spec), isa, name)


def make_any_dense(spec: FloatDense, isa: FloatIsa, name: str) -> tirx.PrimFunc:
    """Make the kernel of a product for any number of rows."""
    return make_dense(for_any_rows(spec), isa, name)


def for_any_batch(spec: FloatConv2d) -> FloatConv2d:
    """Return the convolution with a symbolic batch."""
    return replace(spec, batch=tirx.Var("n", "int64"))


def for_any_rows(spec: FloatDense) -> FloatDense:
    """Return the product (rows, K) with symbolic rows."""
    return replace(spec, shape=(tirx.Var("rows", "int64"), spec.inner))


@dataclass(frozen=True)
class Convolution:
    """How a convolution with one or two spatial axes becomes a convolution in NHWC and OHWI.

    Attributes:
        axis, channels: Channel axis and number of channels of the result.
        data_axes: Axes of data and result in the order N, spatial, C.
        weight_axes: Axes of the weight in the order O, spatial, I.
        sizes: Data (N, spatial, C); None where a dimension is symbolic.
        spec: The convolution without batch, height and width.
    """

    axis: int
    channels: int
    data_axes: tuple[int, ...]
    weight_axes: tuple[int, ...]
    sizes: tuple[int | None, ...]
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
        flat = view.as_2d()
        spec = FloatConv2d(
            ANY, 0, 0, inputs[0], weight["O"], taps, flat.strides, flat.padding, flat.dilation,
            flat.groups,
        )  # fmt: skip
        few = min(spec.group_out, spec.out_channels) < FEWEST_CHANNELS
        if (few and not spec.is_depthwise) or min(spec.padding) < 0:
            return decline("too few channels, or the padding is negative")
        known = [static_sizes([extents[letter]]) for letter in view.order]
        return Convolution(
            data.index("C"),
            weight["O"],
            tuple(data.index(letter) for letter in view.order),
            tuple(kernel.index(letter) for letter in f"O{spatial}I"),
            tuple(size[0] if size else None for size in known),
            spec,
        )

    def find_spec(
        self, sizes: Sequence[int | None], epilogue: FloatEpilogue
    ) -> FloatConv2d | FloatDense | None:
        """Return the kernel's specification for data of these sizes (N, spatial, C).

        None if a spatial size is unknown and matters.
        """
        spec = replace(self.spec, epilogue=epilogue)
        if spec.is_pointwise:
            return FloatDense((ANY, spec.in_channels), spec.out_channels, epilogue)
        height, width = (1, *sizes[1:-1])[-2:]
        if height is None or width is None:
            return None
        return replace(spec, height=height, width=width)

    def to_kernel(self, array: np.ndarray) -> np.ndarray:
        """Convert data or residual to the order (N, spatial, C) that compiled code reads."""
        return align_array(array.transpose(self.data_axes))

    def pack(self, weight: np.ndarray, spec: Any, isa: FloatIsa) -> np.ndarray:
        """Pack the weight."""
        moved = weight.transpose(self.weight_axes)
        if isinstance(spec, FloatDense):
            rows = moved.reshape(moved.shape[0], -1)
            return pack_dense(rows, for_any_rows(spec), isa)
        if moved.ndim == 3:
            moved = moved[:, None]
        return pack_conv2d(np.ascontiguousarray(moved), for_any_batch(spec), isa)

    def out_shape(self, sizes: Sequence[int], spec: Any) -> tuple[int, ...]:
        """Return the result shape (N, spatial, C)."""
        if isinstance(spec, FloatDense):
            return (*sizes[:-1], spec.outputs)
        height, width = spec.out_size
        spatial = (height, width) if len(sizes) == 4 else (width,)
        return (sizes[0], *spatial, spec.out_channels)

    def from_kernel(self, array: np.ndarray) -> np.ndarray:
        """Return a view of the result (N, spatial, C) in its logical layout."""
        return array.transpose(self.logical_axes)


@dataclass(frozen=True)
class Matmul:
    """A product of data (..., K) with a weight (K, N)."""

    axis: int
    channels: int
    inner: int
    sizes: tuple[int | None, ...] = ()

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

    def find_spec(self, sizes: Sequence[int | None], epilogue: FloatEpilogue) -> FloatDense:
        """Return the kernel's specification, which does not depend on the sizes of the data."""
        return FloatDense((ANY, self.inner), self.channels, epilogue)

    def to_kernel(self, array: np.ndarray) -> np.ndarray:
        """Convert data or residual to what compiled code reads."""
        return align_array(array)

    def pack(self, weight: np.ndarray, spec: Any, isa: FloatIsa) -> np.ndarray:
        """Pack the weight."""
        return pack_dense(weight.T, for_any_rows(spec), isa)

    def out_shape(self, sizes: Sequence[int], spec: Any) -> tuple[int, ...]:
        """Return the shape of the result."""
        return (*sizes[:-1], self.channels)

    def from_kernel(self, array: np.ndarray) -> np.ndarray:
        """Return the result unchanged."""
        return array


@dataclass(frozen=True, eq=False)
class ProductCall:
    """A kernel call for data of one shape.

    Holds the specification, the kernel, the shape of the result, and the shapes of data and result
    for the kernel.
    """

    spec: FloatConv2d | FloatDense
    kernel: Callable[..., None]
    out_shape: tuple[int, ...]
    data_view: tuple[int, ...]
    out_view: tuple[int, ...]


class ProductStep:
    """A product and the operators after it, run on a kernel. The packed weight is kept.

    `bias` and `residual` are None if there are none.
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
        self.layout, self.chain, self.kernels = layout, chain, kernels
        self.data, self.weight, self.bias, self.residual = data, weight, bias, residual
        self.result = result
        self.epilogue = FloatEpilogue(
            chain.bias is not None, chain.residual is not None, chain.low, chain.high
        )
        #: shape of data -> kernel call
        self.calls: dict[tuple[int, ...], ProductCall] = {}
        #: (weight, specification, packed weight) of the last call
        self.packed: tuple[np.ndarray, FloatConv2d | FloatDense, Any] | None = None
        #: (bias, tensor of it) of the last call
        self.known_bias: tuple[np.ndarray, Any] | None = None

    def key(self, spec: FloatConv2d | FloatDense) -> KernelKey:
        """Return the key of the kernel for a specification."""
        make = make_any_dense if isinstance(spec, FloatDense) else make_any_conv2d
        return KernelKey(make, spec)

    def find_spec(self, sizes: Sequence[int | None]) -> FloatConv2d | FloatDense | None:
        """Return the specification for data of these sizes. None if they leave it open.

        Raises:
            ModelError: The result is empty, as in the numpy form of a convolution.
        """
        spec = self.layout.find_spec(sizes, self.epilogue)
        if isinstance(spec, FloatConv2d) and min(spec.out_size) < 1:
            raise ModelError(
                f"value {self.result.name!r}: a convolution with a {spec.kernel} kernel "
                f"leaves nothing of data of {spec.height} x {spec.width}. Pass larger inputs, or "
                "pad them in the model.",
                code="RQ206",
            )
        return spec

    def find_kernel(self) -> KernelKey | None:
        """Return the kernel, if it does not depend on the data."""
        spec = self.find_spec(self.layout.sizes)
        return None if spec is None else self.key(spec)

    def run(self, frame: Frame) -> None:
        """Compute the last value of the chain."""
        x = self.layout.to_kernel(self.data.read(frame))
        call = self.calls.get(x.shape)
        if call is None:
            if len(self.calls) == MOST_SHAPES:
                self.calls.clear()
            call = self.calls[x.shape] = self.plan_call(x.shape)
        y = empty_aligned(call.out_shape, "float32")
        if y.size and x.size:
            tensors = [view_tensor(x.reshape(call.data_view)), self.pack(frame, call.spec)]
            if self.bias is not None:
                tensors.append(self.find_bias(self.bias.read(frame)))
            if self.residual is not None:
                residual = self.layout.to_kernel(self.residual.read(frame))
                tensors.append(view_tensor(residual.reshape(call.out_view)))
            call.kernel(*tensors, view_tensor(y.reshape(call.out_view)))
        frame.values[self.result] = self.layout.from_kernel(y)

    def plan_call(self, sizes: tuple[int, ...]) -> ProductCall:
        """Plan the kernel call for data of the shape `sizes` (N, spatial, C)."""
        spec = self.find_spec(sizes)
        assert spec is not None  # all sizes of an array are known
        out = self.layout.out_shape(sizes, spec)
        views = [sizes, out]
        if isinstance(spec, FloatDense):
            views = [(math.prod(sizes[:-1]), spec.inner), (math.prod(out[:-1]), spec.outputs)]
        elif len(sizes) == 3:
            views = [(view[0], 1, *view[1:]) for view in views]
        # Looked up once: finding a specification in a table takes as long as a small kernel.
        return ProductCall(spec, self.kernels.get(self.key(spec)), out, *views)

    def find_bias(self, bias: np.ndarray) -> Any:
        """Return the bias as a tensor, made once for the same array."""
        before = self.known_bias
        if before is not None and before[0] is bias:
            return before[1]
        values = np.broadcast_to(bias.reshape(-1), (self.layout.channels,))
        tensor = view_tensor(align_array(values))
        self.known_bias = bias, tensor  # both at once: other threads read it
        return tensor

    def pack(self, frame: Frame, spec: FloatConv2d | FloatDense) -> Any:
        """Return the packed weight as a tensor."""
        before, weight = self.packed, self.weight.read(frame)
        if before is not None and before[0] is weight and before[1] == spec:
            return before[2]
        array = align_array(self.layout.pack(weight, spec, self.kernels.isa))
        packed = view_tensor(array)
        self.packed = weight, spec, packed  # all at once: other threads read it
        return packed
