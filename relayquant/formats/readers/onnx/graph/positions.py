"""ONNX reader: checks that axes and constant indices of a node are within its operands.

TVM's frontend takes an axis modulo the rank, and compiled code moves an index into the data. So a
wrong number in a file would give wrong results. ONNX allows an axis of -rank to rank - 1 and an
index of -size to size - 1, unless `AXES` or `INDICES` define other limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.graph.fold import find_array
from relayquant.formats.readers.onnx.graph.inference import REPAIR
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import tensor_shape

#: Attributes and inputs of ONNX operators that hold axes.
AXIS_NAMES = ("axis", "axes")

#: (sizes of an operand, axis) -> number of valid positions on that axis.
CountAxes = Callable[[int, int], int]


@dataclass(frozen=True)
class AxisRule:
    """Which axes an operator takes.

    Attributes:
        count: (rank of the first input, number of axes) -> the rank for counting axes.
        takes_rank: Whether the rank itself is also an axis, after the last one.
    """

    count: CountAxes = lambda rank, axes: rank
    takes_rank: bool = False


#: Operators whose axes do not refer to the first input. None: the axes are checked elsewhere, or
#: the first input is not a tensor.
AXES: Mapping[str, AxisRule | None] = {
    "ConcatFromSequence": None,
    "DequantizeLinear": None,
    "Flatten": AxisRule(takes_rank=True),
    "OneHot": AxisRule(lambda rank, axes: rank + 1),
    "QuantizeLinear": None,
    "Unsqueeze": AxisRule(lambda rank, axes: rank + axes),
}


def _limit_axis(
    shape: Sequence[Any], indices: Sequence[Any], attrs: Mapping[str, Any]
) -> list[Any]:
    axis = int(attrs.get("axis", 0))
    return [shape[axis]]


def _limit_tuples(
    shape: Sequence[Any], indices: Sequence[Any], attrs: Mapping[str, Any]
) -> list[Any]:
    first = int(attrs.get("batch_dims", 0))
    return list(shape[first : first + int(indices[-1])])


#: Operators with indices as their second input -> the limits of all indices, or of each position on
#: the last axis of the indices, given the shapes of data and indices and the attributes.
INDICES: Mapping[str, Callable[..., list[Any]]] = {
    "Gather": _limit_axis,
    "GatherElements": _limit_axis,
    "GatherND": _limit_tuples,
    "Scatter": _limit_axis,
    "ScatterElements": _limit_axis,
    "ScatterND": _limit_tuples,
}


#: Operators whose second input has the batches of the data on its first axes -> the axes of the
#: data that are batches, given the attributes.
BATCHES: Mapping[str, Callable[[Mapping[str, Any]], Sequence[int]]] = {
    "GatherND": lambda attrs: range(int(attrs.get("batch_dims", 0))),
    "ReverseSequence": lambda attrs: [int(attrs.get("batch_axis", 1))],
}


def check_positions(
    node: onnx.NodeProto,
    schema: onnx.defs.OpSchema,
    operands: Sequence[relax.Expr | None],
) -> None:
    """Check the axes, the constant indices and the batches of a node.

    Args:
        node: The node.
        schema: The definition of its operator.
        operands: Its inputs. None for one that is left out.

    Raises:
        Refusal: an axis or an index is outside of the operand, or the indices are of other batches
            than the data. Names it and what is allowed.
    """
    if not operands or operands[0] is None:
        return
    shape = _shape_of(operands[0])
    if shape is None:
        return
    attrs = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    rule = AXES.get(node.op_type, AxisRule())
    if rule is not None:
        for name, axes in _list_axes(schema, operands, attrs):
            _check_axes(name, axes, rule, len(shape))
    limit = INDICES.get(node.op_type)
    indices = find_array(operands[1]) if limit is not None and len(operands) > 1 else None
    if limit is not None and indices is not None and indices.size:
        _check_indices(indices, limit(shape, indices.shape, attrs))
    list_batches = BATCHES.get(node.op_type)
    second = _shape_of(operands[1]) if list_batches and operands[1] is not None else None
    if list_batches and second is not None:
        _check_batches(shape, second, list_batches(attrs))


def _shape_of(operand: relax.Expr) -> tuple[int | str, ...] | None:
    """Return the shape of a tensor or of a vector of sizes."""
    if isinstance(operand, relax.ShapeExpr):
        return (len(operand.values),)
    return tensor_shape(operand)


def _list_axes(
    schema: onnx.defs.OpSchema, operands: Sequence[relax.Expr | None], attrs: Mapping[str, Any]
) -> Iterator[tuple[str, list[int]]]:
    """List (name, axes) of each attribute and each constant input that holds axes."""
    for name in AXIS_NAMES:
        if name in attrs and name in schema.attributes:
            yield name, [int(axis) for axis in np.ravel(attrs[name])]
    for one, operand in zip(schema.inputs, operands, strict=False):
        array = find_array(operand) if one.name in AXIS_NAMES and operand is not None else None
        if array is not None:
            yield one.name, [int(axis) for axis in array.ravel()]


def _check_axes(name: str, axes: Sequence[int], rule: AxisRule, rank: int) -> None:
    count = rule.count(rank, len(axes))
    last = count if rule.takes_rank else count - 1
    for axis in axes:
        if not -count <= axis <= last:
            raise Refusal(
                f"its {name} names axis {axis} of data with {format_count(rank, 'dimension')}; "
                f"allowed: {-count} to {last}",
                REPAIR,
            )


def _check_indices(indices: np.ndarray, sizes: Sequence[int | str]) -> None:
    """Check indices against one size for all, or one size per position on their last axis."""
    columns = indices.reshape(-1, len(sizes)).T
    for at, (column, size) in enumerate(zip(columns, sizes, strict=True)):
        if isinstance(size, str):
            continue
        outside = column[(column < -size) | (column >= size)]
        if outside.size:
            where = f" in place {at} of their last axis" if len(sizes) > 1 else ""
            raise Refusal(
                f"its indices hold {outside[0]}{where}, for an axis of size {size}; allowed: "
                f"{-size} to {size - 1}",
                REPAIR,
            )


def _check_batches(
    shape: Sequence[int | str], second: Sequence[int | str], axes: Sequence[int]
) -> None:
    """Check that known sizes of axes of the data are those of the first axes of a second input."""
    for at, axis in enumerate(axes):
        sizes = shape[axis], second[at]
        if not any(isinstance(size, str) for size in sizes) and sizes[0] != sizes[1]:
            raise Refusal(
                f"its second input has size {sizes[1]} along axis {at}; allowed: {sizes[0]}, as "
                f"axis {axis} of its data",
                REPAIR,
            )
