"""ONNX reader: outputs of a node that nothing reads, or that a conversion does not compute."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import onnx
from onnx.defs import OpSchema
from tvm import relax

from relayquant.formats.readers.refusal import Refusal

#: Stands in the tuple that a conversion returns for an output that it does not compute.
NOT_COMPUTED = relax.Tuple([])


#: First opset in which outputs of BatchNormalization that have names do not mean training.
INFERS_BY_ATTRIBUTE = 14


def list_read(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """List the values that nodes read, and graphs within them. These also read their outputs."""
    for node in nodes:
        yield from node.input
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from list_read(graph.node)
                yield from (info.name for info in graph.output)


def drop_unread(
    node: onnx.NodeProto, schema: OpSchema | None, read: Container[str], opset: int
) -> onnx.NodeProto:
    """Return the node with "" as the name of optional outputs that nothing reads."""
    if node.op_type == "BatchNormalization" and opset < INFERS_BY_ATTRIBUTE:
        return node
    optional = OpSchema.FormalParameterOption.Optional
    unread = [
        number
        for number, name in enumerate(node.output)
        if number and name and name not in read
        if schema is None or schema.outputs[min(number, len(schema.outputs) - 1)].option == optional
    ]
    if not unread:
        return node
    return rename_outputs(
        node, ["" if number in unread else name for number, name in enumerate(node.output)]
    )


def drop_unnamed(node: onnx.NodeProto, schema: OpSchema | None) -> onnx.NodeProto:
    """Return the node without its last outputs that have no name, as if they were not there.

    Outputs that the operator must have stay. All outputs of Split stay, too: their number says into
    how many parts it splits.
    """
    least = 1
    if schema is not None and schema.outputs:
        least = max(1, schema.min_output)
        if schema.outputs[-1].option == OpSchema.FormalParameterOption.Variadic:
            return node
    count = len(node.output)
    while count > least and not node.output[count - 1]:
        count -= 1
    if count == len(node.output):
        return node
    return rename_outputs(node, node.output[:count])


def rename_outputs(node: onnx.NodeProto, names: Sequence[str]) -> onnx.NodeProto:
    """Return the node with outputs of these names."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.output[:] = names
    return copy


def check_outputs(names: Sequence[str], result: relax.Expr) -> None:
    """Check that a conversion computes all outputs that have a name.

    Args:
        names: Names of the node's outputs. "" for one that is left out.
        result: What the conversion returns: the outputs as a tuple, or the only output.

    Raises:
        Refusal: an output is not computed.
    """
    ty = getattr(result, "ty", None)
    count = len(ty.fields) if isinstance(ty, relax.TupleType) else 1
    fields = list(result.fields) if isinstance(result, relax.Tuple) else [None] * count
    computed = [
        number
        for number, field in enumerate(fields, 1)
        if not (isinstance(field, relax.Tuple) and not len(field.fields))
    ]
    for number, name in enumerate(names[1:], 2):
        if name and number not in computed:
            allowed = ", ".join(map(str, computed))
            raise Refusal(
                f"its output {name!r}, number {number}, is not computed; supported: output "
                f"{allowed}"
            )
