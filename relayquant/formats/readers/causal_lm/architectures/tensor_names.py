"""Names of the tensors of architectures, as `transformers` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relayquant.formats.readers.causal_lm.names import TensorNames

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
