"""The architectures of `transformers`: config.json -> `CausalLMConfig`, and names of tensors.

An architecture is one row of `ARCHITECTURES`. All begin as Llama, and a row says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relayquant.errors import ModelError
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
from relayquant.formats.readers.causal_lm.mixers import (
    DeltaNet,
    LatentAttention,
    Mixer,
    ShortConvolution,
)
from relayquant.formats.readers.causal_lm.names import TensorNames, leave_out_layers
from relayquant.formats.readers.causal_lm.rotary import make_rotary

#: Name in config.json -> function.
ACTIVATIONS = {
    "silu": HiddenFunction.SILU,
    "swish": HiddenFunction.SILU,
    "gelu": HiddenFunction.GELU,
    "gelu_new": HiddenFunction.GELU_TANH,
    "gelu_fast": HiddenFunction.GELU_TANH,
    "gelu_pytorch_tanh": HiddenFunction.GELU_TANH,
    "relu": HiddenFunction.RELU,
}
#: The "quant_method" whose tensors are read.
MXFP4 = "mxfp4"
#: Kinds of layers in "layer_types" -> whether attention has a window.
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}

#: "model_type" of models of pictures and text, of which the language model is read.
WITH_PICTURES = (
    "gemma3", "gemma4", "internvl", "llava", "mistral3", "qwen3_5", "qwen3_5_moe", "smolvlm",
)  # fmt: skip

#: Changes the Llama that metadata describes to another network.
Adjust = Callable[[Fields, CausalLMConfig], CausalLMConfig]
#: (metadata, number of layers) -> types of layers, if metadata has no "layer_types".
ListTypes = Callable[[Fields, int], list[str]]
#: Metadata -> what a layer of one type has instead of attention.
ReadMixer = Callable[[Fields], Mixer]
#: (metadata, number, type of a layer) -> its head width, and heads of keys and values, as
#: `LayerConfig` has them.
ReadSizes = Callable[[Fields, int, str], tuple[int, int]]
#: (metadata, types of layers, the window or 0) -> whether each layer has rotary positions.
ListTurned = Callable[[Fields, Sequence[str], int], list[Any]]


@dataclass(frozen=True)
class ModelRow:
    """An architecture of `transformers`.

    Attributes:
        names: Names of its tensors.
        settings: Settings that not every architecture has -> the value if config.json lacks one,
            that of its class in `transformers`. Settings that only other rows have are not read.
        adjust: What differs from Llama.
        types: Types of layers if metadata has no "layer_types". They count if there is a window,
            or if a type has a mixer.
        refused: Settings that must be false.
        turned: Which layers have rotary positions.
        scales_windows: Whether "rope_scaling" is for layers with a window, too.
        rotary: Settings of rotary positions for a config.json that has none.
        sizes: As `settings`, for those that all architectures have. Files of models that also see
            lack them.
        mixers: Type of layers without attention -> what these have.
        heads: Sizes of heads in layers that differ.
    """

    names: TensorNames
    settings: Mapping[str, Any]
    adjust: Adjust = lambda _fields, config: config
    types: ListTypes = lambda _fields, count: list_types(0, count)
    refused: tuple[str, ...] = ()
    turned: ListTurned = lambda *given: list_turned(*given)
    scales_windows: bool = True
    rotary: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    mixers: Mapping[str, ReadMixer] = field(default_factory=dict)
    heads: ReadSizes = lambda _fields, _number, _kind: (0, 0)

    def choose(self, fields: Fields) -> Fields:
        """Return what a model of this architecture reads.

        Raises:
            ModelError: a setting must be false and is not.
        """
        for name in self.refused:
            if fields.flag(name):
                raise ModelError(
                    f"The model has {name!r}, which is not supported.",
                    code="RQ202",
                )
        others = {name for row in ARCHITECTURES.values() for name in row.settings}
        own = {name: value for name, value in fields.values.items() if name not in others}
        return Fields(
            {**self.sizes, **own}
            | {name: fields.values.get(name, value) for name, value in self.settings.items()}
        )


def read_config(
    fields: Fields, length: Callable[[int], int], tensors: Container[str]
) -> tuple[CausalLMConfig, TensorNames]:
    """Read the metadata of a model of `transformers`.

    Args:
        fields: What config.json holds.
        length: Most tokens of the model -> length of the cache.
        tensors: Names of the model's tensors.

    Raises:
        ModelError: the architecture or a setting is not supported, or a value is missing or wrong.
    """
    kind = fields.text("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"The model's architecture is {kind[:60]!r}; supported: {', '.join(ARCHITECTURES)}, "
            f"and the language models of {', '.join(WITH_PICTURES)}.",
            code="RQ202",
        )
    packed = fields.get("quantization_config")
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, Mapping) else None
        if method != MXFP4:
            raise ModelError(
                f"The model's weights are quantized ('quantization_config', {str(method)[:20]}), "
                f"which is not read; allowed: {MXFP4}. Load the float model and call "
                "compress_weights, or load a GGUF file.",
                code="RQ202",
            )
    row = ARCHITECTURES[kind]
    says_tied = fields.get("tie_word_embeddings") is not None
    fields = row.choose(fields)
    count = fields.integer("num_hidden_layers", "n_layer")
    if not 1 <= count <= MOST_LAYERS:
        raise fields.refuse(("num_hidden_layers",), count, f"1 to {MOST_LAYERS}")
    width, heads = (
        fields.integer("hidden_size", "n_embd"),
        fields.integer("num_attention_heads", "n_head"),
    )
    if heads < 1:
        raise fields.refuse(("num_attention_heads",), heads, "an integer from 1 on")
    head = fields.integer("qk_rope_head_dim", "head_dim", default=width // heads)
    most = fields.integer("max_position_embeddings", "n_positions")
    activation = fields.text(
        "hidden_activation", "hidden_act", "activation_function", default="silu"
    )
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"The model's activation is {activation!r}; supported: {', '.join(ACTIVATIONS)}.",
            code="RQ202",
        )
    classifier = row.names.names["classifier"] + ".weight"
    biases: set[str] = set()
    if fields.flag("attention_bias"):
        biases |= {"q", "k", "v", "out"}
    if fields.flag("mlp_bias"):
        biases |= {"gate", "up", "down"}
    config = CausalLMConfig(
        architecture=kind,
        vocabulary=fields.integer("vocab_size"),
        width=width,
        hidden=fields.integer("intermediate_size", "n_inner", default=4 * width),
        heads=heads,
        groups=fields.integer("num_key_value_heads", default=heads),
        head_width=head,
        max_length=most,
        layers=read_layers(fields, row, count, head, length(most)),
        epsilon=fields.number(
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
        ),
        activation=ACTIVATIONS[activation],
        biases=frozenset(biases),
        query_scale=1 / math.sqrt(max(head, 1)),
        attention_cap=fields.number("attn_logit_softcapping", default=0.0),
        score_cap=fields.number("final_logit_softcapping", default=0.0),
        is_tied=fields.flag("tie_word_embeddings") or not (says_tied or classifier in tensors),
    )
    guessing = fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0)
    names = leave_out_layers(row.names, range(count, count + guessing))
    return row.adjust(fields, config), names


def read_layers(
    fields: Fields, row: ModelRow, count: int, head: int, length: int
) -> tuple[LayerConfig, ...]:
    """Read windows, rotary positions and mixers of all layers."""
    window = fields.integer("sliding_window", default=0)
    if not fields.flag("use_sliding_window", default=True):
        window = 0
    types = fields.items(count, "layer_types")
    if types is None:
        types = row.types(fields, count) if window or row.mixers else list_types(0, count)
    turned = row.turned(fields, types, window)
    layers = []
    rotaries: dict[tuple[str, int], Rotary] = {}
    for i, (kind, is_turned) in enumerate(zip(types, turned, strict=True)):
        if kind in row.mixers:
            layers.append(LayerConfig(mixer=row.mixers[kind](fields)))
            continue
        if kind not in LAYER_TYPES:
            raise ModelError(
                f"The model has layers of type {str(kind)[:60]!r}; supported: "
                f"{', '.join([*LAYER_TYPES, *row.mixers])}.",
                code="RQ202",
            )
        width, groups = row.heads(fields, i, kind)
        place = kind, width or head
        if place not in rotaries:
            rotaries[place] = read_rotary(fields, row, kind, width or head, length)
        layers.append(
            LayerConfig(
                rotaries[place] if is_turned else None,
                window if LAYER_TYPES[kind] else 0,
                groups=groups,
                head_width=width,
            )
        )
    return tuple(layers)


def list_types(pattern: int, count: int) -> list[str]:
    """Return the types of all layers for a pattern of windows. 0: in no layer. 1: in all. N: in all
    but each N-th.
    """
    return name_types(
        [pattern < 1 or (pattern > 1 and i % pattern == 0) for i in range(1, count + 1)]
    )


def name_types(is_full: Sequence[bool]) -> list[str]:
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def list_late(fields: Fields, count: int) -> list[str]:
    """Windows from a layer on."""
    first = fields.integer("max_window_layers")
    return name_types([i < first for i in range(count)])


def list_first_even(fields: Fields, count: int) -> list[str]:
    """Windows in each second layer of the first ones."""
    end = fields.integer("max_window_layers")
    return name_types([i % 2 > 0 or i >= end for i in range(count)])


def list_unturned(fields: Fields, count: int) -> list[str]:
    """Windows in layers without rotary positions."""
    return name_types([*map(bool, list_turned(fields, list_types(0, count), 0))])


def list_by_pattern(fields: Fields, count: int) -> list[str]:
    """Windows in a pattern that metadata has."""
    return list_types(fields.integer("sliding_window_pattern"), count)


def in_pattern(pattern: int) -> ListTypes:
    """Windows in a pattern, see `list_types`."""
    return lambda _fields, count: list_types(pattern, count)


def list_last_full(_fields: Fields, count: int) -> list[str]:
    """Windows in all layers but each sixth and the last one."""
    return [*list_types(6, count)[:-1], "full_attention"]


def leave_out(period: int) -> ListTurned:
    """Rotary positions in all layers but each `period`-th. 0: in all."""
    return lambda _fields, types, _window: [
        period < 1 or i % period != 0 for i in range(1, len(types) + 1)
    ]


#: Rotary positions in all layers.
TURN_ALL = leave_out(0)


def list_turned(fields: Fields, types: Sequence[str], window: int) -> list[Any]:
    """Rotary positions as metadata says, layer by layer or by a period."""
    turned = fields.items(len(types), "no_rope_layers")
    if turned is None:
        period = fields.integer("no_rope_layer_interval", default=0)
        return leave_out(period)(fields, types, window)
    return turned


def turn_windowed(_fields: Fields, types: Sequence[str], _window: int) -> list[bool]:
    """Rotary positions in layers with a window."""
    return [LAYER_TYPES.get(kind, False) for kind in types]


def turn_windowed_or_all(fields: Fields, types: Sequence[str], window: int) -> list[bool]:
    """Rotary positions in layers with a window, or in all if there is none."""
    return turn_windowed(fields, types, window) if window else [True] * len(types)


def read_rotary(fields: Fields, row: ModelRow, kind: str, head: int, length: int) -> Rotary:
    """Read the rotary positions of layers of one type.

    Since version 5 "rope_parameters" has them all, perhaps by type of layer. Before, "rope_theta"
    and "rope_scaling" had them.
    """
    values = fields.get("rope_scaling", "rope_parameters") or dict(row.rotary)
    if fields.get("rope_scaling") and LAYER_TYPES[kind] and not row.scales_windows:
        values = {}
    if isinstance(values, dict) and isinstance(values.get(kind), dict):
        values = values[kind]
    elif LAYER_TYPES[kind] and fields.get("rope_local_base_freq") is not None:
        values = {"rope_theta": fields.get("rope_local_base_freq")}
    if not isinstance(values, dict):
        raise fields.refuse(("rope_parameters",), values, "a table")
    known = {
        "original_max_position_embeddings": fields.get("max_position_embeddings"),
        "max_position_embeddings": fields.get("max_position_embeddings"),
        "rope_theta": fields.get("rope_theta"),
        "partial_rotary_factor": fields.get("partial_rotary_factor"),
    }
    known |= {name: value for name, value in values.items() if value is not None}
    original = fields.get("original_max_position_embeddings")
    scaling = Fields(
        known if original is None else known | {"original_max_position_embeddings": original}
    )
    # Other architectures turn whole heads, whatever their metadata says.
    is_partial = "partial_rotary_factor" in row.settings
    share = scaling.number("partial_rotary_factor", default=1.0) if is_partial else 1.0
    return make_rotary(scaling.number("rope_theta"), int(head * share), scaling, length)


# --- What differs from Llama --------------------------------------------------------------------


def adjust_ministral3(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Queries grow with their position."""
    values = fields.get("rope_scaling", "rope_parameters")
    scaling = Fields(values if isinstance(values, Mapping) else MINISTRAL3_ROTARY)
    growth = scaling.number("llama_4_scaling_beta", default=0.0)
    if not growth:
        return config
    return grow_queries(config, growth, scaling.integer("original_max_position_embeddings"))


def grow_queries(config: CausalLMConfig, growth: float, length: int) -> CausalLMConfig:
    """Return the model with queries that grow each `length` positions."""
    return change_rotary(config, growth=growth, growth_length=length)


def change_rotary(config: CausalLMConfig, **changes: float) -> CausalLMConfig:
    """Return the model with rotary positions that differ in some fields."""
    layers = (
        replace(layer, rotary=layer.rotary and replace(layer.rotary, **changes))  # pyright: ignore[reportArgumentType]
        for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


def adjust_qwen2(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(config, biases=frozenset("qkv"))


def adjust_qwen3(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(config, has_head_norms=True)


def adjust_gemma(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Gemma stores w of norms 1 + w, and multiplies the embedding by sqrt(width)."""
    return replace(config, norm_shift=1.0, embedding_scale=math.sqrt(config.width))


def adjust_gemma2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    scalar = fields.number("query_pre_attn_scalar", default=float(config.head_width))
    if scalar <= 0:
        raise fields.refuse(("query_pre_attn_scalar",), scalar, "a number above 0")
    config = replace(config, query_scale=1 / math.sqrt(scalar), has_post_norms=True)
    return adjust_gemma(fields, config)


def adjust_gemma3(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(adjust_gemma2(fields, config), has_head_norms=True)


def adjust_gemma4(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """The last layers read keys and values of the last layer before them of their type."""
    both = fields.get("use_bidirectional_attention")
    if both not in (None, "vision"):
        allowed = "null or 'vision'. Text that sees later text is not supported"
        raise fields.refuse(("use_bidirectional_attention",), both, allowed)
    is_equal, is_wide = fields.flag("attention_k_eq_v"), fields.flag("use_double_wide_mlp")
    shared = fields.integer("num_kv_shared_layers", default=0)
    layers = [
        replace(
            layer,
            hidden=2 * config.hidden if layer.source is not None and is_wide else 0,
            has_values=layer.window > 0 or not is_equal,
        )
        for layer in share_caches(config.layers, len(config.layers) - shared)
    ]
    if fields.flag("enable_moe_block"):
        experts = ExpertConfig(
            fields.integer("num_experts"),
            fields.integer("top_k_experts"),
            fields.integer("moe_intermediate_size"),
            is_beside=True,
        )
        layers = [replace(layer, experts=experts) for layer in layers]
    return replace(
        config,
        layers=tuple(layers),
        embedding_scale=math.sqrt(config.width),
        query_scale=1.0,
        has_head_norms=True,
        has_value_norms=True,
        has_post_norms=True,
        has_layer_scales=True,
        token_width=fields.integer("hidden_size_per_layer_input", default=0),
    )


def share_caches(layers: Sequence[LayerConfig], own: int) -> list[LayerConfig]:
    """Return the layers, of which those from number `own` on read keys and values of the last layer
    before it that has a window as they have, or none.

    Raises:
        ModelError: there is no such layer.
    """
    found = [*layers]
    for i in range(max(own, 0), len(layers)):
        alike = [k for k in range(own) if (layers[k].window > 0) == (layers[i].window > 0)]
        if not alike:
            raise ModelError(
                f"Layer {i} of the model reads keys and values of another layer, but all others "
                "with keys and values have another window.",
                code="RQ204",
            )
        found[i] = replace(layers[i], source=alike[-1])
    return found


def read_gemma4_heads(fields: Fields, number: int, kind: str) -> tuple[int, int]:
    """Layers that see all tokens have other heads. Version 5 has them by layer."""
    own = fields.get("per_layer_config")
    if isinstance(own, Mapping):
        sizes = own.get(str(number), own.get(number))
        known = Fields(sizes if isinstance(sizes, Mapping) else {})
        return known.integer("head_dim", default=0), known.integer("num_key_value_heads", default=0)
    if LAYER_TYPES.get(kind):
        return 0, 0
    groups = fields.integer("num_global_key_value_heads", default=0)
    is_equal = fields.flag("attention_k_eq_v")
    return fields.integer("global_head_dim", default=512), groups if is_equal else 0


def adjust_granite(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    divisor = fields.number("logits_scaling", default=1.0)
    if divisor == 0:
        raise fields.refuse(("logits_scaling",), divisor, "a number other than 0")
    return replace(
        config,
        query_scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        score_scale=1 / divisor,
    )


def adjust_phi(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(
        config,
        norm=NormKind.LAYER,
        is_gated=False,
        is_parallel=True,
        biases=frozenset({"q", "k", "v", "out", "up", "down", "classifier"}),
    )


def adjust_olmo2(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(config, has_row_norms=True, has_pre_norms=False, has_post_norms=True)


def adjust_exaone4(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(config, has_head_norms=True, has_pre_norms=False, has_post_norms=True)


def adjust_glm4(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(config, has_post_norms=True, biases=config.biases - {"out"})


def adjust_ernie(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    parts = ("q", "k", "v", "out", "gate", "up", "down")
    return replace(config, biases=frozenset(parts if fields.flag("use_bias") else ()))


def adjust_cohere(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(
        config,
        norm=NormKind.LAYER,
        has_norm_biases=False,
        is_parallel=True,
        score_scale=fields.number("logit_scale", default=1.0),
    )


def adjust_starcoder2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    parts = ("q", "k", "v", "out", "up", "down")
    biases = frozenset(parts if fields.flag("use_bias", default=True) else ())
    return replace(config, norm=NormKind.LAYER, is_gated=False, biases=biases)


def adjust_gpt2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return replace(
        config,
        norm=NormKind.LAYER,
        is_gated=False,
        has_positions=True,
        layers=tuple(replace(layer, rotary=None) for layer in config.layers),
        query_scale=config.query_scale if fields.flag("scale_attn_weights", default=True) else 1.0,
        biases=frozenset({"q", "k", "v", "out", "up", "down"}),
    )


def add_experts(
    config: CausalLMConfig,
    experts: ExpertConfig,
    is_dense: Callable[[int], bool] = lambda _i: False,
) -> CausalLMConfig:
    """Return the model with experts in all layers but those that are dense."""
    layers = (
        layer if is_dense(i) else replace(layer, experts=experts)
        for i, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers))


def count_experts(fields: Fields) -> int:
    """Read the number of experts. Versions of `transformers` write one name or the other. No row
    has a default for the first name, so it counts only if the file has it.
    """
    return fields.integer("num_local_experts", "num_experts")


def adjust_mixtral(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    count, chosen = count_experts(fields), fields.integer("num_experts_per_tok")
    return add_experts(config, ExpertConfig(count, chosen, config.hidden))


def adjust_granite_moe(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    count, chosen = count_experts(fields), fields.integer("num_experts_per_tok")
    shared = fields.integer("shared_intermediate_size", default=0)
    experts = ExpertConfig(count, chosen, config.hidden, shared=shared)
    return adjust_granite(fields, add_experts(config, experts))


def adjust_qwen_moe(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Experts in each layer whose number is a multiple of a step, but not in those of a list."""
    shared = fields.integer("shared_expert_intermediate_size", default=0)
    experts = ExpertConfig(
        count_experts(fields),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob"),
        shared=shared,
        has_share=shared > 0,
    )
    step = fields.integer("decoder_sparse_step")
    if step < 1:
        raise fields.refuse(("decoder_sparse_step",), step, "an integer from 1 on")
    dense = fields.items(None, "mlp_only_layers") or []
    return add_experts(config, experts, lambda i: i in dense or (i + 1) % step != 0)


def adjust_qwen2_moe(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    biases = frozenset("qkv" if fields.flag("qkv_bias") else "")
    return replace(adjust_qwen_moe(fields, config), biases=biases)


def adjust_qwen3_moe(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return adjust_qwen3(fields, adjust_qwen_moe(fields, config))


def adjust_olmoe(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    clip = fields.get("clip_qkv")
    if clip is not None:
        raise fields.refuse(("clip_qkv",), clip, "null. Clipped values are not supported")
    experts = ExpertConfig(
        count_experts(fields),
        fields.integer("num_experts_per_tok"),
        config.hidden,
        is_normalized=fields.flag("norm_topk_prob"),
    )
    return replace(add_experts(config, experts), has_row_norms=True)


def adjust_deepseek(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Attention to latent vectors. Scores are larger where rotary positions are scaled by YaRN."""
    latent = LatentAttention(
        fields.integer("kv_lora_rank"),
        fields.integer("qk_nope_head_dim"),
        fields.integer("qk_rope_head_dim"),
        fields.integer("v_head_dim"),
        fields.integer("q_lora_rank", default=0),
        is_paired=fields.flag("rope_interleave", default=True),
    )
    scaling = fields.get("rope_scaling", "rope_parameters") or {}
    scaling = Fields(scaling if isinstance(scaling, Mapping) else {})
    weight, factor = (scaling.number(name, default=0.0) for name in ("mscale_all_dim", "factor"))
    magnitude = 0.1 * weight * math.log(factor) + 1 if weight and factor > 1 else 1.0
    parts = {"latent", "k_turned", "q_latent", "out"}
    return replace(
        config,
        groups=1,
        head_width=latent.width,
        latent=latent,
        query_scale=magnitude**2 / math.sqrt(latent.plain + latent.turned),
        biases=frozenset(parts if "q" in config.biases else ()) | (config.biases - set("qkv")),
    )


def adjust_deepseek_v2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """A group of experts is chosen by its best expert. Shares are not divided by their sum."""
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse(("topk_method",), method, "greedy or group_limited_greedy")
    is_grouped = method != "greedy"
    experts = ExpertConfig(
        fields.integer("n_routed_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        is_normalized=False,
        shared=fields.integer("n_shared_experts") * fields.integer("moe_intermediate_size"),
        groups=fields.integer("n_group") if is_grouped else 1,
        chosen_groups=fields.integer("topk_group") if is_grouped else 1,
        group_best=1,
        scale=fields.number("routed_scaling_factor"),
    )
    return adjust_deepseek(fields, add_late_experts(fields, config, experts))


def adjust_deepseek_v3(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    experts = ExpertConfig(
        fields.integer("n_routed_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob"),
        shared=fields.integer("n_shared_experts") * fields.integer("moe_intermediate_size"),
        is_sigmoid=True,
        has_choice=True,
        groups=fields.integer("n_group"),
        chosen_groups=fields.integer("topk_group"),
        sum_shift=1e-20,
        scale=fields.number("routed_scaling_factor"),
    )
    return adjust_deepseek(fields, add_late_experts(fields, config, experts))


def add_late_experts(
    fields: Fields, config: CausalLMConfig, experts: ExpertConfig
) -> CausalLMConfig:
    """Experts in all layers but the first ones."""
    dense = fields.integer("first_k_dense_replace")
    return add_experts(config, experts, lambda i: i < dense)


def adjust_lfm2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Old files have other names. The size that they give is made smaller by two thirds, then by a
    factor, and then up to a multiple.
    """
    hidden = fields.integer("block_ff_dim", default=config.hidden)
    if fields.flag("block_auto_adjust_ff_dim"):
        multiple = fields.integer("block_multiple_of")
        if multiple < 1:
            raise fields.refuse(("block_multiple_of",), multiple, "an integer from 1 on")
        factor = fields.number("block_ffn_dim_multiplier", default=1.0)
        hidden = multiple * -(-int(factor * int(2 * hidden / 3)) // multiple)
    return replace(adjust_short_convolutions(fields, config), hidden=hidden)


def adjust_short_convolutions(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    parts = ("conv_in", "conv_out")
    return replace(
        config,
        has_head_norms=True,
        biases=frozenset(parts if fields.flag("conv_bias") else ()),
        is_tied=fields.flag("tie_embedding", default=config.is_tied),
    )


def adjust_lfm2_moe(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    experts = ExpertConfig(
        count_experts(fields),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob"),
        is_sigmoid=True,
        has_choice=fields.flag("use_expert_bias"),
        sum_shift=1e-6,
        scale=fields.number("routed_scaling_factor"),
    )
    dense = fields.integer("num_dense_layers")
    config = add_experts(config, experts, lambda i: i < dense)
    return adjust_short_convolutions(fields, config)


def read_short_convolution(fields: Fields) -> Mixer:
    return ShortConvolution(fields.integer("conv_L_cache"), fields.flag("conv_bias"))


def adjust_qwen3_5(_fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Norms multiply by 1 + weight, as in Gemma. Gates have a bias if queries have one."""
    gates = frozenset({"attention_gate"} if "q" in config.biases else ())
    return replace(
        config,
        has_head_norms=True,
        has_gates=True,
        norm_shift=1.0,
        biases=config.biases | gates,
    )


def adjust_qwen3_next(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    return adjust_qwen3_5(fields, adjust_qwen_moe(fields, config))


def read_delta(fields: Fields) -> Mixer:
    return DeltaNet(
        fields.integer("linear_num_key_heads"),
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_num_value_heads"),
        fields.integer("linear_value_head_dim"),
        fields.integer("linear_conv_kernel_dim"),
    )


def list_each_fourth(fields: Fields, count: int) -> list[str]:
    """Attention in each N-th layer, and the delta rule in others."""
    period = fields.integer("full_attention_interval")
    if period < 1:
        raise fields.refuse(("full_attention_interval",), period, "an integer from 1 on")
    kinds = ("linear_attention", "full_attention")
    return [kinds[i % period == 0] for i in range(1, count + 1)]


def list_attention(fields: Fields, count: int) -> list[str]:
    """Attention in the layers of a list, convolutions in all others."""
    found = fields.items(None, "full_attn_idxs")
    return ["full_attention" if found is None or i in found else "conv" for i in range(count)]


def adjust_gpt_oss(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    experts = ExpertConfig(
        count_experts(fields),
        fields.integer("num_experts_per_tok"),
        config.hidden,
        limit=fields.number("swiglu_limit"),
        slope=fields.number("swiglu_alpha"),
    )
    parts = ("router", "experts_gate", "experts_up", "experts_down")
    biases = config.biases | {*parts}
    return replace(add_experts(config, experts), has_sinks=True, biases=biases)


# --- Names --------------------------------------------------------------------------------------

LLAMA_NAMES: dict[str, str] = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "out": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "classifier": "lm_head",
}
#: Buffers that old versions stored.
UNREAD = r".*\.rotary_emb\.inv_freq"


#: Experts as `transformers` has them in memory, and as it writes them.
EXPERTS = "model.layers.{layer}.mlp.experts."
MLP_EXPERTS: dict[str, tuple[str, ...]] = {
    EXPERTS + "gate_up_proj": ("experts_gate", "experts_up"),
    EXPERTS + "down_proj": ("experts_down",),
    EXPERTS + "{expert}.gate_proj.weight": ("experts_gate",),
    EXPERTS + "{expert}.up_proj.weight": ("experts_up",),
    EXPERTS + "{expert}.down_proj.weight": ("experts_down",),
}


def make_names(names: Mapping[str, Any], **other: Any) -> TensorNames:
    """Return the names of Llama with changes."""
    return TensorNames({**LLAMA_NAMES, **names}, **{"unread": UNREAD, **other})


LLAMA = make_names({})
MOE = make_names(
    {
        "router": "model.layers.{}.mlp.gate",
        "shared_gate": "model.layers.{}.mlp.shared_expert.gate_proj",
        "shared_up": "model.layers.{}.mlp.shared_expert.up_proj",
        "shared_down": "model.layers.{}.mlp.shared_expert.down_proj",
        "share": "model.layers.{}.mlp.shared_expert_gate",
    },
    experts=MLP_EXPERTS,
)
DELTA_NAMES = replace(
    MOE,
    names={
        **MOE.names,
        "q_gate": "model.layers.{}.self_attn.q_proj",
        "delta_in": "model.layers.{}.linear_attn.in_proj_qkv",
        "delta_gate": "model.layers.{}.linear_attn.in_proj_z",
        "delta_strength": "model.layers.{}.linear_attn.in_proj_b",
        "delta_decay": "model.layers.{}.linear_attn.in_proj_a",
        "delta_in_gate": "model.layers.{}.linear_attn.in_proj_qkvz",
        "delta_strength_decay": "model.layers.{}.linear_attn.in_proj_ba",
        "delta_conv": "model.layers.{}.linear_attn.conv1d",
        "delta_rate": "model.layers.{}.linear_attn.A_log",
        "delta_shift": "model.layers.{}.linear_attn.dt",
        "delta_gain": "model.layers.{}.linear_attn.norm",
        "delta_out": "model.layers.{}.linear_attn.out_proj",
    },
    renamed={".A_log": ".A_log.weight", ".dt_bias": ".dt.bias"},
    # Layers that guess several tokens at once.
    unread=rf"{UNREAD}|(model\.)?mtp\..*",
    has_logs=True,
)
DEEPSEEK = replace(
    MOE,
    names={
        **MOE.names,
        "shared_gate": "model.layers.{}.mlp.shared_experts.gate_proj",
        "shared_up": "model.layers.{}.mlp.shared_experts.up_proj",
        "shared_down": "model.layers.{}.mlp.shared_experts.down_proj",
        "choice": "model.layers.{}.mlp.choice",
        "q_all": "model.layers.{}.self_attn.q_proj",
        "q_latent": "model.layers.{}.self_attn.q_a_proj",
        "q_latent_norm": "model.layers.{}.self_attn.q_a_layernorm",
        "q_b_all": "model.layers.{}.self_attn.q_b_proj",
        "latent_all": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "latent_norm": "model.layers.{}.self_attn.kv_a_layernorm",
        "latent_both": "model.layers.{}.self_attn.kv_b_proj",
    },
    renamed={".gate.e_score_correction_bias": ".choice.bias"},
)
MIXTRAL = replace(
    MOE,
    renamed={
        ".block_sparse_moe.": ".mlp.",
        ".w1.weight": ".gate_proj.weight",
        ".w2.weight": ".down_proj.weight",
        ".w3.weight": ".up_proj.weight",
    },
)
GRANITE_MOE = make_names(
    {
        "router": "model.layers.{}.mlp.router",
        "shared_gate_up": "model.layers.{}.shared_mlp.input_linear",
        "shared_down": "model.layers.{}.shared_mlp.output_linear",
    },
    experts=MLP_EXPERTS,
    renamed={
        ".block_sparse_moe.": ".mlp.",
        ".mlp.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".mlp.output_linear.weight": ".mlp.experts.down_proj",
        ".router.layer.weight": ".router.weight",
    },
)
GPT_OSS = make_names(
    {
        "router": "model.layers.{}.mlp.router",
        "sinks": "model.layers.{}.self_attn.sinks",
    },
    experts={
        EXPERTS + "gate_up_proj": ("experts_gate", "experts_up"),
        EXPERTS + "gate_up_proj_bias": ("experts_gate.bias", "experts_up.bias"),
        EXPERTS + "down_proj": ("experts_down",),
        EXPERTS + "down_proj_bias": ("experts_down.bias",),
    },
    renamed={".self_attn.sinks": ".self_attn.sinks.weight"},
    has_turned_stacks=True,
    is_alternating=True,
)
LFM2 = make_names(
    {
        "attention_norm": "model.layers.{}.operator_norm",
        "q_norm": "model.layers.{}.self_attn.q_layernorm",
        "k_norm": "model.layers.{}.self_attn.k_layernorm",
        "out": "model.layers.{}.self_attn.out_proj",
        "conv": "model.layers.{}.conv.conv",
        "conv_in": "model.layers.{}.conv.in_proj",
        "conv_out": "model.layers.{}.conv.out_proj",
        "ffn_norm": "model.layers.{}.ffn_norm",
        "final_norm": "model.embedding_norm",
        "router": "model.layers.{}.mlp.gate",
        "choice": "model.layers.{}.mlp.choice",
    },
    experts=MLP_EXPERTS,
    renamed={
        ".feed_forward.": ".mlp.",
        ".w1.weight": ".gate_proj.weight",
        ".w2.weight": ".down_proj.weight",
        ".w3.weight": ".up_proj.weight",
        ".mlp.expert_bias": ".mlp.choice.bias",
    },
)
PHI3 = make_names(
    {"qkv": "model.layers.{}.self_attn.qkv_proj", "gate_up": "model.layers.{}.mlp.gate_up_proj"}
)
GEMMA2 = make_names(
    {
        "post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
        "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
#: Without norms of what attention and the feed-forward network read.
GEMMA4 = replace(
    GEMMA2,
    names={
        **GEMMA2.names,
        "token_table": "model.embed_tokens_per_layer",
        "token_in": "model.per_layer_model_projection",
        "token_norm": "model.per_layer_projection_norm",
        "token_gate": "model.layers.{}.per_layer_input_gate",
        "token_out": "model.layers.{}.per_layer_projection",
        "token_post_norm": "model.layers.{}.post_per_layer_input_norm",
        "scale": "model.layers.{}.layer",
        "dense_norm": "model.layers.{}.post_feedforward_layernorm_1",
        "pre_experts_norm": "model.layers.{}.pre_feedforward_layernorm_2",
        "mixed_norm": "model.layers.{}.post_feedforward_layernorm_2",
        "router": "model.layers.{}.router.proj",
        "router_norm": "model.layers.{}.router.norm",
        "share_scale": "model.layers.{}.router.share",
    },
    experts={name.replace(".mlp.", "."): parts for name, parts in MLP_EXPERTS.items()},
    renamed={
        ".layer_scalar": ".layer.weight",
        ".router.scale": ".router.norm.weight",
        ".router.per_expert_scale": ".router.share.weight",
    },
    # Layers that read keys and values of others may have products for their own.
    unread=rf"{UNREAD}|model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight",
)
OLMO2 = make_names(
    {
        "post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
GLM4 = make_names(
    {
        "gate_up": "model.layers.{}.mlp.gate_up_proj",
        "post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
        "post_ffn_norm": "model.layers.{}.post_mlp_layernorm",
    },
    is_paired=True,
)
PAIRED = make_names({}, is_paired=True)
PHI = make_names(
    {
        "out": "model.layers.{}.self_attn.dense",
        "up": "model.layers.{}.mlp.fc1",
        "down": "model.layers.{}.mlp.fc2",
        "final_norm": "model.final_layernorm",
    }
)
STARCODER2 = make_names({"up": "model.layers.{}.mlp.c_fc", "down": "model.layers.{}.mlp.c_proj"})
GPT2 = TensorNames(
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "attention_norm": "transformer.h.{}.ln_1",
        "qkv": "transformer.h.{}.attn.c_attn",
        "out": "transformer.h.{}.attn.c_proj",
        "ffn_norm": "transformer.h.{}.ln_2",
        "up": "transformer.h.{}.mlp.c_fc",
        "down": "transformer.h.{}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "classifier": "lm_head",
    },
    unread=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    is_transposed=True,
)

# --- Settings -----------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"tie_word_embeddings": False, "rope_theta": 10000.0}
SILU: dict[str, Any] = {**SHARED, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
BIASES = {"attention_bias": False, "mlp_bias": False}
ALL_LAYERS = {**SILU, "sliding_window": 4096}
LATE_LAYERS = {
    **ALL_LAYERS, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
MINISTRAL3_SETTINGS = {**SILU, "rms_norm_eps": 1e-5, "sliding_window": None}
MINISTRAL3_ROTARY = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
GEMMA = {**SHARED, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False}
GEMMA1_SETTINGS = {**GEMMA, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}
GEMMA2_SETTINGS = {
    **GEMMA, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "layer_types": None, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA3_SETTINGS = {
    **GEMMA, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "layer_types": None, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
}  # fmt: skip
GEMMA4_SETTINGS = {
    **GEMMA, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
    "layer_types": None, "final_logit_softcapping": None, "global_head_dim": None,
    "num_global_key_value_heads": None, "per_layer_config": None, "attention_k_eq_v": False,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": False,
    "hidden_size_per_layer_input": 256, "num_experts": None, "top_k_experts": None,
    "moe_intermediate_size": None,
}  # fmt: skip
GEMMA4_ROTARY = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
    },
}  # fmt: skip
SMOLLM3_SETTINGS = {
    **SILU, **BIASES, "tie_word_embeddings": True, "rope_theta": 2e6, "sliding_window": None,
    "use_sliding_window": False, "layer_types": None, "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}  # fmt: skip
PHI_SETTINGS = {
    **SHARED, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5,
}  # fmt: skip
PHI3_SETTINGS = {
    **SILU, "rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
OLMO2_SETTINGS = {**SILU, "rms_norm_eps": 1e-5, "attention_bias": False}
OLMO3_SETTINGS = {
    **OLMO2_SETTINGS, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None,
}  # fmt: skip
EXAONE4_SETTINGS = {
    **SILU, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    "layer_types": None,
}  # fmt: skip
GLM4_SETTINGS = {
    **SILU, "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
ERNIE_SETTINGS = {
    **SILU, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "use_bias": False,
}  # fmt: skip
COHERE_SETTINGS = {
    **SHARED, "hidden_act": "silu", "layer_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625,
}  # fmt: skip
COHERE2_SETTINGS = {
    **COHERE_SETTINGS, "rope_theta": 10000.0, "sliding_window": 4096, "layer_types": None,
    "sliding_window_pattern": 4,
}  # fmt: skip
STARCODER2_SETTINGS = {
    **SHARED, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "sliding_window": None,
}  # fmt: skip
MIXTRAL_SETTINGS = {
    **SILU, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN_MOE = {
    **ALL_LAYERS, "use_sliding_window": False, "decoder_sparse_step": 1,
    "mlp_only_layers": None, "norm_topk_prob": False,
}  # fmt: skip
QWEN2_MOE_SETTINGS = {
    **QWEN_MOE, "max_window_layers": 28, "layer_types": None, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
    "qkv_bias": True,
}  # fmt: skip
QWEN3_MOE_SETTINGS = {
    **QWEN_MOE, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    "attention_bias": False,
}  # fmt: skip
DELTA = {
    **SILU, "attention_bias": False, "partial_rotary_factor": 0.25, "layer_types": None,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
DELTA_EXPERTS = {
    **DELTA, "mlp_only_layers": None, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_NEXT_SETTINGS = {**DELTA_EXPERTS, "num_experts_per_tok": 10, "num_experts": 512}
QWEN3_5_MOE_SETTINGS = {**DELTA_EXPERTS, "num_experts_per_tok": 8, "num_experts": 256}
DELTA_RULE: dict[str, ReadMixer] = {"linear_attention": read_delta}
DEEPSEEK_V2_SETTINGS = {
    **SILU, **BIASES, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": None, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "topk_method": "greedy",
    "num_nextn_predict_layers": None,
}  # fmt: skip
DEEPSEEK_V3_SETTINGS = {
    **SILU, "attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": None,
    "num_mtp_layers": 1,
}  # fmt: skip
OLMOE_SETTINGS = {
    **SILU, "rms_norm_eps": 1e-5, "attention_bias": False, "clip_qkv": None,
    "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip
GRANITE_MOE_SETTINGS = {
    **SILU, "attention_bias": False, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
LFM2_MIXED = {
    **SHARED, "rope_theta": 1e6, "norm_eps": 1e-5, "tie_word_embeddings": True,
    "tie_embedding": None, "layer_types": None, "conv_bias": False, "conv_L_cache": 3,
}  # fmt: skip
LFM2_SETTINGS = {
    **LFM2_MIXED, "full_attn_idxs": None, "block_ff_dim": None, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
}  # fmt: skip
LFM2_MOE_SETTINGS = {
    **LFM2_MIXED, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
    "num_dense_layers": 2, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip
SHORT_CONVOLUTION: dict[str, ReadMixer] = {"conv": read_short_convolution}
GPT_OSS_SETTINGS = {
    **SILU, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
    "layer_types": None, "attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4,
    "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
}  # fmt: skip
GPT_OSS_ROTARY = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT2_SETTINGS = {
    **SHARED, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}  # fmt: skip
BOTH_WAYS = ("use_bidirectional_attention",)
LLAMA_SIZES = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
GEMMA3_SIZES = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip


#: "model_type" in config.json -> architecture.
ARCHITECTURES: dict[str, ModelRow] = {
    "llama": ModelRow(LLAMA, {**SILU, **BIASES}, sizes=LLAMA_SIZES),
    "smollm3": ModelRow(LLAMA, SMOLLM3_SETTINGS, types=list_unturned),
    "mistral": ModelRow(LLAMA, ALL_LAYERS, types=in_pattern(1)),
    "ministral": ModelRow(LLAMA, {**ALL_LAYERS, "layer_types": None}, types=in_pattern(1)),
    "ministral3": ModelRow(
        LLAMA, MINISTRAL3_SETTINGS, adjust_ministral3, in_pattern(1), rotary=MINISTRAL3_ROTARY
    ),
    "qwen2": ModelRow(LLAMA, LATE_LAYERS, adjust_qwen2, list_late),
    "qwen3": ModelRow(LLAMA, {**LATE_LAYERS, "attention_bias": False}, adjust_qwen3, list_late),
    "granite": ModelRow(LLAMA, {**SILU, **BIASES}, adjust_granite),
    "mixtral": ModelRow(MIXTRAL, MIXTRAL_SETTINGS, adjust_mixtral, in_pattern(1)),
    "qwen2_moe": ModelRow(MOE, QWEN2_MOE_SETTINGS, adjust_qwen2_moe, list_first_even),
    "qwen3_moe": ModelRow(MOE, QWEN3_MOE_SETTINGS, adjust_qwen3_moe, in_pattern(1)),
    "olmoe": ModelRow(MOE, OLMOE_SETTINGS, adjust_olmoe),
    "qwen3_next": ModelRow(
        DELTA_NAMES, QWEN3_NEXT_SETTINGS, adjust_qwen3_next, list_each_fourth, mixers=DELTA_RULE
    ),
    "qwen3_5_text": ModelRow(
        DELTA_NAMES, DELTA, adjust_qwen3_5, list_each_fourth, mixers=DELTA_RULE
    ),
    "qwen3_5_moe_text": ModelRow(
        DELTA_NAMES, QWEN3_5_MOE_SETTINGS, adjust_qwen3_next, list_each_fourth, mixers=DELTA_RULE
    ),
    "deepseek_v2": ModelRow(DEEPSEEK, DEEPSEEK_V2_SETTINGS, adjust_deepseek_v2),
    "deepseek_v3": ModelRow(DEEPSEEK, DEEPSEEK_V3_SETTINGS, adjust_deepseek_v3),
    "granitemoe": ModelRow(GRANITE_MOE, GRANITE_MOE_SETTINGS, adjust_granite_moe),
    "granitemoeshared": ModelRow(
        GRANITE_MOE, {**GRANITE_MOE_SETTINGS, "shared_intermediate_size": 0}, adjust_granite_moe
    ),
    "gpt_oss": ModelRow(
        GPT_OSS, GPT_OSS_SETTINGS, adjust_gpt_oss, in_pattern(2), rotary=GPT_OSS_ROTARY
    ),
    "lfm2": ModelRow(
        LFM2, LFM2_SETTINGS, adjust_lfm2, list_attention, mixers=SHORT_CONVOLUTION
    ),
    "lfm2_moe": ModelRow(
        LFM2, LFM2_MOE_SETTINGS, adjust_lfm2_moe, mixers=SHORT_CONVOLUTION
    ),
    "phi": ModelRow(PHI, PHI_SETTINGS, adjust_phi, refused=("qk_layernorm",)),
    "phi3": ModelRow(PHI3, PHI3_SETTINGS, types=in_pattern(1)),
    "gemma": ModelRow(LLAMA, GEMMA1_SETTINGS, adjust_gemma, refused=BOTH_WAYS),
    "gemma2": ModelRow(
        GEMMA2, GEMMA2_SETTINGS, adjust_gemma2, in_pattern(2), BOTH_WAYS
    ),
    "gemma3_text": ModelRow(
        GEMMA2, GEMMA3_SETTINGS, adjust_gemma3, list_by_pattern, BOTH_WAYS, sizes=GEMMA3_SIZES
    ),
    "gemma4_text": ModelRow(
        GEMMA4, GEMMA4_SETTINGS, adjust_gemma4, list_last_full, rotary=GEMMA4_ROTARY,
        heads=read_gemma4_heads,
    ),
    "olmo2": ModelRow(OLMO2, OLMO2_SETTINGS, adjust_olmo2),
    "olmo3": ModelRow(
        OLMO2, OLMO3_SETTINGS, adjust_olmo2, in_pattern(4), scales_windows=False
    ),
    "exaone4": ModelRow(
        OLMO2, EXAONE4_SETTINGS, adjust_exaone4, list_by_pattern, turned=turn_windowed_or_all
    ),
    "glm4": ModelRow(GLM4, GLM4_SETTINGS, adjust_glm4),
    "ernie4_5": ModelRow(PAIRED, ERNIE_SETTINGS, adjust_ernie),
    "cohere": ModelRow(PAIRED, COHERE_SETTINGS, adjust_cohere, refused=("use_qk_norm",)),
    "cohere2": ModelRow(
        PAIRED, COHERE2_SETTINGS, adjust_cohere, list_by_pattern, turned=turn_windowed
    ),
    "starcoder2": ModelRow(STARCODER2, STARCODER2_SETTINGS, adjust_starcoder2, in_pattern(1)),
    "gpt2": ModelRow(
        GPT2, GPT2_SETTINGS, adjust_gpt2,
        refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    ),
}  # fmt: skip
