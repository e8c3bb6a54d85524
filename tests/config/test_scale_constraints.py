"""Scales that a QSpec allows: powers of two, bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relayquant as rq
from relayquant.base.qtypes import check_qparams, conform_scale

POWERS = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, quant_min=-127, power_of_two=True)
INFO = rq.observers.ValueInfo("v", rq.config.Role.ACTIVATION, POWERS, (1, 4))


@given(st.floats(1e-20, 1e20), st.floats(1e-20, 1e20))
def test_power_of_two__covers_the_range_with_less_than_twice_the_scale(a, b):
    qparams = rq.choose_qparams(-a, b, POWERS)
    scale = float(qparams.scale)
    assert math.frexp(scale)[0] == 0.5
    needed = max(a, b) / 127
    assert needed * (1 - 1e-6) <= scale < 2 * needed * (1 + 1e-6)
    assert int(qparams.zero_point) == 0


def test_power_of_two__exact_scale_is_kept():
    assert float(rq.choose_qparams(-127 / 64, 127 / 64, POWERS).scale) == 1 / 64


@pytest.mark.parametrize(
    "observer",
    [
        rq.observers.MinMax(),
        rq.observers.MSE(),
        rq.observers.Percentile(99.0),
        rq.observers.KLDivergence(),
    ],
)
def test_power_of_two__every_observer(observer):
    values = np.random.default_rng(0).standard_normal((8, 64)).astype("float32")
    qparams = observer.observe(INFO, [values])
    assert math.frexp(float(qparams.scale))[0] == 0.5
    assert check_qparams(qparams, INFO, "test") == qparams


def test_bounds__scales_stay_within():
    spec = rq.QSpec("int8", scale_min=0.01, scale_max=0.02)
    found = [float(rq.choose_qparams(-h, h, spec).scale) for h in (1e-3, 2.0, 100.0)]
    np.testing.assert_allclose(found, [0.01, 4 / 255, 0.02], rtol=1e-6)


def test_bounds__power_of_two_below_the_bound():
    spec = rq.QSpec("int8", power_of_two=True, scale_max=0.3)
    assert conform_scale(7.0, spec) == 0.25


def test_check_qparams__refuses_a_callables_scale():
    wrong = rq.QParams(np.float32(0.3), np.int32(0), "int8")
    with pytest.raises(rq.ConfigError, match=r"value 'v' with scale 0\.3.*powers of two"):
        check_qparams(wrong, INFO, "Calibration f")


def test_reduced_range__one_bit_less_unless_chosen():
    assert rq.QSpec("uint8").with_reduced_range().limits == (0, 127)
    assert rq.QSpec("int8").with_reduced_range().limits == (-64, 63)
    chosen = rq.QSpec("uint8", quant_max=200)
    assert chosen.with_reduced_range() is chosen
