"""Fake quantization: values against the numpy operators bit for bit, gradients against those of
PyTorch's own fake quantization.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

import relayquant as rq
from relayquant.base.qtypes import INTEGER_LIMITS, QParams
from relayquant.ir.plan import SharedQParams
from relayquant.ir.reference import qnn

torch = pytest.importorskip("torch", reason="pip install torch")

from relayquant.config import Ranges  # noqa: E402
from relayquant.torch.training.rounding import FakeQuantize, RoundTrip, round_softly  # noqa: E402

SHAPE = (4, 3, 5)
DTYPES = ("int8", "uint8", "int16", "uint16")


def draw(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype("float32")


def make_group(spec: rq.QSpec, constant: bool = False) -> SharedQParams:
    axis = 1 if spec.is_per_channel else None
    role = rq.config.Role.WEIGHT if constant else rq.config.Role.ACTIVATION
    info = rq.observers.ValueInfo("v", role, spec, SHAPE, axis)
    return SharedQParams(
        info, (), ("v",), rq.observers.MinMax(), ("v", "weight") if constant else None
    )


def make_quantizer(spec: rq.QSpec, ranges: Ranges, x: np.ndarray, constant: bool = False):
    """Fake quantization of the range of `x`."""
    axes = (0, 2) if spec.is_per_channel else None
    axis = 1 if spec.is_per_channel else None
    qparams = rq.choose_qparams(x.min(axes), x.max(axes), spec, axis)
    return FakeQuantize(make_group(spec, constant), qparams, ranges), qparams


def round_in_numpy(x: np.ndarray, qparams: QParams, limits: tuple[int, int]) -> np.ndarray:
    axis = -1 if qparams.axis is None else qparams.axis
    q = qnn.quantize(x, qparams.scale, qparams.zero_point, axis=axis, out_dtype=qparams.dtype)
    return qnn.dequantize(np.clip(q, *limits), qparams.scale, qparams.zero_point, axis=axis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", rq.config.Scheme)
@pytest.mark.parametrize(
    "granularity", [rq.config.Granularity.PER_TENSOR, rq.config.Granularity.PER_CHANNEL]
)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_values__those_of_the_integer_operators(
    dtype, scheme, granularity, power_of_two, is_narrow
):
    low = INTEGER_LIMITS[dtype][0]
    bounds = {"quant_min": 0 if low == 0 else -7, "quant_max": 15 if low == 0 else 7}
    given = bounds if is_narrow else {}
    spec = rq.QSpec(dtype, scheme, granularity, power_of_two=power_of_two, **given)
    x = draw(0, *SHAPE)
    for ranges in Ranges:
        quantizer, qparams = make_quantizer(spec, ranges, x)
        assert quantizer.qparams == qparams
        wide = 1.5 * x  # beyond the range too
        got = quantizer.eval()(torch.from_numpy(wide), 1).detach().numpy()
        np.testing.assert_array_equal(got, round_in_numpy(wide, qparams, spec.limits))


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 10), st.integers(0, 15))
@settings(max_examples=count_examples(12), deadline=None)
def test_gradient__of_pytorch_per_tensor(seed, scale, zero_point):
    x = torch.from_numpy(draw(seed, 40, scale=8 * scale))
    weights = torch.from_numpy(draw(seed + 1, 40))
    factor = 0.25
    mine, theirs = (t.clone().requires_grad_() for t in (x, x))
    my_scale = torch.tensor([scale], requires_grad=True)
    their_scale = torch.tensor([scale], requires_grad=True)
    zero = torch.tensor([zero_point], dtype=torch.int32)
    got = RoundTrip.apply(mine, my_scale, zero, (0, 15), factor)
    zero_float = torch.tensor([float(zero_point)], requires_grad=True)
    expected = torch._fake_quantize_learnable_per_tensor_affine(
        theirs, their_scale, zero_float, 0, 15, factor
    )
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    # PyTorch multiplies by 1 / scale: a tie may fall to the other side.
    near = (x / scale - (x / scale).floor() - 0.5).abs() > 1e-4
    torch.testing.assert_close(got[near], expected[near])
    if near.all():
        torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(my_scale.grad, their_scale.grad, rtol=1e-3, atol=1e-3)


def test_gradient__of_pytorch_per_channel():
    x, weights = torch.from_numpy(draw(0, *SHAPE)), torch.from_numpy(draw(1, *SHAPE))
    scales = torch.tensor([0.05, 0.2, 0.4])
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    my_scale, their_scale = (scales.clone().requires_grad_() for _ in range(2))
    zero = torch.zeros(3)
    got = RoundTrip.apply(mine, my_scale.reshape(1, 3, 1), zero.reshape(1, 3, 1), (-7, 7), 0.5)
    expected = torch._fake_quantize_learnable_per_channel_affine(
        theirs, their_scale, zero.clone().requires_grad_(), 1, -7, 7, 0.5
    )
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(my_scale.grad, their_scale.grad)
    assert (mine.grad == 0).any(), "clipped outside of the range"


@pytest.mark.parametrize("limits", [(0, 15), (-8, 7), (-7, 6), (1, 2)])
@pytest.mark.parametrize("zeros", [[0, 0], [3, 3], [2, 5]])
def test_gradient__where_the_rounded_value_is_within_bounds(limits, zeros):
    """Ties at a bound go to its even neighbour: exact halves of steps, of which floats hold all;
    against Python's integers, with equal zero points and others.
    """
    halves = np.arange(-40, 41)  # x / scale, in halves of a step
    x = torch.tensor(np.stack([halves, halves]) * 0.125, dtype=torch.float32, requires_grad=True)
    scale = torch.tensor([[0.25]], requires_grad=True)
    got = RoundTrip.apply(x, scale, torch.tensor(zeros, dtype=torch.int32)[:, None], limits, 1.0)
    got.sum().backward()
    slope, values = 0.0, got.detach().numpy()
    for row, zero in enumerate(zeros):
        for k, half in enumerate(halves):
            steps = round(Fraction(int(half), 2)) + zero
            is_inside = limits[0] <= steps <= limits[1]
            held = min(max(steps, limits[0]), limits[1]) - zero
            assert values[row, k] == held * 0.25
            assert float(x.grad[row, k]) == is_inside
            slope += held - (half / 2 if is_inside else 0)
    assert float(scale.grad) == slope


def test_round_softly__between_a_line_and_rounding():
    """Levels are kept; between them it goes from the identity to rounding, never back down."""
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    scale, zero = torch.tensor([0.25], dtype=torch.float64), torch.tensor([0])
    hard = (torch.round(x / scale).clamp(-7, 7) * scale).double()
    by_sharpness = [round_softly(x, scale, zero, (-7, 7), 1.0, k) for k in (1e-3, 8.0, 400.0)]
    line = x.clamp(-7 * 0.25, 7 * 0.25)
    torch.testing.assert_close(by_sharpness[0], line, rtol=1e-5, atol=1e-5)
    share = (x / scale).abs() % 1
    away = (share - 0.5).abs() > 0.02
    torch.testing.assert_close(by_sharpness[2][away], hard[away], rtol=1e-6, atol=1e-6)
    for soft in by_sharpness:
        assert (soft.diff() >= -1e-12).all()
        at_level = share < 1e-6
        torch.testing.assert_close(soft[at_level], hard[at_level], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sharpness", [0.5, 8.0, 20.0])
def test_round_softly__gradient_is_that_of_its_values(sharpness):
    """torch.autograd.gradcheck: difference quotients in float64, x beyond the bounds, too."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(3, 8, dtype=torch.float64, generator=generator) - 0.5) * 6
    scale = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).reshape(3, 1)
    zero = torch.tensor([0, 1, -2]).reshape(3, 1)

    def function(x, scale):
        return round_softly(x, scale, zero, (-7, 7), 1.0, sharpness)

    inputs = (x.requires_grad_(), scale.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs, eps=1e-7, atol=1e-5)


def test_sharpness__counts_in_training_alone():
    x = draw(0, *SHAPE)
    spec = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC)
    quantizer, qparams = make_quantizer(spec, Ranges.LEARNED, x, constant=True)
    quantizer.sharpness, value = 8.0, torch.from_numpy(x)
    assert not torch.equal(quantizer.train()(value, 1), quantizer.eval()(value, 1))
    expected = round_in_numpy(x, qparams, spec.limits)
    np.testing.assert_array_equal(quantizer(value, 1).detach().numpy(), expected)


def test_learned__gradient_scale_of_lsq():
    """1 / sqrt(features of a sample x largest integer), of the scale's own gradient."""
    spec = rq.QSpec("uint8", quant_max=15)
    x = np.abs(draw(0, *SHAPE))
    quantizer, qparams = make_quantizer(spec, Ranges.LEARNED, x)
    (quantizer(torch.from_numpy(x), -1) ** 2).sum().backward()
    scale = torch.tensor([float(qparams.scale)], requires_grad=True)
    plain = RoundTrip.apply(
        torch.from_numpy(x), scale, torch.tensor([int(qparams.zero_point)]), (0, 15), 1.0
    )
    (plain**2).sum().backward()
    expected = float(scale.grad * scale.detach()) / np.sqrt(3 * 5 * 15)
    assert float(quantizer.log_factor.grad) == pytest.approx(expected, rel=1e-5)


def test_learned__stays_a_power_of_two_and_within_bounds():
    spec = rq.QSpec("int8", power_of_two=True, scale_max=0.125)
    x = draw(0, *SHAPE)
    quantizer, _ = make_quantizer(spec, Ranges.LEARNED, x)
    for factor in (-3.0, -0.3, 0.4, 9.0):
        with torch.no_grad():
            quantizer.log_factor.fill_(factor)
        found = float(quantizer.qparams.scale)
        assert np.log2(found) == round(np.log2(found))
        assert found <= 0.125
    (quantizer(torch.from_numpy(x), -1) ** 2).sum().backward()
    assert float(quantizer.log_factor.grad) != 0


def test_moving_average__is_that_of_pytorch():
    """Against MovingAverageMinMaxObserver, whose first batch is taken whole."""
    from torch.ao.quantization import MovingAverageMinMaxObserver

    spec = rq.QSpec("uint8")
    first, batches = draw(0, *SHAPE), [torch.from_numpy(draw(s, *SHAPE)) * s for s in (1, 2, 3)]
    observer = MovingAverageMinMaxObserver(averaging_constant=0.01)
    observer(torch.from_numpy(first))
    quantizer, _ = make_quantizer(spec, Ranges.MOVING_AVERAGE, first)
    quantizer.low.fill_(float(first.min()))
    quantizer.high.fill_(float(first.max()))
    for batch in batches:
        observer(batch)
        quantizer(batch, -1)
        quantizer.follow(0.01)
    scale, zero_point = observer.calculate_qparams()
    assert float(quantizer.qparams.scale) == pytest.approx(float(scale), rel=1e-6)
    assert int(quantizer.qparams.zero_point) == int(zero_point)
    before = quantizer.qparams
    quantizer.eval()(100 * batches[0], -1)
    quantizer.follow(0.01)
    assert quantizer.qparams == before, "nothing is observed in evaluation"


def test_moving_average__weights_have_the_range_of_now():
    spec = rq.QSpec(
        "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL, quant_min=-127
    )
    x = draw(0, *SHAPE)
    quantizer, _ = make_quantizer(spec, Ranges.MOVING_AVERAGE, x, constant=True)
    new = torch.from_numpy(3 * draw(1, *SHAPE))
    quantizer(new, 1)
    expected = new.abs().amax((0, 2)) / 127
    torch.testing.assert_close(quantizer.scale, expected)
