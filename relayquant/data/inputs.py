"""What a model takes, as data sets are checked against it."""

from __future__ import annotations

import tvm
from tvm import relax

from relayquant.data import InputInfo
from relayquant.errors import ModelError
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape


def describe_inputs(mod: tvm.IRModule) -> tuple[InputInfo, ...]:
    """Names, shapes and dtypes of the parameters of main; dimensions of unknown size get a name.

    Raises:
        ModelError: there is no main, or an input is no tensor whose number of dimensions is known.
    """
    infos = []
    for param in Graph(mod).func.params:
        if not isinstance(param.ty, relax.TensorType) or param.ty.ndim < 0:
            raise ModelError(
                f"Input {param.name!r} is {param.ty}; relayquant needs a tensor whose number of "
                "dimensions is known. Declare it so in the model.",
                code="RQ204",
            )
        shape = tensor_shape(param)
        if shape is None:
            shape = tuple(f"{param.name}.{i}" for i in range(param.ty.ndim))
        infos.append(InputInfo(param.name, shape, tensor_dtype(param)))
    return tuple(infos)
