"""Tensors by a source's names -> tensors by the names of `CausalLMConfig.shapes`, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.causal_lm.config import CausalLMConfig
from relayquant.formats.readers.causal_lm.tensors import StoredTensor

#: Number of names that an error lists.
SHOWN_NAMES = 4
#: A joined tensor of a source -> what it consists of, by rows.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True)
class TensorNames:
    """What a source calls its tensors.

    Attributes:
        names: Part of our name without the layer ("q", "qkv", "final_norm") -> the source's name
            without ".weight" and ".bias", with {} for the number of the layer.
        unread: Pattern of tensors that no network reads: buffers that are computed.
        is_transposed: Whether weights of products are stored as (inputs, outputs).
        is_paired: Whether rows of q and k are stored for pairs of neighbours and not of halves
            (`Rotary` has halves).
    """

    names: Mapping[str, str]
    unread: str = r"(?!)"
    is_transposed: bool = False
    is_paired: bool = False


#: Matrices that every source stores as (vocabulary or positions, width).
TABLES = ("embedding", "positions", "classifier")


def translate_tensors(
    config: CausalLMConfig, names: TensorNames, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Find every tensor of a network.

    Returns:
        Name and shape as in `config.shapes` -> tensor.

    Raises:
        ModelError: tensors are missing, have another shape or a dtype that is not supported, or are
            there and would not be used.
    """
    shapes = config.shapes
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    used: set[str] = set()
    for name, shape in shapes.items():
        place, suffix = name.rsplit(".", 1)
        layer, part = place.split(".")[1:] if place.startswith("layers.") else ("", place)
        joined = next(
            (
                (known, source)
                for known, parts in JOINED.items()
                if part in parts and (source := find_name(names, known, layer, suffix)) in tensors
            ),
            None,
        )
        source = joined[1] if joined else find_name(names, part, layer, suffix)
        if source not in tensors:
            missing.append(source)
            continue
        used.add(source)
        tensor = tensors[source]
        if tensor.refusal:
            raise ModelError(f"Tensor {source!r} {tensor.refusal}", code="RQ202")
        is_matrix = len(shape) == 2
        if names.is_transposed and is_matrix and part not in TABLES:
            tensor = tensor.transpose()
        if joined:
            parts = JOINED[joined[0]]
            sizes = [shapes[f"layers.{layer}.{each}.weight"][0] for each in parts]
            tensor = cut_joined(sizes, parts.index(part), source, tensor)
        if tensor.shape != shape:
            raise ModelError(
                f"Tensor {source!r} has shape {tensor.shape}; the model's metadata says {shape}.",
                code="RQ204",
            )
        if names.is_paired and part in ("q", "k"):
            tensor = tensor.take_rows(order_halves(config, part))
        if config.norm_shift and part.endswith("norm") and suffix == "weight":
            tensor = tensor.shift(config.norm_shift)
        found[name] = tensor
    if missing:
        raise ModelError(
            f"The model has no tensor {list_names(missing)}. A {config.architecture} model of "
            f"{len(config.layers)} layers needs it.",
            code="RQ204",
        )
    tied = {find_name(names, "classifier", "", "weight")} if config.is_tied else set()
    unread = re.compile(names.unread)
    unknown = [name for name in tensors if name not in used | tied and not unread.fullmatch(name)]
    if unknown:
        raise ModelError(
            f"The model has tensors that a {config.architecture} model does not use: "
            f"{list_names(unknown)}. It is a variant that is not supported.",
            code="RQ202",
        )
    return found


def find_name(names: TensorNames, part: str, layer: str, suffix: str) -> str:
    """Return the source's name of a tensor; "" if the source has no such part."""
    template = names.names.get(part)
    return f"{template.format(layer)}.{suffix}" if template else ""


def list_names(names: Sequence[str]) -> str:
    """List the first names for a message."""
    shown = ", ".join(map(repr, names[:SHOWN_NAMES]))
    more = len(names) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def cut_joined(sizes: Sequence[int], at: int, source: str, tensor: StoredTensor) -> StoredTensor:
    """Return the rows of part `at` of a joined tensor, whose parts have `sizes` rows.

    Raises:
        ModelError: it does not have the rows of all its parts.
    """
    if tensor.shape[:1] != (sum(sizes),):
        raise ModelError(
            f"Tensor {source!r} has shape {tensor.shape}; the model's metadata says "
            f"{format_count(sum(sizes), 'row')}.",
            code="RQ204",
        )
    return tensor.take_rows(slice(sum(sizes[:at]), sum(sizes[: at + 1])))


def order_halves(config: CausalLMConfig, part: str) -> np.ndarray:
    """Return the order of rows that makes halves of pairs, in each head:

    rows 0, 2, 4, ... and then 1, 3, 5, ... of the elements that are turned.
    """
    heads = config.heads if part == "q" else config.groups
    rotary = next((layer.rotary for layer in config.layers if layer.rotary), None)
    turned = 2 * len(rotary.frequencies) if rotary else 0
    order = np.arange(config.head_width)
    order[:turned] = np.concatenate([np.arange(0, turned, 2), np.arange(1, turned, 2)])
    return (np.arange(heads)[:, None] * config.head_width + order).reshape(-1)
