"""The gated delta rule: loop nest and numpy against one matrix after the other in float64,
and what is refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from qnn_testing import make_module, run_module, type_of
from tvm import relax, tirx

from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run


def draw(batch=3, rows=4, groups=2, heads=4, keys=5, values=3, seed=0):
    """Draw the operands. Sequences begin, go on, and have fewer rows."""
    rng = np.random.default_rng(seed)
    query, key = (rng.normal(size=(batch, rows, groups, keys)) for _ in range(2))
    value = rng.normal(size=(batch, rows, heads, values))
    decay, strength = (rng.uniform(0.1, 1, (batch, rows, heads)) for _ in range(2))
    state = rng.normal(size=(batch, heads, keys, values))
    floats = [each.astype("float32") for each in (query, key, value, decay, strength, state)]
    positions, counts = np.array([0, 7, 2][:batch], "int32"), np.array([rows, rows - 1, 0][:batch])
    return [*floats, positions, counts]


def expect(query, key, value, decay, strength, state, positions, counts, is_tiled=False):
    """One matrix after the other, in float64, as the definition has it."""
    results, after = np.zeros(value.shape), state.astype("float64")
    groups, heads = key.shape[2], value.shape[2]
    for b, h in np.ndindex(after.shape[:2]):
        g = h % groups if is_tiled else h * groups // heads
        now = after[b, h] * (positions[b] > 0)
        for t in range(counts[b]):
            k, q = key[b, t, g].astype("float64"), query[b, t, g].astype("float64")
            now = now * decay[b, t, h]
            now = now + np.outer(k, strength[b, t, h] * (value[b, t, h] - k @ now))
            results[b, t, h] = q @ now
        after[b, h] = now
    return results, after


@pytest.mark.parametrize("is_tiled", [False, True])
def test_gated_delta__numpy_and_loop_nest_are_row_by_row(is_tiled):
    arrays = draw()
    module = make_module(
        lambda *a: qnn.gated_delta(*a, is_tiled=is_tiled), [type_of(a) for a in arrays]
    )
    expected = expect(*arrays, is_tiled=is_tiled)
    for found in (run(module, arrays), run_module(module, arrays)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)


def test_gated_delta__state_of_a_sequence_that_begins_is_not_read():
    arrays = draw()
    expected = expect(*arrays)
    arrays[5][0] = np.nan
    module = make_module(qnn.gated_delta, [type_of(a) for a in arrays])
    for found in (run(module, arrays), run_module(module, arrays)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)


def test_gated_delta__symbolic_rows():
    arrays = draw()
    rows, types = tirx.Var("rows", "int64"), []
    for array in arrays:
        shape = [rows if i == 1 and array.shape[1] == 4 and array.ndim > 2 else size
                 for i, size in enumerate(array.shape)]  # fmt: skip
        types.append(relax.TensorType(shape, str(array.dtype)))
    types[5] = type_of(arrays[5])
    module = make_module(qnn.gated_delta, types)
    for one, other in zip(run_module(module, arrays), expect(*arrays), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


BAD = {
    r"operand 'value' has 3 heads in dimension 2; allowed: a multiple of 2": {
        2: (3, 4, 3, 3), 3: (3, 4, 3), 4: (3, 4, 3), 5: (3, 3, 5, 3),
    },
    r"operand 'key' has shape \(3, 4, 2, 6\); allowed: 5 key width in dimension 3, as 'query'": {
        1: (3, 4, 2, 6)
    },
    r"operand 'state' has shape \(3, 4, 3, 5\); allowed: 5 key width in dimension 2": {
        5: (3, 4, 3, 5)
    },
    r"operand 'counts' has shape \(2\); allowed: 3 sequences in dimension 0": {7: (2,)},
    r"operand 'decay' has rank 2; allowed: rank 3 \(sequences, rows, value heads\)": {3: (3, 4)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_gated_delta__refuses(message):
    types = [(array.shape, str(array.dtype)) for array in draw()]
    for position, shape in BAD[message].items():
        types[position] = (shape, types[position][1])
    with pytest.raises(QnnError, match=message):
        make_module(qnn.gated_delta, [relax.TensorType(*each) for each in types])
