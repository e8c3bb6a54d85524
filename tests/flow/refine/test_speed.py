"""only_if_faster: blocks that no kernel crosses, float only where all of the model gains, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import tvm
from float_models import build_model, draw_batches
from operator_names import list_operators

import relayquant as rq
from relayquant.demo import load_digits
from relayquant.flow.pipeline import keep_faster
from relayquant.flow.refine.speed import (
    Stopwatch,
    bind_run,
    find_faster_parts,
    find_fused,
    join_by,
)
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import Ledger
from relayquant.ir.rewrite import Graph

NAMES = ("conv1/relu", "block1/depthwise/relu", "block1/relu", "conv2/relu", "pool", "logits")


@pytest.fixture(scope="module")
def calibrated():
    demo = load_digits()
    data = [np.concatenate(demo.calibration)[:32]]
    prepared = rq.prepare(*rq.load(str(demo.model_path)), effort="fast", dataset=data)
    prepared = rq.calibrate(prepared, data)
    return prepared, rq.lower(rq.convert_to_reference(prepared)), data


class FakeStopwatch:
    """Microseconds by value of both forms; a whole model takes what its operators do and 2 for each
    quantize and dequantize.
    """

    def __init__(self, integer: Mapping[str, float], float_: Mapping[str, float]) -> None:
        self.times = {True: integer, False: float_}
        self.modules = 0

    def time_values(self, mod: tvm.IRModule) -> Mapping[str, float]:
        return self.times["qnn.quantize" in list_operators(mod)]

    def time_modules(self, mods: Sequence[tvm.IRModule]) -> list[float]:
        self.modules += len(mods)
        return [self.time_module(mod) for mod in mods]

    def time_module(self, mod: tvm.IRModule) -> float:
        kinds = list_operators(mod)
        borders = kinds.count("qnn.quantize") + kinds.count("qnn.dequantize")
        rows = {row.name: row.quantized for row in rq.ledger(mod).rows}
        return 2 * borders + sum(self.times[rows[name]].get(name, 0) for name in NAMES)


def watch(integer: Mapping[str, float], float_: Mapping[str, float]) -> Stopwatch:
    fake = FakeStopwatch(integer, float_)
    return Stopwatch(fake.time_values, fake.time_modules)


EQUAL = dict.fromkeys(NAMES, 10.0)


@pytest.mark.slow
def test_keep_faster__what_gains_more_than_its_conversions(calibrated):
    prepared, qmod, data = calibrated
    integer = {**EQUAL, "block1/relu": 30.0}
    changed, module = keep_faster(prepared, qmod, watch(integer, EQUAL), data, QuantizeSettings())
    ledger = rq.ledger(module)
    assert [row.name for row in ledger.floating] == ["block1/relu"]
    row = ledger.row("block1/relu")
    assert row.reason == "faster in float on this machine: 10000000.0 us, 30000000.0 us on integers"
    assert ledger.speed.reverted == ("block1/relu",)
    assert ledger.speed.before == 30 + 5 * 10 + 2 * 2
    assert ledger.speed.after == 10 + 5 * 10 + 5 * 2, "it has two inputs"
    assert Ledger.from_dict(ledger.to_dict()) == ledger
    # All other parameters are as they were, and the mapping makes the same choice again.
    assert all(changed.parameters[k] is prepared.parameters[k] for k in changed.parameters)
    mapping = rq.QConfigMapping.from_dict(ledger.speed.mapping)
    mod, params = rq.load(str(load_digits().model_path))
    again = rq.prepare(mod, params, qconfig_mapping=mapping, effort="fast")
    assert [op.name for op in again.plan.operators if not op.quantized] == ["block1/relu"]
    (expected,), (got,) = (rq.reference.run(mod, data) for mod in (prepared.mod, module))
    assert (expected.argmax(1) == got.argmax(1)).mean() > 0.9


def test_keep_faster__neighbours_share_conversions(calibrated):
    prepared, qmod, data = calibrated
    # Alone, each would lose: 3 gained, 4 for two conversions. With the pool there are two more.
    integer = {**EQUAL, "block1/depthwise/relu": 13.0, "block1/relu": 13.0, "pool": 10.2}
    _, module = keep_faster(prepared, qmod, watch(integer, EQUAL), data, QuantizeSettings())
    ledger = rq.ledger(module)
    assert ledger.speed.reverted == ("block1/depthwise/relu", "block1/relu")
    assert "us, with 1 others" in ledger.row("block1/relu").reason


@pytest.mark.parametrize(
    "integer",
    [
        EQUAL,  # nothing is faster
        {**EQUAL, "block1/relu": 13.9},  # conversions cost more
        {**EQUAL, "block1/relu": 15.0},  # a gain of less than 2 %
    ],
)
def test_keep_faster__nothing_to_gain_leaves_the_module(calibrated, integer):
    prepared, qmod, data = calibrated
    same, module = keep_faster(prepared, qmod, watch(integer, EQUAL), data, QuantizeSettings())
    assert same is prepared
    assert rq.ledger(module).floating == rq.ledger(qmod).floating
    assert rq.ledger(module).speed.reverted == ()
    assert "no operator in float makes it faster" in str(rq.ledger(module).speed)


def test_keep_faster__only_what_is_accepted(calibrated):
    prepared, qmod, data = calibrated
    stopwatch = watch({**EQUAL, "block1/relu": 50.0}, EQUAL)
    _, module = keep_faster(
        prepared, qmod, stopwatch, data, QuantizeSettings(), accept=lambda _: False
    )
    assert rq.ledger(module).speed.reverted == ()


def test_find_faster_parts__operators_that_share_a_kernel_stay_together(calibrated):
    prepared, qmod, _ = calibrated
    graph, plan = Graph(prepared.mod), prepared.plan
    owners = {value: op.name for op in plan.operators for value in op.values}
    # On integers the second is fused into the third, in float the third into the fourth.
    times = [{n: 1.0 for n in NAMES if n != NAMES[at]} for at in (1, 2)]
    blocks = [b for b in join_by(plan, find_fused(plan, graph, owners, times)) if len(b) > 1]
    assert blocks == [list(NAMES[1:4]), ["flatten", "logits"]]
    (part,) = find_faster_parts(prepared, qmod, watch({**times[0], NAMES[2]: 5.0}, times[1]))
    assert part.operators == NAMES[1:4]
    assert (part.integer, part.float_) == (6.0, 2.0)


@pytest.mark.slow
def test_stopwatch__names_of_both_forms_are_values_of_the_model(calibrated):
    prepared, qmod, data = calibrated
    stopwatch = Stopwatch.on_this_machine([data[0][:2]])
    for mod in (prepared.mod, qmod):
        seconds = stopwatch.time_values(mod)
        assert set(NAMES) <= set(seconds)
        assert min(seconds.values()) >= 0
    assert bind_run(qmod, [data[0][:2]])() is not None


@pytest.mark.parametrize("promise", [{"strict": True}, {"input_dtypes": {"image": "uint8"}}])
def test_quantize__keep_faster_and_promised_integers_exclude_each_other(promise):
    demo = load_digits()
    with pytest.raises(rq.ConfigError, match="only_if_faster=True"):
        rq.quantize(
            *rq.load(str(demo.model_path)), demo.calibration, only_if_faster=True, **promise
        )


@pytest.mark.parametrize("with_metric", [False, True])
def test_quantize__keep_faster_measures_and_says_so(with_metric, monkeypatch):
    mod = build_model(lambda emit, x: emit.dense("y", emit.dense("h", x, 8), 4), (4, 8))
    data = draw_batches(mod, 2)

    def on_this_machine(inputs):
        """A clock by which integers take twice as long as floats, whatever they do."""
        assert [array.shape for array in inputs] == [(4, 8)]
        seconds = dict.fromkeys(("h", "y"), 1.0)

        def time_module(module):
            return 1.0 + sum(row.quantized for row in rq.ledger(module).rows)

        return Stopwatch(
            lambda m: {n: s * (1 + ("qnn" in m.script())) for n, s in seconds.items()},
            lambda mods: [time_module(m) for m in mods],
        )

    monkeypatch.setattr(Stopwatch, "on_this_machine", staticmethod(on_this_machine))
    metric = {"metric": lambda a, b: -float(np.abs(a[0] - b[0]).max()), "max_drop": 9.0}
    options = metric if with_metric else {}
    qmod = rq.quantize(mod, None, data, effort="fast", only_if_faster=True, **options)
    ledger = rq.ledger(qmod)
    assert ledger.speed.reverted == ("h", "y")
    assert (ledger.speed.before, ledger.speed.after) == (3.0, 1.0)
    assert [row.quantized for row in ledger.rows] == [False, False]
    if with_metric:
        assert ledger.search.score == pytest.approx(0.0, abs=1e-5)
        assert rq.QConfigMapping.from_dict(ledger.search.mapping).to_dict() == ledger.speed.mapping
