"""Functions that let many rows be rounded to bfloat16, through `rq.compile`."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tiny_llama import list_calls
from tvm import relax, tirx

import relayquant as rq
from relayquant.base.packing import pack_codes
from relayquant.codegen.kernels.isa.select import has_bf16_tiles
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.attention import lower_attention
from relayquant.codegen.lowering.grouped import lower_grouped
from relayquant.ir.dialect import qnn
from relayquant.ir.float_precision import BF16_ROWS_ATTR
from relayquant.ir.rewrite.function import define_function
from relayquant.ir.rewrite.graph import call_name

WIDTH, HIDDEN, GROUP = 64, 96, 32
TILES, VECTORS = "llvm -mcpu=sapphirerapids", "llvm -mcpu=cascadelake"
#: Vectors for bfloat16: twice as many products as of float32, and as many.
ZEN, COOPER_LAKE = "llvm -mcpu=znver5", "llvm -mcpu=cooperlake"


def make_module(build, many="rows"):
    """Make a module from build(builder, multiply, x). multiply(data, units) is the product with
    4-bit weights and rows of 8 bits, whose scales are multiplied by `factor`.
    """
    rng, builder = np.random.default_rng(0), relax.BlockBuilder()
    rows = tirx.Var("rows", "int64")
    x = relax.Var("x", relax.TensorType([1, rows, WIDTH], "float32"))

    def multiply(data, units, factor=None):
        *lead, features = data.ty.shape.values
        groups = int(features) // GROUP
        pair = builder.emit(
            qnn.quantize_rows(builder.emit(relax.op.reshape(data, (*lead, groups, GROUP))))
        )
        codes = builder.emit(relax.op.reshape(builder.emit(pair[0]), (*lead, features)))
        scales = builder.emit(relax.op.reshape(builder.emit(pair[1]), (*lead, groups)))
        if factor is not None:
            scales = builder.emit(relax.op.multiply(scales, relax.const(np.float32(factor))))
        weight = pack_codes(rng.integers(0, 16, (units, int(features))), 4)
        steps = rng.uniform(0.01, 0.03, (units, groups)).astype("float16")
        constants = [relax.const(tvm.runtime.tensor(each)) for each in (weight, steps)]
        middle = relax.const(np.array(8, "uint8"))
        return builder.emit(
            qnn.grouped_dense(codes, scales, *constants, middle, 4, GROUP, int(features))
        )

    def compute():
        return builder.emit_output(build(builder, multiply, x))

    attrs = {BF16_ROWS_ATTR: many, "global_symbol": "main"}
    return tvm.IRModule({"main": define_function(builder, [x], compute, attrs=attrs)})


def make_network(many="rows"):
    """x + down(silu(gate(x)) * up(x)), with 4-bit weights and rows of 8 bits."""

    def build(builder, multiply, x):
        both = multiply(x, 2 * HIDDEN)
        gate, up = (
            builder.emit(relax.op.strided_slice(both, [2], [at], [at + HIDDEN]))
            for at in (0, HIDDEN)
        )
        hidden = relax.op.multiply(builder.emit(relax.op.nn.silu(gate)), up)
        return relax.op.add(x, multiply(builder.emit(hidden), WIDTH))

    return make_module(build, many)


def list_kernels(mod, target, **options):
    lowered = lower_grouped(mod, resolve_target(target), **options)
    calls = list_calls(lowered["main"])
    return [str(c.args[0].name_hint) for c in calls if call_name(c) == "relax.call_tir"]


def test_lower_grouped__gate_and_sum_are_in_the_kernels_of_bfloat16():
    names = list_kernels(make_network(), TILES)
    assert [name.rstrip("0123456789") for name in names] == ["grouped_bf"] * 2


@pytest.mark.parametrize(("target", "is_inside"), [(ZEN, True), (VECTORS, False)])
@pytest.mark.parametrize("rows", ["many", "one"])
def test_lower_grouped__gate_is_in_the_kernel_where_a_tile_has_both_halves(rows, target, is_inside):
    mod = make_network() if rows == "many" else bind_rows(make_network(), 1)
    lowered = lower_grouped(mod, resolve_target(target))
    names = {call_name(call) for call in list_calls(lowered["main"])}
    assert ("relax.nn.silu" not in names) == is_inside
    assert ("relax.strided_slice" not in names) == is_inside
    assert "relax.add" in names  # the sum is faster alone


@pytest.mark.parametrize("rows", [1, 40])
def test_compile__gate_as_the_reference(rows):
    """As this machine's kernels have it."""
    mod, x = (
        make_network(),
        np.random.default_rng(4).normal(size=(1, rows, WIDTH)).astype("float32"),
    )
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x)).numpy()
    (expected,) = rq.reference.run(mod, [x])
    # float differences may move a row by one step of its integers
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def bind_rows(mod, rows):
    return relax.transform.BindSymbolicVars({"rows": rows})(mod)


def test_lower_grouped__sum_of_two_products_is_in_the_kernel_of_one():
    """As in language models whose attention and network read the same rows."""

    def build(builder, multiply, x):
        other = builder.emit(relax.op.nn.relu(x))
        return relax.op.add(multiply(x, WIDTH), multiply(other, WIDTH))

    names = list_kernels(make_module(build), TILES)
    assert [name.rstrip("0123456789") for name in names] == ["grouped_bf"] * 2


def test_lower_grouped__rows_with_other_scales_keep_8_bits():
    mod = make_module(lambda builder, multiply, x: multiply(x, WIDTH, factor=2))
    names = list_kernels(mod, TILES)
    assert {name.rstrip("0123456789") for name in names} == {"quantize_rows", "grouped_dense"}


@pytest.mark.parametrize(
    ("many", "target", "options"),
    [
        ("picked", TILES, {}),
        ("rows", VECTORS, {}),
        ("rows", ZEN, {}),
        ("rows", TILES, {"keeps_rows": True}),
    ],
    ids=["other rows", "no tiles", "vectors", "float32"],
)
def test_lower_grouped__other_rows_keep_8_bits(many, target, options):
    names = list_kernels(make_network(many), target, **options)
    assert {name.rstrip("0123456789") for name in names} == {"quantize_rows", "grouped_dense"}


def make_float_product(rows, many):
    """Float rows by 4-bit weights."""
    rng, builder = np.random.default_rng(0), relax.BlockBuilder()
    extent = tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    x = relax.Var("x", relax.TensorType([1, extent, WIDTH], "float32"))
    weight = pack_codes(rng.integers(0, 16, (HIDDEN, WIDTH)), 4)
    steps = rng.uniform(0.01, 0.03, (HIDDEN, WIDTH // GROUP)).astype("float16")
    constants = [relax.const(tvm.runtime.tensor(each)) for each in (weight, steps)]

    def compute():
        middle = relax.const(np.array(8, "uint8"))
        call = qnn.grouped_dense(x, 1.0, *constants, middle, 4, GROUP, WIDTH)
        return builder.emit_output(call)

    attrs = {BF16_ROWS_ATTR: many, "global_symbol": "main"}
    return tvm.IRModule({"main": define_function(builder, [x], compute, attrs=attrs)})


@pytest.mark.parametrize(
    ("rows", "many", "target", "is_asked", "expected"),
    [
        (16, "", TILES, True, "grouped_bf"),
        (15, "", TILES, True, "grouped_dense"),
        (16, "", TILES, False, "grouped_dense"),
        (16, "", VECTORS, True, "grouped_dense"),
        ("rows", "", TILES, True, "grouped_dense"),
        ("rows", "rows", TILES, True, "grouped_bf"),
        ("rows", "rows", TILES, False, "grouped_dense"),
    ],
)
def test_lower_grouped__many_float_rows_are_rounded_if_asked(
    rows, many, target, is_asked, expected
):
    mod = make_float_product(rows, many)
    (name,) = list_kernels(mod, target, rounds_floats=is_asked)
    assert name.rstrip("0123456789") == expected


@pytest.mark.slow
def test_compile__float_rows_and_weights_are_rounded_to_bfloat16():
    """Two roundings to 8 bits change a product by at most 2^-8 of itself."""
    if not has_bf16_tiles(resolve_target(None)):
        pytest.skip("this machine has no tiles for bfloat16")
    mod = make_float_product(40, "")
    x = np.random.default_rng(1).normal(size=(1, 40, WIDTH)).astype("float32")
    expected = rq.reference.run(mod, [x])[0]
    identity = make_float_product(WIDTH, "")
    weight = rq.reference.run(identity, [np.eye(WIDTH, dtype="float32")[None]])[0][0]
    bound = 2.0**-8 * np.abs(x[0]) @ np.abs(weight)
    machine = relax.VirtualMachine(rq.compile(mod, precision="bf16"), tvm.cpu())
    error = np.abs(machine["main"](tvm.runtime.tensor(x)).numpy() - expected)[0]
    assert (error <= 1.02 * bound).all()
    assert error.max() > 1e-5


def make_attention(many, **settings):
    """Attention of new rows to a cache."""
    builder, rows = relax.BlockBuilder(), tirx.Var("rows", "int64")
    cache = relax.TensorType([1, 2, 50, WIDTH], "float16")
    types = {
        "query": relax.TensorType([1, rows, 4, WIDTH], "float32"),
        "keys": cache,
        "values": cache,
        "positions": relax.TensorType([1], "int32"),
    }
    params = [relax.Var(name, ty) for name, ty in types.items()]
    query, keys, values, positions = params
    one = relax.const(np.float32(1))

    def compute():
        call = qnn.cached_attention(query, keys, one, values, one, positions, **settings)
        return builder.emit_output(call)

    attrs = {BF16_ROWS_ATTR: many, "global_symbol": "main"}
    return tvm.IRModule({"main": define_function(builder, params, compute, attrs=attrs)})


@pytest.mark.parametrize(
    ("many", "target", "settings", "options", "expected"),
    [
        ("rows", TILES, {"window": 9}, {}, "attention_bf16"),
        ("rows", TILES, {"soft_cap": 3.0}, {}, "attention_blocks"),
        ("picked", TILES, {}, {}, "attention_blocks"),
        ("rows", VECTORS, {}, {}, "attention_blocks"),
        ("rows", ZEN, {}, {}, "attention_bf16"),
        ("rows", COOPER_LAKE, {}, {}, "attention_blocks"),
        ("rows", TILES, {}, {"keeps_rows": True}, "attention_blocks"),
        ("rows", ZEN, {}, {"keeps_rows": True}, "attention_blocks"),
    ],
    ids=[
        "bfloat16",
        "bounded scores",
        "other rows",
        "no bfloat16",
        "fast vectors",
        "slow vectors",
        "float32",
        "float32 on fast vectors",
    ],
)
def test_lower_attention__many_rows_may_be_rounded(many, target, settings, options, expected):
    mod = make_attention(many, scale=0.125, **settings)
    lowered = lower_attention(mod, resolve_target(target), **options)
    calls = [c for c in list_calls(lowered["main"]) if call_name(c) == "relax.call_tir"]
    assert [str(call.args[0].name_hint) for call in calls] == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 40])
def test_compile__bfloat16_is_as_close_as_rows_of_8_bits(rows):
    if not has_bf16_tiles(resolve_target(None)):
        pytest.skip("this machine has no tiles for bfloat16")
    mod, x = make_network(), np.random.default_rng(1).normal(size=(1, rows, WIDTH))
    x = x.astype("float32")
    expected = rq.reference.run(mod, [x])[0] - x
    errors = []
    for precision in (None, rq.config.Precision.FLOAT32):
        machine = relax.VirtualMachine(rq.compile(mod, precision=precision), tvm.cpu())
        found = machine["main"](tvm.runtime.tensor(x)).numpy() - x
        errors.append(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))
    assert errors[1] < 1e-5 < errors[0] < 0.02
