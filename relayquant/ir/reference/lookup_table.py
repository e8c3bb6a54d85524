"""Tables for `relax.qnn.lookup`: any unary function of 256 quantized values.

A table is quantize(function(dequantize(all bit patterns))). Reading it gives the same bits on every
target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.qtypes import QParams, Rounding
from relayquant.errors import QnnError
from relayquant.ir.reference.qnn import dequantize, quantize
from relayquant.ir.reference.unary import UnaryFunction

Array = np.ndarray[Any, Any]


def build_table(
    function: UnaryFunction,
    input_params: QParams,
    output_params: QParams | str,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
) -> Array:
    """Build the (256,) table of `function`, indexed by the bit pattern of the input as uint8.

    Args:
        function: float32 array -> float array of the same shape.
        input_params: Scalar parameters, dtype int8 or uint8.
        output_params: Scalar parameters of any integer dtype, or the name of a float dtype for a
            table that also dequantizes.
        rounding: Rounding of the output.

    NaN becomes the output's zero point (real value 0), or 0.0 in a float table. Infinities
    saturate. The functions of `unary.UNARY_FUNCTIONS` never return NaN.

    Raises:
        QnnError: Parameters are per-channel, or the input does not have 8 bits.
    """
    if input_params.dtype not in ("int8", "uint8") or input_params.is_per_channel:
        raise QnnError(
            f"a table needs one scale and an input of int8 or uint8, got {input_params.dtype}"
            f"{' per channel' if input_params.is_per_channel else ''}.",
            code="RQ601",
        )
    patterns = np.arange(256, dtype="uint8").view(input_params.dtype)
    x = dequantize(patterns, input_params.scale, input_params.zero_point)
    with np.errstate(all="ignore"):
        y = np.asarray(function(x))
    if y.shape != (256,):
        raise QnnError(
            f"the function of a table gave shape {y.shape} for an input of (256,).", code="RQ601"
        )
    if isinstance(output_params, str):
        return np.where(np.isnan(y), 0, y).astype(output_params)
    if output_params.is_per_channel:
        raise QnnError("a table needs one output scale, got one per channel.", code="RQ601")
    return quantize(
        y.astype("float32"),
        output_params.scale,
        output_params.zero_point,
        out_dtype=output_params.dtype,
        rounding=rounding,
    )
