"""ONNX reader: inputs that the user fixes become constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relayquant.errors import ModelError, suggest_name

#: Name of an input of the model -> its value, a number or an array.
Inputs: TypeAlias = Mapping[str, Any]


def fix_inputs(graph: onnx.GraphProto, inputs: Inputs) -> list[onnx.TensorProto]:
    """Make the constants that replace inputs.

    Args:
        graph: Not changed.
        inputs: Input name -> value with the input's dtype and shape.

    Raises:
        ModelError: there is no such input, or its dtype or shape differs from the value's.
    """
    weights = {tensor.name for tensor in graph.initializer}
    infos = {info.name: info for info in graph.input if info.name not in weights}
    constants = []
    for name, value in inputs.items():
        if name not in infos:
            raise ModelError(
                f"inputs= names {name!r}, which is not an input of the model. "
                f"{suggest_name(name, list(infos))}",
                code="RQ103",
            )
        tensor = infos[name].type.tensor_type
        array = convert_value(name, value, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        sizes = [dim.dim_value for dim in tensor.shape.dim]
        fits = len(sizes) == array.ndim and all(
            size in (0, -1, found) for size, found in zip(sizes, array.shape, strict=True)
        )
        if tensor.HasField("shape") and not fits:
            shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            raise ModelError(
                f"inputs= gives input {name!r} a value of shape {array.shape}; allowed: "
                f"{shape}, the shape of the input.",
                code="RQ101",
            )
        constants.append(numpy_helper.from_array(array, name))
    return constants


def convert_value(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """Convert the value to an array of `dtype`. ModelError if it is not a number or does not fit
    the dtype.
    """
    try:
        array = np.asarray(value)
        with np.errstate(invalid="ignore"):
            converted = array.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            f"inputs= gives input {name!r} a value that cannot be {dtype}: {error}.", code="RQ101"
        ) from error
    is_float = dtype.kind == "f" and array.dtype.kind in "iuf"
    if array.dtype.kind not in "biuf" or not (is_float or np.array_equal(converted, array)):
        raise ModelError(
            f"inputs= gives input {name!r} the value {value!r}, which does not fit {dtype}, the "
            "dtype of the input.",
            code="RQ101",
        )
    return converted
