"""What becomes of every operator of `operator_cases`: imported, quantized, compiled."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_runtime import run_onnxruntime
from operator_cases import FAMILIES, SHAPE, Case, Outcome, build_model

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.formats.readers import import_onnx
from relayquant.ir.ledger import LedgerRow
from relayquant.ir.ops import BUILTIN_OPS, Kind
from relayquant.stages.compilation import compile_draft

SHARING = {op.name for op in BUILTIN_OPS if op.kind is Kind.SHARING}
#: patterns whose integers keep their parameters where those of all operands are the same
JOINING = {"concat"}


def find_outcome(case: Case, rows: list[LedgerRow]) -> Outcome:
    """What the ledger's rows of one branch say, those of the operators around it left out."""
    rows = [row for row in rows if row.name not in (f"{case.name}.a", f"{case.name}.y")]
    if not all(row.quantized for row in rows):
        return Outcome.FLOAT
    if {row.pattern for row in rows} <= {"conv2d_relu", "conv2d_bias_clip"}:
        return Outcome.MERGED
    moving = SHARING | (JOINING if case.outcome is Outcome.PASSES else set())
    return Outcome.PASSES if {row.pattern for row in rows} <= moving else Outcome.QUANTIZED


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_operators__quantize_pass_or_say_why_not(family, tmp_path):
    cases = FAMILIES[family]
    model = build_model(cases)
    mod, params = import_onnx(model)
    rng = np.random.default_rng(1)
    data = [rng.standard_normal(SHAPE).astype("float32") for _ in range(2)]
    qmod = rq.quantize(mod, params, data, effort="fast", guard=rq.config.Guard.OFF)

    rows: dict[str, list[LedgerRow]] = {}
    for row in rq.ledger(qmod).rows:
        rows.setdefault(row.name.split(".")[0], []).append(row)
    outcomes = {case.name: find_outcome(case, rows[case.name]) for case in cases}
    assert outcomes == {case.name: case.outcome for case in cases}
    for case in cases:
        reasons = [row.reason for row in rows[case.name] if not row.quantized]
        assert all(reasons), case.name
        assert any(case.reason in reason for reason in reasons) == bool(case.reason), case.name

    expected = run_onnxruntime(model, {"x": data[0]})
    path = rq.export_onnx(qmod, tmp_path / "model.onnx")
    exported = run_onnxruntime(path, {"x": data[0]})
    floats = rq.reference.run(mod, [data[0]])
    integers = rq.reference.run(qmod, [data[0]])
    results = zip(cases, expected, floats, integers, exported, strict=True)
    for case, wanted, real, got, written in results:
        np.testing.assert_allclose(real, wanted, rtol=1e-4, atol=1e-4, err_msg=case.name)
        noise, signal = np.square(got - real).mean(), np.square(real).mean()
        assert noise < MOST_NOISE.get(case.name, 0.01) * signal, case.name
        assert np.abs(written - got).max() < 0.02 * np.abs(got).max(), case.name

    compiled = Executor(compile_draft(qmod)).run("main", [data[0]])
    for case, want, got in zip(cases, integers, compiled, strict=True):
        # What integers are computed from ends in a product of integers: one wrong bit shows.
        tolerance = 1e-4 if case.outcome is Outcome.FLOAT else 0
        np.testing.assert_allclose(got, want, tolerance, tolerance, err_msg=case.name)


#: noise / signal where a small error becomes a whole step, or another word
MOST_NOISE = {"floor": 0.1, "round": 0.1, "sign": 0.1, "embedding": 0.2}
