"""Products with the grouped weights that rows choose, on every instruction set, against numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from emulated_unit import EMULATED, REFUSED, WITH_TILES, find_target
from machines import best_isa, compile_kernel, every_isa

from relayquant.base.packing import count_groups, pack_codes
from relayquant.codegen.kernels.emit import PARALLEL_THRESHOLD
from relayquant.codegen.kernels.grouped.experts import build_grouped_experts
from relayquant.codegen.kernels.grouped.plan import (
    GroupedDense,
    GroupedExperts,
    pack_experts,
    plan_grouped,
)
from relayquant.codegen.kernels.isa.x86 import AMX
from relayquant.ir.reference import qnn

#: (numbers of tokens, choices of each, experts, outputs, inputs, bits, group size, float rows,
#: dtype of zero points or offsets): one token, an expert with many rows and one with none, outputs
#: that overlap, a group that is short
CASES = [
    ((1, 2, 3, 30), 2, 5, 37, 84, 4, 32, False, ""),
    ((1, 7), 3, 4, 16, 64, 8, 32, False, "uint8"),
    ((1, 40), 2, 3, 20, 50, 4, 12, True, "float16"),
    ((1, 9), 8, 9, 32, 96, 2, 96, False, "float32"),
]
#: As CASES, with enough rows of an expert for tiles, and some too few.
TILED = ((1, 5, 60), 2, 3, 37, 200, 4, 40, False, "uint8")


def draw_weight(rng, spec):
    dense = spec.dense
    rows = spec.count * dense.units
    groups = (rows, count_groups(dense.features, dense.group_size))
    codes = rng.integers(0, 2**dense.bits, (rows, dense.features))
    zeros = np.array(2 ** (dense.value_bits - 1), "uint8")
    if dense.has_zeros:
        zeros = rng.integers(0, 2**dense.bits, groups).astype("uint8")
    elif dense.has_offsets:
        zeros = rng.normal(size=groups).astype(dense.zeros_dtype)
    return pack_codes(codes, dense.bits), rng.normal(size=groups).astype("float32"), zeros


def check_case(isa, case, *, is_shared, group_scales=False, rows=None, levels=()):
    """Any number of tokens; each chooses any experts, also several times the same."""
    tokens, slots, count, units, features, bits, size, is_float, zeros = case
    rng, own = np.random.default_rng(0), 1 if is_shared else slots
    dense = GroupedDense(
        (rows, own), units, features, bits, size, is_float, zeros, "float32", group_scales,
        levels=levels,
    )  # fmt: skip
    spec = GroupedExperts(dense, count, slots, "int32")
    weight = draw_weight(rng, spec)
    kernel = compile_kernel(build_grouped_experts(spec, isa), find_target(isa))
    constants = pack_experts(spec, isa, *weight).arrays
    for each in tokens if rows is None else (rows,):
        chosen = rng.integers(-count, count, (each, slots)).astype("int32")
        chosen[0] = 1
        shape = (each, own, features)
        if is_float:
            data = [rng.normal(size=shape).astype("float32")]
        else:
            scales = count_groups(features, size) if group_scales else 1
            scale = rng.uniform(0.1, 1, (each, own, scales)).astype("float32")
            data = [rng.integers(-127, 128, shape).astype("int8"), scale]
        y = tvm.runtime.tensor(np.full((each, slots, units), 77, "float32"))
        kernel(*map(tvm.runtime.tensor, [*data, chosen, *constants]), y)
        step = 1.0 if is_float else data[1]
        form = {"bits": bits, "group_size": size, "features": features, "levels": levels}
        form["experts"] = count
        expected = qnn.grouped_expert_dense(data[0], step, chosen, *weight, **form)
        if isa.has_fma and not is_float:
            np.testing.assert_array_equal(y.numpy(), expected)
        bound = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=bound)


@pytest.mark.sample(4)
@every_isa
def test_grouped_experts__as_numpy_on_every_instruction_set(isa):
    check_case(isa, CASES[0], is_shared=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_shared", [True, False], ids=["one row", "rows"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[5]}x{case[6]}{case[8]}")
def test_grouped_experts__as_numpy_in_every_form(case, is_shared):
    check_case(best_isa(), case, is_shared=is_shared)


@pytest.mark.parametrize("isa", [best_isa(), EMULATED], ids=["vectors", "emulated tiles"])
def test_grouped_experts__levels(isa):
    check_case(isa, TILED, is_shared=False, levels=(*range(0, 256, 17),))


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("is_shared", [True, False], ids=["one row", "rows"])
def test_grouped_experts__known_rows_with_a_scale_for_each_group(is_shared, rows):
    check_case(best_isa(), CASES[0], is_shared=is_shared, group_scales=True, rows=rows)


@pytest.mark.parametrize("is_shared", [True, False], ids=["one row", "rows"])
def test_grouped_experts__threads_share_panels(is_shared):
    """Weights so large that loops are parallel, of few rows and of many."""
    assert PARALLEL_THRESHOLD <= 1536 * 1024
    check_case(best_isa(), ((1, 5), 2, 3, 1536, 1024, 4, 32, False, ""), is_shared=is_shared)


@pytest.mark.slow
@pytest.mark.parametrize("group_scales", [False, True])
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
def test_grouped_experts__as_numpy_on_tiles(isa, group_scales):
    dense = GroupedDense((None, 2), 37, 200, 4, 40, False, "uint8")
    assert plan_grouped(dense, isa).unit is isa.unit
    check_case(isa, TILED, is_shared=False, group_scales=group_scales)


@pytest.mark.slow
@pytest.mark.optimized
def test_grouped_experts__asks_once_for_the_unit_and_keeps_tiles_in_registers():
    spec = GroupedExperts(GroupedDense((None, 1), 64, 512, 4, 128), 8, 2, "int32")
    module = tvm.IRModule({"grouped_experts": build_grouped_experts(spec, AMX)})
    text = tvm.compile(module, target=WITH_TILES).mod.inspect_source("asm")
    names = ("tdpbssd", "tileloadd", "tilestored", "ldtilecfg", "tilerelease")
    count = {name: len(re.findall(rf"\t{name}\b", text)) for name in names}
    assert count["tdpbssd"] == 2 * count["tilestored"] > 0
    assert 2 * count["tileloadd"] == 3 * count["tdpbssd"]
    assert count["ldtilecfg"] == count["tilerelease"] == 1
