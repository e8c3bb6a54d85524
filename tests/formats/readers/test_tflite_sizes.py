"""Sizes that a TFLite file leaves open: -1 in shape_signature."""

from __future__ import annotations

import numpy as np
import pytest
from tflite_models import Operator, Tensor, write_model

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.ir.rewrite.graph import tensor_shape

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((2, 3, 1, 1)).astype("float32")
SHARED = ("ic_resnet8_fp32.tflite", "ic_resnet8_int8_reference.tflite")
SAME, VALID = 0, 1


def write_conv(path, padding: int, stride: int = 1):
    """A convolution of 3 rows over data (N, H, 1, 1), whose N and H are open."""
    tensors = [
        Tensor("x", (1, 1, 1, 1), signature=(-1, -1, 1, 1)),
        Tensor("w", WEIGHT.shape, values=WEIGHT),
        Tensor("y", (1, 1, 1, 2), signature=(-1, -1, 1, 2)),
    ]
    fields = {"Padding": padding, "StrideH": stride, "StrideW": 1}
    fields |= {"DilationHFactor": 1, "DilationWFactor": 1}
    conv = Operator("CONV_2D", ["x", "w"], ["y"], "Conv2DOptions", fields)
    return write_model(path / "m.tflite", tensors, [conv], ["x"], ["y"])


def convolve(x: np.ndarray, padding: int, stride: int) -> np.ndarray:
    rows, taps = x.shape[1], WEIGHT.shape[1]
    if padding == SAME:
        total = max((-(-rows // stride) - 1) * stride + taps - rows, 0)
        x = np.pad(x, [(0, 0), (total // 2, total - total // 2), (0, 0), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(x[:, :, :, 0], taps, axis=1)[:, ::stride]
    return np.einsum("nrct,ot->nrco", windows, WEIGHT[:, :, 0, 0])


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize(("padding", "stride"), [(SAME, 1), (SAME, 2), (VALID, 2), (SAME, 3)])
def test_open_sizes__are_given(padding, stride, rows, tmp_path):
    path = write_conv(tmp_path, padding, stride)
    mod, _ = rq.load(path, shapes={"x": (3, rows, 1, 1)})
    x = RNG.standard_normal((3, rows, 1, 1)).astype("float32")
    (got,) = rq.reference.run(mod, [x])
    np.testing.assert_allclose(got, convolve(x, padding, stride), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("padding", "stride"), [(SAME, 1), (VALID, 1), (VALID, 2)])
def test_open_sizes__get_names(padding, stride, tmp_path):
    path = write_conv(tmp_path, padding, stride)
    mod, _ = rq.load(path, shapes={"x": ("N", "H", 1, 1)})
    assert tensor_shape(mod["main"].params[0]) == ("N", "H", 1, 1)
    for batch, rows in ((1, 5), (3, 8)):
        x = RNG.standard_normal((batch, rows, 1, 1)).astype("float32")
        (got,) = rq.reference.run(mod, [x])
        np.testing.assert_allclose(got, convolve(x, padding, stride), rtol=1e-5, atol=1e-5)


def test_open_sizes__padding_that_depends_on_a_name_is_refused(tmp_path):
    path = write_conv(tmp_path, SAME, 2)
    with pytest.raises(ModelError, match=r"CONV_2D \(output 'y'\) is another one for each size"):
        rq.load(path, shapes={"x": (1, "H", 1, 1)})
    rq.load(path, shapes={"x": ("N", 6, 1, 1)})


def test_open_sizes__are_1_with_a_warning(tmp_path):
    path = write_conv(tmp_path, SAME)
    with pytest.warns(UserWarning, match=r"read as 1: 'x' \(-1, -1, 1, 1\).*\('n0', 'n1', 1, 1\)"):
        mod, _ = rq.load(path)
    assert tensor_shape(mod["main"].params[0]) == (1, 1, 1, 1)


def test_open_sizes__a_result_whose_size_an_operator_needs(tmp_path):
    """It is in the file alone, for data of one row."""
    tensors = [
        Tensor("x", (1, 4), signature=(-1, 4)),
        Tensor("y", (1, 4), signature=(-1, 4)),
    ]
    reshape = Operator("STABLEHLO_RESHAPE", ["x"], ["y"])
    path = write_model(tmp_path / "m.tflite", tensors, [reshape], ["x"], ["y"])
    with pytest.raises(ModelError, match=r"size of its result 'y', which the file leaves open"):
        rq.load(path, shapes={"x": (3, 4)})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (1, 1, 1, 1)}, "'z', which is not an input"),
        ({"x": (1, 1)}, "allowed: 4 sizes"),
        ({"x": (1, 0, 1, 1)}, "allowed: positive integers"),
        ({"x": (1, 4, 2, 1)}, "fixes it to 1"),
        ({"x": (1, 4, "W", 1)}, "fixes it to 1"),
    ],
)
def test_shapes__that_contradict_the_file(shapes, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        rq.load(write_conv(tmp_path, SAME), shapes=shapes)


@pytest.mark.parametrize("file", SHARED)
def test_open_sizes__each_sample_of_a_network_is_as_alone(file, shared_data):
    path = shared_data(file)
    with pytest.warns(UserWarning, match="read as 1"):
        alone, _ = rq.load(path)
    (param,) = alone["main"].params
    x = (RNG.standard_normal((3, 32, 32, 3)) * 60).astype(str(param.ty.dtype))
    want = np.concatenate([rq.reference.run(alone, [each[None]])[0] for each in x])
    for size in (3, "N"):
        mod, _ = rq.load(path, shapes={param.name: (size, 32, 32, 3)})
        np.testing.assert_allclose(rq.reference.run(mod, [x])[0], want, rtol=1e-5, atol=1e-5)


def write_slice(path, begin, end, stride, fields, pick):
    """A slice of data (N, 4) whose N is open."""
    made = pick(np.zeros((1, 4), "float32"))
    constants = [
        Tensor(name, (len(each),), "int32", np.array(each, "int32"))
        for name, each in zip("bes", (begin, end, stride), strict=True)
    ]
    result = Tensor("y", made.shape, signature=[-1] * made.ndim)
    tensors = [Tensor("x", (1, 4), signature=(-1, 4)), *constants, result]
    call = Operator("STRIDED_SLICE", ["x", "b", "e", "s"], ["y"], "StridedSliceOptions", fields)
    return write_model(path / "m.tflite", tensors, [call], ["x"], ["y"])


@pytest.mark.parametrize(
    ("begin", "end", "stride", "fields", "pick"),
    [
        ([0, 1], [0, 3], [1, 1], {"BeginMask": 1, "EndMask": 1}, lambda x: x[:, 1:3]),
        ([1], [0], [1], {"EndMask": 1}, lambda x: x[1:]),
        ([0], [-1], [2], {}, lambda x: x[0:-1:2]),
        ([0], [4], [1], {}, lambda x: x[:4]),
        ([-1], [0], [1], {"ShrinkAxisMask": 1}, lambda x: x[-1]),
        ([0, 0], [0, 0], [1, -1], {"BeginMask": 3, "EndMask": 3}, lambda x: x[:, ::-1]),
        ([0, 0], [0, 0], [1, 1], {"EllipsisMask": 1, "NewAxisMask": 2}, lambda x: x[..., None]),
    ],
)
def test_open_sizes__of_slices_get_names(begin, end, stride, fields, pick, tmp_path):
    path = write_slice(tmp_path, begin, end, stride, fields, pick)
    mod, _ = rq.load(path, shapes={"x": ("N", 4)})
    for rows in (3, 7):
        x = RNG.standard_normal((rows, 4)).astype("float32")
        np.testing.assert_array_equal(rq.reference.run(mod, [x])[0], pick(x))


def test_open_sizes__of_slices_that_count_down_are_refused(tmp_path):
    path = write_slice(tmp_path, [0], [0], [-1], {"BeginMask": 1, "EndMask": 1}, lambda x: x[::-1])
    with pytest.raises(ModelError, match=r"stride is -1 along an axis of size N; .*Fix the symbol"):
        rq.load(path, shapes={"x": ("N", 4)})
    x = RNG.standard_normal((3, 4)).astype("float32")
    mod, _ = rq.load(path, shapes={"x": (3, 4)})
    np.testing.assert_array_equal(rq.reference.run(mod, [x])[0], x[::-1])


def write_sum(path):
    """A sum of a and b (N, 4) whose N are open."""
    tensors = [Tensor(name, (1, 4), signature=(-1, 4)) for name in "aby"]
    add = Operator("ADD", ["a", "b"], ["y"], "AddOptions", {"FusedActivationFunction": 0})
    return write_model(path / "m.tflite", tensors, [add], ["a", "b"], ["y"])


def test_open_sizes__of_an_input_that_shapes_lacks_are_1_with_a_warning(tmp_path):
    path = write_sum(tmp_path)
    for shapes, names in (({"a": (3, 4)}, "'b'"), ({}, "'a'")):
        with pytest.warns(UserWarning, match=rf"read as 1: {names} \(-1, 4\).*For others: shapes="):
            rq.load(path, shapes=shapes)


def test_open_sizes__every_name_is_tried_with_every_number(tmp_path):
    """The third of three names, too: a window of 2 with a stride of 4 pads some sizes alone."""
    weight = np.ones((2, 1, 2, 1), "float32")
    tensors = [
        Tensor("x", (1, 1, 1, 1), signature=(-1, -1, -1, 1)),
        Tensor("w", weight.shape, values=weight),
        Tensor("y", (1, 1, 1, 2), signature=(-1, -1, -1, 2)),
    ]
    fields = {"Padding": SAME, "StrideH": 1, "StrideW": 4}
    fields |= {"DilationHFactor": 1, "DilationWFactor": 1}
    conv = Operator("CONV_2D", ["x", "w"], ["y"], "Conv2DOptions", fields)
    path = write_model(tmp_path / "m.tflite", tensors, [conv], ["x"], ["y"])
    with pytest.raises(ModelError, match=r"CONV_2D \(output 'y'\) is another one for each size"):
        rq.load(path, shapes={"x": ("A", "B", "C", 1)})


def test_open_sizes__more_names_than_orders_are_refused(tmp_path):
    tensors = [Tensor(name, (1,) * 7, signature=(-1,) * 7) for name in "ay"]
    relu = Operator("RELU", ["a"], ["y"])
    path = write_model(tmp_path / "m.tflite", tensors, [relu], ["a"], ["y"])
    with pytest.raises(ModelError, match=r"has 7 names of sizes \(a, b, .*allowed .*: 6"):
        rq.load(path, shapes={"a": tuple("abcdefg")})
    assert tensor_shape(rq.load(path, shapes={"a": (*"abcdef", 2)})[0]["main"].params[0])[5] == "f"
