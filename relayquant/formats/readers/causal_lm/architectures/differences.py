"""What distinguishes architectures from Llama: functions that change a Llama's config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from relayquant.formats.readers.causal_lm.architectures.settings import MINISTRAL3_ROTARY
from relayquant.formats.readers.causal_lm.changes import add_experts, grow_queries, share_caches
from relayquant.formats.readers.causal_lm.config import CausalLMConfig, ExpertConfig, NormKind
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.layer_types import LAYER_TYPES
from relayquant.formats.readers.causal_lm.mixers import (
    DeltaNet,
    LatentAttention,
    Mixer,
    ShortConvolution,
)


def adjust_ministral3(fields: Fields, config: CausalLMConfig) -> CausalLMConfig:
    """Queries grow with their position."""
    values = fields.get("rope_scaling", "rope_parameters")
    scaling = Fields(values if isinstance(values, Mapping) else MINISTRAL3_ROTARY)
    growth = scaling.number("llama_4_scaling_beta", default=0.0)
    if not growth:
        return config
    return grow_queries(config, growth, scaling.integer("original_max_position_embeddings"))


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
    """Layers have experts whose number is a multiple of a step. A list excepts some of them."""
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
