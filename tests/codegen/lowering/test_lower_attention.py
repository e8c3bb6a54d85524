"""Attention over a cache, compiled: caches are changed in their own memory, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.ir.dialect import qnn
from relayquant.ir.reference.qnn import quantize_rows

BATCH, GROUPS, LENGTH, WIDTH = 2, 2, 9, 8
CACHE = relax.TensorType((BATCH, GROUPS, LENGTH, WIDTH), "float16")
ROWS = relax.TensorType((BATCH, 1, GROUPS, WIDTH), "float32")
POSITIONS = relax.TensorType((BATCH,), "int32")


def build(types, compute, constant=None):
    """A module whose main returns the tuple compute(builder, *parameters)."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, ty) for name, ty in types.items()]
    with builder.function("main", params):
        with builder.dataflow():
            results = compute(builder.emit, *params)
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.finalize()


def update_twice(emit, rows, positions, cache):
    first = emit(qnn.update_cache(cache, rows, positions))
    later = emit(relax.op.add(positions, relax.const(np.int32(1))))
    return [emit(qnn.update_cache(first, rows, later))]


def draw(seed=0):
    rng = np.random.default_rng(seed)
    cache = rng.normal(size=(BATCH, GROUPS, LENGTH, WIDTH)).astype("float16")
    rows = rng.normal(size=(BATCH, 1, GROUPS, WIDTH)).astype("float32")
    return rows, np.array([3, LENGTH - 2], "int32"), cache


def write(cache, rows, positions):
    """The cache with rows at positions and one behind."""
    result = cache.copy()
    for b, place in enumerate(positions):
        result[b, :, place] = result[b, :, place + 1] = rows[b, 0]
    return result


def test_update_cache__changes_the_tensor_that_is_passed():
    """And passes it on: no copy, also through the executable's file."""
    mod = build({"rows": ROWS, "positions": POSITIONS, "cache": CACHE}, update_twice)
    rows, positions, cache = draw()
    expected = write(cache, rows, positions)
    (found,) = rq.reference.run(mod, [rows, positions, cache])
    np.testing.assert_array_equal(found, expected)
    exe = rq.compile(mod)
    machine = relax.VirtualMachine(exe, tvm.cpu())
    tensor = tvm.runtime.tensor(cache)
    for _ in range(2):  # the second time it is changed already
        result = machine["main"](tvm.runtime.tensor(rows), tvm.runtime.tensor(positions), tensor)
        assert result[0].data_ptr() == tensor.data_ptr()
        np.testing.assert_array_equal(tensor.numpy(), expected)


def test_update_cache__leaves_the_arrays_of_numpy_callers():
    mod = build({"rows": ROWS, "positions": POSITIONS, "cache": CACHE}, update_twice)
    rows, positions, cache = draw()
    given = cache.copy()
    (found,) = Executor(rq.compile(mod)).run("main", [rows, positions, cache])
    np.testing.assert_array_equal(found, write(given, rows, positions))
    np.testing.assert_array_equal(cache, given)


def test_update_cache__copies_a_constant():
    """It is the same at each call. The second update of a call needs no further copy."""
    rows, positions, cache = draw()

    def compute(emit, rows, positions):
        return update_twice(emit, rows, positions, relax.const(cache))

    exe = rq.compile(build({"rows": ROWS, "positions": POSITIONS}, compute))
    run = Executor(exe).run
    np.testing.assert_array_equal(run("main", [rows, positions])[0], write(cache, rows, positions))
    others = -rows, np.array([0, 0], "int32")
    np.testing.assert_array_equal(run("main", others)[0], write(cache, *others))


def test_update_cache__copies_a_parameter_that_is_read_elsewhere():
    def compute(emit, rows, positions, cache):
        new = emit(qnn.update_cache(cache, rows, positions))
        return [new, emit(relax.op.add(cache, cache))]

    mod = build({"rows": ROWS, "positions": POSITIONS, "cache": CACHE}, compute)
    arrays = draw()
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    new, twice = relax.VirtualMachine(rq.compile(mod), tvm.cpu())["main"](*tensors)
    np.testing.assert_array_equal(tensors[2].numpy(), arrays[2])
    np.testing.assert_array_equal(twice.numpy(), arrays[2] * 2)
    np.testing.assert_array_equal(new.numpy(), rq.reference.run(mod, list(arrays))[0])


def test_update_cache__copies_a_constant_that_another_function_passes():
    rows, positions, cache = draw()
    mod = build({"rows": ROWS, "positions": POSITIONS, "cache": CACHE}, update_twice)
    builder = relax.BlockBuilder(mod)
    params = [relax.Var("rows", ROWS), relax.Var("positions", POSITIONS)]
    with builder.function("outer", params):
        call = mod.get_global_var("main")(*params, relax.const(cache))
        builder.emit_func_output(builder.emit(call))
    run = Executor(rq.compile(builder.get())).run
    for places in (positions, np.array([0, 1], "int32")):
        (found,) = run("outer", [rows, places])
        np.testing.assert_array_equal(found, write(cache, rows, places))


@pytest.mark.parametrize("kind", ["float16", "float32", "int8"])
def test_update_cache__symbolic_rows(kind):
    """Rows outside of the cache are not written, those of an int8 cache are int8."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 4, 2, 5)).astype("int8" if kind == "int8" else "float32")
    cache = rng.integers(-9, 9, (3, 2, LENGTH, 5)).astype(kind)
    arrays = [rows, np.array([-2, 3, LENGTH - 3], "int32"), cache]
    types = {
        "rows": relax.TensorType((3, tvm.tirx.Var("n", "int64"), 2, 5), str(rows.dtype)),
        "positions": relax.TensorType((3,), "int32"),
        "cache": relax.TensorType(cache.shape, kind),
    }
    mod = build(types, lambda emit, r, p, c: [emit(qnn.update_cache(c, r, p))])
    (found,) = Executor(rq.compile(mod)).run("main", arrays)
    np.testing.assert_array_equal(found, rq.reference.run(mod, arrays)[0])


@pytest.mark.parametrize(("width", "half"), [(64, 32), (20, 7), (80, 16)])
def test_rotate__as_numpy(width, half):
    rng = np.random.default_rng(half)
    x = rng.normal(size=(2, 3, 2, width)).astype("float32")
    tables = rng.normal(size=(2, LENGTH, half)).astype("float32")
    arrays = [x, *tables, np.array([2, LENGTH - 2], "int32")]
    types = {
        "x": relax.TensorType((2, tvm.tirx.Var("n", "int64"), 2, width), "float32"),
        "cos": relax.TensorType((LENGTH, half), "float32"),
        "sin": relax.TensorType((LENGTH, half), "float32"),
        "positions": POSITIONS,
    }
    mod = build(types, lambda emit, *args: [emit(qnn.rotate(*args))])
    (found,) = Executor(rq.compile(mod)).run("main", arrays)
    np.testing.assert_allclose(found, rq.reference.run(mod, arrays)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_cached_attention__as_numpy(kind):
    """One row; and several, whose number is known at run time."""
    rng = np.random.default_rng(0)
    caches = []
    for _ in range(2):
        cache = rng.normal(size=(2, 2, 70, 32)).astype("float32")
        caches += quantize_rows(cache) if kind == "int8" else [cache.astype(kind), np.float32(1)]
    types = [relax.TensorType(cache.shape, str(cache.dtype)) for cache in caches]
    for rows in (1, 5):
        query = rng.normal(size=(2, rows, 6, 32)).astype("float32")
        count = 1 if rows == 1 else tvm.tirx.Var("n", "int64")
        names = {"query": relax.TensorType((2, count, 6, 32), "float32"), "positions": POSITIONS}
        given = dict(zip(("k", "ks", "v", "vs"), types, strict=True)) if kind == "int8" else {}
        given = given or {"k": types[0], "v": types[2]}

        def compute(emit, query, positions, *cache):
            cache = cache if len(cache) == 4 else (cache[0], 1.0, cache[1], 1.0)
            return [emit(qnn.cached_attention(query, *cache, positions, 0.2, 9, 3.0))]

        mod = build({**names, **given}, compute)
        arrays = [query, np.array([3, 70 - rows], "int32"), *caches[:: 4 // len(given)]]
        (found,) = Executor(rq.compile(mod)).run("main", arrays)
        expected = rq.reference.run(mod, arrays)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)
