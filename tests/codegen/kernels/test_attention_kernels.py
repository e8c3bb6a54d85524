"""Attention to a cache on every instruction set, against PyTorch and numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from exact import call_kernel
from machines import best_isa, every_isa, runnable_target
from tvm.target import Target

from relayquant.codegen.kernels.attention.blocks import make_attention_blocks
from relayquant.codegen.kernels.attention.one_row import Attention, make_attention
from relayquant.codegen.kernels.floating.tile import choose_float_isa
from relayquant.ir.reference.qnn import cached_attention, quantize_rows


def draw(spec, positions, seed=0):
    """Query, and keys and values with their scales. What no row sees is NaN, or large."""
    rng = np.random.default_rng(seed)
    batch, rows, heads, width = spec.extents
    query = rng.normal(size=(batch, rows, heads, width)).astype("float32")
    caches = []
    for _ in range(2):
        cache = rng.normal(size=(batch, spec.groups, spec.length, width)).astype("float32")
        codes, scales = quantize_rows(cache)
        if spec.dtype != "int8":
            codes, scales = cache.astype(spec.dtype), np.float32(1)
        for b, place in enumerate(positions):
            unseen = np.arange(spec.length) >= place + rows
            if spec.window:
                unseen |= np.arange(spec.length) <= place - spec.window
            (codes if spec.dtype != "int8" else scales)[b, :, unseen] = np.nan
        caches += [codes, scales]
    return query, caches


def draw_sinks(spec):
    """Some above all scores, some below."""
    heads = spec.extents[2]
    return np.linspace(-4, 4, heads).astype("float32") if spec.has_sinks else ()


def expect(spec, query, caches, positions):
    attrs = {"scale": spec.scale, "window": spec.window, "soft_cap": spec.soft_cap}
    attrs["sinks"] = draw_sinks(spec)
    return cached_attention(query, *caches, np.array(positions), **attrs)


def check(spec, positions, target, make=make_attention):
    query, caches = draw(spec, positions)
    expected = expect(spec, query, caches, positions)
    operands = caches if spec.dtype == "int8" else caches[::2]
    inputs = [query, *operands, np.array(positions, "int32")]
    inputs += [draw_sinks(spec)] if spec.has_sinks else []
    kernel = make(spec, choose_float_isa(target))
    found = call_kernel(kernel, target, inputs, expected.shape, "float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)


#: B, H, G, D, L; positions; the other settings
ROWS = [
    ((1, 9, 3, 64, 300), [299], {}),
    ((2, 4, 2, 32, 40), [0, 39], {}),
    ((2, 4, 4, 80, 600), [5, 512], {}),
    ((1, 6, 1, 96, 70), [64], {"window": 17}),
    ((2, 8, 2, 128, 513), [512, 511], {"soft_cap": 3.0}),
    ((1, 14, 1, 256, 33), [31], {}),
    ((3, 2, 1, 20, 9), [5, -1, 8], {"window": 3, "soft_cap": 1.0}),
    ((1, 40, 1, 7, 5), [3], {}),
    ((2, 8, 2, 64, 600), [520, 3], {"has_sinks": True}),
    ((3, 2, 1, 20, 9), [5, -1, 8], {"window": 3, "has_sinks": True}),
]


def make_spec(sizes, settings, rows=1, dtype="float16"):
    batch, heads, groups, width, length = sizes
    return Attention((batch, rows, heads, width), groups, length, dtype, width**-0.5, **settings)


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("case", ROWS, ids=lambda case: "x".join(map(str, case[0])))
def test_attention__one_row(case, dtype):
    sizes, positions, settings = case
    check(make_spec(sizes, settings, dtype=dtype), positions, runnable_target(best_isa()))


@pytest.mark.sample(4)
@every_isa
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_attention__on_every_instruction_set(isa, dtype):
    sizes, positions, settings = ROWS[3]
    check(make_spec(sizes, settings, dtype=dtype), positions, runnable_target(isa))


#: As ROWS, with the number of rows
BLOCKS = [
    ((1, 9, 3, 64, 300), [100], 130, {}),
    ((2, 4, 2, 32, 40), [0, 35], 5, {}),
    ((2, 4, 4, 80, 90), [5, 40], 33, {}),
    ((1, 6, 1, 96, 200), [60], 77, {"window": 17}),
    ((2, 4, 2, 128, 90), [0, 3], 66, {"soft_cap": 3.0}),
    ((1, 4, 1, 256, 33), [0], 33, {}),
    ((3, 2, 1, 20, 9), [5, -1, 8], 3, {"window": 3, "soft_cap": 1.0}),
    ((2, 8, 2, 64, 200), [70, 3], 90, {"has_sinks": True}),
    ((3, 6, 2, 20, 9), [5, -1, 8], 3, {"window": 3, "has_sinks": True}),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: "x".join(map(str, case[0])))
def test_attention_blocks__many_rows(case, dtype):
    sizes, positions, rows, settings = case
    spec = make_spec(sizes, settings, rows, dtype)
    check(spec, positions, runnable_target(best_isa()), make_attention_blocks)


@pytest.mark.sample(4)
@every_isa
def test_attention_blocks__on_every_instruction_set(isa):
    sizes, positions, rows, settings = BLOCKS[3]
    check(make_spec(sizes, settings, rows), positions, runnable_target(isa), make_attention_blocks)


def test_attention__sequences_and_their_number_known_at_run_time():
    sizes, positions, settings = ROWS[4]
    known = make_spec(sizes, settings)
    spec = Attention(**{**vars(known), "extents": (None, *known.extents[1:])})
    target = runnable_target(best_isa())
    query, caches = draw(known, positions)
    inputs = [query, *caches[::2], np.array(positions, "int32")]
    kernel = make_attention(spec, choose_float_isa(target))
    found = call_kernel(kernel, target, inputs, query.shape, "float32")
    expected = expect(known, query, caches, positions)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("rows", [1, 70])
def test_attention__as_pytorch(rows, window):
    """Grouped heads, with the mask that the positions mean."""
    torch = pytest.importorskip("torch")
    spec = make_spec((1, 9, 3, 64, 300), {"window": window}, rows)
    query, caches = draw(spec, [230])
    operands = [np.nan_to_num(cache) for cache in caches[::2]]
    last, at = 230 + np.arange(rows)[:, None], np.arange(spec.length)
    mask = (at <= last) & ((at > last - window) if window else True)
    keys, values = (torch.from_numpy(cache.astype("float32")) for cache in operands)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(query).transpose(1, 2),
        keys,
        values,
        attn_mask=torch.from_numpy(mask),
        enable_gqa=True,
    )
    target = runnable_target(best_isa())
    make = make_attention if rows == 1 else make_attention_blocks
    inputs = [query, *operands, np.array([230], "int32")]
    kernel = make(spec, choose_float_isa(target))
    found = call_kernel(kernel, target, inputs, query.shape, "float32")
    expected = expected.transpose(1, 2).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "instructions", "scalar"),
    [
        ({"mcpu": "skylake-avx512"}, ["vcvtph2ps.*zmm", "vfmadd.*zmm"], "vcvtph2ps.*xmm"),
        ({"mcpu": "haswell"}, ["vcvtph2ps.*ymm", "vfmadd.*ymm"], "vcvtph2ps.*xmm.*xmm"),
        ({"mtriple": "aarch64-linux-gnu"}, ["fcvtl", r"fmla\s+v"], r"fcvt\s+s"),
    ],
    ids=["avx512", "haswell", "aarch64"],
)
def test_attention__instructions(target, instructions, scalar):
    """Numbers of the cache are converted by whole vectors, without a call."""
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", **target})
    kernel = make_attention(make_spec(*ROWS[0][::2]), choose_float_isa(target))
    module = tvm.compile(tvm.IRModule({"attention": kernel}), target=target)
    code = module.mod.inspect_source("asm")
    for instruction in instructions:
        assert re.search(instruction, code)
    assert not re.search(scalar, code)
    assert not re.search(r"(call|bl)\s.*(hf|h2f|exp)", code)
