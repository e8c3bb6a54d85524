"""Constants that meet integers whose parameters were not chosen for them, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq

SHAPE = (1, 3, 8, 8)
SOME = np.arange(192).reshape(SHAPE) % 3 == 0
AROUND = np.array([0, 0, 1, 1, 0, 0, 1, 1])
#: operator -> (name in ONNX, its inputs, attributes of a constant v, other constants of v)
OPERATORS = {
    "pad": ("Pad", ["d", "pads", "v"], {}, lambda v: {"pads": AROUND}),
    "where": ("Where", ["some", "d", "v"], {}, lambda v: {"some": SOME}),
    "where not": ("Where", ["some", "v", "d"], {}, lambda v: {"some": SOME}),
    "clip from below": ("Clip", ["d", "v"], {}, lambda v: {}),
    "clip from above": ("Clip", ["d", "", "v"], {}, lambda v: {}),
    "clip": ("Clip", ["d", "v", "u"], {}, lambda v: {"u": np.float32(v + 0.3)}),
    "concat": ("Concat", ["d", "c"], {"axis": 1}, lambda v: {"c": np.full((1, 2, 8, 8), v, "f")}),
    "max": ("Max", ["d", "v"], {}, lambda v: {}),
    "min": ("Min", ["d", "v"], {}, lambda v: {}),
    "prelu": ("PRelu", ["d", "c"], {}, lambda v: {"c": np.full((3, 1, 1), v / 10, "f")}),
    "slopes": (
        "PRelu", ["d", "c"], {},
        lambda v: {"c": np.linspace(0, v / 10, 3, dtype="f").reshape(3, 1, 1)},
    ),
    "add": ("Add", ["d", "v"], {}, lambda v: {}),
    "multiply": ("Mul", ["d", "v"], {}, lambda v: {}),
    "subtract": ("Sub", ["v", "d"], {}, lambda v: {}),
    "scatter elements": (
        "ScatterElements", ["d", "i", "c"], {"axis": 1},
        lambda v: {"i": np.zeros((1, 1, 8, 8), "int64"), "c": np.full((1, 1, 8, 8), v, "f")},
    ),
    "scatter": (
        "ScatterND", ["d", "i", "c"], {},
        lambda v: {"i": np.array([[0, 1]]), "c": np.full((1, 8, 8), v, "f")},
    ),
}  # fmt: skip
VALUES = [0.5, 5.0, -20.0, 1.234, 100.0, 0.0, np.inf, -np.inf]
#: (scale, zero point) of the operand and of the result
GRIDS = {
    "wider result": ((0.02, np.uint8(128)), (0.1, np.uint8(100))),
    "positive operand": ((0.02, np.uint8(0)), (0.1, np.uint8(100))),
    "negative operand": ((0.02, np.uint8(255)), (0.1, np.uint8(100))),
    "equal": ((0.02, np.uint8(128)), (0.02, np.uint8(128))),
    "int8": ((0.02, np.int8(3)), (0.15, np.int8(-5))),
}
#: slopes below 1 put values half way between two integers, where float32 arithmetic decides
TIES = {"prelu", "slopes"}


def make_file(nodes, constants) -> onnx.ModelProto:
    used = {name for node in nodes for name in node.input}
    kept = {name: array for name, array in constants.items() if name in used}
    model = make_onnx(nodes, {"x": SHAPE}, {"y": None}, kept)
    return onnx.shape_inference.infer_shapes(model)


def make_operator(name: str, value: float):
    """(node from "d" to "t", its constants)."""
    op, inputs, attrs, constants = OPERATORS[name]
    return helper.make_node(op, inputs, ["t"], **attrs), {
        "v": np.float32(value),
        **constants(value),
    }


def check_quantized_file(name: str, value: float, grid: str, *, is_followed: bool) -> None:
    """The operator between a dequantize and a quantize, or a convolution."""
    node, constants = make_operator(name, value)
    (data_scale, data_zero), (scale, zero) = GRIDS[grid]
    weight = np.random.default_rng(3).standard_normal((4, 3, 3, 3)).astype("float32")
    constants |= {
        "ds": np.float32(data_scale), "dz": data_zero, "ys": np.float32(scale), "yz": zero,
        "w": weight[:, :, :1, :1],
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "ds", "dz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "ds", "dz"], ["d"]),
        node,
        helper.make_node("QuantizeLinear", ["conv" if is_followed else "t", "ys", "yz"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "ys", "yz"], ["y"]),
    ]
    if is_followed:
        nodes.insert(3, helper.make_node("Conv", ["t", "w"], ["conv"]))
    model = make_file(nodes, constants)
    x = (np.random.default_rng(0).standard_normal(SHAPE) * 1.5).astype("float32")
    wanted = run_onnxruntime(model, {"x": x}, rewrites=False)[0]
    mod, _ = rq.load(model)
    found = rq.reference.run(rq.lower(mod), {"x": x})[0]
    off = np.abs(found - wanted) / scale
    assert off.max() <= 1.01
    assert name in TIES or is_followed or (off > 0.5).mean() < 0.005


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPERATORS)
def test_quantized_file__is_what_onnx_runtime_computes(name):
    for value, grid in ((5.0, "wider result"), (1.234, "negative operand")):
        check_quantized_file(name, value, grid, is_followed=False)
    if name not in ("concat",):
        check_quantized_file(name, 1.234, "negative operand", is_followed=True)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", OPERATORS)
def test_quantized_file__in_every_range(name, value, grid):
    finite = {"concat", "prelu", "slopes", "add", "multiply", "subtract", "clip"}
    if not np.isfinite(value) and name in finite:
        return
    check_quantized_file(name, value, grid, is_followed=False)


@pytest.mark.sample(9)
@pytest.mark.parametrize("value", [1.234, 100.0])
@pytest.mark.parametrize("name", OPERATORS)
def test_calibrated_model__has_the_constants_in_its_ranges(name, value):
    """conv -> operator: within a few steps of the range of the result."""
    node, constants = make_operator(name, value)
    constants["w"] = np.eye(3, dtype="float32").reshape(3, 3, 1, 1) * np.float32(1.1)
    tail = helper.make_node("Concat", ["t", "t"], ["y"], axis=0)
    model = make_file([helper.make_node("Conv", ["x", "w"], ["d"]), node, tail], constants)
    x = np.random.default_rng(0).standard_normal(SHAPE).astype("float32")
    wanted = run_onnxruntime(model, {"x": x}, rewrites=False)[0]
    mod, params = rq.load(model)
    prepared = rq.calibrate(rq.prepare(mod, params), [{"x": x}], observer=rq.observers.MinMax())
    reference = rq.convert_to_reference(prepared)
    extent = max(wanted.max(), 0) - min(wanted.min(), 0)
    for module in (reference, rq.lower(reference, prepared.backend)):
        found = rq.reference.run(module, {"x": x})[0]
        assert np.abs(found - wanted).max() <= 0.012 * extent
