"""Samples that are held back from calibration, and those that the guard looks at."""

from __future__ import annotations

import numpy as np
import pytest

from relayquant.data import CalibrationShare, InputInfo, SpreadSample, open_dataset, open_share
from relayquant.data.sampling import is_held_back


def test_held_back__an_eighth_and_nothing_of_small_data():
    assert not any(map(is_held_back, range(23)))
    assert [place for place in range(64) if is_held_back(place)] == [23, 31, 39, 47, 55, 63]


@pytest.mark.parametrize("as_list", [True, False])
def test_held_back__no_reader_sees_it_and_looks_begin_with_it(as_list):
    inputs = (InputInfo("x", ("n", 1), "float32"),)
    rows = [np.full((1, 1), i, "float32") for i in range(40)]
    data = rows if as_list else (lambda: iter(rows))
    expected = [i for i in range(40) if i not in (23, 31, 39)]
    share = open_share(CalibrationShare(data), inputs)
    assert [int(batch["x"].item()) for batch in share] == expected
    assert len(share.pick(37)) == 37
    sample = SpreadSample(inputs, 8, holds_back=True)
    assert [int(b["x"].item()) for b in sample.watch(open_dataset(data, inputs))] == expected
    first = next(sample.rounds([4, 8]))
    numbers = {int(number) for part in first for number in part.numbers}
    assert len(numbers) == 4
    assert {23, 31, 39} < numbers
    assert {int(x) for part in first for x in part.batch["x"].reshape(-1)} == numbers
    assert sample.total == 40
