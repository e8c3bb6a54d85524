"""Float convolutions of images and sequences whose size is known only at run time: kernels on
vectors of every width against float64 numpy, and whole modules against ONNX Runtime, for several
sizes each. Also transposed convolutions of sequences of known length.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
import tvm
from floats import FULL, ISAS, TARGET, check, convolve, draw, finish, run_kernel
from machines import compile_kernel
from onnx import helper
from onnx_models import make_onnx
from operator_names import list_operators

import relayquant as rq
from relayquant.codegen.kernels.floating.convolution.free import (
    FreeFloatConv2d,
    count_packed,
    make_free_conv2d,
    make_free_packing,
    pack_free_conv2d,
)
from relayquant.codegen.kernels.floating.convolution.free_depthwise import make_free_depthwise
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, FloatIsa
from relayquant.codegen.kernels.windows import ConvWindows
from relayquant.codegen.lowering.floating.lower import lower_float
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.rewrites.transposed_blocks import make_pixel_blocks
from relayquant.codegen.rewrites.transposed_sequences import lay_sequences

#: (images, height, width)
SIZES = ((1, 6, 6), (2, 7, 19), (0, 8, 8), (1, 40, 37))
KINDS = {
    "everything": FloatConv2d(1, 8, 8, 5, 33, (3, 3), padding=(1, 1, 1, 1), epilogue=FULL),
    "strides": FloatConv2d(1, 8, 8, 3, 10, (5, 3), (2, 1), (2, 1, 0, 1)),
    "dilated": FloatConv2d(1, 8, 8, 8, 48, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    "groups": FloatConv2d(1, 8, 8, 15, 24, (3, 2), (1, 1), (1, 1, 1, 0), groups=3, epilogue=FULL),
    "one output": FloatConv2d(1, 8, 8, 9, 1, (3, 3), padding=(1, 1, 1, 1)),
    "many weights": FloatConv2d(1, 8, 8, 64, 130, (3, 3), padding=(1, 1, 1, 1)),
    "one tap": FloatConv2d(1, 8, 8, 70, 33, (1, 1), (2, 1)),
    "depthwise": FloatConv2d(1, 8, 8, 20, 20, (3, 3), (1, 1), (1,) * 4, groups=20, epilogue=FULL),
    "depthwise, strides": FloatConv2d(1, 8, 8, 7, 7, (5, 2), (2, 3), (2, 0, 1, 2), groups=7),
    "depthwise, gaps": FloatConv2d(
        1, 8, 8, 34, 34, (2, 3), (1, 1), (0, 6, 1, 7), (1, 3), groups=34, epilogue=FULL
    ),
}


def find_windows(spec: FloatConv2d) -> ConvWindows:
    extents = spec.in_channels, spec.kernel, spec.strides, spec.padding, spec.dilation
    return ConvWindows(*extents, "float32", groups=spec.groups)


def check_sizes(spec: FloatConv2d, isa: FloatIsa) -> None:
    """Compile one kernel, and compare its results for every size."""
    rng = np.random.default_rng(7)
    free = FreeFloatConv2d(find_windows(spec), spec.out_channels, spec.epilogue)
    w = draw(rng, spec.out_channels, *spec.kernel, spec.group_in)
    packed = pack_free_conv2d(w, free, isa)
    assert packed.size == count_packed(free, isa)
    np.testing.assert_array_equal(
        run_kernel(make_free_packing(free, isa), w, np.zeros_like(packed)), packed
    )
    make = make_free_depthwise if free.is_depthwise else make_free_conv2d
    kernel = compile_kernel(make(free, isa), TARGET)
    for images, height, width in SIZES:
        own = replace(spec, batch=images, height=height, width=width)
        x = draw(rng, images, height, width, spec.in_channels)
        total = convolve(x, w, own) if images else np.zeros(own.out_shape)
        expected, operands = finish(total, spec.epilogue, rng)
        y = tvm.runtime.tensor(np.full(expected.shape, np.nan, "float32"))
        kernel(*map(tvm.runtime.tensor, (x, packed, *operands)), y)
        if images:
            check(y.numpy(), expected)


@pytest.mark.sample(6)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", KINDS)
def test_make_free_conv2d__follows_numpy(name, isa):
    check_sizes(KINDS[name], isa)


@pytest.mark.parametrize("name", ["everything", "depthwise"])
def test_make_free_conv2d__writes_columns_of_a_wider_tensor(name):
    spec = replace(KINDS[name], epilogue=FloatEpilogue())
    rng, isa = np.random.default_rng(5), ISAS[0]
    w = draw(rng, spec.out_channels, *spec.kernel, spec.group_in)
    columns = FloatEpilogue(columns=(3, spec.out_channels + 5))
    free = FreeFloatConv2d(find_windows(spec), spec.out_channels, columns)
    make = make_free_depthwise if free.is_depthwise else make_free_conv2d
    x = draw(rng, 1, spec.height, spec.width, spec.in_channels)
    whole = np.full((*spec.out_shape[:3], spec.out_channels + 5), 7, "float32")
    got = run_kernel(make(free, isa), x, pack_free_conv2d(w, free, isa), whole)
    check(got[..., 3:-2], convolve(x, w, spec))
    assert (got[..., [0, 1, 2, -2, -1]] == 7).all()


# ---------------------------------------------------------------- modules


def make_network(op: str, weight: np.ndarray, **attrs: object) -> bytes:
    """y = relu(op(x) + bias) of a free number of images or sequences of free size, in ONNX."""
    groups = attrs.get("group", 1)
    assert isinstance(groups, int)
    channels = weight.shape[0] if op == "ConvTranspose" else weight.shape[1] * groups
    outputs = weight.shape[1] * groups if op == "ConvTranspose" else weight.shape[0]
    nodes = [
        helper.make_node(op, ["x", "w", "b"], ["c"], **attrs),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    sizes = list("hw")[4 - weight.ndim :]
    bias = np.linspace(-1, 1, outputs).astype("float32")
    shape, constants = ["n", channels, *sizes], {"w": weight, "b": bias}
    return make_onnx(nodes, {"x": shape}, {"y": None}, constants).SerializeToString()


NETWORKS = {
    "one tap": ("Conv", (12, 8, 1, 1), {}),
    "strides": ("Conv", (12, 8, 3, 3), {"strides": [2, 1], "pads": [1, 0, 1, 2]}),
    "groups": ("Conv", (12, 4, 2, 3), {"group": 3, "dilations": [2, 1]}),
    "depthwise": ("Conv", (9, 1, 3, 3), {"group": 9, "pads": [1, 1, 1, 1]}),
    "transposed": ("ConvTranspose", (8, 5, 4, 3), {"strides": [2, 1], "pads": [1, 0, 1, 1]}),
    "transposed, one output": ("ConvTranspose", (8, 1, 2, 2), {"strides": [2, 2]}),
    "sequence": ("Conv", (12, 8, 3), {"strides": [2], "pads": [1, 2]}),
    "sequence, one tap": ("Conv", (12, 8, 1), {}),
    "sequence, depthwise": ("Conv", (9, 1, 5), {"group": 9, "pads": [2, 2]}),
    "sequence, groups": ("Conv", (12, 4, 3), {"group": 2, "dilations": [2]}),
    "sequence, transposed": ("ConvTranspose", (8, 5, 4), {"strides": [2], "pads": [1, 1]}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_lower_free_conv2d__follows_onnx_runtime(name, tmp_path):
    op, shape, attrs = NETWORKS[name]
    rng = np.random.default_rng(3)
    network = make_network(op, draw(rng, *shape), **attrs)
    path = tmp_path / "network.onnx"
    path.write_bytes(network)
    mod, _ = rq.load(str(path))
    lowered = lower_float(make_pixel_blocks(convert_layout(lay_sequences(mod))), TARGET)
    names = list_operators(lowered)
    assert not [each for each in names if "conv" in each]
    assert ("nn.relu" in names) == (op == "ConvTranspose")
    session, executor = ort.InferenceSession(network), rq.Executor(rq.compile(mod))
    for images, *size in ((1, 5, 6), (3, 9, 5), (1, 30, 41)):
        x = draw(rng, images, session.get_inputs()[0].shape[1], *size[4 - len(shape) :])
        (expected,) = session.run(None, {"x": x})
        (found,) = executor.run("main", [x])
        check(found, np.asarray(expected))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", [each for each in NETWORKS if each.startswith("sequence")])
def test_lower_conv2d__sequences_of_known_length(name, precision, tmp_path):
    op, shape, attrs = NETWORKS[name]
    rng = np.random.default_rng(4)
    network = make_network(op, draw(rng, *shape), **attrs)
    path = tmp_path / "network.onnx"
    path.write_bytes(network)
    session = ort.InferenceSession(network)
    given = ("n", session.get_inputs()[0].shape[1], 23)
    mod, _ = rq.load(str(path), shapes={"x": given})
    lowered = lower_float(convert_layout(lay_sequences(mod)), TARGET)
    assert not [each for each in list_operators(lowered) if "conv" in each]
    executor = rq.Executor(rq.compile(mod, precision=precision))
    x = draw(rng, 3, *given[1:])
    (expected,), (found,) = session.run(None, {"x": x}), executor.run("main", [x])
    if precision == "float32":
        check(found, np.asarray(expected))
    else:
        np.testing.assert_allclose(found, np.asarray(expected), rtol=0.05, atol=0.05)
