"""Operands that kernels pack: equal ones are one constant."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relayquant.codegen.lowering.engine import KernelTable


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4)])
def test_share__equal_arrays_are_one_constant_of_their_shape(shape):
    table, array = KernelTable(tvm.IRModule({})), np.ones(shape, "int32")
    found = table.share(array)
    assert table.share(array.copy()).same_as(found)
    assert found.value.shape == shape
    np.testing.assert_array_equal(found.value.numpy(), array)
    for other in (array.astype("uint32"), array[None], array + 1 if array.size else array[:, 1:]):
        assert not table.share(other).same_as(found)
    if len(shape) == 2:
        assert table.share(np.ones(shape[::-1], "int32").T).same_as(found)
