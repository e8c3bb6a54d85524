"""What operators want of sizes of their operands and results; `shapes` checks it at run time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from relayquant.codegen.rewrites.inner_sizes import pair_inner_sizes
from relayquant.errors import format_count
from relayquant.ir.reference.relax.row import list_axes
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions
from relayquant.ir.rewrite.moves import RESHAPES

Shape = Sequence[Any]


@dataclass(frozen=True)
class Shapes:
    """The shapes of a call.

    Attributes:
        attrs: Its attributes.
        args: Its arguments.
        operands: Shapes of its tensors, those of tuples included.
        result: Shape of its result. None of a tuple, or if it is not known.
    """

    attrs: Any
    args: Sequence[Any]
    operands: Sequence[Shape]
    result: Shape | None


@dataclass(frozen=True)
class ShapeRule:
    """What an operator wants of shapes.

    Attributes:
        list_conditions: Shapes -> what has to hold, expressions of sizes.
        text: How the value comes from the shapes, for a message.
    """

    list_conditions: Callable[[Shapes], Iterable[Any]]
    text: Callable[[Shapes], str]


def describe_change(shapes: Shapes) -> str:
    return (
        f"which makes {format_shape(shapes.operands[0])} into {format_shape(shapes.result or ())}"
    )


def describe_product(shapes: Shapes) -> str:
    left, right = map(format_shape, shapes.operands[:2])
    return f"which multiplies {left} by {right}"


def describe_operands(shapes: Shapes) -> str:
    return f"which is computed from {', '.join(map(format_shape, shapes.operands))}"


def describe_split(shapes: Shapes) -> str:
    (data,), cuts = shapes.operands, shapes.attrs.indices_or_sections
    if isinstance(cuts, int | tirx.IntImm):
        parts = f"into {format_count(int(cuts), 'section')}"
    else:
        parts = f"at {', '.join(str(int(cut)) for cut in cuts)}"
    return f"which splits {format_shape(data)} {parts} along {format_axes(shapes)}"


def describe_taking(shapes: Shapes) -> str:
    (data,), taken = shapes.operands, format_count(int(shapes.attrs.k), "value")
    return f"which takes {taken} of {format_shape(data)} along {format_axes(shapes)}"


def describe_reading(shapes: Shapes) -> str:
    (data,) = shapes.operands
    return f"which reads 1 value or more of {format_shape(data)} along {format_axes(shapes)}"


def format_axes(shapes: Shapes) -> str:
    """Write the axes that an attribute names, counted from 0."""
    if shapes.attrs.axis is None:
        return "all axes"
    axes = list_axes(shapes.attrs.axis, len(shapes.operands[0]))
    return f"axis {', '.join(map(str, axes))}"


def have_sizes(shapes: Shapes) -> Iterator[Any]:
    """Sizes, which may be values of an input, are at least 0."""
    return (tirx.GE(size, tirx.const(0, "int64")) for size in shapes.result or ())


def have_windows(shapes: Shapes) -> Iterator[Any]:
    """A convolution or pool has a window along each spatial axis, as in the numpy reference."""
    attrs = shapes.attrs
    if shapes.result is None:
        return
    given = str(attrs.layout if hasattr(attrs, "layout") else attrs.data_layout)
    letters = re.findall("[A-Za-z]", str(getattr(attrs, "out_layout", "")) or given)
    for letter, size in zip(letters, shapes.result, strict=True):
        yield tirx.GE(size, tirx.const(int(letter in "DHW"), "int64"))


def stay_within(shapes: Shapes) -> Iterator[Any]:
    """A slice that goes forward and is not clipped begins and ends within its axes."""
    yield from have_sizes(shapes)
    rows = shapes.args[1:]
    if shapes.attrs.assume_inbound and all(isinstance(row, relax.Tuple) for row in rows):
        data, (axes, begins, ends, *steps) = shapes.operands[0], rows
        places = zip(axes.fields, begins.fields, ends.fields, strict=True)
        for at, (axis, begin, end) in enumerate(places):
            if not steps or int(steps[0].fields[at]) > 0:
                yield tirx.LE(tirx.const(0, "int64"), begin)
                yield tirx.LE(end, data[int(axis)])


def keep_count(shapes: Shapes) -> Iterator[Any]:
    """A reshape has as many elements as its operand. Sizes that both have are left out: the others
    fit in a batch of 0, too.
    """
    yield from have_sizes(shapes)
    if shapes.result is not None:
        one = tirx.const(1, "int64")
        before, after = drop_common(shapes.operands[0], shapes.result)
        yield tirx.EQ(prod(before, start=one), prod(after, start=one))


def drop_common(before: Shape, after: Shape) -> tuple[Shape, Shape]:
    """Return two shapes without the symbolic sizes that both have."""
    kept, rest = [], list(after)
    for size in before:
        same = (at for at, other in enumerate(rest) if tvm_ffi.structural_equal(size, other))
        at = None if isinstance(size, tirx.IntImm) else next(same, None)
        if at is None:
            kept.append(size)
        else:
            del rest[at]
    return kept, rest


def match_axes(before: Shape, after: Shape) -> Iterator[Any]:
    """Sizes of the same axis are equal, counted from the last one, but for a known 1."""
    for pair in zip(reversed(before), reversed(after), strict=False):
        if not (isinstance(pair[0], tirx.IntImm) and int(pair[0]) == 1):
            yield tirx.EQ(*pair)


def spread(shapes: Shapes) -> Iterator[Any]:
    """A broadcast repeats what has the size 1."""
    yield from have_sizes(shapes)
    yield from match_axes(shapes.operands[0], shapes.result or ())


def match_inner(shapes: Shapes) -> Iterator[Any]:
    """A product sums over one size."""
    yield tirx.EQ(*pair_inner_sizes(*shapes.operands))


def match_rows(shapes: Shapes) -> Iterator[Any]:
    """A product of (..., M, K) and (..., N, K) sums over K. A matrix fits any number of others.
    Vectors have N.
    """
    left, right, *vectors = shapes.operands
    yield tirx.EQ(left[-1], right[-1])
    yield from match_axes(right[:-2], left[:-2])
    yield from match_vectors(vectors, right[-2])


def match_channels(shapes: Shapes, *, is_transposed: bool) -> Iterator[Any]:
    """A convolution's weight has the channels of the data, or of a group. Vectors have the
    channels of the result.
    """
    attrs, (data, weight, *vectors) = shapes.attrs, shapes.operands
    layouts = str(attrs.data_layout), str(attrs.kernel_layout)
    if "".join(layouts).isupper():  # not packed
        groups = 1 if is_transposed else int(attrs.groups)
        yield tirx.EQ(data[layouts[0].index("C")], weight[layouts[1].index("I")] * groups)
        if vectors and shapes.result is not None:
            yield from match_vectors(vectors, shapes.result[layouts[0].index("C")])
    yield from have_windows(shapes)


def match_letters(shapes: Shapes) -> Iterator[Any]:
    """Axes of an einsum with the same letter have the same size."""
    terms = str(shapes.attrs.subscripts).replace(" ", "").split("->")[0].split(",")
    first: dict[str, Any] = {}
    for term, shape in zip(terms, shapes.operands, strict=True):
        left, _, right = term.partition("...")
        lettered = [*zip(left, shape, strict=False), *zip(right[::-1], shape[::-1], strict=False)]
        for letter, size in lettered:
            yield tirx.EQ(first.setdefault(letter, size), size)


def match_keys(shapes: Shapes) -> Iterator[Any]:
    """Attention of (B, S, H, D) to keys (B, L, H, D) and values (B, L, H, V), with a bias that
    broadcasts to (B, H, S, L).
    """
    query, keys, values, *bias = shapes.operands
    yield from (tirx.EQ(query[axis], keys[axis]) for axis in (0, 2, 3))
    yield from (tirx.EQ(keys[axis], values[axis]) for axis in (0, 1, 2))
    for each in bias:
        yield from match_axes(each, (query[0], query[2], query[1], keys[1]))


def match_parameters(name: str, shapes: Shapes) -> Iterator[Any]:
    """Vectors have the size of the axis that an attribute names."""
    data, *vectors = shapes.operands
    return match_vectors(vectors, data[int(getattr(shapes.attrs, name))] if data else 1)


def match_pair(shapes: Shapes) -> Iterator[Any]:
    """Scales and zero points of two operands have the size of their axis."""
    left, right, *parameters = shapes.operands
    for data, name, vectors in (
        (left, "lhs_axis", parameters[:2]),
        (right, "rhs_axis", parameters[2:4]),
    ):
        yield from match_vectors(vectors, data[int(getattr(shapes.attrs, name))] if data else 1)


def match_vectors(vectors: Iterable[Shape], size: Any) -> Iterator[Any]:
    """Vectors have one value, or this many."""
    for vector in vectors:
        yield from match_axes(vector, (size,))


def stay_inside(data: Shape, indices: Shape, axis: int) -> Iterator[Any]:
    """Indices along an axis stay where they are along the others."""
    for at, (size, count) in enumerate(zip(data, indices, strict=True)):
        if at != axis % len(data):
            yield tirx.LE(count, size)


def gather(shapes: Shapes) -> Iterator[Any]:
    """See `stay_inside` and `find_places`."""
    data, indices = shapes.operands
    yield from stay_inside(data, indices, int(shapes.attrs.axis))
    yield from find_places([data[int(shapes.attrs.axis)]], indices)


def scatter(shapes: Shapes) -> Iterator[Any]:
    """See `stay_inside` and `find_places`. Each index has its value."""
    data, indices, values = shapes.operands
    yield from stay_inside(data, indices, int(shapes.attrs.axis))
    yield from find_places([data[int(shapes.attrs.axis)]], indices)
    yield from (tirx.EQ(*pair) for pair in zip(indices, values, strict=True))


def find_places(sizes: Shape, indices: Shape) -> Iterator[Any]:
    """Axes of these sizes have values to take, or there is no index."""
    one = tirx.const(1, "int64")
    is_asked = tirx.NE(prod(indices, start=one), tirx.const(0, "int64"))
    return (tirx.any(tirx.Not(is_asked), tirx.LE(one, size)) for size in sizes)


def read_values(shapes: Shapes) -> Iterator[Any]:
    """What is computed from the nearest values needs one. Sizes that both have are left out."""
    if shapes.result is not None:
        yield from find_places(*drop_common(shapes.operands[0], shapes.result))


def pad(shapes: Shapes) -> Iterator[Any]:
    """A pad has constants, or repeats values."""
    yield from have_sizes(shapes)
    if str(shapes.attrs.pad_mode) != "constant":
        yield from read_values(shapes)


def take(shapes: Shapes) -> Iterator[Any]:
    """See `find_places`: along one axis, or among all values."""
    data, indices = (*shapes.operands, ())[:2]
    return find_places([data[axis] for axis in list_axes(shapes.attrs.axis, len(data))], indices)


def reach_rows(shapes: Shapes) -> Iterator[Any]:
    """See `find_places`: the last axis of the indices goes over axes of the data. Both have the
    same batches.
    """
    data, indices = shapes.operands[:2]
    first = int(getattr(shapes.attrs, "batch_dims", 0))
    yield from (tirx.EQ(*pair) for pair in zip(data[:first], indices[:first], strict=True))
    if isinstance(indices[-1], tirx.IntImm):
        yield from find_places(data[first : first + int(indices[-1])], indices)


def reach_fields(shapes: Shapes, *, values: int) -> Iterator[Any]:
    """See `find_places`: one array of indices for each of the first axes."""
    data, *fields = shapes.operands[: len(shapes.operands) - values]
    for size, indices in zip(data, fields, strict=False):
        yield from find_places([size], indices)


def take_largest(shapes: Shapes) -> Iterator[Any]:
    """An axis has as many values as are taken."""
    count = tirx.const(int(shapes.attrs.k), "int64")
    yield tirx.LE(count, shapes.operands[0][int(shapes.attrs.axis)])


def read_one(shapes: Shapes) -> Iterator[Any]:
    """A place is found among one value or more, on some axes or on all."""
    (data,) = shapes.operands
    axes = list_axes(shapes.attrs.axis, len(data))
    return (tirx.LE(tirx.const(1, "int64"), data[axis]) for axis in axes)


def reach_cuts(shapes: Shapes) -> Iterator[Any]:
    """A split begins its last part inside the axis. Sections are equal but for the last one."""
    attrs, (data,) = shapes.attrs, shapes.operands
    size, cuts = data[int(attrs.axis)], attrs.indices_or_sections
    if isinstance(cuts, int | tirx.IntImm):
        yield tirx.LE((int(cuts) - 1) * ((size + int(cuts) - 1) // int(cuts)), size)
    else:
        yield from (tirx.LE(tirx.const(int(cut), "int64"), size) for cut in cuts)


def format_shape(shape: Shape) -> str:
    """Write a shape without TVM's marks of types."""
    sizes = ", ".join(str(getattr(size, "value", size)) for size in shape)
    return f"({re.sub(r'T[.]int64[(](-?[0-9]+)[)]', lambda found: found[1], sizes)})"


def read_shapes(call: Call) -> Shapes | None:
    """Return the shapes of a call. None if one of an operand is not known."""
    types = [
        ty
        for arg in call.args
        for ty in (arg.ty.fields if isinstance(arg.ty, relax.TupleType) else [arg.ty])
        if isinstance(ty, relax.TensorType)
    ]
    if not all(isinstance(ty.shape, relax.ShapeExpr) for ty in types):
        return None
    is_known = isinstance(getattr(call.ty, "shape", None), relax.ShapeExpr)
    result = list_dimensions(call.ty) if is_known else None
    return Shapes(call.attrs, call.args, [list_dimensions(ty) for ty in types], result)


def describe_misfit(call: Call) -> str:
    """Describe a call whose shapes never fit. "" if they fit or may fit."""
    rule = RULES.get(call_name(call))
    shapes = None if rule is None else read_shapes(call)
    if rule is None or shapes is None:
        return ""
    analyzer = Analyzer()
    is_wrong = any(analyzer.can_prove(tirx.Not(each)) for each in rule.list_conditions(shapes))
    return rule.text(shapes) if is_wrong else ""


CONVOLUTIONS = tuple(f"relax.nn.conv{rank}d" for rank in (1, 2, 3))
#: Operators that TVM compiles also where it cannot tell whether their sizes fit.
RULES = {
    **dict.fromkeys(RESHAPES, ShapeRule(keep_count, describe_change)),
    "relax.broadcast_to": ShapeRule(spread, describe_change),
    "relax.strided_slice": ShapeRule(stay_within, describe_change),
    "relax.matmul": ShapeRule(match_inner, describe_product),
    **dict.fromkeys(
        (*CONVOLUTIONS, "relax.qnn.conv1d", "relax.qnn.conv2d"),
        ShapeRule(partial(match_channels, is_transposed=False), describe_product),
    ),
    **dict.fromkeys(
        (*(f"{name}_transpose" for name in CONVOLUTIONS), "relax.qnn.conv2d_transpose"),
        ShapeRule(partial(match_channels, is_transposed=True), describe_product),
    ),
    **{
        f"relax.nn.{kind}_pool{rank}d": ShapeRule(have_windows, describe_change)
        for kind in ("avg", "max")
        for rank in (1, 2, 3)
    },
    "relax.qnn.avg_pool2d": ShapeRule(have_windows, describe_change),
    "relax.qnn.dense": ShapeRule(match_rows, describe_product),
    "relax.qnn.batch_matmul": ShapeRule(match_rows, describe_product),
    "relax.einsum": ShapeRule(match_letters, describe_operands),
    "relax.nn.attention": ShapeRule(match_keys, describe_operands),
    "relax.nn.attention_bias": ShapeRule(match_keys, describe_operands),
    **dict.fromkeys(
        [
            "relax.nn.prelu",
            *(f"relax.qnn.{kind}" for kind in ("prelu", "quantize", "dequantize", "requantize")),
        ],
        ShapeRule(partial(match_parameters, "axis"), describe_operands),
    ),
    **dict.fromkeys(
        ("relax.qnn.add", "relax.qnn.subtract", "relax.qnn.mul"),
        ShapeRule(match_pair, describe_operands),
    ),
    **{
        f"relax.nn.{kind}_norm": ShapeRule(
            partial(match_parameters, "channel_axis"), describe_operands
        )
        for kind in ("group", "instance")
    },
    "relax.gather_elements": ShapeRule(gather, describe_operands),
    "relax.scatter_elements": ShapeRule(scatter, describe_operands),
    "relax.nn.pad": ShapeRule(pad, describe_change),
    **{f"relax.image.resize{rank}d": ShapeRule(read_values, describe_change) for rank in (2, 3)},
    "relax.take": ShapeRule(take, describe_operands),
    "relax.gather_nd": ShapeRule(reach_rows, describe_operands),
    "relax.scatter_nd": ShapeRule(reach_rows, describe_operands),
    "relax.index_tensor": ShapeRule(partial(reach_fields, values=0), describe_operands),
    "relax.index_put": ShapeRule(partial(reach_fields, values=1), describe_operands),
    "relax.split": ShapeRule(reach_cuts, describe_split),
    **dict.fromkeys(
        ("relax.argmax", "relax.argmin", "relax.median"), ShapeRule(read_one, describe_reading)
    ),
    "relax.topk": ShapeRule(take_largest, describe_taking),
}
