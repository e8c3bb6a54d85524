"""The parts of the model's outputs: a result that concatenations put together -> what they join.

A detector's places of 0 to 400 and scores of 0 to 1 are such parts, and the noise of one hides that
of the other. So outputs are judged part by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.reference.frame import Frame, match_shape
from relayquant.ir.reference.interpreter import evaluate
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.expressions import shape_of
from relayquant.ir.rewrite.graph import iterate_results, result_expr, tensor_shape
from relayquant.ir.rewrite.moves import MOVES

#: of one result
MOST_PARTS = 32
CONCAT = "relax.concat"
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class OutputPart:
    """Elements of one result of main, the same ones of each sample.

    Attributes:
        result: Number of the result.
        value: The value that they come from: what a concatenation joins, or the result itself.
        elements: Their numbers within a sample; None: all.
    """

    result: int
    value: relax.Expr
    elements: NDArray[np.int64] | None = None

    def take(self, results: Sequence[Array]) -> Array:
        """Return the part of main's results: all of one, or (samples, elements)."""
        whole = results[self.result]
        return whole if self.elements is None else whole.reshape(len(whole), -1)[:, self.elements]


def find_parts(view: Graph, inputs: Mapping[str, Array]) -> list[OutputPart]:
    """Return the parts of all results of main on inputs of these shapes, in order."""
    frame = Frame(view.mod)
    for param in view.func.params:
        if dims := shape_of(param):
            match_shape(frame, param.name, dims, inputs[param.name].shape)
    found: list[OutputPart] = []
    for i, result in enumerate(iterate_results(result_expr(view))):
        values = list_parts(view, result) if isinstance(result, relax.Var) else [result]
        labels = label_elements(view, frame, result, values) if len(values) > 1 else None
        if labels is None or (labels != labels[:1]).any():
            found.append(OutputPart(i, result))
            continue
        places = [np.flatnonzero(labels[0] == k) for k in range(len(values))]
        found += map(OutputPart, [i] * len(values), values, places)
    return found


def find_common_parts(
    view: Graph, batches: Iterable[Mapping[str, Array]]
) -> list[list[OutputPart]]:
    """Return the parts on each batch: the same values in the same order. A result that is whole on
    one batch is whole on all, since one sample alone may have parts where two are mixed.
    """
    found = [find_parts(view, batch) for batch in batches]
    whole = {part.result: part for parts in found for part in parts if part.elements is None}
    return [
        [*whole.values(), *(part for part in parts if part.result not in whole)] for parts in found
    ]


def list_parts(view: Graph, result: relax.Var) -> list[relax.Var]:
    """Return the values that a result is put together from by concatenations, or itself.

    It is left whole where a part has another first axis, or there are more than `MOST_PARTS`.
    """
    found: dict[relax.Var, None] = {}

    def visit(var: relax.Var) -> None:
        operands = list_joined(view, var)
        values = [each for each in operands if isinstance(each, relax.Var)]
        if not values or len(values) < len(operands):
            found[var] = None
        for each in values if var not in found else ():
            visit(each)

    visit(result)
    samples = (tensor_shape(result) or (None,))[0]
    is_split = 1 < len(found) <= MOST_PARTS and all(
        var in view.values and (tensor_shape(var) or (0,))[0] == samples for var in found
    )
    return list(found) if is_split else [result]


def list_joined(view: Graph, var: relax.Var) -> list[relax.Expr]:
    """Return what a concatenation, a slice or a move takes its elements from; [] of others."""
    call, name = view.call_of(var), view.op_name(var)
    if call is None or name not in (CONCAT, "relax.strided_slice", *MOVES):
        return []
    operand = call.args[0]
    if name != CONCAT:
        return [operand]
    return list(operand.fields) if isinstance(operand, relax.Tuple) else []


def label_elements(
    view: Graph, frame: Frame, result: relax.Var, parts: Sequence[relax.Var]
) -> Array | None:
    """Return for each element of a result the number of its part, (samples, elements); None where
    a size is known only when main runs.

    What joins them runs on parts that are filled with their numbers.
    """
    try:
        for k, part in enumerate(parts):
            if not (dims := shape_of(part)):
                return None  # of a tensor whose sizes no type says
            shape = tuple(evaluate(frame, size, part.name) for size in dims)
            frame.values[part] = np.full(shape, k, "int32")
        label_value(view, frame, result)
    except ModelError:
        return None
    labels = frame.values[result]
    return labels.reshape(len(labels), -1)


def label_value(view: Graph, frame: Frame, var: relax.Var) -> None:
    """Compute a value, and first what it joins, unless they are known."""
    if var not in frame.values:
        for each in list_joined(view, var):
            if isinstance(each, relax.Var):
                label_value(view, frame, each)
        frame.values[var] = evaluate(frame, view.values[var], var.name)
