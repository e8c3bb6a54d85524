"""export_onnx: an operator that reads sums of products -> whether it does the same on their real
values, which are all that the file has of them.

A product in the file is the float product between DequantizeLinear and QuantizeLinear, so its
result is the sum times a scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.moves import MOVES, REORDERS

#: f(s * x) = s * f(x) for s > 0, or the place of a value
HOMOGENEOUS = frozenset(
    {*MOVES, *REORDERS}
    | {
        f"relax.{name}"
        for name in (
            *("abs", "argmax", "argmin", "argsort", "broadcast_to", "clip", "cumsum", "gather_nd"),
            *("index_tensor", "max", "min", "negative", "repeat", "strided_slice", "sum", "tile"),
            *("topk", "tril", "triu", "nn.pixel_shuffle", "nn.relu"),
            *(f"nn.max_pool{rank}d" for rank in (1, 2, 3)),
        )
    }
)
#: the same if all operands are sums of products
JOINT = frozenset(
    f"relax.{name}" for name in ("add", "concat", "maximum", "minimum", "subtract", "where")
)
COMPARISONS = ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")
#: the same on sums whose scale comes later: their tensor has the integers themselves
EXACT = JOINT | {f"relax.{name}" for name in (*COMPARISONS, "astype", "multiply")}


def check_accumulators(builder: OnnxBuilder, var: relax.Var, call: Call) -> None:
    """Raise ModelError if an operator reads sums of products and would do something else with their
    real values. The operators of the dialect know the scale.
    """
    op = call_name(call)
    operands = [arg for arg in list_tensors(call.args) if isinstance(arg, relax.Var)]
    sums = [arg for arg in operands if builder.is_accumulator(arg)]
    if not sums or op.startswith("relax.qnn.") or op in HOMOGENEOUS:
        return
    if op in EXACT and not builder.units.isdisjoint(sums):
        return
    values = list_tensors(call.args[1:] if op == "relax.where" else call.args)
    if op in JOINT and all(builder.is_accumulator(value) for value in values):
        return
    raise ModelError(
        f"export_onnx: {op} ({var.name!r}) reads the sums of products {sums[0].name!r}, which the "
        "file has as real values. In a row of your own, make them real with "
        "Quantized(total, qparams).dequantize().",
        code="RQ203",
    )


def list_tensors(operands: Iterable[relax.Expr]) -> Iterator[relax.Expr]:
    """Iterate over operands and the fields of tuples among them, without numbers and shapes."""
    for operand in operands:
        if isinstance(operand, relax.Tuple):
            yield from list_tensors(operand.fields)
        elif isinstance(operand.ty, relax.TensorType):
            yield operand
