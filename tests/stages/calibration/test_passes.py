"""Passes of a calibration: what runs on which batches before what is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches, residual_model
from tvm.relax import op

import relayquant as rq
from relayquant.data import InputInfo
from relayquant.stages.calibration import observer_selection, shard
from relayquant.stages.calibration.passes import (
    FEWEST_SAMPLES,
    choose_batches,
    count_part,
    join_subgraphs,
    plan_passes,
)


def small_model(shape=MAP):
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), shape)


def plan(order: rq.config.Order, *, fits: bool = True):
    prepared = rq.prepare(residual_model())
    points = prepared.graph.fits if fits else ()
    return prepared, plan_passes(prepared.graph, prepared.plan, order, points)


def test_passes__topological_is_one_choice_a_step():
    prepared, (data_pass,) = plan(rq.config.Order.TOPOLOGICAL)
    assert not data_pass.is_float
    assert not data_pass.is_part
    chosen = [(subgraph.groups, subgraph.fits) for (subgraph,) in data_pass.steps]
    assert all(len(groups) + len(fits) == 1 for groups, fits in chosen)
    groups = [key for groups, _ in chosen for key in groups]
    assert groups == [group.key for group in prepared.plan.activations]
    assert tuple(fit for _, fits in chosen for fit in fits) == prepared.graph.fits


def test_passes__parallel_observes_all_then_fits_one_by_one():
    prepared, (observe, fit) = plan(rq.config.Order.PARALLEL)
    (step,) = observe.steps
    assert observe.is_float
    assert not observe.is_part
    groups = [key for subgraph in step for key in subgraph.groups]
    assert groups == [group.key for group in prepared.plan.activations]
    assert not any(subgraph.fits for subgraph in step)
    assert fit.is_part
    assert not fit.is_float
    assert [subgraph.fits for (subgraph,) in fit.steps] == [(f,) for f in prepared.graph.fits]
    assert not any(subgraph.groups for (subgraph,) in fit.steps)
    joined = {var.name_hint for var in join_subgraphs((observe, fit)).get_global_vars()}
    subgraphs = [*observe.split.subgraphs, *fit.split.subgraphs]
    assert joined == {subgraph.function for subgraph in subgraphs if subgraph.function}


def test_passes__parallel_without_fits_is_one_pass():
    _, (data_pass,) = plan(rq.config.Order.PARALLEL, fits=False)
    assert len(data_pass.steps) == 1


@pytest.mark.parametrize("batch", [1, 4, "n"])
def test_count_part__as_many_batches_as_hold_the_values(batch):
    # a reads 3 x 12 x 12 values of each sample, out reads r: the model's convolutions have 6.
    prepared = rq.prepare(small_model((batch, *MAP[1:])))
    sizes = [prepared.mod["main"].params[0].ty, *(b.var.ty for b in _bindings(prepared))]
    each = sum(int(np.prod([int(d) for d in ty.shape.values[1:]])) for ty in (sizes[0], sizes[2]))
    size = 4 if batch == "n" else batch
    inputs = (InputInfo("x", (batch, *MAP[1:]), "float32"),)

    def count(values: int) -> int:
        return count_part(prepared.graph, prepared.graph.fits, inputs, {"n": size}, values)

    assert count(1) == FEWEST_SAMPLES // size
    assert count(100 * size * each) == 100
    assert count(100 * size * each + 1) == 101


def _bindings(prepared):
    return prepared.mod["main"].body.blocks[0].bindings


def test_choose_batches__are_evenly_spread():
    assert choose_batches(7, 3) == (0, 2, 4)
    assert choose_batches(3, 7) == (0, 1, 2)
    assert choose_batches(200, 200) == tuple(range(200))


@pytest.mark.slow
def test_parallel__weights_are_fitted_on_a_part_with_all_ranges_known(monkeypatch):
    """As calibrating that part alone with the ranges of the whole data, also of a model whose
    ranges are judged on fewer samples.
    """
    monkeypatch.setattr(observer_selection, "JUDGED_WORK", 1)
    mod, fit = small_model(), rq.config.FitSettings(values=1)
    data = draw_batches(mod, 80)
    whole = rq.calibrate(rq.prepare(mod), data, order=rq.config.Order.PARALLEL, fit=fit)
    ranges = {g.key: whole.parameters[g.key] for g in whole.plan.activations}
    part = [data[i] for i in choose_batches(80, FEWEST_SAMPLES)]
    alone = rq.prepare(mod, qparams=ranges)
    alone = rq.calibrate(alone, part, order=rq.config.Order.TOPOLOGICAL)
    assert whole.parameters == alone.parameters
    assert whole.constants.keys() == alone.constants.keys()
    for key, array in whole.constants.items():
        np.testing.assert_array_equal(array, alone.constants[key])
    other = rq.calibrate(rq.prepare(mod), data, order=rq.config.Order.PARALLEL)
    assert any((other.constants[key] != array).any() for key, array in whole.constants.items())


def test_calibrate__order_is_that_of_the_effort_unless_a_callable_picks():
    mod = small_model()
    data = draw_batches(mod, 2)

    def pick(info, samples):
        low, high = min(a.min() for a in samples), max(a.max() for a in samples)
        return rq.choose_qparams(low, high, info.spec)

    def is_parallel(effort: str, observer=None) -> bool:
        prepared = rq.prepare(mod, effort=effort)
        return bool(rq.calibrate(prepared, data, observer=observer).statistics)

    assert is_parallel("fast")
    assert is_parallel("balanced")
    assert not is_parallel("best")
    assert not is_parallel("fast", pick)


def test_parallel__of_many_values_few_wait_to_be_observed(monkeypatch):
    """Small arrays are observed several at a time, but not more of them than fit a bound."""
    mod = small_model()
    data = draw_batches(mod, 80)

    def longest() -> int:
        observer = Counting()
        rq.calibrate(rq.prepare(mod, effort="fast"), data, observer=observer)
        return max(observer.seen)

    assert longest() == 3  # all batches of a shard
    monkeypatch.setattr(shard, "MOST_WAITING_BYTES", 1)
    assert longest() == 1


@dataclass(frozen=True)
class Counting(rq.observers.MinMax):
    """Counts the arrays that it is shown at once."""

    seen: list[int] = field(default_factory=list)

    def update_all(self, state, arrays):
        self.seen.append(len(arrays))
        return super().update_all(state, arrays)
