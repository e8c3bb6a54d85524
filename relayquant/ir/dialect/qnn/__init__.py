"""Dialect: the `relax.qnn` operators, and their constructors as `R.qnn.*` for TVMScript.

Each file holds one family of operators. An operator is one row of `OPERATORS` in this file.
`__all__` lists its constructor.

Words: an operator works in *affine space*, on integers q with real = scale * (q - zero_point). A
*parameter* is a scale (float32) or a zero point (int32). It is a relax expression, or a number or
array that becomes a constant. Its shape is (). Some operators also allow (C,) with one entry per
channel along `axis`. Data operands are relax expressions or numpy arrays.

A constructor raises QnnError at once for an argument that it can check. Other faults raise QnnError
when the type of the call is inferred (`BlockBuilder.normalize`).

Rounding TONEAREST_EVEN with arithmetic FLOAT32 is the default and gives the same bits on every
target:

- the multiplier m is float32(double(s_in) / double(s_out)), per channel where s_in is;
- requantize: t = float32(x - z_in) * m; q = int(clamp(rint(t), qmin - z_out, qmax - z_out)) +
z_out;
- quantize: the same with t = x / s, a true division; NaN becomes z;
- dequantize: float32(q - z) * s.

UPWARD and TONEAREST compute the same as in TVM 0.19. TONEAREST_EVEN with INT64 is the 64-bit
fixed-point product with ties to even. TONEAREST_EVEN with FLOAT64 is the default formula in
float64.
"""

from __future__ import annotations

from relayquant.ir.dialect.operator import Operator
from relayquant.ir.dialect.qnn import (
    arithmetic,
    attention,
    concatenation,
    convolution,
    delta,
    experts,
    fourier,
    grouped,
    product,
    quantization,
    recurrent,
    reduction,
    simulation,
    slope,
    table,
)
from relayquant.ir.dialect.qnn.arithmetic import *
from relayquant.ir.dialect.qnn.attention import *
from relayquant.ir.dialect.qnn.concatenation import *
from relayquant.ir.dialect.qnn.convolution import *
from relayquant.ir.dialect.qnn.delta import *
from relayquant.ir.dialect.qnn.experts import *
from relayquant.ir.dialect.qnn.fourier import *
from relayquant.ir.dialect.qnn.grouped import *
from relayquant.ir.dialect.qnn.product import *
from relayquant.ir.dialect.qnn.quantization import *
from relayquant.ir.dialect.qnn.recurrent import *
from relayquant.ir.dialect.qnn.reduction import *
from relayquant.ir.dialect.qnn.simulation import *
from relayquant.ir.dialect.qnn.slope import *
from relayquant.ir.dialect.qnn.table import *

#: in the order of the data flow
FAMILIES = (
    quantization,
    simulation,
    convolution,
    product,
    arithmetic,
    concatenation,
    reduction,
    slope,
    table,
    grouped,
    experts,
    recurrent,
    attention,
    delta,
    fourier,
)

OPERATORS: tuple[Operator, ...] = tuple(row for family in FAMILIES for row in family.OPERATORS)
