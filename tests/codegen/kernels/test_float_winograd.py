"""Float convolutions by Winograd's transforms, against float64 numpy and the direct form."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from drawing import count_examples
from floats import FULL, HOST, ISAS, check, convolve, draw, finish, run_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d, pack_conv2d
from relayquant.codegen.kernels.floating.convolution.winograd import (
    FloatWinogradPlan,
    make_winograd,
    pack_winograd,
    prefers_winograd,
)
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, FloatIsa
from relayquant.codegen.kernels.isa.caches import Caches

SAME = (1, 1, 1, 1)
LAYER = FloatConv2d(1, 28, 28, 64, 64, (3, 3), padding=SAME, epilogue=FULL)
COLUMNS = FloatEpilogue(bias=True, low=0.0, columns=(16, 80))
CASES = {
    "tiles that fit": FloatConv2d(1, 8, 12, 32, 16, (3, 3), padding=SAME, epilogue=FULL),
    "tiles that overlap": FloatConv2d(1, 9, 7, 16, 32, (3, 3), padding=(1, 2, 0, 1)),
    "one tile, no padding": FloatConv2d(1, 6, 6, 48, 48, (3, 3), epilogue=FULL),
    "images": FloatConv2d(3, 5, 6, 64, 32, (3, 3), padding=SAME, epilogue=FULL),
    "chunks of several sizes": FloatConv2d(1, 27, 26, 128, 64, (3, 3), padding=SAME, epilogue=FULL),
    "parts of the channels": FloatConv2d(1, 14, 13, 64, 176, (3, 3), padding=SAME, epilogue=FULL),
    "columns of a wider tensor": FloatConv2d(2, 6, 9, 16, 48, (3, 3), epilogue=COLUMNS),
}


def check_winograd(spec: FloatConv2d, isa=HOST, symbolic: bool = False) -> None:
    rng = np.random.default_rng(3)
    x = draw(rng, *spec.in_shape)
    # Sums of about 1, which the epilogue leaves as large: errors are relative to the sums.
    w = draw(rng, *spec.weight_shape) / np.float32(3 * spec.in_channels**0.5)
    expected, operands = finish(convolve(x, w, spec), spec.epilogue, rng)
    made = replace(spec, batch=tirx.Var("n", "int64")) if symbolic else spec
    packed = pack_winograd(w, made, isa).expand()
    out = np.full(spec.out_shape, np.nan, "float32")
    got = run_kernel(make_winograd(made, isa), x, packed, *operands, out)
    first = spec.epilogue.first
    check(got[..., first : first + spec.out_channels], expected)
    others = np.delete(got, np.s_[first : first + spec.out_channels], axis=-1)
    assert np.isnan(others).all()


@pytest.mark.sample(6)
@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_make_winograd__follows_numpy(name, isa):
    check_winograd(CASES[name], isa)


@pytest.mark.parametrize("symbolic", [False, True])
def test_make_winograd__parts_share_transformed_activations(symbolic):
    """If the last-level cache is slow: weights are then read once, by one part."""
    far = FloatIsa(16, 28, caches=Caches(far_bytes=3))
    spec = FloatConv2d(2, 13, 14, 48, 80, (3, 3), padding=SAME, epilogue=FULL)
    assert FloatWinogradPlan(spec, far).is_common
    check_winograd(spec, far, symbolic)


@pytest.mark.parametrize("name", ["images", "chunks of several sizes"])
def test_make_winograd__symbolic_batch(name):
    check_winograd(CASES[name], symbolic=True)


@given(
    size=st.tuples(st.integers(4, 21), st.integers(4, 21)),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    isa=st.sampled_from(ISAS),
)
@settings(max_examples=count_examples(12), deadline=None, derandomize=True)
def test_make_winograd__of_any_size(size, channels, padding, isa):
    height, width = (max(length, 6) for length in size)
    inner, outer = (16 * count for count in channels)
    check_winograd(FloatConv2d(1, height, width, inner, outer, (3, 3), padding=padding), isa)


def measure_errors(spec: FloatConv2d, x: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """Root mean squares of the errors of the direct form and of this one."""
    exact = convolve(x, w, spec)
    out = np.zeros(exact.shape, "float32")
    direct = run_kernel(make_conv2d(spec, HOST), x, pack_conv2d(w, spec, HOST), out)
    packed = pack_winograd(w, spec, HOST).expand()
    transformed = run_kernel(make_winograd(spec, HOST), x, packed, out)
    errors = [np.sqrt(np.mean((got - exact) ** 2)) for got in (direct, transformed)]
    return float(errors[0]), float(errors[1])


@pytest.mark.sample(4)
@pytest.mark.parametrize("channels", [16, 64, 512])
@pytest.mark.parametrize("mean", [0, 1, 100])
def test_make_winograd__errors_are_comparable_to_those_of_the_direct_form(channels, mean):
    """Of every size and mean of activations: `docs/concepts/numbers.md` states what they are."""
    rng = np.random.default_rng(5)
    spec = FloatConv2d(1, 14, 14, channels, 32, (3, 3), padding=SAME)
    x, w = mean + draw(rng, *spec.in_shape), draw(rng, *spec.weight_shape)
    direct, transformed = measure_errors(spec, x, w)
    assert transformed <= 4 * direct


def test_make_winograd__zeros_give_zero():
    spec = CASES["tiles that overlap"]
    w = draw(np.random.default_rng(0), *spec.weight_shape)
    x, out = np.zeros(spec.in_shape, "float32"), np.ones(spec.out_shape, "float32")
    packed = pack_winograd(w, spec, HOST).expand()
    got = run_kernel(make_winograd(spec, HOST), x, packed, out)
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"batch": tirx.Var("n", "int64")}, True),
        ({"kernel": (3, 1)}, False),
        ({"strides": (2, 2)}, False),
        ({"dilation": (2, 2)}, False),
        ({"groups": 2}, False),
        ({"in_channels": 24}, False),  # not of whole vectors
        ({"out_channels": 72}, False),
        ({"height": 3}, False),  # smaller than a tile
        ({"height": 7, "width": 7, "in_channels": 512, "out_channels": 512}, False),  # 38 MB
        ({"height": 14, "width": 14, "in_channels": 256, "out_channels": 256}, True),
    ],
)
def test_prefers_winograd__where_it_can_and_pays(changes, expected):
    assert prefers_winograd(replace(LAYER, **changes), ISAS[0]) is expected


@pytest.mark.parametrize(("channels", "fetches"), [(64, False), (256, True)])
def test_make_winograd__fetches_weights_that_no_near_cache_holds(channels, fetches):
    spec = replace(LAYER, height=14, width=14, in_channels=channels, out_channels=channels)
    plan = FloatWinogradPlan(spec, ISAS[0])
    text = make_winograd(spec, ISAS[0]).script()
    to_second_level = re.findall(r'"llvm.prefetch".*, 0, 2, 1\)', text)
    assert bool(to_second_level) is fetches
    size = plan.panels.blocks * plan.isa.lanes  # of the next panel for each channel
    tiles = -(-plan.grid.least_tiles // plan.height)
    assert plan.ahead * tiles >= size if fetches else plan.ahead == 0


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("height", [7, 28, 56, 57])
@pytest.mark.parametrize("channels", [16, 64, 256])
def test_float_winograd_plan__chunks(height, channels, isa):
    """Every chunk has enough tiles for what is multiplied at once, and the tile is in registers."""
    spec = replace(LAYER, height=height, width=height, in_channels=channels, out_channels=channels)
    plan = FloatWinogradPlan(spec, isa)
    assert plan.height <= plan.grid.least_tiles
    assert plan.height * plan.panels.blocks <= isa.accumulators
    assert not plan.panels.tail
