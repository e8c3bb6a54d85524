"""ONNX reader: outputs of a node that a model leaves out, or that a conversion does not compute."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx.defs import OpSchema
from tvm import relax

from relayquant.formats.readers.refusal import Refusal

#: Stands in the tuple that a conversion returns for an output that it does not compute.
NOT_COMPUTED = relax.Tuple([])


def drop_unnamed(node: onnx.NodeProto, schema: OpSchema | None) -> onnx.NodeProto:
    """Return the node without its last outputs that have no name, as if they were not there.

    Outputs that the operator must have stay. So do those of an operator with any number of outputs
    (Split), which count.
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
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.output[count:]
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
