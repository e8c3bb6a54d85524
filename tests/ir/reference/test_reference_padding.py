"""The reference's padding equals numpy's, in values, dtype and memory order."""

from __future__ import annotations

import numpy as np
import pytest

from relayquant.ir.reference.convolution import pad_constant


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64"])
@pytest.mark.parametrize(
    "widths", [((0, 0), (2, 1), (0, 3)), ((0, 0),) * 3, ((1, 2), (0, 0), (4, 0))]
)
def test_padding__equals_numpys(widths, dtype):
    x = np.random.default_rng(2).uniform(0, 100, (2, 3, 5)).astype(dtype)
    for data in (x, np.asfortranarray(x), x.transpose(1, 2, 0), x[:, ::2], x[:0]):
        got, want = pad_constant(data, widths, 7), np.pad(data, widths, constant_values=7)
        np.testing.assert_array_equal(got, want, strict=True)
        assert got.strides == want.strides


def test_padding__a_number_has_no_axes():
    assert pad_constant(np.float32(3).reshape(()), [], 0) == 3


def test_padding__a_negative_width_is_refused():
    with pytest.raises(ValueError, match=r"no negative width"):
        pad_constant(np.ones((2, 1)), [(0, 0), (-1, 0)], 0)
