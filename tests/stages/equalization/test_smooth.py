"""Activations of matrix products scaled against weights: the same bits, equal ranges, reasons."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model, draw_batches
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.outputs import measure_gaps
from relayquant.ir import reference
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.equalization import recognize_type
from relayquant.stages.equalization.absorb import absorb, reshape_channels
from relayquant.stages.equalization.channels import ChannelStatistics
from relayquant.stages.equalization.smooth import (
    choose_scales,
    estimate_product_noise,
    find_sites,
    number_channels,
)
from relayquant.stages.preparation import prepare_module

TOKENS, WIDTH, HEADS = 6, 16, 2
#: a few channels far larger than the rest, as in large transformers
OUTLIERS = np.where(np.arange(WIDTH) % 7 == 3, 60.0, 1.0).astype("float32")


def emit_norm(emit: Chain, name: str, x: relax.Expr) -> relax.Var:
    gamma, beta = (relax.const(OUTLIERS * emit.rng.normal(1, 0.1, WIDTH).astype("float32"))
                   for _ in range(2))  # fmt: skip
    return emit(name, op.nn.layer_norm(x, gamma, beta, axes=[-1]))


def emit_heads(emit: Chain, name: str, x: relax.Expr, axes: list[int]) -> relax.Var:
    """(batch, token, channel) -> (batch, head, ...) of a biased product."""
    y = emit.dense(f"{name}.product", x, WIDTH)
    y = emit(f"{name}.biased", op.add(y, emit.constant(WIDTH)))
    y = emit(f"{name}.split", op.reshape(y, [-1, TOKENS, HEADS, WIDTH // HEADS]))
    return emit(name, op.permute_dims(y, axes))


def transformer(emit: Chain, x: relax.Expr) -> relax.Expr:
    """A block as in GPT and ViT: layer norms before the products, residuals around."""
    norm = emit_norm(emit, "norm1", x)
    q, k, v = (emit_heads(emit, name, norm, axes) for name, axes in
               (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])))  # fmt: skip
    scores = emit("scores", op.multiply(emit("qk", op.matmul(q, k)), relax.const(0.35)))
    heads = emit("heads", op.matmul(emit("softmax", op.nn.softmax(scores)), v))
    joined = emit("joined.heads", op.permute_dims(heads, [0, 2, 1, 3]))
    joined = emit("joined", op.reshape(joined, [-1, TOKENS, WIDTH]))
    x = emit("sum1", op.add(x, emit.dense("o", joined, WIDTH)))
    hidden = emit.dense("f1", emit_norm(emit, "norm2", x), 32)
    hidden = emit("relu", op.nn.relu(emit("f1.biased", op.add(hidden, emit.constant(32)))))
    return emit("sum2", op.add(x, emit.dense("f2", hidden, WIDTH)))


MODEL = build_model(transformer, (2, TOKENS, WIDTH))
DATA = draw_batches(MODEL, 3)


def largest(mod: tvm.IRModule, name: str, axis: int = -1) -> np.ndarray:
    """Largest magnitude of a value by channel, over the data."""
    values = np.stack([np.abs(reference.run_values(mod, batch)[name]) for batch in DATA])
    values = np.moveaxis(values, axis, -1)
    return values.reshape(-1, values.shape[-1]).max(0)


def weight_of(mod: tvm.IRModule, name: str) -> np.ndarray:
    graph = Graph(mod)
    return constant_value(graph.values[graph.vars[name]].args[1])


def test_smooth__same_bits_and_ranges_that_meet() -> None:
    smoothed, declined = rq.smooth_activations(MODEL, None, DATA)
    assert {value.name: value.reason for value in declined if "soft" in value.reason}
    for batch in draw_batches(MODEL, 2, seed=5):
        before, after = (reference.run(mod, batch)[0] for mod in (MODEL, smoothed))
        np.testing.assert_array_equal(after, before)
    assert len(Graph(smoothed).bindings) == len(Graph(prepare_module(MODEL)).bindings)
    assert np.ptp(np.log2(largest(MODEL, "norm1"))) > 5
    for name, weights in (("norm1", ["q.product", "k.product", "v.product"]), ("norm2", ["f1"])):
        rows = np.abs(np.concatenate([weight_of(smoothed, w) for w in weights], 1)).max(1)
        ratio = largest(smoothed, name) / rows
        # Powers of two: both ranges of a channel are within a factor of 2 of one another.
        assert (np.maximum(ratio, 1 / ratio) <= 2 + 1e-6).all()


def test_smooth__finds_all_products_of_a_block() -> None:
    sites, declined = find_sites(Graph(rq.prepare(MODEL).mod))
    assert [site.left.name for site in sites][:2] == ["norm1", "q"]
    lefts = {site.left.name for site in sites}
    assert lefts == {"norm1", "q", "joined", "norm2", "relu"}
    products = [site for site in sites if site.right is not None]
    assert [(site.left_channels.size, site.right.name) for site in products] == [(WIDTH, "k")]
    assert [value.name for value in declined] == ["softmax"]


@pytest.mark.slow
def test_smooth__loses_less_to_8_bits() -> None:
    gaps = []
    for mod in (MODEL, rq.smooth_activations(MODEL, None, DATA)[0]):
        qmod = rq.quantize(
            mod, None, DATA, effort="fast", model_type="general", guard=rq.config.Guard.OFF
        )
        gaps.append(measure_gaps(MODEL, qmod, draw_batches(MODEL, 4, seed=9))[0].sqnr)
    assert gaps[1] > gaps[0] + 3


def make_declined(make: str) -> tvm.IRModule:
    """A product of a value that no constant takes scales for, and why."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        if make == "shared":
            u = emit("u", op.nn.relu(x))
            y = emit.dense("y", emit("v", op.multiply(u, u)), WIDTH)
            return emit("out", op.add(y, emit.constant(WIDTH)))
        if make == "scalar":
            v = emit("v", op.add(emit_norm(emit, "norm", x), relax.const(0.5)))
        elif make == "softmax":
            v = emit("v", op.nn.softmax(x))
        else:
            v = emit_norm(emit, "v", x)
        y = emit.dense("y", v, WIDTH)
        if make == "returned":
            return relax.Tuple([v, y])
        return emit("out", op.add(y, v) if make == "residual" else op.nn.relu(y))

    return build_model(body, (2, TOKENS, WIDTH))


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        ("residual", "v", "reads it too, and has no weight"),
        ("returned", "v", "the model returns it"),
        ("scalar", "v", "one number for all channels"),
        ("softmax", "v", "nn.softmax"),
        ("shared", "u", "several operators read it"),
    ],
)
def test_smooth__declines(make: str, name: str, reason: str) -> None:
    mod = make_declined(make)
    smoothed, declined = rq.smooth_activations(mod, None, draw_batches(mod, 1))
    assert [(value.name, reason in value.reason) for value in declined] == [(name, True)]
    for one, other in zip(
        *(reference.run(m, draw_batches(mod, 1)[0]) for m in (mod, smoothed)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("make", ["residual", "returned", "scalar", "softmax"])
def test_smooth__inserts_what_nothing_absorbs(make: str) -> None:
    """The same bits; only products read the multiplied value."""
    mod = make_declined(make)
    batch = draw_batches(mod, 1)[0]
    smoothed, declined = rq.smooth_activations(mod, None, [batch], inserts=True)
    for one, other in zip(*(reference.run(m, batch) for m in (mod, smoothed)), strict=True):
        np.testing.assert_array_equal(one, other)
    graph = Graph(smoothed)
    added = [b.var for b in graph.bindings if b.var.name == "v.smooth"]
    assert not declined
    (var,) = added
    assert [user.name for user in graph.users[var]] == ["y"]
    ratio = largest_of(smoothed, "v.smooth", batch) / np.abs(weight_of(smoothed, "y")).max(1)
    assert (np.maximum(ratio, 1 / ratio) <= 2 + 1e-6).all()


def largest_of(mod: tvm.IRModule, name: str, batch: dict[str, np.ndarray]) -> np.ndarray:
    return np.abs(reference.run_values(mod, batch)[name]).reshape(-1, WIDTH).max(0)


def test_smooth__inserted_loses_less_to_8_bits() -> None:
    mod = make_declined("residual")
    products = rq.QConfigMapping().set_object_type(
        "relax.matmul", rq.get_backend_config("x86").default_qconfig
    )
    data, gaps = draw_batches(mod, 3), []
    for inserts in (False, True):
        smoothed, _ = rq.smooth_activations(mod, None, data, inserts=inserts)
        qmod = rq.quantize(
            smoothed, None, data, qconfig_mapping=products, effort="fast", guard=rq.config.Guard.OFF
        )
        gaps.append(measure_gaps(mod, qmod, draw_batches(mod, 4, seed=9))[0].sqnr)
    assert gaps[1] > gaps[0] + 3


def post_norm(emit: Chain, x: relax.Expr) -> relax.Expr:
    """A block as in BERT: residual sums read the layer norms that products read."""
    norm = emit_norm(emit, "norm1", x)
    q, k, v = (emit_heads(emit, name, norm, axes) for name, axes in
               (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])))  # fmt: skip
    weights = emit("softmax", op.nn.softmax(emit("qk", op.matmul(q, k))))
    heads = emit(
        "joined.heads", op.permute_dims(emit("heads", op.matmul(weights, v)), [0, 2, 1, 3])
    )
    joined = emit("joined", op.reshape(heads, [-1, TOKENS, WIDTH]))
    norm = emit_norm(emit, "norm2", emit("sum1", op.add(norm, emit.dense("o", joined, WIDTH))))
    hidden = emit("gelu", op.nn.gelu(emit.dense("f1", norm, 32)))
    return emit("sum2", op.add(norm, emit.dense("f2", hidden, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize(("block", "backend"), [(transformer, "x86"), (post_norm, "arm")])
def test_model_type__a_transformer_loses_less_to_8_bits(block, backend) -> None:
    mod = build_model(block, (2, TOKENS, WIDTH))
    data, gaps = draw_batches(mod, 3), []
    for model_type in ("general", None):  # None: it is recognized
        qmod = rq.quantize(
            mod,
            None,
            data,
            model_type=model_type,
            backend=backend,
            guard=rq.config.Guard.OFF,
        )
        gaps.append(measure_gaps(mod, qmod, draw_batches(mod, 4, seed=9))[0].sqnr)
    rows = rq.ledger(qmod).rows
    assert {row.op for row in rows if row.quantized} == {"matmul"}
    assert all(row.quantized for row in rows if row.op == "matmul")
    assert gaps[1] > gaps[0] + 5, gaps
    assert "recognized as a transformer" in rq.ledger(qmod).summarize()
    again = rq.quantize(
        mod,
        None,
        data,
        model_type=rq.config.ModelType.TRANSFORMER,
        backend=backend,
        guard=rq.config.Guard.OFF,
    )
    (x,) = draw_batches(mod, 1, seed=9)[0].values()
    np.testing.assert_array_equal(reference.run(again, [x])[0], reference.run(qmod, [x])[0])


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "general"},
        {"qconfig_mapping": rq.QConfigMapping().set_object_type("matmul", None)},
    ],
)
def test_model_type__is_recognized_only_where_it_is_left_open(change) -> None:
    mod = build_model(transformer, (2, TOKENS, WIDTH))
    prepared = rq.prepare(mod, None, draw_batches(mod, 1), effort="fast", **change)
    assert not any(name.endswith(".smooth") for name in Graph(prepared.mod).vars)


def even(emit: Chain, x: relax.Expr) -> relax.Expr:
    """Attention whose channels are alike."""
    ones = relax.const(np.ones(WIDTH, "float32"))
    norm = emit("norm", op.nn.layer_norm(x, ones, ones, axes=[-1]))
    q, k, v = (emit.dense(name, norm, WIDTH) for name in "qkv")
    scores = emit("scores", op.matmul(q, emit("turned", op.permute_dims(k, [0, 2, 1]))))
    return emit("heads", op.matmul(emit("softmax", op.nn.softmax(scores)), v))


def uneven_classes(emit: Chain, x: relax.Expr) -> relax.Expr:
    """A few large channels, and a softmax of a product with a weight."""
    y = emit.dense("classes", emit_norm(emit, "norm", x), WIDTH)
    return emit("softmax", op.nn.softmax(y))


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (transformer, rq.config.ModelType.TRANSFORMER),
        (post_norm, rq.config.ModelType.TRANSFORMER),
        (even, None),
        (uneven_classes, None),
    ],
)
def test_recognize_type__needs_attention_and_a_few_large_channels(block, found) -> None:
    mod = build_model(block, (2, TOKENS, WIDTH))
    assert recognize_type(prepare_module(mod), draw_batches(mod, 1)) is found


@pytest.mark.parametrize("block", [transformer, post_norm])
def test_model_type__no_value_of_the_model_changes(block) -> None:
    """Hence fixed parameters stay right, and `compare` finds the values of the float model."""
    mod, kind = build_model(block, (2, TOKENS, WIDTH)), rq.config.ModelType.TRANSFORMER
    batch = draw_batches(mod, 1)[0]
    prepared = rq.prepare(mod, dataset=[batch], effort="fast", model_type=kind)
    before, after = (reference.run_values(m, batch) for m in (prepare_module(mod), prepared.mod))
    added = {f"{name}.smooth" for name in ("norm1", "joined", "norm2")}
    assert after.keys() - before.keys() == added | {
        f"{name}.smooth" for name in ("relu", "gelu") if name in before
    }
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_model_type__a_mapping_decides_what_is_quantized() -> None:
    mapping = rq.QConfigMapping().set_module_name(
        "f2", rq.get_backend_config("x86").default_qconfig
    )
    kind = rq.config.ModelType.TRANSFORMER
    prepared = rq.prepare(
        MODEL, None, DATA, qconfig_mapping=mapping, backend="x86", effort="fast", model_type=kind
    )
    assert [op.name for op in prepared.plan.operators if op.quantized] == ["f2"]
    assert "relu.smooth" in Graph(prepared.mod).vars


def test_model_type__refuses_no_data() -> None:
    with pytest.raises(rq.ConfigError, match="data is measured by channel"):
        rq.prepare(MODEL, model_type=rq.config.ModelType.TRANSFORMER)


def test_smooth__nothing_to_gain_changes_nothing() -> None:
    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        weight = relax.const(np.sign(emit.rng.standard_normal((WIDTH, 8))).astype("float32"))
        flat = relax.const(np.ones(WIDTH, "float32"))
        norm = emit("norm", op.nn.layer_norm(x, flat, flat, axes=[-1]))
        return emit("y", op.matmul(norm, weight))

    mod = build_model(body, (2, TOKENS, WIDTH))
    prepared = prepare_module(mod)
    smoothed, declined = rq.smooth_activations(mod, None, draw_batches(mod, 2))
    tvm.ir.assert_structural_equal(smoothed["main"], prepared["main"], map_free_vars=True)
    assert [value.reason for value in declined] == ["scaling would not make it more exact"]


def test_choose_scales__equation_4_as_a_power_of_two() -> None:
    left, right = np.array([16.0, 1.0, 0.0, 64.0]), np.array([1.0, 64.0, 2.0, 4.0])
    np.testing.assert_array_equal(choose_scales(left, right, 0.5), [4, 0.125, 1, 4])
    np.testing.assert_array_equal(choose_scales(left, right, 1.0), [16, 1, 1, 64])
    np.testing.assert_array_equal(choose_scales(left, right, 0.0), [1, 1 / 64, 1, 0.25])


def test_estimate_product_noise__is_that_of_rounding() -> None:
    rng = np.random.default_rng(4)
    spread = np.geomspace(0.2, 5, 32)
    left, right = rng.uniform(-1, 1, (400, 32)) * spread, rng.uniform(-1, 1, (400, 32))
    steps = [np.abs(x).max() / 127 for x in (left, right)]
    rounded = [np.rint(x / step) * step for x, step in zip((left, right), steps, strict=True)]
    error = np.square(rounded[0] @ rounded[1].T - left @ right.T).mean()
    statistics = (ChannelStatistics(np.abs(x).max(0), np.square(x).mean(0)) for x in (left, right))
    assert error == pytest.approx(estimate_product_noise(*statistics) / 12, rel=0.05)


SHAPES = [((2, 6, 8), (2, 6, 2, 4)), ((2, 6, 2, 4), (2, 6, 8)), ((6, 8), (6, 1, 8)),
          ((3, 4, 5), (3, 20)), ((1, 6, 8), (6, 8))]  # fmt: skip


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_reshape_channels__scaling_before_is_scaling_after(shapes, seed) -> None:
    source, shape = shapes
    channels = number_channels(shape, (len(shape) - 1,))
    moved = reshape_channels(channels, shape, source)
    rng = np.random.default_rng(seed)
    x, scales = rng.standard_normal(source), rng.uniform(0.5, 2, channels.size)
    np.testing.assert_array_equal(
        (x * scales[moved]).reshape(shape), x.reshape(shape) * scales[channels]
    )
    assert moved.size <= max(channels.size, source[-1]), "equal axes are collapsed"


def test_reshape_channels__symbolic_axes_are_not_cut() -> None:
    channels = number_channels(("n", 8), (1,))
    assert reshape_channels(channels, ("n", 8), ("n", 2, 4)).shape == (1, 2, 4)
    assert reshape_channels(channels, ("n", 8), (2, "m", 8)) is None
    assert number_channels(("n", "c"), (1,)) is None


def test_absorb__an_input_takes_nothing() -> None:
    graph = Graph(MODEL)
    (x,) = graph.func.params
    assert "an input" in absorb(graph, x, np.arange(WIDTH).reshape(1, 1, -1)).reason


@pytest.mark.parametrize("wrong", [{"alpha": 1.5}, {"alpha": float("nan")}, {"samples": 0}])
def test_smooth__refuses(wrong) -> None:
    with pytest.raises(rq.ConfigError, match=f"{next(iter(wrong))} is"):
        rq.smooth_activations(MODEL, None, DATA, **wrong)
