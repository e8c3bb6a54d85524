"""Products whose weights each row chooses, as ONNX: ONNX Runtime against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_runtime import run_onnxruntime
from tvm import relax, tirx

import relayquant as rq
from relayquant.config import GroupedForm
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main

pytest.importorskip("onnxruntime")

EXPERTS, UNITS, FEATURES = 5, 6, 32


def make_experts(slots, n=None):
    """x (n, slots, FEATURES) times the weights of three experts for each n, of any number."""
    n = n or tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, slots, FEATURES), "float32"))
    chosen = relax.Var("chosen", relax.TensorType((n, 3), "int64"))
    weight = np.random.default_rng(0).normal(size=(EXPERTS * UNITS, FEATURES)).astype("float32")
    return make_main(
        [x, chosen],
        lambda builder: builder.emit(
            qnn.expert_dense(x, chosen, relax.const(weight), EXPERTS), "product"
        ),
    )


def draw_inputs(slots):
    """Also choices that count from the end, and beyond it."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, slots, FEATURES)).astype("float32")
    return {"x": x, "chosen": rng.integers(-EXPERTS, 2 * EXPERTS, (4, 3))}


@pytest.mark.parametrize("slots", [1, 3], ids=["one row", "rows"])
def test_expert_dense__as_the_reference(slots, tmp_path):
    mod, inputs = make_experts(slots), draw_inputs(slots)
    expected = rq.reference.run(mod, inputs)[0]
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    np.testing.assert_allclose(run_onnxruntime(path, inputs)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3], ids=["one row", "rows"])
@pytest.mark.parametrize("grouped", GroupedForm)
@pytest.mark.parametrize("settings", [{}, {"group_size": 16}, {"activation": None}], ids=str)
def test_grouped_expert_dense__as_the_reference(slots, grouped, settings, tmp_path):
    """One group and one scale for a row, several of both, and float rows."""
    mod, inputs = rq.compress_weights(make_experts(slots), **settings), draw_inputs(slots)
    expected = rq.reference.run(mod, inputs)[0]
    path = rq.export_onnx(mod, tmp_path / "m.onnx", grouped=grouped)
    np.testing.assert_allclose(run_onnxruntime(path, inputs)[0], expected, rtol=1e-5, atol=1e-5)


def test_expert_dense__relay_has_no_such_operator():
    for mod in (make_experts(1, 4), rq.compress_weights(make_experts(1, 4))):
        with pytest.raises(rq.ModelError, match=r"qnn\.(grouped_)?(expert_dense|quantize_rows)"):
            rq.relay.to_text(mod)
