"""Biases of layers with weights or data that are zero or almost so, and in units of other tools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.base.qtypes import QParams
from relayquant.stages.conversion.bias import refine_units

#: operator, its attributes, shape of the weight, axis of its outputs, shape of the data
LAYERS = {
    "conv1d": ("Conv", {}, (6, 4, 3), 0, (1, 4, 9)),
    "conv2d": ("Conv", {}, (6, 4, 3, 3), 0, (1, 4, 6, 6)),
    "conv3d": ("Conv", {}, (6, 4, 2, 2, 2), 0, (1, 4, 4, 4, 4)),
    "depthwise": ("Conv", {"group": 6}, (6, 1, 3, 3), 0, (1, 6, 6, 6)),
    "grouped": ("Conv", {"group": 2}, (6, 2, 3, 3), 0, (1, 4, 6, 6)),
    "transposed": ("ConvTranspose", {}, (4, 6, 3, 3), 1, (1, 4, 6, 6)),
    "transposed in groups": ("ConvTranspose", {"group": 2}, (4, 3, 3, 3), 1, (1, 4, 6, 6)),
    "gemm": ("Gemm", {}, (8, 6), 1, (5, 8)),
    "gemm transposed": ("Gemm", {"transB": 1}, (6, 8), 0, (5, 8)),
    "matmul": ("MatMul", {}, (8, 6), 1, (2, 5, 8)),
}
#: what the first two outputs' weights are multiplied with, how large biases are, and the data
SIZES = [
    (0.0, 1e-3, 1.0),
    (0.0, 1e6, 1e-6),
    (1e-9, 1.0, 1.0),
    (1e-38, 1e-3, 1.0),
    (1e-44, 1.0, 1e3),
]


def make_file(nodes, shape, constants) -> onnx.ModelProto:
    model = make_onnx(nodes, {"x": shape}, {"y": None}, constants)
    return onnx.shape_inference.infer_shapes(model)


def make_layer(layer: str, weight, bias, *, is_followed: bool) -> onnx.ModelProto:
    op, attrs, _, _, shape = LAYERS[layer]
    out = "t" if is_followed else "y"
    if op == "MatMul":
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Add", ["m", "b"], [out]),
        ]
    else:
        nodes = [helper.make_node(op, ["x", "w", "b"], [out], **attrs)]
    if is_followed:
        nodes.append(helper.make_node("Concat", ["t", "t"], ["y"], axis=0))
    return make_file(nodes, shape, {"w": weight, "b": bias})


def quantize_in_steps(model, x, mapping=None, backend="x86"):
    """(reference form, integer module): without the guard, which puts back to float."""
    mod, params = rq.load(model)
    prepared = rq.prepare(mod, params, qconfig_mapping=mapping, backend=backend)
    prepared = rq.calibrate(prepared, [{"x": x}], observer=rq.observers.MinMax())
    reference = rq.convert_to_reference(prepared)
    return reference, rq.lower(reference, prepared.backend)


def check_layer(layer: str, sizes, *, is_whole: bool = False, is_followed=False, **settings):
    """The first two channels (all if `is_whole`) are right to half a step of the result, which in
    float is exact.
    """
    factor, bias_size, data_size = sizes
    _, _, weight_shape, axis, shape = LAYERS[layer]
    rng = np.random.default_rng(3)
    weight = rng.standard_normal(weight_shape).astype("float32")
    is_whole = is_whole or layer == "transposed in groups"  # which has one scale
    dead = slice(None) if is_whole else slice(0, 2)
    weight[(slice(None),) * axis + (dead,)] *= np.float32(factor)
    bias = (rng.standard_normal(6) * bias_size).astype("float32")
    x = (rng.standard_normal(shape) * data_size).astype("float32")
    model = make_layer(layer, weight, bias, is_followed=is_followed)
    wanted = run_onnxruntime(model, {"x": x}, rewrites=False)[0]
    channels = wanted.ndim - 1 if len(shape) < 4 and not layer.startswith("conv") else 1
    wanted = np.moveaxis(wanted, channels, 0)
    # Products of weights that are not zero are rounded as all others are.
    products = 0.0 if not factor else 300 * data_size * factor
    bound = 2.0**-17 * bias_size + products
    if is_followed:
        bound += 1.05 * (max(wanted.max(), 0) - min(wanted.min(), 0)) / 255
    for module in quantize_in_steps(model, x, **settings):
        found = np.moveaxis(rq.reference.run(module, {"x": x})[0], channels, 0)
        assert np.abs(found - wanted)[dead].max() <= bound
        rows = rq.ledger(module).rows
        assert any(row.quantized for row in rows if "conv" in row.op or "matmul" in row.op)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layer", LAYERS)
def test_channels_without_weights__give_their_bias(layer):
    check_layer(layer, SIZES[0])
    check_layer(layer, SIZES[0], is_whole=True, is_followed=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "arm", "generic"])
@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_channels_with_tiny_weights__give_their_bias(layer, sizes, is_whole, is_followed, backend):
    check_layer(layer, sizes, is_whole=is_whole, is_followed=is_followed, backend=backend)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("bits", [None, 16])
def test_tensors_with_one_scale__give_their_bias(is_whole, bits):
    """Also in a register of 16 bits, which the bias must not fill."""
    spec = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, quant_min=-127)
    activation = rq.TensorConfig(rq.QSpec("uint8"), rq.observers.MinMax())
    qconfig = rq.QConfig(activation, rq.TensorConfig(spec, rq.observers.MinMax()))
    mapping = rq.QConfigMapping().set_global(qconfig)
    backend = rq.get_backend_config()
    if bits is not None:
        row = backend.find_pattern("conv2d_bias")
        narrow = replace(row.dtypes[0], accumulator=rq.config.Accumulator(bits))
        patterns = [
            replace(each, dtypes=(narrow,)) if each is row else each for each in backend.patterns
        ]
        backend = replace(backend, patterns=tuple(patterns))
    sizes = (0.0, 1e-3, 1.0) if is_whole or bits is None else (0.0, 1.0, 1.0)
    check_layer("conv2d", sizes, is_whole=is_whole, is_followed=True, mapping=mapping)


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("bias_size", [1e-2, 1e-4])
def test_bias_smaller_than_a_step_of_its_sums__keeps_the_operator_in_float(bias_size, is_followed):
    """The data is zero on all samples, so that its scale says nothing."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((6, 4, 3, 3)).astype("float32")
    bias = (rng.standard_normal(6) * bias_size).astype("float32")
    model = make_layer("conv2d", weight, bias, is_followed=is_followed)
    x = np.zeros((1, 4, 6, 6), "float32")
    wanted = run_onnxruntime(model, {"x": x}, rewrites=False)[0]
    step = (wanted.max() - wanted.min()) / 255
    reference, module = quantize_in_steps(model, x)
    for each in (reference, module):
        assert np.abs(rq.reference.run(each, {"x": x})[0] - wanted).max() <= step
    row = next(row for row in rq.ledger(module).rows if row.op == "nn.conv2d")
    assert not row.quantized
    assert "smaller than one step" in row.reason
    assert "give samples" in row.advice


#: bias of a QDQ model -> (its array, its scale, its zero point); all zero points are 0 but one
QDQ_BIASES = {
    "float": (np.linspace(-2, 2, 6, dtype="float32"), None, 0),
    "float and small": (np.linspace(-1e-3, 1e-3, 6, dtype="float32"), None, 0),
    "int8": (np.array([-100, 50, 3, 4, 5, 100], "int8"), np.float32(0.013), 3),
    "int32 in other units": (np.array([-(2**31), 2**31 - 1, 3, 4, 5, 6], "int32"), 0.5, 0),
    "int32 per channel": (
        np.array([-(2**31), 2**31 - 1, 3, 4, 5, 6], "int32"),
        np.linspace(0.1, 0.5, 6),
        0,
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", [None, 0.05, 5e-5, 1e5])
@pytest.mark.parametrize("is_per_channel", [True, False])
@pytest.mark.parametrize("kind", QDQ_BIASES)
def test_biases_of_other_tools__are_what_onnx_runtime_adds(kind, is_per_channel, step):
    """The first two channels have no weights, and scale 1."""
    bias, scale, zero_point = QDQ_BIASES[kind]
    rng = np.random.default_rng(1)
    weight = rng.integers(-100, 100, (6, 4, 3, 3)).astype("int8")
    weight[:2] = 0
    scales = np.array([1, 1, 0.01, 0.01, 0.02, 0.01] if is_per_channel else 0.01, "float32")
    constants = {
        "xs": np.float32(0.02),
        "xz": np.uint8(120),
        "w_int": weight,
        "ws": scales,
        "wz": np.zeros(scales.shape, "int8"),
        "b" if scale is None else "b_int": bias,
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w_int", "ws", "wz"], ["w"], axis=0),
    ]
    if scale is not None:
        scale = np.asarray(scale, "float32")
        constants |= {"bs": scale, "bz": np.full(scale.shape, zero_point, bias.dtype)}
        nodes.append(helper.make_node("DequantizeLinear", ["b_int", "bs", "bz"], ["b"], axis=0))
    nodes.append(helper.make_node("Conv", ["xd", "w", "b"], ["y" if step is None else "c"]))
    if step is not None:
        constants |= {"ys": np.float32(step), "yz": np.uint8(128)}
        nodes.append(helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["yq"]))
        nodes.append(helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]))
    model = make_file(nodes, (1, 4, 6, 6), constants)
    x = rng.standard_normal((1, 4, 6, 6)).astype("float32")
    wanted = run_onnxruntime(model, {"x": x}, rewrites=False)[0]
    mod, _ = rq.load(model)
    found = rq.reference.run(rq.lower(mod), {"x": x})[0]
    bound = 2.0**-8 * np.abs(wanted).max() if step is None else step
    assert np.abs(found - wanted).max() <= bound * 1.001


def test_refine_units__sums_that_data_moves_keep_coarse_ones():
    """A channel of large weights: rounding its bias costs less than a step of the data does."""
    units = QParams(np.float32([0.5, 0.01]), np.zeros(2, "int32"), "int32", 1)
    bias = np.float32([0.2, 0.2])
    moved = np.array([False, False])
    assert refine_units(units, bias, 0.02, moved) == units
    assert refine_units(units, bias, 0.02, np.array([False, True])) == units
    assert refine_units(units, bias, 0.02, np.array([True, False])) != units
    assert refine_units(units, bias, None, True) == units
