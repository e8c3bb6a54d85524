"""Relay reader: shapes of tensors, with Relay's codes 0 to -4 resolved."""

from __future__ import annotations

from math import prod

from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.relay.operators.base import Site

op = relax.op

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


def convert_broadcast_to(site: Site) -> relax.Expr:
    return op.broadcast_to(site.tensor(0), check_shape(site.attrs["shape"]))


def convert_broadcast_to_like(site: Site) -> relax.Expr:
    return op.broadcast_to(site.tensor(0), list(site.shape(site.tensor(1))))
