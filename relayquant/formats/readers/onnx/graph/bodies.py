"""ONNX reader: replaces operators by the function body that ONNX defines them with.

Used for operators that neither TVM nor relayquant converts (Attention, RotaryEmbedding, Swish, the
losses). The body is in the operator's schema. A body that depends on sizes, types and attributes
(Attention) is built for each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
import onnx.inliner
from onnx import helper
from tvm import relax

from relayquant.formats.readers.onnx.graph.inference import SizeNames, describe_type, find_schema
from relayquant.formats.readers.refusal import Refusal

#: Domain of a body while it is inlined. ONNX allows no function with the name of a standard
#: operator.
DOMAIN = "relayquant.body"

#: First release of the onnx package with a correct body of Attention: it gives 0 for a row that is
#: masked everywhere (a softmax of -inf only would be NaN), and it applies softcap before the mask.
MASKED_ROWS = (1, 23)


@dataclass(frozen=True)
class Body:
    """The nodes that replace a node.

    Attributes:
        nodes: In topological order. They read the node's inputs and compute its outputs.
        opset: Opset of their operators.
    """

    nodes: tuple[onnx.NodeProto, ...]
    opset: int


def has_body(node: onnx.NodeProto, opset: int) -> bool:
    """Return whether ONNX defines the operator of a node by other operators."""
    schema = find_schema(node, opset)
    return schema is not None and bool(_list_versions(schema, opset))


def find_body(
    node: onnx.NodeProto, operands: Sequence[relax.Expr | None], opset: int
) -> Body | None:
    """Return the nodes that ONNX defines a node by. None if there are none.

    Args:
        node: The node. Names of its inputs and outputs are kept. Other names in the body are unique
            only within it.
        operands: Its inputs. None for one that is left out.
        opset: Opset of the model.

    Raises:
        Refusal: the installed release of the onnx package has a wrong definition.
    """
    schema = find_schema(node, opset)
    versions = [] if schema is None else _list_versions(schema, opset)
    if schema is None or not versions:
        return None
    version = max(versions)
    _check_release(node)
    node = _fill_attributes(node, schema)
    if version in schema.context_dependent_function_opset_versions:
        names = SizeNames()
        types = [describe_type(operand, names) or onnx.TypeProto() for operand in operands]
        text = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), [one.SerializeToString() for one in types]
        )
    else:
        text = schema.get_function_with_opset_version(version)
    function = onnx.FunctionProto.FromString(text)
    function.domain = DOMAIN
    if not function.opset_import:
        function.opset_import.append(helper.make_opsetid("", version))
    opset = next((one.version for one in function.opset_import if not one.domain), version)
    return Body(tuple(_inline(node, function, opset)), opset)


def _check_release(node: onnx.NodeProto) -> None:
    """Refuse a masked Attention with an old release of the onnx package (`MASKED_ROWS`)."""
    release = tuple(int(part) for part in onnx.__version__.split(".")[:2])
    if node.op_type == "Attention" and any(node.input[3:]) and release < MASKED_ROWS:
        raise Refusal(
            f"masked rows of Attention are NaN in onnx {onnx.__version__}; supported: onnx "
            f"{'.'.join(map(str, MASKED_ROWS))} and later",
            'Install it: pip install -U "onnx>=1.23"',
        )


def _list_versions(schema: onnx.defs.OpSchema, opset: int) -> list[int]:
    versions = {
        *schema.function_opset_versions,
        *schema.context_dependent_function_opset_versions,
    }
    return sorted(version for version in versions if version <= opset)


def _fill_attributes(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> onnx.NodeProto:
    """Return the node with defaults for its missing attributes. Bodies refer to them."""
    filled = onnx.NodeProto()
    filled.CopyFrom(node)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            filled.attribute.append(attribute.default_value)
    return filled


def _inline(
    node: onnx.NodeProto, function: onnx.FunctionProto, opset: int
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a function with the names and attributes of the call."""
    call = onnx.NodeProto()
    call.CopyFrom(node)
    call.domain, call.op_type = function.domain, function.name
    inputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    model = helper.make_model(
        helper.make_graph([call], "body", inputs, outputs),
        functions=[function],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
    )
    return onnx.inliner.inline_local_functions(model).graph.node
