"""TensorFlow Lite reader: operators that run other graphs of the model, or keep a value.

`main` is one dataflow block, so a call is replaced by the called graph. Which graph is called, and
how often, must be known while the file is read. CALL_ONCE sets the initial value of a variable. If
nothing else assigns it, it is a constant, else a state: its first read is a parameter of main.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.branches import choose_values, make_scalar
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import constant_value

#: Largest number of steps that one loop is unrolled to.
MAX_STEPS = 4096

#: Largest depth of nested calls.
MAX_DEPTH = 32

#: Advice about a variable.
STATE = (
    "Make the state an input and an output of the model (in Keras, a stateful layer takes and "
    "returns it), and pass the output of one run to the next"
)


@dataclass(frozen=True, eq=False)
class AssignedVariable:
    """A variable that the model assigns in each run.

    Attributes:
        param: Its value before the run.
        initial: Its value before the first run, an array.
    """

    param: relax.Var
    initial: Any


def convert_call(converter: Any, op: Any) -> relax.Expr:
    """Convert CALL(values) to the operators of its graph."""
    options = read_options(op, "CallOptions")
    return pack(build_graph(converter, op, options.Subgraph(), read_operands(converter, op)))


def convert_composite(converter: Any, op: Any) -> relax.Expr:
    """Convert STABLEHLO_COMPOSITE(values) to the operators of its decomposition."""
    index = read_options(op, "StableHLOCompositeOptions").DecompositionSubgraphIndex()
    return pack(build_graph(converter, op, index, read_operands(converter, op)))


def convert_if(converter: Any, op: Any) -> relax.Expr:
    """Convert IF(condition, values) to the operators of the branch that is taken. With a run-time
    condition, both branches are computed and one result is taken, also of variables.

    Raises:
        Refusal: a run-time condition is not one number, or the branches differ in types or shapes.
    """
    options = read_options(op, "IfOptions")
    branches = (options.ThenSubgraphIndex(), options.ElseSubgraphIndex())
    condition, *values = read_operands(converter, op)
    array = constant_value(condition)
    if array is not None:
        graph = branches[0 if array.item() else 1]
        return pack(build_graph(converter, op, graph, values))
    scalar = make_scalar(converter.bb, condition)
    held, known = converter.conversion_state["resource_values"], {*converter.variables}
    before, results, behind = {**held}, [], []
    for step, graph in enumerate(branches):
        results.append(build_graph(converter, op, graph, values, step))
        behind.append({key: held[key] for key in converter.variables})
        # a variable that a branch made a state has its parameter's value before both branches
        before |= {key: v.param for key, v in converter.variables.items() if key not in known}
        held.clear()
        held.update(before)
    pairs = [tuple(one.get(key, before[key]) for one in behind) for key in converter.variables]
    held.update(zip(converter.variables, choose_values(converter.bb, scalar, pairs), strict=True))
    return pack(choose_values(converter.bb, scalar, zip(*results, strict=True)))


def convert_while(converter: Any, op: Any) -> relax.Expr:
    """Convert WHILE(values) to repeated bodies.

    Raises:
        Refusal: the number of steps is not constant, or more than `MAX_STEPS`.
    """
    is_plain = converter.kind == "WHILE"
    options = read_options(op, "WhileOptions" if is_plain else "StablehloWhileOptions")
    values = read_operands(converter, op)
    for step in range(MAX_STEPS + 1):
        (goes_on,) = build_graph(converter, op, options.CondSubgraphIndex(), values, step)
        condition = constant_value(goes_on)
        if condition is None:
            raise Refusal("its number of steps depends on the input; supported: a fixed number")
        if not condition.item():
            return pack(values)
        values = build_graph(converter, op, options.BodySubgraphIndex(), values, step)
    raise Refusal(
        f"it takes more than {format_count(MAX_STEPS, 'step')}; supported: up to that many"
    )


def convert_call_once(converter: Any, op: Any) -> None:
    """Convert CALL_ONCE: its graph sets the initial values of variables."""
    state = converter.conversion_state
    before = state["in_call_once_init"]
    state["in_call_once_init"] = True
    try:
        build_graph(converter, op, read_options(op, "CallOnceOptions").InitSubgraphIndex(), [])
    finally:
        state["in_call_once_init"] = before


def convert_var_handle(converter: Any, op: Any) -> None:
    """Convert VAR_HANDLE: its output is a handle of the variable."""
    (handle,) = converter.get_output_tensors(op)
    name = converter.find_name(handle.tensor_idx)
    converter.resource_handles[name] = converter._get_var_handle_resource_key(op, handle)


def convert_assign_variable(converter: Any, op: Any) -> None:
    """Convert ASSIGN_VARIABLE(handle, value): the value that later reads and the next run take."""
    handle, value = converter.get_input_tensors(op)
    key = find_variable(converter, handle)
    if not converter.conversion_state["in_call_once_init"]:
        find_state(converter, key)
    converter.conversion_state["resource_values"][key] = converter.get_tensor_expr(value)


def convert_read_variable(converter: Any, op: Any) -> relax.Expr:
    """Convert READ_VARIABLE(handle) to the value of the variable at this point.

    Raises:
        Refusal: the variable has no value.
    """
    key = find_variable(converter, converter.get_input_tensors(op)[0])
    if converter.found.is_changed:
        find_state(converter, key)
    return find_variable_value(converter, key)


def find_state(converter: Any, key: tuple[str, str]) -> None:
    """Make the variable a state of the model, if it is none yet.

    Raises:
        Refusal: the variable has no initial value, or one that is not constant.
    """
    if key in converter.variables:
        return
    value = find_variable_value(converter, key)
    initial = constant_value(value)
    if initial is None:
        raise Refusal(f"the initial value of {describe_variable(key)} is not constant", STATE)
    name = "/".join(part for part in key if part) or f"variable.{len(converter.variables)}"
    hold_variable(converter, key, name, initial)


def find_variable_tensor(converter: Any, index: int) -> tuple[str, str]:
    """Make a tensor that its operator writes a state of the model, if it is none yet. It begins
    with zeros. Returns its key among the variables.

    Raises:
        Refusal: the tensor is no variable, or is in a graph that another graph calls.
    """
    if index < 0:
        raise Refusal("it lacks a state")
    (tensor,) = converter.get_tensors([index])
    name = converter.find_name(index)
    if not tensor.tensor.IsVariable():
        raise Refusal(f"its state {name!r} is not marked as a variable")
    if converter.prefix:
        raise Refusal(f"its state {name!r} is in a graph that another graph calls", STATE)
    key = (f"tensor {index}", name)
    if key not in converter.variables:
        zeros = np.zeros([int(size) for size in tensor.tensor.ShapeAsNumpy()], "float32")
        hold_variable(converter, key, name, zeros)
    return key


def hold_variable(converter: Any, key: tuple[str, str], name: str, initial: np.ndarray) -> None:
    """Make a variable a parameter of main, with a name that no input and no other variable has."""
    main = converter.model.Subgraphs(0)
    taken = {variable.param.name for variable in converter.variables.values()}
    taken |= {
        converter.frontend.get_tensor_name(main, main.Inputs(at))
        for at in range(main.InputsLength())
    }
    while name in taken:
        name += "_"
    param = relax.Var(name, relax.TensorType(initial.shape, str(initial.dtype)))
    converter.variables[key] = AssignedVariable(param, initial)
    converter.conversion_state["resource_values"][key] = param


def find_variable_value(converter: Any, key: tuple[str, str]) -> relax.Expr:
    """Return the value of a variable. Refusal if it has none."""
    value = converter.conversion_state["resource_values"].get(key)
    if value is None:
        raise Refusal(
            f"nothing gives {describe_variable(key)} a value before it is read; supported: "
            "variables that CALL_ONCE sets",
            STATE,
        )
    return value


def find_variable(converter: Any, handle: Any) -> tuple[str, str]:
    """Return container and name of the variable of a handle."""
    name = converter.find_name(handle.tensor_idx)
    if name not in converter.resource_handles:
        raise Refusal(f"its handle {name!r} is of no VAR_HANDLE in the same graph")
    return converter.resource_handles[name]


def describe_variable(key: tuple[str, str]) -> str:
    """Describe a variable for a message."""
    container, name = key
    return f"variable {f'{container}/{name}' if container else name!r}"


def build_graph(
    converter: Any, op: Any, index: int, values: Sequence[relax.Expr], step: int = 0
) -> list[relax.Expr]:
    """Add the operators of a graph, given values for its inputs. Returns its outputs.

    Values are named after the calling operator, the graph and the step: "y.1.0.name".
    """
    stack = converter.conversion_state["lowering_stack"]
    if not 0 < index < converter.model.SubgraphsLength():
        raise Refusal(f"it refers to graph {index} of {converter.model.SubgraphsLength()}")
    if index in stack or len(stack) >= MAX_DEPTH:
        raise Refusal(f"its graph, number {index}, calls itself")
    graph = converter.model.Subgraphs(index)
    if graph.InputsLength() != len(values):
        needed = format_count(graph.InputsLength(), "input")
        raise Refusal(f"graph {index} has {needed}, and {len(values)} given")
    stack.append(index)
    try:
        table = converter.frontend.ExprTable()
        inner = type(converter)(
            converter.sources,
            converter.found,
            converter.sizes,
            converter.model,
            graph,
            table,
            converter.bb,
            converter.conversion_state,
            prefix=f"{converter.prefix}{converter.name_call(op)}.{index}.{step}.",
        )
        for at, value in enumerate(values):
            table.set_expr(inner.find_name(graph.Inputs(at)), value)
        inner.check_unsupported_ops()
        inner.convert_op_to_relax()
        outputs = [graph.Outputs(at) for at in range(graph.OutputsLength())]
        return [inner.get_tensor_expr(tensor) for tensor in inner.get_tensors(outputs)]
    finally:
        stack.pop()


def read_operands(converter: Any, op: Any) -> list[relax.Expr]:
    """Return all operands of an operator."""
    return [converter.get_tensor_expr(tensor) for tensor in converter.get_input_tensors(op)]


def pack(values: Sequence[relax.Expr]) -> relax.Expr:
    """Return a single value as it is, several as a tuple."""
    return values[0] if len(values) == 1 else relax.Tuple(list(values))


#: Converts an operator, given the converter and the operator.
FLOW: dict[str, Callable[[Any, Any], relax.Expr | None]] = {
    "ASSIGN_VARIABLE": convert_assign_variable,
    "CALL": convert_call,
    "CALL_ONCE": convert_call_once,
    "IF": convert_if,
    "READ_VARIABLE": convert_read_variable,
    "STABLEHLO_COMPOSITE": convert_composite,
    "STABLEHLO_WHILE": convert_while,
    "VAR_HANDLE": convert_var_handle,
    "WHILE": convert_while,
}
