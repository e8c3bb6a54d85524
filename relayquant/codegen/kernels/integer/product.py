"""Product and schedule -> the functions that pack its constants and build its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.integer.convolution.direct import (
    build_conv2d,
    build_dense,
    pack_conv2d,
    pack_dense,
)
from relayquant.codegen.kernels.integer.convolution.pooled import (
    PooledConv2d,
    build_pooled_conv2d,
    pack_pooled_conv2d,
)
from relayquant.codegen.kernels.integer.convolution.transposed import (
    Conv2dTranspose,
    build_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.integer.convolution.winograd import build_winograd, pack_winograd
from relayquant.codegen.kernels.integer.dynamic_rows import build_dense_rows, pack_dense_rows
from relayquant.codegen.kernels.integer.specs import (
    Constants,
    Conv2d,
    Dense,
    KernelSchedule,
    PackedWeights,
)
from relayquant.codegen.kernels.isa.base import Isa

#: Direct form, without transforms, in the tile with the smallest estimated time.
DIRECT = KernelSchedule()


@dataclass(frozen=True)
class ProductKernel:
    """How a product is computed. `pack` and `build` follow one plan."""

    spec: Any
    isa: Isa
    packer: Callable[..., PackedWeights]
    builder: Callable[..., PrimFunc]

    def pack(self, constants: Constants) -> PackedWeights:
        """Pack the constant operands of the kernel."""
        return self.packer(self.spec, self.isa, constants)

    def build(self, name: str, *shapes: Any) -> PrimFunc:
        """Build the kernel, with its arguments in other shapes of equally many elements.

        For a product with any number of rows, `shapes` are the leading extents.
        """
        return self.builder(self.spec, self.isa, name, *shapes)


def choose_product(
    spec: Conv2d | Conv2dTranspose | Dense | PooledConv2d,
    isa: Isa,
    schedule: KernelSchedule = DIRECT,
    *,
    any_rows: bool = False,
) -> ProductKernel:
    """Choose the kernel of a product for a schedule.

    With `any_rows`, the kernel of a dense layer takes any number of rows.
    """
    if isinstance(spec, Conv2dTranspose):
        return ProductKernel(spec, isa, pack_conv2d_transpose, build_conv2d_transpose)
    if isinstance(spec, PooledConv2d):
        return ProductKernel(spec, isa, pack_pooled_conv2d, build_pooled_conv2d)
    spec = replace(spec, tile=schedule.tile)
    if isinstance(spec, Dense):
        functions = (pack_dense_rows, build_dense_rows) if any_rows else (pack_dense, build_dense)
        return ProductKernel(spec, isa, *functions)
    if schedule.transforms:
        return ProductKernel(spec, isa, pack_winograd, build_winograd)
    return ProductKernel(spec, isa, pack_conv2d, build_conv2d)
