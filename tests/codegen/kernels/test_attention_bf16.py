"""Attention of many rows with operands of bfloat16, on tiles and vectors, against float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from exact import call_kernel
from machines import target_of
from test_attention_kernels import draw, draw_sinks, make_spec
from test_bf16 import ISAS, find_target

from relayquant.codegen.kernels.attention.bf16 import (
    make_attention_bf16,
    takes_tiles,
)
from relayquant.codegen.kernels.attention.blocks import make_attention_blocks
from relayquant.codegen.kernels.floating.tile import choose_float_isa
from relayquant.codegen.kernels.isa.select import select_fast_bf16
from relayquant.codegen.kernels.isa.target import resolve_target

#: B, H, G, D, L; positions; rows; the other settings: several tasks and blocks of keys, rows and
#: keys of no whole tile, sequences with a row before the first key and one behind the last
CASES = [
    ((1, 9, 3, 64, 450), [300], 130, {}),
    ((2, 4, 2, 32, 40), [0, 35], 5, {}),
    ((1, 6, 1, 96, 480), [400], 77, {"window": 300}),
    ((3, 2, 1, 32, 9), [5, -1, 8], 3, {"window": 3}),
    ((1, 4, 1, 256, 33), [0], 33, {}),
    ((2, 8, 2, 64, 450), [300, 2], 130, {"window": 200, "has_sinks": True}),
]


def attend(spec, query, caches, positions):
    """Results in float64, and the most that roundings of 2^-9 of each operand change them."""
    rows, heads = query.shape[1:3]
    keys, values = (
        np.repeat(array.astype("float64") * scale, heads // spec.groups, axis=1)
        for array, scale in (caches[:2], caches[2:])
    )
    last = np.array(positions)[:, None] + np.arange(rows)
    at = np.arange(spec.length)
    is_seen = (at <= last[..., None]) & (at > last[..., None] - (spec.window or spec.length + 1))
    is_read = is_seen.any(axis=1)[:, None, :, None]
    keys, values = (np.where(is_read, array, 0) for array in (keys, values))

    def multiply(a, b):
        return np.einsum("bthi,bhki->bhtk", a, b) * spec.scale

    is_seen = is_seen[:, None]
    scores = np.where(is_seen, multiply(query.astype("float64"), keys), -np.inf)
    sinks = np.full(heads, -1e300) if not spec.has_sinks else draw_sinks(spec).astype("float64")
    sinks = sinks[:, None, None]
    largest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-1e300), sinks)
    shares = np.exp(scores - largest)
    total = shares.sum(axis=-1, keepdims=True) + (np.exp(sinks - largest) if spec.has_sinks else 0)
    shares /= np.maximum(total, 1e-300)
    changes = np.expm1(2.0**-8 * multiply(np.abs(query), np.abs(keys))) + 3e-4
    results = shares @ values
    bound = shares * changes @ np.abs(values) + 2.0**-8 * (shares @ np.abs(values))
    bound += (shares * changes).sum(axis=-1, keepdims=True) * np.abs(results)
    return results.swapaxes(1, 2), bound.swapaxes(1, 2)


def run(make, spec, isa, positions, dtype):
    query, caches = draw(spec, positions)
    target = find_target(isa)
    if choose_float_isa(target).lanes != 16:
        pytest.skip("this machine has no vectors of 16 floats")
    operands = caches if dtype == "int8" else caches[::2]
    inputs = [query, *operands, np.array(positions, "int32")]
    inputs += [draw_sinks(spec)] if spec.has_sinks else []
    kernel = make(spec, choose_float_isa(target), isa)
    return call_kernel(kernel, target, inputs, query.shape, "float32"), query, caches


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["tiles", "emulated tiles", "vectors", "emulated vectors"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[0])))
def test_attention_bf16__near_float64(case, dtype, isa):
    sizes, positions, rows, settings = case
    spec = make_spec(sizes, settings, rows, dtype)
    found, *operands = run(make_attention_bf16, spec, ISAS[isa], positions, dtype)
    expected, bound = attend(spec, *operands, positions)
    error = np.abs(found - expected)
    assert (error <= 1.02 * bound + 1e-6).all()
    assert np.square(error).sum() < 2e-5 * np.square(expected).sum()


@pytest.mark.slow
def test_attention_bf16__without_permission_as_float32():
    sizes, positions, rows, settings = CASES[1]
    spec, isa = make_spec(sizes, settings, rows), ISAS["refused"]
    found, *_ = run(make_attention_bf16, spec, isa, positions, "float16")
    expected, *_ = run(lambda *args: make_attention_blocks(*args[:2]), spec, isa, positions, "")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("width", "settings", "expected"),
    [(96, {"window": 5}, True), (80, {}, False), (64, {"soft_cap": 3.0}, False)],
)
def test_takes_tiles__whole_tiles_without_a_bound(width, settings, expected):
    assert takes_tiles(make_spec((1, 2, 1, width, 9), settings, 4)) is expected


@pytest.mark.slow
@pytest.mark.optimized
def test_attention_bf16__instructions():
    target = target_of("sapphirerapids")
    spec = make_spec(CASES[0][0], {}, 130)
    kernel = make_attention_bf16(spec, choose_float_isa(target))
    code = tvm.compile(tvm.IRModule({"attention": kernel}), target=target).mod.inspect_source("asm")
    assert len(re.findall(r"\ttdpbf16ps\b", code)) % 4 == 0
    for instruction in ("tdpbf16ps", "tilestored", "vcvtneps2bf16", "vcvtph2ps.*zmm"):
        assert re.search(instruction, code)
    assert not re.search(r"call\s.*(hf|h2f|exp)", code)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("mcpu", ["znver4", "znver5"])
def test_attention_bf16__instructions_of_vectors(mcpu):
    """A word of 8 keys or numbers is read once for two products, and sums stay in registers."""
    target = resolve_target(f"llvm -mcpu={mcpu}")
    kernel = make_attention_bf16(
        make_spec(CASES[0][0], {}, 130), choose_float_isa(target), select_fast_bf16(target)
    )
    code = tvm.compile(tvm.IRModule({"attention": kernel}), target=target).mod.inspect_source("asm")
    loops = re.findall(r"(?m)^(\.L\w+):((?:\n\t.*)*?\n\tj\w+\t\1)$", code)
    loops = [loop for _, loop in loops if "vdpbf16ps" in loop]
    assert loops
    for loop in loops:
        assert len(re.findall(r"\tvdpbf16ps\b", loop)) == 16
        assert len(re.findall(r"\tvbroadcastss\b", loop)) == 8
        assert len(re.findall(r"\tvmovup[sd]\t", loop)) == 2
