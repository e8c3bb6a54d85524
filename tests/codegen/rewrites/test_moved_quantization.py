"""Quantize and dequantize change places with what moves values: the same numbers, fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import build_model
from operator_names import list_operators
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.ir.dialect import qnn

SCALE, ZERO = relax.const(np.float32(0.37)), relax.const(np.int32(3))


def check(mod: tvm.IRModule, x: np.ndarray, wanted: list[str]) -> None:
    assert list_operators(convert_layout(mod)) == wanted
    assert rq.verify(mod, [x]).is_equal


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_quantize__comes_before_a_transpose_and_a_pad(dtype):
    def body(emit, x):
        x = emit("last", op.permute_dims(x, [0, 2, 3, 4, 1]))
        x = emit("padded", op.nn.pad(x, [0, 0, 1, 2, 0, 0, 0, 0, 0, 0], "constant", 1.7))
        return emit("codes", qnn.quantize(x, SCALE, ZERO, out_dtype=dtype))

    x = np.random.default_rng(0).normal(0, 9, (2, 5, 3, 4, 4)).astype("float32")
    check(build_model(body, x.shape), x, ["qnn.quantize", "nn.pad", "permute_dims"])


def test_quantize__of_several_scales_stays():
    scales = relax.const(np.linspace(0.1, 1, 5, dtype="float32"))

    def body(emit, x):
        moved = emit("moved", op.permute_dims(x, [0, 2, 1]))
        return emit("codes", qnn.quantize(moved, scales, ZERO, axis=2, out_dtype="uint8"))

    x = np.random.default_rng(0).normal(0, 9, (2, 5, 3)).astype("float32")
    check(build_model(body, x.shape), x, ["permute_dims", "qnn.quantize"])


def test_dequantize__of_sums_comes_before_what_moves_them():
    scales = relax.const(np.linspace(0.1, 1, 5, dtype="float32"))

    def body(emit, x):
        moved = emit("volume", op.reshape(x, (2, 3, 4, 5)))
        moved = emit("first", op.permute_dims(moved, [0, 3, 1, 2]))
        zero = relax.const(np.int32(0))
        return emit("real", qnn.dequantize(moved, scales, zero, axis=1))

    x = np.random.default_rng(0).integers(-(2**20), 2**20, (6, 4, 5)).astype("int32")
    mod = build_model(body, x.shape, dtype="int32")
    check(mod, x, ["qnn.dequantize", "reshape", "permute_dims"])


def test_dequantize__of_bytes_stays_behind_what_moves_them():
    def body(emit, x):
        moved = emit("first", op.permute_dims(x, [1, 0]))
        return emit("real", qnn.dequantize(moved, SCALE, ZERO))

    x = np.arange(-60, 60).reshape(10, 12).astype("int8")
    check(build_model(body, x.shape, dtype="int8"), x, ["permute_dims", "qnn.dequantize"])


def test_volumes__are_moved_as_bytes_and_dequantized_by_the_kernel():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv3d(6, 6, 3, padding=1, groups=6), torch.nn.ReLU())
    x = torch.randn(1, 6, 4, 6, 7)
    mod, params = rq.load(torch.export.export(module.eval(), (x,)))
    data = [{mod["main"].params[0].name: x.numpy()}]
    qmod = rq.quantize(mod, params, data, effort="fast", guard=rq.config.Guard.OFF)
    operators = list_operators(convert_layout(qmod))
    moved = [i for i, name in enumerate(operators) if name == "permute_dims"]
    assert operators.index("qnn.quantize") < moved[0]
    assert operators.index("qnn.dequantize") < moved[-1]
    assert rq.verify(qmod, [x.numpy()]).is_equal
