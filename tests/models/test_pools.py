"""Pools of drawn sizes and attributes: what ONNX Runtime computes, float, numpy and compiled, and
in integers of every type and layout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx_runtime import run_onnxruntime
from pool_cases import draw_case, draw_data, make_model
from tvm import relax, tirx

import relayquant as rq
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main

pytest.importorskip("onnxruntime")

POOLS = ("AveragePool", "LpPool", "MaxPool")
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))]


def run_onnx(model, x):
    """What ONNX Runtime computes; None where it refuses the model."""
    try:
        return run_onnxruntime(model, {"x": x})[0]
    except Exception:  # errors of several classes, of which none is public
        return None


def run_compiled(mod, x):
    return rq.Executor(rq.compile(mod)).run("main", [x])[0]


#: windows that `qnn.avg_pool2d` has: two axes, pads given as numbers
AVERAGES = [
    case
    for case in (draw_case("AveragePool", seed) for seed in range(400))
    if case.rank == 2 and "auto_pad" not in case.attributes and min(case.free) >= 0
]
#: those of which the last windows end beyond the padding, and others
BEYOND, INSIDE = (
    [case for case in AVERAGES if case.ends_beyond == ends_beyond] for ends_beyond in (True, False)
)


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", POOLS)
def test_pool__equals_onnx_runtime(op, seed):
    case = draw_case(op, seed)
    model, x = make_model(case), draw_data(case)
    wanted = run_onnx(model, x)
    if wanted is None:
        with pytest.raises(rq.ModelError, match="supported: windows that fit"):
            rq.load(model)
        return
    mod, _ = rq.load(model)
    for got in (rq.reference.run(mod, [x])[0], run_compiled(mod, x)):
        assert got.shape == wanted.shape, str(case)
        np.testing.assert_allclose(got, wanted, 1e-5, 1e-5, err_msg=str(case))


@pytest.mark.parametrize("op", POOLS)
def test_export__equals_onnx_runtime(op, tmp_path):
    """In the file what was imported, whatever opset that takes."""
    for seed in range(200, 225):
        case = draw_case(op, seed)
        model, x = make_model(case), draw_data(case)
        wanted = run_onnx(model, x)
        if wanted is None or 0 in wanted.shape:
            continue
        path = rq.export_onnx(rq.load(model)[0], tmp_path / "pool.onnx")
        got = run_onnx(onnx.load(str(path)), x)
        np.testing.assert_allclose(got, wanted, 1e-5, 1e-5, err_msg=str(case))


@pytest.mark.parametrize("case", [*BEYOND[:4], *INSIDE[:4]], ids=str)
def test_export__of_integers(case, tmp_path):
    """qnn.avg_pool2d, NHWC, as ONNX Runtime reads it; no average lies halfway."""
    q = draw_integers(case, "int8").transpose(0, 2, 3, 1).copy()
    x = relax.Var("x", relax.TensorType(q.shape, "int8"))
    counts = bool(case.attributes.get("count_include_pad"))
    more = {"count_include_pad": counts, "layout": "NHWC"}
    mod = make_main(
        [x], lambda _: qnn.avg_pool2d(x, 0.1, 3, 0.0713, -5, **name_windows(case), **more)
    )
    (wanted,) = rq.reference.run(mod, [q])
    got = run_onnx(onnx.load(str(rq.export_onnx(mod, tmp_path / "pool.onnx"))), q)
    np.testing.assert_array_equal(got, wanted)


#: layout, and whether the batch is any
FORMS = [("NCHW", False), ("NHWC", False), ("NHWC", True)]
with_integers = pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])


def draw_integers(case, dtype):
    low, high = INTEGER_LIMITS[dtype]
    shape = (2, 3, *case.sizes)
    return np.random.default_rng(1).integers(low, high, shape, endpoint=True).astype(dtype)


def run_form(make_call, q, form):
    """(numpy, compiled) of a call on NCHW data in this form; the results are NCHW again."""
    layout, is_symbolic = form
    order = ["NCHW".index(letter) for letter in layout]
    data = np.ascontiguousarray(q.transpose(order))
    batch = tirx.Var("n", "int64") if is_symbolic else len(q)
    x = relax.Var("x", relax.TensorType((batch, *data.shape[1:]), data.dtype.name))
    mod = make_main([x], lambda _: make_call(x, layout))
    results = rq.reference.run(mod, [data])[0], run_compiled(mod, data)
    return [each.transpose(np.argsort(order)) for each in results]


def name_windows(case):
    return {
        "pool_size": case.get("kernel_shape"),
        "strides": case.get("strides"),
        "dilation": case.get("dilations"),
        "padding": case.get("pads"),
        "ceil_mode": bool(case.attributes.get("ceil_mode")),
    }


@pytest.mark.slow
@pytest.mark.sample(12)
@with_integers
@pytest.mark.parametrize("first", range(4))
def test_integer_average__is_the_nearest_to_onnx_runtime(dtype, first):
    """None further than half a step from the average, and numpy and compiled are the same."""
    low, high = INTEGER_LIMITS[dtype]
    zero, out_zero = low // 3 + high // 2, low // 2 + high // 3
    for case in (*BEYOND[first:12:4], *INSIDE[first:8:4]):
        q = draw_integers(case, dtype)
        real = ((q.astype("float64") - zero) * 0.1).astype("float32")
        wanted = np.clip(run_onnx(make_model(case), real) / np.float64(0.06) + out_zero, low, high)
        counts = bool(case.attributes.get("count_include_pad"))
        for form in FORMS:
            expected, got = run_form(
                lambda x, layout, case=case, counts=counts: qnn.avg_pool2d(
                    x, 0.1, zero, 0.06, out_zero, **name_windows(case), count_include_pad=counts,
                    layout=layout,
                ),
                q,
                form,
            )  # fmt: skip
            np.testing.assert_array_equal(got, expected, err_msg=str(case))
            assert np.abs(got - wanted).max() <= 0.5 + 5e-3, f"{case} {form}"


@pytest.mark.slow
@pytest.mark.sample(4)
@with_integers
def test_integer_maximum__equals_onnx_runtime(dtype):
    for case in (*BEYOND[:4], *INSIDE[:2]):
        attributes = {k: v for k, v in case.attributes.items() if k != "count_include_pad"}
        q = draw_integers(case, dtype)
        wanted = run_onnx(
            make_model(replace(case, op="MaxPool", attributes=attributes)), q.astype("float32")
        )
        for form in FORMS:
            for got in run_form(
                lambda x, layout, case=case: relax.op.nn.max_pool2d(
                    x, **name_windows(case), layout=layout
                ),
                q,
                form,
            ):
                np.testing.assert_array_equal(got, wanted, err_msg=f"{case} {form}")


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SEEDS[:6])
@pytest.mark.parametrize("op", ["AveragePool", "MaxPool"])
def test_quantized_pool__is_near_onnx_runtime(op, seed):
    """Between two convolutions, of any rank: in integers, compiled as in numpy."""
    case = draw_case(op, seed)
    x, wanted = draw_data(case), run_onnx(make_model(case), draw_data(case))
    if wanted is None or 0 in wanted.shape:
        pytest.skip("a window is wider than the data")
    mod, _ = rq.load(make_model(case, is_between=True))
    qmod = rq.quantize(mod, None, [{"x": x}], effort="fast")
    assert not [row.op for row in rq.ledger(qmod).floating if "pool" in row.op]
    got = rq.reference.run(qmod, [x])[0]
    assert np.abs(got - wanted).max() <= 0.03 * np.abs(x).max(), str(case)
    assert rq.verify(qmod, [x]).differences == ()
