"""ConvertLayout through the qnn operators: results stay, axes move."""

from __future__ import annotations

import numpy as np
import pytest
from qnn_testing import make_module, run_module, type_of
from tvm import relax

import relayquant.ir.dialect  # noqa: F401
from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn

RNG = np.random.default_rng(0)
NHWC = {
    "relax.qnn.conv2d": ["NHWC", "OHWI"],
    "relax.qnn.conv2d_transpose": ["NHWC", "IHWO"],
    "relax.nn.conv2d": ["NHWC", "OHWI"],
}
SCALES = np.array([0.01, 0.02, 0.03, 0.005, 0.04], "float32")
WEIGHT = RNG.integers(-127, 128, (5, 3, 3, 3)).astype("int8")
DATA = RNG.integers(0, 256, (2, 3, 6, 7)).astype("uint8")


def convolve(x):
    return qnn.conv2d(x, WEIGHT, 128, [0, 1, -1, 2, 3], 0.02, SCALES, padding=(1, 0, 1, 2))


def requantize(x, axis=1):
    return qnn.requantize(x, SCALES, 0, 3.0, 3, axis=axis)


def concatenate(x):
    q = requantize(convolve(x))
    return qnn.concatenate([q, q], [0.1, 0.2], [3, 3], 0.2, 1, axis=1)


GRAPHS = {
    "conv2d": convolve,
    "conv2d_transpose": lambda x: qnn.conv2d_transpose(
        x, WEIGHT.transpose(1, 0, 2, 3), 128, 0, 0.02, SCALES, strides=2, output_padding=1
    ),
    "requantize": lambda x: requantize(convolve(x)),
    "requantize_negative_axis": lambda x: requantize(convolve(x), axis=-3),
    "dequantize": lambda x: qnn.dequantize(convolve(x), SCALES, 0, axis=1),
    "quantize": lambda x: qnn.quantize(qnn.dequantize(convolve(x), 0.001, 0), SCALES, 0, axis=1),
    "simulated": lambda x: qnn.simulated_dequantize(
        qnn.simulated_quantize(qnn.dequantize(convolve(x), 0.001, 0), 1, SCALES, 0, axis=1),
        1,
        SCALES,
        0,
        axis=1,
    ),
    "add": lambda x: qnn.add(
        convolve(x),
        RNG_CONSTANT,
        SCALES,
        0,
        [0.1, 0.2, 0.3, 0.4, 0.5],
        0,
        7.0,
        1,
        lhs_axis=1,
        rhs_axis=1,
        out_dtype="int8",
    ),
    "subtract_scalar": lambda x: qnn.subtract(
        np.array(5, "int8"), requantize(convolve(x)), 0.1, 0, 0.2, 3, 0.1, 0
    ),
    "mul_lower_rank": lambda x: qnn.mul(
        requantize(convolve(x)), RNG_CONSTANT[0], 0.1, 3, 0.2, 0, 4.0, 0
    ),
    "concatenate": concatenate,
    "avg_pool2d": lambda x: qnn.avg_pool2d(
        requantize(convolve(x)), 0.1, 3, 0.1, 3, pool_size=(2, 3), strides=(2, 1), padding=1
    ),
    "mean": lambda x: qnn.mean(requantize(convolve(x)), 0.1, 3, 0.1, 3, axes=[2, 3]),
    "mean_keepdims": lambda x: qnn.mean(
        requantize(convolve(x)), 0.1, 3, 0.1, 3, axes=[-1, 1], keepdims=True
    ),
    "mean_channel": lambda x: qnn.mean(requantize(convolve(x)), 0.1, 3, 0.1, 3, axes=[1]),
    "leaky_relu": lambda x: qnn.leaky_relu(requantize(convolve(x)), 0.1, 3, 0.1, 3, alpha=0.2),
    "prelu": lambda x: qnn.prelu(requantize(convolve(x)), 0.1, 3, 0.1, 3, SCALES * 100, axis=-3),
    "lookup": lambda x: qnn.lookup(requantize(convolve(x)), np.arange(256).astype("uint8")[::-1]),
}
RNG_CONSTANT = RNG.integers(-127, 128, (1, 5, 1, 1)).astype("int8")


def get_calls(mod, name):
    calls = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if hasattr(value, "op") and getattr(value.op, "name", "") == f"relax.{name}":
                calls.append(value)
    return calls


@pytest.mark.slow
@pytest.mark.sample(16)
@pytest.mark.parametrize("graph", GRAPHS)
def test_convert_layout__same_result(graph):
    before = make_module(GRAPHS[graph], [type_of(DATA)])
    after = relax.transform.ConvertLayout(NHWC)(before)
    layouts = [
        str(call.attrs.data_layout)
        for name in ("qnn.conv2d", "qnn.conv2d_transpose")
        for call in get_calls(after, name)
    ]
    assert layouts == ["NHWC"]
    np.testing.assert_array_equal(run_module(after, [DATA]), run_module(before, [DATA]))


def test_convert_layout__conv1d():
    data = DATA[:, :, 0]
    kernel = RNG.integers(-9, 10, (5, data.shape[1], 3)).astype("int8")

    def graph(x):
        acc = qnn.conv1d(x, kernel, 3, 0, 0.1, 0.2, padding=(2, 0))
        return qnn.requantize(acc, 0.02, 0, 0.4, 3, axis=1, out_dtype=str(data.dtype))

    before = make_module(graph, [type_of(data)])
    wanted = {"relax.qnn.conv1d": ["NWC", "OWI"]}
    after = relax.transform.ConvertLayout(wanted)(before)
    (call,) = get_calls(after, "qnn.conv1d")
    assert (str(call.attrs.data_layout), str(call.attrs.kernel_layout)) == ("NWC", "OWI")
    assert get_calls(after, "qnn.requantize")[0].attrs.axis == 2
    np.testing.assert_array_equal(run_module(after, [data]), run_module(before, [data]))
    with pytest.raises(QnnError, match="allowed: the letters OIW"):
        relax.transform.ConvertLayout({"relax.qnn.conv1d": ["NWC", "OHWI"]})(before)


def test_convert_layout__axis_follows_and_nothing_is_permuted_back():
    def graph(x):
        q = requantize(convolve(x), axis=-3)
        s = qnn.add(q, q, 0.1, 3, 0.1, 3, 0.2, 0)
        p = qnn.avg_pool2d(s, 0.2, 0, 0.2, 0, pool_size=2)
        c = qnn.concatenate([p, p], [0.2, 0.2], [0, 0], 0.2, 0, axis=1)
        return qnn.dequantize(c, 0.2, 0, axis=1)

    after = relax.transform.ConvertLayout(NHWC)(make_module(graph, [type_of(DATA)]))
    assert get_calls(after, "qnn.requantize")[0].attrs.axis == 3
    assert str(get_calls(after, "qnn.avg_pool2d")[0].attrs.layout) == "NHWC"
    assert get_calls(after, "qnn.concatenate")[0].attrs.axis == 3
    # One for the data, one for the weight, one for the result.
    assert len(get_calls(after, "permute_dims")) == 3


def test_convert_layout__mean_keeps_axes_of_the_new_order():
    def graph(x):
        return qnn.mean(requantize(convolve(x)), 0.1, 3, 0.1, 3, axes=[2, 3])

    after = relax.transform.ConvertLayout(NHWC)(make_module(graph, [type_of(DATA)]))
    assert list(get_calls(after, "qnn.mean")[0].attrs.axes) == [1, 2]
    assert len(get_calls(after, "permute_dims")) == 2


def test_convert_layout__lower_rank_goes_back():
    mod = make_module(GRAPHS["mul_lower_rank"], [type_of(DATA)])
    after = relax.transform.ConvertLayout(NHWC)(mod)
    assert [int(v) for v in get_calls(after, "permute_dims")[-1].attrs.axes] == [0, 3, 1, 2]


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (["NHWC", "OHWI", "NCHW"], "the result has the layout of the data"),
        (["NCHW4c", "OIHW"], "allowed: the letters NCHW"),
    ],
)
def test_convert_layout__unknown_layout(layouts, message):
    mod = make_module(convolve, [type_of(DATA)])
    with pytest.raises(QnnError, match=message):
        relax.transform.ConvertLayout({"relax.qnn.conv2d": layouts})(mod)
