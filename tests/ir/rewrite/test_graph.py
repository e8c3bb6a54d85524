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


def test_tensor_shape__expressions_of_sizes_as_in_words():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    sizes = [4 * n + 2, tirx.floordiv(n, tirx.const(160, "int64")), tirx.max(n, m)]
    var = relax.Var("x", relax.TensorType(sizes, "float32"))
    assert tensor_shape(var) == ("n * 4 + 2", "n // 160", "max(n, m)")


def test_tensor_shape__symbols_by_their_names():
    var = relax.Var("x", relax.TensorType([N, 3, N * 2], "float32"))
    shape = tensor_shape(var)
    assert shape is not None
    assert shape[:2] == ("T", 3)
    assert isinstance(shape[2], str)


def test_tensor_shape__one_text_for_a_size_however_it_is_written():
    four = tirx.IntImm("int64", 4)
    sizes = [tirx.Mul(four, N), tirx.Mul(N, four), N * 2 * 2]
    texts = tensor_shape(relax.Var("x", relax.TensorType(sizes, "float32")))
    assert texts is not None
    assert len(set(texts)) == 1
    other = tensor_shape(relax.Var("x", relax.TensorType([N * 8, N * 4 + 1], "float32")))
    assert other is not None
    assert not {*other} & {*texts}
