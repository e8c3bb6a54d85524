"""Grouped products, gathers and rows of integers on every instruction set, against numpy."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tvm
from emulated_unit import EMULATED, REFUSED, WITH_TILES, find_target
from exact import call_kernel
from machines import (
    ISAS,
    REPRESENTATIVE,
    best_isa,
    compile_kernel,
    every_isa,
    runnable_target,
    target_of,
)
from tvm import tirx
from tvm.target import Target

from relayquant.base.packing import count_groups, pack_codes
from relayquant.codegen.kernels.grouped.dot import choose_dot
from relayquant.codegen.kernels.grouped.plan import (
    STREAM_LANES,
    GroupedDense,
    pack_grouped,
    plan_grouped,
)
from relayquant.codegen.kernels.grouped.product import (
    GroupedTake,
    build_grouped_dense,
    build_grouped_take,
)
from relayquant.codegen.kernels.integer.row_quantize import RowQuantize, build_quantize_rows
from relayquant.codegen.kernels.isa.arm import NEON, SDOT, SMMLA
from relayquant.codegen.kernels.isa.timing import COMMON, ZEN5
from relayquant.codegen.kernels.isa.x86 import AMX, VNNI512
from relayquant.ir.reference import qnn

#: (rows, outputs, inputs, bits, group size, float rows, dtype of zero points or offsets, of
#: scales): a group that is short, fewer outputs than lanes, outputs that overlap, groups of no
#: whole vector, many rows
CASES = [
    ((1, 3, 50, 150), 37, 84, 4, 32, False, "", "float32"),
    ((2,), 5, 60, 8, 20, False, "uint8", "float16"),
    ((2,), 20, 96, 2, 96, False, "uint8", "float32"),
    ((3,), 20, 50, 3, 16, True, "uint8", "float32"),
    ((1, 3, 13), 20, 50, 4, 12, True, "", "float16"),
    ((1, 3, 13), 20, 50, 4, 12, True, "float16", "float16"),
    ((3,), 20, 50, 8, 32, True, "float32", "float32"),
    ((1, 14), 37, 84, 8, 32, False, "float16", "float16"),
]
#: As CASES, on every instruction set.
OFFSETS = ((1, 3, 50), 37, 84, 4, 32, False, "float32", "float32")
#: Values of codes of 4 bits, in no order, with the bounds.
LEVELS = (128, 255, 0, 7, 9, 130, 127, 80, 80, 200, 241, 1, 64, 65, 254, 32)
#: As CASES, with levels: one zero point, float rows, zero points of groups, offsets.
LEVEL_CASES = [
    ((1, 3, 50), 37, 84, 4, 32, False, "", "float16"),
    ((1, 5), 37, 84, 4, 16, True, "", "float32"),
    ((1, 5), 20, 60, 4, 20, False, "uint8", "float32"),
    ((1, 5), 20, 60, 4, 20, True, "float16", "float32"),
]


def draw_weight(rng, spec):
    groups = (spec.units, count_groups(spec.features, spec.group_size))
    codes = rng.integers(0, 2**spec.bits, (spec.units, spec.features))
    zeros = np.array(2 ** (spec.value_bits - 1), "uint8")
    if spec.has_zeros:
        zeros = rng.integers(0, 2**spec.value_bits, groups).astype("uint8")
    elif spec.has_offsets:
        zeros = rng.normal(size=groups).astype(spec.zeros_dtype)
    return pack_codes(codes, spec.bits), rng.normal(size=groups).astype(spec.scale_dtype), zeros


def make_spec(case, rows=None, group_scales=False, levels=()):
    _, units, features, bits, group_size, is_float, zeros, dtype = case
    form = units, features, bits, group_size, is_float, zeros, dtype
    return GroupedDense((rows,), *form, group_scales, levels=levels)


def list_constants(spec, isa, weight):
    return pack_grouped(spec, isa, *weight).arrays


def form_of(spec):
    form = {"bits": spec.bits, "group_size": spec.group_size, "features": spec.features}
    return form | {"levels": spec.levels}


def draw_rows(rng, rows, spec):
    if spec.is_float:
        return [rng.normal(size=(rows, spec.features)).astype("float32")]
    data = rng.integers(-127, 128, (rows, spec.features)).astype("int8")
    scales = count_groups(spec.features, spec.group_size) if spec.group_scales else 1
    return [data, rng.uniform(0.1, 1, (rows, scales)).astype("float32")]


@pytest.mark.sample(4)
@every_isa
def test_grouped_dense__as_numpy_on_every_instruction_set(isa):
    check_case(isa, CASES[0])


@pytest.mark.sample(2)
@every_isa
def test_grouped_dense__offsets_on_every_instruction_set(isa):
    check_case(isa, OFFSETS)


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: f"{case[3]}x{case[4]}{case[6]}")
def test_grouped_dense__as_numpy_in_every_form(case):
    check_case(best_isa(), case)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", LEVEL_CASES, ids=lambda case: f"{case[4]}{case[6]}{case[5]}")
@every_isa
def test_grouped_dense__levels_on_every_instruction_set(isa, case):
    check_case(isa, case, levels=LEVELS)


@pytest.mark.parametrize("bits", [8, 4])
def test_plan__levels_are_in_memory_where_nothing_looks_them_up(bits):
    isas = {8: ["sse2", "neon32"], 4: ["vnni512", "vnni256", "avx2", "sdot", "neon"]}[bits]
    found = [isa for isa in (*ISAS, SDOT, NEON) if isa.name in isas]
    assert found
    for isa, is_float in product(found, (False, True)):
        spec = make_spec((*LEVEL_CASES[0][:5], is_float, "", "float32"), levels=LEVELS)
        assert plan_grouped(spec, isa).bits == bits


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("machine", "isa", "lookup", "dot"),
    [("vnni512", VNNI512, "vpshufb", "vpdpbusd"), (None, SDOT, "tbl", "sdot")],
    ids=["x86", "arm"],
)
def test_grouped_dense__a_level_takes_one_lookup(machine, isa, lookup, dot):
    """For each dot product of one row."""
    attrs = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon", "+dotprod"]}
    target = target_of(REPRESENTATIVE[machine]) if machine else Target(attrs)
    counts = []
    for levels in ((), LEVELS):
        spec = GroupedDense((1,), 64, 64, 4, 32, levels=levels)
        module = tvm.IRModule({"dense": build_grouped_dense(spec, isa)})
        text = tvm.compile(module, target=target).mod.inspect_source("asm")
        counts.append([len(re.findall(rf"\t{name}\b", text)) for name in (lookup, dot)])
    assert counts[0][0] == 0
    assert counts[1][0] == counts[1][1] > 0


@pytest.mark.slow
@pytest.mark.sample(4)
@every_isa
def test_grouped_dense__rows_with_a_scale_for_each_group(isa):
    check_case(isa, OFFSETS, group_scales=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], OFFSETS], ids=["zero point", "offsets"])
def test_grouped_dense__all_numbers_of_rows_by_tiles_of_two_panels(case):
    """Tiles of four heights, and a single row by one panel."""
    check_case(VNNI512.with_timing(ZEN5), (range(1, 20), *case[1:]))


#: As CASES, with a gate: rows of many numbers, two groups, a short group, offsets.
GATED_CASES = [
    ((*range(1, 15), 150), 64, 84, 4, 32, False, "", "float32"),
    ((1, 2, 7), 32, 60, 8, 20, False, "float32", "float16"),
    ((1, 50), 96, 192, 2, 96, False, "uint8", "float32"),
]


@pytest.mark.parametrize("group_scales", [False, True])
@pytest.mark.parametrize("case", GATED_CASES, ids=lambda case: f"{case[3]}x{case[4]}{case[6]}")
def test_grouped_dense__gate(case, group_scales):
    """silu(first half of y) * second half, of the y that the product without a gate has."""
    isa, rng = VNNI512.with_timing(ZEN5), np.random.default_rng(0)
    for rows in (None, 1):
        spec = replace(make_spec(case, rows, group_scales), is_gated=True)
        assert plan_grouped(spec, isa).can_gate
        weight = draw_weight(rng, spec)
        kernel = compile_kernel(build_grouped_dense(spec, isa), find_target(isa))
        for count in case[0] if rows is None else (1,):
            codes, scale = draw_rows(rng, count, spec)
            scale /= qnn.grouped_dense(codes, scale, *weight, **form_of(spec)).std() / 8
            data = codes, scale
            product = qnn.grouped_dense(*data, *weight, **form_of(spec)).astype("float64")
            gate, up = np.split(product, 2, axis=1)
            expected = gate / (1 + np.exp(-gate)) * up
            y = tvm.runtime.tensor(np.full((count, spec.outputs), 77, "float32"))
            kernel(*map(tvm.runtime.tensor, [*data, *list_constants(spec, isa, weight)]), y)
            np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6, atol=1e-30)


def test_plan__gates_need_tiles_with_a_panel_of_each_half():
    isa = VNNI512.with_timing(ZEN5)
    form = 64, 4, 32
    assert plan_grouped(GroupedDense((None,), 64, *form), isa).can_gate
    assert not plan_grouped(GroupedDense((None,), 48, *form), isa).can_gate  # three panels
    assert not plan_grouped(GroupedDense((None,), 60, *form), isa).can_gate  # the last overlaps
    assert not plan_grouped(GroupedDense((None,), 64, *form), VNNI512.with_timing(COMMON)).can_gate
    assert not plan_grouped(GroupedDense((None,), 64, *form, is_float=True), isa).can_gate
    assert not plan_grouped(GroupedDense((None,), 64, *form), AMX.with_timing(ZEN5)).can_gate


def check_case(isa, case, group_scales=False, levels=()):
    """Integers and, where the target has fma, their float sums to the bit; any number of rows."""
    target, rng = find_target(isa), np.random.default_rng(0)
    spec = make_spec(case, group_scales=group_scales, levels=levels)
    weight = draw_weight(rng, spec)
    kernel = compile_kernel(build_grouped_dense(spec, isa), target)
    constants = list_constants(spec, isa, weight)
    for count in case[0]:
        data = draw_rows(rng, count, spec)
        y = tvm.runtime.tensor(np.full((count, spec.units), 77, "float32"))
        kernel(*map(tvm.runtime.tensor, [*data, *constants]), y)
        scale = 1.0 if spec.is_float else data[1]
        expected = qnn.grouped_dense(data[0], scale, *weight, **form_of(spec))
        if isa.has_fma and not spec.is_float:
            np.testing.assert_array_equal(y.numpy(), expected)
        bound = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=bound)


#: As CASES, for tiles: tiles that are not full, several chunks of rows, groups of no whole tile,
#: several blocks of groups, codes of every width.
TILED_CASES = [
    ((16, 17, 150), 37, 84, 4, 32, False, "", "float32"),
    ((40,), 70, 1100, 4, 128, False, "uint8", "float16"),
    ((33,), 5, 200, 8, 72, False, "", "float32"),
    ((20,), 20, 96, 2, 96, False, "uint8", "float32"),
    ((20,), 48, 50, 3, 36, False, "", "float32"),
    ((16, 150), 37, 1100, 4, 32, False, "float16", "float16"),
    ((33,), 20, 200, 8, 72, False, "float32", "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize("case", TILED_CASES, ids=lambda case: f"{case[3]}x{case[4]}{case[6]}")
def test_grouped_dense__as_numpy_on_tiles(isa, case):
    assert plan_grouped(make_spec(case), isa).unit is isa.unit
    check_case(isa, case)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize("case", [TILED_CASES[0], TILED_CASES[-2]], ids=["zero point", "offsets"])
def test_grouped_dense__levels_on_tiles(isa, case):
    assert plan_grouped(make_spec(case, levels=LEVELS), isa).unit is isa.unit
    check_case(isa, case, levels=LEVELS)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("isa", [AMX, EMULATED], ids=["unit", "emulated"])
@pytest.mark.parametrize("case", TILED_CASES[-3:], ids=lambda case: f"{case[3]}x{case[4]}")
def test_grouped_dense__scales_of_groups_on_tiles(isa, case):
    check_case(isa, case, group_scales=True)


@pytest.mark.parametrize("isa", [AMX, EMULATED], ids=["unit", "emulated"])
def test_grouped_dense__largest_sums_on_tiles(isa):
    """Codes of 8 bits reach the bounds of int8, and sums those of a group."""
    rows, features, units = 16, 200, 16
    spec = GroupedDense((rows,), units, features, 8, features)
    codes = np.zeros((units, features), int)
    codes[1::2] = 255
    weight = pack_codes(codes, 8), np.ones((units, 1), "float32"), np.array(128, "uint8")
    data = np.full((rows, features), -128, "int8")
    data[1::2] = 127
    arrays = [data, np.ones((rows, 1), "float32"), *list_constants(spec, isa, weight)]
    func = build_grouped_dense(spec, isa)
    found = call_kernel(func, find_target(isa), arrays, (rows, units), "float32")
    np.testing.assert_array_equal(found, data.astype("int64") @ (codes - 128).T)


def test_plan__float_rows_wide_differences_and_small_groups_stay_on_vectors():
    """A code of 8 bits minus a zero point does not fit a byte; small groups are slower on tiles."""
    for is_float, bits, size, zeros in ((True, 4, 32, ""), (False, 8, 32, "uint8"), (0, 4, 16, "")):
        spec = GroupedDense((None,), 64, 256, bits, size, bool(is_float), zeros)
        assert plan_grouped(spec, AMX).unit is None


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("group_size", [pytest.param(32, marks=pytest.mark.slow), 128])
def test_grouped_dense__tile_instructions_of_a_group(group_size):
    """Three loads for two products, and one store for the sums of a group: nothing spills."""
    spec = GroupedDense((128,), 64, 512, 4, group_size)
    module = tvm.IRModule({"grouped_dense": build_grouped_dense(spec, AMX)})
    text = tvm.compile(module, target=WITH_TILES).mod.inspect_source("asm")
    names = ("tdpbssd", "tileloadd", "tilestored", "tilezero", "ldtilecfg", "tilerelease")
    count = {name: len(re.findall(rf"\t{name}\b", text)) for name in names}
    products = -(-group_size // 64)
    assert count["tilestored"] == count["tilezero"] > 0
    assert count["tdpbssd"] == products * count["tilestored"]
    assert 2 * count["tileloadd"] == 3 * count["tdpbssd"]
    assert count["ldtilecfg"] == count["tilerelease"] == 1


@pytest.mark.sample(15)
@pytest.mark.parametrize("bits", [2, 4])
@every_isa
def test_grouped_dense__largest_sums(isa, bits):
    """Every sum of int16 that an instruction set keeps is as large as it can be, of either sign;
    groups are several blocks of words and a rest.
    """
    rows, features, units = 2, 436, 16
    spec = GroupedDense((rows,), units, features, bits, features)
    codes = np.full((units, features), 2**bits - 1)
    codes[1::2, ::2] = 0
    scale = np.ones((units, 1), "float32")
    weight = pack_codes(codes, bits), scale, np.array(2 ** (bits - 1), "uint8")
    data = np.repeat(np.array([[-128], [127]], "int8"), features, axis=1)
    arrays = [data, np.ones((rows, 1), "float32"), *list_constants(spec, isa, weight)]
    func = build_grouped_dense(spec, isa)
    found = call_kernel(func, runnable_target(isa), arrays, (rows, units), "float32")
    expected = data.astype("int64") @ (codes.astype("int64") - 2 ** (bits - 1)).T
    np.testing.assert_array_equal(found, expected)


def test_plan__rows_of_a_tile_meet_in_no_set_of_a_cache():
    for features in (64, 100, 2048, 4096, 11008):
        plan = plan_grouped(GroupedDense((None,), 64, features, 4, 32), best_isa())
        size = plan.row_stride * np.dtype(plan.dot.row_dtype).itemsize
        sets = {row * size // 64 % 64 for row in range(plan.dot.rows)}
        assert len(sets) == plan.dot.rows
        assert size % 64 == 0
        assert plan.row_stride >= features
        assert plan.chunk_rows % plan.dot.rows == 0


def test_plan__rows_of_a_prompt_are_one_chunk():
    """Of 128 rows of 4096 every code comes from memory once."""
    assert plan_grouped(GroupedDense((None,), 64, 4096, 4, 32), VNNI512).chunk_rows >= 128


def test_grouped_dense__a_code_of_float_rows_takes_a_shift_and_a_lookup():
    """And no mask, no subtraction, no conversion."""
    func = build_grouped_dense(GroupedDense((1,), 64, 64, 4, 32, is_float=True), VNNI512)
    target = target_of(REPRESENTATIVE["vnni512"])
    text = tvm.compile(tvm.IRModule({"dense": func}), target=target).mod.inspect_source("asm")
    lookups = len(re.findall(r"\tvperm(?:ps|d)\b[^\n]*%zmm", text))
    shifts = len(re.findall(r"\tvps(?:ra|rl)d\b[^\n]*%zmm", text))
    assert lookups == 4 * 32  # panels, codes
    assert shifts <= lookups
    assert len(re.findall(r"\tvcvtdq2ps\b[^\n]*%zmm", text)) == 0
    assert len(re.findall(r"\tvpsub[bd]\b[^\n]*%zmm", text)) == 0


@pytest.mark.parametrize("isa", [*ISAS, SDOT, SMMLA, NEON], ids=lambda isa: isa.name)
@pytest.mark.parametrize(("is_float", "bits"), [(False, 4), (False, 8), (True, 4)])
def test_read_words__loads_vectors(isa, is_float, bits):
    """TVM takes a hundred times as long over the index of a single element of a workspace as over
    that of a vector: 10 seconds for a kernel.
    """
    dot, loads = choose_dot(isa, is_float, bits), []

    class Rows:
        dtype, buffer = dot.row_dtype, tirx.decl_buffer((64,), dot.row_dtype)

        def vload(self, begin, dtype=None):
            loads.append(self.buffer.vload(begin, dtype))
            return loads[-1]

    words = dot.read_words(Rows(), tirx.Var("offset", "int64"), 4)
    assert len(words) == 4
    assert {type(load.indices[0]) for load in loads} == {tirx.Ramp}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_grouped_dense__static_rows_agree_with_symbolic_ones(count):
    isa, rng, case = best_isa(), np.random.default_rng(0), CASES[0]
    target, results = runnable_target(isa), []
    weight, data = None, None
    for rows in (count, None):
        spec = make_spec(case, rows)
        weight = weight or draw_weight(rng, spec)
        data = data or draw_rows(rng, count, spec)
        func, constants = build_grouped_dense(spec, isa), list_constants(spec, isa, weight)
        shape = count, spec.units
        results.append(call_kernel(func, target, [*data, *constants], shape, "float32"))
    np.testing.assert_array_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize("panels", [1, 4, 5, 11])
@pytest.mark.parametrize("is_float", [False, True])
def test_grouped_dense__one_row_meets_every_panel(panels, is_float):
    """Panels are taken several at once, the last of them once more where they do not come out."""
    isa = best_isa().with_timing(COMMON)
    units = panels * choose_dot(isa, is_float, 4).lanes - 1
    check_case(isa, ((1,), units, 64, 4, 32, is_float, "", "float32"))


@pytest.mark.parametrize("case", [(32, False, 1), (512, False, 4), (32, True, 4)])
def test_grouped_dense__one_row_on_one_stream(case):
    """Short groups of integers, on a core that reads one stream; others have several."""
    group_size, is_float, streams = case
    isa = best_isa().with_timing(ZEN5)
    form = ((1, 2), 81, 512, 4, group_size, is_float, "", "float32")
    check_case(isa, form)
    expected = streams if choose_dot(isa, is_float, 4).lanes >= STREAM_LANES else 1
    assert plan_grouped(make_spec(form), isa).streams.count == expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_grouped_take__reads_what_products_read(bits):
    zeros = {2: "uint8", 3: "float32", 4: "", 8: "float16"}[bits]
    check_take(best_isa(), bits, zeros)


@pytest.mark.sample(4)
@pytest.mark.parametrize("zeros", ["", "uint8", "float16"])
@every_isa
def test_grouped_take__levels_on_every_instruction_set(isa, zeros):
    check_take(isa, 4, zeros, LEVELS)


def check_take(isa, bits, zeros, levels=()):
    rng = np.random.default_rng(bits)
    spec = GroupedDense((), 37, 84, bits, 32, False, zeros, "float32", levels=levels)
    weight, indices = draw_weight(rng, spec), np.array([[36, -1], [17, 37 + 33]], "int32")
    func = build_grouped_take(GroupedTake((2, None), "int32", spec), isa)
    arrays = [indices, *list_constants(spec, isa, weight)]
    found = call_kernel(func, runnable_target(isa), arrays, (2, 2, 84), "float32")
    expected = qnn.grouped_take(indices, *weight, **form_of(spec))
    if isa.has_fma or not spec.has_offsets:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [1, 5, 16, 100])
def test_quantize_rows__as_numpy(width):
    x = np.random.default_rng(width).normal(size=(2, 3, width)).astype("float32")
    x[1] = [[0], [1e-45], [63e-45]]
    func = build_quantize_rows(RowQuantize((2, None), width))
    kernel = compile_kernel(func, runnable_target(best_isa()))
    q, scale = (
        tvm.runtime.tensor(np.full((2, 3, n), 7, d)) for n, d in ((width, "int8"), (1, "float32"))
    )
    kernel(tvm.runtime.tensor(x), q, scale)
    for found, expected in zip((q, scale), qnn.quantize_rows(x), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.optimized
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("isa", "features", "instruction"),
    [(SDOT, "+dotprod", "sdot"), (SMMLA, "+dotprod,+i8mm", "sdot"), (NEON, "", "sm(?:ul|la)l2?")],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_dense__arm_has_its_dot_product(isa, features, instruction, bits):
    """Cross-compiled: the instruction is there, and no call of a library function."""
    attrs = ["+neon", *filter(None, features.split(","))]
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": attrs})
    spec = GroupedDense((None,), 32, 64, bits, 32)
    mod = tvm.IRModule({"grouped_dense": build_grouped_dense(spec, isa)})
    text = tvm.compile(mod, target=target).mod.inspect_source("asm")
    assert re.search(rf"\t{instruction}\t", text)
    assert "\tfmla\t" in text
    assert "\tbl\tfma" not in text
