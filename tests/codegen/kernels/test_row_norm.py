"""Norms of rows against float64, and bit for bit against the arithmetic that is stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from exact import state_row_norm
from machines import best_isa, compile_kernel, every_isa, runnable_target

from relayquant.codegen.kernels.floating.row_norm import RowNorm, make_row_norm
from relayquant.ir.reference import qnn

#: name -> what a norm does
FORMS = {
    "rms": {},
    "rms without weight": {"weight": False},
    "rms that divides": {"divides": True},
    "layer": {"is_centred": True, "bias": True},
}
EPSILON = 1e-5


def draw(width, spec):
    """Rows of very different size, one of zeros, one too small for integers; weight and bias."""
    rng = np.random.default_rng(width)
    x = rng.normal(0.3, 1, (2, 3, width)) * 10.0 ** rng.integers(-6, 6, (2, 3, 1))
    x[1, 1:] = [[0], [1e-44]]
    factors = [rng.normal(1, 0.5, width).astype("float32") for _ in range(2)]
    return x.astype("float32"), factors[: spec.weight + spec.bias]


def run(spec, target, x, factors, addends=()):
    """What a kernel stores."""
    shapes = [(x.shape, "float32")] * (spec.keeps_sum + spec.keeps_result)
    if spec.rows is not None:
        rows = (6,) if len(spec.rows) == 1 else x.shape[:-1]
        shapes += [((*rows, x.shape[-1]), "int8"), ((*rows, 1), "float32")]
    outputs = [tvm.runtime.tensor(np.full(shape, 7, dtype)) for shape, dtype in shapes]
    kernel = compile_kernel(make_row_norm(spec), target)
    kernel(*map(tvm.runtime.tensor, [*(addends or [x]), *factors]), *outputs)
    return [output.numpy() for output in outputs]


def compute_exactly(spec, x, factors):
    """The same in float64, written as the literature has it."""
    x = x.astype("float64")
    if spec.is_centred:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.epsilon)
    y = y * factors[0] if spec.weight else y
    return y + factors[1] if spec.bias else y


def check(spec, target):
    (x, factors), addends = draw(spec.features, spec), ()
    if spec.is_sum:
        addends = x, np.random.default_rng(5).permutation(x, axis=1)
        x = addends[0] + addends[1]
    found = run(spec, target, x, factors, addends)
    if spec.keeps_sum:
        np.testing.assert_array_equal(found.pop(0), x)
    expected = state_row_norm(spec, x, factors)
    assert expected.dtype == np.float32
    if spec.keeps_result:
        np.testing.assert_array_equal(found.pop(0), expected)
        size = np.abs(compute_exactly(spec, x, factors)).max(-1, keepdims=True)
        assert (np.abs(expected - compute_exactly(spec, x, factors)) <= 1e-5 * size + 1e-12).all()
    if spec.rows is not None:
        for array, wanted in zip(found, qnn.quantize_rows(expected), strict=True):
            np.testing.assert_array_equal(array, wanted.reshape(array.shape))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_row_norm__as_stated_with_integers_and_without(form):
    target, spec = runnable_target(best_isa()), RowNorm((2, None), 100, EPSILON, **FORMS[form])
    for keeps, rows in ((True, None), (True, (None,)), (False, (2, None)), (False, (6,))):
        shape = RowNorm(spec.leading, 100, EPSILON, **FORMS[form], keeps_result=keeps, rows=rows)
        check(shape, target)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keeps", [True, False])
def test_row_norm__of_a_sum(form, keeps):
    """Its bits are those of the sum that is computed before."""
    target = runnable_target(best_isa())
    for width, rows, result in ((100, None, True), (48, (None,), False), (33, (2, None), True)):
        spec = RowNorm((2, None), width, EPSILON, **FORMS[form], is_sum=True, keeps_sum=keeps)
        check(replace(spec, rows=rows, keeps_result=result), target)


@every_isa
def test_row_norm__the_same_bits_on_every_instruction_set(isa):
    """Of all that could be contracted to an fma, and of sums whose order could differ."""
    form = FORMS["layer"]
    check(RowNorm((2, 3), 72, EPSILON, **form, rows=(2, 3)), runnable_target(isa))


@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [1, 2, 7, 16, 31, 32, 33, 64])
def test_row_norm__of_every_width(width):
    form = FORMS["rms that divides" if width % 2 else "layer"]
    check(RowNorm((None, 3), width, EPSILON, **form, rows=(None,)), runnable_target(best_isa()))


@pytest.mark.optimized
@pytest.mark.parametrize("form", FORMS)
def test_row_norm__compiles_for_arm(form):
    """Cross-compiled: vectors, and no call of a library function."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]})
    spec = RowNorm((None,), 100, EPSILON, **FORMS[form], keeps_result=False, rows=(None,))
    text = tvm.compile(tvm.IRModule({"row_norm": make_row_norm(spec)}), target=target)
    text = text.mod.inspect_source("asm")
    assert "\tfmul\tv" in text
    assert "\tfsqrt\t" in text
    assert "\tfmla\t" not in text
    assert "\tbl\tsqrt" not in text


@pytest.mark.parametrize(
    ("leading", "features", "shares"), [((1, 197), 192, True), ((1, 98), 64, False)]
)
def test_make_row_norm__threads_share_what_takes_five_microseconds(leading, features, shares):
    spec = RowNorm(leading, features, EPSILON, is_centred=True)
    assert ("T.parallel" in make_row_norm(spec).script()) == shares
