"""Modules with several functions and their parameters, bound as one."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite.bind import bind_model

WEIGHT = np.arange(6, dtype="float32").reshape(2, 3)


def make_module():
    """Two functions that read one weight."""
    functions = {}
    for name, rows in (("prefill", 4), ("decode", 1)):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType([rows, 2], "float32"))
        w = relax.Var("w", relax.TensorType([2, 3], "float32"))
        with builder.function(name, [x, w], attrs={"num_input": 1}):
            builder.emit_func_output(builder.emit(relax.op.matmul(x, w)))
        functions[name] = builder.finalize()[name]
    return tvm.IRModule(functions)


def test_bind__functions_share_the_constant_of_a_name():
    bound = bind_model((make_module(), {"w": WEIGHT}))
    constants = [func.body.blocks[0].bindings[0].value.args[1] for func in bound.functions.values()]
    assert len(constants) == 2
    assert constants[0].value.data_ptr() == constants[1].value.data_ptr()
    np.testing.assert_array_equal(constants[0].value.numpy(), WEIGHT)
    assert all(len(func.params) == 1 for func in bound.functions.values())


def test_bind__unknown_names_and_wrong_shapes():
    with pytest.raises(ModelError, match="'v', which no function takes"):
        bind_model((make_module(), {"v": WEIGHT}))
    with pytest.raises(ModelError, match="wants float32 of shape"):
        bind_model((make_module(), {"w": WEIGHT[:1]}))
