"""Multiply-adds of operators, counted by hand."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.cost import count_macs

N = tirx.Var("n", "int64")


def tensor(*shape, dtype: str = "float32") -> relax.Var:
    return relax.Var("x", relax.TensorType(shape, dtype))


def integers(*shape) -> relax.Var:
    return tensor(*shape, dtype="int8")


S, Z = relax.const(0.5, "float32"), relax.const(0, "int32")
CALLS = {
    "conv2d": (relax.op.nn.conv2d(tensor(2, 3, 8, 8), tensor(5, 3, 3, 3)), 2 * 5 * 6 * 6 * 27),
    "depthwise": (
        relax.op.nn.conv2d(tensor(1, 6, 8, 8), tensor(6, 1, 3, 3), groups=6, padding=1),
        6 * 8 * 8 * 9,
    ),
    "NHWC": (
        relax.op.nn.conv2d(
            tensor(1, 8, 8, 3), tensor(5, 1, 1, 3), data_layout="NHWC", kernel_layout="OHWI"
        ),
        5 * 64 * 3,
    ),
    "symbolic batch": (relax.op.nn.conv2d(tensor(N, 3, 8, 8), tensor(5, 3, 1, 1)), 5 * 64 * 3),
    "conv1d": (relax.op.nn.conv1d(tensor(1, 3, 8), tensor(5, 3, 3)), 5 * 6 * 9),
    "transposed": (
        relax.op.nn.conv2d_transpose(tensor(1, 3, 4, 4), tensor(3, 5, 2, 2), strides=2),
        3 * 16 * 5 * 4,
    ),
    "matmul": (relax.op.matmul(tensor(2, 7, 4), tensor(4, 9)), 2 * 7 * 9 * 4),
    "qnn conv2d": (
        qnn.conv2d(integers(1, 3, 8, 8), integers(5, 3, 1, 1), Z, Z, S, S),
        5 * 64 * 3,
    ),
    "qnn dense": (qnn.dense(integers(6, 4), integers(9, 4), Z, Z, S, S), 6 * 9 * 4),
    "qnn batch_matmul": (
        qnn.batch_matmul(integers(2, 7, 4), integers(2, 9, 4), Z, Z, S, S),
        2 * 7 * 9 * 4,
    ),
    "whole transform": (qnn.dft(tensor(N, 3, 60, 1), 64, onesided=True), 3 * 60 * 33 * 2),
    # 256 = 16 * 16: products of 16 with 16 complex numbers, and of 16 complex ones with 9
    "transform in steps": (
        qnn.dft(tensor(2, 256, 1), 256, onesided=True),
        2 * (16 * 16 * 32 + 16 * 32 * 18),
    ),
    "relu": (relax.op.nn.relu(tensor(2, 3)), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_count_macs__equals_count_by_hand(name: str) -> None:
    call, expected = CALLS[name]
    builder = relax.BlockBuilder()
    params = list(relax.analysis.free_vars(call))
    with builder.function("main", params):
        value = builder.normalize(call)
        builder.emit_func_output(builder.emit(value))
    assert count_macs(value) == expected


def test_count_macs__of_no_call() -> None:
    assert count_macs(tensor(2, 3)) == 0
