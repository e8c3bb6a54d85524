"""What distinguishes architectures from Llama: functions that change a Llama's config, and layers
without attention.
"""

from __future__ import annotations

import math
from dataclasses import replace

from relayquant.formats.readers.causal_lm.changes import change_rotary, grow_queries, share_caches
from relayquant.formats.readers.causal_lm.config import CausalLMConfig
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.mixers import (
    DeltaNet,
    LatentAttention,
    Mixer,
    ShortConvolution,
)


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
    groups = fields.numbers(count, "attention.head_count_kv", default=1)
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
