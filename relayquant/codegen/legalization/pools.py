"""Relax max pools of floats -> loop nests that pad with minus infinity; part of `table`.

TVM pads with the lowest finite number, which is more than a window of minus infinity holds.
"""

from __future__ import annotations

import re
from typing import Any

from tvm import relax, tirx, topi
from tvm.ir import Call
from tvm.sym import Analyzer

from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm
from relayquant.ir.rewrite.expressions import shape_of
from relayquant.ir.rewrite.graph import tensor_dtype

POOLS = {1: topi.nn.pool1d, 2: topi.nn.pool2d, 3: topi.nn.pool3d}


def legalize_max_pool(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize max_pool1d, max_pool2d or max_pool3d.

    With ceil_mode, the padding at the end reaches as far as the last window of the declared
    result: Relax leaves out windows that would begin in this padding.
    """
    (data,), attrs = call.args, call.attrs
    dtype, strides = tensor_dtype(data), [int(n) for n in attrs.strides]
    rank, pads = len(strides), [int(n) for n in attrs.padding]
    if "float" not in dtype or not (any(pads) or attrs.ceil_mode) or not shape_of(call):
        return legalize_as_tvm(builder, call)
    letters = re.sub(r"\d", "", str(attrs.layout))
    sizes, dilation = ([int(n) for n in each] for each in (attrs.pool_size, attrs.dilation))
    before, after = [0] * len(letters), [0] * len(letters)
    for at, letter in enumerate("DHW"[-rank:]):
        axis = letters.index(letter)
        before[axis], after[axis] = pads[at], pads[rank + at]
        if attrs.ceil_mode:
            span = dilation[at] * (sizes[at] - 1) + 1
            end = (shape_of(call)[axis] - 1) * strides[at] + span
            missing = end - shape_of(data)[axis] - pads[at]
            after[axis] = Analyzer().simplify(tirx.max(tirx.const(0, "int64"), missing))

    def compute(x: Any) -> Any:
        lowest = tirx.const(float("-inf"), dtype)
        padded = topi.nn.pad(x, before, after, lowest, name="pad_temp")
        numbers = (sizes, strides, dilation)
        return POOLS[rank](padded, *numbers, [0] * 2 * rank, "max", False, str(attrs.layout))

    return builder.call_te(compute, data, primfunc_name_hint=f"max_pool{rank}d")


#: Legalizations for `relax.transform.LegalizeOps`.
POOL_LEGALIZATIONS = {f"relax.nn.max_pool{rank}d": legalize_max_pool for rank in POOLS}
