"""ONNX reader: what the graph says of symbolic sizes is settled before any node is converted.

A converter that knows no sizes writes input (T, K) in front of a product with weights (266, 25).
Only K = 266 can run. Kernels, and the shapes of what follows, need the number. It also writes
Squeeze without axes where T stays, as the declared result says.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper
from onnx.shape_inference import InferenceError

from relayquant.formats.readers.onnx.graph.file import fix_shape
from relayquant.formats.readers.onnx.graph.inference import MAX_READ, STANDARD
from relayquant.ir.rewrite.function import find_free_name

#: A size is an int, or the name of a symbolic one; None if it is not known.
Size = int | str | None
Shape = Sequence[Size]
#: Attributes of a node, shapes of its operands (() if not known) -> pairs of sizes that must be
#: equal.
Rule = Callable[[Mapping[str, Any], Sequence[Shape]], Iterable[tuple[Size, Size]]]


def match_matmul(attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[Size, Size]]:
    """(..., M, K) x (..., K, N), or a vector of K."""
    x, w = shapes[:2]
    return [(x[-1], w[max(len(w) - 2, 0)])]


def match_gemm(attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[Size, Size]]:
    """(M, K) x (K, N), each as it is or transposed."""
    x, w = shapes[:2]
    return [(x[0 if attrs.get("transA") else 1], w[1 if attrs.get("transB") else 0])]


def match_conv(attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[Size, Size]]:
    """(N, C, ...) and weights (outputs, C / groups, ...)."""
    x, w = shapes[:2]
    return [(x[1], w[1] * attrs.get("group", 1) if isinstance(w[1], int) else None)]


def match_channels(attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[Size, Size]]:
    """(N, C, ...) and weights or scales (C, ...)."""
    return [(shapes[0][1], shapes[1][0])]


def match_recurrent(attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[Size, Size]]:
    """(T, N, inputs), weights (directions, gates * hidden, inputs) and states (directions, N,
    hidden), which are operands 5 and 6.
    """
    x, w = shapes[:2]
    if attrs.get("layout"):
        return [(x[2], w[2])]
    return [(x[2], w[2]), *((x[1], state[1]) for state in shapes[5:7] if len(state) == 3)]


def match_concat(attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[Size, Size]]:
    """Operands have equal sizes, except along the axis."""
    first, *others = [shape for shape in shapes if shape]
    axis = attrs.get("axis")
    if not isinstance(axis, int):
        return []  # The node is invalid. Its conversion says so.
    axis %= len(first)
    return [
        pair
        for shape in others
        for at, pair in enumerate(zip(first, shape, strict=False))
        if at != axis
    ]


#: Operator -> (least rank of its first two operands, its rule).
RULES: Mapping[str, tuple[tuple[int, int], Rule]] = {
    "MatMul": ((1, 1), match_matmul),
    "Gemm": ((2, 2), match_gemm),
    "Conv": ((3, 3), match_conv),
    "ConvTranspose": ((3, 3), match_channels),
    "LSTM": ((3, 3), match_recurrent),
    "GRU": ((3, 3), match_recurrent),
    "RNN": ((3, 3), match_recurrent),
    "BatchNormalization": ((2, 1), match_channels),
    "InstanceNormalization": ((3, 1), match_channels),
    "Concat": ((1, 1), match_concat),
}


def fix_sizes(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto],
    inputs: list[onnx.ValueInfoProto],
    opset: int,
) -> list[onnx.ValueInfoProto]:
    """Return the inputs with the sizes that operators fix. Two names of one size become one.

    Args:
        nodes: The graph's nodes, in order.
        weights: Its constants.
        inputs: Its other inputs. Each size is a number or has a name. Not changed.
        opset: Opset of the standard operators.

    A size that two operators fix differently stays symbolic: the conversion names the second one.
    """
    while sizes := find_fixed(nodes, weights, inputs, opset):
        inputs = [
            fix_shape(info, [sizes.get(str(size), size) for size in read_shape(info) or ()])
            for info in inputs
        ]
    return inputs


def name_squeezed_axes(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto],
    inputs: Sequence[onnx.ValueInfoProto],
    declared: Iterable[onnx.ValueInfoProto],
    opset: int,
) -> list[onnx.NodeProto]:
    """Return the nodes, with axes for each Squeeze without axes whose operand has symbolic sizes
    and whose declared result has one size less for each size of 1. None of the symbolic sizes goes.

    Args:
        nodes: The graph's nodes, in order. Not changed.
        weights: Its constants.
        inputs: Its other inputs.
        declared: Values with declared shapes.
        opset: Opset of the standard operators.
    """
    results = {info.name: shape for info in declared if (shape := read_shape(info)) is not None}
    bare = {
        node.output[0]: node.input[0]
        for node in nodes
        if is_bare_squeeze(node) and node.output[0] in results
    }
    if not bare:
        return [*nodes]
    shapes = infer_shapes(nodes, weights, inputs, opset)
    taken = {name for node in nodes for name in (*node.input, *node.output)}
    named: list[onnx.NodeProto] = []
    for node in nodes:
        result = node.output[0] if node.output else ""
        shape = shapes.get(bare.get(result, "")) or ()
        axes = [axis for axis, size in enumerate(shape) if size == 1]
        is_symbolic = any(not isinstance(size, int) for size in shape)
        if is_symbolic and len(results[result]) == len(shape) - len(axes):
            named += make_squeeze(node, axes, opset, find_free_name(f"{result}.axes", taken))
        else:
            named.append(node)
    return named


def is_bare_squeeze(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Squeeze that does not say its axes."""
    is_squeeze = node.op_type == "Squeeze" and node.domain in STANDARD
    return is_squeeze and not any(node.input[1:]) and not node.attribute


def make_squeeze(
    node: onnx.NodeProto, axes: Sequence[int], opset: int, name: str
) -> list[onnx.NodeProto]:
    """Make the Squeeze with axes: an attribute before opset 13, then a constant of this name."""
    if opset < 13:
        return [helper.make_node("Squeeze", node.input, node.output, node.name, axes=axes)]
    constant = helper.make_node("Constant", [], [name], f"{node.name}.axes", value_ints=axes)
    return [constant, helper.make_node("Squeeze", [node.input[0], name], node.output, node.name)]


def find_fixed(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto],
    inputs: Sequence[onnx.ValueInfoProto],
    opset: int,
) -> Mapping[str, int | str]:
    """Find symbolic sizes of the inputs that an operator fixes: name -> size. Those that must equal
    a size of another name, name -> the first such name, if none is fixed.
    """
    sizes = [size for info in inputs for size in read_shape(info) or () if isinstance(size, str)]
    free = {name: at for at, name in reversed([*enumerate(sizes)])}  # where it is used first
    ruled = [node for node in nodes if node.op_type in RULES and node.domain in STANDARD]
    if not (free and ruled):
        return {}
    shapes = infer_shapes(nodes, weights, inputs, opset)
    fixed: dict[str, set[int]] = {}
    renamed: dict[str, str] = {}
    for node in ruled:
        ranks, rule = RULES[node.op_type]
        operands = [shapes.get(name) or () for name in node.input]
        lengths = [len(shape) for shape in operands[: len(ranks)]]
        if len(lengths) < len(ranks) or any(map(operator.lt, lengths, ranks)):
            continue
        attrs = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        for pair in rule(attrs, operands):
            for name, size in (pair, pair[::-1]):
                if name in free and isinstance(size, int):
                    fixed.setdefault(str(name), set()).add(size)
                elif name in free and size in free and free[name] > free[size]:
                    renamed[str(name)] = str(size)
    return {name: min(sizes) for name, sizes in fixed.items() if len(sizes) == 1} or renamed


def infer_shapes(
    nodes: Iterable[onnx.NodeProto],
    weights: Iterable[onnx.TensorProto],
    inputs: Iterable[onnx.ValueInfoProto],
    opset: int,
) -> dict[str, Shape | None]:
    """Infer the shapes of all values with ONNX, as far as it knows them. Weights are not read,
    only small ones, which are sizes and axes.
    """
    weights = [*weights]
    known = {
        weight.name: helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in weights
    }
    small = [weight for weight in weights if math.prod(weight.dims) <= MAX_READ]
    graph = helper.make_graph(nodes, "sizes", [*inputs, *known.values()], [], small)
    # ONNX infers no shape at all if a domain has no version, even one whose operators it lacks.
    others = {node.domain for node in graph.node} - {*STANDARD}
    versions = {"": min(opset, onnx.defs.onnx_opset_version()), **dict.fromkeys(others, 1)}
    imports = [helper.make_opsetid(domain, number) for domain, number in versions.items()]
    model = helper.make_model(graph, opset_imports=imports)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except InferenceError:
        return {}  # A node is invalid. Its conversion says which, and why.
    return {info.name: read_shape(info) for info in (*inferred.input, *inferred.value_info)}


def read_shape(info: onnx.ValueInfoProto) -> Shape | None:
    """Return the shape of a value as the file gives it. None if it does not."""
    if not info.type.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in info.type.tensor_type.shape.dim
    ]
