"""A warning names the line of the user, however deep in the package it is raised."""

from __future__ import annotations

import ast
import warnings

import numpy as np
import pytest
from float_models import build_model, draw_batches
from package_sources import PACKAGE, SOURCES, list_nodes
from tvm.relax import op

import relayquant as rq
from relayquant.ir.reference.affine import wrap_sums


def model():
    return build_model(
        lambda e, x: e.dense("out", e("r", op.nn.relu(e.dense("a", x, 4))), 3), (4, 8)
    )


def clip(info, samples):
    """A range that breaks the outputs."""
    return rq.choose_qparams(-1e-3, 1e-3, info.spec)


def prepare_with_an_idle_line(folder):
    line = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name("a", None)
    )
    rq.prepare(model(), None, qconfig_mapping=line.set_module_name_regex("a", None), backend="x86")


def prepare_with_unused_parameters(folder):
    rq.prepare(model(), qparams={"a": rq.QParams(0.1, 0, "uint8")}, effort="fast")


def calibrate_with_another_name(folder):
    np.savez(folder / "data.npz", picture=draw_batches(model(), 1)[0]["x"])
    rq.calibrate(rq.prepare(model(), effort="fast"), folder / "data.npz")


def quantize_badly(folder, **options):
    rq.quantize(model(), None, draw_batches(model(), 2), observer=clip, **options)


def quantize_without_a_good_score(folder):
    scores = iter([1.0, *[0.5] * 100])
    options = {"metric": lambda expected, got: next(scores), "budget": 1e-9}
    rq.quantize(model(), None, draw_batches(model(), 1), effort="fast", **options)


def compile_for_another_cpu(folder):
    data = draw_batches(model(), 1)
    qmod = rq.quantize(model(), None, data, backend="x86", effort="fast", guard="off")
    rq.compile(qmod, {"kind": "llvm", "mtriple": "aarch64-linux-gnu"})


#: From all depths: what warns inside of what is called here.
CALLS = [
    prepare_with_an_idle_line,
    prepare_with_unused_parameters,
    calibrate_with_another_name,
    lambda folder: quantize_badly(folder, effort="fast"),
    lambda folder: quantize_badly(folder, guard=rq.config.Guard.REVERT, effort="fast"),
    lambda folder: quantize_badly(
        folder, guard=rq.config.GuardSettings(min_sqnr=-99), effort="fast"
    ),
    quantize_without_a_good_score,
    compile_for_another_cpu,
    lambda folder: wrap_sums(np.array([2**40]), "dense"),
]


@pytest.mark.parametrize("call", CALLS)
def test_warning__names_the_file_of_the_caller(call, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(tmp_path)
    ours = [w for w in caught if "site-packages" not in w.filename]
    assert ours
    assert {w.filename for w in ours} == {__file__}, [str(w.message) for w in ours]


def test_sources__warn_through_one_function():
    """`warn_user` finds the caller; a number of frames is wrong when a decorator comes between."""
    found = [
        str(path.relative_to(PACKAGE))
        for module, path in SOURCES.items()
        for node in list_nodes(module)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn"
    ]
    assert found == ["errors.py"]
