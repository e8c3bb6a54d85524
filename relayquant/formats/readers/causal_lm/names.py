"""Tensors by a source's names -> tensors by the names of `CausalLMConfig.shapes`, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.causal_lm.config import CausalLMConfig
from relayquant.formats.readers.causal_lm.mixers import LATENT
from relayquant.formats.readers.causal_lm.tensors import FLOATS, StoredTensor, join_tensors

#: Number of names that an error lists.
SHOWN_NAMES = 4
#: A joined tensor of a source -> what it consists of, by rows.
JOINED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
}


@dataclass(frozen=True)
class TensorNames:
    """What a source calls its tensors.

    Attributes:
        names: Part of our name without the layer ("q", "qkv", "final_norm") -> the source's name
            without ".weight" and ".bias", with {} for the number of the layer.
        experts: The source's whole name of a tensor of experts, with {layer} for the number of the
            layer -> the parts that it consists of, by rows. It is a matrix of one expert if the
            name has {expert}, else a stack (experts, outputs, inputs). Biases are parts of their
            own, "experts_up.bias", in a stack (experts, outputs).
        renamed: Parts of names in files of other versions -> what they are here.
        unread: Pattern of tensors that no network reads: buffers that are computed.
        is_transposed: Whether weights of products are stored as (inputs, outputs).
        has_turned_stacks: Whether stacks of floats are (experts, inputs, outputs).
        is_alternating: Whether rows of the parts of a stack take turns.
        has_logs: Whether rates of decay are stored as log(-rate).
        is_paired: Whether rows of q and k are stored for pairs of neighbours and not of halves
            (`Rotary` has halves).
    """

    names: Mapping[str, str]
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    unread: str = r"(?!)"
    is_transposed: bool = False
    has_turned_stacks: bool = False
    is_alternating: bool = False
    has_logs: bool = False
    is_paired: bool = False


#: Weights of one output, or of convolutions: sources have axes of size 1 there, or have not.
ONES = ("share", "conv", "delta_conv")
#: Matrices that every source stores as (vocabulary or positions, width).
TABLES = ("embedding", "positions", "token_table", "classifier")


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
    tensors = {translate_name(name, names.renamed): tensor for name, tensor in tensors.items()}
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    used: set[str] = set()
    for name, shape in shapes.items():
        place, suffix = name.rsplit(".", 1)
        layer, part = place.split(".")[1:] if place.startswith("layers.") else ("", place)
        experts = config.layers[int(layer)].experts if part.startswith("experts_") else None
        if experts is not None:
            part = part if suffix == "weight" else f"{part}.bias"
            sources, parts = find_experts(names, part, layer, experts.count, tensors)
            used.update(sources)
            absent = [source for source in sources if source not in tensors]
            missing += absent
            if not absent:
                sizes = {each: shapes[find_own(name, each)] for each in parts}
                own = {each: tensors[each] for each in sources}
                found[name] = join_experts(names, sizes, part, own, experts.count)
            continue
        mixed = config.list_joined(config.layers[int(layer)]) if layer else {}
        joined = next(
            (
                (known, source)
                for known, parts in [*mixed.items(), *JOINED.items()]
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
        check_readable(source, tensor)
        if part in ONES and drop_ones(tensor.shape) == drop_ones(shape):
            tensor = replace(tensor, shape=shape, read=partial(reshape, tensor, shape))
        is_matrix = len(shape) == 2
        if names.is_transposed and is_matrix and part not in TABLES:
            tensor = tensor.transpose()
        if joined and joined[0] in mixed:
            rows = mixed[joined[0]]
            check_rows(source, tensor, sum(map(len, rows.values())))
            tensor = tensor.take_rows(rows[part])
        elif joined:
            parts = JOINED[joined[0]]
            sizes = [shapes[f"layers.{layer}.{each}.weight"][0] for each in parts]
            tensor = cut_joined(sizes, parts.index(part), source, tensor)
        if part not in LATENT:
            check_shape(source, tensor, shape)
        if names.is_paired and part in ("q", "k"):
            tensor = tensor.take_rows(order_halves(config, part))
        if part in LATENT:
            tensor = arrange_heads(config, part, tensor)
            check_shape(source, tensor, shape)
        if names.has_logs and part == "delta_rate":
            tensor = tensor.map_floats(lambda logs: -np.exp(logs))
        if config.norm_shift and part.endswith("norm") and suffix == "weight":
            tensor = tensor.map_floats(partial(np.add, np.float32(config.norm_shift)))
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


def translate_name(name: str, renamed: Mapping[str, str]) -> str:
    """Return the name that a tensor of another version has here."""
    for before, after in renamed.items():
        name = name.replace(before, after)
    return name


def check_readable(source: str, tensor: StoredTensor) -> None:
    """Raise unless a network can have the tensor."""
    if tensor.refusal:
        raise ModelError(f"Tensor {source!r} {tensor.refusal}", code="RQ202")


def check_shape(source: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raise unless the tensor has a shape."""
    if tensor.shape != shape:
        raise ModelError(
            f"Tensor {source!r} has shape {tensor.shape}; the model's metadata says {shape}.",
            code="RQ204",
        )


def drop_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def reshape(tensor: StoredTensor, shape: tuple[int, ...]) -> np.ndarray:
    return tensor.read_floats().reshape(shape)


def find_experts(
    names: TensorNames, part: str, layer: str, count: int, tensors: Mapping[str, StoredTensor]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the tensors that hold a part of all experts, and the parts that they
    hold: one of all experts, or one of each. If there are none, they are missing.
    """
    found: list[tuple[list[str], tuple[str, ...]]] = []
    for template, parts in names.experts.items():
        if part in parts:
            sources = [template.format(layer=layer, expert=i) for i in range(count)]
            found.append((list(dict.fromkeys(sources)), parts))
    return next((each for each in found if each[0][0] in tensors), found[-1])


def find_own(name: str, part: str) -> str:
    """Return the name of another part of the experts of the same layer."""
    prefix = name.rsplit(".", 2)[0]
    return f"{prefix}.{part}" if part.endswith(".bias") else f"{prefix}.{part}.weight"


def join_experts(
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    part: str,
    sources: Mapping[str, StoredTensor],
    count: int,
) -> StoredTensor:
    """Return a part of all experts, one expert after the other.

    Args:
        shapes: The parts that the sources hold -> their shapes, of all experts.

    Raises:
        ModelError: the tensors have other shapes, or cannot be read.
    """
    (rows, *columns), sizes = shapes[part], [shape[0] // count for shape in shapes.values()]
    is_stack = len(sources) == 1
    inner = (sum(sizes), *columns)
    for source, tensor in sources.items():
        check_readable(source, tensor)
        turned = inner[::-1] if names.has_turned_stacks and tensor.is_float else inner
        check_shape(source, tensor, (count, *turned) if is_stack else inner)
    if not is_stack:
        return join_tensors(list(sources.values()))
    tensor = next(iter(sources.values()))
    if names.has_turned_stacks and tensor.is_float and columns:
        tensor = tensor.transpose()
    tensor = tensor.flatten(len(columns))
    if len(shapes) == 1:
        return tensor
    at = list(shapes).index(part)
    start, step = (at, len(sizes)) if names.is_alternating else (sum(sizes[:at]), 1)
    own = np.arange(count)[:, None] * sum(sizes) + start + step * np.arange(sizes[at])
    return tensor.take_rows(own.reshape(rows))


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
    check_rows(source, tensor, sum(sizes))
    return tensor.take_rows(slice(sum(sizes[:at]), sum(sizes[: at + 1])))


def arrange_heads(config: CausalLMConfig, part: str, tensor: StoredTensor) -> StoredTensor:
    """Return the weights of all heads, head by head: (heads * N, K). A stack has them so. A matrix
    has keys turned, (heads * K, N).
    """
    if len(tensor.shape) == 3:
        return tensor.flatten()
    latent = config.latent
    if part != "latent_keys" or latent is None:
        return tensor
    stack = (config.heads, latent.plain, latent.rank)
    shape = (config.heads * latent.rank, latent.plain)

    def read() -> np.ndarray:
        return tensor.read_floats().reshape(stack).swapaxes(1, 2).reshape(shape)

    return StoredTensor(shape, FLOATS, read)


def leave_out_layers(names: TensorNames, layers: Sequence[int]) -> TensorNames:
    """Return the names, with layers that are not read."""
    if not layers:
        return names
    prefix = re.escape(names.names["attention_norm"].partition("{}")[0])
    numbers = "|".join(map(str, layers))
    return replace(names, unread=rf"{names.unread}|{prefix}({numbers})\..*")


def check_rows(source: str, tensor: StoredTensor, rows: int) -> None:
    """Raise unless the tensor has so many rows."""
    if tensor.shape[:1] != (rows,):
        raise ModelError(
            f"Tensor {source!r} has shape {tensor.shape}; the model's metadata says "
            f"{format_count(rows, 'row')}.",
            code="RQ204",
        )


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
