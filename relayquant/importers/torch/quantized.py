"""First stage, PyTorch: operators of `torch.ops.quantized_decomposed`, which quantized programs of
PT2E are made of, become operators of the dialect.

A program with them is imported in the reference form, quantize - dequantize - float operator, from
which `relayquant.lower` makes integer operators. PyTorch multiplies by the inverse of the scale
where `R.qnn.quantize` divides, so a value on the border of two steps may fall on the other side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax

from relayquant.dialect import qnn
from relayquant.ops.dynamic import choose_at_run_time
from relayquant.qtypes import INTEGER_LIMITS
from relayquant.reference import qnn as numpy_qnn

#: name of a parameter or buffer in the graph -> its tensor
Constants = Mapping[str, Any]
#: node of the program, importer of TVM's frontend -> value
Convert = Callable[[Any, Any], relax.Expr]


def make_converters(constants: Constants) -> dict[str, Convert]:
    """Name of an operator, as TVM's frontend calls it -> its conversion, for a program with these
    constants.
    """
    return {name: functools.partial(convert, constants) for name, convert in OPERATORS.items()}


def convert_quantize(constants: Constants, node: Any, importer: Any) -> relax.Expr:
    """quantize_per_tensor(x, scale, zero point, min, max, dtype), quantize_per_channel(x, scales,
    zero points, axis, min, max, dtype) -> R.qnn.quantize, and a clip where the range is smaller
    than that of the dtype. Of a constant, the integers.
    """
    data, scale, zero_point, axis, low, high, dtype = read_arguments(constants, node, importer)
    array = read_constant(constants, node.args[0])
    if array is not None:
        values = numpy_qnn.quantize(array, scale, zero_point, axis=axis, out_dtype=dtype)
        return relax.const(np.clip(values, low, high).astype(dtype), dtype)
    value = qnn.quantize(data, scale, zero_point, axis=axis, out_dtype=dtype)
    if (low, high) != INTEGER_LIMITS[dtype]:
        value = relax.op.clip(importer.block_builder.emit(value), low, high)
    return importer.block_builder.emit(value)


def convert_dequantize(constants: Constants, node: Any, importer: Any) -> relax.Expr:
    """dequantize_per_tensor, dequantize_per_channel -> R.qnn.dequantize, of a constant too: a
    quantized weight stays quantized.
    """
    data, scale, zero_point, axis, _, _, _ = read_arguments(constants, node, importer)
    return importer.block_builder.emit(qnn.dequantize(data, scale, zero_point, axis=axis))


def convert_choose(constants: Constants, node: Any, importer: Any) -> relax.Expr:
    """choose_qparams(x, min, max, eps, dtype) -> (scale float32, zero point int32), computed at run
    time. A tensor of zeros has the scale 1, where PyTorch has eps: its integers are the same.
    """
    emit = importer.block_builder.emit
    low, high = (int(bound) for bound in node.args[1:3])
    data = importer.env[node.args[0]]
    return relax.Tuple(choose_at_run_time(lambda expr, _: emit(expr), data, low, high))


def read_arguments(
    constants: Constants, node: Any, importer: Any
) -> tuple[relax.Expr, Any, Any, int, int, int, str]:
    """(data, scale, zero point, axis, smallest, largest, dtype) of a node; axis is -1 where there
    is one scale for all. Scale and zero point are arrays, or values that are computed at run time.

    Raises:
        ValueError: parameters per channel are computed at run time, or the dtype is not an integer
            one.
    """
    per_channel = "per_channel" in str(node.target)
    names = ["input", "scale", "zero_point", "axis", "low", "high", "dtype"]
    if not per_channel:
        names.remove("axis")
    given = dict(zip(names, node.args, strict=False))
    data = importer.env[given["input"]]
    low, high = (read_parameter(constants, node, given[name], name) for name in ("low", "high"))
    dtype = importer._convert_data_type(given["dtype"])
    if dtype not in INTEGER_LIMITS:
        known = ", ".join(INTEGER_LIMITS)
        raise ValueError(f"{node.name} quantizes to {dtype}; supported: {known}")
    computed = [importer.env.get(given[name]) for name in ("scale", "zero_point")]
    if not per_channel and all(isinstance(value, relax.Var) for value in computed):
        return data, *computed, -1, int(np.asarray(low)), int(np.asarray(high)), dtype
    scale, zero_point = (
        read_parameter(constants, node, given[name], name) for name in ("scale", "zero_point")
    )
    if zero_point is None:
        zero_point = np.zeros(np.shape(scale), "int32")
    axis = int(given["axis"]) % data.ty.ndim if per_channel else -1
    shape = () if axis == -1 else (-1,)
    return (
        data,
        np.asarray(scale, "float32").reshape(shape),
        np.asarray(zero_point, "int32").reshape(shape),
        axis,
        int(np.asarray(low)),
        int(np.asarray(high)),
        dtype,
    )


def read_parameter(constants: Constants, node: Any, value: Any, name: str) -> Any:
    """A number, None, or the array of a constant tensor; ValueError for a computed one."""
    if value is None or isinstance(value, int | float):
        return value
    array = read_constant(constants, value)
    if array is None:
        raise ValueError(
            f"the {name} of {node.name} is computed at run time; only static quantization is read"
        )
    return array


def read_constant(constants: Constants, node: Any) -> np.ndarray | None:
    """The array of a parameter or buffer of the program, None for a computed value."""
    tensor = constants.get(getattr(node, "name", ""))
    return None if tensor is None else tensor.detach().cpu().numpy()


#: name of an operator -> its conversion
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
