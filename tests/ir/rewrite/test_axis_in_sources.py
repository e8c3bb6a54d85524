"""Where an axis of one value is in another."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax
from tvm.relax import op

from relayquant.ir.rewrite.graph import Graph
from relayquant.ir.rewrite.moves import axis_in_sources

REVERSED = relax.const(np.arange(8)[::-1].copy(), "int64")
#: name -> (operator of x (4, 8), the axis of x that is axis 1 of the result)
OPERATORS = {
    "relu": (op.nn.relu, 1),
    "transpose": (op.permute_dims, 0),
    "flip of rows": (lambda x: op.flip(x, 0), 1),
    "flip": (lambda x: op.flip(x, -1), None),
    "indices": (lambda x: op.take(x, REVERSED, 1), None),
    "indices of rows": (lambda x: op.take(x, REVERSED, 0, mode="wrap"), 1),
    "fewer": (lambda x: op.strided_slice(x, [1], [0], [4]), 1),
    "steps back": (lambda x: op.strided_slice(x, [1], [7], [-9], [-1]), None),
    "steps back through rows": (lambda x: op.strided_slice(x, [0], [3], [-5], [-1]), 1),
    "mean of each row": (lambda x: op.mean(x, [1], keepdims=True), 1),
    "merged": (lambda x: op.reshape(x, (2, 16)), None),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_axis_in_sources__is_lost_where_it_is_reordered(name):
    make, expected = OPERATORS[name]
    graph = Graph(build_model(lambda emit, x: emit("y", make(x)), (4, 8)))
    assert axis_in_sources(graph, ["x"], "y", 1) == expected
