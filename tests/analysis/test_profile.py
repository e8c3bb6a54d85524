"""Kernel calls are found, named after the model's values, and know their work."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relayquant as rq
from relayquant.analysis.speed import profile
from relayquant.analysis.speed.latency import measure_latency
from relayquant.analysis.speed.profile import (
    KernelSite,
    compile_with_sites,
    match_sites,
    profile_module,
)
from relayquant.demo import load_digits
from relayquant.errors import ConfigError
from relayquant.ir.rewrite.bind import bind_params
from relayquant.ir.rewrite.editor import Editor


@pytest.fixture(scope="module")
def digits():
    """(float module, quantized module, one batch) of the built-in example."""
    demo = load_digits()
    mod, params = rq.load(demo.model_path)
    editor = Editor(mod)
    bind_params(editor, params)
    return editor.build(), rq.quantize(mod, params, demo.calibration), demo.images[:3]


@pytest.mark.slow
def test_compile_with_sites__every_product_knows_its_work(digits) -> None:
    _, qmod, _ = digits
    _, sites = compile_with_sites(qmod, rq.compile)
    rows = rq.ledger(qmod).to_dict()["operators"]
    products = [row for row in rows if row["quantized"] and "conv" in row["op"] + row["pattern"]]
    assert products
    assert sum(site.macs > 0 for site in sites) >= len(products)
    assert all(site.kernel.startswith("qnn_") for site in sites if site.macs)
    assert len({site.value for site in sites}) == len(sites)


def test_profile_executable__a_busy_machine_does_not_lengthen_kernels(digits, monkeypatch) -> None:
    """Most runs are disturbed. The shortest time of each kernel counts, also of the whole run."""
    runs = iter([[9.0, 9.0], [2.0, 9.0], [9.0, 3.0], [9.0, 9.0]])
    clock = iter(np.cumsum([0, 8, 0, 7, 0, 4, 0, 7, 0, 8]))
    monkeypatch.setattr(
        profile, "time_calls", lambda *_: [*zip(("one", "two"), next(runs), strict=True)]
    )
    monkeypatch.setattr(profile.time, "perf_counter", lambda: float(next(clock)))
    mod, _, images = digits
    found = profile.profile_executable(rq.compile(mod), (), mod, [images], runs=4)
    assert [operator.seconds for operator in found.operators] == [2.0, 3.0]
    assert found.total == 4


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("quantized", [False, True])
def test_profile_module__work_scales_with_the_batch(digits, quantized: bool) -> None:
    mod = digits[quantized]
    one, three = (profile_module(mod, [digits[2][:n]], rq.compile, runs=3) for n in (1, 3))
    assert [op.kernel for op in one.operators] == [op.kernel for op in three.operators]
    assert [3 * op.macs for op in one.operators] == [op.macs for op in three.operators]
    assert sum(op.macs for op in one.operators) > 0
    assert not any(op.kernel.startswith("vm.") for op in one.operators)
    assert all(op.value for op in one.operators if op.macs)
    assert one.total > 0
    assert one.machine_calls > 0


def test_profile_module__a_function_without_inputs() -> None:
    @R.function
    def main():
        with R.dataflow():
            out = R.exp(R.const([1.0, 2.0], "float32"))
            R.output(out)
        return out

    found = profile_module(tvm.IRModule({"main": main}), [], rq.compile, runs=1)
    assert found.machine_calls == 1  # the result is a constant


@pytest.mark.slow
def test_profile_module__float_and_integer_work_are_equal(digits) -> None:
    work = [
        sum(op.macs for op in profile_module(mod, [digits[2]], rq.compile, runs=1).operators)
        for mod in digits[:2]
    ]
    assert work[0] == work[1]


def test_match_sites__skips_what_was_not_called() -> None:
    a, gone, b = KernelSite("a", "k", 1), KernelSite("gone", "reshape", 0), KernelSite("b", "k", 1)
    matched = match_sites(["vm.builtin.x", "k", "k", "k"], [a, gone, b])
    assert [site.value for site in matched] == ["", "a", "b", ""]


def test_measure_latency__contenders_take_turns() -> None:
    order: list[str] = []
    candidates = {name: lambda name=name: order.append(name) for name in "ab"}
    result = measure_latency(candidates, rounds=2)
    turns = [name for i, name in enumerate(order) if not i or order[i - 1] != name]
    assert turns == ["a", "b"] * 3  # the first runs, then two rounds
    for latency in result.values():
        assert 0 < latency.best <= latency.median
        assert latency.runs >= 2


def test_measure_latency__median_of_many_runs() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 64))
    result = measure_latency({"a": lambda: a @ a}, rounds=1)
    assert result["a"].runs > 10


@pytest.mark.parametrize(("candidates", "rounds"), [({}, 1), ({"a": dict}, 0)])
def test_measure_latency__nothing_to_time(candidates, rounds) -> None:
    with pytest.raises(ConfigError, match="allowed: at least one of each"):
        measure_latency(candidates, rounds)
