"""PyTorch reader: what a program does besides computing its outputs. What it changes becomes state;
other effects are refused.

A decomposed program lists its mutations in its signature. Before that, the graph has operators that
change tensors in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from relayquant.errors import ModelError, format_count, warn_user
from relayquant.formats.readers.state import StatePair
from relayquant.formats.readers.torch.arguments import read_arguments

#: statistics of normalizations, which change in training mode only
STATISTICS = ("running_mean", "running_var")

#: Number of names that a message shows. The rest is counted.
MOST_NAMES = 5

#: Operators that only check numbers, such as sizes.
CHECKS = (
    *("aten._assert_scalar.default", "aten._assert_tensor_metadata.default"),
    *("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"),
)

#: Arguments that switch off an operator's random numbers if they are 0.
SWITCHES = ("train", "training", "dropout", "dropout_p")


def check_effects(program: Any) -> None:
    """Check that a program computes outputs and state from tensors and does nothing else.

    In a program as exported, mutations are not visible yet. In a decomposed program, the dropout of
    recurrent layers is not visible, because PyTorch's decomposition leaves it out.

    Raises:
        ModelError: the program changes running statistics, reads objects that are not tensors,
            computes gradients, or draws random numbers. Names them.
    """
    refuse_checks(program)
    check_signature(program.graph_signature)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if hasattr(part, "graph") else ():
            if is_random(node):
                raise ModelError(
                    f"{describe_node(node)} draws random numbers; supported: programs whose results"
                    " depend on their inputs alone. Pass it the numbers as an input, or export the "
                    "module in eval mode (model.eval()).",
                    code="RQ202",
                )


def refuse_checks(program: Any) -> None:
    """Check that no operator of a decomposed program fails for some values of its data, or has
    another effect that PyTorch orders by a token.

    Raises:
        ModelError: there is one. Names it, or the operator whose success it checks.
    """
    found: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target.__name__ != "with_effects":
            continue
        effect, checked = node.args[1], [each for each in node.args[2:] if hasattr(each, "args")]
        if "check_errors" in str(effect) and checked:
            source = checked[0].args[0]  # the operator has several results
            found.setdefault(str(source.target), []).append(source.name)
        else:
            found.setdefault(str(effect), []).append(node.name)
    if found:
        raise refuse_operators(found)


def refuse_operators(nodes: Mapping[str, list[str]]) -> ModelError:
    """Make the error for operators that are not supported: name -> names of nodes."""
    lines = [f"{op} (nodes {', '.join(map(repr, at))})" for op, at in nodes.items()]
    return ModelError(
        f"Not supported, {format_count(len(nodes), 'operator')} of the model: {'; '.join(lines)}. "
        "Write them with other operators before the export.",
        code="RQ202",
    )


def is_random(node: Any) -> bool:
    """Return whether a node draws random numbers that are used, from its operator's tags and
    arguments.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if not node.users or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    switches = {argument.name for argument in node.target._schema.arguments} & {*SWITCHES}
    return 0 not in read_arguments(node, *switches)  # False equals 0, None does not


def check_signature(signature: Any) -> None:
    """Check that the inputs of a signature are tensors and its outputs are results.

    Raises:
        ModelError: it has other inputs or outputs. Names them.
    """
    from torch.export.graph_signature import (  # pyright: ignore[reportMissingImports]
        ConstantArgument,
        InputKind,
        OutputKind,
    )

    objects = [
        str(spec.target or spec.arg.name)
        for spec in signature.input_specs
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN)
    ]
    if objects:
        raise ModelError(
            f"The program reads {quote_names(objects)}, which is not a tensor. Export a module "
            "whose attributes are tensors.",
            code="RQ202",
        )
    results = [spec.arg for spec in signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    for at, result in enumerate(results):
        if isinstance(result, ConstantArgument) and result.value is not None:
            raise ModelError(
                f"Result {at} of the program is {result.value!r}; supported: tensors. Export a "
                "module whose forward returns tensors alone.",
                code="RQ202",
            )
    for spec in signature.output_specs:
        if spec.kind not in (*list_mutations(), OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            raise ModelError(
                f"The program has the result {spec.arg.name!r} of kind {spec.kind.name}; supported:"
                " results of the module. Export the module's forward alone.",
                code="RQ202",
            )
    names = [str(spec.target).rpartition(".") for spec in signature.output_specs]
    modules = [path or "(the model itself)" for path, _, last in names if last in STATISTICS]
    if modules:
        raise ModelError(
            "The program changes the running statistics of "
            f"{quote_names([*dict.fromkeys(modules)])} (training mode) in each run. Export the "
            "module in evaluation mode: model.eval().",
            code="RQ202",
        )


def refuse_complex(program: Any) -> None:
    """Check that inputs, results and state of a decomposed program are real.

    Raises:
        ModelError: some are complex. Names them.
    """
    signature, nodes = program.graph_signature, {node.name: node for node in program.graph.nodes}
    given = [*signature.user_inputs, *(spec.arg.name for spec in signature.output_specs)]
    values = {name: nodes[name].meta.get("val") for name in given if name in nodes}
    names = [name for name, value in values.items() if getattr(value, "is_complex", bool)()]
    if names:
        raise ModelError(
            f"The program has complex inputs, results or state ({quote_names(names)}); supported: "
            "real ones. Take pairs and begin with torch.view_as_complex(x), return "
            "torch.view_as_real(y).",
            code="RQ202",
        )


def refuse_state(program: Any) -> None:
    """Check that a decomposed program changes nothing.

    Raises:
        ModelError: it changes buffers, parameters or inputs. Names them.
    """
    changed: dict[str, list[str]] = {}
    for spec in program.graph_signature.output_specs:
        if spec.kind in list_mutations():
            kind = spec.kind.name.removesuffix("_MUTATION").removeprefix("USER_").lower()
            changed.setdefault(kind, []).append(str(spec.target))
    if changed:
        said = [
            f"the {kind}{'s' if len(names) > 1 else ''} {quote_names(names)}"
            for kind, names in changed.items()
        ]
        raise ModelError(
            f"The program changes {' and '.join(said)} in each run; supported here: programs that "
            "only compute their outputs. Take the old value as an input and return the new one, "
            "write to a copy of an input (x = x.clone()), or quantize the module with "
            "relayquant.torch.quantize, which keeps state.",
            code="RQ202",
        )


def list_mutations() -> tuple[Any, ...]:
    """Return the kinds of outputs that are new values of a buffer, a parameter or an input."""
    from torch.export.graph_signature import OutputKind  # pyright: ignore[reportMissingImports]

    parameter = getattr(OutputKind, "PARAMETER_MUTATION", None)  # exists since PyTorch 2.10
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, parameter)
    return tuple(kind for kind in kinds if kind is not None)


def read_array(tensor: Any) -> np.ndarray:
    """Return a tensor's values. numpy has bfloat16 by TVM, not by PyTorch."""
    values = tensor.detach().cpu().contiguous()
    return tvm.runtime.from_dlpack(values.resolve_conj().resolve_neg()).numpy()


def take_state(program: Any) -> list[StatePair]:
    """Make inputs and outputs of what a decomposed program changes: buffers, parameters, inputs.

    PyTorch lists new values first among the outputs. The program is changed.

    Returns:
        What is changed, named as in the module. The initial values are those of the export, and
        zeros for inputs.
    """
    from torch.export.graph_signature import (  # pyright: ignore[reportMissingImports]
        InputKind,
        OutputKind,
    )

    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    mutations, pairs = list_mutations(), []
    for at, spec in enumerate(signature.output_specs):
        if spec.kind not in mutations:
            continue
        is_input = spec.kind is OutputKind.USER_INPUT_MUTATION
        (number,) = (
            i
            for i, given in enumerate(signature.input_specs)
            if (given.arg.name if is_input else given.target) == spec.target
        )
        given = signature.input_specs[number]
        initial = None if is_input else read_array(tensors[spec.target])
        pairs.append(StatePair(given.arg.name, at, str(spec.target), initial))
        user = dataclasses.replace(given, kind=InputKind.USER_INPUT, target=None, persistent=None)
        signature.input_specs[number] = user
        output = dataclasses.replace(spec, kind=OutputKind.USER_OUTPUT, target=None)
        signature.output_specs[at] = output
        if is_input:
            warn_user(
                f"The program changes its input {spec.target!r}, which becomes a state that begins "
                "with zeros. Attach another initial value with relayquant.with_state. If it is no "
                "state, write to a copy (x = x.clone()).",
                code="RQ202",
            )
    names = {pair.name for pair in pairs}
    program._constants = {n: value for n, value in program.constants.items() if n not in names}
    return pairs


def drop_constant_inputs(program: Any) -> None:
    """Remove the inputs of a decomposed program that are numbers, texts, truth values or None. The
    program was exported for their values and does not read them.
    """
    from torch.export.graph_signature import (  # pyright: ignore[reportMissingImports]
        ConstantArgument,
    )

    specs = program.graph_signature.input_specs
    names = {spec.arg.name for spec in specs if isinstance(spec.arg, ConstantArgument)}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in names and not node.users:
            program.graph.erase_node(node)
            specs[:] = [spec for spec in specs if spec.arg.name != node.name]


def drop_checks(program: Any) -> None:
    """Remove assertions about numbers from a decomposed program, and what only they read."""
    for node in reversed(program.graph.nodes):
        is_check = str(node.target) in CHECKS
        if is_check or (node.op == "call_function" and not node.users and not node.is_impure()):
            program.graph.erase_node(node)


def quote_names(names: list[str]) -> str:
    """Quote names: "'a', 'b' and 3 names more"."""
    text = ", ".join(map(repr, names[:MOST_NAMES]))
    more = len(names) - MOST_NAMES
    return f"{text} and {format_count(more, 'name')} more" if more > 0 else text


def describe_node(node: Any) -> str:
    """Describe a node: "Node 'add_1' (operator aten.add.Tensor, module 'layer1.0')"."""
    path = find_path(node)
    return f"Node {node.name!r} (operator {node.target}{f', module {path!r}' if path else ''})"


def find_path(node: Any) -> str:
    """Return the path of the innermost module that a node belongs to, "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
