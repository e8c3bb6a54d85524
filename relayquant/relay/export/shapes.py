"""Relay writer: replaces symbolic dimensions by the sizes that the text is written for.

`relay.build` and the virtual machine reject a dimension that is known at run time only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, tirx

from relayquant.errors import ConfigError, ModelError, suggest_name
from relayquant.ir.rewrite.graph import tensor_shape


def fix_shapes(mod: tvm.IRModule, shapes: Mapping[str, Sequence[int]]) -> tvm.IRModule:
    """Return a module whose main takes inputs of the given shapes. Other inputs are unchanged.

    Raises:
        ConfigError: there is no such input, or a shape contradicts its type or another shape.
        ModelError: an input still has a dimension that is known at run time only. All are named.
    """
    main = mod["main"]
    params = {param.name: param for param in main.params}
    sizes: dict[tirx.Var, int] = {}
    for name, shape in shapes.items():
        if name not in params:
            raise ConfigError(
                f"shapes: there is no input {name!r}. {suggest_name(name, params)}", code="RQ103"
            )
        sizes.update(match_shape(params[name], shape))
    if sizes:
        main = main.bind_symbolic_vars(sizes)
        mod = tvm.IRModule({**dict(mod.functions.items()), mod.get_global_var("main"): main})
    for param in main.params:
        wanted, found = shapes.get(param.name), tensor_shape(param)
        if wanted is not None and found != tuple(wanted):
            raise ConfigError(
                f"shapes[{param.name!r}] is {tuple(wanted)}, but with the other shapes the input "
                f"is {found}.",
                code="RQ101",
            )
    found_shapes = {param.name: tensor_shape(param) or () for param in main.params}
    open_inputs = {
        name: shape
        for name, shape in found_shapes.items()
        if any(isinstance(dim, str) for dim in shape)
    }
    if open_inputs:
        raise ModelError(
            "Relay is built for sizes that are known, but "
            + ", ".join(f"input {name!r} is {shape}" for name, shape in open_inputs.items())
            + f". Give them: shapes={{{next(iter(open_inputs))!r}: (...)}}.",
            code="RQ203",
        )
    return mod


def match_shape(param: relax.Var, shape: Sequence[int]) -> dict[tirx.Var, int]:
    """Return the sizes of the symbolic dimensions of a parameter for a given shape.

    Raises:
        ConfigError: the shape contradicts the parameter.
    """
    known = tensor_shape(param)
    dims = () if known is None else tuple(param.ty.shape.values)
    fits = known is not None and len(dims) == len(shape)
    if not fits or any(
        size < 1 or (isinstance(dim, int) and dim != size)
        for dim, size in zip(known or (), shape, strict=True)
    ):
        raise ConfigError(
            f"shapes[{param.name!r}] is {tuple(shape)}, but the input is {known}; allowed: one "
            "size from 1 for each dimension, the same where one is given.",
            code="RQ101",
        )
    return {dim: size for dim, size in zip(dims, shape, strict=True) if isinstance(dim, tirx.Var)}
