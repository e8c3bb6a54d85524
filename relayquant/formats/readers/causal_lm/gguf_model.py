"""GGUF file -> config and tensors of a language model.

An architecture is one row of `GGUF_ARCHITECTURES`. Keys of the metadata are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and names of tensors those of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from relayquant.base.storage.files import PathLike, reading
from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.causal_lm.changes import (
    add_experts,
    change_rotary,
    grow_queries,
    share_caches,
)
from relayquant.formats.readers.causal_lm.config import (
    MOST_LAYERS,
    CausalLMConfig,
    ExpertConfig,
    HiddenFunction,
    LayerConfig,
    NormKind,
    Rotary,
)
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.layer_types import (
    LAYER_TYPES,
    TURN_ALL,
    ListTurned,
    leave_out,
    list_types,
    name_types,
    turn_windowed,
    turn_windowed_or_all,
)
from relayquant.formats.readers.causal_lm.mixers import (
    DeltaNet,
    LatentAttention,
    Mixer,
    ShortConvolution,
)
from relayquant.formats.readers.causal_lm.names import TensorNames, leave_out_layers
from relayquant.formats.readers.causal_lm.rotary import make_rotary
from relayquant.formats.readers.causal_lm.tensors import FLOATS, StoredTensor, Weight
from relayquant.formats.readers.gguf.blocks import BLOCK_KINDS, read_blocks
from relayquant.formats.readers.gguf.header import KINDS, GgufHeader, GgufPlace

#: Name of a kind of floats -> dtype of its bytes.
FLOAT_KINDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

NAMES: dict[str, str] = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "attention_norm": "blk.{}.attn_norm",
    "qkv": "blk.{}.attn_qkv",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "out": "blk.{}.attn_output",
    "post_attention_norm": "blk.{}.post_attention_norm",
    "ffn_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "post_ffn_norm": "blk.{}.post_ffw_norm",
    "final_norm": "output_norm",
    "router": "blk.{}.ffn_gate_inp",
    "shared_gate": "blk.{}.ffn_gate_shexp",
    "shared_up": "blk.{}.ffn_up_shexp",
    "shared_down": "blk.{}.ffn_down_shexp",
    "share": "blk.{}.ffn_gate_inp_shexp",
    "choice": "blk.{}.exp_probs_b",
    "token_table": "per_layer_token_embd",
    "token_in": "per_layer_model_proj",
    "token_norm": "per_layer_proj_norm",
    "token_gate": "blk.{}.inp_gate",
    "token_out": "blk.{}.proj",
    "token_post_norm": "blk.{}.post_norm",
    "scale": "blk.{}.layer_output_scale",
    "dense_norm": "blk.{}.post_ffw_norm_1",
    "pre_experts_norm": "blk.{}.pre_ffw_norm_2",
    "mixed_norm": "blk.{}.post_ffw_norm_2",
    "router_norm": "blk.{}.ffn_router_norm",
    "share_scale": "blk.{}.ffn_share_scale",
    "sinks": "blk.{}.attn_sinks",
    "conv": "blk.{}.shortconv.conv",
    "conv_in": "blk.{}.shortconv.in_proj",
    "conv_out": "blk.{}.shortconv.out_proj",
    "q_all": "blk.{}.attn_q",
    "q_latent": "blk.{}.attn_q_a",
    "q_latent_norm": "blk.{}.attn_q_a_norm",
    "q_b_all": "blk.{}.attn_q_b",
    "latent_all": "blk.{}.attn_kv_a_mqa",
    "latent_norm": "blk.{}.attn_kv_a_norm",
    "latent_both": "blk.{}.attn_kv_b",
    "latent_keys": "blk.{}.attn_k_b",
    "latent_values": "blk.{}.attn_v_b",
    "q_gate": "blk.{}.attn_q",
    "delta_in": "blk.{}.attn_qkv",
    "delta_gate": "blk.{}.attn_gate",
    "delta_in_gate": "blk.{}.ssm_in",
    "delta_strength": "blk.{}.ssm_beta",
    "delta_decay": "blk.{}.ssm_decay",
    "delta_strength_decay": "blk.{}.ssm_ba",
    "delta_conv": "blk.{}.ssm_conv1d",
    "delta_rate": "blk.{}.ssm_a",
    "delta_shift": "blk.{}.ssm_dt",
    "delta_gain": "blk.{}.ssm_norm",
    "delta_out": "blk.{}.ssm_out",
    "classifier": "output",
}
EXPERTS: dict[str, tuple[str, ...]] = {
    "blk.{layer}.ffn_gate_up_exps.weight": ("experts_gate", "experts_up"),
    "blk.{layer}.ffn_gate_exps.weight": ("experts_gate",),
    "blk.{layer}.ffn_up_exps.weight": ("experts_up",),
    "blk.{layer}.ffn_down_exps.weight": ("experts_down",),
    "blk.{layer}.ffn_gate_exps.bias": ("experts_gate.bias",),
    "blk.{layer}.ffn_up_exps.bias": ("experts_up.bias",),
    "blk.{layer}.ffn_down_exps.bias": ("experts_down.bias",),
}
#: Divisors of the frequencies of rotary positions: read with the config.
FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
#: The settings "rope.scaling.*" that are supported. "finetuned" has no effect.
SCALING = (
    "type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow",
    "finetuned",
)  # fmt: skip
UNREAD = r"rope_(freqs|factors_long|factors_short)\.weight|.*\.attn_rot_embd"

PLAIN = TensorNames(NAMES, EXPERTS, unread=UNREAD)
#: Rows of q and k are stored for pairs of neighbours.
PAIRED = replace(PLAIN, is_paired=True)


#: "expert_gating_func" -> whether shares are sigmoids. 0: as the architecture has it.
SOFTMAX = {0: False, 1: False}
SOFTMAX_OR_SIGMOID = {1: False, 2: True}


@dataclass(frozen=True)
class GgufModelRow:
    """An architecture of llama.cpp.

    Attributes:
        names: Names of its tensors.
        changes: Fields of `CausalLMConfig` that differ from Llama.
        pattern: Where the window holds, see `list_types`.
        reads_pattern: Whether metadata says which layers have the window. It says so of each.
        local_base: Base of rotary positions in layers with a window, if metadata has none. 0: as
            in the others.
        scales_windows: Whether rotary positions of layers with a window are scaled.
        turned: Which layers have rotary positions.
        is_normalized: Whether shares of chosen experts are divided by their sum, if metadata does
            not say so.
        limit: Bound of values inside of experts, see `ExpertConfig`.
        router: Values of "expert_gating_func" that it reads -> whether shares are sigmoids.
        sum_shift: See `ExpertConfig`.
        is_beside: Whether layers with experts have their feed-forward network, too.
        has_equal_values: Whether layers without a product for values have keys as values.
        scales_shares: Whether it reads groups of experts and the factor of their shares.
        has_latents: Whether heads have other widths than "attention.key_length".
        scaling: More settings "rope.scaling.*" that it reads.
        mixers: (metadata, number of layers) -> what each layer has instead of attention.
        adjust: What depends on other metadata.
    """

    names: TensorNames = PLAIN
    changes: Mapping[str, object] = field(default_factory=dict)
    pattern: int = 0
    reads_pattern: bool = False
    local_base: float = 0.0
    scales_windows: bool = True
    turned: ListTurned = TURN_ALL
    is_normalized: bool = True
    limit: float = 0.0
    router: Mapping[int, bool] = field(default_factory=lambda: SOFTMAX)
    sum_shift: float = 0.0
    is_beside: bool = False
    has_equal_values: bool = False
    scales_shares: bool = False
    has_latents: bool = False
    scaling: tuple[str, ...] = ()
    mixers: Callable[[Fields, int], Sequence[Mixer | None]] = lambda _fields, count: [None] * count
    adjust: Callable[[Fields, CausalLMConfig], CausalLMConfig] = lambda _fields, config: config


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
        hidden=max(
            list_numbers(fields, count, None, "feed_forward_length", "expert_feed_forward_length")
        ),
        heads=heads,
        groups=max(list_numbers(fields, count, heads, "attention.head_count_kv")),
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


def list_numbers(fields: Fields, count: int, default: int | None, *names: str) -> list[int]:
    """Return a number of each layer, of metadata that has one for all, or one for each.

    Raises:
        ModelError: it is missing and has no default, is another kind of value, or has too few.
    """
    value = fields.get(*names)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list):
        return [fields.integer(*names, default=default)] * count
    is_right = all(isinstance(each, int) and each >= 0 for each in value)
    if not is_right or len(value) < count:
        raise fields.refuse(names, value, f"{format_count(count, 'number')}, one for each layer")
    return value[:count]


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
    groups = list_numbers(fields, count, 1, "attention.head_count_kv")
    hidden = list_numbers(fields, count, 1, "feed_forward_length")
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
    pattern = pattern.tolist() if isinstance(pattern, np.ndarray) else pattern
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


def list_gguf_tensors(path: PathLike, header: GgufHeader) -> dict[str, StoredTensor]:
    """Return the tensors of a file, which are read when they are used."""
    return {
        name: store_tensor(Path(path).absolute(), place) for name, place in header.tensors.items()
    }


def store_tensor(path: Path, place: GgufPlace) -> StoredTensor:
    """Return one tensor of a file."""
    kind = KINDS[place.kind].name
    if kind in FLOAT_KINDS:
        return StoredTensor(place.shape, FLOATS, partial(read_floats, path, place))
    refusal = ""
    if place.kind not in BLOCK_KINDS or len(place.shape) not in (2, 3):
        known = [*FLOAT_KINDS, *(KINDS[number].name for number in BLOCK_KINDS)]
        refusal = (
            f"has blocks of kind {kind} and shape {place.shape}; supported: matrices of "
            f"{', '.join(known)}. Quantize the model to one of these."
        )
    return StoredTensor(place.shape, kind, partial(read_grouped, path, place), refusal)


def map_bytes(path: Path, place: GgufPlace) -> np.ndarray:
    """Map the bytes of a tensor. numpy cannot map 0 bytes."""
    if not place.size:
        return np.empty(0, "uint8")
    return np.memmap(path, "uint8", "r", place.offset, place.size)


def read_floats(path: Path, place: GgufPlace) -> Weight:
    """Read a tensor of floats as float32."""
    with reading(path, "GGUF file", ModelError):
        dtype = FLOAT_KINDS[KINDS[place.kind].name]
        return widen(map_bytes(path, place).view(dtype).reshape(place.shape))


def read_grouped(path: Path, place: GgufPlace) -> Weight:
    """Read a tensor of blocks."""
    with reading(path, "GGUF file", ModelError):
        *outer, features = place.shape
        return read_blocks(map_bytes(path, place), place.kind, (math.prod(outer), features))


def widen(array: np.ndarray) -> np.ndarray:
    """Convert floats to float32. uint16 are the bits of bfloat16."""
    if array.dtype.kind == "u":
        return (array.astype("uint32") << 16).view("float32")
    return array.astype("float32")


# --- What differs from Llama --------------------------------------------------------------------


def scale_embedding(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Gemma multiplies the embedding by sqrt(width). The file has 1 + w of its norms."""
    return replace(config, embedding_scale=math.sqrt(config.width))


def adjust_gemma_scale(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """The largest models (46 layers of Gemma 2, 62 of Gemma 3) scale by width / heads."""
    if len(config.layers) in (46, 62):
        config = replace(config, query_scale=math.sqrt(config.heads / config.width))
    return scale_embedding(fields, config)


def adjust_gguf_gemma4(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Layers with a window have other heads, and the last layers keys and values of others."""
    head = fields.integer("attention.key_length_swa", default=config.head_width)
    layers = [
        replace(layer, head_width=head) if layer.window and head != config.head_width else layer
        for layer in config.layers
    ]
    shared = fields.integer("attention.shared_kv_layers", default=0)
    return scale_embedding(
        fields,
        replace(
            config,
            layers=tuple(share_caches(layers, len(layers) - shared)),
            token_width=fields.integer("embedding_length_per_layer_input", default=0),
            score_cap=fields.number("final_logit_softcapping", default=30.0),
        ),
    )


def adjust_gguf_granite(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    divisor = fields.number("logit_scale", default=1.0)
    if divisor == 0:
        raise fields.refuse(("logit_scale",), divisor, "a number other than 0")
    return replace(
        config,
        query_scale=fields.number("attention.scale", default=config.query_scale),
        embedding_scale=fields.number("embedding_scale", default=1.0),
        residual_scale=fields.number("residual_scale", default=1.0),
        score_scale=1 / divisor,
    )


def adjust_gguf_cohere(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(config, score_scale=fields.number("logit_scale", default=1.0))


def adjust_gguf_deepseek(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Attention to latent vectors. With YaRN, rotary positions have no factor, and scores one."""
    turned = fields.integer("rope.dimension_count")
    key = fields.integer("attention.key_length_mla", "attention.key_length")
    latent = LatentAttention(
        fields.integer("attention.kv_lora_rank"),
        key - turned,
        turned,
        fields.integer("attention.value_length_mla", "attention.value_length"),
        fields.integer("attention.q_lora_rank", default=0),
        config.epsilon,
    )
    factor = fields.number("rope.scaling.factor", default=1.0)
    weight = fields.number("rope.scaling.yarn_log_multiplier", default=0.0)
    magnitude = weight * math.log(factor) + 1 if factor > 1 else 1.0
    return replace(
        change_rotary(config, magnitude=1.0),
        groups=1,
        head_width=latent.width,
        latent=latent,
        query_scale=magnitude**2 / math.sqrt(key),
    )


def adjust_gguf_mistral3(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Queries grow with their position. With YaRN, rotary positions have no factor."""
    config = change_rotary(config, magnitude=1.0)
    growth = fields.number("attention.temperature_scale", default=0.0)
    if not growth:
        return config
    return grow_queries(config, growth, fields.integer("rope.scaling.original_context_length"))


def list_convolutions(fields: Fields, count: int) -> list[Mixer | None]:
    """Convolutions in layers without heads of keys and values."""
    convolution = ShortConvolution(fields.integer("shortconv.l_cache"))
    groups = list_numbers(fields, count, 1, "attention.head_count_kv")
    return [None if each else convolution for each in groups]


def list_deltas(fields: Fields, count: int, is_tiled: bool = False) -> list[Mixer | None]:
    """The gated delta rule in all layers but each N-th."""
    period = fields.integer("full_attention_interval", default=4)
    if period < 1:
        raise fields.refuse(("full_attention_interval",), period, "an integer from 1 on")
    heads, width = fields.integer("ssm.time_step_rank"), fields.integer("ssm.state_size")
    if heads < 1:
        raise fields.refuse(("ssm.time_step_rank",), heads, "an integer from 1 on")
    delta = DeltaNet(
        fields.integer("ssm.group_count"),
        width,
        heads,
        fields.integer("ssm.inner_size") // heads,
        fields.integer("ssm.conv_kernel"),
        is_tiled,
    )
    return [None if i % period == 0 else delta for i in range(1, count + 1)]


def list_tiled_deltas(fields: Fields, count: int) -> list[Mixer | None]:
    return list_deltas(fields, count, is_tiled=True)


GELU = {"activation": HiddenFunction.GELU_TANH}
#: Layer norms and a feed-forward network without a gate.
LAYER_NORMS = {**GELU, "norm": NormKind.LAYER, "is_gated": False}
GEMMA2 = {**GELU, "has_post_norms": True}
POST_NORMS = {"has_pre_norms": False, "has_post_norms": True}
LFM2 = replace(PLAIN, names={**NAMES, "final_norm": "token_embd_norm"})
GATES = {"has_head_norms": True, "has_gates": True}
DELTA_NAMES = replace(
    PLAIN,
    names={**NAMES, "ffn_norm": NAMES["post_attention_norm"]},
    renamed={".ssm_alpha": ".ssm_decay", ".ssm_a": ".ssm_a.weight"},
)
COHERE = {"norm": NormKind.LAYER, "has_norm_biases": False, "is_parallel": True}

#: "general.architecture" -> architecture.
GGUF_ARCHITECTURES: dict[str, GgufModelRow] = {
    "llama": GgufModelRow(PAIRED),
    "smollm3": GgufModelRow(PAIRED, turned=leave_out(4)),
    "granite": GgufModelRow(PAIRED, adjust=adjust_gguf_granite),
    "qwen2": GgufModelRow(),
    "qwen3": GgufModelRow(changes={"has_head_norms": True}),
    "granitemoe": GgufModelRow(PAIRED, adjust=adjust_gguf_granite),
    "qwen2moe": GgufModelRow(is_normalized=False),
    "qwen3moe": GgufModelRow(changes={"has_head_norms": True}),
    "olmoe": GgufModelRow(changes={"has_row_norms": True}, is_normalized=False),
    "gpt-oss": GgufModelRow(
        replace(PLAIN, names={**NAMES, "ffn_norm": NAMES["post_attention_norm"]}),
        changes={"has_sinks": True},
        pattern=2,
        limit=7.0,
    ),
    "lfm2": GgufModelRow(LFM2, changes={"has_head_norms": True}, mixers=list_convolutions),
    "lfm2moe": GgufModelRow(
        LFM2,
        changes={"has_head_norms": True},
        router=SOFTMAX_OR_SIGMOID,
        sum_shift=1e-6,
        mixers=list_convolutions,
    ),
    "qwen3next": GgufModelRow(DELTA_NAMES, changes=GATES, mixers=list_deltas),
    "qwen35": GgufModelRow(DELTA_NAMES, changes=GATES, mixers=list_tiled_deltas),
    "qwen35moe": GgufModelRow(DELTA_NAMES, changes=GATES, mixers=list_tiled_deltas),
    "deepseek2": GgufModelRow(
        is_normalized=False,
        router=SOFTMAX | SOFTMAX_OR_SIGMOID,
        scales_shares=True,
        has_latents=True,
        scaling=("yarn_log_multiplier",),
        adjust=adjust_gguf_deepseek,
    ),
    "mistral3": GgufModelRow(PAIRED, scaling=("yarn_log_multiplier",), adjust=adjust_gguf_mistral3),
    "phi2": GgufModelRow(changes={**LAYER_NORMS, "is_parallel": True}),
    "phi3": GgufModelRow(replace(PLAIN, names={**NAMES, "gate_up": "blk.{}.ffn_up"}), pattern=1),
    "gemma": GgufModelRow(changes=GELU, adjust=scale_embedding),
    "gemma2": GgufModelRow(changes=GEMMA2, pattern=2, adjust=adjust_gemma_scale),
    "gemma3": GgufModelRow(
        changes={**GEMMA2, "has_head_norms": True},
        pattern=6,
        local_base=10000.0,
        adjust=adjust_gemma_scale,
    ),
    "gemma4": GgufModelRow(
        replace(
            PLAIN,
            unread=rf"{UNREAD}|blk\.\d+\.attn_[kv](_norm)?\.weight",
            renamed={
                ".ffn_gate_inp.scale": ".ffn_router_norm.weight",
                ".ffn_down_exps.scale": ".ffn_share_scale.weight",
            },
        ),
        changes={
            **GEMMA2,
            "has_head_norms": True,
            "has_value_norms": True,
            "has_layer_scales": True,
            "query_scale": 1.0,
        },
        reads_pattern=True,
        is_beside=True,
        has_equal_values=True,
        local_base=10000.0,
        adjust=adjust_gguf_gemma4,
    ),
    "olmo2": GgufModelRow(
        changes={**POST_NORMS, "has_row_norms": True}, pattern=4, scales_windows=False
    ),
    "exaone4": GgufModelRow(
        changes={**POST_NORMS, "has_head_norms": True}, pattern=4, turned=turn_windowed_or_all
    ),
    "glm4": GgufModelRow(
        replace(PAIRED, names={**NAMES, "gate_up": "blk.{}.ffn_up"}),
        changes={"has_post_norms": True},
    ),
    "ernie4_5": GgufModelRow(PAIRED),
    "command-r": GgufModelRow(PAIRED, changes=COHERE, adjust=adjust_gguf_cohere),
    "cohere2": GgufModelRow(
        PAIRED, changes=COHERE, pattern=4, turned=turn_windowed, adjust=adjust_gguf_cohere
    ),
    "starcoder2": GgufModelRow(changes=LAYER_NORMS),
    "gpt2": GgufModelRow(changes={**LAYER_NORMS, "has_positions": True}, turned=leave_out(1)),
}
