"""Chains of elementwise operators on one value: found however they are spelled, one table each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special
from tvm import relax
from tvm.relax import op

from relayquant.base.qtypes import QParams
from relayquant.ir.ops.chain import ChainPattern, build_chain_table, evaluate_chain
from relayquant.ir.rewrite import Graph

Emit = Callable[..., relax.Var]


def scalar(value: float, *shape: int) -> relax.Expr:
    return relax.const(np.full(shape, value, "float32"))


def build_graph(body: Callable[[Emit, relax.Var, relax.Var], list[relax.Var]]) -> Graph:
    """Graph of main(x, z); `body` emits values by name and returns the outputs."""
    x, z = (relax.Var(name, relax.TensorType((2, 3, 4), "float32")) for name in "xz")
    builder = relax.BlockBuilder()

    def emit(name: str, expr: relax.Expr) -> relax.Var:
        value = builder.normalize(expr)
        var = relax.DataflowVar(name, value.ty)
        builder.emit_normalized(relax.VarBinding(var, value))
        return var

    with builder.function("main", [x, z]):
        with builder.dataflow():
            outputs = [builder.emit_output(var) for var in body(emit, x, z)]
        builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
    return Graph(builder.get())


def gelu_as_keyword_transformer(e: Emit, x: relax.Var) -> relax.Var:
    """(x * 0.5) * (1 + tanh((x + x * x * x * 0.044715) * 0.79788))."""
    cube = e("cube", op.multiply(e("square", op.multiply(x, x)), x))
    inner = e("inner", op.add(x, e("scaled", op.multiply(cube, scalar(0.044715)))))
    tanh = e("tanh", op.tanh(e("argument", op.multiply(inner, scalar(0.7978845608)))))
    half = e("half", op.multiply(x, scalar(0.5)))
    return e("y", op.multiply(half, e("shifted", op.add(tanh, scalar(1.0)))))


def gelu_as_magika(e: Emit, x: relax.Var) -> relax.Var:
    """x * (0.5 * (1 + tanh(...))), constants first and of rank 3."""
    square = e("square", op.multiply(x, e("scaled", op.multiply(scalar(0.044715), x))))
    inner = e("inner", op.add(x, e("cube", op.multiply(x, square))))
    tanh = e("tanh", op.tanh(e("argument", op.multiply(scalar(0.7978845608, 1, 1, 1), inner))))
    shifted = e("shifted", op.add(scalar(1.0, 1, 1, 1), tanh))
    return e("y", op.multiply(x, e("half", op.multiply(shifted, scalar(0.5)))))


def gelu_by_erf(e: Emit, x: relax.Var) -> relax.Var:
    erf = e("erf", op.erf(e("scaled", op.divide(x, scalar(np.sqrt(2.0))))))
    product = e("product", op.multiply(x, e("shifted", op.add(erf, scalar(1.0)))))
    return e("y", op.multiply(product, scalar(0.5)))


def hard_swish(e: Emit, x: relax.Var) -> relax.Var:
    clipped = e("clipped", op.clip(e("shifted", op.add(x, scalar(3.0))), 0, 6))
    return e("y", op.divide(e("product", op.multiply(x, clipped)), scalar(6.0)))


def swish(e: Emit, x: relax.Var) -> relax.Var:
    return e("y", op.multiply(x, e("gate", op.sigmoid(x))))


def squared(e: Emit, x: relax.Var) -> relax.Var:
    return e("y", op.multiply(x, x))


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


FUNCTIONS = {
    gelu_as_keyword_transformer: tanh_gelu,
    gelu_as_magika: tanh_gelu,
    gelu_by_erf: lambda x: x * 0.5 * (1 + special.erf(x / np.sqrt(2))),
    hard_swish: lambda x: x * np.clip(x + 3, 0, 6) / 6,
    swish: lambda x: x * special.expit(x),
    squared: np.square,
}


def find(graph: Graph, name: str = "y"):
    return ChainPattern().match(graph, graph.vars[name])


@pytest.mark.parametrize("spelling", FUNCTIONS, ids=lambda f: f.__name__)
def test_chain__is_one_function_of_its_data(spelling):
    graph = build_graph(lambda e, x, z: [spelling(e, x)])
    match = find(graph)
    assert match is not None
    assert match.parts["data"].same_as(graph.func.params[0])
    values = np.linspace(-6, 6, 97, dtype="float32")
    expected = FUNCTIONS[spelling](values.astype("float64"))
    np.testing.assert_allclose(evaluate_chain(match, values), expected, atol=2e-6)


def test_chain__table_is_the_function_rounded_once():
    graph = build_graph(lambda e, x, z: [gelu_as_keyword_transformer(e, x)])
    data, out = QParams(0.05, 120, "uint8"), QParams(0.026, 7, "uint8")
    table = build_chain_table(find(graph), data, out)
    real = tanh_gelu((np.arange(256) - 120) * np.float64(np.float32(0.05)))
    expected = np.clip(np.rint(real / np.float32(0.026)) + 7, 0, 255)
    assert table.dtype == np.uint8
    # float32 arithmetic may round a tie the other way
    assert np.abs(table.astype(int) - expected).max() <= 1
    assert (table == expected).mean() > 0.98


def test_chain__of_two_values_ends_at_their_meeting():
    def body(e: Emit, x: relax.Var, z: relax.Var) -> list[relax.Var]:
        total = e("total", op.add(x, z))
        return [e("y", op.multiply(e("scaled", op.tanh(total)), scalar(2.0)))]

    graph = build_graph(body)
    match = find(graph)
    assert match.parts["data"].same_as(graph.vars["total"])
    assert find(graph, "total") is None


def test_chain__ends_at_a_clamp_that_its_producer_can_take():
    graph = build_graph(lambda e, x, z: [swish(e, e("clamped", op.nn.relu(x)))])
    assert find(graph).parts["data"].same_as(graph.vars["clamped"])


@pytest.mark.parametrize(
    "body",
    [
        lambda e, x, z: [e("y", op.multiply(x, e("gate", op.sigmoid(z))))],
        lambda e, x, z: [e("y", op.multiply(x, scalar(2.0)))],
        lambda e, x, z: [e("y", op.add(x, x))],
        lambda e, x, z: [e("y", op.nn.relu(x))],
        lambda e, x, z: [e("y", op.multiply(x, relax.const(np.ones(4, "float32"))))],
    ],
    ids=["two values", "scaled", "doubled", "relu", "vector"],
)
def test_no_chain(body):
    assert find(build_graph(body)) is None


def test_chain__stops_at_a_value_that_is_read_elsewhere():
    def body(e: Emit, x: relax.Var, z: relax.Var) -> list[relax.Var]:
        gate = e("gate", op.sigmoid(x))
        scaled = e("scaled", op.multiply(gate, scalar(2.0)))
        return [e("y", op.subtract(scaled, scalar(1.0))), e("w", op.multiply(gate, z))]

    graph = build_graph(body)
    assert find(graph).parts["data"].same_as(graph.vars["gate"])
