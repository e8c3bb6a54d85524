"""Operators of scikit-learn pipelines (ai.onnx.ml): what ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx

DOMAIN = "ai.onnx.ml"
MATRIX = {"coefficients": [0.5, -1.0, 2.0, 0.25, 1.5, -0.75], "intercepts": [0.5, -0.5]}
LABELS = {"classlabels_ints": [3, 7]}


def draw(*shape, dtype="float32"):
    return np.random.default_rng(0).normal(0, 3, shape).astype(dtype)


def make_model(nodes, x, outputs, weights=None, shape=None):
    inputs = {"x": (str(x.dtype), shape or x.shape)}
    ends = {name: (dtype, None) for name, dtype in outputs.items()}
    return make_onnx(nodes, inputs, ends, weights or {})


def check(model, x):
    """Compare reference and compiled code with ONNX Runtime."""
    mod, _ = import_onnx(model)
    expected = run_onnxruntime(model, {"x": x})
    for found in (rq.reference.run(mod, [x]), rq.Executor(rq.compile(mod)).run("main", [x])):
        for have, want in zip(found, expected, strict=True):
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def with_zeros(x):
    x[1] = 0
    return x


def with_gaps(x):
    x[0, 1] = x[2, 2] = np.nan
    return x


WHOLE = np.array([[0, 5, -1], [7, 0, 0]], "int64")
#: name -> (operator, attributes, data, dtype of the result)
CASES = {
    "scaler": ("Scaler", {"offset": [1.0, -2.0, 0.5], "scale": [2.0, 0.1, 3.0]}, draw(4, 3)),
    "scaler_of_one": ("Scaler", {"offset": [1.0], "scale": [2.0]}, draw(4, 3)),
    "scaler_float64": ("Scaler", {"offset": [1.0], "scale": [2.0]}, draw(4, 3, dtype="float64")),
    "scaler_of_integers": ("Scaler", {"offset": [1.0], "scale": [0.3]}, WHOLE),
    "imputer": ("Imputer", {"imputed_value_floats": [7.0, 8.0, 9.0]}, with_zeros(draw(4, 3))),
    "imputer_of_nan": (
        "Imputer",
        {"imputed_value_floats": [1.5], "replaced_value_float": float("nan")},
        with_gaps(draw(4, 3)),
    ),
    "imputer_of_integers": (
        "Imputer",
        {"imputed_value_int64s": [4], "replaced_value_int64": 5},
        WHOLE,
    ),
    "normalizer": ("Normalizer", {}, with_zeros(np.abs(draw(4, 3)))),
    "normalizer_max": ("Normalizer", {"norm": "MAX"}, with_zeros(draw(4, 3))),
    "normalizer_l1": ("Normalizer", {"norm": "L1"}, with_zeros(draw(4, 3))),
    "normalizer_l2": ("Normalizer", {"norm": "L2"}, with_zeros(draw(4, 3))),
    "normalizer_of_integers": ("Normalizer", {"norm": "L1"}, WHOLE),
    "regressor": ("LinearRegressor", {**MATRIX, "targets": 2}, draw(4, 3)),
    "regressor_without_intercept": (
        "LinearRegressor",
        {"coefficients": [0.5, -1.0, 2.0]},
        draw(4, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operator__computes_what_onnxruntime_computes(name):
    kind, attrs, x = CASES[name]
    node = helper.make_node(kind, ["x"], ["y"], domain=DOMAIN, **attrs)
    is_whole = name == "imputer_of_integers"
    wanted = TensorProto.INT64 if is_whole else TensorProto.FLOAT
    check(make_model([node], x, {"y": wanted}), x)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_classifier__labels_and_scores(dtype, transform):
    attrs = {**MATRIX, **LABELS, "post_transform": transform, "multi_class": 1}
    node = helper.make_node("LinearClassifier", ["x"], ["label", "y"], domain=DOMAIN, **attrs)
    x = draw(5, 3, dtype=dtype)
    outputs = {"label": TensorProto.INT64, "y": TensorProto.FLOAT}
    check(make_model([node], x, outputs), x)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_extractor__takes_columns(shape):
    node = helper.make_node("ArrayFeatureExtractor", ["x", "i"], ["y"], domain=DOMAIN)
    x = draw(*shape)
    weights = {"i": np.array([[4, 0, 0]])}
    check(make_model([node], x, {"y": TensorProto.FLOAT}, weights), x)


def test_pipeline__symbolic_batch():
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain=DOMAIN, offset=[1.0], scale=[0.5]),
        helper.make_node("LinearClassifier", ["s"], ["l", "p"], domain=DOMAIN, **MATRIX, **LABELS),
        helper.make_node("Normalizer", ["p"], ["y"], domain=DOMAIN, norm="L2"),
    ]
    outputs = {"l": TensorProto.INT64, "y": TensorProto.FLOAT}
    for rows in (1, 4):
        x = draw(rows, 3)
        check(make_model(nodes, x, outputs, shape=["N", 3]), x)


@pytest.mark.parametrize(
    ("kind", "outputs", "attrs", "message"),
    [
        ("ZipMap", ["y"], {"classlabels_int64s": [0, 1, 2]}, r"dictionaries.*'zipmap': False"),
        (
            "LinearClassifier",
            ["l", "y"],
            {**MATRIX, "classlabels_strings": ["a", "b"]},
            "labels are texts; supported: integers .*LabelEncoder",
        ),
        (
            "LinearClassifier",
            ["l", "y"],
            {"coefficients": [1.0, 2.0, 3.0], "intercepts": [0.5], **LABELS},
            "1 intercept for 2 labels; supported: as many",
        ),
        ("LinearRegressor", ["y"], {"coefficients": [1.0]}, r"shape \(2, 3\), and it has 1 coef"),
        (
            "LinearRegressor",
            ["y"],
            {"coefficients": [1.0] * 3, "post_transform": "PROBIT"},
            "post_transform is PROBIT; supported: NONE, SOFTMAX, LOGISTIC",
        ),
        (
            "Scaler",
            ["y"],
            {"offset": [1.0, 2.0]},
            "2 values for an axis of size 3; supported: 1 or",
        ),
        ("Imputer", ["y"], {}, "without imputed_value_floats"),
        ("Normalizer", ["y"], {"norm": "L3"}, "norm is L3; allowed: MAX, L1, L2"),
    ],
)
def test_operator__refused_by_name(kind, outputs, attrs, message):
    node = helper.make_node(kind, ["x"], outputs, domain=DOMAIN, **attrs)
    with pytest.raises(ModelError, match=message):
        import_onnx(make_model([node], draw(2, 3), dict.fromkeys(outputs, TensorProto.FLOAT)))
