"""Codes in bytes, against integers of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayquant.base.packing import CODE_BITS, count_bytes, pack_codes, spread_groups, unpack_codes


@pytest.mark.parametrize("bits", CODE_BITS)
@given(data=st.data())
def test_pack_codes__a_row_is_one_number_lowest_bits_first(bits, data):
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=40))
    packed = pack_codes(np.array([codes, codes[::-1]], "uint8"), bits)
    number = sum(code << (bits * k) for k, code in enumerate(codes))
    assert packed.shape == (2, count_bytes(len(codes), bits))
    assert int.from_bytes(packed[0].tobytes(), "little") == number
    np.testing.assert_array_equal(unpack_codes(packed, bits, len(codes)), [codes, codes[::-1]])


def test_spread_groups__the_last_may_be_short():
    np.testing.assert_array_equal(spread_groups(np.array([[1, 2]]), 3, 5), [[1, 1, 1, 2, 2]])
