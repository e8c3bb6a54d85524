"""The gated delta rule on every instruction set, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machines import best_isa, every_isa, runnable_target
from tvm import relax

import relayquant as rq
from relayquant.codegen.kernels.attention.delta import Delta, make_delta
from relayquant.codegen.kernels.floating.tile import choose_float_isa
from relayquant.ir.dialect import qnn
from relayquant.ir.reference.qnn import gated_delta


def draw(spec, counts, positions, seed=0):
    """The operands. The state of a sequence that begins is NaN."""
    rng = np.random.default_rng(seed)
    batch, rows, heads, width = spec.extents
    query, key = (rng.normal(size=(batch, rows, spec.groups, spec.keys)) for _ in range(2))
    key /= np.sqrt((key**2).sum(-1, keepdims=True))
    value = rng.normal(size=(batch, rows, heads, width))
    decay, strength = (rng.uniform(0.3, 1, (batch, rows, heads)) for _ in range(2))
    state = rng.normal(size=(batch, heads, spec.keys, width))
    state[np.array(positions) == 0] = np.nan
    floats = [each.astype("float32") for each in (query, key, value, decay, strength, state)]
    return [*floats, np.array(positions, "int32"), np.array(counts, "int64")]


def check(spec, counts, positions, target, known=None):
    arrays = draw(known or spec, counts, positions)
    expected = gated_delta(*arrays, is_tiled=spec.is_tiled)
    kernel = make_delta(spec, choose_float_isa(target))
    run = tvm.compile(tvm.IRModule({"gated_delta": kernel}), target=target)
    found = [tvm.runtime.tensor(np.full(each.shape, np.nan, "float32")) for each in expected]
    run["gated_delta"](*map(tvm.runtime.tensor, arrays), *found)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=5e-6)


#: B, R, H, V; G, K; tiled; counts, positions
CASES = [
    ((1, 1, 4, 128), 2, 128, False, [1], [3]),
    ((1, 9, 4, 64), 2, 32, True, [9], [0]),
    ((3, 5, 6, 48), 3, 16, False, [5, 0, 2], [0, 4, 9]),
    ((2, 3, 2, 20), 1, 7, False, [3, 1], [1, 0]),
    ((1, 2, 3, 3), 3, 2, True, [2], [5]),
    ((1, 40, 32, 128), 16, 128, False, [38], [2]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[0])))
def test_gated_delta__kernel(case):
    *sizes, counts, positions = case
    check(Delta(*sizes), counts, positions, runnable_target(best_isa()))


@pytest.mark.sample(2)
@every_isa
def test_gated_delta__on_every_instruction_set(isa):
    *sizes, counts, positions = CASES[2]
    check(Delta(*sizes), counts, positions, runnable_target(isa))


def test_gated_delta__rows_and_sequences_known_at_run_time():
    extents, *sizes, counts, positions = CASES[2]
    known = Delta(extents, *sizes)
    spec = Delta((None, None, *extents[2:]), *sizes)
    check(spec, counts, positions, runnable_target(best_isa()), known)


def test_gated_delta__compiled_with_the_kernel():
    spec = Delta(CASES[0][0], 2, 128, False)
    arrays = draw(spec, [1], [3])
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"p{i}", relax.TensorType(each.shape, str(each.dtype)))
        for i, each in enumerate(arrays)
    ]
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(qnn.gated_delta(*params)))
    found = rq.Executor(rq.compile(builder.get())).run("main", arrays)
    for one, other in zip(found, gated_delta(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=5e-6)
