"""Attention to all keys at once: the bits of its operators one by one, and near float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from floats import HOST, ISAS, check, draw, run_kernel
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.attention.masked import (
    MaskedAttention,
    MaskedRows,
    choose_vectors,
    make_masked_attention,
    saves_time,
)
from relayquant.codegen.kernels.emit import build_kernel
from relayquant.codegen.kernels.floating.gemm import FloatMatmul, make_batch_matmul
from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.floating.tile import FloatIsa
from relayquant.codegen.kernels.isa.caches import Caches

F32 = np.float32
#: Blocks, tiles and squares that overlap, and a rest of keys behind the lanes of a sum.
ODD = MaskedAttention((2, 3), 37, 45, 20, 27, 0.3)
WIDE_ARM = FloatIsa(4, 24, addresses=12)


def apart(spec: MaskedAttention, isa: FloatIsa, operands: list[np.ndarray]) -> np.ndarray:
    """The result of a kernel for each operator, and numpy's products and sums."""
    x, keys, values, *mask = operands
    columns = np.ascontiguousarray(keys.swapaxes(-1, -2))
    product = FloatMatmul(spec.batch, spec.rows, spec.inner, spec.keys)
    shape = (*spec.batch, spec.rows, spec.keys)
    score = run_kernel(make_batch_matmul(product, isa), x, columns, np.zeros(shape, "float32"))
    if spec.factor is not None:
        score = score * F32(spec.factor)
    for each in mask:
        score = score + each
    soft = make_softmax(Softmax(shape, len(shape) - 1), isa_lanes=isa.lanes)
    power = run_kernel(soft, score, np.zeros(shape, "float32"))
    product = FloatMatmul(spec.batch, spec.rows, spec.keys, spec.width)
    return run_kernel(make_batch_matmul(product, isa), power, values, new_result(spec))


def new_result(spec: MaskedAttention) -> np.ndarray:
    return np.full((*spec.batch, spec.rows, spec.width), np.nan, "float32")


def draw_operands(spec: MaskedAttention, seed: int = 0) -> list[np.ndarray]:
    """Operands, and a mask that hides some keys, at the end the more."""
    rng = np.random.default_rng(seed)
    x = draw(rng, *spec.batch, spec.rows, spec.inner)
    keys, values = (draw(rng, *spec.batch, spec.keys, n) for n in (spec.inner, spec.width))
    if spec.mask is None:
        return [x, keys, values]
    hidden = rng.random(spec.mask) < np.linspace(-0.5, 1.5, spec.keys)
    hidden[..., 0] = False
    mask = np.where(hidden, F32(-1e9), draw(rng, *spec.mask)).astype("float32")
    return [x, keys, values, mask]


def attend(spec: MaskedAttention, operands: list[np.ndarray]) -> np.ndarray:
    """The result in float64."""
    x, keys, values, *mask = (each.astype("float64") for each in operands)
    score = x @ keys.swapaxes(-1, -2) * (1.0 if spec.factor is None else spec.factor)
    for each in mask:
        score = score + each
    power = np.exp(score - score.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True) @ values


@pytest.mark.sample(8)
@pytest.mark.parametrize("isa", [*ISAS, WIDE_ARM])
@pytest.mark.parametrize(
    "spec",
    [
        ODD,
        replace(ODD, factor=None),
        replace(ODD, factor=-2.0, mask=(45,)),
        replace(ODD, mask=(37, 45)),
        replace(ODD, mask=(2, 1, 1, 45)),
        replace(ODD, mask=(3, 37, 45)),
        replace(ODD, mask=(2, 1, 37, 45)),
        replace(ODD, batch=(), mask=(37, 45)),
        MaskedAttention((1, 2), 16, 16, 16, 16, mask=(1, 2, 16, 16)),
        MaskedAttention((40,), 17, 100, 64, 64, 0.125, mask=(40, 17, 100)),
    ],
)
def test_masked_attention__the_bits_of_its_operators(spec, isa):
    operands = draw_operands(spec)
    got = run_kernel(make_masked_attention(spec, isa), *operands, new_result(spec))
    np.testing.assert_array_equal(got, apart(spec, isa, operands))
    check(got, attend(spec, operands))


CAUSAL = MaskedAttention((2,), 96, 96, 32, 32, 0.2, mask=(96, 96))


def hide_later(spec: MaskedAttention, low: float = -1e9) -> np.ndarray:
    return np.triu(np.full((spec.rows, spec.keys), low, "float32"), 1)


class SeenKeys(MaskedRows):
    """Stores which keys a block of rows sees, and nothing else."""

    def emit_scores(self, head, part, x, first, end, scores):
        for i, value in enumerate((first, end)):
            T.buffer_store(self.y, T.Cast("float32", value), [part * 2 + i])

    def emit_powers(self, *_):
        pass

    emit_values = emit_result = emit_powers


def find_seen(spec: MaskedAttention, operands: list[np.ndarray]) -> list[tuple[int, int]]:
    """The first key that each block of rows sees, and the first one behind them."""
    kernel = build_kernel("seen", lambda: SeenKeys(spec, HOST).emit())
    found = run_kernel(kernel, *operands, new_result(spec)).reshape(-1)
    blocks = -(-spec.rows // (choose_vectors(spec, HOST) * HOST.lanes))
    return [(int(found[2 * i]), int(found[2 * i + 1])) for i in range(blocks)]


@pytest.mark.parametrize("low", [-1e9, -1e4, float(np.finfo("float32").min), -np.inf])
def test_masked_attention__hidden_keys_are_not_read(low):
    """As soon as all rows of a block hide a tile of them."""
    operands = [*draw_operands(CAUSAL)[:3], hide_later(CAUSAL, low)]
    block = choose_vectors(CAUSAL, HOST) * HOST.lanes
    tile = max(HOST.accumulators // choose_vectors(CAUSAL, HOST), 1)
    for i, (first, end) in enumerate(find_seen(CAUSAL, operands)):
        assert first == 0
        assert min((i + 1) * block, CAUSAL.keys) <= end <= (i + 1) * block + tile
    late = np.where(np.arange(96) < 48, F32(low), F32(0))[None].repeat(96, 0)
    assert all(
        48 - tile <= a <= 48 and b == 96 for a, b in find_seen(CAUSAL, [*operands[:3], late])
    )


@pytest.mark.parametrize("low", [-1.0, -300.0])
def test_masked_attention__a_mask_that_large_scores_may_overcome_hides_nothing(low):
    """Both sides of the bound: scores up to 2 x 32 x 100 x 0.2, or all rows have the mask."""
    x, keys, values, _ = draw_operands(CAUSAL)
    operands = [x * 10, keys * 10, values, hide_later(CAUSAL, low)]
    assert all(seen == (0, 96) for seen in find_seen(CAUSAL, operands))
    everywhere = [x, keys, values, np.full((96, 96), F32(-1e9))]
    assert all(seen == (0, 96) for seen in find_seen(CAUSAL, everywhere))
    for each in (operands, everywhere):
        got = run_kernel(make_masked_attention(CAUSAL, HOST), *each, new_result(CAUSAL))
        np.testing.assert_array_equal(got, apart(CAUSAL, HOST, each))


def place(shape: tuple[int, ...], *numbers: tuple[int, int, float]) -> np.ndarray:
    """Zeros of a head, but for (row, column, number)."""
    found = np.zeros((1, *shape), "float32")
    for row, column, number in numbers:
        found[0, row, column] = number
    return found


@pytest.mark.parametrize(
    ("row", "keys", "low", "factor"),
    [
        (100.0, 100.0, -19000.0, None),  # -10,000 against 10,000 - 19,000
        (100.0, 100.0, -190000.0, 10.0),
        (1e-24, 1e16, -150.0, 1e10),  # the square of 1e-24 is 0
        (1e-18, 1e-18, -500.0, 3e38),  # the product of the squares is 0
    ],
)
def test_masked_attention__scores_next_to_the_bound_are_computed(row, keys, low, factor):
    """One long row, a key against it that all rows see, and one along it that a mask may hide."""
    spec = MaskedAttention((1,), 32, 96, 32, 32, factor, mask=(32, 96))
    mask = np.full((32, 96), F32(-1e9))
    mask[:, 0], mask[:, 90] = 0, low
    x = place((32, 32), (5, 0, row))
    operands = [x, place((96, 32), (0, 0, -keys), (90, 0, keys)), draw_operands(spec)[2], mask]
    got = run_kernel(make_masked_attention(spec, HOST), *operands, new_result(spec))
    np.testing.assert_array_equal(got, apart(spec, HOST, operands))
    assert 2 * row * keys * (factor or 1) + low > 40, "the key that the mask may hide wins"


@pytest.mark.sample(5)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("operand", "place"), [(0, (90, 5)), (1, (90, 5)), (2, (90, 5)), (3, (90, 5)), (3, (5, 90))]
)
def test_masked_attention__numbers_that_are_not_finite_have_their_effect(operand, place, value):
    """Behind hidden keys too: 0 times infinity is NaN."""
    operands = [*draw_operands(CAUSAL)[:3], hide_later(CAUSAL)]
    operands[operand][(..., *place)] = value
    got = run_kernel(make_masked_attention(CAUSAL, HOST), *operands, new_result(CAUSAL))
    np.testing.assert_array_equal(got, apart(CAUSAL, HOST, operands))


def test_choose_vectors__of_sizes_that_the_kernel_takes():
    isa = FloatIsa(16, 28, caches=Caches(near_bytes=1 << 20))
    assert choose_vectors(ODD, isa) == 2
    assert choose_vectors(replace(ODD, rows=17), isa) == 1
    too_few = [{"batch": (2, 0)}, {"rows": 15}, {"keys": 15}, {"inner": 15}, {"width": 15}]
    for sizes in (*too_few, {"keys": 1 << 13}):
        assert choose_vectors(replace(ODD, **sizes), isa) == 0


@pytest.mark.parametrize(
    ("rows", "mask", "expected"),
    [
        (384, None, True),
        (128, None, False),  # 12 heads of scores fit 1 MB
        (128, (128, 128), True),
        (64, (64, 64), False),  # two blocks
        (129, (129, 129), False),  # computes 160 rows
        (577, None, True),
    ],
)
def test_saves_time__of_many_whole_blocks(rows, mask, expected):
    isa = FloatIsa(16, 28, caches=Caches(near_bytes=1 << 20))
    spec = MaskedAttention((12,), rows, rows, 64, 64, 0.125, mask)
    assert saves_time(spec, isa) is expected
