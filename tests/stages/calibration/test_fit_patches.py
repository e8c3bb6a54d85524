"""Operators as matrix products: rows times weights must equal the operator, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from relayquant.ir import reference
from relayquant.ir.rewrite import Graph, Match
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.calibration.weights.patches import LinearView, make_linear_view

CASES = {
    "pointwise": ((2, 5, 4, 3), (6, 5, 1, 1), {}),
    "padded": ((1, 3, 6, 7), (4, 3, 3, 2), {"padding": [1, 0, 2, 1]}),
    "strided": ((2, 3, 9, 8), (4, 3, 3, 3), {"strides": [2, 1], "padding": [1, 1, 1, 1]}),
    "dilated": ((1, 3, 9, 9), (4, 3, 3, 3), {"dilation": [2, 3]}),
    "depthwise": ((2, 6, 5, 5), (6, 1, 3, 3), {"groups": 6, "padding": [1, 1, 1, 1]}),
    "multiplier": ((1, 3, 5, 5), (6, 1, 3, 3), {"groups": 3}),
    "grouped": ((1, 6, 5, 5), (4, 3, 2, 3), {"groups": 2}),
}
LAYOUTS = [("NCHW", "OIHW"), ("NHWC", "HWIO")]


def match_call(call: relax.Call, params: list[relax.Var]) -> Match:
    built = make_main(params, lambda _: call)
    mod: tvm.IRModule = built
    graph = Graph(mod)
    root = graph.bindings[-1].var
    args = graph.values[root].args
    return Match(graph, root, {"data": args[0], "weight": args[1]}, ())


def make_case(
    call: relax.Call, params: list[relax.Var], data: np.ndarray, weight: np.ndarray
) -> tuple[LinearView, np.ndarray]:
    """The view, and what numpy computes."""
    match = match_call(call, params)
    view = make_linear_view(match)
    assert view is not None
    return view, reference.run(match.graph.mod, [data])[0]


def check_convolution(
    convolve: Callable[..., relax.Call], case: tuple, letters: str, layouts: tuple[str, str]
) -> None:
    """Patches times weights are what numpy computes, of a case in NCHW and `letters`."""
    data_shape, weight_shape, attrs = case
    rng = np.random.default_rng(0)
    data = rng.standard_normal(data_shape).astype("float32")
    weight = rng.standard_normal(weight_shape).astype("float32")
    data = np.ascontiguousarray(data.transpose(["NCHW".index(c) for c in layouts[0]]))
    weight = np.ascontiguousarray(weight.transpose([letters.index(c) for c in layouts[1]]))
    var = relax.Var("x", relax.TensorType(data.shape, "float32"))
    call = convolve(
        var, relax.const(weight), data_layout=layouts[0], kernel_layout=layouts[1], **attrs
    )
    view, expected = make_case(call, [var], data, weight)
    check_view(view, data, weight, np.moveaxis(expected, layouts[0].index("C"), -1))


@pytest.mark.parametrize("layouts", LAYOUTS, ids=[d for d, _ in LAYOUTS])
@pytest.mark.parametrize("name", CASES)
def test_sample_rows__equal_conv2d(name: str, layouts: tuple[str, str]) -> None:
    check_convolution(relax.op.nn.conv2d, CASES[name], "OIHW", layouts)


def test_sample_rows__equal_conv1d() -> None:
    rng = np.random.default_rng(1)
    data = rng.standard_normal((2, 4, 11)).astype("float32")
    weight = rng.standard_normal((6, 2, 3)).astype("float32")
    var = relax.Var("x", relax.TensorType(data.shape, "float32"))
    call = relax.op.nn.conv1d(var, relax.const(weight), strides=2, padding=[1, 2], groups=2)
    view, expected = make_case(call, [var], data, weight)
    check_view(view, data, weight, np.moveaxis(expected, 1, -1))


def test_sample_rows__equal_dense() -> None:
    rng = np.random.default_rng(2)
    data = rng.standard_normal((2, 3, 4)).astype("float32")
    weight = rng.standard_normal((4, 5)).astype("float32")
    var = relax.Var("x", relax.TensorType(data.shape, "float32"))
    view, expected = make_case(relax.op.matmul(var, relax.const(weight)), [var], data, weight)
    check_view(view, data, weight, expected)


def check_view(
    view: LinearView, data: np.ndarray, weight: np.ndarray, expected: np.ndarray
) -> None:
    rows = view.sample_rows([data], 10**6, np.random.default_rng(0))
    matrix = view.weight_to_rows(weight)
    product = np.einsum("gnk,gok->ngo", rows, matrix).reshape(expected.shape)
    assert np.allclose(product, expected, atol=1e-4)
    # What is applied to the values is not applied to the padding's zeros.
    halves = view.sample_rows([data], 10**6, np.random.default_rng(0), lambda x: x / 2 + (x == 0))
    assert np.array_equal(halves, rows / 2)
    assert np.array_equal(view.rows_to_weight(matrix, weight.shape), weight)
    few = view.sample_rows([data], 3, np.random.default_rng(5))
    assert few.shape == (view.groups, min(3, rows.shape[1]), rows.shape[2])
    again = view.sample_rows([data], 3, np.random.default_rng(5))
    assert np.array_equal(few, again)
    everything = {row.tobytes() for row in rows.transpose(1, 0, 2)}
    assert {row.tobytes() for row in few.transpose(1, 0, 2)} <= everything


TRANSPOSED_CASES = {
    "plain": ((2, 3, 4, 5), (3, 4, 2, 3), {}),
    "strided": ((1, 3, 4, 3), (3, 4, 3, 3), {"strides": [2, 3], "padding": [1, 0, 1, 2]}),
    "dilated": ((1, 2, 4, 4), (2, 3, 2, 3), {"dilation": [2, 1], "strides": [2, 2]}),
    "grouped": ((2, 6, 3, 3), (6, 2, 3, 2), {"groups": 2, "strides": [2, 1]}),
    "longer": ((1, 3, 3, 3), (3, 2, 3, 3), {"strides": [2, 2], "output_padding": [1, 0]}),
}


@pytest.mark.parametrize("layouts", [("NCHW", "IOHW"), ("NHWC", "HWOI")], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", TRANSPOSED_CASES)
def test_sample_rows__equal_conv2d_transpose(name: str, layouts: tuple[str, str]) -> None:
    check_convolution(relax.op.nn.conv2d_transpose, TRANSPOSED_CASES[name], "IOHW", layouts)


def test_sample_rows__of_several_batches_are_those_of_the_joined_batch() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal((n, 5, 6, 4), "float32") for n in (1, 3, 2)]
    conv = LinearView((0, 2, 3, 1), (0, 2, 3, 1), (3, 2), (1, 2), ((1, 0), (0, 1)), (1, 1))
    dense = LinearView(None, (1, 0))
    for view in (conv, dense):
        for count in (7, 10**6):
            apart = view.sample_rows(parts, count, np.random.default_rng(4), np.rint)
            joined = view.sample_rows(
                [np.concatenate(parts)], count, np.random.default_rng(4), np.rint
            )
            np.testing.assert_array_equal(apart, joined)


def test_make_linear_view__declines_a_product_of_two_activations() -> None:
    lhs = relax.Var("x", relax.TensorType((2, 3, 4), "float32"))
    rhs = relax.Var("y", relax.TensorType((2, 4, 5), "float32"))
    assert make_linear_view(match_call(relax.op.matmul(lhs, rhs), [lhs, rhs])) is None
