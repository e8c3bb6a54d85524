"""Float values in memory, as float32 or the bits of bfloat16 <-> vectors of float32.

Kernels compute in float32. A value that only products of bfloat16 read is rounded where it is
written, so it takes half the memory. A product reads the same bits as if it had rounded itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import te
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Let, Var

from relayquant.codegen.kernels.emit import constant, load_vector, store_vector, vector
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.bf16 import LOW_BITS, Bf16Isa, round_integers
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS


@dataclass(frozen=True)
class Stored:
    """Dtypes of the values that a kernel reads and writes: float32, or the bits of bfloat16."""

    data: str = "float32"
    residual: str = "float32"
    result: str = "float32"


def widen_bits(bits: Expr, lanes: int) -> Expr:
    """Convert the bits of bfloat16 to float32, which is exact."""
    wide = T.Cast(vector("uint32", lanes), bits)
    shifted = T.shift_left(wide, constant("uint32", LOW_BITS, lanes))
    return T.reinterpret(vector("float32", lanes), shifted)


def load_floats(buffer: Buffer, at: Expr, lanes: int) -> Expr:
    """Load a vector of float32 from float32 or from the bits of bfloat16."""
    value = load_vector(buffer, at, lanes)
    return widen_bits(value, lanes) if buffer.dtype == BF16_BITS else value


def store_floats(
    buffer: Buffer, value: Expr, at: Expr, lanes: int, isa: Bf16Isa | None, width: int = 0
) -> None:
    """Store the first `width` lanes of float32, rounded if the buffer has the bits of bfloat16.

    `isa` None: the target has no instruction that rounds.
    """
    if buffer.dtype == BF16_BITS:
        value = round_integers(value, lanes) if isa is None else isa.round(value, lanes)
    store_vector(buffer, value, at, lanes, width)


def round_elements(data: te.Tensor) -> te.Tensor:
    """Round a tensor of float32 to the bits of bfloat16."""

    def round_element(*at: Expr) -> Expr:
        value = Var("value", "float32")  # read once: the operators before are inlined into it
        return Let(value, data(*at), round_integers(value, 1))

    rounded: Any = te.compute(data.shape, round_element, name="round")
    return rounded
