"""The architectures of `transformers`: config.json -> `CausalLMConfig`, and names of tensors.

An architecture is one row of `ARCHITECTURES`. All begin as Llama, and a row says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.config import (
    MOST_LAYERS,
    CausalLMConfig,
    HiddenFunction,
    LayerConfig,
    NormKind,
    Rotary,
)
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.names import TensorNames
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
#: Kinds of layers in "layer_types" -> whether attention has a window.
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}

#: Changes the Llama that metadata describes to another network.
Adjust = Callable[[Fields, CausalLMConfig], CausalLMConfig]


@dataclass(frozen=True)
class ModelRow:
    """An architecture of `transformers`.

    Attributes:
        names: Names of its tensors.
        adjust: What differs from Llama.
        partial: Share of a head that is turned, if metadata does not say.
        pattern: Where "sliding_window" without "layer_types" holds. 0: in no layer. 1: in all. N:
            in all but each N-th.
    """

    names: TensorNames
    adjust: Adjust = lambda _fields, config: config
    partial: float = 1.0
    pattern: int = 0


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
            f"The model's architecture is {kind[:60]!r}; supported: {', '.join(ARCHITECTURES)}.",
            code="RQ202",
        )
    packed = fields.get("quantization_config")
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, Mapping) else None
        raise ModelError(
            f"The model's weights are quantized ('quantization_config', {str(method)[:20]}), which "
            "is not read. Load the float model and call compress_weights, or load a GGUF file.",
            code="RQ202",
        )
    row = ARCHITECTURES[kind]
    count = fields.integer("num_hidden_layers", "n_layer")
    if not 1 <= count <= MOST_LAYERS:
        raise fields.refuse(("num_hidden_layers",), count, f"1 to {MOST_LAYERS}")
    width, heads = (
        fields.integer("hidden_size", "n_embd"),
        fields.integer("num_attention_heads", "n_head"),
    )
    if heads < 1:
        raise fields.refuse(("num_attention_heads",), heads, "an integer from 1 on")
    head = fields.integer("head_dim", default=width // heads)
    most = fields.integer("max_position_embeddings", "n_positions")
    activation = fields.text("hidden_activation", "hidden_act", "activation_function")
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
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=1e-5
        ),
        activation=ACTIVATIONS[activation],
        biases=frozenset(biases),
        query_scale=1 / math.sqrt(max(head, 1)),
        attention_cap=fields.number("attn_logit_softcapping", default=0.0),
        score_cap=fields.number("final_logit_softcapping", default=0.0),
        is_tied=fields.flag("tie_word_embeddings", default=classifier not in tensors),
    )
    return row.adjust(fields, config), row.names


def read_layers(
    fields: Fields, row: ModelRow, count: int, head: int, length: int
) -> tuple[LayerConfig, ...]:
    """Read windows and rotary positions of all layers."""
    types = fields.items(count, "layer_types")
    window = fields.integer("sliding_window", default=0)
    if not fields.flag("use_sliding_window", default=True):
        window = 0
    pattern = fields.integer("sliding_window_pattern", default=row.pattern)
    if types is None:
        types = list_types(pattern if window else 0, count)
    turned = fields.items(count, "no_rope_layers") or [1] * count
    layers = []
    rotaries: dict[str, Rotary] = {}
    for kind, is_turned in zip(types, turned, strict=True):
        if kind not in LAYER_TYPES:
            raise ModelError(
                f"The model has layers of type {str(kind)[:60]!r}; supported: "
                f"{', '.join(LAYER_TYPES)}.",
                code="RQ202",
            )
        if kind not in rotaries:
            rotaries[kind] = read_rotary(fields, row, kind, head, length)
        is_windowed = LAYER_TYPES[kind]
        layers.append(
            LayerConfig(rotaries[kind] if is_turned else None, window if is_windowed else 0)
        )
    return tuple(layers)


def list_types(pattern: int, count: int) -> list[str]:
    """Return the types of all layers for a pattern of windows, see `ModelRow`."""
    if pattern < 1:
        return ["full_attention"] * count
    is_full = [pattern > 1 and (i + 1) % pattern == 0 for i in range(count)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def read_rotary(fields: Fields, row: ModelRow, kind: str, head: int, length: int) -> Rotary:
    """Read the rotary positions of layers of one type.

    Since version 5 "rope_parameters" has them all, perhaps by type of layer. Before, "rope_theta"
    and "rope_scaling" had them.
    """
    values = fields.get("rope_parameters", "rope_scaling") or {}
    if isinstance(values, dict) and isinstance(values.get(kind), dict):
        values = values[kind]
    elif LAYER_TYPES[kind] and fields.get("rope_local_base_freq") is not None:
        values = {"rope_theta": fields.get("rope_local_base_freq")}
    if not isinstance(values, dict):
        raise fields.refuse(("rope_parameters",), values, "a table")
    known = {
        "original_max_position_embeddings": fields.get(
            "original_max_position_embeddings", "max_position_embeddings"
        ),
        "max_position_embeddings": fields.get("max_position_embeddings"),
        "rope_theta": fields.get("rope_theta"),
        "partial_rotary_factor": fields.get("partial_rotary_factor"),
    }
    scaling = Fields(known | {name: value for name, value in values.items() if value is not None})
    share = scaling.number("partial_rotary_factor", default=row.partial)
    base = scaling.number("rope_theta", default=10000.0)
    return make_rotary(base, int(head * share), scaling, length)


# --- What differs from Llama --------------------------------------------------------------------


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


def adjust_phi(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    if fields.flag("qk_layernorm"):
        raise fields.refuse(("qk_layernorm",), True, "false")
    return replace(
        config,
        norm=NormKind.LAYER,
        is_gated=False,
        is_parallel=True,
        biases=frozenset({"q", "k", "v", "out", "up", "down", "classifier"}),
    )


def adjust_starcoder2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    parts = ("q", "k", "v", "out", "up", "down")
    biases = frozenset(parts if fields.flag("use_bias", default=True) else ())
    return replace(config, norm=NormKind.LAYER, is_gated=False, biases=biases)


def adjust_gpt2(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    if fields.flag("scale_attn_by_inverse_layer_idx") or fields.flag("add_cross_attention"):
        raise ModelError(
            "The model has scale_attn_by_inverse_layer_idx or add_cross_attention, which are not "
            "supported.",
            code="RQ202",
        )
    return replace(
        config,
        norm=NormKind.LAYER,
        is_gated=False,
        has_positions=True,
        layers=tuple(replace(layer, rotary=None) for layer in config.layers),
        query_scale=config.query_scale if fields.flag("scale_attn_weights", default=True) else 1.0,
        biases=frozenset({"q", "k", "v", "out", "up", "down"}),
    )


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


def make_names(names: Mapping[str, Any], **other: Any) -> TensorNames:
    """Return the names of Llama with changes."""
    return TensorNames({**LLAMA_NAMES, **names}, **{"unread": UNREAD, **other})


LLAMA = make_names({})
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

#: "model_type" in config.json -> architecture.
ARCHITECTURES: dict[str, ModelRow] = {
    "llama": ModelRow(LLAMA),
    "smollm3": ModelRow(LLAMA),
    "mistral": ModelRow(LLAMA, pattern=1),
    "ministral": ModelRow(LLAMA, pattern=1),
    "qwen2": ModelRow(LLAMA, adjust_qwen2),
    "qwen3": ModelRow(LLAMA, adjust_qwen3),
    "granite": ModelRow(LLAMA, adjust_granite),
    "phi": ModelRow(PHI, adjust_phi, partial=0.5),
    "phi3": ModelRow(PHI3, pattern=1),
    "gemma": ModelRow(LLAMA, adjust_gemma),
    "gemma2": ModelRow(GEMMA2, adjust_gemma2, pattern=2),
    "gemma3_text": ModelRow(GEMMA2, adjust_gemma3, pattern=6),
    "starcoder2": ModelRow(STARCODER2, adjust_starcoder2, pattern=1),
    "gpt2": ModelRow(GPT2, adjust_gpt2),
}
