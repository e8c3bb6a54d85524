"""Kernels over sizes that are nested divisions read them from their arguments."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

import relayquant as rq
from relayquant.codegen.schedule.composed_sizes import is_composed, name_sizes
from relayquant.ir.rewrite.function import make_main

N = tirx.Var("n", "int64")
BLOCKS = (N + 7) // 8


def list_shapes(func):
    return [list(param.ty.shape) for param in func.params]


def test_name_sizes__a_product_of_a_named_size_has_no_name_of_its_own():
    x = te.placeholder((BLOCKS, 8), "float32")
    y = te.compute((BLOCKS * 8,), lambda i: x[i // 8, i % 8] + 1)
    func = name_sizes(te.create_prim_func([x, y]))
    (blocks, _), (whole,) = list_shapes(func)
    assert isinstance(blocks, tirx.Var)
    tvm.ir.assert_structural_equal(whole, blocks * 8)


def test_name_sizes__leaves_a_reshape():
    """It becomes a view, if its sizes say so."""
    x = te.placeholder((BLOCKS, N // 2), "float32")
    sizes = (N // 2 * BLOCKS,)
    func = te.create_prim_func([x, te.compute(sizes, lambda i: x[i // (N // 2), i % (N // 2)])])
    assert name_sizes(func).same_as(func)


def test_name_sizes__of_several_forms_of_one_size():
    """A loop has the simplified form."""
    x, z = (te.placeholder((size,), "float32") for size in (N - N % 8 + 0 * N, N - N % 8))
    func = name_sizes(te.create_prim_func([x, z, te.compute(z.shape, lambda i: x[i] + z[i])]))
    (first,), (second,), (third,) = list_shapes(func)
    assert isinstance(first, tirx.Var)
    assert first.same_as(second)
    assert first.same_as(third)


def test_name_sizes__leaves_sizes_without_divisions():
    x = te.placeholder((N, N * 2 + 1), "float32")
    func = te.create_prim_func([x, te.compute(x.shape, lambda i, j: x[i, j])])
    assert name_sizes(func).same_as(func)


@pytest.mark.parametrize("size", [N // 2, N % 3 + 1, tirx.max(N, 4) * 2, BLOCKS * BLOCKS])
def test_is_composed(size):
    assert is_composed(size)
    assert not is_composed(N * 2 - 1)


@pytest.mark.optimized
def test_compile__windows_of_run_time_sizes():
    """Rows are filled to a multiple of 4, cut into windows and put together. LLVM took minutes."""
    height, width = (tirx.Var(name, "int64") for name in "hw")
    x = relax.Var("x", relax.TensorType((height, width), "float32"))
    more = [(4 - size % 4) % 4 for size in (height, width)]
    rows, columns = ((size + extra) // 4 for size, extra in zip((height, width), more, strict=True))
    op = relax.op

    def emit(builder):
        zero = relax.const(0.0, "float32")
        wide = builder.emit(op.concat([x, builder.emit(op.full((height, more[1]), zero))], 1))
        below = builder.emit(op.full((more[0], width + more[1]), zero))
        filled = builder.emit(op.concat([wide, below], 0))
        cut = builder.emit(op.reshape(filled, (rows, 4, columns, 4)))
        moved = builder.emit(op.permute_dims(builder.emit(op.exp(cut)), [0, 2, 1, 3]))
        return builder.emit(op.reshape(moved, (rows * columns, 16)))

    machine = rq.Executor(rq.compile(make_main([x], emit)))
    for sizes in ((8, 12), (5, 7), (1, 4)):
        data = np.random.default_rng(0).standard_normal(sizes).astype("float32")
        filled = np.pad(data, [(0, -size % 4) for size in sizes])
        cut = filled.reshape(filled.shape[0] // 4, 4, -1, 4).transpose(0, 2, 1, 3)
        (found,) = machine.run("main", [data])
        np.testing.assert_allclose(found, np.exp(cut).reshape(-1, 16), rtol=1e-5)
