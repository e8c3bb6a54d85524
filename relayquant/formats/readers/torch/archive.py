"""PyTorch reader: a .pt2 archive -> an exported program, without running any code of the file.

`torch.export.load` trusts its file. It unpickles sample inputs and some weights, loads compiled
libraries, evaluates text as symbolic sizes, looks up any attribute of `torch` as an operator, and
writes the names of values into Python source. So first a copy of the archive is made that holds
only known data, and torch reads the copy.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relayquant.base.storage.files import decode_json, reading
from relayquant.errors import ModelError, format_count

#: folder of an archive -> the file in it that describes how its tensors are stored
PAYLOADS = {
    "data/weights/": "data/weights/model_weights_config.json",
    "data/constants/": "data/constants/model_constants_config.json",
}
GRAPH = "models/model.json"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
#: small records that torch's reader checks, copied unchanged
MARKERS = ("archive_format", "archive_version", "byteorder", ".data/version", "version")

#: namespaces of operators that only compute tensors
NAMESPACES = ("aten", "prims", "quantized_decomposed")
#: operators on other graphs of the same file, which are checked too
NESTED = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "cond")
#: arithmetic on symbolic sizes
SIZE_FUNCTIONS = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|ge|gt|le|lt|and_|or_|getitem)"
    r"|math\.(ceil|floor|trunc)|torch\.sym_(float|int|max|min|not|ite|sum)"
)

#: names of values and paths of parameters: torch pastes both into Python source
NAME = re.compile(r"\w*", re.ASCII)
PATH = re.compile(r"[\w.]*", re.ASCII)
#: graph keys whose text is the path of a module or parameter
PATHS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
#: keys whose text torch keeps as text
TEXTS = ("as_string", "as_strings")

#: keys of floats, and the texts for floats that JSON cannot represent
FLOATS = ("as_float", "as_floats", "real", "imag")
SPECIAL = ("NaN", "Infinity", "-Infinity")

#: A symbolic size: numbers, symbols, functions of sizes. Torch evaluates it as Python.
SIZE = re.compile(
    r"(?:\d+(?:\.\d+)?|[suz]+\d+|Symbol\('\w+'(?:, \w+=(?:True|False))*\)"
    r"|Integer|Rational|Add|Mul|Pow|Max|Min|Eq|Ne|FloorDiv|ModularIndexing|PythonMod|Mod|CleanDiv"
    r"|CeilToInt|FloorToInt|CeilDiv|IntTrueDiv|FloatTrueDiv|TruncToInt|ToFloat"
    r"|[-+*/(), <>=])*",
    re.ASCII,
)
#: Longest text of a symbolic size, and largest number if it has a power. Larger ones would not end
#: in time.
SIZE_LENGTH, POWER_LIMIT = 1000, 4096

#: Allowed containers of inputs and outputs. Other containers run their own code when they are
#: rebuilt.
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")


def read_program(path: Path, max_bytes: int) -> Any:
    """Read the `torch.export.ExportedProgram` in a file of torch.export.save.

    Sample inputs, extra files and compiled code in the archive are ignored.

    Raises:
        ModelError: the file is damaged, has an older format, holds more than `max_bytes`, or holds
            something that loading would execute.
    """
    import torch  # pyright: ignore[reportMissingImports]

    with reading(path, "torch.export archive", ModelError):
        with zipfile.ZipFile(path) as archive:
            copy = copy_data(archive, max_bytes)
        try:
            with silence_torch():
                return torch.export.load(copy)
        except Exception as error:
            raise ModelError(
                f"torch.export cannot load it: {type(error).__name__}: {error}", code="RQ502"
            ) from error


@contextlib.contextmanager
def silence_torch() -> Iterator[None]:
    """Suppress warnings while torch reads or decomposes a program. Serious problems are
    exceptions.
    """
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def drop_stacks() -> Iterator[None]:
    """Stop PyTorch from recording a Python stack for each node it makes.

    Nothing reads these stacks, and they take a third of the time of a decomposition. PyTorch before
    2.10 ignores the switch.
    """
    import torch.fx  # pyright: ignore[reportMissingImports]

    config = getattr(torch.fx, "config", None)
    before = getattr(config, "do_not_emit_stack_traces", None)
    if config is None or before is None:
        yield
        return
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def copy_data(archive: zipfile.ZipFile, max_bytes: int) -> io.BytesIO:
    """Make an archive of the checked graph and of the tensors that it stores as plain bytes.

    Raises:
        ValueError: something is missing, or is not data.
    """
    records = list_records(archive, max_bytes)
    if GRAPH not in records:
        raise ValueError(
            f"it has no record {GRAPH!r}: it is not a torch.export archive, or one of PyTorch "
            "before 2.8. Save it again with torch.export.save of 2.9 or later"
        )
    graph = read_json(archive, records[GRAPH])
    copied: dict[str, bytes] = {
        name: archive.read(records[name]) for name in MARKERS if name in records
    }
    copied[GRAPH] = json.dumps(clean_graph(graph)).encode()
    copied[SAMPLE_INPUTS] = b""
    for folder, config in PAYLOADS.items():
        if config not in records:
            raise ValueError(
                f"it has no record {config!r}: PyTorch before 2.9 keeps weights in a pickle, which "
                "is not opened. Save it again with torch.export.save of 2.9 or later"
            )
        content = read_json(archive, records[config])
        copied[config] = json.dumps(content).encode()
        for name, entry in content["config"].items():
            record = folder + check_payload(name, entry, max_bytes)
            if record not in records:
                raise ValueError(f"the tensor {name!r} is missing (record {record!r})")
            if record not in copied:
                copied[record] = archive.read(records[record])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as target:
        for name, data in copied.items():
            target.writestr(f"model/{name}", data)
    buffer.seek(0)
    return buffer


def list_records(archive: zipfile.ZipFile, max_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """Return the records by name, without the archive's top folder.

    Raises:
        ValueError: the records take more than max_bytes, or two have the same name.
    """
    records: dict[str, zipfile.ZipInfo] = {}
    size = 0
    for info in archive.infolist():
        # Archives of PyTorch before 2.8 have no top folder.
        name = info.filename.partition("/")[2] or info.filename
        size += info.file_size
        if name in records:
            raise ValueError(f"it has two records {name!r}")
        if size > max_bytes:
            raise ValueError(
                f"its records take more than the limit of {format_count(max_bytes, 'byte')}. Pass "
                "a larger max_bytes if you trust it"
            )
        records[name] = info
    return records


def read_json(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> dict[str, Any]:
    """Read the JSON object in a record. ValueError for anything else."""
    content = decode_json(archive.read(record), allow_nan=True)
    if not isinstance(content, dict):
        raise ValueError(f"record {record.filename!r} holds no JSON object")
    return content


def check_payload(name: str, entry: Mapping[str, Any], max_bytes: int) -> str:
    """Return the file name of a stored tensor.

    Raises:
        ValueError: it is a pickle or another object, or has an impossible shape.
    """
    file = entry["path_name"]
    if not PATH.fullmatch(name) or not PATH.fullmatch(file):
        raise ValueError(f"the tensor {name!r} is stored in {file!r}, which is not a file name")
    if entry["use_pickle"] or not file.startswith(("weight_", "tensor_")):
        raise ValueError(
            f"{name!r} is stored as a pickle, which may run any program. Save the model with "
            "plain tensors only"
        )
    sizes = [size.get("as_int") for size in entry["tensor_meta"]["sizes"]]
    if any(not isinstance(size, int) or size < 0 for size in sizes) or math.prod(sizes) > max_bytes:
        raise ValueError(f"the tensor {name!r} has an impossible shape {sizes}")
    return file


def clean_graph(content: dict[str, Any]) -> dict[str, Any]:
    """Return a serialized program without the parts that only serve to run or debug it.

    Raises:
        ValueError: some text in it could run as code.
    """
    graph = dict(content["graph_module"])
    roots = [entry for entry in graph["module_call_graph"] if entry["fqn"] == ""]
    graph.update(module_call_graph=roots, metadata={}, treespec_namedtuple_fields={})
    cleaned = {**content, "graph_module": graph, "guards_code": [], "torch_version": ""}
    return {key: clean_value(value, key) for key, value in cleaned.items()}


def clean_value(value: Any, key: str) -> Any:
    """Return `value` if no text in it can run as code. Metadata is reduced to the names of
    modules.
    """
    if isinstance(value, str):
        check_text(value, key)
    elif isinstance(value, list):
        return [clean_value(item, key) for item in value]
    elif isinstance(value, dict):
        if key == "metadata":
            return keep_module_stack(value)
        cleaned = {}
        for name, item in value.items():
            if name in ("as_custom_obj", "as_operator", "custom_obj", "token") and item is not None:
                raise ValueError(f"it holds an object of kind {name!r}; only tensors are read")
            is_symbol = key == "range_constraints"
            check_text(name, "expr_str" if is_symbol else "name")
            cleaned[name] = clean_value(item, name)
        return cleaned
    return value


def keep_module_stack(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Keep {"nn_module_stack": text}, the module that a node belongs to. Torch parses it as
    text.
    """
    stack = metadata.get("nn_module_stack")
    return {"nn_module_stack": stack} if isinstance(stack, str) else {}


def check_text(text: str, key: str) -> None:
    """Raise ValueError unless the text under `key` is harmless where torch uses it."""
    if key in TEXTS or (key in FLOATS and text in SPECIAL):
        return
    if key == "target":
        check_operator(text)
    elif key in ("in_spec", "out_spec"):
        check_containers(json.loads(text))
    elif key == "expr_str":
        check_size(text)
    elif not (PATH if key in PATHS else NAME).fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a name (under {key!r})")


def check_size(text: str) -> None:
    """Raise ValueError unless `text` is arithmetic on sizes that is quick to evaluate."""
    powers = text.count("**") + text.count("Pow")
    largest = max((int(number) for number in re.findall(r"\d{1,30}", text)), default=0)
    is_heavy = powers > 1 or (powers and largest > POWER_LIMIT)
    if len(text) > SIZE_LENGTH or is_heavy or not SIZE.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a symbolic size")


def check_operator(target: str) -> None:
    """Raise ValueError unless `target` names an operator that only computes on tensors or sizes."""
    import torch  # pyright: ignore[reportMissingImports]

    if SIZE_FUNCTIONS.fullmatch(target):
        return
    parts = target.split(".")
    if parts[:3] == ["torch", "ops", "higher_order"] and parts[3:] and parts[3] in NESTED:
        return
    if parts[:2] == ["torch", "ops"] and len(parts) == 5 and parts[2] in NAMESPACES:
        if parts[2] == "quantized_decomposed":
            register_decomposed()
        packet = getattr(getattr(torch.ops, parts[2]), parts[3], None)
        operator = getattr(packet, parts[4], None)
        if isinstance(operator, torch._ops.OpOverload) and not any(
            argument.name == "filename" for argument in operator._schema.arguments
        ):
            return
    raise ValueError(
        f"it calls {target[:80]!r}, which is not an operator on tensors that this PyTorch knows "
        f"(allowed name spaces: {', '.join(NAMESPACES)})"
    )


def register_decomposed() -> None:
    """Make `torch.ops.quantized_decomposed` known. Torch defines it in this module only."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401  # pyright: ignore


def check_containers(spec: Any) -> None:
    """Raise ValueError unless a tree of inputs or outputs has only plain containers with text
    keys.
    """
    nodes = [spec[1]]
    while nodes:
        node = nodes.pop()
        if node["type"] not in CONTAINERS:
            raise ValueError(
                f"inputs or outputs are in a {node['type']!r}; allowed: tuple, list, dict"
            )
        context = json.loads(node["context"]) if isinstance(node["context"], str) else None
        keys = context if isinstance(context, list) else [] if context is None else [context]
        for key in keys:
            if not isinstance(key, str) or not NAME.fullmatch(key):
                raise ValueError(f"{key!r} is not a name of an input or output")
        nodes.extend(node["children_spec"])
