"""The numpy form of every `relax.qnn` operator: the contract for compiled code and kernels.

There is one function per operator, in the file of its family, listed in `__all__`. It has the name,
operand order and attribute names of the operator. It takes and returns arrays. Scales are float32
and zero points int32, of shape () or (C,). A vector of length 1 counts as per-tensor. Each rounding
operator has

- the default arithmetic, Rounding.TONEAREST_EVEN with Arithmetic.FLOAT32: one IEEE float32 multiply
  by m = float32(double(s_in) / double(s_out)), round half to even, clamp in float, cast, and the
  zero point added as an integer (`fixed_point.finish_rounded`). It gives the same bits on every
  machine.
- the arithmetic of TVM v0.19 for UPWARD and TONEAREST with INT64, FLOAT32 or FLOAT64.
- TONEAREST_EVEN with FLOAT64 (the default in double) and with INT64 (v0.19, but half to even).

All functions raise QnnError if parameters do not match the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relayquant.ir.reference.qnn import (
    arithmetic,
    attention,
    delta,
    experts,
    fourier,
    grouped,
    linear,
    pointwise,
    quantization,
    recurrent,
    reduction,
)
from relayquant.ir.reference.qnn.arithmetic import *
from relayquant.ir.reference.qnn.attention import *
from relayquant.ir.reference.qnn.delta import *
from relayquant.ir.reference.qnn.experts import *
from relayquant.ir.reference.qnn.fourier import *
from relayquant.ir.reference.qnn.grouped import *
from relayquant.ir.reference.qnn.linear import *
from relayquant.ir.reference.qnn.pointwise import *
from relayquant.ir.reference.qnn.quantization import *
from relayquant.ir.reference.qnn.recurrent import *
from relayquant.ir.reference.qnn.reduction import *

#: Name of the operator without "relax.qnn." -> numpy form.
OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(family, name)
    for family in (
        *(quantization, linear, arithmetic, reduction, pointwise),
        *(grouped, experts, recurrent, attention, delta, fourier),
    )
    for name in family.__all__
}
