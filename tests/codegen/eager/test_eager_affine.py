"""Operators on affine integers run on kernels, with the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from drawing import count_examples
from float_models import build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.relax import op

from relayquant.codegen.eager import EagerModule
from relayquant.codegen.eager.kernel_cache import host_kernels
from relayquant.codegen.eager.steps.affine import AffineRows, AffineStep, make_affine
from relayquant.codegen.eager.steps.call import CallStep
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run

#: rows, and columns around the lanes of vectors
SHAPE = (2, 3, 37)


def kinds(module: EagerModule) -> list[type]:
    steps = module.programs["main"].steps
    return [type(getattr(step.run, "__self__", None)) for step in steps]


def draw_integers(rng, shape, dtype):
    """Numbers of the whole range, and small ones."""
    limits = np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    small = rng.integers(0, 99, shape).astype(dtype)
    return np.where(rng.random(shape) < 0.5, values, small)


def draw_scales(rng, count):
    return np.exp(rng.uniform(-9, 1, count or ())).astype("float32")


def emit_operator(name, rng, channels):
    """(the operator on one or two values, their dtypes); `channels` None: one scale."""
    zero, out = int(rng.integers(0, 100)), int(rng.integers(-100, 100))
    target = float(draw_scales(rng, None)), out
    several = draw_scales(rng, channels), rng.integers(0, 9, channels or ()).astype("int32")
    if name == "requantize":
        return lambda x: qnn.requantize(x, *several, *target, axis=-1, out_dtype="int8")
    if name in ("add", "subtract"):
        other, function = (float(draw_scales(rng, None)), zero), getattr(qnn, name)
        return lambda x, y: function(x, y, *several, *other, *target, out_dtype="int8")
    one = float(draw_scales(rng, None)), zero
    if name == "leaky_relu":
        return lambda x: qnn.leaky_relu(x, *one, *target, alpha=float(rng.uniform(0, 1)))
    slopes = rng.uniform(-1, 2, channels or ()).astype("float32")
    return lambda x: qnn.prelu(x, *one, *target, slopes, axis=2)


@pytest.mark.slow
@settings(deadline=None, max_examples=count_examples(60))
@given(
    name=st.sampled_from(["requantize", "add", "subtract", "leaky_relu", "prelu"]),
    dtype=st.sampled_from(["int8", "uint8", "int32"]),
    is_shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_affine__equals_the_reference_bit_for_bit(name, dtype, is_shared, seed):
    rng = np.random.default_rng(seed)
    dtype = "int8" if name in ("leaky_relu", "prelu") else dtype
    emit = emit_operator(name, rng, None if is_shared else SHAPE[-1])
    count = 2 if name in ("add", "subtract") else 1
    mod = build_model(lambda e, *xs: e("y", emit(*xs)), *[SHAPE] * count, dtype=dtype)
    module = EagerModule(mod)
    assert kinds(module)[0] is AffineStep
    data = [draw_integers(rng, SHAPE, dtype) for _ in range(count)]
    orders = (
        data,
        [np.asfortranarray(each) for each in data],
        [data[0], *map(np.asfortranarray, data[1:])],
    )
    for arrays in orders:
        np.testing.assert_array_equal(module.run("main", arrays)[0], run(mod, arrays)[0])


def test_affine__requantize_in_exact_integers():
    x = np.arange(-40, 41, dtype="int32").reshape(9, 9)
    mod = build_model(
        lambda e, x: e("y", qnn.requantize(x, 0.25, 3, 0.5, 7, out_dtype="uint8")),
        x.shape,
        dtype="int32",
    )
    module = EagerModule(mod)
    assert kinds(module)[0] is AffineStep
    halves = x - 3
    even = halves // 2 + (halves % 2) * (halves // 2 % 2)  # a half goes to the even neighbour
    want = np.clip(even + 7, 0, 255).astype("uint8")
    np.testing.assert_array_equal(module.run("main", [x])[0], want)


def biased_model(*, reads_twice=False, axis=-1, out=0.5):
    """Convolution, bias and requantize in NCHW."""
    rng = np.random.default_rng(4)
    weight = rng.integers(-127, 128, (19, 8, 3, 3)).astype("int8")
    sizes = {1: (1, 19, 1, 1), -1: (1, 1, 1, 6)}[axis]
    bias = rng.integers(-(2**30), 2**30, sizes).astype("int32")
    bias.reshape(-1)[:4] = 2**31 - 1, -(2**31), 5, -5
    scales = np.exp(rng.uniform(-9, 1, 19)).astype("float32")

    def emit(e, x):
        acc = e("acc", qnn.conv2d(x, relax.const(weight), 3, 0, 1.0, 1.0))
        biased = e("biased", op.add(acc, relax.const(bias)))
        zero = np.zeros(19, "int32")
        y = e("y", qnn.requantize(biased, scales, zero, out, 3, axis=1, out_dtype="uint8"))
        return e("z", op.add(e("w", op.astype(y, "int32")), biased)) if reads_twice else y

    return build_model(emit, (2, 8, 7, 8), dtype="int8")


@pytest.mark.parametrize(
    "settings",
    [{}, {"axis": 1}, {"axis": 1, "reads_twice": True}],
    ids=["bias of columns", "bias of channels", "sums that are read elsewhere"],
)
def test_affine__sums_and_bias_of_a_convolution_that_wrap(settings):
    mod = biased_model(**settings)
    module, x = EagerModule(mod), draw_integers(np.random.default_rng(1), (2, 8, 7, 8), "int8")
    np.testing.assert_array_equal(module.run("main", [x])[0], run(mod, [x])[0])
    assert AffineStep in kinds(module)
    folds = settings == {"axis": 1}
    assert (CallStep in kinds(module)) is not folds


def test_affine__what_the_kernel_does_not_compute_is_left_to_numpy():
    x = draw_integers(np.random.default_rng(2), (4, 3), "int8")

    def emit(e, x):
        wide = e("wide", qnn.requantize(x, 1.0, 0, 1e-30, 0, out_dtype="int8"))
        up = e("up", qnn.requantize(wide, 1.0, 0, 2.0, 0, rounding="UPWARD", out_dtype="int8"))
        long = e("long", qnn.requantize(up, 1.0, 0, 0.1, 0, out_dtype="int32"))
        row = relax.const(np.int8([[1, 2, 3]]))
        return e(
            "y", qnn.add(e("r", qnn.requantize(long, 1.0, 0, 9.0, 0)), row, 1.0, 0, 1.0, 0, 1.0, 0)
        )

    mod = build_model(emit, x.shape, dtype="int8")
    module = EagerModule(mod)
    found = kinds(module)
    assert found[:3] == [CallStep] * 3
    assert found[4] is CallStep
    np.testing.assert_array_equal(module.run("main", [x])[0], run(mod, [x])[0])


def test_affine__no_data_gives_no_result():
    mod = build_model(
        lambda e, x: e("y", qnn.requantize(x, 0.25, 3, 0.5, 7, out_dtype="uint8")),
        (0, 3),
        dtype="int32",
    )
    assert EagerModule(mod).run("main", [np.zeros((0, 3), "int32")])[0].shape == (0, 3)


def other_axes(emit, x):
    lhs, rhs = (np.float32(range(1, 4)), 0), (np.float32(range(2, 5)), 0)
    return emit("y", qnn.add(x, x, *lhs, *rhs, 9.0, 0, lhs_axis=0, rhs_axis=1))


def two_slopes(emit, x):
    scales, zeros = np.float32(range(1, 4)), np.zeros(3, "int32")
    moved = emit("moved", qnn.requantize(x, scales, zeros, 3.0, 0, axis=0))
    return emit("y", qnn.prelu(moved, 1.0, 0, 2.0, 0, np.float32([0.5, 2, 1]), axis=1))


def wide_arithmetic(emit, x):
    # 5 times float32(0.1) is a half in float32, and more in float64.
    five = emit("five", qnn.requantize(x, 1.0, 0, 1000.0, 5))
    return emit("y", qnn.requantize(five, 0.1, 0, 1.0, 0, compute_dtype="float64"))


def broadcast_operand(emit, x):
    row = emit("row", op.sum(emit("sums", op.astype(x, "int32")), axis=[0], keepdims=True))
    return emit("y", qnn.add(x, row, 1.0, 0, 0.5, 0, 2.0, 0))


def broadcast_by_the_bias(emit, x):
    row = emit("row", op.sum(emit("sums", op.astype(x, "int32")), axis=[0], keepdims=True))
    biased = emit("biased", op.add(row, relax.const(np.int32([[1], [20], [-30]]))))
    return emit("y", qnn.requantize(biased, 1.0, 0, 2.0, 0))


def bias_of_the_last_axis(emit, x):
    wide = emit("wide", op.astype(x, "int32"))
    biased = emit("biased", op.add(wide, relax.const(np.int32([1, 20, -30]))))
    return emit("y", qnn.requantize(biased, 1.0, 0, 2.0, 0))


def bias_that_wraps_in_int8(emit, x):
    biased = emit("biased", op.add(x, relax.const(np.int8([[1, 20, 100]]))))
    return emit("y", qnn.requantize(biased, 1.0, 0, 2.0, 0))


def scalars(emit, x):
    total = emit("total", op.sum(emit("wide", op.astype(x, "int32"))))
    return emit("y", qnn.requantize(total, 1.0, 0, 2.0, 0))


def long_integers(emit, x):
    large = emit("large", op.multiply(op.astype(x, "int64"), relax.const(2**33, "int64")))
    return emit("y", qnn.requantize(large, 2.0**-33, 0, 2.0, 0))


def computed_scale(emit, x):
    real = emit("real", op.max(op.astype(x, "float32")))
    return emit("y", qnn.requantize(x, real, 0, 9.0, 0))


OTHER_FORMS = (
    other_axes, two_slopes, wide_arithmetic, broadcast_operand, broadcast_by_the_bias,
    bias_of_the_last_axis, bias_that_wraps_in_int8, scalars, long_integers, computed_scale,
)  # fmt: skip


@pytest.mark.parametrize("body", OTHER_FORMS, ids=lambda body: body.__name__)
def test_affine__of_another_form_has_the_bits_of_the_reference(body):
    mod, x = (
        build_model(body, (3, 3), dtype="int8"),
        np.int8([[100, 2, 3], [-4, 5, 60], [7, 8, 99]]),
    )
    (found,), (want,) = EagerModule(mod).run("main", [x]), run(mod, [x])
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtypes", [("int32",), ("float32", "int32")])
def test_make_affine__no_difference_may_overflow(dtypes):
    """LLVM may assume that a difference of int32 in TIR does not, whatever it does today."""
    func, found = make_affine(AffineRows(dtypes, "int8"), host_kernels().isa, "f"), []
    tvm_ffi.structural_walk(func.body, (tirx.Sub, found.append))
    differences = [str(each.ty) for each in found]
    assert differences
    assert not [each for each in differences if "int32" in each]


def test_affine__a_sum_is_rounded_once():
    def emit(e, x, y):
        return e("z", qnn.add(x, y, 0.5, 0, 1 / 3, 0, 1.0, 0, out_dtype="int8"))

    # 9 times float32(1 / 3) is 3 + 2**-23.4: as a float32 of its own, 3, and the sum a half.
    left, right = np.full((2, 16), -5, "int8"), np.full((2, 16), 9, "int8")
    module = EagerModule(build_model(emit, (2, 16), (2, 16), dtype="int8"))
    assert kinds(module)[0] is AffineStep
    np.testing.assert_array_equal(module.run("main", [left, right])[0], 1)
