"""Weights of few bits that get all bits, as a step before float."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from float_models import build_model
from tvm import relax

import relayquant as rq
from relayquant.config import Granularity, Guard
from relayquant.data.sampling import is_held_back
from relayquant.flow.pipeline import recalibrate
from relayquant.flow.refine.wider_weights import find_wider_weights
from relayquant.flow.settings import QuantizeSettings

DEFAULT = rq.get_backend_config("x86").default_qconfig


def draw_model(seed: int = 3):
    """Two products. The first has a large weight in each column, for data that is nearly 0: few
    bits leave few levels to the others.
    """
    rng = np.random.default_rng(seed)
    first, second = (rng.standard_normal((64, n)).astype("float32") for n in (64, 8))
    first[0] = 12.0
    second /= 8

    def body(emit, x):
        y = emit("first", relax.op.matmul(x, relax.const(first)))
        return emit("second", relax.op.matmul(y, relax.const(second)))

    data = rng.standard_normal((128, 1, 64)).astype("float32")
    data[..., 0] *= 1e-3
    return build_model(body, (1, 64)), [*data[:64]], Other([*data[64:]], (first, second))


@dataclass(frozen=True, eq=False)
class Other:
    """Data that calibrated nothing, and the weights: numpy computes the outputs."""

    data: list[np.ndarray]
    weights: tuple[np.ndarray, np.ndarray]

    def measure(self, qmod: tvm.IRModule) -> float:
        """SQNR of a module's outputs in dB."""
        run = rq.Executor(rq.compile(qmod))
        got = np.concatenate([run.run("main", [batch])[0] for batch in self.data])
        want = np.concatenate(self.data) @ self.weights[0] @ self.weights[1]
        return float(10 * np.log10(np.sum(want**2) / np.sum((got - want) ** 2)))


def use_bits(bits: int, wide: tuple[str, ...] = ()) -> rq.QConfigMapping:
    """Weights of so many bits, with one scale for each tensor; those of `wide` by default."""
    spec = replace(
        DEFAULT.weight.spec,
        granularity=Granularity.PER_TENSOR,
        quant_min=-(2 ** (bits - 1)),
        quant_max=2 ** (bits - 1) - 1,
    )
    few = replace(DEFAULT, weight=rq.TensorConfig(spec, rq.observers.MinMax()))
    mapping = rq.QConfigMapping().set_global(few)
    for name in wide:
        mapping = mapping.set_module_name(name, DEFAULT)
    return mapping


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_find_wider_weights__own_qconfig_with_all_bits(bits):
    mod, data, _ = draw_model()
    mapping = use_bits(bits, ("second",))
    prepared = rq.prepare(mod, None, data, qconfig_mapping=mapping, backend="x86")
    ((name, found),) = find_wider_weights(prepared).items()
    own = mapping.rules[0].qconfig
    assert name == "first"
    assert found.weight.spec.limits == DEFAULT.weight.spec.limits
    assert found == replace(own, weight=replace(own.weight, spec=found.weight.spec))
    assert found.weight.spec.granularity is Granularity.PER_TENSOR


def test_find_wider_weights__nothing_by_default():
    mod, data, _ = draw_model()
    assert find_wider_weights(rq.prepare(mod, None, data, backend="x86")) == {}


@pytest.mark.slow
def test_guard__weights_of_few_bits_get_all_and_stay_on_integers():
    mod, data, other = draw_model()
    few = {"qconfig_mapping": use_bits(3), "backend": "x86", "callbacks": ()}
    before = other.measure(rq.quantize(mod, None, data, guard="off", **few))
    with pytest.warns(
        rq.AccuracyWarning, match="With weights of more bits, .* operators?: .*first"
    ):
        qmod = rq.quantize(mod, None, data, **few)
    ledger = rq.ledger(qmod)
    assert "first" in ledger.guard.widened
    assert (ledger.guard.reverted, ledger.guard.ranged) == ((), ())
    assert [row.name for row in ledger.quantized if row.macs] == ["first", "second"]
    assert before < 15
    assert other.measure(qmod) > 20
    assert "with weights of more bits: " in str(ledger.guard)
    assert type(ledger.guard).from_dict(ledger.guard.to_dict()) == ledger.guard


def use_run_time_ranges(bits: int) -> rq.QConfigMapping:
    """As `use_bits`, of operators that the user lets compute their data's range at run time."""
    few = use_bits(bits).rules[0].qconfig
    data = replace(DEFAULT.data.spec, is_dynamic=True, granularity=Granularity.PER_TENSOR)
    return rq.QConfigMapping().set_global(rq.QConfig(rq.TensorConfig(data), few.weight))


@pytest.mark.slow
def test_guard__weights_are_widened_behind_ranges_that_the_user_computes_at_run_time():
    """Both are in the QConfig: the weight is what the guard changed, and is fitted anew."""
    mod, data, other = draw_model()
    few = {"qconfig_mapping": use_run_time_ranges(2), "backend": "x86", "callbacks": ()}
    with pytest.warns(rq.AccuracyWarning, match="With weights of more bits, .*: .*first"):
        qmod = rq.quantize(mod, None, data, **few)
    guard = rq.ledger(qmod).guard
    assert "first" in guard.widened
    assert (guard.reverted, guard.ranged) == ((), ())
    assert other.measure(qmod) > 20


@pytest.mark.slow
def test_guard__weights_of_few_bits_that_do_no_damage_stay():
    """A convolution with few steps for its data is the cause: the others keep their bits."""
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((16, 16, n, n)).astype("float32") / 12 for n in (3, 3, 1)]

    def body(emit, x, y):
        first, third, second = (relax.const(weight) for weight in weights)
        x = emit("third", relax.op.nn.conv2d(emit("first", relax.op.nn.conv2d(x, first)), third))
        y = emit("second", relax.op.nn.conv2d(emit("tanh", relax.op.tanh(y)), second))
        return relax.Tuple([x, y])

    mod = build_model(body, (2, 16, 8, 8), (2, 16, 8, 8))
    spec = replace(DEFAULT.weight.spec, quant_min=-16, quant_max=15)
    few = replace(DEFAULT, weight=rq.TensorConfig(spec, rq.observers.MSE()))
    spec = replace(DEFAULT.activation.spec, quant_min=0, quant_max=2)
    coarse = replace(DEFAULT, activation=rq.TensorConfig(spec, rq.observers.MinMax()))
    mapping = rq.QConfigMapping().set_global(few).set_module_name("second", coarse)
    data = [tuple(rng.standard_normal((2, 2, 16, 8, 8)).astype("float32")) for _ in range(32)]
    with pytest.warns(rq.AccuracyWarning, match="Back in float, 1 operator: second"):
        qmod = rq.quantize(mod, None, data, qconfig_mapping=mapping, backend="x86", callbacks=())
    guard = rq.ledger(qmod).guard
    assert (guard.reverted, guard.ranged, guard.widened) == (("second",), (), ())


@pytest.mark.parametrize(
    "use", [pytest.param(use_bits, marks=pytest.mark.slow), use_run_time_ranges]
)
def test_streams__weights_of_few_bits_get_all(use):
    """A model with state whose weights the guard widened: what is done about drift begins there."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((16, 16)).astype("float32")
    weight[0] = 12.0
    back = (rng.standard_normal((16, 16)) / 10).astype("float32")

    def body(emit, x, h):
        y = emit("first", relax.op.matmul(x, relax.const(weight)))
        z = emit("back", relax.op.matmul(h, relax.const(back)))
        new = emit("new", relax.op.tanh(emit("sum", relax.op.add(y, z))))
        return relax.Tuple([emit("out", relax.op.matmul(new, relax.const(weight))), new])

    mod = rq.with_state(
        build_model(body, (1, 16), (1, 16)), [rq.StateValue("y", (1, 16), "float32")]
    )
    data = rng.standard_normal((4, 12, 1, 16)).astype("float32")
    data[..., 0] *= 1e-3
    sequences = [rq.SampleSequence([*steps]) for steps in data]
    with pytest.warns(rq.AccuracyWarning, match="With weights of more bits"):
        qmod = rq.quantize(
            mod, None, sequences, qconfig_mapping=use(2), backend="x86", callbacks=()
        )
    guard = rq.ledger(qmod).guard
    assert "first" in guard.widened
    assert guard.ranged == ()
    assert guard.stream_sqnr > 20


@pytest.mark.slow
def test_search__weights_of_few_bits_get_all_and_stay_on_integers():
    """The bound is met without float; the mapping makes the same module again."""
    mod, data, other = draw_model()

    def decibels(expected, got):
        noise = np.sum((expected[0] - got[0]) ** 2)
        return min(10 * np.log10(np.sum(expected[0] ** 2) / max(noise, 1e-30)), 100.0)

    settings = {"backend": "x86", "callbacks": ()}
    qmod = rq.quantize(
        mod, None, data, qconfig_mapping=use_bits(3), metric=decibels, max_drop=80.0, **settings
    )
    ledger = rq.ledger(qmod)
    assert (ledger.search.reverted, ledger.search.is_met) == ((), True)
    assert "first" in ledger.search.widened
    assert [row.name for row in ledger.quantized if row.macs] == ["first", "second"]
    assert other.measure(qmod) > 20
    again = rq.QConfigMapping.from_dict(ledger.search.mapping)
    same = rq.quantize(mod, None, data, qconfig_mapping=again, guard="off", **settings)
    assert other.measure(same) == other.measure(qmod)


@pytest.mark.slow
def test_search__what_has_no_weight_of_few_bits_is_not_said_to_have_more():
    """One operator gets 8 bits for its weight, the other, whose data is at fault, is in float."""
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((64, 64)).astype("float32") for _ in range(2)]

    def body(emit, x, y):
        first, second = (relax.const(weight) for weight in weights)
        first = emit("first", relax.op.matmul(x, first))
        return relax.Tuple([first, emit("second", relax.op.matmul(y, second))])

    def rows_in_decibels(expected, got):
        """Of the worst output, for its median row, at most 100."""
        pairs = zip(expected, got, strict=True)
        ratios = [np.sum((a - b) ** 2, 1) / np.sum(a**2, 1) for a, b in pairs]
        return min(-10 * np.log10(max(np.median(ratio), 1e-10)) for ratio in ratios)

    mapping = use_bits(2, ("second",))
    draw = rng.standard_normal, lambda size: rng.standard_t(1.2, size)
    data = [tuple(of((1, 64)).astype("float32") for of in draw) for _ in range(64)]
    qmod = rq.quantize(
        build_model(body, (1, 64), (1, 64)),
        None,
        data,
        qconfig_mapping=mapping,
        metric=rows_in_decibels,
        max_drop=64.0,
        backend="x86",
        callbacks=(),
    )
    ledger = rq.ledger(qmod)
    assert ledger.search.is_met
    assert (ledger.search.widened, ledger.search.reverted) == (("first",), ("second",))
    row = ledger.row("second")
    assert ledger.search.dtype == ("int16" if row.quantized else "float32")
    assert ledger.row("first").quantized


@pytest.mark.parametrize("guard", ["revert", "off"])
def test_recalibrate__does_not_see_what_is_held_back(guard):
    """What was held back still says how the mended module does on other data."""
    mod, data, _ = draw_model()
    prepared = rq.prepare(mod, None, data, backend="x86")
    found = recalibrate(data, QuantizeSettings(guard=Guard(guard)))(prepared)
    shown = [batch for i, batch in enumerate(data) if guard == "off" or not is_held_back(i)]
    assert (len(shown) < len(data)) == (guard != "off")
    wanted = rq.calibrate(prepared, shown)
    assert found.parameters.keys() == wanted.parameters.keys()
    assert all(
        found.parameters[key].scale.tolist() == qparams.scale.tolist()
        for key, qparams in wanted.parameters.items()
    )
