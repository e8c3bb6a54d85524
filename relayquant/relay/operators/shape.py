"""Relay reader, rows: shapes, layouts, joining and cutting, padding, resizing."""

from __future__ import annotations

from math import prod

import numpy as np
from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.relay.attributes import Attr, AttributeKind
from relayquant.relay.operators.base import (
    OPTIONAL_INTEGERS,
    RelayOp,
    Site,
    Value,
    boxed,
    check_made_up,
    check_positive,
    dtype,
    flag,
    integer,
    integers,
    make_const,
    real,
    text,
)
from relayquant.relay.operators.linear import check_layout

op = relax.op

#: Largest number of parts of a split. Each part becomes a value.
MAX_SECTIONS = 4096

#: Largest number of elements of a tensor. Larger sizes overflow in TVM.
MAX_ELEMENTS = 2**48


def check_shape(shape: tuple[int, ...]) -> list[int]:
    """Check a literal shape.

    Raises:
        ModelError: a dimension is negative, or the shape has too many elements.
    """
    if any(dim < 0 for dim in shape) or prod(shape) > MAX_ELEMENTS:
        raise ModelError(
            f"shape {list(shape)} is not allowed; allowed: dimensions from 0.", code="RQ202"
        )
    return list(shape)


# -- reshape ---------------------------------------------------------------------------------------


def resolve_shape(old: tuple[int | str, ...], wanted: tuple[int, ...]) -> list[int | str]:
    """Resolve Relay's codes in a shape.

    Code 0 keeps a dimension, -2 keeps all remaining ones, -3 joins two, and -4 splits one into the
    two numbers after it. -1 is left to Relax.

    Raises:
        ModelError: a code has no dimension to work on.
    """
    new: list[int | str] = []
    source = list(old)
    codes = list(wanted)
    while codes:
        code = codes.pop(0)
        needs = {0: 1, -3: 2, -4: 1}.get(code, 0)
        if len(source) < needs or (code == -4 and len(codes) < 2):
            raise ModelError(
                f"newshape {list(wanted)} does not fit a tensor of shape {list(old)}.", code="RQ202"
            )
        if code == -2:
            new += source
            source = []
        elif code in (0, -3, -4):
            taken = [source.pop(0) for _ in range(needs)]
            if code == 0:
                new += taken
                continue
            if not all(isinstance(dim, int) for dim in taken):
                raise ModelError(
                    "newshape joins or splits a dimension known at run time only.", code="RQ202"
                )
            sizes = [dim for dim in taken if isinstance(dim, int)]
            if code == -3:
                new.append(sizes[0] * sizes[1])
            else:
                new += split_dim(sizes[0], codes.pop(0), codes.pop(0))
        elif code == -1 or code > 0:
            new.append(code)
            if source:
                source.pop(0)
        else:
            raise ModelError(f"newshape holds {code}; allowed: -4 to -1, and sizes.", code="RQ202")
    return new


def split_dim(size: int, first: int, second: int) -> list[int]:
    """Return (first, second) with one -1 resolved."""
    if first == -1 and second > 0:
        first = size // second
    elif second == -1 and first > 0:
        second = size // first
    if first < 1 or second < 1 or first * second != size:
        raise ModelError(
            f"newshape splits {size} into {first} and {second}; allowed: two sizes with that "
            "product.",
            code="RQ202",
        )
    return [first, second]


def convert_reshape(site: Site) -> relax.Expr:
    data = site.tensor(0)
    old, wanted = site.dims(data), site.attrs["newshape"]
    if site.attrs["reverse"]:  # attribute of TVM 0.7: codes are processed from the right
        if min(wanted) < -1:
            raise ModelError(
                f"reverse with newshape {list(wanted)} is not supported; allowed: -1.", code="RQ202"
            )
        fixed = resolve_shape(old[::-1], wanted[::-1])[::-1]
        wanted = tuple(size if isinstance(size, int) else 0 for size in fixed)
    if site.attrs["allowzero"] and 0 in wanted:
        raise ModelError("allowzero with a dimension 0 is not supported.", code="RQ202")
    new = resolve_shape(old, wanted)
    if all(isinstance(dim, int) for dim in old):
        count = prod(dim for dim in old if isinstance(dim, int))
        sizes = [dim for dim in new if isinstance(dim, int)]
        if sizes.count(-1) == 1:
            rest = -prod(sizes)
            if rest == 0 or count % rest:
                raise ModelError(f"shape {list(old)} cannot become {list(wanted)}.", code="RQ202")
            sizes[sizes.index(-1)] = count // rest
        if prod(sizes) != count or -1 in sizes:
            raise ModelError(f"shape {list(old)} cannot become {list(wanted)}.", code="RQ202")
        return site.reshape(data, sizes)
    names = {str(dim): value for dim, value in zip(old, data.ty.shape.values, strict=True)}
    if -1 not in new and not any(isinstance(dim, str) for dim in new):
        raise ModelError(
            f"shape {list(old)} cannot become {list(wanted)} for every size.", code="RQ202"
        )
    return op.reshape(data, [names[dim] if isinstance(dim, str) else dim for dim in new])


def convert_reshape_like(site: Site) -> relax.Expr:
    """Convert reshape_like: the axes lhs_begin to lhs_end are replaced by the other tensor's axes
    rhs_begin to rhs_end.
    """
    data, sizes = site.tensor(0), [site.shape(site.tensor(i)) for i in (0, 1)]
    spans: list[tuple[int, int]] = []
    for side, shape in zip(("lhs", "rhs"), sizes, strict=True):
        begin, end = site.attrs[f"{side}_begin"], site.attrs[f"{side}_end"]
        start = site.axis(begin, len(shape) + 1) if begin >= 0 else site.axis(begin, len(shape))
        stop = len(shape) if end is None else end if end >= 0 else end + len(shape)
        if not start <= stop <= len(shape):
            raise ModelError(
                f"{side}_begin is {begin} and {side}_end {end}; allowed: a range within "
                f"{format_count(len(shape), 'axis')}.",
                code="RQ202",
            )
        spans.append((start, stop))
    (left, right), (first, last) = spans
    new = [*sizes[0][:left], *sizes[1][first:last], *sizes[0][right:]]
    if prod(new) != prod(sizes[0]):
        raise ModelError(f"shape {list(sizes[0])} cannot become {new}.", code="RQ202")
    return site.reshape(data, new)


def convert_batch_flatten(site: Site) -> relax.Expr:
    return op.nn.batch_flatten(site.tensor(0))


def convert_squeeze(site: Site) -> relax.Expr:
    data, axes = site.tensor(0), site.attrs["axis"]
    return op.squeeze(data, None if axes is None else list(axes))


def convert_expand_dims(site: Site) -> relax.Expr:
    data, count = site.tensor(0), site.attrs["num_newaxis"]
    if not 0 <= count <= 16:
        raise ModelError(f"num_newaxis is {count}; allowed: 0 to 16.", code="RQ202")
    start = site.axis(site.attrs["axis"], site.ndim(data) + 1)
    shape = tensor_shape(data)
    if constant_value(data) is not None and shape is not None:
        sizes = [dim for dim in shape if isinstance(dim, int)]
        return site.reshape(data, [*sizes[:start], *[1] * count, *sizes[start:]])
    return op.expand_dims(data, list(range(start, start + count)))


def convert_transpose(site: Site) -> relax.Expr:
    data, axes = site.tensor(0), site.attrs["axes"]
    ndim = site.ndim(data)
    order = list(reversed(range(ndim))) if not axes else [site.axis(axis, ndim) for axis in axes]
    if sorted(order) != list(range(ndim)):
        raise ModelError(
            f"axes {list(axes or ())} are not a permutation of {format_count(ndim, 'axis')}.",
            code="RQ202",
        )
    return site.permute(data, order)


def convert_layout_transform(site: Site) -> relax.Expr:
    data, source, target = site.tensor(0), site.attrs["src_layout"], site.attrs["dst_layout"]
    if sorted(source) != sorted(target) or not source.isalpha() or len(source) != site.ndim(data):
        raise ModelError(
            f"{source} -> {target} is not supported; allowed: permutations of axes.", code="RQ202"
        )
    return site.permute(data, [source.index(axis) for axis in target])


def convert_depth_to_space(site: Site) -> relax.Expr:
    """Convert depth_to_space in NCHW: DCR (N, b, b, C, H, W) and CRD (N, C, b, b, H, W) -> (N, C, H
    * b, W * b).
    """
    data, attrs = site.tensor(0), site.attrs
    block, layout = attrs["block_size"], attrs["layout"]
    check_positive("block_size", (block,))
    check_block(layout, attrs["mode"])
    n, c, h, w = (site.shape(data)[layout.index(axis)] for axis in "NCHW")
    if c % (block * block):
        raise ModelError(
            f"{format_count(c, 'channel')} cannot be split into blocks of {block} x {block}.",
            code="RQ202",
        )
    c //= block * block
    is_crd = attrs["mode"] == "CRD"
    if layout == "NCHW":
        parts = (n, c, block, block, h, w) if is_crd else (n, block, block, c, h, w)
        order = [0, 1, 4, 2, 5, 3] if is_crd else [0, 3, 4, 1, 5, 2]
        whole = (n, c, h * block, w * block)
    else:
        parts = (n, h, w, c, block, block) if is_crd else (n, h, w, block, block, c)
        order = [0, 1, 4, 2, 5, 3] if is_crd else [0, 1, 3, 2, 4, 5]
        whole = (n, h * block, w * block, c)
    return site.reshape(site.permute(site.reshape(data, parts), order), whole)


def convert_space_to_depth(site: Site) -> relax.Expr:
    """Convert space_to_depth in NCHW: (N, C, H, b, W, b) -> (N, b, b, C, H, W)."""
    data, attrs = site.tensor(0), site.attrs
    block, layout = attrs["block_size"], attrs["layout"]
    check_positive("block_size", (block,))
    check_block(layout, attrs["mode"])
    n, c, h, w = (site.shape(data)[layout.index(axis)] for axis in "NCHW")
    if h % block or w % block:
        raise ModelError(f"{h} x {w} cannot be cut into blocks of {block} x {block}.", code="RQ202")
    h, w = h // block, w // block
    if layout == "NCHW":
        parts, order = (n, c, h, block, w, block), [0, 3, 5, 1, 2, 4]
        whole = (n, c * block * block, h, w)
    else:
        parts, order = (n, h, block, w, block, c), [0, 1, 3, 2, 4, 5]
        whole = (n, h, w, c * block * block)
    return site.reshape(site.permute(site.reshape(data, parts), order), whole)


def check_block(layout: str, mode: str) -> None:
    if layout not in ("NCHW", "NHWC") or mode not in ("DCR", "CRD"):
        raise ModelError(
            f"layout is {layout!r} and mode {mode!r}; allowed: NCHW or NHWC, and DCR or CRD.",
            code="RQ202",
        )


# -- joining and cutting ---------------------------------------------------------------------------


def convert_concatenate(site: Site) -> relax.Expr:
    parts = site.tensors(0)
    return op.concat(parts, site.axis(site.attrs["axis"], site.ndim(parts[0])))


def convert_stack(site: Site) -> relax.Expr:
    parts = site.tensors(0)
    return op.stack(parts, site.axis(site.attrs["axis"] or 0, site.ndim(parts[0]) + 1))


def convert_split(site: Site) -> Value:
    data, sections = site.tensor(0), site.attrs["indices_or_sections"]
    axis = site.axis(site.attrs["axis"], site.ndim(data))
    size = site.dims(data)[axis]
    if isinstance(sections, int):
        if not 1 <= sections <= MAX_SECTIONS or (isinstance(size, int) and size % sections):
            raise ModelError(
                f"axis {axis} has {format_count(size, 'entry')}, which {sections} does not "
                f"divide; allowed: up to {MAX_SECTIONS} equal parts.",
                code="RQ202",
            )
        if sections == 1:
            return (data,)  # Relax returns no tuple for one part
        return op.split(data, sections, axis)
    if list(sections) != sorted(sections) or min(sections, default=0) < 0:
        raise ModelError(f"indices {list(sections)} must increase.", code="RQ202")
    if not sections:
        return (data,)
    return op.split(data, list(sections), axis)


def convert_strided_slice(site: Site) -> relax.Expr:
    data, attrs = site.tensor(0), site.attrs
    shape = site.dims(data)
    begin, end, strides = attrs["begin"] or (), attrs["end"] or (), attrs["strides"] or (1,)
    axes = attrs["axes"]
    if axes is None:
        axes = range(len(begin))
    axes = [site.axis(axis, len(shape)) for axis in axes]
    if len(begin) != len(axes) or len(end) > len(axes) or len(set(axes)) != len(axes):
        raise ModelError(
            f"begin is {begin}, end {end} and axes {axes}; allowed: one begin and up to one end "
            "for each axis, and no axis twice.",
            code="RQ202",
        )
    if len(strides) == 1:
        strides = strides * len(axes)
    strides = (*strides, *[1] * (len(axes) - len(strides)))
    sizes = [shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        raise ModelError("it cuts an axis whose size is known at run time only.", code="RQ202")
    if attrs["slice_mode"] == "size":
        strides = [1] * len(axes)
        end = [
            size if length < 0 else (at + size if at < 0 else at) + length
            for at, length, size in zip(begin, end, sizes, strict=True)
        ]
    elif len(end) < len(axes):
        end = (*end, *sizes[len(end) :])
    if 0 in strides or len(strides) != len(axes):
        raise ModelError(
            f"strides are {list(strides)}; allowed: one for each axis, not 0.", code="RQ202"
        )
    ranges = [
        range(*slice(at, to, step).indices(size)) if step > 0 else slice(at, to, step)
        for at, to, step, size in zip(begin, end, strides, sizes, strict=True)
    ]
    starts = [r.start for r in ranges]
    stops = [r.stop for r in ranges]
    return op.strided_slice(data, axes, starts, stops, list(strides))


def convert_pad(site: Site) -> relax.Expr:
    data, widths = site.tensor(0), site.attrs["pad_width"]
    ndim = site.ndim(data)
    if len(widths) != ndim or any(len(pair) != 2 or min(pair) < 0 for pair in widths):
        raise ModelError(
            f"pad_width is {widths}; allowed: a pair from 0 for each of "
            f"{format_count(ndim, 'axis')}.",
            code="RQ202",
        )
    mode = site.attrs["pad_mode"]
    if mode not in PAD_MODES:
        raise ModelError(f"pad_mode is {mode!r}; allowed: {', '.join(PAD_MODES)}.", code="RQ202")
    value = site.attrs["pad_value"]  # attribute of TVM 0.7, later an argument
    if mode == "constant" and len(site.args) > 1:
        array = site.constant(1)
        if array.size != 1:
            raise ModelError(f"the pad value has shape {array.shape}; allowed: ().", code="RQ202")
        value = float(array.item())
    flat = [width for pair in widths for width in pair]
    if mode == "edge":
        return pad_edge(site, data, widths)
    return op.nn.pad(data, flat, PAD_MODES[mode], value)


def pad_edge(site: Site, data: relax.Expr, widths: tuple[tuple[int, int], ...]) -> relax.Expr:
    """Repeat the first and last entry of each axis: take(x, [0, 0, 0, 1, ..., n - 1, n - 1])."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            size = site.shape(data)[axis]
            check_made_up(size + before + after)
            index = np.clip(np.arange(-before, size + after), 0, size - 1).astype("int64")
            data = site.emit(op.take(data, make_const(index), axis, mode="fast"))
    return data


def convert_mirror_pad(site: Site) -> relax.Expr:
    """Convert mirror_pad to a take of mirrored indices on each axis. SYMMETRIC repeats the border,
    REFLECT does not.
    """
    data, mode = site.tensor(0), site.attrs["mode"].upper()
    widths = site.attrs["pad_width"]
    shape = site.shape(data)
    if mode not in ("SYMMETRIC", "REFLECT") or len(widths) != len(shape):
        raise ModelError(
            f"mode is {mode!r} and pad_width {widths}; allowed: SYMMETRIC or REFLECT, and a pair "
            f"of widths for each of {format_count(len(shape), 'axis')}.",
            code="RQ202",
        )
    for axis, pair in enumerate(widths):
        most = shape[axis] - (mode == "REFLECT")
        if len(pair) != 2 or not 0 <= min(pair) <= max(pair) <= most:
            raise ModelError(
                f"pad_width {pair} does not fit an axis of {format_count(shape[axis], 'entry')}.",
                code="RQ202",
            )
        if any(pair):
            check_made_up(3 * shape[axis])
            name = "reflect" if mode == "REFLECT" else "symmetric"
            index = np.pad(np.arange(shape[axis], dtype="int64"), pair, name)
            data = site.emit(op.take(data, make_const(index), axis, mode="fast"))
    return data


def convert_tile(site: Site) -> relax.Expr:
    check_positive("reps", site.attrs["reps"])
    return op.tile(site.tensor(0), list(site.attrs["reps"]))


def convert_repeat(site: Site) -> relax.Expr:
    data, axis = site.tensor(0), site.attrs["axis"]
    check_positive("repeats", (site.attrs["repeats"],))
    return op.repeat(
        data, site.attrs["repeats"], None if axis is None else site.axis(axis, site.ndim(data))
    )


def convert_reverse(site: Site) -> relax.Expr:
    data = site.tensor(0)
    return op.flip(data, site.axis(site.attrs["axis"] or 0, site.ndim(data)))


def convert_broadcast_to(site: Site) -> relax.Expr:
    return op.broadcast_to(site.tensor(0), check_shape(site.attrs["shape"]))


def convert_broadcast_to_like(site: Site) -> relax.Expr:
    return op.broadcast_to(site.tensor(0), list(site.shape(site.tensor(1))))


def convert_slice_like(site: Site) -> relax.Expr:
    data, wanted = site.tensor(0), site.shape(site.tensor(1))
    axes = site.attrs["axes"] or range(site.ndim(data))
    axes = [site.axis(axis, min(site.ndim(data), len(wanted))) for axis in axes]
    ends = [wanted[axis] for axis in axes]
    return op.strided_slice(data, axes, [0] * len(axes), ends)


# -- images ----------------------------------------------------------------------------------------


def convert_resize2d(site: Site) -> relax.Expr:
    data, attrs = site.tensor(0), site.attrs
    layout, coordinates = attrs["layout"], attrs["coordinate_transformation_mode"]
    check_layout("layout", layout, "NCHW")
    check_positive("size", attrs["size"])
    size = list(attrs["size"]) * (3 - len(attrs["size"]))
    if coordinates == "tf_crop_and_resize":
        raise ModelError(
            "tf_crop_and_resize, which takes a region of interest (roi), is not supported.",
            code="RQ202",
        )

    wanted, kind = attrs["out_dtype"] or tensor_dtype(data), tensor_dtype(data)
    if wanted != kind:  # TVM's Relax compiler ignores out_dtype
        if not wanted.startswith("float"):
            raise ModelError(
                f"out_dtype is {wanted!r}; allowed: {kind!r}, the dtype of the data, or a float.",
                code="RQ202",
            )
        data = site.emit(op.astype(data, wanted))

    def resize(data: relax.Expr, size: list[int], rounding: str) -> relax.Expr:
        return op.image.resize2d(
            data,
            size,
            layout=layout,
            method=attrs["method"],
            coordinate_transformation_mode=coordinates,
            rounding_method=rounding,
            cubic_alpha=attrs["cubic_alpha"],
            cubic_exclude=attrs["cubic_exclude"],
            extrapolation_value=attrs["extrapolation_value"],
        )

    if attrs["method"] != "nearest_neighbor":
        return resize(data, size, attrs["rounding_method"])
    old = [site.shape(data)[layout.index(axis)] for axis in "HW"]
    height, width = (
        find_rounding(attrs["rounding_method"], coordinates, *sizes)
        for sizes in zip(old, size, strict=True)
    )
    if height == width:
        return resize(data, size, height)
    return resize(site.emit(resize(data, [size[0], old[1]], height)), size, width)


def find_rounding(method: str, coordinates: str, old: int, new: int) -> str:
    """Return the rounding that Relay computes along one axis.

    "round" goes half away from zero. An asymmetric resize to a multiple is an integer division,
    whatever the attribute says.
    """
    if coordinates == "asymmetric" and new % old == 0:
        return "floor"
    if not method:
        method = "round" if coordinates == "align_corners" else "floor"
    return "round_prefer_ceil" if method == "round" else method


def convert_upsampling(site: Site) -> relax.Expr:
    """Convert upsampling to resize2d with the scaled size. "nearest_neighbor" and "bilinear" start
    at the corner.
    """
    data, attrs = site.tensor(0), site.attrs
    layout = attrs["layout"]
    check_layout("layout", layout, "NCHW")
    sizes = [site.shape(data)[layout.index(axis)] for axis in "HW"]
    scaled = [
        round(size * scale)
        for size, scale in zip(sizes, (attrs["scale_h"], attrs["scale_w"]), strict=True)
    ]
    check_positive("size", scaled)
    methods = {"nearest_neighbor": "nearest_neighbor", "bilinear": "linear", "bicubic": "cubic"}
    if attrs["method"] not in methods:
        raise ModelError(
            f"method is {attrs['method']!r}; allowed: {', '.join(methods)}.", code="RQ202"
        )
    is_aligned = attrs["align_corners"]
    return op.image.resize2d(
        data,
        scaled,
        layout=layout,
        method=methods[attrs["method"]],
        coordinate_transformation_mode="align_corners" if is_aligned else "asymmetric",
        rounding_method="round_prefer_ceil" if is_aligned else "floor",
        cubic_alpha=-0.5,
    )


#: mode in Relay -> mode in Relax
PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "edge"}

_BLOCK = {"block_size": integer(1), "layout": text("NCHW"), "mode": text("DCR")}
_PAIRS = Attr(AttributeKind.NESTED, required=True)

SHAPE_OPS: tuple[RelayOp, ...] = (
    RelayOp(
        "reshape",
        1,
        convert_reshape,
        {"newshape": integers(required=True), "allowzero": integer(0), "reverse": flag()},
    ),
    RelayOp(
        "reshape_like",
        2,
        convert_reshape_like,
        {"lhs_begin": integer(0), "lhs_end": boxed(), "rhs_begin": integer(0), "rhs_end": boxed()},
    ),
    RelayOp("nn.batch_flatten", 1, convert_batch_flatten),
    RelayOp("squeeze", 1, convert_squeeze, {"axis": OPTIONAL_INTEGERS}),
    RelayOp("expand_dims", 1, convert_expand_dims, {"axis": integer(), "num_newaxis": integer(1)}),
    RelayOp("transpose", 1, convert_transpose, {"axes": OPTIONAL_INTEGERS}),
    RelayOp(
        "layout_transform",
        1,
        convert_layout_transform,
        {"src_layout": text(), "dst_layout": text()},
    ),
    RelayOp("nn.depth_to_space", 1, convert_depth_to_space, _BLOCK),
    RelayOp("nn.space_to_depth", 1, convert_space_to_depth, _BLOCK),
    RelayOp("concatenate", 1, convert_concatenate, {"axis": integer(0)}),
    RelayOp("stack", 1, convert_stack, {"axis": boxed(0)}),
    RelayOp(
        "split",
        1,
        convert_split,
        {"indices_or_sections": Attr(AttributeKind.SECTIONS, required=True), "axis": integer(0)},
    ),
    RelayOp(
        "strided_slice",
        1,
        convert_strided_slice,
        {
            "begin": OPTIONAL_INTEGERS,
            "end": OPTIONAL_INTEGERS,
            "strides": OPTIONAL_INTEGERS,
            "slice_mode": text("end"),
            "axes": OPTIONAL_INTEGERS,
        },
    ),
    RelayOp(
        "nn.pad",
        1,
        convert_pad,
        {"pad_width": _PAIRS, "pad_mode": text("constant"), "pad_value": real(0.0)},
        2,
    ),
    RelayOp(
        "nn.mirror_pad", 1, convert_mirror_pad, {"mode": text("SYMMETRIC"), "pad_width": _PAIRS}
    ),
    RelayOp("tile", 1, convert_tile, {"reps": integers(required=True)}),
    RelayOp("repeat", 1, convert_repeat, {"repeats": boxed(), "axis": boxed()}),
    RelayOp("reverse", 1, convert_reverse, {"axis": boxed()}),
    RelayOp(
        "broadcast_to",
        1,
        convert_broadcast_to,
        {"shape": integers(required=True), "dtype": dtype()},
    ),
    RelayOp("broadcast_to_like", 2, convert_broadcast_to_like),
    RelayOp("slice_like", 2, convert_slice_like, {"axes": OPTIONAL_INTEGERS}),
    RelayOp(
        "image.resize2d",
        1,
        convert_resize2d,
        {
            "size": integers(required=True),
            "roi": Attr(AttributeKind.FLOATS),
            "layout": text("NCHW"),
            "method": text("linear"),
            "coordinate_transformation_mode": text("half_pixel"),
            "rounding_method": text("round"),
            "cubic_alpha": real(-0.5),
            "cubic_exclude": integer(0),
            "extrapolation_value": real(0.0),
            "out_dtype": dtype(),
        },
    ),
    RelayOp(
        "nn.upsampling",
        1,
        convert_upsampling,
        {
            "scale_h": real(),
            "scale_w": real(),
            "layout": text("NCHW"),
            "method": text("nearest_neighbor"),
            "align_corners": flag(),
        },
    ),
)
