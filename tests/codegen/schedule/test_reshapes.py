"""Reshapes of symbolic sizes."""

from __future__ import annotations

import numpy as np
from float_models import build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq


def test_reshapes__behind_a_convolution_of_a_symbolic_width():
    """TVM's analysis of what only gives data another shape fails for W - 2."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(13, 1, 4, 3)).astype("float32")

    def build(e, x):
        y = e("y", op.nn.conv2d(x, e.constant(*weight.shape)))
        turned = e("turned", op.permute_dims(y, [1, 3, 2, 0]))
        return relax.Tuple([turned, e("z", op.nn.softmax(y, 1))])

    mod = build_model(build, (3, 1, 4, "w"))
    machine = rq.Executor(rq.compile(mod))
    for width in (3, 17):
        x = rng.normal(size=(3, 1, 4, width)).astype("float32")
        for found, want in zip(machine.run("main", [x]), rq.reference.run(mod, [x]), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)
