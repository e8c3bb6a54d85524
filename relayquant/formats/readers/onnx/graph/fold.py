"""ONNX reader: computes nodes with small constant operands while the model is read.

Exporters write the size of a reshape as a computation (Shape, Gather, Mul, Concat). It has a value
only once the inputs have sizes, and the conversion of the reshape needs this value. The reference
evaluator of the `onnx` package computes it, for the model's opset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import tvm
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tvm import relax, tirx

from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import constant_value

#: Largest operand and largest result that is computed here, in elements: sizes, indices and small
#: tables. Weights stay operators of the module, so they keep their names until `prepare` computes
#: them.
MAX_FOLDED = 4096

#: Operators that move, select or reduce. They give at most as many elements as the operands have.
MOVES = """
    Concat Flatten Identity ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Reshape Shape Size
    Slice Split Squeeze Transpose Unsqueeze
"""

ELEMENTWISE = """
    Abs Add And Cast Ceil Div Equal Exp Floor Greater GreaterOrEqual Less LessOrEqual Log Max Min
    Mod Mul Neg Not Or Pow Reciprocal Sign Sqrt Sub Where Xor
"""

#: Operators that are computed here -> a bound of the number of elements of the result, given the
#: operands. QuantizeLinear and DequantizeLinear are missing, because quantized values must stay
#: quantized.
FOLDED: dict[str, Callable[..., float]] = {
    **dict.fromkeys(MOVES.split(), lambda *arrays: sum(array.size for array in arrays)),
    **dict.fromkeys(
        ELEMENTWISE.split(),
        lambda *arrays: math.prod(np.broadcast_shapes(*(array.shape for array in arrays))),
    ),
    "Gather": lambda data, indices: data.size * indices.size,
    "NonZero": lambda data: data.size * max(1, data.ndim),
    "Expand": lambda data, shape: math.prod(max(1, int(n)) for n in shape.ravel()) * data.size,
    "Tile": lambda data, repeats: math.prod(int(count) for count in repeats.ravel()) * data.size,
}


def fold_node(
    node: onnx.NodeProto, operands: Mapping[str, relax.Expr | None], opset: int
) -> list[relax.Expr] | None:
    """Return the outputs of a node as constants. None if the operator is not in `FOLDED`, an
    operand is not constant, or an operand or the result has more than `MAX_FOLDED` elements.

    Args:
        node: A node without graphs as attributes.
        operands: Its inputs by name.
        opset: Opset of the model, which defines the operator.
    """
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Constant":
        return fold_constant(node, opset)
    measure = FOLDED.get(node.op_type)
    if measure is None or not node.input or not node.input[0]:
        return None
    arrays = {name: find_array(operands[name]) for name in node.input if name}
    known = [array for array in arrays.values() if array is not None]
    if len(known) < len(arrays) or any(array.size > MAX_FOLDED for array in known):
        return None
    try:
        if measure(*(arrays[name] for name in node.input if name)) > MAX_FOLDED:
            return None
        results = evaluate(node, arrays, opset)  # pyright: ignore[reportArgumentType]
    except Exception:
        # The operands do not fit. The conversion of the node comes next and reports this with the
        # node's name.
        return None
    if any(array.dtype.kind not in "biuf" for array in results):
        return None
    return [relax.const(array, str(array.dtype)) for array in results]


def fold_constant(node: onnx.NodeProto, opset: int) -> list[relax.Expr] | None:
    """Convert a Constant with an attribute of numbers. None for a tensor, which TVM's frontend
    reads.

    Raises:
        Refusal: its attribute holds no numbers.
    """
    (name,) = [attribute.name for attribute in node.attribute] or [""]
    if name == "value":
        return None
    if name not in ("value_int", "value_ints", "value_float", "value_floats"):
        raise Refusal(f"its attribute is {name!r}; supported: value, value_int(s), value_float(s)")
    (array,) = evaluate(node, {}, opset)
    return [relax.const(array, str(array.dtype))]


def evaluate(
    node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], opset: int
) -> list[np.ndarray]:
    """Compute the outputs of a node with the reference evaluator."""
    infos = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in arrays.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    with np.errstate(all="ignore"):
        return [np.asarray(value) for value in ReferenceEvaluator(model).run(None, dict(arrays))]


def find_array(value: relax.Expr | None) -> np.ndarray | None:
    """Return the array of an operand that is a constant, or sizes that are all known."""
    if isinstance(value, tirx.IntImm):
        return np.array(int(value), "int64")
    if isinstance(value, relax.ShapeExpr):
        sizes = list(value.values)
        is_known = all(isinstance(size, tirx.IntImm) for size in sizes)
        return np.array([int(size) for size in sizes], "int64") if is_known else None
    return constant_value(value) if isinstance(value, tvm.ir.GenericConst) else None


def settle_sizes(value: relax.Expr) -> relax.Expr:
    """Convert known sizes, ShapeExpr (2, 3) or size 3 as in TVM's frontend, to an int64 constant.
    Other values are unchanged.
    """
    is_size = isinstance(value, tirx.IntImm | relax.ShapeExpr)
    array = find_array(value) if is_size else None
    return value if array is None else relax.const(array, "int64")
