"""guard: silent on what works; finds, names and mends what was broken on purpose."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.analysis.outputs import (
    OutputGap,
    PartMeter,
    count_differing,
    measure_gaps,
    rate_samples,
)
from relayquant.config import Guard, GuardSettings
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.data.sampling import is_held_back
from relayquant.demo import load_digits
from relayquant.flow.pipeline import guard_module
from relayquant.flow.refine import guard as guard_of_flow
from relayquant.flow.refine import reverting
from relayquant.flow.refine.guard import explain_deviation, find_first_off
from relayquant.flow.refine.kept_samples import count_all_macs, plan_looks, take_sample
from relayquant.flow.refine.look import (
    deviates,
    deviates_slightly,
    is_settled,
    pick_worst,
)
from relayquant.flow.refine.prepared_edit import change_operators
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import GuardResult, Ledger
from relayquant.ir.rewrite import rewrite_main
from relayquant.ir.rewrite.graph import constant_value
from relayquant.plots.verdict import Grade, Verdict

BROKEN = "conv2/relu"


def clip_one(info, samples):
    """A fiftieth of the range for one value: all above it is lost."""
    high = max(float(array.max()) for array in samples)
    low = min(float(array.min()) for array in samples)
    return rq.choose_qparams(low, high / (50 if info.name == BROKEN else 1), info.spec)


@pytest.fixture(scope="module")
def broken(digits):
    """(calibrated model, integer module) with one bad range."""
    mod, params, data = digits
    prepared = rq.prepare(mod, params, effort="fast")
    prepared = rq.calibrate(prepared, data, observer=clip_one)
    return prepared, rq.lower(rq.convert_to_reference(prepared))


@pytest.fixture(scope="module")
def mended(digits):
    with pytest.warns(rq.AccuracyWarning) as caught:
        qmod = rq.quantize(*digits, observer=clip_one, effort="fast", guard=Guard.REVERT)
    return qmod, caught


def guard(*args):
    """As `guard_module`, and warn."""
    return guard_module(*args).tell_user()


def test_guard__silent_on_a_good_model(digits):
    mod, params, data = digits
    prepared = rq.calibrate(rq.prepare(mod, params, effort="fast"), data)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded = guard(prepared, qmod, data, QuantizeSettings(guard=Guard.REVERT))
    seen = rq.ledger(guarded).guard
    assert seen is not None
    assert (seen.samples, seen.deviates, seen.operator, seen.reverted) == (32, False, "", ())
    assert seen.sqnr > 25
    assert seen.disagreement == 0
    assert rq.ledger(guarded).rows == rq.ledger(qmod).rows


@pytest.mark.slow
def test_guard__puts_back_what_breaks_the_outputs(digits, mended):
    qmod, caught = mended
    seen = rq.ledger(qmod).guard
    assert seen.deviates
    assert seen.operator == BROKEN
    assert seen.sqnr_before < 10 < 20 < seen.sqnr
    assert seen.reverted
    floating = {row.name: row for row in rq.ledger(qmod).floating}
    for name in seen.reverted:
        assert "reverted to float by the guard" in floating[name].reason
        assert "relayquant.lint" in floating[name].advice
        assert name in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points at who called quantize"
    # The value with the bad range is rounded no more, and what is before it stays.
    assert {"conv1/relu", "block1/relu"} <= {row.name for row in rq.ledger(qmod).quantized}
    (gap,) = measure_gaps(rq.prepare(*digits[:2]).mod, qmod, [{"image": digits[2][0]}])
    assert gap.sqnr > 20


@pytest.mark.slow
def test_guard__keeps_the_parameters_of_the_rest(broken, mended):
    _, whole = broken
    rows = {row.name: row for row in rq.ledger(whole).rows}
    kept = rq.ledger(mended[0]).quantized
    assert kept
    for row in kept:
        if row.scale:
            assert row.scale == rows[row.name].scale


@pytest.mark.parametrize(
    ("effort", "action"), [("fast", "WARN"), ("balanced", "REVERT"), ("best", "REVERT")]
)
def test_guard__action_by_effort(effort, action):
    assert GuardSettings().find_action(effort) is Guard[action]
    assert GuardSettings(Guard.OFF).find_action(effort) is Guard.OFF


def test_guard__warning_names_the_operator(digits, broken):
    with pytest.warns(rq.AccuracyWarning, match="first operator that is off is 'conv2/relu'"):
        qmod = guard(*broken, digits[2], QuantizeSettings(guard=None))
    ledger = rq.ledger(qmod)
    assert not ledger.floating
    assert (ledger.guard.deviates, ledger.guard.operator) == (True, BROKEN)


def test_guard__off_runs_nothing(broken):
    def items():
        raise AssertionError("the data was read")

    prepared, qmod = broken
    assert guard(prepared, qmod, items, QuantizeSettings(guard=Guard.OFF)) is qmod


def test_guard__strict_keeps_all_integers(digits, broken):
    with pytest.warns(rq.AccuracyWarning, match="with strict=True no operator goes back"):
        qmod = guard(*broken, digits[2], QuantizeSettings(guard=Guard.REVERT, strict=True))
    assert not rq.ledger(qmod).floating


def test_guard__keeps_integers_that_main_takes(digits, broken):
    prepared, qmod = broken
    (value,) = prepared.inputs
    prepared = replace(prepared, inputs=(replace(value, requested="uint8"),))
    with pytest.warns(rq.AccuracyWarning, match="with input_dtypes or output_dtypes no operator"):
        qmod = guard(prepared, qmod, digits[2], QuantizeSettings(guard=Guard.REVERT))
    assert not rq.ledger(qmod).floating


def test_guard__everything_in_float_if_nothing_less_will_do(digits, broken):
    settings = GuardSettings(Guard.REVERT, min_sqnr=90, target_sqnr=90)
    with pytest.warns(rq.AccuracyWarning):
        qmod = guard(*broken, digits[2], QuantizeSettings(guard=settings))
    assert not rq.ledger(qmod).quantized


def test_guard__names_the_first_value_that_is_off(digits, broken):
    prepared, qmod = broken
    assert find_first_off(prepared, qmod, [{"image": digits[2][0][:4]}]) == BROKEN


def test_change_operators__a_value_without_any_is_calibrated(digits, broken):
    prepared, _ = broken
    known = {k: v for k, v in prepared.parameters.items() if k != "conv1/relu"}
    bare = replace(prepared, parameters=known)
    changed = change_operators(
        bare, {"logits": None}, lambda model: rq.calibrate(model, digits[2], observer=clip_one)
    )
    assert changed.parameters.keys() == {group.key for group in changed.plan.groups}


def look(prepared, data, settings):
    """Batches of the first look."""
    first, *_ = take_sample(prepared, data, settings).rounds(plan_looks(prepared, settings))
    return [part.batch for part in first]


def test_take_sample__few_samples_spread_over_the_data(broken):
    prepared, _ = broken

    def items():
        for i in range(100):
            yield np.full((3, 1, 8, 8), i, "float32")

    (batch,) = look(prepared, items, GuardSettings())
    assert batch["image"].shape == (8, 1, 8, 8)
    assert np.diff(batch["image"][:, 0, 0, 0]).min() >= 8
    # What is dear is done for four samples.
    (batch,) = look(prepared, items, GuardSettings(work=1))
    assert len(batch["image"]) == 4
    # One large batch.
    images = np.arange(400, dtype="float32").repeat(64).reshape(400, 1, 8, 8)
    (batch,) = look(prepared, [images], GuardSettings())
    assert batch["image"][:, 0, 0, 0].tolist() == [50 * i for i in range(8)]


def test_take_sample__buffer_that_the_reader_uses_again(broken):
    prepared, _ = broken

    def items():
        buffer = np.zeros((1, 1, 8, 8), "float32")
        for i in range(4):
            buffer[:] = i
            yield buffer

    (batch,) = look(prepared, items, GuardSettings())
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_quantize__data_is_read_once_with_the_guard(digits):
    mod, params, data = digits
    read = []

    def items():
        for image in data[0][:20]:
            read.append(1)
            yield image[None]

    qmod = rq.quantize(mod, params, items, effort="fast")
    assert len(read) == 20
    assert rq.ledger(qmod).guard.samples == 20


def test_guard__a_sample_that_is_lost_among_others_is_seen(digits, broken):
    """Of an output that holds no answers: one bad sample of many is named, none is put back."""
    prepared, qmod = broken
    images = [{"image": digits[2][0][:8]}]
    gaps = measure_gaps(prepared.mod, qmod, images)
    each = [
        measure_gaps(prepared.mod, qmod, [{"image": image[None]}])[0].sqnr
        for image in images[0]["image"]
    ]
    np.testing.assert_allclose(gaps[0].each, each, rtol=1e-3)
    (worst,) = pick_worst(prepared, images, gaps, 1)
    np.testing.assert_array_equal(worst["image"][0], images[0]["image"][np.argmin(each)])
    doubtful = partial(deviates_slightly, GuardSettings(), parts={})
    assert doubtful([OutputGap(20.9, each=(30.0, 25.0, 0.9))])
    assert doubtful([OutputGap(12.3, 2, 8)])
    assert doubtful([OutputGap(12.3)])
    assert not doubtful([OutputGap(12.3, 0, 8, each=(5.0, 20.0))])  # the answers stay
    assert not doubtful([OutputGap(16.0, each=(12.0, 20.0))])


def test_rate_samples__silence_is_no_loss():
    energies = [np.array([[4.0, 4.0], [0.04, 4.0]]), np.array([[0.0], [0.0001]])]
    rated = rate_samples(energies)
    np.testing.assert_allclose(rated[:2], [20, 0], atol=1e-9)
    assert rated[2] > 20


def test_guard__advises_best_effort__but_not_behind_it():
    seen = GuardResult(8, 17.0, deviates_slightly=True)
    assert "effort='best' or quantize(metric=) may help" in explain_deviation(seen, "", "balanced")
    text = explain_deviation(seen, "", "best")
    assert "usually cost; quantize(metric=) may help" in text
    assert "effort=" not in text


def test_guard__warns_in_between(digits, broken):
    settings = GuardSettings(min_sqnr=-20, disagreement=1, doubtful_disagreement=0)
    with pytest.warns(rq.AccuracyWarning, match="more than 8 bits usually cost"):
        qmod = guard(*broken, digits[2], QuantizeSettings(guard=settings))
    seen = rq.ledger(qmod).guard
    assert (seen.deviates, seen.deviates_slightly, seen.operator) == (False, True, BROKEN)
    assert Ledger.from_dict(rq.ledger(qmod).to_dict()).guard == seen


def test_guard__a_weak_part_that_the_other_hides_is_named():
    """Places of a large range stand beside scores that a bad range spoils."""

    def body(emit, x):
        places = emit("places", relax.op.multiply(emit.dense("first", x, 8), relax.const(100.0)))
        hidden = emit("hidden", relax.op.nn.relu(emit.dense("inner", x, 8)))
        return emit("both", relax.op.concat([places, emit.dense("scores", hidden, 8)], 1))

    def clip_scores(info, samples):
        high = max(float(np.abs(array).max()) for array in samples)
        high /= 8 if info.name == "hidden" else 1
        return rq.choose_qparams(-high, high, info.spec)

    mod = build_model(body, ("n", 16))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(8, 16)).astype("float32")} for _ in range(8)]
    observers = [(clip_scores, True), (None, False)]
    for observer, is_weak in observers:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", rq.AccuracyWarning)
            qmod = rq.quantize(mod, None, data, observer=observer, callbacks=())
        seen = rq.ledger(qmod).guard
        rows = {"x": np.concatenate([batch["x"] for batch in data])[[*seen.numbers]]}
        real, got = (rq.reference.run(each, rows)[0][:, 8:] for each in (mod, qmod))
        decibels = 10 * np.log10((real**2).sum() / ((got - real) ** 2).sum())
        assert bool(decibels < 15) is is_weak
        assert seen.deviates_slightly is is_weak
        assert seen.part == "scores"
        assert seen.part_sqnr == pytest.approx(decibels, abs=0.01)
        assert seen.sqnr > 30
        text = f"the part 'scores' has {decibels:.1f} dB SQNR"
        assert [text in str(each.message) for each in caught] == [True] * is_weak
        page = rq.report(mod, None, qmod, [rows], samples=64, rank=False).data
        assert (Verdict.of(page).grade is Grade.GOOD) is not is_weak
        assert text in str(page.compare)
        assert text in Verdict.of(page).observations[0].text
        assert text in rq.ledger(qmod).summarize()


def test_part_meter__measures_no_whole_output():
    def body(emit, x):
        both = emit("both", relax.op.concat([emit.dense("a", x, 2), emit.dense("b", x, 2)], 1))
        return relax.Tuple([both, emit("whole", relax.op.add(x, x))])

    mod, batch = build_model(body, (2, 4)), {"x": np.ones((2, 4), "float32")}
    meter, results = PartMeter(mod), rq.reference.run(mod, batch)
    meter.measure(batch, results, results)
    assert [*meter.gaps] == ["a", "b"]


def test_describe_part__of_a_part_as_good_as_the_outputs_is_empty():
    seen = GuardResult(8, 30.0, part="scores", part_sqnr=30.0)
    assert not seen.describe_part()
    assert replace(seen, part_sqnr=29.0).describe_part() == "the part 'scores' has 29.0 dB SQNR"


def test_guard__integers_alone_are_wrong_one_operator_goes_back():
    """What the simulation does not see: neither data nor ranges are blamed, nor other layers."""

    def body(emit, x):
        y = emit("hidden", relax.op.nn.relu(emit.dense("hidden.m", x, 12)))
        y = emit("middle", relax.op.nn.relu(emit.dense("middle.m", y, 12)))
        return emit.dense("out", y, 4)

    mod = build_model(body, (4, 8))
    data = draw_batches(mod, 8)
    prepared = rq.calibrate(rq.prepare(mod, effort="fast"), data)
    right = rq.lower(rq.convert_to_reference(prepared))

    def damage(emitter, binding):
        value = emitter.get(binding.value)
        if binding.var.name != "middle.acc":
            return value
        array = constant_value(value.args[1])
        wrong = relax.const(-array.astype("int8"), "int8")
        return tvm.ir.Call(value.op, [value.args[0], wrong, *value.args[2:]], value.attrs)

    wrong = rewrite_main(right, damage)
    with pytest.warns(rq.AccuracyWarning, match="neither ranges nor data") as caught:
        mended = guard(prepared, wrong, data, QuantizeSettings(guard=Guard.REVERT))
    assert rq.ledger(mended).guard.reverted == ("middle",)
    assert "relayquant.lint" not in str(caught[0].message)
    assert rq.ledger(mended).guard.sqnr > 25


def test_guard__integers_alone_are_wrong_where_no_value_is_in_both_modules(monkeypatch):
    """The most sensitive operator goes to float then; none is named that does not exist."""
    mod = build_model(lambda emit, x: emit.dense("out", x, 4), (4, 8))
    data = draw_batches(mod, 8)
    prepared = rq.calibrate(rq.prepare(mod, effort="fast"), data)
    right = rq.lower(rq.convert_to_reference(prepared))

    def damage(emitter, binding):
        value = emitter.get(binding.value)
        if binding.var.name != "out.acc":
            return value
        wrong = relax.const(-constant_value(value.args[1]).astype("int8"), "int8")
        return tvm.ir.Call(value.op, [value.args[0], wrong, *value.args[2:]], value.attrs)

    for module in (reverting, guard_of_flow):
        monkeypatch.setattr(module, "find_first_off", lambda *args: "")
    wrong = rewrite_main(right, damage)
    with pytest.warns(rq.AccuracyWarning, match="float, 1 operator: out"):
        mended = guard(prepared, wrong, data, QuantizeSettings(guard=Guard.REVERT))
    assert rq.ledger(mended).guard.reverted == ("out",)
    with pytest.warns(rq.AccuracyWarning, match="No operator has a result that both models show"):
        guard(prepared, wrong, data, QuantizeSettings(guard=Guard.WARN))


def test_is_enough__without_outputs():
    assert reverting.is_enough([], [], GuardSettings())


def test_count_differing__clear_answers_only():
    expected = np.array([[0.0, 1.0, 10.0], [0.0, 9.9, 10.0], [5.0, 0.0, 0.0]])
    # The first is clearly another, the second a near tie, the third the same.
    got = np.array([[0.0, 3.0, 2.0], [0.0, 10.0, 9.9], [1.0, 0.0, 0.0]])
    assert count_differing(expected, got) == (1, 3)
    assert count_differing(expected[:, :, None, None], got[:, :, None, None]) == (1, 3)
    assert count_differing(expected + 1e6, got - 3) == (1, 3)


def test_count_differing__what_is_no_answer():
    assert count_differing(np.zeros((4, 1)), np.ones((4, 1))) == (0, 0)
    assert count_differing(np.zeros((2, 3, 4)), np.ones((2, 3, 4))) == (0, 0)
    assert count_differing(np.zeros(()), np.ones(())) == (0, 0)
    assert count_differing(np.array([1, 2, 3]), np.array([1, 2, 4])) == (1, 3)
    assert count_differing(np.full((2, 3), np.nan), np.zeros((2, 3))) == (0, 0)


def test_settings__what_parts():
    settings = GuardSettings()
    assert not deviates(settings, [OutputGap(15.0, 0, 8), OutputGap(float("inf"))])
    assert deviates(settings, [OutputGap(30.0), OutputGap(9.0)])
    assert deviates(settings, [OutputGap(30.0, 5, 8)])
    assert deviates(settings, [OutputGap(float("-inf"))])


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"work": 0},
        {"disagreement": 0},
        {"disagreement": float("nan")},
        {"min_sqnr": 30.0},
        {"min_sqnr": float("nan")},
        {"action": "loose"},
    ],
)
def test_settings__wrong_ones_are_errors(wrong):
    with pytest.raises(rq.ConfigError, match="allowed"):
        GuardSettings(**wrong)


def test_quantize__wrong_guard_is_an_error(digits):
    with pytest.raises(rq.ConfigError, match="guard is 'loud'; allowed: 'revert', 'warn', 'off'"):
        rq.quantize(*digits, guard="loud")


def test_ledger__guard_is_read_back_exactly(mended):
    ledger = rq.ledger(mended[0])
    assert ledger.guard is not None
    assert Ledger.from_dict(ledger.to_dict()) == ledger


def test_measure_gaps__integers_are_answers_and_no_amounts():
    """An index that is one off is as wrong as any other: none has a signal to noise ratio."""

    def find_place(sign):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((1, 50), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                y = builder.emit(relax.op.multiply(x, relax.const(sign, "float32")))
                place = builder.emit(relax.op.argmax(y, 1))
                out = builder.emit_output(relax.Tuple([x, place]))
            builder.emit_func_output(out)
        return builder.get()

    x = np.random.default_rng(0).normal(size=(1, 50)).astype("float32")
    _, same = measure_gaps(find_place(1.0), find_place(2.0), [{"x": x}])
    _, other = measure_gaps(find_place(1.0), find_place(-1.0), [{"x": x}])
    assert same.sqnr == other.sqnr == float("inf")
    assert (same.disagreement, other.disagreement) == (0, 1)
    assert deviates(GuardSettings(), [other])
    assert other.worst <= 0, "the sample is found as the worst"


@pytest.mark.parametrize(
    ("differing", "samples", "wanted"),
    [(0, 8, False), (1, 16, True), (1, 32, False), (3, 128, False), (4, 128, True)],
)
def test_deviates__where_more_than_one_percent_is_certain(differing, samples, wanted):
    assert deviates(GuardSettings(), [OutputGap(30.0, differing, samples)]) is wanted


@pytest.mark.parametrize(("differing", "wanted"), [(0, True), (1, False), (20, True)])
def test_is_settled__few_other_answers_ask_for_more_samples(differing, wanted):
    assert is_settled(GuardSettings(), [OutputGap(30.0, differing, 32)]) is wanted


def test_measure_gaps__nan_is_the_largest_gap(digits, broken):
    prepared, qmod = broken
    data = open_dataset(digits[2], describe_inputs(prepared.mod))
    (same,) = measure_gaps(prepared.mod, prepared.mod, data)
    assert same.sqnr == float("inf")
    assert (same.differing, same.samples) == (0, 64)
    (gap,) = measure_gaps(prepared.mod, qmod, data)
    assert gap.sqnr < 10


def test_find_first_off__zero_points_are_taken_off():
    """Results around 128: without their zero points each would be off, the first one be named."""

    def body(emit, x):
        for name in "abc":
            x = emit.conv(name, x)
        return x

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    prepared = rq.calibrate(rq.prepare(mod, None, backend="x86", effort="fast"), data)
    qmod = rq.lower(rq.convert_to_reference(prepared), prepared.backend)
    rows = [row for row in rq.ledger(qmod).quantized if row.zero_point]
    assert all(64 < row.zero_point[0] < 192 for row in rows)
    sqnr = {
        row.name: row.sqnr for row in rq.compare(mod, None, qmod, data).rows if row.name in "abc"
    }
    worst = min(sqnr, key=lambda name: sqnr[name])
    assert worst != "a"
    assert find_first_off(prepared, qmod, data) == worst
    assert find_first_off(prepared, qmod, data, decibels=99.0) == "a"


RANGED = rq.QConfig(
    rq.TensorConfig(rq.QSpec("uint8", is_dynamic=True)),
    rq.get_backend_config().default_qconfig.weight,
)
WIDER = rq.get_backend_config().default_qconfig
#: Operators by their damage, the worst first.
ORDER = tuple(f"o{i}" for i in range(12))


@pytest.fixture
def revert(monkeypatch):
    """`revert_operators` of a model that is nothing but a function: names that are put back -> gap
    of the outputs. Returns what it returns, and all that was tried. On the calibration graph, the
    samples that decide need the operators `known`; None: all.
    """

    def run(
        gap, simulated=("o8",), off=(), ranged=(), bound=99.0, wider=(), known=None, exact=99.0
    ):
        tried: list[tuple[str, ...]] = []
        others = iter([*off, *[""] * 20])

        def build(changes):
            tried.append(tuple(changes) if None in changes.values() else dict(changes))
            return tuple(changes)

        for name, stand_in in {
            "rank_operators": lambda *_: list(ORDER),
            "search_simulated": lambda *_: list(simulated),
            "find_first_off": lambda *_: next(others),
            "measure_gaps": lambda *_: [gap(set(tried[-1]))],
            "compute_results": lambda *_: [],
            "Simulation": lambda *_: SimpleNamespace(
                prepared=None, sqnr=lambda _: 99.0 if off else 0.0
            ),
            "find_rounding_operators": lambda *_: [],
            "find_run_time_qconfigs": lambda _: dict.fromkeys(ranged, RANGED),
            "find_wider_weights": lambda _: dict.fromkeys(wider, WIDER),
            "start_trials": lambda *_: lambda names: known is not None and known <= {*names},
            "bound_sqnr": lambda _: exact,
            "measure_ranges": lambda *_: [],
            "forecast_sqnr": lambda *_: bound,
            "count_all_macs": lambda *_: 0,
            "pick_bad": lambda *_: [],
            "plan_looks": lambda *_: [8],
            "open_dataset": lambda *_: None,
            "describe_inputs": lambda *_: None,
        }.items():
            monkeypatch.setattr(reverting, name, stand_in)
        prepared = SimpleNamespace(mod=None, mapping=rq.QConfigMapping())
        look = SimpleNamespace(batches=[], gaps=[OutputGap(0.0)])
        suspects = reverting.find_suspects(prepared, None, look, QuantizeSettings())
        found = reverting.revert_operators(suspects, build)
        # The module and the gaps are those of the names.
        assert found.module == tuple(found.changes)
        assert found.gaps == [gap(set(found.changes))]
        assert suspects.is_arithmetic == bool(off)
        return found.names, tried

    return run


@pytest.mark.parametrize("needed", [1, 9, 12, 99])
def test_revert__twice_as_many_more_go_while_the_outputs_part(revert, needed):
    """What the simulation named stays among them, wherever it stands in the order; nothing more is
    tried where that is enough, and all is tried where nothing is.
    """
    names, tried = revert(lambda names: OutputGap(0.0 if len(names) < needed else 60.0))
    steps = [("o8",), ("o0", "o1", "o2", "o8"), ORDER[:9], ORDER]
    wanted = next((step for step in steps if len(step) >= needed), ORDER)
    count = steps.index(wanted) + 1
    assert tried[:count] == steps[:count]
    # All are needed, so each trial fails, and the next one spares half as many. What was tried
    # before is left out: of 11, the half of 6 is the step before.
    halves = {1: [], 9: [4, 2, 1, 1], 12: [6, 2, 1, 1], 99: []}[needed]
    assert [len(wanted) - len(fewer) for fewer in tried[count:]] == halves
    assert all("o8" in fewer for fewer in tried), "what the simulation named stays"
    assert names == wanted


@pytest.mark.parametrize("needed", range(5, 10))
def test_revert__no_more_stay_in_float_than_must(revert, needed):
    """Where it is their number that counts, bisection finds it; nothing is tried twice."""
    names, tried = revert(lambda names: OutputGap(0.0 if len(names) < needed else 60.0))
    assert len(names) == needed
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("last", range(11))
def test_revert__the_calibration_graph_says_how_many_more_go(revert, last):
    """As many as the samples that decide need there: no modules of more, and none of fewer."""
    known = {"o0", f"o{last}"}
    names, tried = revert(lambda names: OutputGap(60.0 if known <= names else 0.0), known=known)
    steps = [("o8",), tuple(each for each in ORDER if each in ORDER[: last + 1] or each == "o8")]
    assert tried == steps
    assert names == steps[-1]


def test_revert__where_the_calibration_graph_names_too_few_more_go(revert):
    """Of what goes then, as many are taken back as can be; nothing that the graph named."""
    needed = {"o2", "o3"}
    names, tried = revert(lambda names: OutputGap(60.0 if needed <= names else 0.0), known={"o1"})
    assert tried[:3] == [("o8",), ("o0", "o1", "o8"), (*ORDER[:7], "o8")]
    assert names == ("o0", "o1", "o2", "o3", "o8")
    assert all({"o0", "o1", "o8"} <= {*fewer} for fewer in tried[1:])


@pytest.mark.parametrize(
    ("whole", "spared", "taken_back"),
    [
        (OutputGap(60.0), OutputGap(20.0), True),
        (OutputGap(60.0), OutputGap(19.0), False),  # the outputs follow, and not as they should
        (OutputGap(17.0), OutputGap(17.0), True),  # more of them do not reach it either
        (OutputGap(60.0), OutputGap(30.0, 5, 8), False),  # other answers
    ],
)
def test_revert__what_can_be_spared_is_taken_back(revert, whole, spared, taken_back):
    """Of o0, o1, o2 and o8, only o1 can be."""

    def gap(names):
        if not {"o0", "o2", "o8"} <= names:
            return OutputGap(0.0)
        return whole if "o1" in names else spared

    names, tried = revert(gap)
    assert names == tuple(
        name for name in ("o0", "o1", "o2", "o8") if name != "o1" or not taken_back
    )
    removed = [{"o0", "o1", "o2", "o8"} - set(fewer) for fewer in tried[2:]]
    assert removed == [{"o1", "o2"}, {"o2"}, {"o1"}], "the least sensitive first"


@pytest.mark.parametrize(
    ("bound", "exact", "built"), [(20.0, 20.0, 2), (19.9, 20.0, 0), (99.0, 19.9, 0)]
)
def test_revert__ranges_at_run_time_come_first_where_weights_leave_room(
    revert, bound, exact, built
):
    """Modules with ranges of the run time are built where the target is expected of them."""
    gap = OutputGap(17.0)
    names, tried = revert(lambda _: gap, ("o7",), (), ("o6", "o7"), bound, exact=exact)
    milder = [{"o7": RANGED}, {"o7": RANGED, "o6": RANGED}]
    assert tried == [*milder[:built], ("o7",)]
    assert names == ("o7",)


@pytest.mark.parametrize("needed", [{"o7"}, {"o6", "o7"}, {"o7", "o8"}])
def test_revert__weights_of_all_bits_come_before_float(revert, needed):
    """First of the suspects; these in float come before all that have few bits."""
    names, tried = revert(
        lambda names: OutputGap(40.0 if needed <= names else 0.0), ("o7",), wider=("o6", "o7")
    )
    milder = [{"o7": WIDER}, ("o7",), {"o7": WIDER, "o6": WIDER}]
    count = 1 if needed == {"o7"} else 3
    assert tried[:count] == milder[:count]
    assert (names == ()) == ("o8" not in needed)
    assert (len(tried) == count) == ("o8" not in needed)


def test_revert__weights_of_few_bits_stay_where_no_suspect_has_them(revert):
    """Nothing but the suspect is to blame: others keep the bits that the user gave them."""
    for enough in (1, 4, 99):
        names, tried = revert(
            lambda names, enough=enough: OutputGap(40.0 if len(names) >= enough else 0.0),
            wider=("o6", "o7"),
        )
        assert tried[:2] == [("o8",), ("o0", "o1", "o2", "o8")][: 1 + (enough > 1)]
        assert {"o6", "o7"} <= set(names) or enough < 99


def test_revert__weights_of_few_bits_stay_where_suspects_in_float_are_enough(revert):
    """The outputs do not deviate any more, though they do not reach the target."""
    names, tried = revert(lambda _: OutputGap(17.0), ("o7",), wider=("o6", "o7"))
    assert tried == [{"o7": WIDER}, ("o7",)]
    assert names == ("o7",)


def test_revert__where_integers_are_wrong_the_next_that_is_off_goes_too(revert):
    names, tried = revert(
        lambda names: OutputGap(60.0 if {"o3", "o5"} <= names else 0.0), off=("o3", "o5")
    )
    assert tried[:2] == [("o3",), ("o3", "o5")]
    assert names == ("o3", "o5")


def scale_some(images, places, factor):
    """Samples of which a few are far larger than the others: a batch each."""
    changed = images.copy()
    changed[list(places)] *= np.float32(factor)
    return [image[None] for image in changed]


@pytest.mark.slow
def test_guard__damage_to_few_samples_is_seen(digits):
    """Large activations on every 12th sample, which a range for the others clips; samples that are
    evenly spread are never among them.
    """
    mod, params, _ = digits
    images = np.concatenate(load_digits().calibration)[:96]
    rare = range(5, 96, 12)
    data = scale_some(images, rare, 12)

    def clip_rare(info, samples):
        arrays = [array for i, array in enumerate(samples) if i not in rare]
        high = max(float(array.max()) for array in arrays)
        return rq.choose_qparams(min(float(array.min()) for array in arrays), high, info.spec)

    prepared = rq.calibrate(rq.prepare(mod, params, effort="fast"), data, observer=clip_rare)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    (whole,) = measure_gaps(prepared.mod, qmod, [{"image": image} for image in data])
    assert whole.sqnr < 15

    def see(**changes):
        settings = GuardSettings(Guard.WARN, **changes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guarded = guard(prepared, qmod, data, QuantizeSettings(guard=settings))
        kinds = {w.category for w in caught} & {rq.AccuracyWarning}
        return rq.ledger(guarded).guard, bool(kinds)

    few, is_warned = see(samples=8)
    assert not few.deviates
    assert not is_warned
    assert few.sqnr > 25
    seen, is_warned = see()
    assert seen.deviates
    assert is_warned
    assert set(rare) & set(seen.numbers)
    assert seen.worst_number in rare
    assert len(set(seen.numbers)) == seen.samples > 8
    assert seen.total == 96
    assert seen.sqnr == pytest.approx(whole.sqnr, abs=6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::relayquant.DataWarning")
def test_guard__validation_is_what_it_looks_at(digits):
    """Samples that calibration did not read: here of a kind that it never saw."""
    mod, params, data = digits
    with warnings.catch_warnings():
        warnings.simplefilter("error", rq.AccuracyWarning)
        good = rq.quantize(mod, params, data, effort="fast", validation_dataset=data[0][:40])
    assert rq.ledger(good).guard.is_held_out
    assert rq.ledger(good).guard.total == 40
    assert "of 40 validation samples" in str(rq.ledger(good).guard)
    with pytest.warns(rq.AccuracyWarning, match=r"\d+ of 40 validation samples"):
        bad = rq.quantize(mod, params, data, effort="fast", validation_dataset=[data[0][:40] * 12])
    assert rq.ledger(bad).guard.deviates
    with pytest.raises(rq.ConfigError, match="got validation_dataset but no metric"):
        rq.quantize(mod, params, data, guard=Guard.OFF, validation_dataset=data)


def test_guard__wrong_validation_is_an_error_before_calibration(digits):
    mod, params, _ = digits

    def items():
        raise AssertionError("the data was read")

    with pytest.raises(rq.DataError, match="rank 2 instead of 4"):
        rq.quantize(
            mod, params, items, effort="fast", validation_dataset=[np.zeros((1, 8), "float32")]
        )


@pytest.mark.slow
def test_guard__prefers_samples_that_nothing_was_tuned_on(digits):
    mod, params, _ = digits
    images = np.concatenate(load_digits().calibration)
    data = [image[None] for image in images[:60]]
    shown = [number for number in range(60) if not is_held_back(number)]
    prepared = rq.calibrate(rq.prepare(mod, params), [data[number] for number in shown])
    assert prepared.tuned.judged
    seen = rq.ledger(rq.quantize(mod, params, data)).guard
    judged, fitted = (
        {shown[place] for place in places}
        for places in (prepared.tuned.judged, prepared.tuned.fitted)
    )
    assert judged.isdisjoint(seen.numbers)
    assert seen.tuned == len(fitted & set(seen.numbers))
    # What calibration did not read at all comes first.
    assert seen.numbers[: seen.held_back] == (23, 31, 39, 47, 55)
    assert seen.held_sqnr is not None
    # Of few samples, all are looked at.
    seen = rq.ledger(rq.quantize(mod, params, data[:10])).guard
    assert (seen.samples, seen.tuned) == (10, 10)
    assert "weights or ranges were tuned on 10 of them" in str(seen)


@pytest.mark.slow
def test_guard__what_was_mended_is_measured_on_more_samples(digits):
    mod, params, _ = digits
    images = np.concatenate(load_digits().calibration)[:64]
    data = [image[None] for image in images]
    settings = GuardSettings(Guard.REVERT, work=1)
    with pytest.warns(rq.AccuracyWarning) as caught:
        qmod = rq.quantize(mod, params, data, observer=clip_one, effort="fast", guard=settings)
    seen = rq.ledger(qmod).guard
    assert "on 4 of 64 samples" in str(caught[0].message)
    assert seen.samples == 4  # no work is left
    settings = GuardSettings(Guard.REVERT, samples=16)
    with pytest.warns(rq.AccuracyWarning, match=r"on 8 of 64 samples .* Now: .* on 16 of"):
        qmod = rq.quantize(mod, params, data, observer=clip_one, effort="fast", guard=settings)
    assert rq.ledger(qmod).guard.samples == 16


@pytest.mark.parametrize(
    ("gap", "wanted"),
    [
        (OutputGap(25.0, margins=(5.0, 5.0)), True),
        (OutputGap(18.0, margins=(5.0, 5.0)), False),
        (OutputGap(13.0, margins=(5.0, 5.0)), False),
        (OutputGap(13.0, margins=(5.0, 1.0)), True),
        (OutputGap(float("inf")), True),
        (OutputGap(float("-inf")), True),
        (OutputGap(30.0, 0, 8), True),
        (OutputGap(30.0, 1, 8), False),  # answers: more than a tenth may be others
        (OutputGap(30.0, 1, 64), True),
        (OutputGap(30.0, 60, 64), True),
    ],
)
def test_settings__what_further_samples_could_change(gap, wanted):
    assert is_settled(GuardSettings(), [OutputGap(40.0), gap]) is wanted


def test_settings__the_bound_deviates_slightly_too():
    assert deviates_slightly(GuardSettings(), [OutputGap(17.0, margins=(3.0, 1.0))], {})
    assert not deviates_slightly(GuardSettings(), [OutputGap(17.0, margins=(1.0, 1.0))], {})
    assert not deviates_slightly(GuardSettings(), [OutputGap(17.0, 0, 30, margins=(3.0, 1.0))], {})


def test_plan_looks__dear_models_are_looked_at_less(broken):
    prepared, _ = broken
    assert plan_looks(prepared, GuardSettings()) == [8, 16, 32, 64, 128]
    assert plan_looks(prepared, GuardSettings(samples=5)) == [5]
    assert plan_looks(prepared, GuardSettings(work=1)) == [4]
    work = 12 * count_all_macs(prepared) + 1
    assert plan_looks(prepared, GuardSettings(work=work)) == [8, 16, 32]


@pytest.mark.parametrize("order", ["first", "last"])
def test_guard__the_worst_of_several_outputs_decides(order):
    """As of a detector: boxes that follow, and scores that are nearly always 0."""

    def body(emit, x):
        y = emit("hidden", relax.op.nn.relu(emit.dense("hidden.m", x, 12)))
        scores = emit("scores", relax.op.nn.relu(relax.op.subtract(y, relax.const(np.float32(3)))))
        boxes = emit.dense("boxes", y, 4)
        return relax.Tuple([boxes, scores] if order == "first" else [scores, boxes])

    mod = build_model(body, (1, 8))
    data = draw_batches(mod, 40)
    qmod = rq.quantize(mod, None, data, effort="fast")
    seen = rq.ledger(qmod).guard
    assert len(seen.by_output) == 2
    assert seen.sqnr == min(seen.by_output)
    boxes = seen.by_output[0 if order == "first" else 1]
    assert boxes > 25
