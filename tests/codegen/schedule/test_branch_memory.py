"""Memory of values around branches."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq


@I.ir_module
class TwoChoices:
    @R.function
    def main(
        c: R.Tensor((), "bool"),
        d: R.Tensor((), "bool"),
        x: R.Tensor((2, 2), "float32"),
        w: R.Tensor((2, 2), "float32"),
    ) -> R.Tensor((2, 2), "float32"):
        if c:
            a = R.matmul(x, w)
            y = R.matmul(a, w)
        else:
            b = R.matmul(w, x)
            y = R.matmul(b, w)
        if d:
            e = R.matmul(y, w)
            z = R.matmul(e, y)
        else:
            f = R.matmul(w, y)
            z = R.matmul(f, y)
        return z


@pytest.fixture(scope="module")
def executor():
    return rq.Executor(rq.compile(TwoChoices))


@pytest.mark.parametrize("taken", [(True, True), (True, False), (False, True), (False, False)])
def test_memory__of_branches_is_not_needed_behind_them(executor, taken):
    """Before, the process ended: what one branch allocates was read behind the other."""
    x, w = np.random.default_rng(0).standard_normal((2, 2, 2)).astype("float32")
    (found,) = executor.run("main", [*map(np.array, taken), x, w])
    y = (x @ w if taken[0] else w @ x) @ w
    np.testing.assert_allclose(found, (y @ w if taken[1] else w @ y) @ y, 1e-5, 1e-6)
