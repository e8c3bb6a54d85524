"""Settings of architectures and their values where config.json lacks them, as `transformers` has
them.
"""

from __future__ import annotations

from typing import Any

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
