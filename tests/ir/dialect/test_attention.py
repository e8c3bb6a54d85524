"""Attention over a cache: loop nests and numpy against PyTorch's rules, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from qnn_testing import make_module, run_module, type_of
from tvm import relax, tirx

from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run
from relayquant.ir.reference.qnn import quantize_rows

LENGTH = 9


def draw(kind="float16", batch=2, rows=3, heads=4, groups=2, width=8, seed=0):
    """Draw query, keys, key scale, values, value scale, positions."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(batch, rows, heads, width)).astype("float32")
    caches = []
    for _ in range(2):
        cache = rng.normal(size=(batch, groups, LENGTH, width)).astype("float32")
        if kind == "int8":
            caches += quantize_rows(cache)
        else:
            caches += [cache.astype(kind), np.float32(1)]
    positions = np.array([0, LENGTH - rows, 2][:batch], "int32")
    return [query, *caches, positions]


def attend(
    query, keys, key_scale, values, value_scale, positions, *, scale, window=0, cap=0.0, sinks=()
):
    """One row after the other, in float64."""
    keys, values = keys * np.float64(key_scale), values * np.float64(value_scale)
    result = np.zeros(query.shape)
    share = query.shape[2] // keys.shape[1]
    for b, t, h in np.ndindex(query.shape[:3]):
        last = positions[b] + t
        seen = slice(max(0, last - window + 1) if window else 0, last + 1)
        scores = keys[b, h // share, seen] @ query[b, t, h] * scale
        if cap:
            scores = cap * np.tanh(scores / cap)
        powers = np.exp(np.append(scores, sinks[h : h + 1]))
        powers /= powers.sum()
        result[b, t, h] = powers[: len(scores)] @ values[b, h // share, seen]
    return result


@pytest.mark.parametrize(
    ("kind", "window", "cap"),
    [("float16", 0, 0.0), ("float32", 3, 0.0), ("int8", 0, 2.0), ("float16", 2, 1.0)],
)
def test_cached_attention__numpy_and_loop_nest_are_row_by_row(kind, window, cap):
    arrays = draw(kind)
    module = make_module(
        lambda *a: qnn.cached_attention(*a, 0.3, window, cap), [type_of(a) for a in arrays]
    )
    expected = attend(*arrays, scale=0.3, window=window, cap=cap)
    np.testing.assert_allclose(run(module, arrays)[0], expected, atol=2e-6)
    np.testing.assert_allclose(run_module(module, arrays), expected, atol=2e-6)


@pytest.mark.parametrize(("kind", "window"), [("float32", 0), ("int8", 2)])
def test_cached_attention__sinks(kind, window):
    """Below and above all scores."""
    arrays, sinks = draw(kind), (-3.0, 0.25, 1.0, 9.5)
    module = make_module(
        lambda *a: qnn.cached_attention(*a, 0.3, window, sinks=sinks), [type_of(a) for a in arrays]
    )
    expected = attend(*arrays, scale=0.3, window=window, sinks=np.array(sinks))
    np.testing.assert_allclose(run(module, arrays)[0], expected, atol=2e-6)
    np.testing.assert_allclose(run_module(module, arrays), expected, atol=2e-6)


def test_cached_attention__reads_no_key_that_no_row_sees():
    arrays = draw("float32")
    expected = attend(*arrays, scale=1.0)
    arrays[-1][:] = [0, 1]
    for cache in (arrays[1], arrays[3]):
        cache[:, :, 4:] = np.nan
    module = make_module(qnn.cached_attention, [type_of(a) for a in arrays])
    found = run(module, arrays)[0]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6)


@pytest.mark.parametrize("half", [4, 3])
def test_rotate__turns_pairs(half):
    """As complex numbers; what is not rotated stays, and positions end at the table's last row."""
    rng = np.random.default_rng(half)
    x = rng.normal(size=(2, 3, 2, 8)).astype("float32")
    angles = rng.normal(size=(LENGTH, half)).astype("float32")
    positions = np.array([2, LENGTH - 2], "int32")
    arrays = [x, np.cos(angles), np.sin(angles), positions]
    module = make_module(qnn.rotate, [type_of(a) for a in arrays])
    places = np.minimum(positions[:, None] + np.arange(3), LENGTH - 1)
    turned = x[..., :half] + 1j * x[..., half : 2 * half]
    turned = turned * np.exp(1j * angles)[places][:, :, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], -1)
    np.testing.assert_allclose(run(module, arrays)[0], expected, atol=1e-6)
    np.testing.assert_allclose(run_module(module, arrays), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["float16", "float32", "int8"])
def test_update_cache__writes_the_rows_that_fit(kind):
    rng = np.random.default_rng(0)
    cache = rng.integers(-9, 9, (3, 2, LENGTH, 4)).astype(kind)
    rows = rng.normal(size=(3, 2, 2, 4)).astype("int8" if kind == "int8" else "float32")
    positions = np.array([0, LENGTH - 1, -1], "int32")
    module = make_module(qnn.update_cache, [type_of(a) for a in (cache, rows, positions)])
    expected = cache.copy()
    expected[0, :, 0], expected[0, :, 1] = rows[0]
    expected[1, :, -1], expected[2, :, 0] = rows[1, 0], rows[2, 1]
    given = cache.copy()
    np.testing.assert_array_equal(run(module, [cache, rows, positions])[0], expected)
    np.testing.assert_array_equal(run_module(module, [cache, rows, positions]), expected)
    np.testing.assert_array_equal(cache, given)


def refuse(constructor, types, message):
    """Check that types (shape, dtype) are refused."""
    with pytest.raises(QnnError, match=message):
        make_module(constructor, [relax.TensorType(*each) for each in types])


BAD = {
    r"operand 'query' has 3 heads in dimension 2; allowed: a multiple of 2": {0: (2, 3, 3, 8)},
    r"operand 'keys' has shape \(2, 2, 9, 4\); allowed: 8 in dimension 3": {1: (2, 2, 9, 4)},
    r"operand 'values' has shape \(2, 2, 5, 8\); allowed: 9 in dimension 2": {3: (2, 2, 5, 8)},
    r"operand 'positions' has shape \(3\); allowed: 2 in dimension 0, one position": {5: (3,)},
    "operand 'key_scale' has rank 4; allowed: rank 0, the number 1": {2: (2, 2, 9, 1)},
    r"operand 'query' has rank 3; allowed: rank 4 \(sequences, rows": {0: (2, 4, 8)},
}


@pytest.mark.parametrize("message", BAD)
def test_cached_attention__refuses(message):
    types = [(array.shape, str(array.dtype)) for array in draw()]
    for position, shape in BAD[message].items():
        types[position] = (shape, types[position][1])
    refuse(qnn.cached_attention, types, message)


def test_cached_attention__refuses_scales_and_numbers():
    types = [(array.shape, str(array.dtype)) for array in draw("int8")]
    message = "window=-1, soft_cap=0.0; allowed: numbers from 0 on"
    refuse(lambda *a: qnn.cached_attention(*a, window=-1), types, message)
    for sinks, count in ((1.0, 2.0, 3.0), "3 sinks"), ((0.0, 0.0, 0.0, math.inf), "4 sinks"):
        message = f"has {count}; allowed: none, or a finite number for each of 4 heads"
        refuse(lambda *a, own=sinks: qnn.cached_attention(*a, sinks=own), types, message)
    types[4] = ((2, 2, 9, 8), "float32")
    message = r"'value_scale' has shape \(2, 2, 9, 8\); allowed: 1 in dimension 3, one scale"
    refuse(qnn.cached_attention, types, message)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (
            [((2, 2, 9, 4), "int8"), ((2, 3, 2, 4), "float32")],
            "'rows' has dtype float32; allowed: int8. Quantize them by qnn.quantize_rows",
        ),
        (
            [((2, 2, 9, 4), "float16"), ((2, 3, 4, 4), "float32")],
            r"'rows' has shape \(2, 3, 4, 4\); allowed: 2 in dimension 2, as dimension 1",
        ),
        (
            [((2, 2, 9, 4), "bfloat16"), ((2, 3, 2, 4), "float32")],
            "'cache' has dtype bfloat16; allowed: float16, float32, int8",
        ),
    ],
)
def test_update_cache__refuses(types, message):
    refuse(qnn.update_cache, [*types, ((2,), "int32")], message)


def test_rotate__refuses_more_angles_than_pairs():
    types = [((2, 3, 2, 8), "float32"), *[((9, 5), "float32")] * 2, ((2,), "int32")]
    refuse(qnn.rotate, types, "at most 4 in dimension 1, half of the width 8 of 'x'")


def test_attention__symbolic_rows():
    """The number of rows is known when the module runs."""
    arrays = draw()
    types = [relax.TensorType(a.shape, str(a.dtype)) for a in arrays]
    rows = relax.TensorType([2, tirx.Var("rows", "int64"), 4, 8], "float32")
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", ty) for i, ty in enumerate([rows, *types[1:]])]
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(qnn.cached_attention(*params, 0.3)))
    found = run_module(builder.get(), arrays)
    np.testing.assert_allclose(found, attend(*arrays, scale=0.3), atol=2e-6)
