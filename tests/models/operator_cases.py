"""The table of operators: for each, the ONNX nodes that it is tried with and what becomes of it."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx_models import make_onnx

OPSET = 20
#: shape of the one input that all cases share
SHAPE = (2, 4, 6, 6)

rng = np.random.default_rng(0)


class Outcome(enum.Enum):
    """What becomes of an operator between two quantized ones."""

    QUANTIZED = "computes on integers"
    PASSES = "moves integers, whose parameters stay"
    MERGED = "part of the operator before or behind it"
    FLOAT = "stays in float"


@dataclass(frozen=True, eq=False)
class Case:
    """An operator: nodes from value `a` to value `b`, and what becomes of them.

    `reason` is part of what the ledger says where it stays in float.
    """

    name: str
    outcome: Outcome
    nodes: tuple[NodeProto, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def node(op: str, inputs: str = "a", outputs: str = "b", **attrs: Any) -> NodeProto:
    """A node; inputs and outputs are names between blanks, "-" for none."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attrs)


def floats(*shape: int) -> np.ndarray:
    """Normal random numbers, float32."""
    return rng.standard_normal(shape).astype("float32")


def unary(name: str, op: str, **attrs: Any) -> Case:
    """One node that becomes a table."""
    return Case(name, Outcome.QUANTIZED, (node(op, **attrs),))


PRODUCTS = (
    Case("matmul_constant", Outcome.QUANTIZED, (node("MatMul", "a w"),), {"w": floats(6, 5)}),
    Case(
        "matmul_computed",
        Outcome.QUANTIZED,
        (node("Transpose", "a", "t", perm=[0, 1, 3, 2]), node("MatMul", "a t")),
    ),
    Case(
        "gemm",
        Outcome.QUANTIZED,
        (node("Flatten", "a", "f"), node("Gemm", "f w z", transB=1)),
        {"w": floats(5, 144), "z": floats(5)},
    ),
    Case(
        "conv1d",
        Outcome.QUANTIZED,
        (node("Reshape", "a s", "q"), node("Conv", "q w z", pads=[1, 1])),
        {"s": [2, 4, 36], "w": floats(5, 4, 3), "z": floats(5)},
    ),
    Case(
        "conv2d_transpose",
        Outcome.QUANTIZED,
        (node("ConvTranspose", "a w z", strides=[2, 2]),),
        {"w": floats(4, 3, 2, 2), "z": floats(3)},
    ),
    Case(
        "conv2d_depthwise",
        Outcome.QUANTIZED,
        (node("Conv", "a w", group=4),),
        {"w": floats(4, 1, 3, 3)},
    ),
)

FUNCTIONS = (
    Case("gelu_exact", Outcome.QUANTIZED, (node("Gelu"),)),
    Case("gelu_tanh", Outcome.QUANTIZED, (node("Gelu", approximate="tanh"),)),
    unary("sigmoid", "Sigmoid"),
    unary("tanh", "Tanh"),
    unary("hardswish", "HardSwish"),
    Case("hardsigmoid", Outcome.MERGED, (node("HardSigmoid", alpha=0.2, beta=0.5),)),
    Case("relu", Outcome.MERGED, (node("Relu"),)),
    unary("leaky_relu", "LeakyRelu", alpha=0.1),
    Case("prelu_one_slope", Outcome.QUANTIZED, (node("PRelu", "a w"),), {"w": floats(1, 1, 1)}),
    Case(
        "prelu_channels",
        Outcome.QUANTIZED,
        (node("PRelu", "a w"),),
        {"w": floats(4, 1, 1)},
    ),
    unary("elu", "Elu"),
    unary("selu", "Selu"),
    unary("celu", "Celu", alpha=0.7),
    unary("softplus", "Softplus"),
    unary("mish", "Mish"),
    unary("exp", "Exp"),
    Case("sqrt", Outcome.QUANTIZED, (node("Relu", "a", "p"), node("Sqrt", "p"))),
    Case("log", Outcome.QUANTIZED, (node("Sigmoid", "a", "p"), node("Log", "p"))),
    unary("abs", "Abs"),
    unary("neg", "Neg"),
    unary("floor", "Floor"),
    unary("round", "Round"),
    unary("sign", "Sign"),
    unary("sin", "Sin"),
    unary("atan", "Atan"),
    unary("erf", "Erf"),
    Case("square", Outcome.QUANTIZED, (node("Mul", "a a"),)),
    Case("power", Outcome.QUANTIZED, (node("Pow", "a w"),), {"w": np.float32(2)}),
)

MOVES = (
    Case("gather", Outcome.PASSES, (node("Gather", "a i", axis=1),), {"i": [0, 2, 1]}),
    Case("gather_nd", Outcome.PASSES, (node("GatherND", "a i"),), {"i": [[0, 1], [1, 2]]}),
    Case(
        "gather_elements",
        Outcome.PASSES,
        (node("GatherElements", "a i", axis=1),),
        {"i": rng.integers(0, 4, SHAPE)},
    ),
    Case(
        "embedding",
        Outcome.FLOAT,
        (
            node("ArgMax", "a", "i", axis=3, keepdims=0),
            node("Gather", "w i"),
        ),
        {"w": floats(6, 5)},
        "is a constant, this pattern needs a computed value",
    ),
    Case(
        "split",
        Outcome.PASSES,
        (node("Split", "a", "p q", axis=1, num_outputs=2), node("Concat", "q p", axis=1)),
    ),
    Case("slice", Outcome.PASSES, (node("Slice", "a s e axes"),),
         {"s": [1], "e": [3], "axes": [1]}),
    Case(
        "slice_backwards",
        Outcome.PASSES,
        (node("Slice", "a s e axes t"),),
        {"s": [-1], "e": [-100], "axes": [2], "t": [-2]},
    ),
    Case(
        "concat",
        Outcome.QUANTIZED,
        (node("Sigmoid", "a", "p"), node("Concat", "a p", axis=1)),
    ),
    Case(
        "stack",
        Outcome.PASSES,
        (
            node("Unsqueeze", "a axes", "u"),
            node("Concat", "u u", "k", axis=1),
            node("Reshape", "k s"),
        ),
        {"axes": [1], "s": [2, 8, 6, 6]},
    ),
    Case("tile", Outcome.PASSES, (node("Tile", "a s"),), {"s": [1, 2, 1, 2]}),
    Case("pad_constant", Outcome.MERGED, (node("Pad", "a s"),), {"s": [0, 0, 1, 1] * 2}),
    Case(
        "pad_value",
        Outcome.PASSES,
        (node("Pad", "a s v"),),
        {"s": [0, 0, 1, 1] * 2, "v": np.float32(0.3)},
    ),
    *(
        Case(f"pad_{mode}", Outcome.PASSES, (node("Pad", "a s", mode=mode),),
             {"s": [0, 0, 1, 2] * 2})
        for mode in ("reflect", "edge", "wrap")
    ),
    Case("squeeze", Outcome.PASSES, (node("Slice", "a s e axes", "u"), node("Squeeze", "u axes")),
         {"s": [0], "e": [1], "axes": [-2]}),
    Case("unsqueeze", Outcome.PASSES, (node("Unsqueeze", "a axes"),), {"axes": [-1]}),
    Case("reshape", Outcome.PASSES, (node("Reshape", "a s"),), {"s": [2, 8, 3, 6]}),
    Case("transpose", Outcome.PASSES, (node("Transpose", perm=[0, 1, 3, 2]),)),
    Case("depth_to_space", Outcome.PASSES, (node("DepthToSpace", blocksize=2),)),
    Case("space_to_depth", Outcome.PASSES, (node("SpaceToDepth", blocksize=2),)),
    Case(
        "resize_nearest",
        Outcome.PASSES,
        (node("Resize", "a - s", mode="nearest"),),
        {"s": np.float32([1, 1, 2, 2])},
    ),
    Case(
        "resize_linear",
        Outcome.FLOAT,
        (node("Resize", "a - s", mode="linear"),),
        {"s": np.float32([1, 1, 2, 2])},
        "computes new values, which has no integer form",
    ),
)  # fmt: skip

REDUCTIONS = (
    Case("reduce_mean", Outcome.QUANTIZED, (node("ReduceMean", "a axes"),), {"axes": [2]}),
    Case(
        "reduce_sum",
        # On integers it would draw the spelled-out layer norms of real models after it, whose
        # variances and reciprocal roots do not fit 8 bits.
        Outcome.FLOAT,
        (node("ReduceSum", "a axes"),),
        {"axes": [2]},
        "no pattern for relax.sum",
    ),
    Case("reduce_max", Outcome.PASSES, (node("ReduceMax", "a axes"),), {"axes": [2]}),
    Case("reduce_min", Outcome.PASSES, (node("ReduceMin", "a axes"),), {"axes": [2]}),
    Case("global_average_pool", Outcome.QUANTIZED, (node("GlobalAveragePool"),)),
    Case("global_max_pool", Outcome.PASSES, (node("GlobalMaxPool"),)),
    Case("average_pool", Outcome.QUANTIZED, (node("AveragePool", kernel_shape=[2, 2]),)),
    Case("max_pool", Outcome.PASSES, (node("MaxPool", kernel_shape=[2, 2]),)),
    Case(
        "softmax", Outcome.FLOAT, (node("Softmax"),), {}, "no pattern for relax.nn.softmax"
    ),
    Case(
        "layer_norm",
        Outcome.FLOAT,
        (node("LayerNormalization", "a w z"),),
        {"w": floats(6), "z": floats(6)},
        "no pattern for relax.nn.layer_norm",
    ),
)  # fmt: skip

PAIRS = (
    *(
        Case(name, Outcome.QUANTIZED, (node("Sigmoid", "a", "p"), node(op, "a p")))
        for name, op in (("add", "Add"), ("subtract", "Sub"), ("multiply", "Mul"),
                         ("divide", "Div"), ("minimum", "Min"), ("maximum", "Max"))
    ),
    Case("maximum_scalar", Outcome.QUANTIZED, (node("Max", "a w"),), {"w": np.float32(0.1)}),
    Case(
        "minimum_channels",
        Outcome.FLOAT,
        (node("Min", "a w"),),
        {"w": floats(4, 1, 1)},
        "no pattern for relax.minimum",
    ),
    Case(
        "where",
        Outcome.FLOAT,
        (node("Where", "m a w"),),
        {"m": rng.random((6, 6)) > 0.5, "w": np.float32(-1)},
        "no pattern for relax.where",
    ),
    Case(
        "cast",
        Outcome.FLOAT,
        (node("Cast", "a", "d", to=TensorProto.DOUBLE), node("Cast", "d", to=TensorProto.FLOAT)),
        {},
        "no pattern for relax.astype",
    ),
)  # fmt: skip

FAMILIES: dict[str, tuple[Case, ...]] = {
    "products": PRODUCTS,
    "functions": FUNCTIONS,
    "moves": MOVES,
    "reductions": REDUCTIONS,
    "pairs": PAIRS,
}


def build_model(cases: tuple[Case, ...]) -> onnx.ModelProto:
    """A model with one branch for each case: x -> convolution -> the case's nodes -> a convolution
    or product. Values of a branch are called after their case: "tile.b".
    """
    graph = onnx.GraphProto(name="cases")
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE))
    branches = [_build_branch(case) for case in cases]
    for branch in branches:
        graph.node.extend(branch.node)
        graph.initializer.extend(branch.initializer)
        graph.output.extend(branch.output)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)


def _build_branch(case: Case) -> onnx.GraphProto:
    arrays = {name: np.asarray(value) for name, value in case.constants.items()}
    # Weights of a case do not depend on what was built before it.
    own = np.random.default_rng(zlib.crc32(case.name.encode()))
    arrays["before"] = own.standard_normal((4, 4, 1, 1)).astype("float32")
    nodes = [node("Conv", "x before", "a"), *case.nodes]
    shape = _infer_shape(nodes, arrays)
    is_map = len(shape) == 4
    sizes = (3, shape[1], 1, 1) if is_map else (shape[-1], 3)
    arrays["behind"] = own.standard_normal(sizes).astype("float32")
    nodes.append(node("Conv" if is_map else "MatMul", "b behind", "y"))
    graph = onnx.GraphProto()
    for original in nodes:
        named = onnx.NodeProto()
        named.CopyFrom(original)
        for names in (named.input, named.output):
            names[:] = [name if name in ("x", "") else f"{case.name}.{name}" for name in names]
        named.name = named.output[0]
        graph.node.append(named)
    graph.initializer.extend(
        numpy_helper.from_array(value, f"{case.name}.{name}") for name, value in arrays.items()
    )
    graph.output.append(helper.make_tensor_value_info(f"{case.name}.y", TensorProto.FLOAT, None))
    return graph


def _infer_shape(nodes: list[NodeProto], arrays: Mapping[str, np.ndarray]) -> list[int]:
    """Shape of value b."""
    model = make_onnx(nodes, {"x": SHAPE}, {"b": None}, arrays, OPSET)
    inferred = onnx.shape_inference.infer_shapes(model).graph.output[0]
    return [dim.dim_value for dim in inferred.type.tensor_type.shape.dim]
