"""PyTorch reader: what a program says of memory -> what does not depend on it. A part of `program`.

buffers a and b of one tensor, b.add_(x)    ->    buffer a, a.add_(x)
x.view(size)                                ->    x.reshape(size)
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from relayquant.errors import ModelError

#: (graph, node of the tensor that holds all) -> node of the tensor in its memory
View = Callable[[Any, Any], Any]


def join_aliases(program: Any) -> Any:
    """Return the program with one input for each tensor that it changes. Buffers, parameters and
    constants in its memory become views of it: two modules may share a buffer, and the static cache
    of transformers is a buffer and a constant. `program` is not changed.

    Raises:
        ModelError: the program changes a tensor in whose memory another one lies that is no plain
            part of it.
    """
    views = find_views(program)
    if not views:
        return program
    graph_module, signature = copy_graph(program), program.graph_signature
    graph = graph_module.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for name, (base, make_view) in views.items():
        old = inputs[name]
        with graph.inserting_before(first):
            new = make_view(graph, inputs[base])
        if new is not inputs[base]:
            new.meta = {**old.meta}
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    graph_module.recompile()
    kept = [spec for spec in signature.input_specs if spec.arg.name not in views]
    gone = {spec.target for spec in signature.input_specs if spec.arg.name in views}
    signature = dataclasses.replace(signature, input_specs=kept)
    constants = {name: each for name, each in program.constants.items() if name not in gone}
    return replace_graph(program, graph_module, signature, constants)


def free_views(program: Any) -> Any:
    """Return the program with `reshape` for each `view`. `program` is not changed.

    A view needs a memory order. Exported programs have the memory order of PyTorch's kernels, and
    decompositions have another one: attention gives (samples, rows, heads, width) in memory, and so
    does not need the copy that `.transpose(1, 2).contiguous()` asks for. Values are the same.
    A view that the program writes into stays: a copy would not change its source.
    """
    import torch  # pyright: ignore[reportMissingImports]

    view, reshape = torch.ops.aten.view.default, torch.ops.aten.reshape.default
    parts = [part for part in program.graph_module.modules() if hasattr(part, "graph")]
    if not any(part.graph.find_nodes(op="call_function", target=view) for part in parts):
        return program
    graph_module = copy_graph(program)
    for part in (part for part in graph_module.modules() if hasattr(part, "graph")):
        written = find_written(part.graph)
        for node in part.graph.find_nodes(op="call_function", target=view):
            if node.name not in written:
                node.target = reshape
        part.recompile()
    return replace_graph(program, graph_module, program.graph_signature, program.constants)


def copy_graph(program: Any) -> Any:
    """Return a copy of a program's graph module. Nodes keep their names: a copy calls "input" anew,
    like all names of Python.
    """
    graph_module = copy.deepcopy(program.graph_module)
    pairs = zip(graph_module.graph.nodes, program.graph.nodes, strict=True)
    for node, original in pairs:
        node.name = original.name
    return graph_module


def replace_graph(program: Any, graph_module: Any, signature: Any, constants: Any) -> Any:
    """Return a program with another graph, signature and other constants."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.export.ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=program.verifiers,
    )


def find_views(program: Any) -> dict[str, tuple[str, View]]:
    """Find the inputs that lie in the memory of another one, where the program writes into it.

    Returns:
        Input -> (the input that holds all of the memory, what makes a view of it).
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torch.export.graph_signature import InputKind  # pyright: ignore[reportMissingImports]

    tensors = {**program.constants, **program.state_dict}
    groups: dict[int, list[tuple[Any, Any]]] = {}
    for spec in program.graph_signature.input_specs:
        tensor = tensors.get(spec.target)
        is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if is_dense and tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append((spec, tensor))
    shared = [group for group in groups.values() if len(group) > 1]
    written = find_written(program.graph) if shared else frozenset()
    views = {}
    for group in shared:
        if not any(spec.arg.name in written for spec, _ in group):
            continue
        held = [each for each in group if each[0].kind is not InputKind.CONSTANT_TENSOR] or group
        base, whole = max(held, key=lambda each: each[1].numel())
        for spec, part in group:
            if spec is not base:
                view = find_view(whole, part)
                if view is None:
                    raise ModelError(
                        f"The program changes {str(base.target)!r} or {str(spec.target)!r}, which "
                        "share memory; supported: the same tensor, or a contiguous part of a "
                        "contiguous one. Register one of them as a buffer, and make the other in "
                        "forward.",
                        code="RQ202",
                    )
                views[spec.arg.name] = (base.arg.name, view)
    return views


def find_view(whole: Any, part: Any) -> View | None:
    """Return what makes one tensor of another one of the same memory. None: nothing plain."""
    import torch  # pyright: ignore[reportMissingImports]

    if describe_place(whole) == describe_place(part):
        return lambda graph, base: base
    begin = part.storage_offset() - whole.storage_offset()
    end, is_same = begin + part.numel(), whole.dtype == part.dtype
    if not (is_same and whole.is_contiguous() and part.is_contiguous()):
        return None
    if begin < 0 or end > whole.numel():
        return None
    aten, shape = torch.ops.aten, [*part.shape]

    def make_view(graph: Any, base: Any) -> Any:
        flat = graph.call_function(aten.view.default, (base, [-1]))
        flat.meta["val"] = base.meta["val"].view(-1)
        piece = graph.call_function(aten.slice.Tensor, (flat, 0, begin, end))
        piece.meta["val"] = flat.meta["val"][begin:end]
        return graph.call_function(aten.view.default, (piece, shape))

    return make_view


def find_written(graph: Any) -> frozenset[str]:
    """Return the names of the inputs and views that operators write into, also by a view."""
    import torch  # pyright: ignore[reportMissingImports]

    roots: dict[Any, frozenset[str]] = {}
    written: frozenset[str] = frozenset()
    for node in graph.nodes:
        if node.op == "placeholder":
            roots[node] = frozenset([node.name])
            continue
        schema = getattr(node.target, "_schema", None)
        found: frozenset[str] = frozenset()
        if node.target is operator.getitem:
            found = find_roots(node.args[0], roots)
        for at, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None:
                given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
                found |= find_roots(given, roots)
                if argument.alias_info.is_write:
                    written |= find_roots(given, roots)
        is_view = getattr(node.target, "overloadpacket", None) is torch.ops.aten.view
        roots[node] = found | {node.name} if is_view else found
    return written


def find_roots(given: Any, roots: dict[Any, frozenset[str]]) -> frozenset[str]:
    """Return the inputs in whose memory an argument of an operator lies."""
    if isinstance(given, list | tuple):
        return frozenset().union(*(find_roots(each, roots) for each in given))
    return roots.get(given, frozenset()) if hasattr(given, "op") else frozenset()


def describe_place(tensor: Any) -> Any:
    """Return a key that is equal for PyTorch tensors with the same memory and the same view
    of it.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if tensor.layout != torch.strided:
        return id(tensor)
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (tensor.untyped_storage().data_ptr(), *view)
