"""GGUF metadata -> `CausalLMConfig`, and names of tensors, by the row of `table`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.causal_lm.changes import add_experts
from relayquant.formats.readers.causal_lm.config import (
    MOST_LAYERS,
    CausalLMConfig,
    ExpertConfig,
    LayerConfig,
    Rotary,
)
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.gguf.row import GgufModelRow
from relayquant.formats.readers.causal_lm.gguf.table import GGUF_ARCHITECTURES
from relayquant.formats.readers.causal_lm.gguf.tensor_names import EXPERTS, NAMES
from relayquant.formats.readers.causal_lm.layer_types import LAYER_TYPES, list_types, name_types
from relayquant.formats.readers.causal_lm.names import TensorNames, leave_out_layers
from relayquant.formats.readers.causal_lm.rotary import make_rotary
from relayquant.formats.readers.causal_lm.tensors import StoredTensor
from relayquant.formats.readers.gguf.header import GgufHeader

#: Divisors of the frequencies of rotary positions: read with the config.
FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
#: The settings "rope.scaling.*" that are supported. "finetuned" has no effect.
SCALING = (
    "type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow",
    "finetuned",
)  # fmt: skip


def read_gguf_config(
    header: GgufHeader, length: Callable[[int], int], tensors: Mapping[str, StoredTensor]
) -> tuple[CausalLMConfig, TensorNames]:
    """Read the metadata of a GGUF file.

    Args:
        length: Most tokens of the model -> length of the cache.
        tensors: The file's tensors.

    Raises:
        ModelError: the architecture or a setting is not supported, or a value is missing or wrong.
    """
    whole = Fields(header.metadata)
    parts = whole.integer("split.count", default=1)
    if parts > 1:
        raise ModelError(
            f"The file is part {whole.integer('split.no', default=0) + 1} of "
            f"{format_count(parts, 'file')}. Join them with llama.cpp: llama-gguf-split --merge "
            "FIRST-PART.gguf model.gguf.",
            code="RQ202",
        )
    kind = whole.text("general.architecture")
    if kind not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"The model's architecture is {kind[:60]!r}; supported: "
            f"{', '.join(GGUF_ARCHITECTURES)}.",
            code="RQ202",
        )
    row, fields = GGUF_ARCHITECTURES[kind], Fields(header.metadata, f"{kind}.")
    if not fields.flag("attention.causal", default=True):
        raise fields.refuse(("attention.causal",), False, "true. It is an encoder")
    check_scaling(header.metadata, f"{kind}.rope.scaling.", (*SCALING, *row.scaling))
    # Layers that guess several tokens at once stand behind the others.
    guessing = fields.integer("nextn_predict_layers", default=0)
    count = fields.integer("block_count") - guessing
    if not 1 <= count <= MOST_LAYERS:
        raise fields.refuse(("block_count",), count, f"1 to {MOST_LAYERS}")
    width, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if heads < 1:
        raise fields.refuse(("attention.head_count",), heads, "an integer from 1 on")
    head = fields.integer("attention.key_length", default=width // heads)
    if not row.has_latents and fields.integer("attention.value_length", default=head) != head:
        raise fields.refuse(("attention.value_length",), None, f"{head}, as the length of keys")
    most = fields.integer("context_length")
    embedding = tensors.get("token_embd.weight")
    config = CausalLMConfig(
        architecture=kind,
        vocabulary=embedding.shape[0] if embedding else fields.integer("vocab_size"),
        width=width,
        hidden=max(fields.numbers(count, "feed_forward_length", "expert_feed_forward_length")),
        heads=heads,
        groups=max(fields.numbers(count, "attention.head_count_kv", default=heads)),
        head_width=head,
        max_length=most,
        layers=read_gguf_layers(fields, row, count, head, length(most), tensors),
        epsilon=fields.number(
            "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", default=1e-5
        ),
        biases=find_biases(tensors),
        query_scale=1 / math.sqrt(max(head, 1)),
        attention_cap=fields.number("attn_logit_softcapping", default=0.0),
        score_cap=fields.number("final_logit_softcapping", default=0.0),
        is_tied="output.weight" not in tensors,
    )
    config = add_gguf_experts(fields, row, replace(config, **row.changes), tensors)  # pyright: ignore[reportArgumentType]
    return row.adjust(fields, config), leave_out_layers(row.names, range(count, count + guessing))


def find_biases(tensors: Container[str]) -> frozenset[str]:
    """Return the products with a bias, as the first layer has them."""
    parts = (
        "q", "k", "v", "out", "gate", "up", "down", "classifier", "router", "conv_in", "conv_out",
    )  # fmt: skip
    found = {part for part in parts if f"{NAMES[part].format(0)}.bias" in tensors}
    if "blk.0.attn_qkv.bias" in tensors:
        found |= {"q", "k", "v"}
    own = [parts for name, parts in EXPERTS.items() if name.format(layer=0) in tensors]
    parts = tuple(part for own_parts in own for part in own_parts)
    return frozenset(found | {p.removesuffix(".bias") for p in parts if p.endswith(".bias")})


def add_gguf_experts(
    fields: Fields, row: GgufModelRow, config: CausalLMConfig, tensors: Mapping[str, StoredTensor]
) -> CausalLMConfig:
    """Return the model with experts in the layers that have a router."""
    count = fields.integer("expert_count", default=0)
    if not count:
        return config
    for name in ("expert_group_count", "expert_weights_scale"):
        value = fields.get(name)
        if value not in (None, 0, 1) and not row.scales_shares:
            raise fields.refuse((name,), value, "0 or 1. Other routers are not supported")
    gate = fields.integer("expert_gating_func", default=min(row.router))
    if gate not in row.router:
        allowed = " or ".join(map(str, row.router))
        raise fields.refuse(
            ("expert_gating_func",), gate, f"{allowed}. Other routers are not supported"
        )
    inner = fields.integer("expert_feed_forward_length", default=config.hidden)
    layers = [
        i for i in range(len(config.layers)) if f"{NAMES['router'].format(i)}.weight" in tensors
    ]
    first = layers[0] if layers else 0
    shared = tensors.get(f"{NAMES['shared_up'].format(first)}.weight")
    groups = fields.integer("expert_group_count", default=0) or 1
    experts = ExpertConfig(
        count,
        fields.integer("expert_used_count"),
        inner,
        is_normalized=fields.flag("expert_weights_norm", default=row.is_normalized),
        shared=0 if shared is None or not shared.shape else shared.shape[0],
        has_share=f"{NAMES['share'].format(first)}.weight" in tensors,
        limit=row.limit,
        is_sigmoid=row.router[gate],
        is_beside=row.is_beside,
        has_choice=any(f"{NAMES['choice'].format(i)}.bias" in tensors for i in layers),
        sum_shift=row.sum_shift,
        groups=groups,
        chosen_groups=fields.integer("expert_group_used_count", default=0) or groups,
        scale=fields.number("expert_weights_scale", default=0.0) or 1.0,
    )
    return add_experts(config, experts, lambda i: i not in layers)


def check_scaling(metadata: Mapping[str, object], prefix: str, known: Sequence[str]) -> None:
    """Refuse settings of rotary positions that would not be used."""
    for name in metadata:
        if name.startswith(prefix) and name.removeprefix(prefix) not in known:
            raise ModelError(
                f"The model has {name[:60]!r}, which is not supported. Settings of scaled rotary "
                f"positions that are: {', '.join(known)}.",
                code="RQ202",
            )


def read_gguf_layers(
    fields: Fields,
    row: GgufModelRow,
    count: int,
    head: int,
    length: int,
    tensors: Mapping[str, StoredTensor],
) -> tuple[LayerConfig, ...]:
    """Read windows, rotary positions, mixers and sizes of all layers."""
    window = fields.integer("attention.sliding_window", default=0)
    types = list_gguf_types(fields, row, count, window)
    window = window if row.pattern or row.reads_pattern else 0
    rotaries = read_gguf_rotaries(fields, row, head, length, tensors)
    turned, mixers = row.turned(fields, types, window), row.mixers(fields, count)
    groups = fields.numbers(count, "attention.head_count_kv", default=1)
    hidden = fields.numbers(count, "feed_forward_length", default=1)
    layers = []
    for i, (kind, mixer) in enumerate(zip(types, mixers, strict=True)):
        if mixer is not None:
            layers.append(LayerConfig(mixer=mixer))
            continue
        if groups[i] < 1:
            raise fields.refuse(("attention.head_count_kv",), groups, "numbers from 1 on")
        is_windowed = LAYER_TYPES[kind]
        layers.append(
            LayerConfig(
                rotaries[is_windowed] if turned[i] else None,
                window if is_windowed else 0,
                groups=0 if groups[i] == max(groups) else groups[i],
                hidden=0 if hidden[i] == max(hidden) else hidden[i],
                has_values=not row.has_equal_values or f"{NAMES['v'].format(i)}.weight" in tensors,
            )
        )
    return tuple(layers)


def list_gguf_types(fields: Fields, row: GgufModelRow, count: int, window: int) -> list[str]:
    """Return the types of all layers.

    Raises:
        ModelError: metadata has others than the architecture.
    """
    pattern = fields.get("attention.sliding_window_pattern")
    if row.reads_pattern:
        if not isinstance(pattern, list) or len(pattern) < count:
            raise fields.refuse(("attention.sliding_window_pattern",), pattern, "a list of layers")
        return name_types([not each for each in pattern[:count]])
    types = list_types(row.pattern, count)
    is_windowed = [LAYER_TYPES[kind] for kind in types]
    if window and row.pattern and pattern not in (None, row.pattern, is_windowed):
        raise fields.refuse(("attention.sliding_window_pattern",), pattern, str(row.pattern))
    return types


def read_gguf_rotaries(
    fields: Fields,
    row: GgufModelRow,
    head: int,
    length: int,
    tensors: Mapping[str, StoredTensor],
) -> tuple[Rotary, Rotary]:
    """Read the rotary positions of layers that see all tokens, and of those with a window."""
    size = fields.integer("rope.dimension_count", default=head)
    base = fields.number("rope.freq_base", default=10000.0)
    original = fields.integer(
        "rope.scaling.original_context_length", default=fields.integer("context_length")
    )
    # As llama.cpp reads them, also the older name of the factor.
    kind = fields.text("rope.scaling.type", default="linear")
    factor = fields.number("rope.scaling.factor", "rope.scale_linear", default=1.0) or 1.0
    values = {
        "rope_type": "default" if kind == "none" else kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow"),
    }
    factors = None
    if FACTORS in tensors:
        factors = tensors[FACTORS]
    elif LONG_FACTORS in tensors and SHORT_FACTORS in tensors:
        factors = tensors[SHORT_FACTORS if length <= original else LONG_FACTORS]
        values["rope_type"] = "default"
    numbers = None
    if factors is not None:
        if factors.shape != (size // 2,):
            raise fields.refuse(("rope.dimension_count",), size, f"twice {factors.shape}")
        numbers = factors.read_floats().tolist()
    rotary = make_rotary(base, size, Fields(values), length, numbers)
    magnitude = fields.number("rope.scaling.attn_factor", default=1.0)
    rotary = replace(rotary, magnitude=rotary.magnitude * magnitude)
    if not row.local_base and row.scales_windows:
        return rotary, rotary
    local_base = fields.number("rope.freq_base_swa", default=row.local_base or base)
    local_size = fields.integer("rope.dimension_count_swa", default=size)
    return rotary, make_rotary(local_base, local_size, Fields({}), length)
