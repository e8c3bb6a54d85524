"""Channels between layers of per-channel weights: the same bits, a scale that serves them all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model, draw_batches
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from tvm import relax

import relayquant as rq
from relayquant.analysis.outputs import measure_gaps
from relayquant.ir import reference
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.equalization.balance import balance_pair, share_range
from relayquant.stages.equalization.channels import ChannelStatistics, measure_noise
from relayquant.stages.equalization.cross_layer import (
    MOST_OCTAVES,
    ChannelReads,
    LayerPair,
    find_pairs,
    read_exponents,
    scale_layers,
)

op = relax.op
CHANNELS = 8
#: factors e^-3 to e^3 of the channels in between
UNEVEN = np.exp(np.linspace(-3, 3, CHANNELS))[[3, 6, 0, 7, 2, 5, 1, 4]].astype("float32")


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")


def along(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    return values.reshape([-1 if i == axis else 1 for i in range(rank)])


def first_conv(rng: np.random.Generator, x: relax.Expr, s: np.ndarray) -> relax.Expr:
    return op.nn.conv2d(x, c(draw(rng, 8, 3, 3, 3) * along(s, 0, 4)))


MAP = (2, 3, 10, 10)
#: second layer -> (shape of the input, first layer with its channels scaled by s, second by 1 / s)
MAKERS = {
    "conv": (
        MAP,
        first_conv,
        lambda rng, y, s: op.nn.conv2d(y, c(draw(rng, 6, 8, 3, 3) / along(s, 1, 4))),
    ),
    "depthwise": (
        MAP,
        first_conv,
        lambda rng, y, s: op.nn.conv2d(y, c(draw(rng, 8, 1, 3, 3) / along(s, 0, 4)), groups=8),
    ),
    "depthwise, two outputs each": (
        MAP,
        first_conv,
        lambda rng, y, s: op.nn.conv2d(
            y, c(draw(rng, 16, 1, 3, 3) / along(np.repeat(s, 2), 0, 4)), groups=8
        ),
    ),
    "grouped": (
        MAP,
        first_conv,
        lambda rng, y, s: op.nn.conv2d(y, c(draw(rng, 6, 4, 3, 3) / group(s, 6, 2)), groups=2),
    ),
    "transposed": (
        MAP,
        first_conv,
        lambda rng, y, s: op.nn.conv2d_transpose(y, c(draw(rng, 8, 6, 3, 3) / along(s, 0, 4))),
    ),
    "conv1d": (
        (2, 3, 20),
        lambda rng, x, s: op.nn.conv1d(x, c(draw(rng, 8, 3, 3) * along(s, 0, 3))),
        lambda rng, y, s: op.nn.conv1d(y, c(draw(rng, 6, 8, 3) / along(s, 1, 3))),
    ),
    "dense": (
        (16, 12),
        lambda rng, x, s: op.matmul(x, c(draw(rng, 12, 8) * s)),
        lambda rng, y, s: op.matmul(y, c(draw(rng, 8, 6) / s[:, None])),
    ),
}

BETWEEN = {
    "relu": {"relu": op.nn.relu},
    "leaky": {"leaky": lambda y: op.nn.leakyrelu(y, 0.1)},
    "pools": {
        "relu": op.nn.relu,
        "max": lambda y: op.nn.max_pool2d(y, (2, 2)),
        "mean": lambda y: op.nn.avg_pool2d(y, (2, 2)),
    },
}


def c(array: np.ndarray) -> relax.Expr:
    return relax.const(array.astype("float32"))


def group(s: np.ndarray, outputs: int, groups: int) -> np.ndarray:
    """The factors that a grouped weight (O, I / groups, 3, 3) meets."""
    rows = np.repeat(s.reshape(groups, -1), outputs // groups, axis=0)
    return rows.reshape(outputs, -1, 1, 1)


def build(kind: str, uneven: bool, between: str = "relu") -> tvm.IRModule:
    """The same function whether the channels in between are uneven or not."""
    shape, first, second = MAKERS[kind]
    s = UNEVEN if uneven else np.ones(CHANNELS, "float32")

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        y = emit("first", first(emit.rng, x, s))
        bias = s * draw(emit.rng, CHANNELS) / 2
        y = emit("sum", op.add(y, c(bias if kind == "dense" else along(bias, 0, y.ty.ndim - 1))))
        for name, operator in BETWEEN[between].items():
            y = emit(name, operator(y))
        return emit("out", second(emit.rng, y, s))

    return build_model(body, shape)


def quantize(mod: tvm.IRModule, effort: str) -> tuple[float, tvm.IRModule]:
    """(dB at the output, on data whose extremes were seen; module)."""
    data = draw_batches(mod, 6)
    qmod = rq.quantize(mod, None, data, effort=effort, guard=rq.config.Guard.OFF)
    (gap,) = measure_gaps(mod, qmod, data)
    return gap.sqnr, qmod


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "between"), [*((k, "relu") for k in MAKERS), ("conv", "leaky"), ("conv", "pools")]
)
def test_quantize__channels_out_of_balance_cost_little(kind: str, between: str) -> None:
    even, uneven = (build(kind, is_uneven, between) for is_uneven in (False, True))
    best, untouched = quantize(even, "balanced")
    found, qmod = quantize(uneven, "balanced")
    assert not read_exponents(untouched)
    assert set(read_exponents(qmod)) == {"first"}
    # Powers of two cost both sides half a bit at most.
    assert found > best - 7
    assert quantize(uneven, "fast")[0] < found - 5


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "dense"])
def test_scale_layers__same_function_says_the_onnx_evaluator(kind: str) -> None:
    """Which weight meets which channel, in groups, transposed and in one dimension."""
    mod = build(kind, uneven=True)
    exponents = {"first": np.random.default_rng(0).integers(-6, 7, CHANNELS).tolist()}
    batch = draw_batches(mod, 1)[0]["x"]
    results = [run_onnx(module, batch) for module in (mod, scale_layers(mod, exponents))]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_allclose(results[0], reference.run(mod, [batch])[0], rtol=1e-4, atol=1e-5)


def run_onnx(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    """conv, add, relu, conv of a module by the reference evaluator of onnx, in float32."""
    graph = Graph(mod)
    nodes, constants, value = [], {}, "x"
    for i, binding in enumerate(b for b in graph.bindings if graph.op_name(b.var)):
        kind, call = graph.op_name(binding.var), graph.values[binding.var]
        array = constant_value(call.args[1]) if len(call.args) > 1 else None
        if array is not None:
            constants[f"c{i}"] = array
        name = {"relax.add": "Add", "relax.nn.relu": "Relu"}.get(kind, "Conv")
        name += "Transpose" if kind.endswith("transpose") else ""
        attrs = {"group": int(call.attrs.groups)} if name.startswith("Conv") else {}
        inputs = [value] if array is None else [value, f"c{i}"]
        value = f"v{i}"
        nodes.append(helper.make_node(name, inputs, [value], **attrs))
    model = make_onnx(nodes, {"x": None}, [value], constants)
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


def test_balance_pair__bounds_and_channels_that_say_nothing() -> None:
    mod = build("conv", uneven=True)
    graph = Graph(mod)
    (pair,), _ = find_pairs(graph)
    weight = constant_value(graph.values[pair.second].args[1])
    dead = np.where(np.arange(CHANNELS) == 3, 0.0, UNEVEN.astype("float64"))
    seen = ChannelStatistics(dead, dead**2 / 8)
    free = np.full(CHANNELS, -MOST_OCTAVES), np.full(CHANNELS, MOST_OCTAVES)
    found = balance_pair(pair, weight, seen, free)
    assert found[3] == 0
    assert np.ptp(found) >= 6
    low = np.where(np.arange(CHANNELS) == 2, 0, free[0])
    assert balance_pair(pair, weight, seen, (low, free[1]))[2] == 0
    # Noise that is too small to matter, or that no factor makes smaller.
    alike = ChannelStatistics(np.ones(CHANNELS), np.ones(CHANNELS) / 8)
    assert not balance_pair(pair, weight * along(UNEVEN, 1, 4), alike, free).any()


def test_share_range__equation_4_as_powers_of_two_around_their_median() -> None:
    free = np.full(4, -MOST_OCTAVES), np.full(4, MOST_OCTAVES)
    largest, ranges = np.array([16.0, 1.0, 0.0, 64.0]), np.array([1.0, 64.0, 2.0, 4.0])
    np.testing.assert_array_equal(share_range(largest, ranges, 1.0, free), [0, -4, 0, 2])
    np.testing.assert_array_equal(share_range(largest, ranges, 0.5, free), [0, -5, 0, 0])
    huge = share_range(largest**9, ranges, 1.0, free)
    np.testing.assert_array_equal(huge, [0, -MOST_OCTAVES, 0, MOST_OCTAVES])


def test_channel_reads__split_is_what_scale_scales() -> None:
    reads, weight = ChannelReads(2, 3, 2), draw(np.random.default_rng(0), 3, 3, 4, 6)
    assert reads.split(weight).shape == (2, 3, 4, 9)
    scales = np.arange(1, 9, dtype="float32")
    scaled = reads.split(reads.scale(weight, scales))
    np.testing.assert_array_equal(scaled, reads.split(weight) * scales.reshape(2, 1, 4, 1))


@pytest.mark.parametrize(("is_depthwise", "expected"), [(True, [-2, 0, 0, 0]), (False, [0] * 4)])
def test_balance_pair__a_factor_of_four_counts_before_a_depthwise_layer(is_depthwise, expected):
    """A depthwise layer has a weight scale for each channel, which takes any factor. A weight scale
    of a dense layer is for all channels.
    """
    var = relax.Var("x", relax.TensorType((1,), "float32"))
    groups = 4 if is_depthwise else 1
    pair = LayerPair(var, var, None, 0, ChannelReads(1, 0, groups))
    largest = np.array([0.25, 1.0, 1.0, 1.0])
    seen = ChannelStatistics(largest, np.square(largest) / 9)
    weight = np.array([4.0, 1, 1, 1]).reshape(4, 1, 1, 1) * np.ones((4, 1, 3, 3))
    weight = weight if is_depthwise else weight.transpose(1, 0, 2, 3).repeat(4, axis=0)
    found = balance_pair(pair, weight.astype("float32"), seen, (np.full(4, -8), np.full(4, 8)))
    assert found.tolist() == expected


@pytest.mark.parametrize("is_rare", [False, True])
def test_balance_pair__rare_large_values_say_nothing_of_a_range(is_rare: bool) -> None:
    """If large values are rare, the best range of all channels together leaves them out. Then a
    channel that reaches less far loses less than its range says.
    """
    var = relax.Var("x", relax.TensorType((1,), "float32"))
    pair = LayerPair(var, var, None, 0, ChannelReads(1, 0, 4))
    rows = np.random.default_rng(0).uniform(0, 1, (1 << 18, 4))
    if is_rare:
        rows[0, :3] = 4.0
    else:
        rows[:, 3] /= 4
    seen = ChannelStatistics(rows.max(axis=0), np.square(rows).mean(axis=0), rows.astype("float32"))
    weight = np.ones((4, 1, 3, 3), "float32")
    weight[3] = 16.0
    free = np.full(4, -8), np.full(4, 8)
    estimated = balance_pair(pair, weight, replace(seen, rows=seen.rows[:0]), free)
    assert estimated[3] < -1
    measured = balance_pair(pair, weight, seen, free)
    np.testing.assert_array_equal(measured, np.zeros(4) if is_rare else estimated)


def test_measure_noise__best_range_by_exact_steps() -> None:
    """Uniform numbers: a step squared / 12 for each channel. With a rare large value the range is
    cut, and the value pays.
    """
    rows = np.random.default_rng(0).uniform(0, 1, (1 << 16, 2)).astype("float32")
    importance, scales = np.array([1.0, 2.0]), np.array([1.0, 0.5])
    # The second channel reaches twice as far in units of its scale.
    expected = (2 / 255) ** 2 / 12 * (1 + 2 * 0.25)
    assert measure_noise(rows, scales, importance) == pytest.approx(expected, rel=0.02)
    outlier = np.concatenate([rows, [[8.0, 0.0]]]).astype("float32")
    ends = 8 * 0.84 ** np.arange(12)
    cut = (8 - ends) ** 2 / len(outlier) + (ends / 255) ** 2 / 12 * 3
    noise = measure_noise(outlier, np.ones(2), importance)
    assert noise == pytest.approx(cut.min(), rel=0.05)
    assert measure_noise(rows * 0, scales, importance) == 0
