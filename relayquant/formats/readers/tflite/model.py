"""TensorFlow Lite reader: a file -> a module, by TVM's frontend with relayquant's converter."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base import _tvm
from relayquant.base.arguments import check_arguments
from relayquant.base.optional import needed
from relayquant.base.storage.files import DEFAULT_MAX_BYTES, PathLike, check_file, reading
from relayquant.errors import ModelError, RelayQuantError, format_count
from relayquant.formats.readers.given_shapes import GivenShapes
from relayquant.formats.readers.names import SourceNode, name_values
from relayquant.formats.readers.refusal import OTHERWISE
from relayquant.formats.readers.state import StatePair, hold_state
from relayquant.formats.readers.tflite.converter import FRONTEND, Converter, VariableTable
from relayquant.formats.readers.tflite.operators.table import CUSTOM_OPERATORS
from relayquant.formats.readers.tflite.options import name_custom_operator, read_options
from relayquant.formats.readers.tflite.sizes import OpenSizes, check_same, choose_sizes
from relayquant.formats.readers.tflite.tables import check_tables, list_codes, open_model
from relayquant.ir.rewrite.function import add_functions

#: Bytes 4 to 8 of every TFLite file.
FILE_IDENTIFIER = b"TFL3"


@check_arguments
def import_tflite(
    path: PathLike,
    *,
    shapes: GivenShapes | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Import a .tflite file with weights bound as constants.

    Parameters of main and values have the names of the tensors in the first subgraph. Attribute
    `relayquant.sources` maps the name of a value to its operator. TFLite operators have no names,
    so a node is named after its first output tensor.

    Args:
        path: The file.
        shapes: Input name -> shape, for sizes that the file leaves open. A name makes a size
            symbolic. Without it they are 1, with a warning.
        max_bytes: Refuse a larger file.

    Returns:
        The module and {} (no parameter is left unbound).

    Raises:
        ModelError: the file cannot be read, an operator is not supported or needs the number of a
            symbolic size, or `shapes` contradicts the file.
        MissingDependencyError: the package tflite is not installed.
    """
    with needed("Reading a .tflite file needs the package tflite", "relayquant[tflite]"):
        import tflite
    with reading(path, "TensorFlow Lite model", ModelError):
        model = read_file(check_file(path, max_bytes), tflite)
    # A file with valid tables is a model: unsupported parts of it are not damage.
    return convert_model(model, shapes), {}


def read_file(path: Path, tflite: Any) -> Any:
    """Read the model in a file and check its tables. Unknown custom operators raise ModelError."""
    data = path.read_bytes()
    if data[4:8] != FILE_IDENTIFIER:
        raise ModelError(
            f"{str(path)!r} is not a TensorFlow Lite model (no identifier TFL3).", code="RQ502"
        )
    model = open_model(tflite, data)
    check_tables(model, tflite, len(data))
    custom = list_custom_operators(model)
    if custom:
        raise ModelError(
            f"Not supported, {format_count(len(custom), 'custom operator')} of the model: "
            f"{', '.join(custom)}. Replace them before the conversion to TFLite.",
            code="RQ202",
        )
    return model


def convert_model(model: Any, shapes: GivenShapes | None = None) -> tvm.IRModule:
    """Convert a model with valid tables to a module."""
    sources: dict[str, SourceNode] = {}
    mods = [convert_once(model, sizes, sources) for sizes in choose_sizes(model, shapes)]
    check_same(mods, sources)
    return mods[0]


def convert_once(model: Any, sizes: OpenSizes, sources: dict[str, SourceNode]) -> tvm.IRModule:
    """Convert a model with these sizes. `sources` gets the operators of its values."""
    found = VariableTable(assigns_variables(model))
    try:
        with _tvm.FRONTEND_LOCK:
            converter = partial(Converter, sources, found, sizes)
            mod = FRONTEND.from_tflite(model, {**sizes.shapes}, op_converter=converter)
        # The frontend attaches the weights that it has already bound.
        mod["main"] = mod["main"].without_attr("params")
        mod, pairs = add_variables(mod, found)
        return hold_state(name_values(mod, sources), pairs)
    except RelayQuantError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"The TensorFlow Lite model cannot be converted: {type(error).__name__}: {text}. "
            f"{OTHERWISE}.",
            code="RQ202",
        ) from error


def assigns_variables(model: Any) -> bool:
    """Whether the model assigns a variable in each run, not only in the graphs of CALL_ONCE."""
    from tflite import BuiltinOperator

    calls = [
        (index, read_code(model, graph.Operators(at)), graph.Operators(at))
        for index in range(model.SubgraphsLength())
        for graph in [model.Subgraphs(index)]
        for at in range(graph.OperatorsLength())
    ]
    first = {
        read_options(op, "CallOnceOptions").InitSubgraphIndex()
        for _, code, op in calls
        if code == BuiltinOperator.CALL_ONCE
    }
    return any(
        code == BuiltinOperator.ASSIGN_VARIABLE and index not in first for index, code, _ in calls
    )


def read_code(model: Any, op: Any) -> int:
    """Return the builtin operator of a call."""
    code = model.OperatorCodes(op.OpcodeIndex())
    return max(code.BuiltinCode(), code.DeprecatedBuiltinCode())


def add_variables(mod: tvm.IRModule, found: VariableTable) -> tuple[tvm.IRModule, list[StatePair]]:
    """Make parameters and results of main of the variables that change.

    Returns:
        The module and the pairs of parameters and results.
    """
    if not found.variables:
        return mod, []
    main = mod["main"]
    results = main.body.body
    block: Any = main.body.blocks[-1]
    bound = {binding.var: binding.value for binding in block.bindings}
    value = bound.get(results, results) if isinstance(results, relax.Var) else results
    is_tuple = isinstance(value, relax.Tuple)
    fields = list(value.fields) if is_tuple else [results]
    pairs = [
        StatePair(variable.param.name, len(fields) + at, variable.param.name, variable.initial)
        for at, variable in enumerate(found.variables.values())
    ]
    params = [*main.params, *(variable.param for variable in found.variables.values())]
    outputs = [
        relax.TupleGetItem(results, at) if is_tuple else results for at in range(len(fields))
    ]
    body = relax.SeqExpr(main.body.blocks, relax.Tuple([*outputs, *found.news.values()]))
    whole = relax.Function(params, relax.BlockBuilder().normalize(body), attrs=main.attrs)
    whole = whole.with_attr("num_input", len(params))
    return add_functions(mod, {mod.get_global_var("main"): whole}), pairs


def list_custom_operators(model: Any) -> list[str]:
    """List the custom operators that are not known, by name, with the number of calls."""
    names: dict[int, str] = {}
    for index in range(model.OperatorCodesLength()):
        code = model.OperatorCodes(index)
        if code.CustomCode() is not None and name_custom_operator(code) not in CUSTOM_OPERATORS:
            names[index] = code.CustomCode().decode("utf-8", "replace")
    calls = Counter(names[code] for code in list_codes(model) if code in names)
    return [f"{name!r} ({format_count(count, 'call')})" for name, count in calls.items()]
