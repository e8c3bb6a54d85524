"""Float transposed convolutions of few outputs make blocks of pixels."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from tvm import relax

import relayquant as rq
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.rewrites.transposed_blocks import make_pixel_blocks
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.expressions import op_name

#: weights (C, O, KH, KW) and attributes
FEW = {
    "one output, no overlap": ((24, 1, 2, 2), {"strides": [2, 2]}),
    "kernel wider than the stride": ((8, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "kernel narrower than the stride": ((8, 2, 1, 2), {"strides": [2, 3]}),
    "sizes of its own": (
        (5, 7, 3, 2),
        {"strides": [2, 1], "pads": [1, 0, 0, 1], "output_padding": [1, 0]},
    ),
}
OTHERS = {
    "many outputs": ((8, 16, 2, 2), {"strides": [2, 2]}),
    "no stride": ((8, 2, 3, 3), {}),
    "groups": ((8, 1, 2, 2), {"strides": [2, 2], "group": 2}),
    "dilation": ((8, 2, 2, 2), {"strides": [2, 2], "dilations": [2, 2]}),
}


def make_model(shape, attrs, size=(6, 9)):
    weight = np.random.default_rng(0).standard_normal(shape).astype("float32")
    node = helper.make_node("ConvTranspose", ["r", "w"], ["y"], **attrs)
    relu = helper.make_node("Relu", ["x"], ["r"])
    shapes = {"x": ("n", shape[0], *size)}, {"y": (None,) * 4}
    return make_onnx([relu, node], *shapes, {"w": weight})


def list_names(model):
    mod, params = rq.load(model)
    bound = relax.transform.BindParams("main", params)(mod)
    return [op_name(call) for call in list_calls(make_pixel_blocks(convert_layout(bound)))]


@pytest.mark.parametrize("name", FEW)
def test_blocks__of_few_floats_are_those_of_the_evaluator(name):
    model = make_model(*FEW[name])
    assert "relax.nn.conv2d_transpose" not in list_names(model)
    x = np.random.default_rng(1).standard_normal((2, FEW[name][0][0], 6, 9)).astype("float32")
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    (found,) = rq.Executor(rq.compile(rq.load(model))).run("main", [x])
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_blocks__of_others_are_none(name):
    assert "relax.nn.conv2d_transpose" in list_names(make_model(*OTHERS[name]))
