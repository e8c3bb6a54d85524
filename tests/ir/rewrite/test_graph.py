"""Reading shapes: numbers, symbols and what stands for them in messages."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from relayquant.ir.rewrite.graph import static_size, tensor_shape

N = tirx.Var("T", "int64")


@pytest.mark.parametrize(
    ("dim", "size"), [(3, 3), (tirx.IntImm("int64", 4), 4), (N, None), (N * 2 + 1, None)]
)
def test_static_size__none_for_what_is_symbolic(dim, size):
    assert static_size(dim) == size


def test_tensor_shape__symbols_by_their_names():
    var = relax.Var("x", relax.TensorType([N, 3, N * 2], "float32"))
    shape = tensor_shape(var)
    assert shape is not None
    assert shape[:2] == ("T", 3)
    assert isinstance(shape[2], str)
