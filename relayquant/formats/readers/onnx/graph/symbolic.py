"""ONNX reader: computes with symbolic sizes while the model is read.

PyTorch writes `x.view(x.size(0), -1)` as Shape, Gather, Unsqueeze, Concat and Reshape. If x has a
symbolic size N, the values in between are integers and expressions of N. Relax holds a vector of
sizes as a shape, and a single size as an expression. Any other value becomes a run-time tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import TensorProto
from tvm import relax, tirx
from tvm.sym import Analyzer

from relayquant.formats.readers.onnx.graph.fold import evaluate, find_array
from relayquant.formats.readers.onnx.graph.inference import STANDARD
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.expressions import assume_sizes
from relayquant.ir.rewrite.graph import static_size

#: Largest number of elements of a value that is computed here.
MAX_ELEMENTS = 256

#: An element: an integer, or an expression of symbolic sizes.
Element = Any

#: Data movement operators -> the inputs whose elements they move. None: all of them. Their other
#: inputs say which elements go where.
DATA_MOVEMENT: Mapping[str, tuple[int, ...] | None] = {
    "Concat": None,
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "Identity": (0,),
    "Reshape": (0,),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}

#: Operators -> the inputs that may be sizes. All other inputs must be tensors.
TAKES_SIZES: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (3,),
    "Shape": (0,),
    "Slice": (1, 2, 3, 4),
}


# -- expressions of sizes --------------------------------------------------------------------------


def simplify(element: Element) -> Element:
    """Return the simplest form of an expression, an integer if it is constant."""
    if isinstance(element, int):
        return element
    found = _analyze(element).simplify(element)
    return found if (known := static_size(found)) is None else known


def find_bounds(element: Element) -> tuple[int, int]:
    """Return (least, largest) value, for sizes of at least 0."""
    if isinstance(element, int):
        return element, element
    bound = _analyze(element).const_int_bound(element)
    return bound.min_value, bound.max_value


def is_never_one(element: Element) -> bool:
    """Return whether a size differs from 1 in every run, such as 2 * n or n + 2."""
    if isinstance(element, int):
        return element != 1
    return bool(_analyze(element).can_prove(tirx.NE(element, tirx.const(1, "int64"))))


def _analyze(element: tirx.Expr) -> Analyzer:
    return assume_sizes(tirx.analysis.undefined_vars(element))


def larger(one: Element, other: Element) -> Element:
    """Return max(one, other)."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return simplify(tirx.max(one, other))


def smaller(one: Element, other: Element) -> Element:
    """Return min(one, other)."""
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return simplify(tirx.min(one, other))


def divide(one: Element, other: Element) -> Element:
    """Return one / other, truncated towards 0."""
    if isinstance(other, int) and other == 0:
        raise Refusal("it divides a size by 0; allowed: other divisors")
    if isinstance(one, int) and isinstance(other, int):
        return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    if min(find_bounds(one)[0], find_bounds(other)[0]) >= 0:
        return simplify(tirx.floordiv(one, other))
    return simplify(tirx.truncdiv(one, other))


def find_rest(one: Element, other: Element) -> Element:
    """Return one modulo other, with the sign of `other`."""
    if isinstance(other, int) and other == 0:
        raise Refusal("it divides a size by 0; allowed: other divisors")
    if isinstance(one, int) and isinstance(other, int):
        return one % other
    return simplify(tirx.floormod(one, other))


def compare(is_true: Callable[[Element], bool], is_false: Callable[[Element], bool]) -> Any:
    """Compare by the sign of one - other: True or False, None if it depends on the run."""

    def decide(one: Element, other: Element) -> bool | None:
        difference = simplify(one - other)
        return True if is_true(difference) else False if is_false(difference) else None

    return decide


def is_zero(element: Element) -> bool:
    """Return whether the value is 0 in every run."""
    return isinstance(element, int) and element == 0


def is_other(element: Element) -> bool:
    """Return whether the value is never 0."""
    low, high = find_bounds(element)
    return low > 0 or high < 0


IS_POSITIVE = lambda element: find_bounds(element)[0] > 0  # noqa: E731
IS_NEGATIVE = lambda element: find_bounds(element)[1] < 0  # noqa: E731
IS_AT_LEAST_0 = lambda element: find_bounds(element)[0] >= 0  # noqa: E731
IS_AT_MOST_0 = lambda element: find_bounds(element)[1] <= 0  # noqa: E731

#: Elementwise operators on one element per operand.
ELEMENTWISE: Mapping[str, Callable[..., Element]] = {
    "Add": lambda one, other: simplify(one + other),
    "Div": divide,
    "Equal": compare(is_zero, is_other),
    "Greater": compare(IS_POSITIVE, IS_AT_MOST_0),
    "GreaterOrEqual": compare(IS_AT_LEAST_0, IS_NEGATIVE),
    "Less": compare(IS_NEGATIVE, IS_AT_LEAST_0),
    "LessOrEqual": compare(IS_AT_MOST_0, IS_POSITIVE),
    "Max": larger,
    "Min": smaller,
    "Mod": find_rest,
    "Mul": lambda one, other: simplify(one * other),
    "Sub": lambda one, other: simplify(one - other),
}


# -- values ----------------------------------------------------------------------------------------


def is_sizes(value: Any) -> bool:
    """Return whether a value is sizes as Relax represents them, not a tensor."""
    return isinstance(value, relax.ShapeExpr) or tvm.ir.is_prim_expr(value)


def read_elements(value: Any) -> np.ndarray | None:
    """Return the elements of integers or sizes as an array of objects. None for any other value."""
    if isinstance(value, relax.ShapeExpr):
        return make_array([simplify(size) for size in map(_plain, value.values)])
    if tvm.ir.is_prim_expr(value):
        return make_array([_plain(value)]).reshape(())
    array = find_array(value)
    if array is None or array.dtype.kind not in "biu" or array.size > MAX_ELEMENTS:
        return None
    return make_array([int(item) for item in array.ravel()]).reshape(array.shape)


def make_array(elements: Sequence[Element]) -> np.ndarray:
    """Make a vector of objects."""
    array = np.empty(len(elements), object)
    for at, element in enumerate(elements):
        array[at] = element
    return array


def _plain(size: Element) -> Element:
    return size if (known := static_size(size)) is None else known


def write_elements(array: np.ndarray) -> relax.Expr | None:
    """Convert elements to a value: integers to a constant, sizes to Relax's form. None if Relax has
    no form for them.
    """
    items = list(array.ravel())
    if any(item is None for item in items):
        return None
    if items and all(isinstance(item, bool) for item in items):
        return relax.const(array.astype(bool), "bool")
    if all(isinstance(item, int) for item in items):
        return relax.const(array.astype("int64"), "int64")
    if array.ndim == 0:
        return items[0]
    return relax.ShapeExpr(items) if array.ndim == 1 else None


def emit_tensor(bb: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    """Emit sizes as an int64 run-time tensor."""
    if isinstance(value, relax.ShapeExpr):
        return bb.emit(relax.op.shape_to_tensor(value))
    tensor = bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
    return bb.emit(relax.op.squeeze(tensor, [0]))


def find_tensors(node: onnx.NodeProto, operands: Mapping[str, Any]) -> list[str]:
    """Return the inputs of a node that are sizes but must be tensors for its conversion."""
    taken = TAKES_SIZES.get(node.op_type, ()) if node.domain in STANDARD else ()
    return [
        name
        for at, name in enumerate(node.input)
        if name and is_sizes(operands[name]) and at not in taken
    ]


def fold_sizes(
    node: onnx.NodeProto, operands: Mapping[str, relax.Expr | None], opset: int
) -> list[relax.Expr] | None:
    """Return the outputs of a node on symbolic sizes. None if no input is sizes, or they are not
    computed here.

    Args:
        node: A node without graphs as attributes.
        operands: Its inputs by name.
        opset: Opset of the model, which defines the operator.
    """
    if node.domain not in STANDARD or not any(is_sizes(value) for value in operands.values()):
        return None
    arrays = {name: read_elements(value) for name, value in operands.items()}
    if any(array is None or array.size > MAX_ELEMENTS for array in arrays.values()):
        return None
    if node.op_type in DATA_MOVEMENT:
        results = move_elements(node, arrays, opset)  # pyright: ignore[reportArgumentType]
    else:
        found = calculate(node, [arrays[name] for name in node.input if name])  # pyright: ignore[reportArgumentType]
        results = None if found is None else [found]
    if results is None:
        return None
    values = [write_elements(array) for array in results]
    return None if any(value is None for value in values) else values  # pyright: ignore[reportReturnType]


def move_elements(
    node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], opset: int
) -> list[np.ndarray] | None:
    """Compute a data movement operator. The reference evaluator moves the indices of the
    elements.
    """
    kept = DATA_MOVEMENT[node.op_type]
    moved = {name for at, name in enumerate(node.input) if name and (kept is None or at in kept)}
    if moved & {name for at, name in enumerate(node.input) if kept is not None and at not in kept}:
        return None
    elements: list[Element] = []
    numbers: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name in moved:
            numbers[name] = np.arange(array.size).reshape(array.shape) + len(elements)
            elements.extend(array.ravel())
        elif all(isinstance(item, int) for item in array.ravel()):
            is_condition = node.op_type == "Where" and name == node.input[0]
            numbers[name] = array.astype(bool if is_condition else "int64")
        else:
            return None
    results = evaluate(node, numbers, opset)
    return [
        make_array([elements[int(number)] for number in result.ravel()]).reshape(result.shape)
        for result in results
    ]


def calculate(node: onnx.NodeProto, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """Compute an operator that does arithmetic on elements."""
    attributes = {each.name: each for each in node.attribute}
    if node.op_type == "Cast":
        return arrays[0] if attributes["to"].i == TensorProto.INT64 else None
    if node.op_type == "Neg":
        return _map(lambda one: simplify(0 - one), arrays[0])
    if node.op_type == "ReduceProd":
        keeps = "keepdims" not in attributes or bool(attributes["keepdims"].i)
        if arrays[0].ndim != 1 or len(arrays) > 1:
            return None
        product = functools.reduce(ELEMENTWISE["Mul"], arrays[0], 1)
        return make_array([product]).reshape([1] if keeps else [])
    apply = ELEMENTWISE.get(node.op_type)
    if apply is None or ("fmod" in attributes and attributes["fmod"].i):
        return None
    return functools.reduce(lambda one, other: _map(apply, one, other), arrays)


def _map(apply: Callable[..., Element], *arrays: np.ndarray) -> np.ndarray:
    """Apply a function to each element, broadcast as in numpy."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    columns = [list(np.broadcast_to(array, shape).ravel()) for array in arrays]
    return make_array([apply(*row) for row in zip(*columns, strict=True)]).reshape(shape)
