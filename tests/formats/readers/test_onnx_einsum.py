"""Einsum of every form is what the evaluator of the onnx package computes, and products of matrices
among them are quantized.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from operator_names import list_operators

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError

#: equation -> shapes of the operands
EQUATIONS = {
    # products of matrices
    "ij,jk->ik": [(3, 4), (4, 5)],
    "ij,jk": [(3, 4), (4, 5)],
    "bij,bjk->bik": [(2, 3, 4), (2, 4, 5)],
    "bsd,dhk->bshk": [(2, 3, 4), (4, 5, 6)],
    "bsd,dhk->bhsk": [(2, 3, 4), (4, 5, 6)],
    "dhk,bsd->bhsk": [(4, 5, 6), (2, 3, 4)],
    "bqhd,bkhd->bhqk": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "bhqk,bkhd->bqhd": [(2, 4, 3, 6), (2, 6, 4, 5)],
    "bhwc,hkc->bhwk": [(2, 3, 4, 5), (3, 4, 5)],
    "abcd,aefd->abcef": [(2, 3, 4, 5), (2, 6, 2, 5)],
    "abcd,cdab->ba": [(2, 3, 4, 5), (4, 5, 2, 3)],
    "abc,cba->": [(2, 3, 4), (4, 3, 2)],
    "i,i->": [(4,), (4,)],
    "i,i": [(4,), (4,)],
    "ij,j->i": [(3, 4), (4,)],
    "j,ij->i": [(4,), (3, 4)],
    "bi,bi->b": [(3, 4), (3, 4)],
    "bij,bj->bi": [(2, 3, 4), (2, 4)],
    # an axis that only one operand has is summed before
    "ija,jkb->ik": [(3, 4, 2), (4, 5, 3)],
    # elementwise and outer
    "ij,ij->ij": [(3, 4), (3, 4)],
    "ij,ji->ij": [(3, 4), (4, 3)],
    "i,j->ij": [(3,), (4,)],
    "i,j->ji": [(3,), (4,)],
    "ijk,k->ikj": [(2, 3, 4), (4,)],
    ",ij->ij": [(), (3, 4)],
    # ellipsis, with axes of 1
    "...ij,...jk->...ik": [(2, 3, 4), (2, 4, 5)],
    "...ij,jk": [(2, 7, 3, 4), (4, 5)],
    "...ij,...jk": [(2, 1, 3, 4), (1, 7, 4, 5)],
    "b...i,...ij->b...j": [(2, 3, 4), (1, 4, 5)],
    "i...,i...->...": [(3, 4, 1), (3, 4, 5)],
    "...,...->...": [(2, 1, 3), (1, 4, 1)],
    "...i,i->...": [(2, 3, 4), (4,)],
    # one operand
    "ij->ji": [(3, 4)],
    "ij->i": [(3, 4)],
    "ijk->k": [(2, 3, 4)],
    "ij->": [(3, 4)],
    "ba": [(3, 4)],
    "...i->i...": [(2, 3, 4)],
    "ii->i": [(4, 4)],
    "ii": [(4, 4)],
    "iij->ji": [(3, 3, 4)],
    "ijij->ij": [(3, 4, 3, 4)],
    "iii->i": [(3, 3, 3)],
    "ii,ij->j": [(3, 3), (3, 4)],
    "aab,bcc->ac": [(3, 3, 4), (4, 5, 5)],
    # three and four operands
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 5)],
    "bi,bj,bk->bijk": [(2, 3), (2, 4), (2, 5)],
    "i,ij,j->": [(3,), (3, 4), (4,)],
    "ab,cd,ac,bd->": [(2, 3), (4, 5), (2, 4), (3, 5)],
    " i j , j k -> i k ": [(3, 4), (4, 5)],
}


def make_model(equation, shapes, dtype="float32", constants=None):
    """Operands are inputs x0, x1, ...; those of `constants` (position -> array) are not."""
    constants = constants or {}
    names = [f"x{at}" for at in range(len(shapes))]
    inputs = {
        name: (dtype, shape)
        for at, (name, shape) in enumerate(zip(names, shapes, strict=True))
        if at not in constants
    }
    node = helper.make_node("Einsum", names, ["y"], "n", equation=equation)
    known = {f"x{at}": array for at, array in constants.items()}
    return make_onnx([node], inputs, {"y": (dtype, None)}, known)


def draw(shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "i":
        return [np.asarray(rng.integers(-5, 6, shape)).astype(dtype) for shape in shapes]
    return [np.asarray(rng.normal(size=shape)).astype(dtype) for shape in shapes]


def check(model: onnx.ModelProto, arrays, *, tolerance=1e-5, wide=None) -> list[str]:
    names = [info.name for info in model.graph.input]
    given = dict(zip(names, arrays if wide is None else wide, strict=True))
    (expected,) = ReferenceEvaluator(wide_model(model) if wide is not None else model).run(
        None, given
    )
    mod, _ = rq.load(model)
    for found in (
        rq.reference.run(mod, list(arrays))[0],
        Executor(rq.compile(mod)).run("main", list(arrays))[0],
    ):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return list_operators(mod)


def wide_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same in float32."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for info in (*wide.graph.input, *wide.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return wide


@pytest.mark.sample(12)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum__of_every_form(equation):
    shapes = EQUATIONS[equation]
    names = check(make_model(equation, shapes), draw(shapes))
    assert "call_tir" not in names
    assert "einsum" not in names


@pytest.mark.parametrize(
    ("equation", "shapes", "symbolic"),
    [
        ("bsd,dhk->bhsk", [(2, 3, 4), (4, 5, 6)], [("b", "s", 4), (4, 5, 6)]),
        ("bqhd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 4, 5)], [("b", "q", 4, 5), ("b", "k", 4, 5)]),
        ("bhqk,bkhd->bqhd", [(2, 4, 3, 6), (2, 6, 4, 5)], [("b", 4, "q", "k"), ("b", "k", 4, 5)]),
        ("abcd,abce->abde", [(2, 3, 4, 5), (2, 3, 4, 6)], [("a", 3, "c", 5), ("a", 3, "c", 6)]),
        ("i,j->ij", [(3,), (4,)], [("n",), ("m",)]),
    ],
)
def test_einsum__of_symbolic_sizes(equation, shapes, symbolic):
    check(make_model(equation, symbolic), draw(shapes))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
@pytest.mark.parametrize("equation", ["bij,bjk->bik", "ij,ij->ij", "ijk->k", "i,i->"])
def test_einsum__of_other_types(equation, dtype):
    shapes = EQUATIONS[equation]
    check(make_model(equation, shapes, dtype), draw(shapes, dtype), tolerance=1e-9)


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "bsd,dhk->bhsk", "ijk->k"])
def test_einsum__of_float16_is_rounded_once(equation):
    shapes = EQUATIONS[equation]
    arrays = draw(shapes, "float16")
    wide = [array.astype("float32") for array in arrays]
    names = check(make_model(equation, shapes, "float16"), arrays, tolerance=1e-3, wide=wide)
    assert names[-1] == "astype"


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bsd,dk->bsk", [(2, 3, 16), (16, 8)]),
        ("bsd,kd->bsk", [(2, 3, 16), (8, 16)]),
        ("bsd,dhk->bhsk", [(2, 3, 16), (16, 2, 4)]),
        ("dhk,bsd->bshk", [(16, 2, 4), (2, 3, 16)]),
        ("bshk,hkd->bsd", [(2, 3, 4, 4), (4, 4, 8)]),
        ("...d,dk", [(2, 3, 16), (16, 8)]),
    ],
)
def test_einsum__with_a_weight_is_quantized(equation, shapes):
    arrays = draw(shapes)
    at = 0 if equation.startswith("dhk") else 1
    data = arrays[1 - at]
    mod, params = rq.load(make_model(equation, shapes, constants={at: arrays[at]}))
    qmod = rq.quantize(mod, params, [data] * 2)
    assert "matmul" in [row.op for row in rq.ledger(qmod).quantized]
    assert "matmul" not in [row.op for row in rq.ledger(qmod).floating]
    (found,) = rq.reference.run(qmod, [data])
    expected = np.einsum(equation, *arrays)
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 0.03


def test_einsum__of_two_values_is_quantized():
    equation, shapes = "bqhd,bkhd->bhqk", [(1, 6, 2, 8), (1, 6, 2, 8)]
    mod, params = rq.load(make_model(equation, shapes))
    arrays = draw(shapes)
    qmod = rq.quantize(mod, params, [dict(zip(("x0", "x1"), arrays, strict=True))] * 2)
    assert "matmul" in [row.op for row in rq.ledger(qmod).quantized]
    assert "matmul" not in [row.op for row in rq.ledger(qmod).floating]


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 4)]),
        ("ijk->i", [(3, 4)]),
        ("i->i", [(3, 4)]),
        ("ij->ik", [(3, 4)]),
        ("ij->ii", [(3, 4)]),
        ("i1->i", [(3, 4)]),
        ("ij,jk->ik", [(3, 4), (5, 6)]),
        ("ii->i", [(3, 4)]),
        ("ii->i", [("n", "n")]),
    ],
)
def test_einsum__that_is_none_is_refused(equation, shapes):
    with pytest.raises(ModelError, match=r"Node 'n' \(operator Einsum"):
        rq.load(make_model(equation, shapes))
