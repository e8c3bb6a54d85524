"""Channels between two layers scaled against each other: the same bits, equal ranges, reasons."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.ir import reference
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.equalization.cross_layer import (
    EQUALIZED_ATTR,
    channel_ranges,
    choose_exponents,
    even_ranges,
    find_between,
    read_exponents,
    record_exponents,
    scale_layers,
)

RNG = np.random.default_rng(3)
SPREAD = np.geomspace(0.01, 10, 6).astype("float32").reshape(6, 1, 1, 1)
W1 = RNG.standard_normal((6, 3, 3, 3)).astype("float32") * SPREAD
W2 = RNG.standard_normal((6, 1, 3, 3)).astype("float32")
W3 = RNG.standard_normal((4, 6, 1, 1)).astype("float32")
BIAS = RNG.standard_normal((1, 6, 1, 1)).astype("float32")
X = RNG.standard_normal((2, 3, 8, 8)).astype("float32")


def build_chain(last, last_weight: np.ndarray = W3) -> tvm.IRModule:
    """conv + bias -> relu -> depthwise -> `last` -> 1x1 conv."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        y = emit("first", op.nn.conv2d(x, relax.const(W1), padding=1))
        y = emit("biased", op.add(y, relax.const(BIAS)))
        y = emit("relu", op.nn.relu(y))
        y = emit("depthwise", op.nn.conv2d(y, relax.const(W2), groups=6))
        y = emit("last", last(y))
        return emit.builder.normalize(op.nn.conv2d(y, relax.const(last_weight)))

    return build_model(body, X.shape)


def weights_of(mod: tvm.IRModule) -> list[np.ndarray]:
    graph = Graph(mod)
    calls = [graph.call_of(b.var) for b in graph.bindings if "conv2d" in graph.op_name(b.var)]
    return [constant_value(call.args[1]) for call in calls]


def test_equalize_layers__same_bits_and_equal_ranges() -> None:
    mod = build_chain(op.nn.relu)
    equalized, declined = rq.equalize_layers(mod)
    assert [value.name for value in declined] == [Graph(equalized).bindings[-1].var.name]
    before, after = (reference.run(m, [X])[0] for m in (mod, equalized))
    np.testing.assert_array_equal(before, after)
    first, depthwise, last = weights_of(equalized)
    assert not np.array_equal(first, W1)
    for a, b in [
        (channel_ranges(first, 0), channel_ranges(depthwise, 0)),
        (channel_ranges(depthwise, 0), channel_ranges(last, 1)),
    ]:
        # Powers of two: within a factor of 4 of one another, 1000 before.
        assert (np.maximum(a / b, b / a) <= 4).all()
    assert np.ptp(np.log2(channel_ranges(W1, 0))) > 8
    assert np.ptp(np.log2(channel_ranges(first, 0))) < 6


def test_equalize_layers__relu6_is_declined_with_the_reason() -> None:
    mod = build_chain(lambda y: op.clip(y, 0, 6))
    equalized, declined = rq.equalize_layers(mod)
    reasons = {value.name: value.reason for value in declined}
    assert "relu6" in reasons["depthwise"]
    np.testing.assert_array_equal(weights_of(equalized)[2], W3)
    np.testing.assert_array_equal(reference.run(mod, [X])[0], reference.run(equalized, [X])[0])


def test_choose_exponents__nothing_that_was_seen_is_clipped_otherwise() -> None:
    uneven = np.float32([100, 100, 100, 100, 100, 0.01]).reshape(1, 6, 1, 1)
    mod = build_chain(lambda y: op.clip(y, 0, 6), last_weight=W3 * uneven)
    assert find_between(mod)["last"] == 1
    seen = reference.run_values(mod, {"x": X})["last"].max(axis=(0, 2, 3))
    peaks = np.float32([6, 5.9, 3.1, 1.5, 0.1, 0])
    exponents = choose_exponents(mod, {"last": peaks})["depthwise"]
    assert exponents[0] == 0  # it reaches the bound
    assert all(6 * 2.0**e >= peak for e, peak in zip(exponents[1:], peaks[1:], strict=True))
    assert min(exponents) < 0 < max(exponents)
    exponents = choose_exponents(mod, {"last": seen})
    assert any(exponents["depthwise"])
    before, after = (reference.run(m, [X])[0] for m in (mod, scale_layers(mod, exponents)))
    np.testing.assert_array_equal(before, after)


def test_choose_exponents__the_layers_named_and_no_factor_without_bound() -> None:
    mod = build_chain(op.nn.relu)
    both = choose_exponents(mod)
    assert set(both) == {"first", "depthwise"}
    assert set(choose_exponents(mod, layers=["first"])) == {"first"}
    tiny = build_chain(op.nn.relu, last_weight=W3 * np.float32(1e-9))
    assert max(choose_exponents(tiny)["depthwise"]) == 8


def test_equalize_layers__a_clip_from_below_is_declined() -> None:
    mod = build_chain(lambda y: op.clip(y, -1, 1))
    assert "last" not in find_between(mod)
    declined = {value.name: value.reason for value in rq.equalize_layers(mod)[1]}
    assert "at -1 and 1" in declined["depthwise"]


def test_even_ranges__square_root_of_the_ratio_as_a_power_of_two() -> None:
    scales = even_ranges(np.array([16.0, 1.0, 0.0, 3.0, 5.0]), np.array([1.0, 64.0, 2.0, 1.0, 0]))
    np.testing.assert_array_equal(scales, np.float32([4, 0.125, 1, 1, 1]))


def test_read_exponents__what_was_recorded_and_a_damaged_note() -> None:
    mod = build_chain(op.nn.relu)
    assert read_exponents(mod) == {}
    mod = record_exponents(mod, {"first": [1, 0, -2, 0, 0, 0]})
    assert read_exponents(mod) == {"first": [1, 0, -2, 0, 0, 0]}
    for note in ("{", "[1]", '{"first": 3}', '{"first": ["x"]}'):
        damaged = tvm.IRModule({"main": mod["main"].with_attr(EQUALIZED_ATTR, note)})
        with pytest.raises(rq.ModelError, match=r"equalized of main.*is damaged"):
            read_exponents(damaged)


def draw_weight(*shape: int, axis: int = 0) -> relax.Expr:
    """The channels along an axis differ in size."""
    spread = np.geomspace(0.01, 10, shape[axis]).astype("float32")
    weight = np.moveaxis(np.random.default_rng(1).standard_normal(shape), axis, -1) * spread
    return relax.const(np.ascontiguousarray(np.moveaxis(weight, -1, axis)).astype("float32"))


FIRST_LAYERS = {
    "conv": lambda x: op.nn.conv2d(x, draw_weight(8, 3, 3, 3), padding=1),
    "product": lambda x: op.matmul(x, draw_weight(int(x.ty.shape[3]), 8, axis=1)),
}
BETWEEN = {
    "nothing": lambda y: y,
    "relu": op.nn.relu,
    "pool": lambda y: op.nn.max_pool2d(y, [3, 3], padding=1),
    "pool of the last axis": lambda y: op.nn.max_pool2d(y, [3, 3], padding=1, layout="NHWC"),
    "average": lambda y: op.nn.avg_pool2d(y, [3, 3], padding=1),
    "average of the last axis": lambda y: op.nn.avg_pool2d(y, [3, 3], padding=1, layout="NHWC"),
}
#: reads the channels of a value of shape (2, C, 8, N)
LAST_LAYERS = {
    "conv": lambda y: op.nn.conv2d(y, draw_weight(4, int(y.ty.shape[1]), 1, 1)),
    "product": lambda y: op.matmul(y, draw_weight(int(y.ty.shape[3]), 5)),
}


@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("last", LAST_LAYERS)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("first", FIRST_LAYERS)
def test_equalize_layers__same_bits_whatever_axis_the_second_layer_reads(
    first, between, last, size
) -> None:
    """Where the axes are different ones they may still have the same size."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        y = emit("first", FIRST_LAYERS[first](x))
        y = emit("between", BETWEEN[between](y)) if between != "nothing" else y
        return emit("last", LAST_LAYERS[last](y))

    shape = (2, 3 if first == "conv" else size, 8, size)
    mod = build_model(body, shape)
    data = RNG.standard_normal(shape).astype("float32")
    equalized, declined = rq.equalize_layers(mod)
    before, after = (reference.run(each, [data])[0] for each in (mod, equalized))
    np.testing.assert_array_equal(before, after)
    axes = {"conv": 1, "product": 3, "pool": 1, "average": 1}
    axes |= {"pool of the last axis": 3, "average of the last axis": 3}
    is_joined = len({axes[name] for name in (first, between, last) if name in axes}) == 1
    assert any("another axis" in each.reason for each in declined) is not is_joined
