"""PyTorch reader: refuses a program that does more than compute its outputs.

A compiled function keeps nothing between two calls and does not write to its inputs. A decomposed
program lists its mutations in its signature. Before that, the graph has operators that change
tensors in place.
"""

from __future__ import annotations

from typing import Any

from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.torch.arguments import read_arguments

#: statistics of normalizations, which change in training mode only
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

#: Number of names that a message shows. The rest is counted.
MOST_NAMES = 5

#: kind of mutation -> what to do
REMEDIES = {
    "buffer": "Take the old value as an input and return the new one as an output",
    "parameter": "Take the old value as an input and return the new one as an output",
    "input": "Write to a copy (x = x.clone()) and return the new value as an output",
    "normalization": "Export the module in evaluation mode: model.eval()",
}


#: Arguments that switch off an operator's random numbers if they are 0.
SWITCHES = ("train", "training", "dropout", "dropout_p")


def check_effects(program: Any) -> None:
    """Check that a program computes outputs from tensors and does nothing else.

    In a program as exported, mutations are not visible yet. In a decomposed program, the dropout of
    recurrent layers is not visible, because PyTorch's decomposition leaves it out.

    Raises:
        ModelError: the program changes buffers, parameters or inputs, reads objects that are not
            tensors, computes gradients, or draws random numbers. Names them.
    """
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
    kinds = {
        OutputKind.BUFFER_MUTATION: "buffer",
        OutputKind.USER_INPUT_MUTATION: "input",
        getattr(OutputKind, "PARAMETER_MUTATION", None): "parameter",  # exists since PyTorch 2.10
    }
    changed: dict[str, list[str]] = {}
    for spec in signature.output_specs:
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            continue
        if spec.kind not in kinds:
            raise ModelError(
                f"The program has the result {spec.arg.name!r} of kind {spec.kind.name}; supported:"
                " results of the module. Export the module's forward alone.",
                code="RQ202",
            )
        kind, name = kinds[spec.kind], str(spec.target)
        module, _, last = name.rpartition(".")
        if kind == "buffer" and last in STATISTICS:
            kind, name = "normalization", module or "(the model itself)"
        if name not in changed.setdefault(kind, []):
            changed[kind].append(name)
    if changed:
        raise ModelError(
            "The program changes "
            + " and ".join(describe_change(kind, names) for kind, names in changed.items())
            + " in each run; supported: programs that only compute their outputs. "
            + ". ".join(dict.fromkeys(REMEDIES[kind] for kind in changed))
            + ".",
            code="RQ202",
        )


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


def describe_change(kind: str, names: list[str]) -> str:
    """Describe tensors of one kind: "the buffer 'state'", "the buffers 'a', 'b' and 3 more"."""
    if kind == "normalization":
        return f"the running statistics of {quote_names(names)} (training mode)"
    return f"the {kind}{'s' if len(names) > 1 else ''} {quote_names(names)}"


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
