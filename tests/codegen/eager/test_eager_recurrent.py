"""Recurrent layers in the eager executor: kernels of any number of steps and samples."""

from __future__ import annotations

import numpy as np
import pytest
from test_eager import steps_of
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.eager import EagerModule
from relayquant.codegen.eager.steps.recurrent import RecurrentStep
from relayquant.ir.dialect import qnn

UNITS = 5
#: Operator -> gates, and settings: operands are names of `given`.
CASES = {
    "lstm": (4, {"clip": 0.5}, ("hidden", "cell", "peepholes", "lengths")),
    "lstm plain": (4, {}, ()),
    "gru": (3, {"is_reversed": True}, ("hidden", "lengths")),
    "gru linear": (3, {"linear_before_reset": True}, ("hidden_bias",)),
    "rnn": (1, {"activations": ["relu"]}, ("hidden",)),
}
SHAPES = {
    "hidden": ("B", UNITS),
    "cell": ("B", UNITS),
    "peepholes": (3, UNITS),
    "hidden_bias": (UNITS,),
    "lengths": ("B",),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_recurrent__is_a_kernel_with_the_bits_of_numpy(case, dtype):
    """Sums of a float32 weight have another order."""
    gates, settings, given = CASES[case]
    op, rng = getattr(qnn, case.split()[0]), np.random.default_rng(0)
    weight = rng.integers(-127, 128, (UNITS, gates * UNITS)).astype("int8")
    real = relax.const((weight * 0.01).astype("float32"))
    constants = (real, np.float32(1)) if dtype == "float32" else (weight, np.float32(0.01))
    sizes = {name: tirx.Var(name, "int64") for name in "TB"}
    shapes = {"x": ("T", "B", gates * UNITS), **{name: SHAPES[name] for name in given}}
    params = {
        name: relax.Var(
            name,
            relax.TensorType(
                [sizes.get(size, size) for size in shape],
                "int32" if name == "lengths" else "float32",
            ),
        )
        for name, shape in shapes.items()
    }
    builder = relax.BlockBuilder()
    with builder.function("main", [*params.values()]):
        with builder.dataflow():
            operands = {name: params[name] for name in given}
            out = builder.emit_output(op(params["x"], *constants, **settings, **operands))
        builder.emit_func_output(out)
    mod = builder.get()
    module = EagerModule(mod)
    assert steps_of(module, RecurrentStep)
    for numbers in ({"T": 4, "B": 3}, {"T": 1, "B": 1}, {"T": 0, "B": 2}, {"T": 2, "B": 0}):
        inputs = [
            rng.integers(0, 5, numbers["B"]).astype("int32")
            if name == "lengths"
            else rng.normal(size=[numbers.get(size, size) for size in shape]).astype("float32")
            for name, shape in shapes.items()
        ]
        (found,), (wanted,) = module.run("main", inputs), rq.reference.run(mod, inputs)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, 0, 0 if dtype == "int8" else 2e-6)
