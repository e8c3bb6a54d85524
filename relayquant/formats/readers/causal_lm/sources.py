"""A GGUF file, a folder of `transformers`, or a model in memory -> a module of a language model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import tvm

from relayquant.base.grouping import GroupedWeight
from relayquant.base.storage.files import PathLike, decode_json, read_text, reading
from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.architectures.reader import WITH_PICTURES, read_config
from relayquant.formats.readers.causal_lm.config import CausalLMConfig
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.gguf.reader import read_gguf_config
from relayquant.formats.readers.causal_lm.gguf.tensors import list_gguf_tensors
from relayquant.formats.readers.causal_lm.names import TensorNames, translate_tensors
from relayquant.formats.readers.causal_lm.network import build_network
from relayquant.formats.readers.causal_lm.options import CausalLMOptions
from relayquant.formats.readers.causal_lm.tensors import FLOATS, CausalLMParams, StoredTensor
from relayquant.formats.readers.float4 import MXFP4_BYTES, MXFP4_GROUP, make_mxfp4
from relayquant.formats.readers.gguf.header import read_header
from relayquant.formats.readers.safetensors_file import SafetensorsPlace, list_safetensors

#: Name of the file that describes a model of `transformers`, and its largest size in bytes.
CONFIG, MOST_CONFIG = "config.json", 16 << 20

#: Names of tensors of the language model in a model of pictures and text, and of others there.
TEXT_PART = re.compile(
    r"(model\.)?(language_model|text_model)\.((?P<own>model|lm_head)\.)?(?P<rest>.*)"
)
OTHER_PARTS = re.compile(
    r"(model\.)?(audio_tower|embed_audio|embed_vision|vision_tower|vision_model|visual|"
    r"multi_modal_projector|connector)\..*"
)

#: A module, and the values of its parameters.
CausalLM: TypeAlias = tuple[tvm.IRModule, CausalLMParams]


def import_gguf(path: PathLike, options: CausalLMOptions, *, max_bytes: int) -> CausalLM:
    """Read a language model from a GGUF file.

    Blocks stay as they are, in grouped weights. Matrices of floats become parameters.

    Raises:
        ModelError: the file is damaged or too large, or the model is not supported.
        ConfigError: the options ask for more than the model allows.
    """
    with reading(path, "GGUF file", ModelError):
        header = read_header(path, max_bytes=max_bytes)
        tensors = list_gguf_tensors(path, header)
        config, names = read_gguf_config(header, options.choose_length, tensors)
        return assemble(config, names, tensors, options)


def import_folder(folder: PathLike, options: CausalLMOptions, *, max_bytes: int) -> CausalLM:
    """Read a language model from a folder that `save_pretrained` wrote: config.json and
    safetensors. Errors as for `import_gguf`.
    """
    folder = Path(folder)
    with reading(folder / CONFIG, "description of a model", ModelError):
        values = decode_json(read_text(folder / CONFIG, MOST_CONFIG), allow_nan=True)
        if not isinstance(values, dict):
            raise ValueError("it is no table")
    with reading(folder, "folder of a model", ModelError):
        tensors = pair_blocks(list_safetensors(folder, max_bytes))
        return import_tensors(values, tensors, options)


def pair_blocks(places: Mapping[str, SafetensorsPlace]) -> dict[str, StoredTensor]:
    """Return the tensors of files. A pair of bytes is a stack in MXFP4, as GPT-OSS has them:

    NAME_blocks (E, N, G, 16), NAME_scales (E, N, G)  ->  NAME (E, N, 32 * G)
    """
    tensors: dict[str, StoredTensor] = {}
    for name, place in places.items():
        base = name.removesuffix("_blocks").removesuffix("_scales")
        codes, scales = places.get(f"{base}_blocks"), places.get(f"{base}_scales")
        if codes is None or scales is None or not is_mxfp4(codes, scales):
            tensors[name] = StoredTensor(place.shape, FLOATS, place.read, place.refusal)
            continue
        shape = (*scales.shape[:2], MXFP4_GROUP * scales.shape[2])
        tensors[base] = StoredTensor(shape, "MXFP4", partial(read_mxfp4, codes, scales))
    return tensors


def is_mxfp4(codes: SafetensorsPlace, scales: SafetensorsPlace) -> bool:
    """Whether two tensors are the blocks and scales of a stack in MXFP4."""
    fits = len(scales.shape) == 3 and codes.shape == (*scales.shape, MXFP4_BYTES)
    return fits and codes.dtype == scales.dtype == "U8"


def read_mxfp4(codes: SafetensorsPlace, scales: SafetensorsPlace) -> GroupedWeight:
    """Read a stack, as one matrix."""
    groups = scales.shape[2]
    rows = codes.map_bytes().reshape(-1, groups * MXFP4_BYTES)
    return make_mxfp4(rows, scales.map_bytes().reshape(-1, groups))


def import_tensors(
    values: Mapping[str, Any], tensors: Mapping[str, StoredTensor], options: CausalLMOptions
) -> CausalLM:
    """Build the module of a model of `transformers`.

    Args:
        values: What config.json holds. Of a model of pictures and text (`WITH_PICTURES`), the
            language model is built.
        tensors: Tensors by the names of `transformers`, with or without "model." before them.
    """
    text = values.get("text_config")
    if values.get("model_type") in WITH_PICTURES and isinstance(text, Mapping):
        tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        values, tensors = {**text, "tie_word_embeddings": tied}, take_text_part(tensors)
    config, names = read_config(Fields(values), options.choose_length, tensors)
    # The file of a model without a classifier has no name of the model before the others.
    base, _, embedding = f"{names.names['embedding']}.weight".partition(".")
    if embedding in tensors:
        tensors = {f"{base}.{name}": tensor for name, tensor in tensors.items()}
    return assemble(config, names, tensors, options)


def take_text_part(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the language model alone, by the names that it has alone:

    "model.language_model.norm.weight" or "language_model.model.norm.weight" -> "model.norm.weight"
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = TEXT_PART.fullmatch(name)
        if match:
            found[f"{match['own'] or 'model'}.{match['rest']}"] = tensor
        elif not OTHER_PARTS.fullmatch(name):
            found[name] = tensor
    return found


def assemble(
    config: CausalLMConfig,
    names: TensorNames,
    tensors: Mapping[str, StoredTensor],
    options: CausalLMOptions,
) -> CausalLM:
    """Build a module after the tensors were found and checked."""
    return build_network(config, options, translate_tensors(config, names, tensors))
