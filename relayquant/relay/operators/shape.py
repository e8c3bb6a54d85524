"""Relay reader, rows: shapes, layouts, joining and cutting, padding, resizing.

The longer conversions are in `reshape`, `padding` and `resize`.
"""

from __future__ import annotations

from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.relay.attributes import Attr, AttributeKind
from relayquant.relay.operators.base import (
    OPTIONAL_INTEGERS,
    RelayOp,
    Site,
    Value,
    boxed,
    check_positive,
    dtype,
    flag,
    integer,
    integers,
    real,
    text,
)
from relayquant.relay.operators.padding import convert_mirror_pad, convert_pad
from relayquant.relay.operators.reshape import (
    convert_batch_flatten,
    convert_broadcast_to,
    convert_broadcast_to_like,
    convert_expand_dims,
    convert_reshape,
    convert_reshape_like,
    convert_squeeze,
)
from relayquant.relay.operators.resize import convert_resize2d, convert_upsampling

op = relax.op
#: Largest number of parts of a split. Each part becomes a value.
MAX_SECTIONS = 4096


# -- layouts ---------------------------------------------------------------------------------------


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


def convert_slice_like(site: Site) -> relax.Expr:
    data, wanted = site.tensor(0), site.shape(site.tensor(1))
    axes = site.attrs["axes"] or range(site.ndim(data))
    axes = [site.axis(axis, min(site.ndim(data), len(wanted))) for axis in axes]
    ends = [wanted[axis] for axis in axes]
    return op.strided_slice(data, axes, [0] * len(axes), ends)


# -- images ----------------------------------------------------------------------------------------


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
