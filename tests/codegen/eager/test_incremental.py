"""Incremental re-execution: the results of a whole call, whatever changes and is kept."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import count_examples
from float_models import draw_batches, residual_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.codegen.eager import EagerModule, IncrementalFunction

#: bytes kept of a batch: nothing, some values, all of them
MEMORY = [0, 3000, 1e9]


@pytest.fixture(scope="module")
def calibrated():
    mod = residual_model()
    return rq.calibrate(rq.prepare(mod), draw_batches(mod, 8))


@pytest.fixture(scope="module")
def module(calibrated):
    return EagerModule(calibrated.graph.mod)


@pytest.fixture(scope="module")
def batches(calibrated):
    return [[*batch.values()] for batch in draw_batches(calibrated.mod, 2, seed=1)]


def make_incremental(module, prepared, batches, memory) -> IncrementalFunction:
    graph = prepared.graph
    changes = [[var.name for var in variables.vars] for variables in graph.variables.values()]
    changes += [[constant.var.name] for constant in graph.constants.values()]
    return IncrementalFunction(
        module.programs["main"], graph.arguments(), changes, batches[0], memory
    )


def quantize_some(prepared, keys) -> dict[str, np.ndarray]:
    """Arguments that switch groups on, and weights of their operators that were fitted."""
    graph, changed = prepared.graph, {}
    for key in keys:
        variables = graph.variables[key]
        arrays = variables.arrays(prepared.parameters[key])
        changed.update((v.name, a) for v, a in zip(variables.vars, arrays, strict=True))
    for key, value in prepared.constants.items():
        if key in keys:
            changed[graph.constants[key].var.name] = value
    return changed


@settings(deadline=None, max_examples=count_examples(30))
@given(st.data())
def test_run__equals_a_call_of_the_whole_function(calibrated, module, batches, data):
    incremental = make_incremental(module, calibrated, batches, data.draw(st.sampled_from(MEMORY)))
    names = st.sampled_from([*calibrated.graph.variables])
    changed = quantize_some(calibrated, data.draw(st.sets(names)))
    update = incremental.plan_update(changed)
    arguments = {**calibrated.graph.arguments(), **changed}
    for batch in batches:
        recording = incremental.record(batch)
        got = incremental.run(update, recording, batch if update.inputs else None)
        for have, want in zip(got, module.run("main", [*batch, *arguments.values()]), strict=True):
            np.testing.assert_array_equal(have, want)


@settings(deadline=None, max_examples=count_examples(30))
@given(st.data())
def test_renew__later_calls_equal_those_of_the_whole_function(calibrated, module, batches, data):
    """Calls that start from one with other values, which was itself renewed."""
    incremental = make_incremental(module, calibrated, batches, data.draw(st.sampled_from(MEMORY)))
    names = [*calibrated.graph.variables]
    known = {name: quantize_some(calibrated, [name]) for name in names}
    recordings, recorded = [incremental.record(batch) for batch in batches], {}
    for keys in data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=1, max_size=3)):
        changed = {k: v for key in sorted(keys) for k, v in known[key].items()}
        update = incremental.plan_update(changed, recorded)
        kept = incremental.plan_update(changed, recorded, keeps=True)
        arguments = {**calibrated.graph.arguments(), **changed}
        for i, batch in enumerate(batches):
            got = incremental.run(update, recordings[i], batch if update.inputs else None)
            recordings[i] = incremental.renew(kept, recordings[i], batch if kept.inputs else None)
            wanted = module.run("main", [*batch, *arguments.values()])
            for have, again, want in zip(got, recordings[i].results, wanted, strict=True):
                np.testing.assert_array_equal(have, want)
                np.testing.assert_array_equal(again, want)
        recorded = changed


@pytest.mark.parametrize("memory", MEMORY)
def test_record__keeps_no_more_than_the_bound(calibrated, module, batches, memory):
    incremental = make_incremental(module, calibrated, batches, memory)
    recording = incremental.record(batches[0])
    sizes = {}
    for array in recording.values.values():
        while isinstance(array.base, np.ndarray):
            array = array.base
        sizes[id(array)] = array.nbytes
    assert sum(sizes.values()) <= memory
    assert bool(sizes) == (memory > 0)
    want = module.run("main", [*batches[0], *calibrated.graph.arguments().values()])
    np.testing.assert_array_equal(recording.results[0], want[0])


def test_record__keeps_what_some_change_needs(calibrated, module, batches):
    arguments = calibrated.graph.arguments()
    _, weight = calibrated.plan.operator("two").operands[1]
    names = quantize_some(calibrated, [weight])
    kept = [
        {
            v.name
            for v in IncrementalFunction(
                module.programs["main"], arguments, c, batches[0], 1e9
            ).kept
        }
        for c in ([], [names])
    ]
    assert kept == [{"out"}, {"out", "one.d"}]


def test_vary__runs_what_the_change_reaches_and_nothing_else(calibrated, module, batches):
    incremental = make_incremental(module, calibrated, batches, 1e9)
    assert incremental.plan_update({}).steps == ()
    operator = calibrated.plan.operator("deep")
    weight = next(key for name, key in operator.operands if name == "weight")
    update = incremental.plan_update(quantize_some(calibrated, [weight]))
    assert not update.inputs
    names = {step.var.name for step in update.steps}
    # The weight itself is rounded once, not for every batch.
    assert not any(name.startswith(f"{weight}.") for name in names)
    assert {"mean", "flat", "out"} <= names
    assert not names & {"stem", "one", "two", "left", "right", "both"}


def test_vary__without_memory_starts_at_the_inputs(calibrated, module, batches):
    incremental = make_incremental(module, calibrated, batches, 0)
    _, weight = calibrated.plan.operator("out").operands[1]
    update = incremental.plan_update(quantize_some(calibrated, [weight]))
    assert update.inputs
    assert {"stem", "one", "two"} <= {step.var.name for step in update.steps}


def test_incremental__symbolic_sizes_and_several_results():
    @I.ir_module
    class Module:  # the first result does not depend on b, the second on both
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float32"),
            a: R.Tensor((4,), "float32"),
            b: R.Tensor((4,), "float32"),
        ):
            n = T.int64()
            with R.dataflow():
                first = R.add(x, a)
                ones = R.full(R.shape([n, 4]), R.const(1.0), "float32")
                second = R.add(R.multiply(first, b), ones)
                out = (first, second)
                R.output(out)
            return out

    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 4)).astype("float32")
    module = EagerModule(Module)
    data = [rng.standard_normal((n, 4)).astype("float32") for n in (3, 5)]
    incremental = IncrementalFunction(
        module.programs["main"], {"a": a, "b": b}, ["b"], data[:1], 1e6
    )
    update = incremental.plan_update({"b": c})
    assert "first" not in {step.var.name for step in update.steps}
    for x in data:
        got = incremental.run(update, incremental.record([x]))
        for have, want in zip(got, module.run("main", [x, a, c]), strict=True):
            np.testing.assert_array_equal(have, want)
    with pytest.raises(rq.DataError, match=r"\(4, 4\).*n = 3"):
        incremental.run(update, incremental.record([data[0]]), [np.zeros((4, 4), "float32")])
