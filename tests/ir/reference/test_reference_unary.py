"""The rows of functions of one value, against ONNX's own evaluator and their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx

from relayquant.ir.reference.unary import RELAX_UNARY, UNARY, evaluate_formula

X = np.linspace(-6, 6, 241, dtype="float32")
ARITHMETIC = {"add": np.add, "multiply": np.multiply, "divide": np.divide}
BOUNDED = {"asin", "acos", "atanh"}
#: ONNX's operators on float32 that Relax spells as formulas, or has not at all
SPELLED_OUT = {"gelu": "Gelu", "elu": "Elu", "mish": "Mish", "hardswish": "HardSwish"}


def in_domain(row):
    if row.name == "acosh":
        return np.abs(X) + 1
    x = X / 7 if row.name in BOUNDED else X
    return x if row.low is None else np.abs(x) + row.low


def evaluate_onnx(op, x):
    model = make_onnx([helper.make_node(op, ["x"], ["y"])], {"x": None}, "y", (), 20)
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


@pytest.mark.parametrize(
    "row",
    [row for row in UNARY if row.onnx != "Not" and (row.onnx or row.name in SPELLED_OUT)],
    ids=lambda row: row.name,
)
def test_unary__is_what_onnx_means_by_it(row):
    x = in_domain(row)
    with np.errstate(all="ignore"):
        have = row.function(x)
        expected = evaluate_onnx(row.onnx or SPELLED_OUT[row.name], x)
    np.testing.assert_allclose(have, expected, 3e-6, 1e-6)


@pytest.mark.parametrize("row", [row for row in UNARY if row.formula], ids=lambda row: row.name)
def test_formula__computes_the_function(row):
    x = in_domain(row).astype("float64")

    def apply(word, operands, is_last):
        known = ARITHMETIC.get(word) or RELAX_UNARY[f"relax.{word}"].function
        return known(*operands)

    with np.errstate(all="ignore"):
        have = evaluate_formula(row.formula, x, apply, float)
        np.testing.assert_allclose(have, row.function(x), 1e-12, 1e-15)


def test_tabulate__is_float32_of_the_double_and_honours_attributes():
    softplus = RELAX_UNARY["relax.nn.softplus"]
    have = softplus.tabulate(X, beta=0.5, threshold=1.0)
    wide = X.astype("float64") * 0.5
    expected = np.where(wide > 1.0, X, np.log1p(np.exp(wide)) / 0.5)
    np.testing.assert_array_equal(have, expected.astype("float32"))
