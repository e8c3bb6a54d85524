"""Names of the tensors of architectures, as llama.cpp writes them."""

from __future__ import annotations

from dataclasses import replace

from relayquant.formats.readers.causal_lm.names import TensorNames

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
UNREAD = r"rope_(freqs|factors_long|factors_short)\.weight|.*\.attn_rot_embd"
PLAIN = TensorNames(NAMES, EXPERTS, unread=UNREAD)
#: Rows of q and k are stored for pairs of neighbours.
PAIRED = replace(PLAIN, is_paired=True)
LFM2 = replace(PLAIN, names={**NAMES, "final_norm": "token_embd_norm"})
DELTA_NAMES = replace(
    PLAIN,
    names={**NAMES, "ffn_norm": NAMES["post_attention_norm"]},
    renamed={".ssm_alpha": ".ssm_decay", ".ssm_a": ".ssm_a.weight"},
)
