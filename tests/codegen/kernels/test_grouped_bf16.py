"""Products of float rows with grouped weights in bfloat16, on tiles and vectors, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from machines import compile_kernel, target_of
from memory_tiles import Refusal

from relayquant.base.packing import count_groups, pack_codes
from relayquant.codegen.kernels.grouped.bf16 import (
    CHUNK_ROWS,
    GroupedBf16,
    make_grouped_bf16,
)
from relayquant.codegen.kernels.grouped.plan import GroupedDense, pack_grouped
from relayquant.codegen.kernels.isa.bf16 import TILES_BF16
from relayquant.codegen.kernels.isa.matrix_unit import MatrixUnit
from relayquant.codegen.kernels.isa.select import has_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.kernels.isa.x86 import AMX
from relayquant.ir.reference import qnn

LEVELS = (128, 255, 0, 7, 9, 130, 127, 80, 80, 200, 241, 1, 64, 65, 254, 32)
#: (rows, units, inputs, bits, group size, dtype of zero points or offsets, of scales, residual,
#: gate[, levels]): a group that is short, outputs that overlap, groups of no whole step, fewer
#: outputs than two panels, several blocks of columns and chunks of rows
CASES = [
    ((1, 40), 96, 64, 4, 32, "", "float32", False, False),
    ((33,), 64, 84, 4, 32, "float16", "float16", False, True),
    ((17,), 37, 150, 8, 32, "uint8", "float32", True, False),
    ((5,), 5, 200, 8, 72, "", "float32", True, False),
    ((3,), 70, 1100, 4, 128, "uint8", "float16", False, False),
    ((CHUNK_ROWS + 88,), 37, 2600, 2, 16, "float32", "float32", True, False),
    ((1, 40), 96, 64, 4, 32, "", "float32", False, False, LEVELS),
    ((33,), 64, 84, 4, 32, "float16", "float16", False, True, LEVELS),
    ((17,), 37, 150, 4, 32, "uint8", "float32", True, False, LEVELS),
]


REFUSED = replace(TILES_BF16, unit=MatrixUnit(Refusal("refuse", "")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("isa", [TILES_BF16, REFUSED], ids=["tiles", "vectors"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[3]}x{case[4]}{case[5]}")
def test_grouped_bf16__as_numpy(isa, case):
    """Two roundings to 8 bits change a product by at most 2^-8 of itself."""
    (
        counts,
        units,
        features,
        bits,
        size,
        zeros_dtype,
        scale_dtype,
        has_residual,
        is_gated,
        *levels,
    ) = case
    if not (has_isa(isa, resolve_target(None)) and has_isa(AMX, resolve_target(None))):
        pytest.skip("this machine has no products of bfloat16")
    rng, groups = np.random.default_rng(0), (units, count_groups(features, size))
    form = units, features, bits, size, False, zeros_dtype, scale_dtype
    dense = GroupedDense((1, None), *form, is_gated=is_gated, levels=(*levels, ())[0])
    spec = GroupedBf16(dense, has_residual)
    codes = rng.integers(0, 2**bits, (units, features))
    zeros = np.array(2 ** (dense.value_bits - 1), "uint8")
    if dense.has_zeros:
        zeros = rng.integers(0, 2**dense.value_bits, groups).astype("uint8")
    elif dense.has_offsets:
        zeros = rng.normal(size=groups).astype(zeros_dtype)
    weight = pack_codes(codes, bits), rng.normal(size=groups).astype(scale_dtype), zeros
    kernel = compile_kernel(make_grouped_bf16(spec, AMX, isa), target_of("sapphirerapids"))
    constants = pack_grouped(dense, AMX, *weight).arrays
    identity = np.eye(features, dtype="float32")
    form = {"bits": bits, "group_size": size, "features": features, "levels": dense.levels}
    values = qnn.grouped_dense(identity, 1.0, *weight, **form).astype("float64")
    for count in counts:
        x = rng.normal(size=(1, count, features)).astype("float32")
        residual = rng.normal(size=(1, count, dense.outputs)).astype("float32")
        expected, bound = x[0] @ values, 2.0**-8 * (np.abs(x[0]) @ np.abs(values))
        if is_gated:
            (a, b), (da, db) = np.split(expected, 2, 1), np.split(bound, 2, 1)
            gate = a / (1 + np.exp(-a))
            expected = gate * b  # the derivative of silu is at most 1.1
            bound = 1.1 * da * (np.abs(b) + db) + np.abs(gate) * db
        expected = expected + has_residual * residual[0]
        y = tvm.runtime.tensor(np.full(residual.shape, 77, "float32"))
        arrays = [x, *constants, *([residual] if has_residual else [])]
        kernel(*map(tvm.runtime.tensor, arrays), y)
        error = np.abs(y.numpy()[0] - expected)
        assert (error <= 1.02 * bound + 1e-5 * np.abs(expected).max()).all()
        assert np.square(error).sum() < 1e-5 * np.square(expected).sum()
