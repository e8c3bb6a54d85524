"""ONNX reader, on the graph: operators on integers -> dequantize, float operator, quantize, the
form of all other quantized models.

QLinearConv(x, s, z, w, ...) -> QuantizeLinear(Conv(DequantizeLinear(x), DequantizeLinear(w), ...)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.graph.narrow import WIDENED, keep_narrow, widen_tensor
from relayquant.formats.readers.onnx.graph.packed import unpack_bnb4, unpack_last
from relayquant.formats.readers.refusal import NotConstant, Refusal, describe_failure
from relayquant.ir.rewrite.function import find_free_name

#: types of 8 bits, of which an operator's operands and result have the same one
BYTES = {TensorProto.INT8: np.dtype("int8"), TensorProto.UINT8: np.dtype("uint8")}

#: Before this opset, Softmax treats everything from its axis on as one row.
FIRST_SOFTMAX_OF_ONE_AXIS = 13

#: Domain of the DequantizeLinear nodes written here. ONNX's own has an axis from opset 13 on only.
MICROSOFT = "com.microsoft"

#: a tensor with its parameters, in the order of QLinear operators
Triple = Sequence[str]


class GraphRewriter:
    """Collects the nodes and constants of the new graph.

    Attributes:
        constants: Constant tensors by name, both the model's and added ones.
        narrow: Names of values that have fewer than 8 bits -> their original type.
        taken: Names of all tensors.
        opset: Opset of the model.
        types: Tensors whose element type the graph declares, or that are quantized here.
        nodes: In topological order.
    """

    def __init__(self, constants: dict[str, onnx.TensorProto], taken: set[str], opset: int) -> None:
        self.constants, self.taken, self.opset = constants, taken, opset
        self.narrow: dict[str, int] = {}
        self.types: dict[str, int] = {}
        self.nodes: list[onnx.NodeProto] = []

    def unique_name(self, base: str) -> str:
        """Return `base`, or `base` with a number appended if it is taken. The name is taken from
        now on.
        """
        name = find_free_name(base, self.taken)
        self.taken.add(name)
        return name

    def add(self, op: str, inputs: Sequence[str], output: str, node: str, **attrs: object) -> str:
        """Add a node of operator `op` that computes `output`. `node` is its name. Returns
        `output`.
        """
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=node, **attrs))
        return output

    def constant(self, array: np.ndarray, base: str) -> str:
        """Add a constant tensor and return its name."""
        name = self.unique_name(base)
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def dequantize(self, triple: Triple, node: onnx.NodeProto, axis: int = 0) -> str:
        """Dequantize (tensor, scale, zero point)."""
        data, scale, zero_point = triple
        inputs = [data, scale, zero_point] if zero_point else [data, scale]
        output = self.unique_name(f"{data}.dq")
        return self.add("DequantizeLinear", inputs, output, node.name, axis=axis, domain=MICROSOFT)

    def find_type(self, tensor: str) -> int:
        """Return the element type of a constant or a declared tensor, 0 if it is not known."""
        found = self.constants.get(tensor)
        return self.types.get(tensor, 0) if found is None else found.data_type

    def finish(
        self, node: onnx.NodeProto, scale: str, zero_point: str, real: str, like: Triple = ()
    ) -> None:
        """Quantize the real values to the output of `node`, without a zero point to the type of
        the operand `like`, whose zero point has its type.
        """
        held = next(
            (found for name in reversed(like) if (found := self.find_type(name)) in BYTES), 0
        )
        if not zero_point and held:
            zero_point = self.constant(np.zeros((), BYTES[held]), f"{node.output[0]}.zero_point")
        self.types[node.output[0]] = self.find_type(zero_point)
        inputs = [real, scale, zero_point] if zero_point else [real, scale]
        self.add("QuantizeLinear", inputs, node.output[0], node.name)

    def rank(self, tensor: str) -> int | None:
        """Return the rank of a constant."""
        found = self.constants.get(tensor)
        return len(found.dims) if found is not None else None


def rewrite_integer_nodes(
    graph: onnx.GraphProto, opset: int
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return (nodes, initializers) of a graph without operators on quantized operands.

    Raises:
        ValueError: a node lacks inputs. Names the node.
    """
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken.update(info.name for info in graph.input)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    rewriter = GraphRewriter(constants, taken, opset)
    for name, tensor in constants.items():
        if tensor.data_type in WIDENED:
            rewriter.narrow[name], constants[name] = tensor.data_type, widen_tensor(tensor)
    for info in (*graph.input, *graph.value_info):
        rewriter.types[info.name] = info.type.tensor_type.elem_type
    for node in graph.node:
        rewrite = REWRITES.get((node.domain, node.op_type))
        if rewrite is None:
            rewriter.nodes.append(keep_narrow(node, rewriter.narrow))
            continue
        try:
            rewrite(rewriter, node, attributes(node))
        except (IndexError, KeyError, Refusal) as error:
            cause = error if isinstance(error, Refusal) else lack_inputs(node)
            raise ValueError(
                f"node {name_node(node)!r} (operator {node.op_type}) cannot be converted: "
                f"{describe_failure(cause, {})}"
            ) from error
    return rewriter.nodes, list(rewriter.constants.values())


def name_node(node: onnx.NodeProto) -> str:
    """Return the node's name. ONNX does not require one, so a nameless node gets the name of its
    first output.
    """
    return node.name or next((name for name in node.output if name), "")


def lack_inputs(node: onnx.NodeProto) -> Refusal:
    """Return the refusal of a node whose inputs or attributes are not all there."""
    return Refusal(
        f"it has {format_count(len(node.input), 'input')} and "
        f"{format_count(len(node.attribute), 'attribute')}; "
        "required: the scale and zero point of each operand, and those of the result",
        f"Give those of a {node.op_type}",
    )


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    """Return the attributes of a node as Python values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


# -- operators with parameters for each operand ----------------------------------------------------


Rewrite = Callable[[GraphRewriter, onnx.NodeProto, dict[str, object]], None]


def operands(node: onnx.NodeProto, count: int, first: int = 0) -> Iterator[Triple]:
    """Return `count` operands with their parameters, starting at input `first`."""
    for at in range(first, first + 3 * count, 3):
        yield [node.input[at], node.input[at + 1], node.input[at + 2]]


def rewrite_conv(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite QLinearConv(x, w, y, bias). The bias is int32 with scale x_scale * w_scale and zero
    point 0.
    """
    data, weight = operands(node, 2)
    inputs = [rewriter.dequantize(data, node), rewriter.dequantize(weight, node)]
    if len(node.input) > 8 and node.input[8]:
        inputs.append(dequantize_bias(rewriter, node, node.input[8], data[1], weight[1]))
    real = rewriter.unique_name(f"{node.output[0]}.real")
    rewriter.add("Conv", inputs, real, node.name, **attrs)
    rewriter.finish(node, node.input[6], node.input[7], real)


def dequantize_bias(
    rewriter: GraphRewriter,
    node: onnx.NodeProto,
    bias: str,
    data_scale: str,
    weight_scale: str,
    alpha: float = 1.0,
) -> str:
    """Dequantize an int32 bias, whose scale is the accumulator's, times alpha."""
    scales = [rewriter.constants.get(name) for name in (data_scale, weight_scale)]
    if any(scale is None for scale in scales):
        product = rewriter.unique_name(f"{bias}.scale")
        rewriter.add("Mul", [data_scale, weight_scale], product, node.name)
        return rewriter.dequantize([bias, product, ""], node)
    product = np.multiply(*(numpy_helper.to_array(scale) for scale in scales))  # pyright: ignore[reportArgumentType]
    scale = rewriter.constant((product * alpha).astype("float32"), f"{bias}.scale")
    return rewriter.dequantize([bias, scale, ""], node)


def rewrite_matmul(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite QLinearMatMul(a, b, y). A per-column scale of a weight is along its last axis."""
    left, right = operands(node, 2)
    axis = (rewriter.rank(right[0]) or 2) - 1
    inputs = [rewriter.dequantize(left, node), rewriter.dequantize(right, node, axis)]
    real = rewriter.add("MatMul", inputs, rewriter.unique_name(f"{node.output[0]}.real"), node.name)
    rewriter.finish(node, node.input[6], node.input[7], real)


def rewrite_gemm(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite com.microsoft.QGemm(a, b, c, y). Without y_zero_point the result is float: the sum
    divided by y_scale, or the sum.
    """
    left, right = operands(node, 2)
    axis = 0 if attrs.get("transB", 0) else 1
    inputs = [rewriter.dequantize(left, node), rewriter.dequantize(right, node, axis)]
    if len(node.input) > 6 and node.input[6]:
        alpha = float(attrs.get("alpha", 1.0))  # alpha also multiplies the bias, as in ONNX Runtime
        inputs.append(dequantize_bias(rewriter, node, node.input[6], left[1], right[1], alpha))
    scale, zero_point = (*node.input[7:], "", "")[:2]
    real = rewriter.unique_name(f"{node.output[0]}.real") if scale else node.output[0]
    rewriter.add("Gemm", inputs, real, node.name, **attrs)
    if zero_point:
        rewriter.finish(node, scale, zero_point, real)
    elif scale:
        rewriter.add("Div", [real, scale], node.output[0], node.name)


def rewrite_as(op: str, count: int = 1) -> Rewrite:
    """Rewrite an operator with `count` operands and one result to the float operator `op` with the
    same attributes.
    """

    def rewrite(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
        inputs = [rewriter.dequantize(triple, node) for triple in operands(node, count)]
        if attrs.pop("channels_last", 0):
            raise Refusal("its attribute channels_last is 1; supported: 0")
        real = rewriter.unique_name(f"{node.output[0]}.real")
        rewriter.add(op, inputs, real, node.name, **attrs)
        scale, zero_point = node.input[3 * count], (*node.input[3 * count + 1 :], "")[0]
        rewriter.finish(node, scale, zero_point, real, [node.input[0], node.input[2]])

    return rewrite


def rewrite_concat(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite com.microsoft.QLinearConcat(y_scale, y_zero_point, x1, s1, z1, ...)."""
    count, rest = divmod(len(node.input) - 2, 3)
    if rest or count < 1:
        raise KeyError("parameters of an operand")
    inputs = [rewriter.dequantize(triple, node) for triple in operands(node, count, first=2)]
    real = rewriter.unique_name(f"{node.output[0]}.real")
    rewriter.add("Concat", inputs, real, node.name, **attrs)
    rewriter.finish(node, node.input[0], node.input[1], real)


def rewrite_softmax(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite com.microsoft.QLinearSoftmax(x, y).

    Attribute opset selects the version of Softmax. Before 13 it is the Softmax of Flatten(x, axis),
    and it is written this way if the model's own Softmax is a later one.
    """
    flattens = int(attrs.pop("opset")) < FIRST_SOFTMAX_OF_ONE_AXIS
    if flattens == (rewriter.opset < FIRST_SOFTMAX_OF_ONE_AXIS):
        rewrite_as("Softmax")(rewriter, node, {"axis": -1, **attrs})
        return
    if not flattens:
        raise Refusal(
            f"its attribute opset is 13 in a model of opset {rewriter.opset}; supported: 13 and "
            "later",
            "Convert the model to opset 13: onnx.version_converter.convert_version(model, 13)",
        )
    (data,) = operands(node, 1)
    inputs = [rewriter.dequantize(data, node)]
    base = node.output[0]
    shape = rewriter.add("Shape", inputs, rewriter.unique_name(f"{base}.shape"), node.name)
    axis = attrs.get("axis", -1)
    rows = rewriter.unique_name(f"{base}.rows")
    rewriter.add("Flatten", inputs, rows, node.name, axis=axis)
    flat = rewriter.add("Softmax", [rows], rewriter.unique_name(f"{base}.flat"), node.name, axis=1)
    real = rewriter.unique_name(f"{base}.real")
    rewriter.add("Reshape", [flat, shape], real, node.name)
    rewriter.finish(node, node.input[3], (*node.input[4:], "")[0], real, [data[0], data[2]])


# -- weights that lie packed -----------------------------------------------------------------------


def find_constant(rewriter: GraphRewriter, node: onnx.NodeProto, at: int) -> np.ndarray | None:
    """Return an operand that is a constant. None for one that is left out.

    Raises:
        NotConstant: it is computed at run time.
    """
    name = node.input[at] if at < len(node.input) else ""
    if not name:
        return None
    tensor = rewriter.constants.get(name)
    if tensor is None:
        raise NotConstant(f"input {name!r}")
    return numpy_helper.to_array(tensor)


def rewrite_gather_blocks(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite com.microsoft.GatherBlockQuantized(data, indices, scales, zeros) to DequantizeLinear
    with blocks, and Gather.

    uint8 data holds codes of `bits` along its last axis. Their default zero point is the middle.
    """
    select_attributes(attrs, ("bits", "block_size", "gather_axis", "quantize_axis"))
    data, scales, zeros = (find_constant(rewriter, node, at) for at in (0, 2, 3))
    if data is None or scales is None or not data.ndim:
        raise KeyError("data or scales")
    bits, size = attrs.get("bits", 4), attrs.get("block_size", 128)
    axis = attrs.get("quantize_axis", 1)
    names = [node.input[0], node.input[2], (*node.input[3:], "")[0]]
    is_packed = rewriter.constants[names[0]].data_type == TensorProto.UINT8
    if is_packed and names[0] not in rewriter.narrow:
        if bits not in (2, 4, 8) or axis % data.ndim != data.ndim - 1:
            raise Refusal(
                f"its uint8 data has bits={bits} and quantize_axis={axis}; supported: 2, 4 or 8 "
                "bits, blocks along the last axis"
            )
        codes = unpack_last(data, bits, data.shape[-1] * 8 // bits)
        middle = np.full(scales.shape, 1 << (bits - 1), "uint8")
        zeros = middle if zeros is None else unpack_last(zeros, bits, scales.shape[-1])
        names[0] = rewriter.constant(codes, f"{names[0]}.codes")
        names[2] = rewriter.constant(zeros, f"{names[0]}.zero_point")
    real = rewriter.unique_name(f"{node.input[0]}.dq")
    kept = [name for name in names if name]
    rewriter.add(
        "DequantizeLinear", kept, real, node.name, axis=axis, block_size=size, domain=MICROSOFT
    )
    gathered, axis = [real, node.input[1]], attrs.get("gather_axis", 0)
    rewriter.add("Gather", gathered, node.output[0], node.name, axis=axis)


def rewrite_bnb4(rewriter: GraphRewriter, node: onnx.NodeProto, attrs: dict) -> None:
    """Rewrite com.microsoft.MatMulBnb4(x, codes, largest) to MatMul with a float32 constant.

    No scale and zero point can represent the values of its codes.
    """
    select_attributes(
        attrs, ("K", "N", "block_size", "quant_type", "training_mode", "transB"), {"transB": 1}
    )
    codes, largest = (find_constant(rewriter, node, at) for at in (1, 2))
    if codes is None or largest is None:
        raise KeyError("weight or absmax")
    form = attrs["N"], attrs["K"], attrs["block_size"]
    weight = unpack_bnb4(codes, largest, attrs["quant_type"], form)
    name = rewriter.constant(np.ascontiguousarray(weight.T), f"{node.input[1]}.real")
    rewriter.add("MatMul", [node.input[0], name], node.output[0], node.name)


def select_attributes(
    attrs: Mapping[str, object], known: Sequence[str], fixed: Mapping[str, object] | None = None
) -> None:
    """Raise Refusal for an unknown attribute, or a value that is not supported."""
    for name, value in attrs.items():
        if name not in known:
            raise Refusal(f"its attribute {name} is {value!r}; supported: none of that name")
        wanted = (fixed or {}).get(name, value)
        if value != wanted:
            raise Refusal(f"its attribute {name} is {value!r}; supported: {wanted!r}")


#: (domain, operator) -> its replacement
REWRITES: dict[tuple[str, str], Rewrite] = {
    ("", "QLinearConv"): rewrite_conv,
    ("", "QLinearMatMul"): rewrite_matmul,
    ("com.microsoft", "GatherBlockQuantized"): rewrite_gather_blocks,
    ("com.microsoft", "MatMulBnb4"): rewrite_bnb4,
    ("com.microsoft", "QGemm"): rewrite_gemm,
    ("com.microsoft", "QLinearAdd"): rewrite_as("Add", 2),
    ("com.microsoft", "QLinearMul"): rewrite_as("Mul", 2),
    ("com.microsoft", "QLinearAveragePool"): rewrite_as("AveragePool"),
    ("com.microsoft", "QLinearGlobalAveragePool"): rewrite_as("GlobalAveragePool"),
    ("com.microsoft", "QLinearSigmoid"): rewrite_as("Sigmoid"),
    ("com.microsoft", "QLinearLeakyRelu"): rewrite_as("LeakyRelu"),
    ("com.microsoft", "QLinearConcat"): rewrite_concat,
    ("com.microsoft", "QLinearSoftmax"): rewrite_softmax,
}
