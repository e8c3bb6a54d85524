"""ONNX reader: If, Loop and Scan -> the operators of the bodies that they run. Their path must be
known when the model is read.

Operators inside control flow could not be quantized, and `main` is one dataflow block. So a Loop or
Scan needs a constant number of steps: from input sizes, or from inputs that are fixed (`load(...,
inputs={"sr": 16000})`). If the condition of an If is known at run time only, both branches are
computed and one result is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.branches import choose_values, make_scalar
from relayquant.formats.readers.onnx.graph.fold import find_array
from relayquant.formats.readers.onnx.graph.symbolic import emit_tensor, is_sizes
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.steps import (
    check_steps,
    find_length,
    stack_values,
    take_element,
)
from relayquant.formats.readers.refusal import Refusal, find_inputs

#: Emits the operators of a body, given values for its inputs. Returns its outputs.
BuildBody = Callable[[onnx.GraphProto, Sequence[relax.Expr]], list[relax.Expr]]

#: Emits a node, given the builder, inputs and attributes. Returns its outputs.
ConvertFlow = Callable[
    [relax.BlockBuilder, Sequence[Any], dict[str, Any], BuildBody], list[relax.Expr]
]


def choose_branch(
    bb: Builder, inputs: Operands, attrs: Attrs, build: BuildBody
) -> list[relax.Expr]:
    """Convert If(condition) to the outputs of the branch that is taken. The other branch is
    ignored.

    With a run-time condition: R.where(condition, output of one branch, output of the other).

    Raises:
        Refusal: a run-time condition is not one number, or the branches return values of different
            types or shapes, or values that are not tensors.
    """
    condition = find_array(inputs[0])
    if condition is not None:
        return build(attrs["then_branch" if condition.item() else "else_branch"], [])
    scalar = make_scalar(bb, inputs[0])
    results = [build(attrs[name], []) for name in ("then_branch", "else_branch")]
    tensors = [
        [emit_tensor(bb, value) if is_sizes(value) else value for value in values]
        for values in results
    ]
    remedy = refuse_source(bb, "condition", inputs[0]).remedy
    return choose_values(bb, scalar, zip(*tensors, strict=True), remedy)


def unroll_loop(bb: Builder, inputs: Operands, attrs: Attrs, build: BuildBody) -> list[relax.Expr]:
    """Convert Loop(count, condition, values) to repeated bodies.

    Returns the last values, then the collected values of the steps, stacked along a new first axis.

    Raises:
        Refusal: the number of steps is not constant or more than `MAX_STEPS`, or it is 0 and
            results are collected, whose shape is then unknown.
    """
    count, condition, *values = inputs
    most = None
    if count is not None:
        array = find_array(count)
        if array is None:
            raise refuse_source(bb, "number of steps", count)
        most = int(array.item())
    goes_on = condition is None or read_condition(bb, condition)
    body, steps = attrs["body"], 0
    carried = len(values)
    collected: list[list[relax.Expr]] = [[] for _ in body.output[1 + carried :]]
    while goes_on and (most is None or steps < most):
        check_steps(steps + 1)
        state = [relax.const(np.array(steps), "int64"), relax.const(np.array(True), "bool")]
        condition, *outputs = build(body, [*state, *values])
        values = outputs[:carried]
        for items, output in zip(collected, outputs[carried:], strict=True):
            items.append(output)
        goes_on, steps = read_condition(bb, condition), steps + 1
    if collected and not steps:
        raise Refusal("it takes no step, and what it would collect has no known shape")
    return [*values, *(stack_values(bb, items, 0) for items in collected)]


def unroll_scan(bb: Builder, inputs: Operands, attrs: Attrs, build: BuildBody) -> list[relax.Expr]:
    """Convert Scan(states, sequences) to one body per element of the sequences.

    Returns the last states, then the results of the steps, stacked.

    Raises:
        Refusal: the length of a sequence is unknown, 0 or more than `MAX_STEPS`, or the lengths
            differ.
    """
    body, count = attrs["body"], int(attrs["num_scan_inputs"])
    if len(body.input) != len(inputs):
        raise Refusal(
            f"its body has {format_count(len(body.input), 'input')} for "
            f"{format_count(len(inputs), 'operand')}; supported: equal numbers, as in opset 9 "
            "and later",
            "Convert the model: onnx.version_converter.convert_version(model, 13)",
        )
    values, sequences = list(inputs)[:-count], list(inputs)[-count:]
    given = len(body.output) - len(values)
    axes = read_list(attrs, "scan_input_axes", count)
    backwards = read_list(attrs, "scan_input_directions", count)
    output_axes = read_list(attrs, "scan_output_axes", given)
    output_backwards = read_list(attrs, "scan_output_directions", given)
    lengths = {find_length(bb, data, axis) for data, axis in zip(sequences, axes, strict=True)}
    if len(lengths) != 1:
        raise Refusal(f"its sequences have different lengths: {sorted(lengths)}")
    (length,) = lengths
    check_steps(length)
    collected: list[list[relax.Expr]] = [[] for _ in range(given)]
    for step in range(length):
        elements = [
            take_element(bb, data, length - 1 - step if is_reversed else step, axis)
            for data, axis, is_reversed in zip(sequences, axes, backwards, strict=True)
        ]
        outputs = build(body, [*values, *elements])
        values = outputs[: len(values)]
        for items, output in zip(collected, outputs[len(values) :], strict=True):
            items.append(output)
    stacked = [
        stack_values(bb, items[::-1] if is_reversed else items, axis)
        for items, axis, is_reversed in zip(collected, output_axes, output_backwards, strict=True)
    ]
    return [*values, *stacked]


def read_list(attrs: dict[str, Any], name: str, count: int) -> list[int]:
    """Read an attribute with a number per sequence, default 0.

    Raises:
        Refusal: it has another length.
    """
    values = [int(value) for value in attrs.get(name, [0] * count)]
    if len(values) != count:
        raise Refusal(
            f"{name} has {format_count(len(values), 'number')} for "
            f"{format_count(count, 'sequence')}"
        )
    return values


def read_condition(bb: Builder, condition: relax.Expr) -> bool:
    """Return the value of a constant condition.

    Raises:
        Refusal: the condition is not constant. Names the inputs of the model that it depends on.
    """
    array = find_array(condition)
    if array is None:
        raise refuse_source(bb, "condition", condition)
    return bool(array.item())


def refuse_source(bb: Builder, what: str, value: relax.Expr) -> Refusal:
    """Make the refusal for a value that must be constant: what it depends on, and what to do."""
    names = list(find_inputs(value, bb.lookup_binding))
    if not names:
        return Refusal(
            f"its {what} depends on sizes that are not known; supported: constants",
            "Fix them while loading: shapes={'NAME': (2, 3)}",
        )
    inputs = ", ".join(map(repr, names))
    return Refusal(
        f"its {what} is computed from {inputs} at run time; supported: constants",
        f"Fix an input while loading: inputs={{{names[0]!r}: value}}, or the sizes that it depends "
        f"on: shapes={{{names[0]!r}: (...)}}",
    )


#: operator -> its replacement
CONTROL_FLOW: dict[str, ConvertFlow] = {
    "If": choose_branch,
    "Loop": unroll_loop,
    "Scan": unroll_scan,
}
