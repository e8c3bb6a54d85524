"""Pairs of inputs and results that the caller of `load` names as state."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import helper
from onnx_models import make_onnx

import relayquant as rq
from relayquant.errors import ModelError


def make_filter() -> onnx.ModelProto:
    """Two running values: main(h, x, old) -> (h_next, y, new)."""
    nodes = [
        helper.make_node("Add", ["h", "x"], ["h_next"]),
        helper.make_node("Mul", ["old", "x"], ["product"]),
        helper.make_node("Tanh", ["product"], ["new"]),
        helper.make_node("Sub", ["h_next", "new"], ["y"]),
    ]

    shape = (1, 3)
    ends = dict.fromkeys(("h_next", "y", "new"), shape)
    return make_onnx(nodes, dict.fromkeys(("h", "x", "old"), shape), ends)


@pytest.mark.parametrize("pairs", [{"h": "h_next", "old": "new"}, {"h": 0, "old": 2}])
def test_load__pairs_are_state(pairs):
    model = make_filter()
    mod, _ = rq.load(model, state=pairs)
    assert [param.name for param in mod["main"].params] == ["x", "h", "old"]
    executor, evaluator = rq.Executor(rq.compile(mod)), onnx.reference.ReferenceEvaluator(model)
    executor.state = state = {"h": np.ones((1, 3), "float32"), "old": np.ones((1, 3), "float32")}
    for x in np.random.default_rng(0).standard_normal((4, 1, 3), "float32"):
        h, expected, old = evaluator.run(None, {"x": x, **state})
        state = {"h": h, "old": old}
        (got,) = executor.run("main", [x])
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_load__state_begins_with_zeros():
    mod, _ = rq.load(make_filter(), state={"h": "h_next"})
    (value,) = rq.get_state(mod)
    assert (value.name, value.shape, value.dtype, value.initial) == ("h", (1, 3), "float32", None)
    assert [param.name for param in mod["main"].params] == ["x", "old", "h"]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"h": "h_nxt"}, r"'h_nxt', which is no result.*Likely: state=\{'h': 'h_next'\}"),
        ({"g": "h_next"}, r"'g', which is no input of the model"),
        ({"h": 3}, r"3, which is no result of the model"),
        ({"h": "new", "old": "new"}, r"names the result 'new' twice"),
    ],
)
def test_load__pairs_that_the_model_has_not(pairs, message):
    with pytest.raises(ModelError, match=message):
        rq.load(make_filter(), state=pairs)


def test_load__state_of_unknown_size_or_other_type():
    model = make_filter()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(ModelError, match=r"State 'h' is .* must be known.*shapes="):
        rq.load(model, state={"h": "h_next"})
    model = make_filter()
    del model.graph.input[0].type.tensor_type.shape.dim[0]  # broadcast in the Add
    with pytest.raises(ModelError, match=r"State 'h' is .*\(3,\).* its new value is .*\(1, 3\)"):
        rq.load(model, state={"h": "h_next"})


def test_load__nothing_is_assumed():
    mod, _ = rq.load(make_filter())
    assert rq.get_state(mod) == ()
    assert [param.name for param in mod["main"].params] == ["h", "x", "old"]
