"""The cost of an operator: multiply-adds of float and integer convolutions, matrix products and
transforms.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm.ir import Call, Op

from relayquant.ir.dialect.fourier import read_transform
from relayquant.ir.rewrite.graph import static_size

#: Attribute of a kernel: multiply-adds of one call. A symbolic dimension counts as 1.
MACS_ATTR = "relayquant.macs"

CONVOLUTIONS = frozenset(
    f"relax.{dialect}.conv{rank}" for dialect in ("nn", "qnn") for rank in ("1d", "2d")
)
PRODUCTS = frozenset(
    {"relax.matmul"}
    | {f"relax.qnn.{op}" for op in ("dense", "batch_matmul", "grouped_dense")}
    | {f"relax.qnn.{op}" for op in ("expert_dense", "grouped_expert_dense")}
)
RECURRENCES = frozenset(f"relax.qnn.{op}" for op in ("lstm", "gru", "rnn"))
TRANSPOSED_CONVOLUTIONS = frozenset({"relax.nn.conv2d_transpose", "relax.qnn.conv2d_transpose"})


def count_macs(call: Any) -> int:
    """Count the multiply-adds of one call: of a convolution, matrix product, recurrent layer or
    Fourier transform.

    Anything else counts 0.

    Symbolic dimensions count as 1. With a symbolic batch, the result is the cost of one sample.
    """
    if not isinstance(call, Call) or not isinstance(call.op, Op):
        return 0
    op = str(call.op.name)
    if op in CONVOLUTIONS:
        channels = "O"
        positions = prod(static_dims(call.ty))
    elif op in TRANSPOSED_CONVOLUTIONS:
        channels = "I"
        positions = prod(static_dims(call.args[0].ty))
    elif op in PRODUCTS:
        return prod(static_dims(call.ty)) * static_dims(call.args[0].ty)[-1]
    elif op in RECURRENCES:
        return prod(static_dims(call.args[0].ty)) * static_dims(call.args[1].ty)[0]
    elif op == "relax.qnn.dft":
        return prod(static_dims(call.ty)[:-2]) * read_transform(call).macs
    else:
        return 0
    weight = static_dims(call.args[1].ty)
    return positions * prod(weight) // weight[str(call.attrs.kernel_layout).index(channels)]


def static_dims(ty: Any) -> list[int]:
    """Return the dimensions of a tensor type, symbolic ones as 1. An unknown shape gives [1]."""
    shape = getattr(ty, "shape", None)
    dims = getattr(shape, "values", None)
    if dims is None:
        return [1]
    return [1 if (size := static_size(dim)) is None else size for dim in dims] or [1]
