"""PyTorch reader: a torch.export program -> a Relax module with values named after the program's
modules.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.base import _tvm
from relayquant.base.arguments import check_arguments
from relayquant.base.optional import needed
from relayquant.base.storage.files import DEFAULT_MAX_BYTES, check_file, reading
from relayquant.errors import MissingDependencyError, ModelError
from relayquant.formats.readers.names import MARK, SourceNode, name_values
from relayquant.formats.readers.refusal import Refusal, describe_failure
from relayquant.formats.readers.state import hold_state
from relayquant.formats.readers.torch.aliases import describe_place, free_views, join_aliases
from relayquant.formats.readers.torch.archive import drop_stacks, read_program, silence_torch
from relayquant.formats.readers.torch.complex_numbers import (
    COMPLEX_OPERATORS,
    Pair,
    find_conversion,
    name_parts,
    split_constants,
)
from relayquant.formats.readers.torch.decompositions import find_release, make_decompositions
from relayquant.formats.readers.torch.operators import OPERATORS, result_dtype
from relayquant.formats.readers.torch.quantized import make_converters
from relayquant.formats.readers.torch.recurrent import keep_layers, make_recurrent_converters
from relayquant.formats.readers.torch.signature import (
    check_effects,
    describe_node,
    drop_checks,
    drop_constant_inputs,
    find_path,
    refuse_complex,
    refuse_operators,
    refuse_state,
    take_state,
)
from relayquant.formats.readers.torch.upsampling import UPSAMPLES
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import call_name, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import MOVES

#: Products, whose result TVM's frontend makes float32, a norm that has several results, and what
#: multiplies by constants of float32.
COMPUTED_WIDE = frozenset(
    [
        *(
            f"aten.{name}.default"
            for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "native_group_norm")
        ),
        *(f"aten.{name}" for name in UPSAMPLES),
        "aten.grid_sampler_2d.default",
    ]
)
#: Operators on a tensor and a number, with which PyTorch computes as a float32.
WIDE_NUMBERS = frozenset(
    f"aten.{name}.{kind}" for name in ("mul", "div") for kind in ("Tensor", "Scalar")
)
#: Operators of Relax that do not round: a result is one of the operands' values.
UNROUNDED = frozenset(MOVES).union(
    f"relax.{name}"
    for name in (
        *("strided_slice", "concat", "split", "stack", "take", "tile", "repeat", "flip", "where"),
        *("broadcast_to", "gather_elements", "gather_nd", "index_tensor", "nn.pad", "tril", "triu"),
        *("maximum", "minimum", "clip", "max", "min", "sort", "topk", "astype"),
        *("nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"),
        *("full", "full_like", "zeros", "zeros_like", "ones", "ones_like"),
        *("negative", "abs", "sign", "floor", "ceil", "round", "trunc"),
    )
)
#: Operators of Relax that float16 rounds once, as they are. In others TVM rounds within.
ROUNDED_ONCE = frozenset(
    f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "sqrt", "scatter_nd")
)
NARROW = ("bfloat16", "float16")

#: Oldest supported release of PyTorch, see pyproject.toml.
OLDEST = (2, 9)


@check_arguments
def import_torch(
    program_or_path: Any, *, max_bytes: int = DEFAULT_MAX_BYTES, may_have_state: bool = True
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Import a torch.export program, or a .pt2 file of one, with weights bound as constants.

    A value is named after the module that computes it ("layer1.0.conv1"). If the module has several
    values, the name of the graph node is appended ("layer1.0.add_1"). A tuple of one tensor as the
    result becomes this tensor. Arguments of forward that are not tensors are left out, because a
    program is exported for their values. Nothing stored in a file is executed; `archive` lists what
    is refused. A program quantized with PT2E keeps its integers: pass it to `relayquant.lower`.

    What the program changes, a buffer, a parameter or an input, becomes state: one of the last
    inputs and of the last results, see `relayquant.get_state`.

    Args:
        program_or_path: `torch.export.ExportedProgram`, or a file of torch.export.save.
        max_bytes: Refuse larger files.
        may_have_state: Whether to take a program that changes something.

    Returns:
        The module and {} (no parameter is left unbound).

    Raises:
        ModelError: the file cannot be read, or holds something that reading would execute; an
            operator is unknown to TVM's frontend; or the program changes running statistics of a
            norm, or draws random numbers.
        MissingDependencyError: torch is not installed, or too old.
    """
    program = program_or_path
    is_path = isinstance(program, str | os.PathLike)
    # without PyTorch, `program_or_path` cannot be a program
    if not is_path and "torch" not in sys.modules:
        raise _describe_wrong_type(program)
    with needed("Reading a torch.export program needs PyTorch", "relayquant[torch]"):
        import torch  # pyright: ignore[reportMissingImports]
    if find_release() < OLDEST:
        raise MissingDependencyError(
            f"Reading a torch.export program needs PyTorch {OLDEST[0]}.{OLDEST[1]} or later, this "
            f"is {torch.__version__}. Run: pip install --upgrade 'relayquant[torch]'",
            code="RQ503",
        )
    if isinstance(program, torch.export.ExportedProgram):
        return _import_program(program, may_have_state)
    if isinstance(program, torch.nn.Module):
        raise ModelError(
            f"{type(program).__name__} is a module, not an exported program. Pass "
            "torch.export.export(module.eval(), example_inputs), or use relayquant.torch.quantize.",
            code="RQ201",
        )
    if not is_path:
        raise _describe_wrong_type(program)
    with reading(program, "torch.export archive", ModelError):
        return _import_program(
            read_program(check_file(program, max_bytes), max_bytes), may_have_state
        )


def _describe_wrong_type(program: object) -> ModelError:
    return ModelError(
        f"import_torch got a {type(program).__name__}; allowed: a "
        "torch.export.ExportedProgram, or the path of a file that torch.export.save wrote.",
        code="RQ201",
    )


def _import_program(
    program: Any, may_have_state: bool
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    importer = make_importer()
    check_effects(program)
    try:
        with silence_torch(), drop_stacks():
            program, table = join_aliases(program), make_decompositions()
            keep_layers(program, table)
            program = free_views(program).run_decompositions(table)
        check_effects(program)
        refuse_complex(program)
        drop_checks(program)
        drop_constant_inputs(program)
        if not may_have_state:
            refuse_state(program)
        state = take_state(program)
        split_constants(program)
        constants = find_constants(program)
        importer.constants = frozenset(constants)
        converters = {
            **OPERATORS,
            **COMPLEX_OPERATORS,
            **make_recurrent_converters(constants),
            **make_converters(constants),
        }
        with _tvm.FRONTEND_LOCK:
            mod = importer.from_exported_program(program, False, True, False, converters)
    except ModelError:
        raise
    except Exception as error:
        copies = find_shared_copies(program)
        if copies:
            raise ModelError(
                f"Cannot convert the program: {copies} are written with the same value, which "
                "PyTorch cannot decompose. Copy a clone to all but one: "
                f"buffer.copy_(value.clone()). PyTorch says: {type(error).__name__}: {error}",
                code="RQ202",
            ) from error
        raise ModelError(
            f"Cannot convert the program: {type(error).__name__}: {error}. Export the model in "
            "evaluation mode (model.eval()) and without data-dependent control flow.",
            code="RQ202",
        ) from error
    named = _name_after_modules(mod, importer.env, find_targets(program))
    return hold_state(named, state), {}


def make_importer() -> Any:
    """Make TVM's importer with errors that name the node, what is supported and what to do."""

    class Importer(_tvm.load_torch_frontend().ExportedProgramImporter):
        def __init__(self) -> None:
            super().__init__()
            self.copies: dict[Any, tvm.runtime.Tensor] = {}
            self.constants: frozenset[str] = frozenset()  # inputs that are weights

        def _convert_pytorch_tensor_to_tvm(self, tensor: Any) -> tvm.runtime.Tensor:
            """Copy the tensor, because the exported module may be trained further. Tied weights
            share one copy.
            """
            key = describe_place(tensor)
            if key not in self.copies:
                self.copies[key] = copy_tensor(tensor)
            return self.copies[key]

        def lookup_call(self, value: relax.Expr) -> Call | None:
            """Return the call that computes a value, or None."""
            if not isinstance(value, relax.Var):
                return None
            found = self.block_builder.lookup_binding(value)
            return found if isinstance(found, Call) else None

        def _check_unsupported_func_type(self, nodes: Any) -> None:
            missing: dict[str, list[str]] = {}
            for node in nodes:
                if node.op == "call_function" and node.target.__name__ not in self.convert_map:
                    is_operator = hasattr(node.target, "_schema")  # else a function on sizes
                    name = str(node.target) if is_operator else node.target.__name__
                    missing.setdefault(name, []).append(node.name)
            if missing:
                raise refuse_operators(missing)
            for name, convert in self.convert_map.items():
                self.convert_map[name] = functools.partial(convert_node, self, convert)

    return Importer()


def copy_tensor(tensor: Any) -> Any:
    """Copy the values of a PyTorch tensor to a TVM tensor."""
    import torch  # pyright: ignore[reportMissingImports]

    is_dense = tensor.layout == torch.strided
    dense = tensor.detach() if is_dense else tensor.detach().to_dense()
    values = dense.cpu().clone(memory_format=torch.contiguous_format)
    return tvm.runtime.from_dlpack(values.resolve_conj().resolve_neg())


def convert_node(importer: Any, convert: Callable[..., Any], node: Any, *more: Any) -> Any:
    """Call a conversion for a node and return its value, which is bound to a variable: the frontend
    takes numbers beside variables only, and a call that two nodes read would be computed twice.

    Raises:
        ModelError: the conversion fails. Names the node and its module.
    """
    if takes_axis_of_number(node):
        convert = functools.partial(convert_as_vector, importer, convert)
    try:
        convert = find_conversion(importer, node, convert)
        is_narrow = has_narrow_result(node)
        if is_narrow and (str(node.target) in COMPUTED_WIDE or has_wide_number(node)):
            return convert_widened(importer, convert, node, *more)
        value = convert(node, *more)
        if isinstance(value, Call):
            value = importer.block_builder.emit(value)
        refuse_missing_results(node, value)
        if is_narrow and rounds_often(importer, node, value):
            value = convert_widened(importer, convert, node, *more)
        refuse_other_form(importer, node, value)
        return value
    except ModelError:
        raise  # an error of a node in a branch
    except Exception as error:
        given = {each.name: importer.env.get(each) for each in node.all_input_nodes}
        operands = {
            name: each.real if isinstance(each, Pair) else each for name, each in given.items()
        }
        raise ModelError(
            f"{describe_node(node)} cannot be converted: {describe_failure(error, operands)}.",
            code="RQ202",
        ) from error


def refuse_missing_results(node: Any, value: Any) -> None:
    """Raise Refusal if a result of several is used, and the conversion made the first alone: TVM's
    frontend gives that for any number.
    """
    results = node.meta.get("val")
    if not isinstance(results, list | tuple) or not is_tensor(value):
        return
    items = [user for user in node.users if user.target is operator.getitem and user.users]
    asked = sorted({user.args[1] for user in items} - {0})
    if asked:
        raise Refusal(f"{node.name} is asked for its results {asked}; supported: the first one, 0")


def refuse_other_form(importer: Any, node: Any, value: Any) -> None:
    """Raise Refusal if a tensor has another dtype, rank or fixed size than PyTorch computes, and
    the operands have not: then its values are others, too.

    Scales and zero points that a program computes are float32 and int32, see `quantized`.
    """
    if has_form(node, value):
        return
    is_item = node.target is operator.getitem
    maker = node.args[0] if is_item else node
    if getattr(maker.target, "namespace", "") == "quantized_decomposed":
        return
    if all(has_form(each, importer.env.get(each)) for each in node.all_input_nodes):
        wanted, made = node.meta["val"], value.real if isinstance(value, Pair) else value
        raise Refusal(
            f"{node.name} would become {tensor_dtype(made)} {tensor_shape(made)}, and is "
            f"{result_dtype(node)} {tuple(wanted.shape)} in PyTorch; supported: PyTorch's form"
        )


def has_form(node: Any, value: Any) -> bool:
    """Whether a converted tensor has the dtype, the rank and the fixed sizes of PyTorch. The parts
    of complex numbers are compared. True for a value that is not a tensor.
    """
    import torch  # pyright: ignore[reportMissingImports]

    wanted, find_dtype = node.meta.get("val"), result_dtype
    if isinstance(value, Pair):
        value, find_dtype = value.real, name_parts
    if not isinstance(wanted, torch.Tensor) or not is_tensor(value):
        return True
    shape = tensor_shape(value)
    if find_dtype(node) != tensor_dtype(value):
        return False
    return shape is None or (
        len(shape) == wanted.ndim
        and all(
            size == known
            for size, known in zip(shape, wanted.shape, strict=True)
            if isinstance(size, int) and isinstance(known, int)
        )
    )


def takes_axis_of_number(node: Any) -> bool:
    """Whether a node takes the axis of a tensor without axes, and gives such ones: PyTorch takes
    it for a vector of one element.
    """
    schema = getattr(node.target, "_schema", None)
    names = {argument.name for argument in schema.arguments} if schema is not None else set()
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else [value]
    tensors = [each.meta.get("val") for each in node.all_input_nodes]
    return (
        bool(tensors)
        and not names.isdisjoint(("dim", "dims"))
        and all(getattr(each, "ndim", None) == 0 for each in (*tensors, *results))
    )


def convert_as_vector(importer: Any, convert: Callable[..., Any], node: Any, *more: Any) -> Any:
    """Convert a node for operands of one axis, and take that axis off its results."""
    emit = importer.block_builder.emit
    kept = {each: importer.env[each] for each in node.all_input_nodes}
    importer.env.update({each: emit(relax.op.reshape(value, (1,))) for each, value in kept.items()})
    try:
        value = convert(node, *more)
    finally:
        importer.env.update(kept)
    if is_tensor(value):
        return emit(relax.op.reshape(value, ()))
    value = emit(value)
    parts = [emit(relax.TupleGetItem(value, at)) for at in range(len(value.ty.fields))]
    return relax.Tuple([emit(relax.op.reshape(part, ())) for part in parts])


def is_tensor(value: Any) -> bool:
    """Whether a converted value is one tensor."""
    return isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)


def has_narrow_result(node: Any) -> bool:
    """Whether a node gives a tensor of narrow floats, or a tuple that begins with one. Nodes that
    only check something give nothing.
    """
    value = node.meta.get("val")
    first = next(iter(value), None) if isinstance(value, list | tuple) else value
    return str(getattr(first, "dtype", "")).removeprefix("torch.") in NARROW


def has_wide_number(node: Any) -> bool:
    """Whether a node multiplies or divides narrow floats by a number that they cannot hold."""
    if str(node.target) not in WIDE_NUMBERS or not isinstance(node.args[1], float):
        return False
    return float(np.array(node.args[1], result_dtype(node))) != node.args[1]


def rounds_often(importer: Any, node: Any, value: Any) -> bool:
    """Whether a node became several operators that round, or one of float16 that rounds within:
    PyTorch rounds its result alone.
    """
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        return False
    seen = {importer.env[each] for each in node.all_input_nodes}
    is_half = tensor_dtype(value) == "float16"
    pending, count = [value], 0
    while pending:
        expr = pending.pop()
        if isinstance(expr, relax.Var):
            if expr in seen:
                continue
            seen.add(expr)
            expr = importer.block_builder.lookup_binding(expr)
        if isinstance(expr, Call):
            name = call_name(expr)
            if name not in UNROUNDED:
                count += 2 if is_half and name not in ROUNDED_ONCE else 1
            pending.extend(expr.args)
        elif isinstance(expr, relax.Tuple):
            pending.extend(expr.fields)
        elif isinstance(expr, relax.TupleGetItem):
            pending.append(expr.tuple_value)
    return count > 1


def convert_widened(importer: Any, convert: Callable[..., Any], node: Any, *more: Any) -> Any:
    """Convert an operator on narrow floats as PyTorch computes it: in float32, and the result is
    rounded once.
    """
    emit = importer.block_builder.emit
    kept = {each: importer.env[each] for each in node.all_input_nodes}
    wide = {
        each: emit(relax.op.astype(value, "float32"))
        for each, value in kept.items()
        if isinstance(value, relax.Expr) and tensor_dtype(value) in NARROW
    }
    importer.env.update(wide)
    try:
        value = convert(node, *more)
    finally:
        importer.env.update(kept)
    return emit(relax.op.astype(value, result_dtype(node)))


def find_shared_copies(program: Any) -> str:
    """Name tensors that `copy_` writes with the same value. Return "" without any."""
    targets: dict[Any, list[str]] = {}
    for node in program.graph.nodes:
        if str(node.target) == "aten.copy_.default":
            target, source = node.args[:2]
            targets.setdefault(source, []).append(repr(target.name.removeprefix("b_")))
    return next((" and ".join(names) for names in targets.values() if len(names) > 1), "")


def find_constants(program: Any) -> dict[str, Any]:
    """Return name in the graph -> tensor, for parameters and buffers of an exported program."""
    tensors = {**program.constants, **program.state_dict}
    specs = program.graph_signature.input_specs
    return {spec.arg.name: tensors[spec.target] for spec in specs if spec.target in tensors}


def find_targets(program: Any) -> dict[str, str]:
    """Return name in the graph -> name in the module ("layer1.0.conv1.weight"), for parameters and
    buffers of an exported program.
    """
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}


def _list_parameters(node: Any, targets: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the parameters that a node reads, the highest rank first.

    Parameters that pass through other operators on parameters count too, for example a transposed
    weight.
    """
    found: dict[str, int] = {}
    for operand in node.all_input_nodes:
        if operand.name in targets:
            found[targets[operand.name]] = operand.meta["val"].ndim
        elif operand.op == "call_function" and len(operand.all_input_nodes) == 1:
            (inner,) = operand.all_input_nodes
            if inner.name in targets:
                found[targets[inner.name]] = inner.meta["val"].ndim
    return tuple(sorted(found, key=lambda name: -found[name]))


def _name_after_modules(
    mod: tvm.IRModule, env: Mapping[Any, Any], targets: Mapping[str, str]
) -> tvm.IRModule:
    """Name values after their graph nodes. `env` maps a node to the variable of the frontend."""
    nodes: dict[str, Any] = {}
    for node, value in env.items():
        if node.op == "call_function" and hasattr(value, "name"):
            # A node without effect has the value of another node. The first node made it.
            nodes.setdefault(value.name, node)
    last = {find_path(node): node for node in nodes.values()}
    sizes = Counter(find_path(node) for node in nodes.values())
    leaves = _leaf_modules(nodes.values())
    editor = Editor(mod)
    drop_nothing(editor)
    sources: dict[str, SourceNode] = {}
    for var in editor.order():
        node = nodes.get(var.name)
        if node is None:
            continue
        path = find_path(node)
        # The last node of a module has the module's value, unless the module has child modules.
        is_result = path and (sizes[path] == 1 or (path in leaves and node is last[path]))
        name = path if is_result else ".".join(part for part in (path, node.name) if part)
        while name in sources:
            name = f"{name}.{node.name}"
        written = str(node.meta.get("original_aten") or node.target)
        sources[name] = SourceNode(path or node.name, written, _list_parameters(node, targets))
        editor.names[var] = MARK + name
    return name_values(editor.build(), sources)


def drop_nothing(editor: Editor) -> None:
    """Remove results that are None, for example unused weights of attention."""

    def is_nothing(value: relax.Expr) -> bool:
        call = editor.values.get(value) if isinstance(value, relax.Var) else value
        return isinstance(call, Call) and call_name(call) == "relax.null_value"

    if isinstance(editor.result, relax.Tuple):
        kept = [field for field in editor.result.fields if not is_nothing(field)]
        if kept and len(kept) < len(editor.result.fields):
            editor.result = kept[0] if len(kept) == 1 else relax.Tuple(kept)


def _leaf_modules(nodes: Any) -> set[str]:
    """Return the paths of modules without child modules in the graph, and which run once: torch's
    own layers.
    """
    outer: set[str] = set()
    inner: set[str] = set()
    for node in nodes:
        stack = [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]
        outer.update(stack[:-1])
        inner.update(stack[-1:])
    return inner - outer
