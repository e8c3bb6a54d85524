"""Resizes and samples of images -> kernels of linear ones, or loops that fuse; part of `table`."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx, topi
from tvm.ir import Call

from relayquant.codegen.kernels.floating.grid_sample import GridSample, make_grid_sample
from relayquant.codegen.kernels.floating.resize import (
    MODES,
    LinearResize,
    ResizedAxis,
    make_resize,
)
from relayquant.codegen.kernels.isa.target import is_cpu_target
from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm
from relayquant.codegen.lowering.engine import mark_kernel
from relayquant.codegen.lowering.kernel_call import build_for_batch, split_batch
from relayquant.ir.dialect.loops import INJECTIVE
from relayquant.ir.rewrite.expressions import is_float32, shape_of

#: `cubic_exclude` of a resize to nearest neighbours that is a spread: each axis has its size, or is
#: 1 and is repeated. It is a flag, 0 or 1, in every file.
SPREAD = -1


def legalize_resize(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a resize2d: a linear one has a kernel. A spread is one loop that fuses with its
    readers.
    """
    linear = read_linear_resize(call)
    if linear is not None:
        symbolic, spec = linear
        func = build_for_batch(lambda: make_resize(spec), symbolic, (0, 5))
        kernel = builder.add_func(mark_kernel(func, macs=0), "resize2d")
        tables = [relax.const(table) for table in spec.list_tables()]
        return relax.call_tir(kernel, [call.args[0], *tables], call.ty)
    if str(call.attrs.coordinate_transformation_mode) == "align_corners":
        return legalize_aligned(builder, call)
    if int(call.attrs.cubic_exclude) != SPREAD or str(call.attrs.method) != "nearest_neighbor":
        return legalize_as_tvm(builder, call)
    shape, layout = shape_of(call), str(call.attrs.layout)

    def spread(x: Any) -> Any:
        def read(*ats: Any) -> Any:
            bounded = (tirx.min(at, size - 1) for at, size in zip(ats, x.shape, strict=True))
            pairs = zip(layout, ats, bounded, strict=True)
            return x(*(inside if letter in "HW" else at for letter, at, inside in pairs))

        return te.compute(shape, read, name="spread")

    # FuseOps does not see that each result reads one pixel.
    marks = {"op_pattern": INJECTIVE}
    return builder.call_te(spread, call.args[0], primfunc_name_hint="spread", primfunc_attrs=marks)


def legalize_aligned(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a resize2d with aligned corners, also to a row or column of one: the first one. TVM
    divides by the size less 1.
    """
    attrs, shape = call.attrs, shape_of(call)
    two = tirx.const(2, "int64")
    return builder.call_te(
        topi.image.resize2d,
        call.args[0],
        attrs.roi,
        [tirx.max(shape[str(attrs.layout).index(letter)], two) for letter in "HW"],
        str(attrs.layout),
        str(attrs.method),
        str(attrs.coordinate_transformation_mode),
        str(attrs.rounding_method),
        attrs.cubic_alpha,
        attrs.cubic_exclude,
        output_shape=shape,
        primfunc_name_hint="resize2d",
    )


def read_linear_resize(call: Call) -> tuple[bool, LinearResize] | None:
    """Read a linear resize that has a kernel: (whether the batch is symbolic, its specification).

    Sizes but the batch are static. None for any other resize.
    """
    attrs, before, after = call.attrs, split_batch(call.args[0]), split_batch(call)
    layout, mode = str(attrs.layout), str(attrs.coordinate_transformation_mode)
    if str(attrs.method) != "linear" or mode not in MODES or layout not in ("NCHW", "NHWC"):
        return None
    if before is None or after is None or not (is_float32(call.args[0]) and is_float32(call)):
        return None
    (symbolic, sizes), (_, results) = before, after
    if 0 in sizes or 0 in results:
        return None
    rows, columns = (ResizedAxis(sizes[at], results[at], mode) for at in map(layout.index, "HW"))
    if mode == "align_corners" and 1 in (rows.result, columns.result):
        return None  # TVM divides by 0
    channels = sizes[layout.index("C")]
    spec = LinearResize(sizes[0], channels, rows, columns, layout == "NCHW")
    return (symbolic, spec) if spec.is_worth and is_cpu_target() else None


def legalize_grid_sample(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a grid_sample: a bilinear one of several channels has a kernel."""
    found = read_grid_sample(call)
    if found is None:
        return legalize_as_tvm(builder, call)
    symbolic, spec = found
    func = build_for_batch(lambda: make_grid_sample(spec), symbolic, (0, 1, 2))
    kernel = builder.add_func(mark_kernel(func, macs=0), "grid_sample")
    return relax.call_tir(kernel, list(call.args), call.ty)


def read_grid_sample(call: Call) -> tuple[bool, GridSample] | None:
    """Read a grid_sample that has a kernel: (whether the batch is symbolic, its specification).

    Sizes but the batch are static. None for any other one.
    """
    attrs, values = call.attrs, (*call.args, call)
    padding = str(attrs.padding_mode)
    if str(attrs.method) != "bilinear" or padding not in ("zeros", "border"):
        return None
    if str(attrs.layout) != "NCHW" or not all(map(is_float32, values)):
        return None
    shapes = [found for value in values if (found := split_batch(value)) is not None]
    if len(shapes) != 3 or len({symbolic for symbolic, _ in shapes}) != 1:
        return None
    (symbolic, sizes), _, (_, result) = shapes
    if len(sizes) != 4:
        return None
    spec = GridSample(*sizes, *result[2:], bool(attrs.align_corners), padding == "border")
    return (symbolic, spec) if spec.is_worth and is_cpu_target() else None


RESIZING_LEGALIZATIONS = {
    "relax.image.grid_sample": legalize_grid_sample,
    "relax.image.resize2d": legalize_resize,
}
