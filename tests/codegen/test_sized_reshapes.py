"""Reshapes that fit some sizes of inputs only: numpy's result, or an error."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.sized_reshapes import find_sized_reshapes


def make_reshape(shape, target, *, has_kernel: bool):
    """main(x): y = reshape(exp(x) or x); sizes are numbers and names."""
    sizes = {name: tirx.Var(name, "int64") for name in "nm"}

    def read(values):
        return [value(**sizes) if callable(value) else sizes.get(value, value) for value in values]

    x = relax.Var("x", relax.TensorType(read(shape), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            data = builder.emit(relax.op.exp(x)) if has_kernel else x
            y = builder.emit_output(relax.op.reshape(data, read(target)), "y")
        builder.emit_func_output(y)
    return builder.get()


CASES = {
    "one": (("n", 2, 2), (1, 4), [(1, 2, 2)], [(3, 2, 2), (0, 2, 2)]),
    "two": (("n", "m"), (1, 4), [(2, 2), (1, 4)], [(3, 4), (1, 2)]),
    "computed": (("n", 4), (lambda n, m: n // 2, 8), [(4, 4)], [(3, 4)]),
    "scalar": (("n",), (), [(1,)], [(2,)]),
}


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_reshape__drops_no_element(case, has_kernel):
    shape, target, right, wrong = CASES[case]
    exe = rq.Executor(rq.compile(make_reshape(shape, target, has_kernel=has_kernel)))
    for sizes in right:
        x = np.random.default_rng(0).standard_normal(sizes).astype("float32")
        (got,) = exe.run("main", [x])
        np.testing.assert_allclose(
            got.ravel(), np.exp(x).ravel() if has_kernel else x.ravel(), 1e-5
        )
    for sizes in wrong:
        with pytest.raises(ValueError, match=r"sizes do not fit 'y', which makes \("):
            exe.run("main", [np.ones(sizes, "float32")])


def test_sized_reshapes__of_sizes_that_always_fit_are_none():
    mod = make_reshape(("n", 2, 2), ("n", 4), has_kernel=False)
    assert find_sized_reshapes(mod) == {"main": ()}
