"""ONNX reader: integers of 4 and 2 bits are held in 8 bits, and their types are known by name.

QuantizeLinear clips to the limits of its zero point's type, and CastLike wraps around at the limits
of its second operand's type. Both get the type as an attribute here. Types are followed from
constants through operators that move values, and into and out of bodies.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: 4-bit and 2-bit types, which TVM cannot hold as constants -> a type that can hold their values
WIDENED = {
    TensorProto.INT4: np.dtype("int8"),
    TensorProto.UINT4: np.dtype("uint8"),
    getattr(TensorProto, "INT2", -1): np.dtype("int8"),
    getattr(TensorProto, "UINT2", -2): np.dtype("uint8"),
}

#: Operators whose result does not have the type of a narrow operand. All others move values, or
#: ONNX gives them no narrow operands.
CONVERTING = frozenset(
    [
        "Cast",
        "CastLike",
        "DequantizeLinear",
        "QuantizeLinear",
        "Shape",
        "Size",
        "If",
        "Loop",
        "Scan",
    ]
)

#: Operators with bodies -> number of the body's outputs that the node does not have, the first ones
BODY_OUTPUTS = {"If": 0, "Loop": 1, "Scan": 0}


def widen_tensor(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a narrow tensor with the same values in 8 bits."""
    values = numpy_helper.to_array(tensor).astype(WIDENED[tensor.data_type])
    return numpy_helper.from_array(values, tensor.name)


def keep_narrow(node: onnx.NodeProto, narrow: dict[str, int]) -> onnx.NodeProto:
    """Return the node with wide constants, and with the narrow types that decide its results.

    Args:
        narrow: Names of values whose type is narrow -> the type. The node's outputs are added.
    """
    kinds = [narrow.get(name, 0) for name in node.input]
    holds = any(part.t.data_type in WIDENED or part.HasField("g") for part in node.attribute)
    if not any(kinds) and not holds and node.op_type != "QuantizeLinear":
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if attribute.t.data_type in WIDENED:  # of Constant and ConstantOfShape
            kinds.append(attribute.t.data_type)
            attribute.t.CopyFrom(widen_tensor(attribute.t))
        if attribute.HasField("g"):
            keep_in_body(copy, attribute.g, narrow)
    if node.op_type == "QuantizeLinear":
        set_type(copy, kinds[2] if len(kinds) > 2 else 0, narrow)
    elif node.op_type == "CastLike" and len(kinds) > 1 and kinds[1]:
        cast = helper.make_node("Cast", node.input[:1], node.output, name=node.name, to=kinds[1])
        copy.CopyFrom(cast)
    elif node.op_type not in CONVERTING and any(kinds):
        narrow.update(dict.fromkeys(node.output, max(kinds)))
    return copy


def set_type(node: onnx.NodeProto, kind: int, narrow: dict[str, int]) -> None:
    """Give a QuantizeLinear the type of its zero point, in place. Its output has this type too."""
    given = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
    if kind and not given:
        node.attribute.append(helper.make_attribute("output_dtype", kind))
    if (found := next(iter(given), kind)) in WIDENED:
        narrow[node.output[0]] = found


def keep_in_body(node: onnx.NodeProto, body: onnx.GraphProto, narrow: dict[str, int]) -> None:
    """Do the same for the nodes of a body, in place. In ONNX its names differ from all others."""
    for info, name in zip(body.input, node.input, strict=False):
        if name in narrow:
            narrow[info.name] = narrow[name]
    for tensor in body.initializer:
        if tensor.data_type in WIDENED:
            narrow[tensor.name] = tensor.data_type
            tensor.CopyFrom(widen_tensor(tensor))
    nodes = [keep_narrow(each, narrow) for each in body.node]
    del body.node[:]
    body.node.extend(nodes)
    results = body.output[BODY_OUTPUTS.get(node.op_type, 0) :]
    for info, name in zip(results, node.output, strict=False):
        if info.name in narrow:
            narrow[name] = narrow[info.name]
