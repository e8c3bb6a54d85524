"""Whole models on real data: accuracy of int8 against float, nothing left in float, compiled equal
to numpy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_dtype

#: model -> (least top-1 agreement with float, most top-1 points lost, samples in a batch when
#: running)
BARS = {
    "resnet20": (0.988, None, 50),
    "mobilenet": (0.93, 0.01, 4),
    "dscnn": (0.98, 0.002, 50),
    "mnist": (0.99, 0.003, 1),
    "digits": (0.99, 0.003, 50),
    "resnet8": (0.965, None, 1),
}

#: model with 4-bit weights -> (least top-1 agreement with float, least SQNR of the outputs in dB).
#: Rounded so that sums on quantized inputs stay, they have 0.994 and 20.9, 0.77 and 7.1.
FEW_BITS = {"resnet20": (0.99, 23), "mobilenet": (0.8, 10)}

#: dB and share of answers that a level of effort may be behind the one below, on other samples than
#: it chose by
TOLERANCE = 0.5, 0.003

#: operators that may touch float values in a fully integral model
BORDER = {"relax.qnn.quantize", "relax.qnn.dequantize", "relax.nn.softmax", "relax.reshape"}


def run_all(executor: Executor, samples: np.ndarray, size: int) -> np.ndarray:
    """Outputs of all samples, (N, classes)."""
    outputs = [
        executor.run("main", [samples[i : i + size]])[0] for i in range(0, len(samples), size)
    ]
    return np.concatenate(outputs).reshape(len(samples), -1)


def float_operators(mod: tvm.IRModule) -> list[str]:
    """Operators that read or write float values, in order."""
    graph = Graph(mod)
    found = []
    for binding in graph.bindings:
        call = graph.call_of(binding.var)
        if call is None:
            continue
        values = [binding.var, *call.args]
        if any(tensor_dtype(v).startswith("float") for v in values if isinstance(v, tvm.relax.Var)):
            found.append(graph.op_name(binding.var))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BARS)
def test_quantize__meets_the_bar(name, request):
    case = request.getfixturevalue(name)
    agreement, loss, size = BARS[name]
    mod, params = rq.load(str(case.model))
    qmod = rq.quantize(mod, params, case.calibration)

    operators = float_operators(qmod)
    assert set(operators) <= BORDER, "something inside the model is still float"
    assert operators.count("relax.qnn.quantize") == 1
    assert operators.count("relax.qnn.dequantize") == 1

    expected = run_all(Executor(rq.compile(mod)), case.samples, size)
    got = run_all(Executor(rq.compile(qmod)), case.samples, size)
    same = (got.argmax(1) == expected.argmax(1)).mean()
    assert same >= agreement
    if loss is not None:
        accuracy = [(y.argmax(1) == case.labels).mean() for y in (expected, got)]
        assert accuracy[0] - accuracy[1] <= loss + 1e-9

    report = rq.verify(qmod, [case.samples[: 2 if size > 1 else 1]])
    assert report.is_equal, report.first
    floating = {row.op for row in rq.ledger(qmod).rows if not row.quantized}
    assert floating <= {"nn.softmax", "reshape"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "mnist", "dscnn", "resnet20"])
def test_quantize__each_level_of_effort_is_as_accurate_as_the_one_below(name, request):
    case = request.getfixturevalue(name)
    mod, params = rq.load(str(case.model))
    size = BARS[name][2]
    expected = run_all(Executor(rq.compile(mod)), case.samples, size)
    decibels, shares = [], []
    for effort in ("fast", "balanced", "best"):
        qmod = rq.quantize(mod, params, case.calibration, effort=effort, callbacks=())
        got = run_all(Executor(rq.compile(qmod)), case.samples, size)
        noise = np.square(got - expected).sum() / np.square(expected).sum()
        decibels.append(-10 * np.log10(noise))
        shares.append((got.argmax(1) == expected.argmax(1)).mean())
    for found, tolerance in zip((decibels, shares), TOLERANCE, strict=True):
        assert np.diff(found).min() >= -tolerance, (decibels, shares)


@pytest.mark.slow
def test_plain_tvm_compile__equals_ours(dscnn):
    mod, params = rq.load(str(dscnn.model))
    qmod = rq.quantize(mod, params, dscnn.calibration)
    ours = Executor(rq.compile(qmod)).run("main", [dscnn.samples[:8]])[0]
    plain = tvm.compile(qmod, tvm.target.Target({"kind": "llvm"}))
    np.testing.assert_array_equal(Executor(plain).run("main", [dscnn.samples[:8]])[0], ours)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrong"), [("kwt1", 0), ("magika", 1)])
def test_quantize__transformer_and_embedding_models_keep_their_answers(name, wrong, request):
    case = request.getfixturevalue(name)
    size = 10 if name == "kwt1" else 1
    mod, params = rq.load(str(case.model))
    qmod = rq.quantize(mod, params, case.calibration)
    expected = run_all(Executor(rq.compile(mod)), case.samples, size)
    got = run_all(Executor(rq.compile(qmod)), case.samples, size)
    assert (got.argmax(1) != expected.argmax(1)).sum() <= wrong
    assert share_of_integer_products(mod, params, qmod) > 0.5


def share_of_integer_products(mod, params, qmod: tvm.IRModule) -> float:
    """Share of the float model's multiply-adds that run on integers."""
    graph, ledger = Graph(rq.prepare(mod, params).mod), rq.ledger(qmod)
    macs = {binding.var.name: count_macs(binding.value) for binding in graph.bindings}
    rows = {name: ledger.row(name) for name, count in macs.items() if count}
    integer = sum(macs[name] for name, row in rows.items() if row is not None and row.quantized)
    return integer / sum(macs.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_BITS)
def test_quantize__of_four_bits_follows_float(name, request):
    case = request.getfixturevalue(name)
    agreement, sqnr = FEW_BITS[name]
    mod, params = rq.load(str(case.model))
    default = rq.get_backend_config("x86").default_qconfig
    spec = replace(default.weight.spec, quant_min=-7, quant_max=7)
    config = replace(default, weight=rq.TensorConfig(spec, rq.observers.MinMax()))
    mapping = rq.QConfigMapping().set_global(config)
    qmod = rq.quantize(
        mod, params, case.calibration, qconfig_mapping=mapping, backend="x86", guard="off"
    )
    size = BARS[name][2]
    expected = run_all(Executor(rq.compile(mod)), case.samples, size)
    got = run_all(Executor(rq.compile(qmod)), case.samples, size)
    assert (got.argmax(1) == expected.argmax(1)).mean() >= agreement
    noise = np.square(got - expected).sum(dtype="float64")
    assert 10 * np.log10(np.square(expected).sum(dtype="float64") / noise) >= sqnr
