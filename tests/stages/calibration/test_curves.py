"""Ranges before functions: which values get one, and that all ways to calibrate agree."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax

import relayquant as rq
from relayquant.flow.refine.prepared_edit import replace_plan
from relayquant.stages.calibration.weights.curves import Slopes, ValueCurve, find_curves
from relayquant.stages.calibration.weights.ranges import order_values

op = relax.op
DATA = [
    4 * np.random.default_rng(seed).standard_normal((16, 32)).astype("float32") for seed in range(8)
]
OWN = rq.observers.RelativeMSE()


def make(*, is_read_twice=False, function=op.nn.silu):
    """A function between two dense layers. `is_read_twice`: its operand is a result, too."""

    def body(emit, x):
        before = emit("before", emit.dense("product", x, 32))
        after = emit("after", function(before))
        result = emit("result", emit.dense("second", after, 32))
        return emit("both", op.concat([result, before], 1)) if is_read_twice else result

    return rq.prepare(build_model(body, (16, 32)), {})


def prelu(x):
    return op.nn.prelu(x, relax.const(np.linspace(0, 0.5, 32).astype("float32")), 1)


@pytest.mark.parametrize(("function", "kind"), [(op.nn.silu, ValueCurve), (prelu, Slopes)])
def test_find_curves__of_the_value_that_only_a_function_reads(function, kind):
    (curve,) = find_curves(make(function=function)).values()
    assert isinstance(curve, kind)
    assert not find_curves(make(function=function, is_read_twice=True))


def test_value_curve__has_the_same_bits_in_any_order():
    (curve,) = find_curves(make()).values()
    rows = 4 * np.random.default_rng(1).standard_normal((50, 32)).astype("float32")
    rows[::3], rows[1, :2], rows[2, 0] = 0, (-0.0, 1e5), -1e-7
    found = curve(rows, order_values(rows.reshape(-1)))
    np.testing.assert_array_equal(found, np.interp(rows, curve.places, curve.results))


def test_calibrate__a_value_before_a_function_has_a_range_for_its_result():
    prepared = make()
    (key,) = find_curves(prepared)
    full, found = (
        rq.calibrate(prepared, DATA, observer=observer).parameters[key]
        for observer in (rq.observers.MinMax(), OWN)
    )
    assert found.scale < 0.7 * full.scale


def test_merge_statistics__also_from_files_chooses_the_same_ranges(tmp_path):
    """Files hold no functions: the model has them."""
    prepared = make()
    whole = rq.calibrate(prepared, DATA, observer=OWN)
    halves = [rq.calibrate(prepared, DATA[at::2], observer=OWN) for at in range(2)]
    rq.save_prepared(halves[0], tmp_path / "half")
    merged = rq.merge_statistics(rq.load_prepared(tmp_path / "half"), halves[1])
    for key in whole.statistics:
        np.testing.assert_array_equal(merged.parameters[key].scale, whole.parameters[key].scale)


def test_replace_plan__also_of_a_file_chooses_the_same_range(tmp_path):
    prepared = rq.calibrate(make(), DATA, observer=OWN)
    (key,) = find_curves(prepared)
    rq.save_prepared(prepared, tmp_path / "calibrated")
    plan = prepared.plan.replace(key, spec=rq.QSpec("uint8", quant_max=127))
    kept, read = (
        replace_plan(each, plan).parameters[key]
        for each in (prepared, rq.load_prepared(tmp_path / "calibrated"))
    )
    assert kept != prepared.parameters[key]
    assert read == kept


def test_calibrate__the_observer_before_a_function_keeps_its_settings():
    prepared = make()
    (key,) = find_curves(prepared)
    plan = prepared.plan
    for group in plan.activations:
        observer = rq.observers.RelativeMSE(values=2048) if group.key == key else OWN
        plan = plan.replace(group.key, observer=observer)
    calibrated = rq.calibrate(replace_plan(prepared, plan), DATA)
    observer = calibrated.statistics[key].observer
    assert (observer.values, observer.curve is None) == (2048, False)
