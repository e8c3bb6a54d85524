"""Relay reader: resize2d and upsampling, with Relay's rounding."""

from __future__ import annotations

from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.relay.operators.base import Site, check_positive
from relayquant.relay.operators.linear import check_layout

op = relax.op


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
