"""ONNX writer: a table of writers for data movement operators (see `operators`)."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.operators import (
    ELEMENT,
    OnnxRow,
    in_channels_first,
    integers,
    list_operands,
    with_attributes,
    write_flat,
)
from relayquant.formats.writers.onnx.sizes import write_scalar, write_sizes
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.inline import list_dimensions
from relayquant.ir.rewrite.moves import list_permutation

#: the number of elements of a scalar
ONE = tirx.const(1, "int64")


def write_reshape(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Reshape, also for flatten, squeeze and expand_dims. One dimension may be -1 if all
    sizes fit. Else, or if several are known at run time only, each one is computed: a runtime
    refuses what does not fit, where -1 would take it.
    """
    if call.args[0] in builder.rows:  # of integers that their readers write
        builder.rows[var] = builder.rows[call.args[0]]
        return builder.rows[var]
    shape = tensor_shape(var)
    before = tensor_shape(call.args[0])
    if shape is None or before is None:
        raise ModelError(f"export_onnx: the shape of {var.name!r} is not known.", code="RQ203")
    same = [i < len(before) and before[i] == size for i, size in enumerate(shape)]
    sizes = [
        size if isinstance(size, int) else (0 if same[i] else -1) for i, size in enumerate(shape)
    ]
    dims = list_dimensions(var.ty)
    volumes = [math.prod(each, start=ONE) for each in (list_dimensions(call.args[0].ty), dims)]
    fits = -1 not in sizes or Analyzer().can_prove_equal(*volumes)
    # A size of 0 would copy the data's own.
    is_exact = sizes.count(-1) > 1 or 0 in shape or not fits
    given = write_sizes(builder, dims if is_exact else sizes, f"{var.name}.shape")
    inputs = [builder.tensor(call.args[0], var.name), given]
    return builder.emit("Reshape", inputs, var.name, **({"allowzero": 1} if is_exact else {}))


def write_permute(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Transpose."""
    order = list_permutation(call)
    return builder.emit("Transpose", [builder.tensor(call.args[0], var.name)], var.name, perm=order)


def write_concat(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Concat of a literal tuple."""
    fields = list_operands(builder, var, call.args[0])
    inputs = [builder.tensor(field, var.name) for field in fields]
    return builder.emit("Concat", inputs, var.name, axis=int(call.attrs.axis))


#: mode of R.nn.pad -> mode of Pad
PAD_MODES = {
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


def write_pad(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Pad with a constant, or with values of the data."""
    mode = str(call.attrs.pad_mode)
    if mode not in PAD_MODES:
        raise ModelError(
            f"export_onnx: pad mode {mode!r} of {var.name!r} is not supported.", code="RQ203"
        )
    width = integers(call.attrs.pad_width)
    pads = builder.constant(np.array(width[0::2] + width[1::2], "int64"), f"{var.name}.pads")
    fill = np.array(float(call.attrs.pad_value)).astype(tensor_dtype(var))
    inputs = [builder.tensor(call.args[0], var.name), pads]
    if mode == "constant":
        inputs.append(builder.constant(fill, f"{var.name}.fill"))
    return builder.emit("Pad", inputs, var.name, mode=PAD_MODES[mode])


def write_slice(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Slice. Axes, begins, ends and strides are literal tuples of sizes.

    A cut by sizes of the run is the second of three parts of Split, which refuses sizes below 0,
    where Slice would count from the end.
    """
    lists = [list(arg.fields) for arg in call.args[1:]]
    axes, begins, ends = lists[:3]
    strides = lists[3] if len(lists) > 3 else [1] * len(axes)
    read = {size for each in (*begins, *ends) for size in tirx.analysis.undefined_vars(each)}
    is_cut = len(axes) == 1 and [*map(static_size, strides)] == [1]
    if is_cut and call.attrs.assume_inbound and read & builder.graph.size_casts.keys():
        axis, data = int(axes[0]), builder.tensor(call.args[0], var.name)
        size = list_dimensions(call.args[0].ty)[axis]
        parts = [begins[0], ends[0] - begins[0], size - ends[0]]
        given = write_sizes(builder, parts, f"{var.name}.parts")
        around = [builder.unique_name(f"{var.name}.{side}") for side in ("before", "after")]
        outputs = [around[0], var.name, around[1]]
        builder.add_node("Split", [data, given], outputs, f"{var.name}/Split", axis=axis)
        return var.name
    given = [
        write_sizes(builder, sizes, f"{var.name}.slice") for sizes in (begins, ends, axes, strides)
    ]
    return builder.emit("Slice", [builder.tensor(call.args[0], var.name), *given], var.name)


def write_flip(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Slice with a step of -1 along the whole axis."""
    given = [
        builder.constant(np.array([value], "int64"), f"{var.name}.slice")
        for value in (-1, np.iinfo("int64").min, int(call.attrs.axis), -1)
    ]
    return builder.emit("Slice", [builder.tensor(call.args[0], var.name), *given], var.name)


def write_cumsum(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write CumSum in the dtype of the result. Without an axis it sums all elements in order."""
    data, axis = builder.tensor(call.args[0], var.name), call.attrs.axis
    if axis is None:
        data = write_flat(builder, data, var.name)
    if tensor_dtype(call.args[0]) != tensor_dtype(var):
        data = builder.step("Cast", [data], f"{var.name}.cast", to=ELEMENT[tensor_dtype(var)])
    given = builder.constant(
        np.array(0 if axis is None else int(axis), "int64"), f"{var.name}.axis"
    )
    exclusive = int(call.attrs.exclusive or 0)
    return builder.emit("CumSum", [data, given], var.name, exclusive=exclusive)


def write_triangle(upper: int, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Trilu."""
    inputs = [builder.tensor(call.args[0], var.name), write_scalar(builder, call.args[1], var.name)]
    return builder.emit("Trilu", inputs, var.name, upper=upper)


#: reduction of R.scatter_elements and R.scatter_nd -> reduction of ONNX
REDUCTIONS = {"update": "none", "add": "add", "mul": "mul", "min": "min", "max": "max"}


def write_scatter(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write ScatterElements, ScatterND.

    Raises:
        ModelError: ONNX lacks the reduction.
    """
    reduction = str(call.attrs.reduction)
    if reduction not in REDUCTIONS:
        raise ModelError(
            f"export_onnx: {var.name!r} reduces by {reduction}; allowed: {', '.join(REDUCTIONS)}.",
            code="RQ203",
        )
    data, indices, updates = call.args
    inputs = [
        builder.tensor(data, var.name),
        long_indices(builder, indices, var.name),
        builder.tensor(updates, var.name),
    ]
    axis = {"axis": int(call.attrs.axis)} if op == "ScatterElements" else {}
    return builder.emit(op, inputs, var.name, reduction=REDUCTIONS[reduction], **axis)


def write_one_hot(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write OneHot. ONNX counts negative indices from the end, R.one_hot takes them for out of
    range: they become the depth.
    """
    depth, dtype = int(call.attrs.depth), tensor_dtype(var)
    on, off = (float(arg.value) for arg in call.args[1:])
    count, zero = (builder.constant(np.array(n, "int64"), f"{var.name}.depth") for n in (depth, 0))
    indices = long_indices(builder, call.args[0], var.name)
    is_negative = builder.step("Less", [indices, zero], f"{var.name}.negative")
    inside = builder.step("Where", [is_negative, count, indices], f"{var.name}.index")
    values = builder.constant(np.array([off, on]).astype(dtype), f"{var.name}.values")
    return builder.emit("OneHot", [inside, count, values], var.name, axis=int(call.attrs.axis))


def write_take(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Gather. Without an axis it gathers from all elements in order. Indices out of bounds
    are first mapped to valid ones, as the mode says.

    Raises:
        ModelError: as `write_indices`.
    """
    axis, mode, data = call.attrs.axis, str(call.attrs.mode), call.args[0]
    source = builder.tensor(data, var.name)
    shape = tensor_shape(data) or ()
    if axis is None and len(shape) != 1:
        source = write_flat(builder, source, var.name)
    where = write_indices(builder, var, call, mode)
    return builder.emit("Gather", [source, where], var.name, axis=0 if axis is None else int(axis))


def write_indices(builder: OnnxBuilder, var: relax.Var, call: Call, mode: str) -> str:
    """Write the indices of a take as an int64 tensor, valid for its axis, or for all elements if it
    has no axis.

    Raises:
        ModelError: the mode gives NaN out of bounds, or the indices are for all elements of a
            symbolic shape.
    """
    data, indices = call.args[:2]
    axis, shape = call.attrs.axis, tensor_shape(data) or ()
    sizes = shape if axis is None else (shape[int(axis)],)
    is_known = all(isinstance(size, int) for size in sizes)
    length = math.prod(map(int, sizes)) if is_known else None
    if mode == "nan" or (length is None and mode == "clip" and len(sizes) > 1):
        raise ModelError(
            f"export_onnx: the indices of {var.name!r} (mode {mode!r}) have no form in ONNX; "
            "allowed: wrap, or clip along an axis.",
            code="RQ203",
        )
    array = constant_value(indices)
    if not isinstance(indices.ty, relax.TensorType):
        array = np.array(int(indices.value), "int64")
    if array is not None and (length is not None or mode != "clip"):
        if length is not None and mode in ("clip", "wrap"):
            array = array.clip(0, length - 1) if mode == "clip" else array % length
        return builder.constant(array.astype("int64"), f"{var.name}.index")
    if array is not None:
        where = builder.constant(array.astype("int64"), f"{var.name}.index")
    else:
        where = long_indices(builder, indices, var.name)
    if mode == "clip":
        extent = data.ty.shape.values[0 if axis is None else int(axis)]
        zero = builder.constant(np.array(0, "int64"), f"{var.name}.limit")
        last = write_scalar(builder, extent - 1, f"{var.name}.limit")
        where = builder.step("Max", [where, zero], f"{var.name}.index")
        where = builder.step("Min", [where, last], f"{var.name}.index")
    elif mode == "wrap" and length is not None:
        extent = builder.constant(np.array(length, "int64"), f"{var.name}.length")
        where = builder.step("Mod", [where, extent], f"{var.name}.index")
    return where


def long_indices(builder: OnnxBuilder, expr: relax.Expr, base: str) -> str:
    """Return the tensor of indices as int64."""
    array = constant_value(expr)
    if array is not None:
        return builder.constant(array.astype("int64"), f"{base}.index")
    where = builder.tensor(expr, base)
    if tensor_dtype(expr) == "int64":
        return where
    return builder.step("Cast", [where], f"{base}.index", to=ELEMENT["int64"])


def write_gather_elements(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write GatherElements."""
    inputs = [builder.tensor(call.args[0], var.name), long_indices(builder, call.args[1], var.name)]
    return builder.emit("GatherElements", inputs, var.name, axis=int(call.attrs.axis))


def write_gather_nd(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write GatherND."""
    inputs = [builder.tensor(call.args[0], var.name), long_indices(builder, call.args[1], var.name)]
    return builder.emit("GatherND", inputs, var.name, batch_dims=int(call.attrs.batch_dims))


def write_tile(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Tile. Repeats beyond the rank add axes at the front.

    Raises:
        ModelError: there are more repeats than axes.
    """
    repeats, rank = integers(call.attrs.repeats), call.args[0].ty.ndim
    if len(repeats) > rank:
        raise ModelError(
            f"export_onnx: {var.name!r} repeats more axes than its data has.", code="RQ203"
        )
    repeats = [1] * (rank - len(repeats)) + repeats
    given = builder.constant(np.array(repeats, "int64"), f"{var.name}.repeats")
    return builder.emit("Tile", [builder.tensor(call.args[0], var.name), given], var.name)


#: method of R.image.resize2d -> mode of Resize
RESIZE_MODES = {"nearest_neighbor": "nearest", "linear": "linear", "cubic": "cubic"}

#: rounding of R.image.resize2d -> nearest_mode of Resize. "round" can be written if no coordinate
#: is halfway.
NEAREST_MODES = {
    "round": "round_prefer_ceil",
    **{mode: mode for mode in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")},
}


def lies_halfway(before: int, after: int, transformation: str) -> bool:
    """Return whether a coordinate of a resized axis is halfway between two values of the input.

    The transformations are defined in ONNX, operator Resize.
    """
    scale = Fraction(before, after)
    if transformation == "align_corners":
        scale = Fraction(before - 1, after - 1) if after > 1 else Fraction(0)
    shift = Fraction(1, 2) if transformation.endswith("half_pixel") else Fraction(0)
    return any(((at + shift) * scale - shift) % 1 == Fraction(1, 2) for at in range(after))


def write_resize(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Resize.

    Raises:
        ModelError: the layout is packed, the method is another one, or values halfway between two
            are rounded to even, which ONNX lacks.
    """
    attrs, layout = call.attrs, str(call.attrs.layout)
    method, rounding = str(attrs.method), str(attrs.rounding_method)
    mode, shapes = RESIZE_MODES.get(method), (tensor_shape(call.args[0]), tensor_shape(var))
    before, after = (
        [shape[layout.index(letter)] for letter in "NCHW"]
        if shape and layout in ("NCHW", "NHWC")
        else []
        for shape in shapes
    )
    if mode is None or not after or (mode == "nearest" and rounding not in NEAREST_MODES):
        raise ModelError(
            f"export_onnx: resize {var.name!r} ({method}, {layout}, {rounding or 'no'} rounding) "
            "has no form in ONNX; allowed: nearest_neighbor, linear and cubic in NCHW or NHWC.",
            code="RQ203",
        )
    given: dict[str, object] = (
        {"nearest_mode": NEAREST_MODES[rounding]} if mode == "nearest" else {}
    )
    transformation = str(attrs.coordinate_transformation_mode)
    if rounding == "round" and mode == "nearest":
        pairs = list(zip(before, after, strict=True))[2:]
        if any(
            isinstance(a, str) or isinstance(b, str) or lies_halfway(a, b, transformation)
            for a, b in pairs
        ):
            raise ModelError(
                f"export_onnx: resize {var.name!r} rounds coordinates halfway between two values "
                "to even, which ONNX does not have; use another rounding_method.",
                code="RQ203",
            )
    given["coordinate_transformation_mode"] = transformation
    if mode == "cubic":
        given["cubic_coeff_a"] = float(attrs.cubic_alpha)
        given["exclude_outside"] = int(attrs.cubic_exclude)
    wanted = [var.ty.shape.values[layout.index(letter)] for letter in "NCHW"]
    size = write_sizes(builder, wanted, f"{var.name}.size")

    def emit(source: str, output: str) -> str:
        return builder.emit("Resize", [source, "", "", size], output, mode=mode, **given)

    return in_channels_first(builder, var, builder.tensor(call.args[0], var.name), layout, emit)


def write_eye(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write EyeLike."""
    data, offset = builder.tensor(call.args[0], var.name), int(call.args[1].value)
    return builder.emit("EyeLike", [data], var.name, k=offset, dtype=ELEMENT[tensor_dtype(var)])


def write_unique(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Unique, of which the values alone are read."""
    data, is_sorted, *_ = call.args
    axis = {"axis": int(call.args[5].value)} if len(call.args) > 5 else {}
    inputs = [builder.tensor(data, var.name)]
    return builder.emit("Unique", inputs, var.name, sorted=int(is_sorted.value), **axis)


#: method -> mode of GridSample before opset 20, and from then on
GRID_MODES = {
    "bilinear": ("bilinear", "linear"),
    "nearest": ("nearest", "nearest"),
    "bicubic": ("bicubic", "cubic"),
}


def write_grid_sample(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write GridSample, whose grid has the coordinates last, not on axis 1."""
    attrs = call.attrs
    data, grid = (builder.tensor(arg, var.name) for arg in call.args)
    last = builder.step("Transpose", [grid], f"{var.name}.grid", perm=[0, 2, 3, 1])
    return builder.emit(
        "GridSample",
        [data, last],
        var.name,
        mode=GRID_MODES[str(attrs.method)][builder.opset >= 20],
        padding_mode=str(attrs.padding_mode),
        align_corners=int(attrs.align_corners),
    )


def write_roi_align(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write RoiAlign. The first number of a region is the index of its image."""
    attrs, (data, regions) = call.attrs, (builder.tensor(arg, var.name) for arg in call.args)
    bounds = [
        builder.constant(np.array([each], "int64"), f"{var.name}.bound") for each in (0, 1, 5)
    ]
    index, corners = (
        builder.step("Slice", [regions, *pair, bounds[1]], f"{var.name}.part")
        for pair in pairwise(bounds)
    )
    index = builder.step("Squeeze", [index, bounds[1]], f"{var.name}.index")
    index = builder.step("Cast", [index], f"{var.name}.image", to=ELEMENT["int64"])
    if attrs.aligned:  # ONNX then moves regions by half a pixel, TVM does not
        half = np.float32(0.5 / float(attrs.spatial_scale))
        step = builder.constant(half.astype(tensor_dtype(call.args[1])), f"{var.name}.half")
        corners = builder.step("Add", [corners, step], f"{var.name}.moved")
    height, width = (int(size) for size in attrs.pooled_size)
    return builder.emit(
        "RoiAlign",
        [data, corners, index],
        var.name,
        output_height=height,
        output_width=width,
        spatial_scale=float(attrs.spatial_scale),
        sampling_ratio=max(int(attrs.sample_ratio), 0),
        coordinate_transformation_mode="half_pixel" if attrs.aligned else "output_half_pixel",
    )


def write_expand(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Expand. A symbolic dimension that the data also has is written as 1, which keeps it."""
    shape, before = tensor_shape(var) or (), tensor_shape(call.args[0]) or ()
    kept = ("",) * (len(shape) - len(before)) + before
    sizes = [
        1 if isinstance(size, str) and size == own else value
        for size, own, value in zip(shape, kept, var.ty.shape.values, strict=True)
    ]
    given = write_sizes(builder, sizes, f"{var.name}.shape")
    return builder.emit("Expand", [builder.tensor(call.args[0], var.name), given], var.name)


#: data movement operators
DATA_MOVEMENT_ROWS: dict[str, OnnxRow] = {
    "relax.eye_like": OnnxRow(write_eye, "dtype"),
    "relax.nonzero": with_attributes("NonZero"),
    "relax.unique": OnnxRow(write_unique),
    "relax.image.grid_sample": OnnxRow(write_grid_sample, "method padding_mode align_corners"),
    "relax.vision.roi_align": OnnxRow(
        write_roi_align, "pooled_size spatial_scale sample_ratio aligned"
    ),
    "relax.reshape": OnnxRow(write_reshape),
    "relax.flatten": OnnxRow(write_reshape),
    "relax.squeeze": OnnxRow(write_reshape, "axis"),
    "relax.expand_dims": OnnxRow(write_reshape, "axis"),
    "relax.permute_dims": OnnxRow(write_permute, "axes"),
    "relax.concat": OnnxRow(write_concat, "axis"),
    "relax.nn.pad": OnnxRow(write_pad, "pad_width pad_mode pad_value"),
    "relax.strided_slice": OnnxRow(write_slice, "assume_inbound"),
    "relax.flip": OnnxRow(write_flip, "axis"),
    "relax.cumsum": OnnxRow(write_cumsum, "axis dtype exclusive"),
    "relax.tril": OnnxRow(functools.partial(write_triangle, 0)),
    "relax.triu": OnnxRow(functools.partial(write_triangle, 1)),
    "relax.scatter_elements": OnnxRow(
        functools.partial(write_scatter, "ScatterElements"), "axis reduction"
    ),
    "relax.scatter_nd": OnnxRow(functools.partial(write_scatter, "ScatterND"), "reduction"),
    "relax.one_hot": OnnxRow(write_one_hot, "depth axis"),
    "relax.take": OnnxRow(write_take, "axis mode"),
    "relax.gather_elements": OnnxRow(write_gather_elements, "axis"),
    "relax.gather_nd": OnnxRow(write_gather_nd, "batch_dims"),
    "relax.tile": OnnxRow(write_tile, "repeats"),
    "relax.image.resize2d": OnnxRow(
        write_resize,
        "layout method coordinate_transformation_mode rounding_method cubic_alpha cubic_exclude",
    ),
    "relax.broadcast_to": OnnxRow(write_expand),
}
