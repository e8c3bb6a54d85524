"""Convolutions with parameters of the run time, against float64 convolutions of PyTorch on the
values that DynamicQuantizeLinear of ONNX gives.
"""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from operator_names import list_operators
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.stages.backends import ARM, X86

#: (operator, layouts, shapes of data and weight in the layouts, attributes)
FORMS = {
    "conv2d": ("conv2d", ("NCHW", "OIHW"), (2, 3, 9, 8), (6, 3, 3, 3), {}),
    "conv2d, padded": ("conv2d", ("NCHW", "OIHW"), (2, 3, 9, 8), (6, 3, 3, 3),
                       {"padding": (1, 0, 2, 1), "strides": (2, 1)}),
    "conv2d, depthwise": ("conv2d", ("NCHW", "OIHW"), (1, 6, 7, 7), (6, 1, 3, 3),
                          {"padding": (1, 1, 1, 1), "groups": 6}),
    "conv2d, NHWC, dilated": ("conv2d", ("NHWC", "HWIO"), (2, 9, 8, 4), (3, 3, 2, 6),
                              {"dilation": (2, 1), "groups": 2, "padding": (2, 2, 2, 2)}),
    "conv1d": ("conv1d", ("NCW", "OIW"), (2, 4, 11), (5, 4, 3), {"padding": (1, 2)}),
    "conv2d_transpose": ("conv2d_transpose", ("NCHW", "IOHW"), (2, 4, 5, 6), (4, 3, 3, 3),
                         {"strides": (2, 2), "padding": (1, 1, 1, 1), "output_padding": (1, 0)}),
    "conv2d_transpose, groups": ("conv2d_transpose", ("NCHW", "IOHW"), (1, 4, 5, 6), (4, 2, 3, 3),
                                 {"groups": 2}),
}  # fmt: skip


def make_qconfig(dtype: str) -> rq.QConfig:
    spec = rq.QSpec(dtype, is_dynamic=True)
    return rq.QConfig(rq.TensorConfig(spec), X86.default_qconfig.weight)


def make_mapping(dtype: str = "uint8") -> rq.QConfigMapping:
    return rq.QConfigMapping().set_global(make_qconfig(dtype))


def convolve(name, layouts, weight, attrs):
    """The model of one convolution with bias and relu, for any batch."""

    def build(shape):
        def body(emit, x):
            layout = {"data_layout": layouts[0], "kernel_layout": layouts[1]}
            y = emit("y.dot", getattr(op.nn, name)(x, relax.const(weight), **attrs, **layout))
            channels = weight.shape[layouts[1].index("O")] * (
                attrs.get("groups", 1) if "transpose" in name else 1
            )
            wide = [channels if axis == "C" else 1 for axis in layouts[0]]
            bias = relax.const(np.linspace(-1, 1, channels, dtype="float32").reshape(wide))
            return emit("y", op.nn.relu(emit("y.sum", op.add(y, bias))))

        return build_model(body, shape)

    return build


def dequantize_onnx(x: np.ndarray, low: int) -> np.ndarray:
    """Values as DynamicQuantizeLinear of ONNX gives them, float64; signed ones are those - 128."""
    least, most = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = np.float32(np.float32(most - least) / np.float32(255))
    zero = np.clip(np.rint(np.float32(low) - np.float32(least) / scale), low, low + 255)
    steps = np.clip(np.rint(x / scale) + zero, low, low + 255)
    return (steps - zero).astype("float64") * float(scale)


def dequantize_weight(weight: np.ndarray, axis: int | None) -> np.ndarray:
    """Symmetric int8, a scale for each output channel."""
    axes = tuple(i for i in range(weight.ndim) if i != axis) if axis is not None else None
    scale = np.abs(weight).max(axes, keepdims=True) / np.float32(127)
    return np.rint(weight / scale).astype("float64") * scale


def expect(torch, name, layouts, x, weight, attrs):
    """The convolution in float64 by PyTorch, whose padding is added by hand."""
    spatial = layouts[0].replace("N", "").replace("C", "")
    rank = len(spatial)
    data = torch.from_numpy(x).permute([layouts[0].index(a) for a in "NC" + spatial])
    order = ("IO" if "transpose" in name else "OI") + spatial
    kernel = torch.from_numpy(weight).permute([layouts[1].index(a) for a in order])
    options = {"stride": attrs.get("strides", 1), "groups": attrs.get("groups", 1)}
    padding = attrs.get("padding", (0,) * (2 * rank))
    if "transpose" in name:
        y = torch.nn.functional.conv_transpose2d(
            data, kernel, padding=padding[:rank],
            output_padding=attrs.get("output_padding", 0), **options,
        )  # fmt: skip
    else:
        widths = [w for i in reversed(range(rank)) for w in (padding[i], padding[rank + i])]
        data = torch.nn.functional.pad(data, widths)
        function = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}[rank]
        y = function(data, kernel, dilation=attrs.get("dilation", 1), **options)
    y = torch.relu(y + torch.linspace(-1, 1, y.shape[1]).reshape(1, -1, *[1] * rank))
    return y.permute([("NC" + spatial).index(a) for a in layouts[0]]).numpy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("backend", "dtype"), [(X86, "uint8"), (ARM, "int8")])
def test_set_object_type__dynamic_convolutions(form, backend, dtype):
    """quantize_per_tensor_dynamic - dequantize - float_op of FX, for every family and layout."""
    torch = pytest.importorskip("torch")
    name, layouts, shape, weight_shape, attrs = FORMS[form]
    random = np.random.default_rng(len(form))
    weight = random.normal(0, 1, weight_shape).astype("float32")
    model = convolve(name, layouts, weight, attrs)(("n", *shape[1:]))
    qmod = rq.quantize(
        model, None, None, backend=backend, qconfig_mapping=make_mapping(dtype), strict=True
    )
    (row,) = rq.ledger(qmod).rows
    assert (row.quantized, row.is_dynamic) == (True, True)
    one_scale = "transpose" in name and attrs.get("groups", 1) > 1
    kernel = dequantize_weight(weight, None if one_scale else layouts[1].index("O"))
    low = 0 if dtype == "uint8" else -128
    for x in (random.normal(0.5, 2, shape), random.uniform(3, 4, shape), -np.ones(shape)):
        x = x.astype("float32")
        want = expect(torch, name, layouts, dequantize_onnx(x, low), kernel, attrs)
        (got,) = rq.reference.run(qmod, {"x": x})
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    if backend is X86:
        assert rq.verify(qmod, [random.normal(0, 1, shape).astype("float32")]).is_equal


def residual_model():
    def body(emit, x):
        y = emit("a", op.nn.conv2d(x, emit.constant(3, 3, 3, 3), padding=1))
        # What passes x itself on would be a part of the convolution.
        return emit("y", op.nn.relu(emit("sum", op.add(y, emit("t", op.tanh(x))))))

    return build_model(body, (1, 3, 8, 8))


def test_set_object_type__what_is_added_behind_a_dynamic_convolution_is_float():
    qmod = rq.quantize(residual_model(), None, None, qconfig_mapping=make_mapping(), strict=True)
    rows = {row.name: row.quantized for row in rq.ledger(qmod).rows}
    assert rows == {"a": True, "t": False, "y": False}
    assert list_operators(qmod).count("qnn.quantize") == 1


def test_set_object_type__sizes_of_the_run_time_leave_a_padded_convolution_in_float():
    """The share of the zero point in the sums depends on where the borders are."""
    random = np.random.default_rng(0)
    weight = random.normal(0, 1, (4, 3, 3, 3)).astype("float32")
    build = convolve("conv2d", ("NCHW", "OIHW"), weight, {"padding": (1, 1, 1, 1)})
    qmod = rq.quantize(
        build((1, 3, "h", "w")),
        None,
        None,
        qconfig_mapping=make_mapping(),
        guard=rq.config.Guard.OFF,
    )
    (row,) = rq.ledger(qmod).rows
    assert not row.quantized
    assert "but the zero point's part of the sums depends on it" in row.reason
