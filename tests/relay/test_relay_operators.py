"""Every row of the operator table: one expression, against numpy (and scipy)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from relay_operator_cases import CASES, DW, VARIATIONS, J, Q, X, conv, floats, ints
from relay_testing import compile_and_run, module_text, run_text

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.relay.operators import OPERATORS


@pytest.mark.parametrize(("name", "text", "expected", "inputs"), CASES)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_operator__computes(name, text, expected, inputs):
    with np.errstate(all="ignore"):
        want = np.asarray(expected(**inputs))
    (got,) = run_text(text, **inputs)
    assert got.shape == want.shape
    if want.dtype.kind == "f":
        np.testing.assert_allclose(got, want, 2e-5, 2e-5)
    else:
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "text", "expected", "inputs"),
    [*VARIATIONS, *(each for each in CASES if each.values[0] in ("sinh", "cosh"))],
)
def test_operator__compiles(name, text, expected, inputs):
    """What TVM's compiler of Relax refuses as it is, or computes otherwise."""
    (got,) = compile_and_run(rq.relay.from_text(module_text(text, **inputs)), inputs)
    np.testing.assert_allclose(got, expected(**inputs), 2e-5, 2e-5)


def test_operators__every_row_has_a_case():
    assert {param.values[0] for param in CASES} == set(OPERATORS)


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
def test_conv2d__nhwc_equals_nchw(groups):
    w = floats(6, 3 // groups, 3, 3)
    text = f"nn.conv2d(%x, %w, padding=[1, 1, 1, 1], groups={groups}"
    (nchw,) = run_text(f"{text})", x=X, w=w)
    layouts = 'data_layout="NHWC", kernel_layout="HWIO"'
    (nhwc,) = run_text(
        f"{text}, {layouts})", x=X.transpose(0, 2, 3, 1).copy(), w=w.transpose(2, 3, 1, 0).copy()
    )
    np.testing.assert_allclose(nhwc.transpose(0, 3, 1, 2), nchw, 1e-5, 1e-5)


@pytest.mark.parametrize("is_nhwc", [False, True])
def test_depthwise__two_outputs_for_each_channel(is_nhwc):
    """(C, M, kh, kw): outputs c * M + m."""
    want = np.concatenate([conv(X[:, [c]], DW[c][:, None]) for c in range(3)], 1)
    if is_nhwc:
        text = 'nn.conv2d(%x, %w, groups=3, data_layout="NHWC", kernel_layout="HWOI")'
        x, w = X.transpose(0, 2, 3, 1).copy(), DW.transpose(2, 3, 0, 1).copy()
        want = want.transpose(0, 2, 3, 1)
    else:
        text, x, w = "nn.conv2d(%x, %w, groups=3, channels=6)", X, DW
    (got,) = run_text(text, x=x, w=w)
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def test_batch_matmul__before_0_8_is_transposed():
    x, y = floats(2, 3, 4), floats(2, 5, 4)
    (got,) = run_text("nn.batch_matmul(%x, %y)", x=x, y=y)
    np.testing.assert_allclose(got, x @ y.swapaxes(1, 2), 1e-5, 1e-5)


def test_quantize__of_a_constant_is_a_constant():
    """The pad value and the bias of an integer model are written that way."""
    text = 'nn.pad(%x, qnn.quantize(0f, 0.1f, 3, out_dtype="int8"), pad_width=[[1, 0]])'
    (got,) = run_text(text, x=np.array([7], "int8"))
    np.testing.assert_array_equal(got, np.array([3, 7], "int8"))


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "nn.conv2d(%x, %w, strides=[0, 1])": "strides",
    "nn.conv2d(%x, %w, groups=0)": "groups",
    "nn.conv2d(%x, %w, padding=[1, 1, 1])": "padding",
    'nn.conv2d(%x, %w, data_layout="NCHW4c")': "data_layout 'NCHW4c' is not supported",
    "nn.conv2d(%x, %w, channels=9)": "channels is 9, but the weight has 5",
    "nn.conv2d(%x, %w, stride=[1, 1])": "no attribute 'stride'. Did you mean 'strides'",
    "nn.conv2d(%x, %w, strides=2f)": "strides is 2.0; allowed: a list of integers",
    "nn.conv2d(%x)": "it has 1 argument; allowed: 2",
    "clip(%x)": "attribute 'a_min' is missing",
    "reshape(%x, newshape=[7, -1])": "cannot become",
    "transpose(%x, axes=[0, 0, 1, 2])": "not a permutation",
    "split(%x, indices_or_sections=5, axis=1)": "5 does not divide",
    "concatenate(%x, axis=0)": "argument 1 must be a tuple",
    "nn.softmax(%x, axis=4)": "axis 4 does not exist",
    "nn.bias_add(%x, %b)": "the bias has 5 values; allowed: 3, the size of axis 1",
    "topk(%x, k=9)": "k is 9",
    "zeros(shape=[1000000000, 1000000000])": "is not allowed",
    "nn.max_pool2d(%x, pool_size=[0, 2])": "pool_size",
    "qnn.softmax(%q, 3f, 0, 1f, 0)": "input scale is 3.0",
    'qnn.requantize(%x, 1f, 0, 1f, 0, out_dtype="int8")': "int",
    "nn.lrn(%x, size=0)": "size",
    "arange(0f, 1e30f, 1f)": "constant of 1000000015047466219876688855040 values",
    'nn.pad(%x, 0f, pad_width=[[0, 0], [0, 0], [0, 0], [0, 99999999999]], pad_mode="edge")': (
        "constant of 100000000003 values"
    ),
    "nn.avg_pool2d(%j, pool_size=[99999, 99999])": "constant of",
    'nn.global_avg_pool2d(%x, layout="NCHW8c")': "layout",
    'take(%x, %i, axis=0, mode="bad")': "mode is 'bad'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_operator__refused_with_the_reason(text):
    inputs = {
        "x": X,
        "w": floats(5, 3, 3, 3),
        "b": floats(5),
        "q": Q,
        "i": J,
        "j": ints(0, 9, 1, 3, 4, 4),
    }
    with pytest.raises(ModelError, match="line 3, column") as raised:
        rq.relay.from_text(module_text(text, **inputs))
    assert REFUSED[text] in str(raised.value)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_batch_matmul__transposed_operands(transpose_a, transpose_b):
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (2, 3, 5)).astype("int8")
    y = rng.integers(-128, 128, (2, 5, 4)).astype("int8")
    want = (x.astype("int64") - 3) @ (y.astype("int64") - 1)
    inputs = {
        "x": x.transpose(0, 2, 1).copy() if transpose_a else x,
        "y": y.transpose(0, 2, 1).copy() if transpose_b else y,
    }
    (got,) = run_text(
        'qnn.batch_matmul(%x, %y, 3, 1, 0.1f, 0.2f, out_dtype="int32", '
        f"transpose_a={transpose_a}, transpose_b={transpose_b})",
        **inputs,
    )
    np.testing.assert_array_equal(got, want)


def test_requantize__without_attributes_is_fixed_point_upward():
    """What the operator says where nothing is written: an int64 product, shifted, rounded up at a
    tie (computed here with integers)."""
    x = np.random.default_rng(0).integers(-(2**30), 2**30, 4000).astype("int32")
    mantissa, exponent = math.frexp(float(np.float64(np.float32(0.3)) / np.float32(12345.0)))
    multiplier, shift = round(mantissa * 2**31), 31 - exponent
    want = [
        min(max(((int(v) * multiplier + (1 << (shift - 1))) >> shift) + 5, -(2**31)), 2**31 - 1)
        for v in x
    ]
    (got,) = run_text('qnn.requantize(%x, 0.3f, 0, 12345f, 5, out_dtype="int32")', x=x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "padding", ["[-1, 0]", "[0, 0, -1, 0]", "[-1]", "[1, 1, 1]", "[1, 1, 1, 1, 1]"]
)
def test_padding__widths_from_zero_for_every_axis_or_side(padding):
    x, w = np.ones((1, 2, 5, 5), "float32"), np.ones((3, 2, 1, 1), "float32")
    with pytest.raises(ModelError, match="padding is"):
        run_text(f"nn.conv2d(%x, %w, padding={padding}, channels=3, kernel_size=[1, 1])", x=x, w=w)


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_pool__a_window_that_begins_behind_the_data(kind):
    """Relay counts it with ceil_mode, Relax does not."""
    x = floats(1, 2, 4, 5)
    text = f"nn.{kind}_pool2d(%x, pool_size=[3, 1], padding=[0, 1, 0, 1], ceil_mode=True)"
    with pytest.raises(ModelError, match=r"ceil_mode has 7 windows along W.*allowed: 6"):
        run_text(text, x=x)
    (got,) = run_text(text.replace("0, 1, 0, 1", "0, 1, 0, 0"), x=x)
    assert got.shape == (1, 2, 2, 6)


@pytest.mark.parametrize(
    ("call", "weight"),
    [
        ("nn.conv2d_transpose(%x, %w, channels=3, kernel_size=[3, 3])", "(4, ?, 3, 3)"),
        ("nn.conv2d(%x, %w, channels=3, kernel_size=[3, 3])", "(?, 4, 3, 3)"),
    ],
)
def test_channels__that_only_the_run_knows_are_read(call, weight):
    """A symbolic size of the weight may be the attribute's."""
    text = f"""#[version = "0.0.5"]
def @main(%x: Tensor[(2, 4, 5, 5), float32], %w: Tensor[{weight}, float32]) {{
  {call}
}}
"""
    assert rq.relay.from_text(text)["main"].ret_ty.ndim == 4
