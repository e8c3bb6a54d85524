"""`compress_weights` on modules of one and of several functions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tvm
from llama_program import compute_angles
from tiny_llama import (
    AFFINE_ROWS,
    GROUPS,
    ROWS,
    SIZES,
    TOKENS,
    bind_weights,
    make_prefill,
    select_calls,
    take_function,
)
from tvm import relax, tirx

import relayquant as rq
from relayquant.base.grouping import GroupFormat, quantize_groups
from relayquant.base.packing import CODE_BITS
from relayquant.errors import ConfigError, ModelError
from relayquant.ir.rewrite.function import make_main


def run_prefill(mod, tokens=TOKENS):
    return rq.reference.run(take_function(mod, "prefill"), make_prefill(tokens))


def run_decode(mod, token, at, cache):
    inputs = (np.array([[token]], "int32"), *compute_angles(SIZES, at, 1), tuple(cache))
    return rq.reference.run(take_function(mod, "decode"), inputs)


@pytest.mark.parametrize(
    "activation", [None, GROUPS, ROWS, AFFINE_ROWS], ids=["float", "groups", "rows", "affine"]
)
def test_compress__prefill_and_decode_agree(llama, activation):
    """The last of four tokens: all at once, and the fourth behind the cache of three."""
    q = rq.compress_weights(*llama, bits=8, activation=activation)
    expected = run_prefill(bind_weights(*llama))
    found = run_prefill(q)
    error = np.abs(found[0] - expected[0]).max() / np.abs(expected[0]).max()
    assert error < (0.05 if activation else 0.02)
    first = run_prefill(q, TOKENS[:3])
    last = run_decode(q, TOKENS[3], 3, first[1:])
    np.testing.assert_allclose(last[0][0, 0], found[0][0, 3], rtol=1e-4, atol=1e-4)


def test_compress__functions_share_one_copy_of_each_weight(llama):
    q = rq.compress_weights(*llama)
    calls = select_calls(q, "relax.qnn.grouped_dense")
    pairs = list(zip(calls["prefill"], calls["decode"], strict=True))
    assert len(pairs) == 6  # five of the layer, and the classifier
    for one, other in pairs:
        assert all(a.same_as(b) for a, b in zip(one.args[2:], other.args[2:], strict=True))
    # the classifier and the embedding are one table
    (take,) = select_calls(q, "relax.qnn.grouped_take")["decode"]
    assert take.args[1].same_as(calls["decode"][-1].args[2])
    assert int(take.attrs.bits) == 8


def test_compress__rows_are_quantized_once_for_all_that_read_them(llama):
    q = rq.compress_weights(*llama, activation=ROWS)
    # qkv; out; gate and up; down; the classifier
    assert len(select_calls(q, "relax.qnn.quantize_rows")["decode"]) == 5
    affine = rq.compress_weights(*llama, activation=AFFINE_ROWS)
    calls = [call.attrs.dtype for call in select_calls(affine, "relax.astype")["decode"]]
    assert [*map(str, calls)].count("int8") == 5


def test_compress__ledger_names_each_operator_and_what_it_got(llama):
    rows = rq.ledger(rq.compress_weights(*llama, bits=4)).rows
    assert len(rows) == 14
    assert {row.name.split(".")[0] for row in rows} == {"prefill", "decode"}
    assert [row.dtype for row in rows[:7]] == ["int8", *["int4"] * 5, "int8"]
    floats = rq.ledger(rq.compress_weights(*llama, embedding_bits=None)).floating
    assert {row.reason for row in floats} == {"tables stay float"}
    assert len(floats) == 4


def test_compress__other_operators_stay(llama):
    bound = bind_weights(*llama)
    q = rq.compress_weights(*llama)
    for name in ("relax.nn.rms_norm", "relax.nn.softmax", "relax.split"):
        counts = [{f: len(c) for f, c in select_calls(m, name).items()} for m in (bound, q)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("axes", [None, [1, 0]])
def test_compress__one_function_with_a_constant(axes):
    """matmul by a constant as it is and turned; a second of rank 4 stays, with the reason."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(40, 24)).astype("float32")
    stack = relax.const(rng.normal(size=(1, 2, 24, 3)).astype("float32"))
    x = relax.Var("x", relax.TensorType([tvm.tirx.Var("n", "int64"), 40], "float32"))

    def emit(builder):
        w = relax.const(weight)
        if axes:
            w = builder.emit(relax.op.permute_dims(relax.const(weight.T.copy()), axes))
        h = builder.emit(relax.op.matmul(x, w))
        return relax.op.matmul(h, stack)

    mod = make_main([x], emit)
    q = rq.compress_weights(mod, bits=8, group_size=16)
    (call,) = select_calls(q, "relax.qnn.grouped_dense")["main"]
    assert tuple(call.args[2].value.shape) == (24, 40)
    data = rng.normal(size=(3, 40)).astype("float32")
    np.testing.assert_allclose(
        rq.reference.run(q, data)[0], rq.reference.run(mod, data)[0], atol=0.8
    )
    (row,) = rq.ledger(q).floating
    assert row.reason == "its weight has 4 dimensions, not 2"


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_quantize_groups__no_worse_than_the_whole_range(bits, is_symmetric):
    """Also where a group is zeros, and where the last one is short."""
    rng = np.random.default_rng(bits)
    weight = rng.standard_t(4, (9, 40)).astype("float32")
    weight[2, :16] = 0
    found = quantize_groups(weight, GroupFormat(bits, 16, is_symmetric))
    assert found.zero_point.ndim == (0 if is_symmetric else 2)
    decoded = found.decode()
    np.testing.assert_array_equal(decoded[2, :16], 0)
    for start in (0, 16, 32):
        part = weight[:, start : start + 16]
        low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
        span = np.maximum(high, 0) - np.minimum(low, 0)
        if is_symmetric:
            span = 2 * np.maximum(-low, high)
        count = 2**bits - (2 if is_symmetric else 1)
        step = np.where(span > 0, span / count, 1)
        zero = 0 if is_symmetric else np.rint(-np.minimum(low, 0) / step)
        bound = 2 ** (bits - 1) - 1
        limits = (-bound, bound) if is_symmetric else (-zero, count - zero)
        plain = np.clip(np.rint(part / step), *limits) * step
        error = ((decoded[:, start : start + 16] - part) ** 2).sum()
        assert error <= ((plain - part) ** 2).sum() * (1 + 1e-4)


def test_quantize_groups__scales_of_float16():
    weight = np.random.default_rng(0).normal(size=(4, 64)).astype("float32") * 1e-9
    found = quantize_groups(weight, GroupFormat(scale_dtype="float16"))
    assert found.scale.dtype == np.float16
    assert np.isfinite(found.decode()).all()


WRONG = {
    r"bits=5; allowed: 2, 3, 4 or 8": {"bits": 5},
    r"embedding_bits=1; allowed": {"embedding_bits": 1},
    r"group_size=8; allowed: 16 to 256, or None": {"group_size": 8},
    r"scale_dtype='bfloat16'; allowed: float32, float16": {"scale_dtype": "bfloat16"},
    r"allowed: None, or QSpec\('int8', Scheme.SYMM": {"activation": rq.QSpec("int8")},
}


@pytest.mark.parametrize("message", WRONG)
def test_compress__refuses(llama, message):
    with pytest.raises(ConfigError, match=message):
        rq.compress_weights(*llama, **WRONG[message])


def test_compress__params_that_do_not_fit(llama):
    mod, params = llama
    with pytest.raises(
        ModelError, match=r"'norm.wieght', which no function takes. Did you mean 'norm.weight'"
    ):
        rq.compress_weights(mod, {"norm.wieght": params["norm.weight"]})
    with pytest.raises(ModelError, match=r"is float32 of shape \(3,\); the module wants"):
        rq.compress_weights(mod, {**params, "norm.weight": np.ones(3, "float32")})
    with pytest.raises(ModelError, match="no product with a constant float32 weight"):
        rq.compress_weights(mod)


def test_compress__what_is_quantized_already(llama):
    """As a GGUF file with blocks, or the command twice."""
    once = rq.compress_weights(*llama)
    with pytest.raises(ModelError, match=r"It has \d+ quantized operators already: run"):
        rq.compress_weights(once)


def test_compress__nothing_to_compress_for_reasons():
    """They are in the error: there is no module whose ledger could have them."""
    weight = np.ones((32, 8), "float32")
    weight[3, 1] = np.nan
    x = relax.Var("x", relax.TensorType((2, 32), "float32"))
    mod = make_main([x], lambda bb: bb.emit(relax.op.matmul(x, relax.const(weight)), "y"))
    with pytest.raises(ModelError, match=r"matmul at 'y' of 'main': its weight has 1 value not f"):
        rq.compress_weights(mod)


def test_row_scales__of_weights_in_groups_are_those_of_int8():
    weight = rq.TensorConfig(rq.QSpec("int4", group_size=32))
    assert rq.QConfig(rq.TensorConfig(ROWS), weight).is_grouped
    rows = rq.QSpec("uint8", is_dynamic=True, granularity=rq.config.Granularity.PER_ROW)
    with pytest.raises(ConfigError, match=r"group_size=32, with which activations are None"):
        rq.QConfig(rq.TensorConfig(rows), weight)


def make_lookup(table, mode, weight=None):
    """take(table, i) of run-time indices, @ weight."""
    i = relax.Var("i", relax.TensorType([5], "int64"))

    def emit(builder):
        rows = builder.emit(relax.op.take(relax.const(table), i, axis=0, mode=mode), "rows")
        if weight is not None:
            rows = builder.emit(relax.op.matmul(rows, relax.const(weight)), "product")
        return rows

    return make_main([i], emit)


#: Mode of take -> where indices of a table of six rows read, and what it says if it stays.
INDICES = np.array([0, 5, -1, 7, -9])
MODES = {"fast": [0, 5, 5, 1, 3], "wrap": [0, 5, 5, 1, 3], "clip": [0, 5, 0, 5, 0], "nan": None}


@pytest.mark.parametrize("mode", MODES)
def test_compress__indices_that_are_not_there(mode):
    """Compiled, reference and TVM's take read the same row, and none beside the table."""
    rng = np.random.default_rng(0)
    table, weight = (rng.normal(size=size).astype("float32") for size in ((6, 32), (32, 8)))
    q = rq.compress_weights(make_lookup(table, mode, weight), bits=8, group_size=16)
    if MODES[mode] is None:
        (row,) = rq.ledger(q).floating
        assert row.reason == "its indices are bounded by mode 'nan'"
        return
    assert rq.ledger(q).floating == ()
    expected = (table[MODES[mode]]) @ weight
    for found in (rq.reference.run(q, INDICES)[0], run_compiled(q, INDICES)):
        np.testing.assert_allclose(found, expected, atol=0.2)
    if mode != "fast":  # of which TVM reads whatever lies there
        np.testing.assert_allclose(
            run_compiled(make_lookup(table, mode, weight), INDICES), expected, atol=1e-4
        )


def run_compiled(mod, *arrays):
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def test_compress__weights_that_are_not_finite_stay():
    weight = np.ones((32, 8), "float32")
    weight[3, 2:4] = np.nan, np.inf
    q = rq.compress_weights(make_lookup(np.ones((6, 32), "float32"), "wrap", weight))
    (row,) = rq.ledger(q).floating
    assert (row.name, row.reason) == ("product", "its weight has 2 values not finite")
    table = np.full((6, 32), np.inf, "float32")
    q = rq.compress_weights(make_lookup(table, "wrap", np.ones((32, 8), "float32")))
    assert rq.ledger(q).floating[0].reason == "its weight has 192 values not finite"


@pytest.mark.parametrize("value", [1e30, -3e38])
def test_compress__weights_whose_squares_overflow_stay(value):
    """And nothing overflows on the way: a warning of numpy is an error here."""
    weight = np.ones((32, 8), "float32")
    weight[3, 2:4] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = rq.compress_weights(make_lookup(np.ones((6, 32), "float32"), "wrap", weight))
    (row,) = rq.ledger(q).floating
    assert row.reason.startswith("its weight has 2 values beyond 1.8e+19, whose squares")
    assert row.advice.startswith("Check the weight in the file of the model")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_compress__unusable_weights_are_named(value):
    """As parameters, by their names; an error says so too where nothing else is left."""
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    weight = relax.Var("block.fc.weight", relax.TensorType((8, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, weight], {"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(x, weight))
        builder.emit_func_output(out)
    params = {"block.fc.weight": np.full((8, 4), value, "float32")}
    with pytest.raises(rq.ModelError, match=r"32 values .*constant 'block\.fc\.weight'"):
        rq.compress_weights(builder.finalize(), params)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_compress__scales_that_float16_does_not_hold(is_symmetric):
    mod = make_lookup(np.full((6, 32), 1e8, "float32"), "wrap")
    options = {"embedding_bits": 4, "is_symmetric": is_symmetric}
    with pytest.raises(
        ModelError, match=r"take at 'rows' of 'main': weights up to 1e\+08.*beyond 65504.*float32"
    ):
        rq.compress_weights(mod, scale_dtype="float16", **options)
    found = rq.reference.run(rq.compress_weights(mod, **options), INDICES)[0]
    np.testing.assert_allclose(found, 1e8, rtol=0.01)


def test_compress__params_by_function(llama):
    """As `detach_params` gives them."""
    mod, params = llama
    weights = {}
    for gvar, func in mod.functions_items():
        first = int(func.attrs["num_input"])
        weights[gvar.name_hint] = [params[param.name] for param in func.params[first:]]
    found, expected = (run_prefill(rq.compress_weights(mod, p)) for p in (weights, params))
    np.testing.assert_array_equal(found[0], expected[0])
    short = {**weights, "decode": weights["decode"][:-1]}
    with pytest.raises(ModelError, match=r"params\['decode'\] holds 8 values.*9 parameters"):
        rq.compress_weights(mod, short)
    other = [*weights["decode"][:-1], params["norm.weight"].copy()]
    with pytest.raises(ModelError, match=r"two values for 'norm\.weight'"):
        rq.compress_weights(mod, {**weights, "decode": other})


def test_sizes__what_asks_for_those_of_a_table_does_not_keep_it():
    """TVM's ONNX frontend counts negative indices from shape_of(table)."""
    table = relax.const(np.random.default_rng(0).normal(size=(64, 32)).astype("float32"))
    builder = relax.BlockBuilder()
    i = relax.Var("i", relax.TensorType([5], "int64"))
    with builder.function("main", [i]):
        with builder.dataflow():
            shape = builder.emit(relax.op.shape_of(table))
            sizes = builder.emit(relax.op.shape_to_tensor(shape))
            rows = builder.emit(relax.op.take(sizes, relax.const(0, "int64"), axis=0))
            is_last = builder.emit(relax.op.less(i, relax.const(0, "int64")))
            at = builder.emit(relax.op.where(is_last, relax.op.add(i, rows), i))
            y = builder.emit_output(relax.op.take(table, at, axis=0))
        builder.emit_func_output(y)
    q = rq.compress_weights(builder.finalize(), None)
    assert not select_calls(q, "relax.shape_of")["main"]
    at = np.array([0, -1, 63, -64, 5])
    found = rq.reference.run(q, {"i": at})[0]
    np.testing.assert_allclose(found, table.value.numpy()[at], atol=0.05)


def make_joined_product(size):
    """y = concat([x, x], 1) @ w, for a weight of 64 rows and x (3, size)."""
    weight = np.random.default_rng(0).normal(size=(64, 48)).astype("float32")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3, size], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            both = builder.emit(relax.op.concat([x, x], 1))
            y = builder.emit_output(relax.op.matmul(both, relax.const(weight)), "y")
        builder.emit_func_output(y)
    return builder.finalize()


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", [None, GROUPS, ROWS, AFFINE_ROWS], ids=["float", "groups", "rows", "affine"]
)
def test_compress__rows_of_a_symbolic_size(activation):
    """They have the size of the weight's, or the run is refused. Before: a TypeError."""
    sizes = tirx.Var("n", "int64"), 32
    free, fixed = (
        rq.Executor(rq.compile(rq.compress_weights(make_joined_product(n), activation=activation)))
        for n in sizes
    )
    x = np.random.default_rng(1).normal(size=(3, 33)).astype("float32")
    inputs = [np.ascontiguousarray(x[:, :32])]
    np.testing.assert_array_equal(free.run("main", inputs)[0], fixed.run("main", inputs)[0])
    with pytest.raises(
        ValueError, match=r"not fit 'y_rows', which makes \(3, n \* 2\) into \(3, 64\)"
    ):
        free.run("main", [x])


def make_products_of_any_shape(rank, *, has_known):
    """y = x @ w for x of any shape, and if it `has_known` sizes, z = (x cast to (m, 64)) @ w."""
    weight = relax.const(np.random.default_rng(0).normal(size=(64, 48)).astype("float32"))
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=rank))
    rows = relax.TensorType([tirx.Var("m", "int64"), 64], "float32")

    def emit(builder):
        values = [builder.emit(relax.op.matmul(x, weight), "y")]
        if has_known:
            known = builder.match_cast(x, rows, "known")
            values.append(builder.emit(relax.op.matmul(known, weight), "z"))
        return relax.Tuple(values)

    return make_main([x], emit)


@pytest.mark.parametrize("rank", [-1, 1, 2])
def test_compress__rows_of_unknown_shape_are_refused(rank):
    mod = make_products_of_any_shape(rank, has_known=False)
    with pytest.raises(rq.ModelError, match=r"'y' of 'main': the shape of its data.*match_cast"):
        rq.compress_weights(mod)


def test_compress__rows_of_unknown_shape_stay_in_float_beside_others():
    q = rq.compress_weights(make_products_of_any_shape(2, has_known=True), bits=8)
    first, second = rq.ledger(q).rows
    assert (first.name, first.quantized, first.reason) == (
        "y", False, "the shape of its data is not known",
    )  # fmt: skip
    assert "match_cast" in first.advice
    assert (second.name, second.quantized) == ("z", True)
    x = np.random.default_rng(1).normal(size=(3, 64)).astype("float32")
    y, z = rq.reference.run(q, [x])
    np.testing.assert_allclose(y, z, atol=0.3)
