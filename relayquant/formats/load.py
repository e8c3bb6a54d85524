"""Model file -> module: chooses the reader for a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import tvm

from relayquant.base.arguments import check_arguments
from relayquant.base.storage.files import (
    ARCHIVE_SUFFIX,
    DEFAULT_MAX_BYTES,
    PathLike,
    check_file,
    decode_json,
    read_text,
    reading,
)
from relayquant.base.storage.module_file import read_module
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx, import_tflite, import_torch
from relayquant.formats.readers.causal_lm import CausalLMOptions
from relayquant.formats.readers.causal_lm.sources import (
    CONFIG,
    MOST_CONFIG,
    import_folder,
    import_gguf,
)
from relayquant.formats.readers.onnx.graph.inputs import Inputs
from relayquant.formats.readers.state import pair_state
from relayquant.ir.rewrite.constants import share_constants
from relayquant.relay import decode_params, from_json, from_text, is_relay_json

Shapes: TypeAlias = Mapping[str, Sequence[int | str]]
Params: TypeAlias = Mapping[str, Any]
Imported: TypeAlias = tuple[tvm.IRModule, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Request:
    """Arguments of `load`. `model` is a path or a model in memory."""

    model: Any
    shapes: Shapes | None
    inputs: Inputs | None
    params: Params | PathLike | None
    causal_lm: CausalLMOptions | None
    max_bytes: int

    @property
    def path(self) -> Path:
        return Path(self.model)


@dataclass(frozen=True)
class Format:
    """A kind of model: file suffix, description, the arguments of `load` that apply, and a test for
    models in memory.
    """

    suffix: str
    kind: str
    read: Callable[[Request], Imported]
    takes_shapes: bool = False
    takes_inputs: bool = False
    takes_params: bool = False
    takes_causal_lm: bool = False
    is_model: Callable[[object], bool] = lambda model: False


def _read_onnx(request: Request) -> Imported:
    return import_onnx(
        request.model, shapes=request.shapes, inputs=request.inputs, max_bytes=request.max_bytes
    )


def _read_tflite(request: Request) -> Imported:
    return import_tflite(request.path, shapes=request.shapes, max_bytes=request.max_bytes)


def _read_torch(request: Request) -> Imported:
    return import_torch(request.model, max_bytes=request.max_bytes)


def _read_relay_text(request: Request) -> Imported:
    return from_text(_read_utf8(request), _find_params(request), shapes=request.shapes), {}


def _read_relay_json(request: Request) -> Imported:
    text = _read_utf8(request)
    if not is_relay_json(text):
        raise ModelError(
            f"{str(request.path)!r} is not a Relay module. A Relax module in JSON is read by "
            "tvm.ir.load_json, and may be passed to relayquant directly.",
            code="RQ201",
        )
    return from_json(text, _find_params(request), shapes=request.shapes), {}


def _read_module(request: Request) -> Imported:
    return read_module(check_file(request.path, request.max_bytes)), {}


def _read_gguf(request: Request) -> Imported:
    return import_gguf(
        request.path, request.causal_lm or CausalLMOptions(), max_bytes=request.max_bytes
    )


def _read_folder(request: Request) -> Imported:
    return import_folder(
        request.path, request.causal_lm or CausalLMOptions(), max_bytes=request.max_bytes
    )


def _read_utf8(request: Request) -> str:
    return check_file(request.path, request.max_bytes).read_bytes().decode("utf-8-sig")


def _find_params(request: Request) -> Params | None:
    """Return the given parameters, or read them from the given file or from `model.params` next to
    the model.
    """
    given = request.params
    if isinstance(given, Mapping):
        return given
    beside = request.path.with_suffix(".params")
    if given is None and not beside.exists():
        return None
    file = check_file(beside if given is None else given, request.max_bytes)
    return decode_params(file.read_bytes(), repr(str(file)))


def _is_onnx(model: object) -> bool:
    return isinstance(model, onnx.ModelProto)


def _is_torch(model: object) -> bool:
    """Return whether `model` is a program or a module of PyTorch. Does not import PyTorch."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(model).__mro__)


#: All kinds of models that can be read.
FORMATS: tuple[Format, ...] = (
    Format(".onnx", "ONNX", _read_onnx, takes_shapes=True, takes_inputs=True, is_model=_is_onnx),
    Format(".tflite", "TensorFlow Lite", _read_tflite, takes_shapes=True),
    Format(".pt2", "torch.export", _read_torch, is_model=_is_torch),
    Format(ARCHIVE_SUFFIX, "relayquant", _read_module),
    Format(".relay", "Relay text", _read_relay_text, takes_shapes=True, takes_params=True),
    Format(".json", "Relay JSON", _read_relay_json, takes_shapes=True, takes_params=True),
    Format(".gguf", "GGUF", _read_gguf, takes_causal_lm=True),
)
#: File name endings of torch.save.
PICKLES = (".pt", ".pth", ".ckpt")
#: A folder that transformers wrote. It has no suffix.
FOLDER = Format("", "transformers", _read_folder, takes_causal_lm=True)


@check_arguments
def load(
    model: PathLike | onnx.ModelProto | Any,
    *,
    shapes: Shapes | None = None,
    inputs: Inputs | None = None,
    params: Params | PathLike | None = None,
    causal_lm: CausalLMOptions | None = None,
    state: Mapping[str, str | int] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Imported:
    """Read a model from a file or from memory. The suffix of a file says which kind of model it is.

    Args:
        model: An `onnx.ModelProto`, a `torch.export.ExportedProgram`, or the path of a file: .onnx,
            .tflite, .pt2 (written by torch.export.save), .rqm (written by `save_module`), or a
            Relay file of TVM 0.7 to 0.19: .relay (`mod.astext()`) or .json (`tvm.ir.save_json`).
            Or a language model: .gguf, or a folder with config.json and safetensors files.
        shapes: Input name -> shape, to fix or rename symbolic dimensions (ONNX, TFLite, Relay):
            {"x": ("N", 3, 224, 224)}. Sizes that weights of an ONNX model fix may be left out.
            Sizes that a TFLite file leaves open are 1 without it, with a warning.
        inputs: Input name -> value, a number or an array (ONNX): {"sr": 16000}. The input becomes a
            constant, and an If that depends on it becomes the branch that is taken.
        params: Relay only: {name: array} or a file of `save_param_dict`. Default: the file
            `model.params` next to `model.relay`, if it exists.
        causal_lm: Language models only: length, number of sequences, and dtype of the cache.
        state: Input name -> the result that is its new value, by name or number: {"state":
            "stateN"}. These become the last inputs and results, and `Executor` holds them between
            calls, see `get_state`. Programs of torch.export and TFLite models with variables need
            no such pairs.
        max_bytes: Refuse larger files, external weights included.

    Returns:
        The module, and unbound parameters as {name: array}. Only a language model has any: its
        matrices of floats, each read from the file when it is accessed. Parameters of a Relay
        module without a value stay inputs.

    Raises:
        ModelError: there is no model, its suffix is unknown, the file is unreadable, or something
            in the model is not supported.
        MissingDependencyError: an optional package is missing.
    """
    is_path = isinstance(model, str | os.PathLike)
    found = _find_format(Path(model)) if is_path else _find_kind(model)
    what = f"a {found.suffix or 'model'} file" if is_path else f"a {type(model).__name__}"
    for name, given, is_taken in (
        ("shapes", shapes, found.takes_shapes),
        ("inputs", inputs, found.takes_inputs),
        ("params", params, found.takes_params),
        ("causal_lm", causal_lm, found.takes_causal_lm),
    ):
        if given is not None and not is_taken:
            raise ModelError(
                f"{name}= does not apply to {what} ({found.kind}), which holds its own. Leave it "
                "out.",
                code="RQ102",
            )
    request = Request(model, shapes, inputs, params, causal_lm, max_bytes)
    if not is_path:
        return _finish(found.read(request), state)
    with reading(model, f"{found.kind} model", ModelError):
        return _finish(found.read(request), state)


def _finish(imported: Imported, state: Mapping[str, str | int] | None) -> Imported:
    """Make equal constants one, and state of the pairs of inputs and results."""
    mod, params = imported
    mod = share_constants(mod)
    return (pair_state(mod, state) if state else mod), params


def _find_format(path: Path) -> Format:
    """Return the format of a file or folder. ModelError if its suffix is unknown."""
    if (path / CONFIG).is_file():
        return FOLDER
    for each in FORMATS:
        if each.suffix == path.suffix.lower() and not is_folder_config(path):
            return each
    if path.suffix.lower() in PICKLES:
        raise ModelError(
            f"{path} is named like a file of torch.save, which is not opened: it is a pickle, and "
            "may hold weights without a network. Build the module in Python, load its weights, and "
            f"write it with torch.export.save(torch.export.export(module, inputs), "
            f"'{path.with_suffix('.pt2').name}').",
            code="RQ201",
        )
    folder = path if path.is_dir() else path.parent
    has_config, suffix = (folder / CONFIG).is_file(), path.suffix.lower()
    is_part = path.name == CONFIG or suffix == ".safetensors" or (suffix == ".bin" and has_config)
    if path.is_dir() or is_part:
        raise ModelError(
            f"{path} is no model. A language model of transformers is a folder with {CONFIG} and "
            f"*.safetensors: name the folder. {folder} has {'a' if has_config else 'no'} {CONFIG}.",
            code="RQ201",
        )
    kinds = ", ".join(f"{each.suffix} ({each.kind})" for each in FORMATS)
    kinds += f", a folder with {CONFIG} ({FOLDER.kind})"
    unknown = f"Cannot tell from the name of {str(path)!r} what kind of model it is."
    missing = f"There is no model file {str(path)!r}."
    raise ModelError(
        f"{unknown if path.exists() else missing} Readable: {kinds}. "
        "Any module of a TVM frontend may also be passed to relayquant directly.",
        code="RQ201",
    )


def is_folder_config(path: Path) -> bool:
    """Whether a file is the description of a folder of transformers. A module in JSON may have its
    name.
    """
    if path.name != CONFIG or not path.is_file() or path.stat().st_size > MOST_CONFIG:
        return False
    try:
        data = decode_json(read_text(path, MOST_CONFIG))
    except (ValueError, RecursionError):
        return False  # reading it as a model reports what is wrong
    return isinstance(data, dict) and not data.keys().isdisjoint(("model_type", "architectures"))


def _find_kind(model: object) -> Format:
    """Return the format of a model in memory. ModelError if there is none."""
    for each in FORMATS:
        if each.is_model(model):
            return each
    raise ModelError(
        f"load takes the path of a file, an onnx.ModelProto or a torch.export.ExportedProgram, and "
        f"was given a {type(model).__name__}. A module of TVM needs no loading: pass it to "
        "relayquant directly.",
        code="RQ201",
    )
