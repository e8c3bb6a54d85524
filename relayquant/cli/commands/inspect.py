"""`relayquant inspect`, and `relayquant MODEL`: show the contents of a model file or a backend."""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tvm

import relayquant as rq
from relayquant.base.language import DECODE
from relayquant.base.storage.files import decode_json, read_text, write_text
from relayquant.cli.files import is_module_file, load_model
from relayquant.cli.options import MAX_BACKEND_SIZE, check_options, read_backend
from relayquant.cli.output import CommandOutput, ExitCode
from relayquant.config import BackendConfig
from relayquant.data.item import describe_inputs
from relayquant.errors import (
    ConfigError,
    ModelError,
    RelayQuantError,
    format_count,
    suggest_name,
)
from relayquant.formats.load import FOLDER, FORMATS
from relayquant.ir.ledger import Ledger, find_ledger
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.ir.rewrite.entry import is_language_model, name_main
from relayquant.ir.rewrite.graph import (
    Graph,
    iterate_results,
    result_expr,
    static_size,
    tensor_dtype,
    tensor_shape,
)
from relayquant.plots.page import show_bytes
from relayquant.plots.terminal_table import Column, Fit, FittedTable
from relayquant.plots.text import summary_table
from relayquant.stages.backends import BACKENDS, resolve_backend
from relayquant.stages.conversion.partial import has_quantized_values

#: planning takes less than a second for models with at most this number of operators
PLANNED_OPERATORS = 300


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    check_options(options, outputs=(options.output,))
    backend = find_backend(options.model)
    if backend is not None:
        return show_backend(backend, options, output)
    given = {"--operator": options.operator, "-o": options.output}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigError(
            f"{' and '.join(named)}: for a backend, such as `relayquant inspect x86`; "
            f"{options.model} is not a backend.",
            code="RQ102",
        )
    return show_model(Path(options.model), options, output)


def find_backend(word: str | None) -> BackendConfig | None:
    """Find the backend with this name. None if the word names a model file.

    Raises:
        ModelError: the word is not a backend name and has no file ending.
    """
    if word is None:
        return resolve_backend(None)
    path = Path(word)
    if path.suffix == ".json" and path.is_file() and path.stat().st_size <= MAX_BACKEND_SIZE:
        try:
            data = decode_json(read_text(path, MAX_BACKEND_SIZE))
        except (ValueError, RecursionError):
            return None  # reading it as a model reports what is wrong
        return read_backend(word) if isinstance(data, dict) and "patterns" in data else None
    if path.suffix or path.exists():
        return None
    names = [each.name for each in BACKENDS]
    if word not in names:
        raise ModelError(
            f"There is no model file {word}, and no backend of that name. "
            f"{suggest_name(word, names)}",
            code="RQ201",
        )
    return read_backend(word)


# --- Backends -----------------------------------------------------------------------------------


def show_backend(
    backend: BackendConfig, options: argparse.Namespace, output: CommandOutput
) -> ExitCode:
    data = backend.to_dict()
    output.add_table("patterns", data.pop("patterns"))
    output.add_values(**data)
    if options.operator is not None or output.show_all:
        output.print(backend.explain(options.operator))
    else:
        output.print(f"backend {backend.name} runs, on integers:", operator_table(backend))
    if options.output is not None:
        text = json.dumps(backend.to_dict(), indent=1)
        write_text(options.output, text)
        output.add_file(options.output)
    return ExitCode.OK


def operator_table(backend: BackendConfig) -> FittedTable:
    """Return a line for each operator, with all dtype combinations that one of its patterns
    supports.
    """
    found: dict[str, dict[str, None]] = {}
    for row in backend.patterns:
        dtypes = found.setdefault(row.pattern.op.removeprefix("relax."), {})
        dtypes.update(dict.fromkeys(dtype.description for dtype in row.dtypes))
    texts = ["; ".join(dtypes) for dtypes in found.values()]
    return FittedTable([Column("operator", [*found], Fit.NAME), Column("dtypes", texts)])


# --- Models -------------------------------------------------------------------------------------


def show_model(path: Path, options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    mod, params = load_model(path, options.shape, options.input)
    if is_language_model(mod) and rq.get_state(mod):
        return show_language_model(path, mod, params or {}, output)
    mod = name_main(bind_model((mod, params)))
    ledger = find_ledger(mod)
    is_float = ledger is None and not has_quantized_values(mod)
    kind = "float model" if is_float else "quantized model"
    size = count_constant_bytes(mod)
    output.add_values(path=path, kind=kind, format=name_format(path), bytes=size)
    output.print(f"{path}: {kind} ({name_format(path)}), {show_bytes(size)} of constants")
    inputs = [(info.name, info.shape, info.dtype) for info in describe_inputs(mod)]
    for side, values in {"inputs": inputs, "outputs": describe_outputs(mod)}.items():
        names = ("name", "shape", "dtype")
        output.add_table(side, [dict(zip(names, value, strict=True)) for value in values])
        for name, shape, dtype in values:
            sizes = "" if shape is None else f" ({', '.join(map(str, shape))})"
            output.print(f"  {side[:-1]:6}  {name}{sizes} {dtype}")
    if ledger is not None:
        output.add_ledger(ledger)
    else:
        show_operators(mod, output, is_float=is_float)
    steps = list_steps(path, ledger, is_float=is_float)
    output.add_table("commands", [{"command": step} for step in steps])
    output.print("", "Next (DATA: an .npz, or a folder of pictures with --preprocess):")
    for step in steps:
        output.print(f"  {step}")
    return ExitCode.OK


def show_language_model(
    path: Path, mod: tvm.IRModule, params: Mapping[str, np.ndarray], output: CommandOutput
) -> ExitCode:
    """Show a module with the functions prefill and decode. Its float tensors are not read."""
    sequences, _, length, _ = rq.get_state(mod)[0].shape
    scores = mod[DECODE].ret_ty.fields[0]
    vocabulary = static_size(scores.shape[-1])
    facts = {"sequences": sequences, "max_length": length, "vocabulary": vocabulary}
    size = count_constant_bytes(mod)
    output.add_values(path=path, kind="language model", format=name_format(path), bytes=size)
    output.add_values(float_tensors=len(params), **facts)
    output.print(
        f"{path}: language model ({name_format(path)}), {show_bytes(size)} of constants, "
        f"{format_count(len(params), 'float tensor')}",
        *(f"  {name.replace('_', ' ')}: {value}" for name, value in facts.items()),
    )
    is_source = not is_module_file(path)
    steps = [
        f'relayquant generate {path}{"" if is_source else " --tokenizer TOKENIZER"} -p "TEXT"',
        *([f"relayquant compress {path} --bits 8"] if is_source and params else []),
        f"relayquant export {path} -o {path.with_suffix('.so')}",
    ]
    output.add_table("commands", [{"command": step} for step in steps])
    output.print("", "Next:", *(f"  {step}" for step in steps))
    return ExitCode.OK


def name_format(path: Path) -> str:
    """Name the kind of a file or folder."""
    if path.is_dir():
        return FOLDER.kind
    kinds = {each.suffix: each.kind for each in FORMATS}
    return "Relax" if is_module_file(path) else kinds[path.suffix.lower()]


def describe_outputs(mod: tvm.IRModule) -> list[tuple[str, tuple[int | str, ...] | None, str]]:
    """Return name, shape and dtype of each result of main. For a result that is not a tensor:
    its type.
    """
    found = []
    for number, expr in enumerate(iterate_results(result_expr(Graph(mod)))):
        name = expr.name if isinstance(expr, tvm.relax.Var) else str(number)
        is_tensor = isinstance(expr.ty, tvm.relax.TensorType)
        shape = tensor_shape(expr) if is_tensor else None
        found.append((name, shape, tensor_dtype(expr) if is_tensor else str(expr.ty)))
    return found


def show_operators(mod: tvm.IRModule, output: CommandOutput, *, is_float: bool) -> None:
    """Show the number of each operator, and how many operators of a float model this machine
    can quantize.
    """
    graph = Graph(mod)
    names = (graph.op_name(binding.var) for binding in graph.bindings)
    counts = Counter(name.removeprefix("relax.") for name in names if name)
    rows = [{"op": op, "count": count} for op, count in counts.most_common()]
    output.add_values(operators=counts.total())
    output.add_table("operators", rows)
    if output.show_all:
        output.print(summary_table(dict(counts.most_common()), title="  operators"))
    else:
        most = ", ".join(f"{count} {name}" for name, count in counts.most_common(6))
        more = ", ..." if len(counts) > 6 else ""
        output.print(f"  {format_count(counts.total(), 'operator')}: {most}{more}")
    if is_float and counts.total() <= PLANNED_OPERATORS:
        output.print(f"  {describe_plan(mod, output)}")


def describe_plan(mod: tvm.IRModule, output: CommandOutput) -> str:
    """Show what quantization would do here, as far as it is known without data."""
    with warnings.catch_warnings():
        # The user did not ask for this mapping.
        warnings.simplefilter("ignore")
        try:
            prepared = rq.prepare(mod)
        except RelayQuantError as error:
            return f"it cannot be quantized: {error}"
    operators, backend = prepared.plan.operators, prepared.backend.name
    count = sum(operator.quantized for operator in operators)
    output.add_values(quantizable=count, backend=backend)
    of = format_count(len(operators), "fused operator")
    return f"{count} of {of} can be quantized, for backend {backend} (this machine)"


def list_steps(path: Path, ledger: Ledger | None, *, is_float: bool) -> list[str]:
    """List commands for this file. A float model is quantized into a module, and the library is
    made of that, because compare, verify and bench need the module.
    """
    if ledger is not None:
        return [
            f"relayquant verify {path} --data DATA",
            f"relayquant compare MODEL {path} --data DATA",
            f"relayquant export {path} -o {path.with_suffix('.so')}",
        ]
    if not is_float:
        return [f"relayquant export {path} -o {path.with_suffix('.so')}"]
    quantized = path.with_suffix(".int8.rqm")
    return [
        f"relayquant lint {path} --data DATA",
        f"relayquant quantize {path} --data DATA -o {quantized} --report report.html",
        f"relayquant export {quantized} -o {path.with_suffix('.so')}",
        f"relayquant bench {path}",
    ]
