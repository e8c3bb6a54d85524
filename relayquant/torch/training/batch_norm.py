"""Find the operator that each batch norm was folded into, so that training can separate it
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from relayquant.ir.ops.callbacks import run_accumulator_axis, run_axis
from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.plan import OperatorPlan
from relayquant.ir.rewrite import Graph, Skip
from relayquant.ir.rewrite.attributes import read_attributes
from relayquant.ir.rewrite.bind import LAYOUTS, bind_params
from relayquant.ir.rewrite.editor import Editor
from relayquant.stages.prepared import PreparedModel

BATCH_NORM = "relax.nn.batch_norm"
#: operators allowed between a product and its batch norm
BIAS_ADD = "relax.add"
#: tolerance of folded numbers, relative to the largest
TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Normalization:
    """A batch norm of the float module, float32 (channels,) each.

    Attributes:
        name: Name of the value that it computes.
        gamma, beta, mean, variance: Its factors and running statistics. The mean is the mean of the
            product without a bias.
        epsilon, momentum: Its attributes. The momentum is the weight of a new batch.
    """

    name: str
    gamma: np.ndarray
    beta: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    epsilon: float
    momentum: float

    @property
    def factor(self) -> np.ndarray:
        """The factor of the weights when the running statistics are folded into them."""
        return self.gamma / np.sqrt(self.variance + np.float32(self.epsilon))

    @property
    def shift(self) -> np.ndarray:
        """The bias after folding."""
        return self.beta - self.mean * self.factor


@dataclass(frozen=True, eq=False)
class FoldedNorm:
    """A batch norm that is part of a quantized operator.

    Attributes:
        norm: The batch norm.
        product: Value of the calibration graph that holds the sum of products without its bias.
        axis: Channel axis of that value.
        weight, bias: Keys of the operator's constants in the calibration graph.
        weight_axis: Axis of the output channels in the weight.
    """

    norm: Normalization
    product: str
    axis: int
    weight: str
    bias: str
    weight_axis: int


def find_norms(
    mod: tvm.IRModule, params: Mapping[str, Any] | None
) -> Iterator[Normalization | tuple[str, str]]:
    """Find the batch norms of a float module, and (value, reason) of each one that cannot be
    used.
    """
    editor = Editor(mod)
    bind_params(editor, params)
    graph = Graph(editor.build())
    for binding in graph.bindings:
        value = binding.value
        if not isinstance(value, relax.TupleGetItem) or value.index != 0:
            continue
        call = graph.call_of(value.tuple_value)
        if call is None or call.op.name != BATCH_NORM:
            continue
        yield read_norm(graph, call, binding.var.name)


def read_norm(graph: Graph, call: relax.Call, name: str) -> Normalization | tuple[str, str]:
    """Read one batch norm. The bias of a convolution before it moves into its mean."""
    attrs = read_attributes(call)
    factors = [read_constant(graph, arg) for arg in call.args[1:]]
    if any(array is None for array in factors):
        return name, "its factors or statistics are not constant"
    gamma, beta, mean, variance = (np.asarray(a, "float32") for a in factors)
    gamma = gamma if attrs["scale"] else np.ones_like(gamma)
    beta = beta if attrs["center"] else np.zeros_like(beta)
    source = graph.call_of(call.args[0])
    if source is not None and source.op.name == BIAS_ADD:
        biases = [array for arg in source.args if (array := read_constant(graph, arg)) is not None]
        if len(biases) != 1 or biases[0].size not in (1, mean.size):
            return name, "no convolution or matrix product with a constant weight is before it"
        mean = mean - biases[0].reshape(-1)
    if np.abs(gamma).min(initial=np.inf) < 1e-8:
        return name, "one of its factors is zero, so its weight has no scale"
    if not attrs["momentum"]:  # an export in evaluation mode writes 0 for None
        return name, "its momentum is 0 or None, with which its statistics would never change"
    return Normalization(
        name, gamma, beta, mean, variance, float(attrs["epsilon"]), float(attrs["momentum"])
    )


def read_constant(graph: Graph, expr: relax.Expr) -> np.ndarray | None:
    """Read a constant with one value per channel, in any shape."""
    while (call := graph.call_of(expr)) is not None and call.op.name in LAYOUTS:
        expr = call.args[0]
    return expr.value.numpy() if isinstance(expr, GenericConst) else None


def find_folded(prepared: PreparedModel, norm: Normalization) -> FoldedNorm | Skip:
    """Find the operator of a prepared model that a batch norm was folded into."""
    for operator in prepared.plan.operators:
        if norm.name in operator.values and operator.quantized and operator.pattern:
            return match_norm(prepared, norm, operator)
    return Skip("it is no part of a quantized operator")


def match_norm(
    prepared: PreparedModel, norm: Normalization, operator: OperatorPlan
) -> FoldedNorm | Skip:
    """Match `norm` to `operator` by the operator's constants."""
    weight, bias = f"{operator.name}:weight", f"{operator.name}:bias"
    constants = prepared.graph.constants
    if weight not in constants or bias not in constants:
        return Skip("the operator has no constant weight and bias")
    pattern = find_pattern(prepared.backend, operator.pattern)
    match = match_operator(Graph(prepared.mod), prepared.backend, operator)
    weight_axis = run_axis(pattern, pattern.operand("weight"), match)
    axis = run_accumulator_axis(pattern, match)
    if weight_axis is None or axis is None:
        return Skip("the weight has no axis of output channels")
    expected, folded = norm.shift, constants[bias].value.reshape(-1)
    is_same = folded.shape == expected.shape and np.allclose(
        folded, expected, rtol=TOLERANCE, atol=TOLERANCE * max(np.abs(expected).max(), 1e-6)
    )
    if not is_same:
        return Skip("more than it was folded into the operator")
    return FoldedNorm(norm, operator.values[0], axis, weight, bias, weight_axis)
