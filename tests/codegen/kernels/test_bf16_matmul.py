"""Products of two computed matrices with operands of bfloat16, against float64 sums."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machines import compile_kernel
from test_bf16 import TOLERANCE, every_isa, find_target, widen

from relayquant.codegen.kernels.floating.bf16_matmul import (
    Bf16Matmul,
    make_bf16_matmul,
    read_bf16_matmul,
)
from relayquant.codegen.kernels.floating.gemm import FloatMatmul
from relayquant.codegen.kernels.isa.bf16 import VECTORS_BF16

CASES = {
    "scores": Bf16Matmul((2, 3), 99, 64, 99),
    "odd sizes": Bf16Matmul((2,), 9, 33, 17),
    "one pair of a batch of the run time": Bf16Matmul((1, 2), 16, 5, 40, is_batched=True),
    "long sums": Bf16Matmul((1,), 31, 300, 64),
    "heads": Bf16Matmul((2, 3), 20, 64, 40, x_axes=(0, 2, 1, 3), w_axes=(0, 2, 1, 3)),
    "transposed heads": Bf16Matmul((1, 3), 20, 96, 40, w_axes=(0, 2, 3, 1), is_batched=True),
}


def store(operand: np.ndarray, axes) -> np.ndarray:
    """The tensor of which an operand is `permute_dims`."""
    return operand if axes is None else np.ascontiguousarray(operand.transpose(np.argsort(axes)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
@every_isa
def test_make_bf16_matmul__near_float64(isa, case):
    spec, rng = CASES[case], np.random.default_rng(0)
    batch = (3, *spec.batch[1:]) if spec.is_batched else spec.batch
    x, w = (
        rng.standard_normal((*batch, *sizes), "float32")
        for sizes in ((spec.rows, spec.inner), (spec.inner, spec.outputs))
    )
    if spec.w.strides[-1] != 1 and isa.lanes < 16:
        pytest.skip("only tiles of 16 columns are read transposed")
    kernel = compile_kernel(make_bf16_matmul(spec, isa), find_target(isa))
    y = tvm.runtime.tensor(np.full((*batch, spec.rows, spec.outputs), np.nan, "float32"))
    stored = (store(x, spec.x_axes), store(w, spec.w_axes))
    kernel(*[tvm.runtime.tensor(each) for each in stored], y)
    magnitude = np.abs(widen(x)) @ np.abs(widen(w))
    assert (np.abs(y.numpy() - widen(x) @ widen(w)) <= TOLERANCE * magnitude).all()


@pytest.mark.parametrize(
    "spec",
    [
        FloatMatmul((2, tvm.tirx.Var("n", "int64")), 16, 16, 16),
        FloatMatmul((2,), tvm.tirx.Var("n", "int64"), 16, 16),
        FloatMatmul((2,), 16, 16, 16, shared=True),
        FloatMatmul((2,), 7, 16, 16),
        FloatMatmul((2,), 16, 16, 15),
    ],
    ids=["symbolic", "symbolic rows", "shared", "few rows", "few outputs"],
)
def test_read_bf16_matmul__stays_in_float32(spec):
    assert read_bf16_matmul(spec, VECTORS_BF16) is None
