"""Tables for `relax.qnn.lookup`: any unary function of 256 quantized values.

A table is quantize(function(dequantize(all bit patterns))), so that applying it is exact by
construction on every target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from relayquant.errors import QnnError
from relayquant.qtypes import QParams, Rounding
from relayquant.reference.qnn import dequantize, quantize

Array = np.ndarray[Any, Any]
UnaryFunction = Callable[[Array], Array]


def build_table(
    function: UnaryFunction,
    input_params: QParams,
    output_params: QParams | str,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
) -> Array:
    """The (256,) table of `function`, indexed by the bit pattern of the input as uint8.

    Args:
        function: float32 array to float array of the same shape.
        input_params: scalar parameters, dtype int8 or uint8.
        output_params: scalar parameters of any integer dtype, or the name of a float dtype for a
        table
            that also dequantizes.
        rounding: of the output.

    NaN gives the output's zero point (real value 0), and 0.0 in a float table; infinities saturate.
    The functions of UNARY_FUNCTIONS never give NaN.

    Raises:
        QnnError: parameters are per channel, or the input is not 8 bits wide.
    """
    if input_params.dtype not in ("int8", "uint8") or input_params.is_per_channel:
        raise QnnError(
            f"a table needs one scale and an input of int8 or uint8, got {input_params.dtype}"
            f"{' per channel' if input_params.is_per_channel else ''}."
        )
    patterns = np.arange(256, dtype="uint8").view(input_params.dtype)
    x = dequantize(patterns, input_params.scale, input_params.zero_point)
    with np.errstate(all="ignore"):
        y = np.asarray(function(x))
    if y.shape != (256,):
        raise QnnError(f"the function of a table gave shape {y.shape} for an input of (256,).")
    if isinstance(output_params, str):
        return np.where(np.isnan(y), 0, y).astype(output_params)
    if output_params.is_per_channel:
        raise QnnError("a table needs one output scale, got one per channel.")
    return quantize(
        y.astype("float32"),
        output_params.scale,
        output_params.zero_point,
        out_dtype=output_params.dtype,
        rounding=rounding,
    )


def through_double(function: UnaryFunction) -> UnaryFunction:
    """`function` evaluated in float64 and rounded to float32.

    float32 library functions differ by an ulp between machines; float64 ones rounded to float32 do
    so only within about 2^-29 of a rounding boundary.
    """

    def evaluate(x: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(np.asarray(x).astype("float64"))).astype("float32")

    return evaluate


def gelu(x: Array) -> Array:
    """x * Phi(x), exact form (float64)."""
    return 0.5 * x * (1 + special.erf(x / np.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of gelu (float64)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow (float64)."""
    return np.logaddexp(0.0, x)


#: Name -> float32 function. `log`, `sqrt` and `rsqrt` take a negative argument, which quantization
#: noise makes of a small positive one, as 0: -inf (the lowest output), 0 and +inf (the highest).
UNARY_FUNCTIONS: dict[str, UnaryFunction] = {
    "abs": through_double(np.abs),
    "atan": through_double(np.arctan),
    "ceil": through_double(np.ceil),
    "cos": through_double(np.cos),
    "elu": through_double(lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
    "erf": through_double(special.erf),
    "exp": through_double(np.exp),
    "floor": through_double(np.floor),
    "gelu": through_double(gelu),
    "gelu_tanh": through_double(gelu_tanh),
    "hardsigmoid": through_double(lambda x: np.clip(x + 3, 0, 6) / 6),
    "hardswish": through_double(lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "log": through_double(lambda x: np.log(np.maximum(x, 0))),
    "mish": through_double(lambda x: x * np.tanh(softplus(x))),
    "negative": through_double(np.negative),
    "relu": through_double(lambda x: np.maximum(x, 0)),
    "round": through_double(np.rint),
    "rsqrt": through_double(lambda x: 1 / np.sqrt(np.maximum(x, 0))),
    "selu": through_double(
        lambda x: (
            1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
        )
    ),
    "sigmoid": through_double(special.expit),
    "sign": through_double(np.sign),
    "silu": through_double(lambda x: x * special.expit(x)),
    "sin": through_double(np.sin),
    "softplus": through_double(softplus),
    "sqrt": through_double(lambda x: np.sqrt(np.maximum(x, 0))),
    "square": through_double(np.square),
    "tanh": through_double(np.tanh),
}
