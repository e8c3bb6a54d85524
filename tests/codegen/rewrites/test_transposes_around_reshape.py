"""Depthwise convolutions between dense layers: rows become images without a transpose."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from float_models import build_model
from operator_names import list_operators
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.rewrites.layout import TRANSPOSE_RULES, convert_layout
from relayquant.ir.rewrite import apply_rules


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 12, 8), "float32")) -> R.Tensor((2, 3, 4, 8), "float32"):
        with R.dataflow():
            turned = R.permute_dims(x, axes=[0, 2, 1])
            images = R.reshape(turned, R.shape([2, 8, 3, 4]))
            nhwc = R.permute_dims(images, axes=[0, 2, 3, 1])
            R.output(nhwc)
        return nhwc


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 12, 8), "float32")) -> R.Tensor((2, 3, 4, 8), "float32"):
        with R.dataflow():
            nhwc: R.Tensor((2, 3, 4, 8), "float32") = R.reshape(x, R.shape([2, 3, 4, 8]))
            R.output(nhwc)
        return nhwc


@I.ir_module
class Turned:
    @R.function
    def main(x: R.Tensor((2, 12, 8), "float32")) -> R.Tensor((2, 4, 3, 8), "float32"):
        with R.dataflow():
            turned = R.permute_dims(x, axes=[0, 2, 1])
            images = R.reshape(turned, R.shape([2, 8, 3, 4]))
            other = R.permute_dims(images, axes=[0, 3, 2, 1])
            R.output(other)
        return other


def test_transposes_around_reshape__rows_of_a_map() -> None:
    tvm.ir.assert_structural_equal(apply_rules(Before, TRANSPOSE_RULES), Expected)


def test_transposes_around_reshape__width_before_height_stays() -> None:
    with hear_declined() as declined:
        tvm.ir.assert_structural_equal(apply_rules(Turned, TRANSPOSE_RULES), Turned)
    assert ("transposes around reshape", "other", "elements change places") in declined


def mix_tokens(emit, x):
    """A dense layer, a depthwise convolution of its rows as 6 x 4 images, and a dense layer."""
    count, tokens = x.ty.shape.values[0], 24
    rows = emit("widen", op.matmul(x, emit.constant(4, 8)))
    turned = emit("turned", op.permute_dims(rows, [0, 2, 1]))
    images = emit("images", op.reshape(turned, (count, 8, 6, 4)))
    filtered = op.nn.conv2d(images, emit.constant(8, 1, 3, 3), padding=1, groups=8)
    flat = emit("flat", op.reshape(emit("filtered", filtered), (count, 8, tokens)))
    again = emit("again", op.nn.gelu(emit("rows", op.permute_dims(flat, [0, 2, 1]))))
    return emit("narrow", op.matmul(again, emit.constant(8, 4)))


@pytest.mark.parametrize("batch", [2, "n"])
def test_convert_layout__no_transpose_between_dense_layers(batch) -> None:
    mod = build_model(mix_tokens, (batch, 24, 4))
    assert "permute_dims" in list_operators(mod)
    assert "permute_dims" not in list_operators(convert_layout(mod))
    data = {"x": np.random.default_rng(0).standard_normal((2, 24, 4)).astype("float32")}
    (found,) = Executor(rq.compile(mod)).run("main", [*data.values()])
    (expected,) = rq.reference.run(mod, data)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    qmod = rq.quantize(mod, None, [data], effort="fast", guard=rq.config.Guard.OFF)
    assert rq.verify(qmod, data).is_equal
