"""Quantization parameters: what they refuse, and what choose_qparams promises."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayquant.base.qtypes import (
    INTEGER_LIMITS,
    Granularity,
    QParams,
    QSpec,
    Role,
    Scheme,
    ValueInfo,
    check_qparams,
    choose_qparams,
)
from relayquant.errors import ConfigError

REALS = st.floats(-1e38, 1e38, allow_nan=False)
DTYPES = st.sampled_from(["int4", "int8", "uint8", "int16", "uint16", "int32"])
SCHEMES = st.sampled_from(list(Scheme))


@given(REALS, REALS, DTYPES, SCHEMES)
def test_choose_qparams__range_covered_and_zero_exact(a, b, dtype, scheme):
    low, high = min(a, b), max(a, b)
    spec = QSpec(dtype, scheme)
    qparams = choose_qparams(low, high, spec)
    scale, zero_point = float(qparams.scale), int(qparams.zero_point)
    quant_min, quant_max = spec.limits
    assert np.isfinite(np.float32(1) / qparams.scale)
    # Zero is representable: its integer, the zero point, is within the limits.
    assert quant_min <= zero_point <= quant_max
    # Both ends are covered up to half a step of zero point rounding, and float32 rounding of scale.
    slack = scale * 0.5001 + max(-low, high) * 2.0**-22
    assert scale * (quant_min - zero_point) <= min(low, 0.0) + slack
    assert scale * (quant_max - zero_point) >= max(high, 0.0) - slack
    if scheme is Scheme.SYMMETRIC:
        assert zero_point == spec.symmetric_zero_point
        assert zero_point == (0 if quant_min < 0 else (quant_max + 1) // 2)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (1e-38, 1e-38), (-1e-38, 0), (0, 1e38), (-3e38, 3e38), (5, 5), (-5, -5), (1e-45, 1)],
)
@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_choose_qparams__extremes(low, high, scheme, dtype):
    qparams = choose_qparams(low, high, QSpec(dtype, scheme))
    assert qparams.scale.dtype == np.float32
    assert qparams.zero_point.dtype == np.int32
    assert np.isfinite(np.float32(1) / qparams.scale)
    if low == high == 0:
        assert qparams.scale == 1


def test_choose_qparams__known_values():
    affine = choose_qparams(-1.0, 3.0, QSpec("uint8"))
    assert affine.scale == np.float32(4 / 255)
    assert affine.zero_point == 64
    symmetric = choose_qparams(-1.0, 3.0, QSpec("int8", Scheme.SYMMETRIC, quant_min=-127))
    assert symmetric.scale == np.float32(3 / 127)
    assert symmetric.zero_point == 0
    # Data on one side of zero: the range is widened to hold it.
    assert choose_qparams(2.0, 3.0, QSpec("uint8")).scale == np.float32(3 / 255)


def test_choose_qparams__per_channel():
    spec = QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL)
    qparams = choose_qparams([-1.0, 0.0, -4.0], [1.0, 0.0, 2.0], spec, axis=0)
    assert qparams.is_per_channel
    assert qparams.axis == 0
    np.testing.assert_array_equal(
        qparams.scale, np.array([1 / 127, 1.0, max(4 / 128, 2 / 127)], "float32")
    )
    np.testing.assert_array_equal(qparams.zero_point, [0, 0, 0])


@pytest.mark.parametrize(("low", "high"), [(np.nan, 1), (0, np.inf), (2, 1), ([0, 3], [1, 2])])
def test_choose_qparams__refuses_no_range(low, high):
    with pytest.raises(ConfigError, match="finite low <= high"):
        choose_qparams(low, high, QSpec())


def test_choose_qparams__range_too_wide_for_float32():
    with pytest.raises(ConfigError, match="too wide for a float32 scale of int8"):
        choose_qparams(-1e308, 1e308, QSpec("int8"))


def test_choose_qparams__int64_zero_point_does_not_wrap():
    with pytest.raises(ConfigError, match="outside int64"):
        choose_qparams(0.0, 1.0, QSpec("int64"))


def test_choose_qparams__symmetric_range_on_one_side_of_zero():
    spec = QSpec("int8", Scheme.SYMMETRIC, quant_min=-128, quant_max=-1)
    qparams = choose_qparams(-1.0, 1.0, spec)
    assert qparams.zero_point == -64
    assert float(qparams.scale) * (-1 + 64) == pytest.approx(1.0)


def test_qspec__messages():
    with pytest.raises(ConfigError, match=r"QSpec.dtype is 'int3'; allowed: int4, int8"):
        QSpec("int3")
    with pytest.raises(ConfigError, match=r"not a range within int8 \(-128..127\)"):
        QSpec("int8", quant_min=-200)
    with pytest.raises(ConfigError, match="needs at least three"):
        QSpec("uint8", Scheme.SYMMETRIC, quant_min=0, quant_max=1)
    assert QSpec("uint8", quant_min=0, quant_max=1).limits == (0, 1)
    assert QSpec("int8", quant_min=-127).limits == (-127, 127)


@pytest.mark.parametrize(
    ("scale", "zero_point", "dtype", "axis", "message"),
    [
        (0.0, 0, "int8", None, "finite and > 0"),
        (-1.0, 0, "int8", None, "finite and > 0"),
        (np.nan, 0, "int8", None, "finite and > 0"),
        (1e-60, 0, "int8", None, "finite and > 0"),
        (1e60, 0, "int8", None, "finite and > 0"),
        (1.0, 300, "uint8", None, r"outside uint8 \(0..255\)"),
        (1.0, 2**32, "int32", None, "outside int32"),
        (1.0, 0.5, "int8", None, "must be an integer"),
        (1.0, np.nan, "int8", None, "must be an integer"),
        (1.0, "0", "int8", None, "must be an integer"),
        ([1.0, 2.0], [0, 0], "int8", None, "needs an axis"),
        (1.0, [0, 0], "int8", None, "needs an axis"),
        ([1.0, 2.0], [0, 0, 0], "int8", 0, "2 scales and 3 zero points"),
        ([[1.0]], 0, "int8", 0, "shapes"),
        (1.0, 0, "int5", None, "QParams.dtype is 'int5'"),
    ],
)
def test_qparams__refuses(scale, zero_point, dtype, axis, message):
    with pytest.raises(ConfigError, match=message):
        QParams(scale, zero_point, dtype, axis)


def test_qparams__values_are_frozen_copies():
    scale = np.array([1.0, 2.0], "float32")
    qparams = QParams(scale, np.zeros(2, "int32"), "int8", 0)
    scale[0] = 7
    assert qparams.scale[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        qparams.scale[0] = 3


def test_qparams__zero_point_per_channel_means_scale_per_channel():
    qparams = QParams(0.5, [1, 2], "int8", 1)  # pyright: ignore
    assert qparams.is_per_channel
    np.testing.assert_array_equal(qparams.scale, np.array([0.5, 0.5], "float32"))


@given(
    st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=4),
    st.sampled_from(sorted(INTEGER_LIMITS)),
)
def test_qparams__json_round_trip_is_exact(scales, dtype):
    zero_point = np.arange(len(scales))
    for qparams in (
        QParams(scales, zero_point, dtype, 1),
        QParams(scales[0], 1, dtype),
    ):
        again = QParams.from_dict(json.loads(json.dumps(qparams.to_dict())))
        assert again == qparams
        assert hash(again) == hash(qparams)
        assert again.scale.tobytes() == qparams.scale.tobytes()


def test_qparams__equality():
    a = QParams(0.5, 3, "int8")
    assert a == QParams(0.5, 3, "int8", 1)  # an axis means nothing for one scale
    assert a != QParams(0.5, 4, "int8")
    assert a != QParams(0.5, 3, "int16")
    assert a != QParams([0.5], [3], "int8", 0)
    assert QParams([0.5], [3], "int8", 0) != QParams([0.5], [3], "int8", 1)


PER_CHANNEL = ValueInfo(
    "conv:weight",
    Role.WEIGHT,
    QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL),
    (2, 3),
    axis=0,
)
PER_TENSOR = ValueInfo("relu_1", Role.ACTIVATION, QSpec("uint8", quant_max=127), ("n", 3))


def test_check_qparams__accepts_what_fits():
    for info, qparams in (
        (PER_TENSOR, QParams(1.0, 127, "uint8")),
        (PER_CHANNEL, QParams([1.0, 2.0], [0, 0], "int8", 0)),
        (PER_CHANNEL, QParams([1.0, 2.0], [0, 0], "int8", -2)),
    ):
        assert check_qparams(qparams, info, "test") is qparams


@pytest.mark.parametrize(
    ("info", "qparams", "message"),
    [
        (PER_TENSOR, (1.0, 0), "returned tuple; return a QParams"),
        (PER_TENSOR, None, "returned NoneType"),
        (PER_TENSOR, QParams(1.0, 0, "int8"), "of dtype int8; the plan says uint8"),
        (PER_TENSOR, QParams(1.0, 200, "uint8"), r"outside quant_min..quant_max = 0..127"),
        (PER_TENSOR, QParams([1.0, 1], [0, 0], "uint8", 1), "one per tensor"),
        (PER_CHANNEL, QParams(1.0, 0, "int8"), r"one per channel, shape \(2,\)"),
        (
            PER_CHANNEL,
            QParams([1.0] * 3, [0] * 3, "int8", 0),
            r"of shape \(3,\); the plan says one",
        ),
        (PER_CHANNEL, QParams([1.0] * 2, [0] * 2, "int8", 1), "along axis 1; the plan says axis 0"),
        (PER_CHANNEL, QParams([1.0] * 2, [0, 1], "int8", 0), "the symmetric scheme of the plan"),
    ],
)
def test_check_qparams__names_value_and_source(info, qparams, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_qparams(qparams, info, "my_rule")
    assert "my_rule" in str(caught.value)
    assert repr(info.name) in str(caught.value)


def test_check_qparams__per_channel_without_axis():
    info = ValueInfo("w", Role.WEIGHT, PER_CHANNEL.spec, (2, 3))
    with pytest.raises(ConfigError, match="has axis None"):
        check_qparams(QParams([1.0, 1.0], [0, 0], "int8", 0), info, "my_rule")
