"""PyTorch reader: operators of `torch.ops.quantized_decomposed`, used by PT2E -> operators of the
dialect.

A quantized program is imported in the reference form: quantize, dequantize, float operator.
`relayquant.lower` converts it to integer operators. PyTorch multiplies by the inverse of the scale
and `R.qnn.quantize` divides, so a value halfway between two steps may be rounded to the other one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.torch.arguments import Convert
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.dynamic import choose_at_run_time
from relayquant.ir.reference import qnn as numpy_qnn

#: name of a parameter or buffer in the graph -> its tensor
Constants = Mapping[str, Any]


def make_converters(constants: Constants) -> dict[str, Convert]:
    """Return operator name in TVM's frontend -> conversion, for a program with these constants."""
    return {name: functools.partial(convert, constants) for name, convert in OPERATORS.items()}


@dataclass(frozen=True, eq=False)
class Quantization:
    """The arguments of a node that quantizes or dequantizes.

    Attributes:
        data: The node's data operand.
        scale, zero_point: float32 and int32 arrays, or values computed at run time.
        axis: Channel axis. -1 if there is one scale for the whole tensor.
        low, high: The smallest and the largest integer.
        dtype: Dtype of the integers.
    """

    data: relax.Expr
    scale: Any
    zero_point: Any
    axis: int
    low: int
    high: int
    dtype: str


def convert_quantize(constants: Constants, node: Any, importer: Any) -> relax.Expr:
    """Convert quantize_per_tensor(x, scale, zero point, min, max, dtype) and
    quantize_per_channel(x, scales, zero points, axis, min, max, dtype) to R.qnn.quantize.

    If the range is smaller than the dtype's, a clip follows. A constant becomes its integers.
    """
    read = read_quantization(constants, node, importer)
    grid, axis, dtype = (read.scale, read.zero_point), read.axis, read.dtype
    array = read_constant(constants, node.args[0])
    if array is not None:
        values = numpy_qnn.quantize(array, *grid, axis=axis, out_dtype=dtype)
        return relax.const(np.clip(values, read.low, read.high).astype(dtype), dtype)
    value = qnn.quantize(read.data, *grid, axis=axis, out_dtype=dtype)
    if (read.low, read.high) != INTEGER_LIMITS[dtype]:
        value = relax.op.clip(importer.block_builder.emit(value), read.low, read.high)
    return importer.block_builder.emit(value)


def convert_dequantize(constants: Constants, node: Any, importer: Any) -> relax.Expr:
    """Convert dequantize_per_tensor and dequantize_per_channel to R.qnn.dequantize, also for a
    constant: a quantized weight stays quantized.
    """
    read = read_quantization(constants, node, importer)
    value = qnn.dequantize(read.data, read.scale, read.zero_point, axis=read.axis)
    return importer.block_builder.emit(value)


def convert_choose(constants: Constants, node: Any, importer: Any) -> relax.Expr:
    """Convert choose_qparams(x, min, max, eps, dtype) -> (scale float32, zero point int32),
    computed at run time.

    A tensor of zeros gets scale 1, in PyTorch eps. Its integers are the same.
    """
    emit = importer.block_builder.emit
    low, high = (int(bound) for bound in node.args[1:3])
    data = importer.env[node.args[0]]
    return relax.Tuple(choose_at_run_time(lambda expr, _: emit(expr), data, low, high))


def read_quantization(constants: Constants, node: Any, importer: Any) -> Quantization:
    """Read the arguments of a node that quantizes or dequantizes.

    Raises:
        Refusal: parameters per channel are computed at run time, or the dtype is not an integer
            dtype.
    """
    per_channel = "per_channel" in str(node.target)
    names = ["input", "scale", "zero_point", "axis", "low", "high", "dtype"]
    if not per_channel:
        names.remove("axis")
    given = dict(zip(names, node.args, strict=False))
    data = importer.env[given["input"]]
    low, high = (
        int(np.asarray(read_parameter(constants, node, given[name], name)))
        for name in ("low", "high")
    )
    dtype = importer._convert_data_type(given["dtype"])
    if dtype not in INTEGER_LIMITS:
        raise Refusal(f"{node.name} quantizes to {dtype}; supported: {', '.join(INTEGER_LIMITS)}")
    computed = [importer.env.get(given[name]) for name in ("scale", "zero_point")]
    if not per_channel and all(isinstance(value, relax.Var) for value in computed):
        return Quantization(data, *computed, -1, low, high, dtype)
    scale, zero_point = (
        read_parameter(constants, node, given[name], name) for name in ("scale", "zero_point")
    )
    if zero_point is None:
        zero_point = np.zeros(np.shape(scale), "int32")
    shape = (-1,) if per_channel else ()
    return Quantization(
        data,
        np.asarray(scale, "float32").reshape(shape),
        np.asarray(zero_point, "int32").reshape(shape),
        int(given["axis"]) % data.ty.ndim if per_channel else -1,
        low,
        high,
        dtype,
    )


def read_parameter(constants: Constants, node: Any, value: Any, name: str) -> Any:
    """Read a number, None, or the array of a constant tensor.

    Raises:
        Refusal: it is computed at run time.
    """
    if value is None or isinstance(value, int | float):
        return value
    array = read_constant(constants, value)
    if array is None:
        raise Refusal(
            f"the {name} of {node.name} is computed at run time; supported: constants, and with "
            "one scale per tensor the results of choose_qparams"
        )
    return array


def read_constant(constants: Constants, node: Any) -> np.ndarray | None:
    """Return the array of a parameter or buffer of the program. None for a computed value."""
    tensor = constants.get(getattr(node, "name", ""))
    return None if tensor is None else tensor.detach().cpu().numpy()


#: operator name -> its conversion
OPERATORS: dict[str, Callable[[Constants, Any, Any], relax.Expr]] = {
    "choose_qparams.tensor": convert_choose,
    "quantize_per_tensor.default": convert_quantize,
    "quantize_per_tensor.tensor": convert_quantize,
    "quantize_per_tensor.tensor2": convert_quantize,
    "quantize_per_channel.default": convert_quantize,
    "dequantize_per_tensor.default": convert_dequantize,
    "dequantize_per_tensor.tensor": convert_dequantize,
    "dequantize_per_tensor.tensor2": convert_dequantize,
    "dequantize_per_channel.default": convert_dequantize,
}
