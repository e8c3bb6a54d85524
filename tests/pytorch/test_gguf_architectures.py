"""GGUF files of tiny random models: `transformers` computes the same scores. The package gguf names
the tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import relayquant as rq

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[1] / "formats" / "readers"))
from causal_lm_models import draw_model  # noqa: E402
from causal_lm_runs import run_chunks  # noqa: E402

LAYERS, HEAD, LENGTH = 5, 32, 64
SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
YARN = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
DELTA = {
    "head_dim": HEAD, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "num_experts_per_tok": 3,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
MSCALE = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GROWTH = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.3, "beta_fast": 32.0,
    "beta_slow": 1.0, "max_position_embeddings": LENGTH,
}  # fmt: skip
GEMMA4 = {
    **WINDOW, "head_dim": HEAD, "global_head_dim": 2 * HEAD, "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 32, "final_logit_softcapping": 20.0,
    "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
        "full_attention",
    ],
}  # fmt: skip
#: case -> "general.architecture", class of the config, what it has besides SIZES
CASES = {
    "olmo2": ("olmo2", "Olmo2Config", {}),
    "olmo3": ("olmo2", "Olmo3Config", {**WINDOW, "rope_parameters": YARN}),
    "exaone4": ("exaone4", "Exaone4Config", {**WINDOW, "head_dim": HEAD}),
    "exaone4, no windows": (
        "exaone4",
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS},
    ),
    "glm4": ("glm4", "Glm4Config", {"head_dim": HEAD}),
    "ernie4_5": ("ernie4_5", "Ernie4_5Config", {"head_dim": HEAD}),
    "cohere": ("command-r", "CohereConfig", {}),
    "cohere2": ("cohere2", "Cohere2Config", WINDOW),
    "lfm2": ("lfm2", "Lfm2Config", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "qwen3_next": (
        "qwen3next",
        "Qwen3NextConfig",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("qwen35", "Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": (
        "qwen35moe",
        "Qwen3_5MoeTextConfig",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 32},
    ),
    "deepseek_v2, lite": (
        "deepseek2",
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "n_routed_experts": 6},
    ),
    "deepseek_v2, yarn": (
        "deepseek2",
        "DeepseekV2Config",
        {**LATENT, "n_routed_experts": 6, "rope_parameters": MSCALE},
    ),
    "deepseek_v3": (
        "deepseek2",
        "DeepseekV3Config",
        {
            **LATENT,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": MSCALE,
            "routed_scaling_factor": 1.7,
        },
    ),
    "ministral3": ("mistral3", "Ministral3Config", {"head_dim": HEAD, "rope_parameters": GROWTH}),
    "gemma4": (
        "gemma4",
        "Gemma4TextConfig",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4, values of keys": (
        "gemma4",
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4, experts": (
        "gemma4",
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "lfm2_moe": ("lfm2moe", "Lfm2MoeConfig", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 2}),
}


def write_gguf(path, architecture, model, guessing=0):
    """Write a model as llama.cpp has it. Its queries and keys are stored as in `transformers`.
    `guessing`: number of layers behind the others that guess tokens.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS + guessing)
    if guessing:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", guessing)
        writer.add_tensor(f"blk.{LAYERS}.nextn.eh_proj.weight", np.zeros((1, 2), "float32"))
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        hidden = [
            model.state_dict()[name].shape[0] for name in model.state_dict() if ".up_" in name
        ]
        is_one = len({*hidden}) < 2 or bool(getattr(config, "moe_intermediate_size", None))
        writer.add_feed_forward_length(config.intermediate_size if is_one else hidden)
    writer.add_head_count(config.num_attention_heads)
    add_mixers(writer, config)
    add_widths(writer, config)
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    add_rotary(writer, config)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, LAYERS)
    for name, value in list_tensors(model):
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            own = name
            if not name.startswith("blk."):
                own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert own, name
            writer.add_tensor(own, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_widths(writer, config):
    """Widths of heads. Those of latent attention are of a row of its cache, and of its heads. Gemma
    4 has wider heads in layers without a window.
    """
    if config.model_type == "gemma4_text":
        for add in (writer.add_key_length, writer.add_value_length):
            add(2 * HEAD)
        for add in (writer.add_key_length_swa, writer.add_value_length_swa):
            add(HEAD)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        return
    if not hasattr(config, "kv_lora_rank"):
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        return
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "deepseek_v3":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def list_tensors(model):
    """Tensors as llama.cpp has them: names that the package knows, and no axes of size 1."""
    is_tiled = model.config.model_type.startswith("qwen3_5")
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name.endswith((".mlp.experts.gate_up_proj", ".feed_forward.experts.gate_up_proj")):
            for part, half in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
            continue
        if "kv_b_proj" in name:
            heads = array.reshape(model.config.num_attention_heads, -1, array.shape[1])
            keys, values = np.split(heads, [model.config.qk_nope_head_dim], 1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
            continue
        if model.config.model_type == "ministral3" and ("q_proj" in name or "k_proj" in name):
            array = array.reshape(-1, 2, HEAD // 2, array.shape[1]).swapaxes(1, 2)
            array = array.reshape(-1, array.shape[-1])
        if ".conv" in name and array.ndim == 3:
            array = array[:, 0]
        if name.endswith("A_log"):
            array = -np.exp(array)
        if hasattr(model.config, "linear_num_key_heads") and name.endswith("norm.weight"):
            array = array + np.float32(".linear_attn." not in name)
        if is_tiled and ".linear_attn." in name:
            array = tile_heads(name, array, model.config)
        for before, after in RENAMED.items():
            name = name.replace(before, after)
        if name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            yield f"blk.{name.split('.')[2]}.{part}.scale", array
            continue
        is_stack = name.endswith(("down_proj", "gate_up_proj"))
        yield f"{name}.weight" if is_stack else name, array


#: Names of tensors that the package does not know -> names that it knows
RENAMED = {
    "expert_bias": "expert_bias.bias", "dt_bias": "dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias", "layer_scalar": "layer_scalar.weight",
}  # fmt: skip


def tile_heads(name, array, config):
    """Value heads of a gated delta net: the first of each key head, then the second of each ..."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys = 2 * groups * config.linear_key_head_dim

    def tile(values):
        split = values.reshape(groups, heads // groups, -1, *values.shape[1:])
        return split.swapaxes(0, 1).reshape(values.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([array[:keys], tile(array[keys:])])
    if "out_proj" in name:
        return tile(array.T).T
    return array if name.endswith("norm.weight") else tile(array)


def add_mixers(writer, config):
    """Heads of keys and values, by layer if some layers have none, and what these have instead."""
    kinds = getattr(config, "layer_types", None) or []
    heads = config.to_dict()["num_key_value_heads"]
    if "conv" in kinds:
        writer.add_head_count_kv([heads * (kind == "full_attention") for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif config.model_type == "gemma4_text":
        writer.add_head_count_kv(
            [config.per_layer_config[i].num_key_value_heads for i in range(LAYERS)]
        )
    else:
        writer.add_head_count_kv(1 if hasattr(config, "kv_lora_rank") else heads)
    if "linear_attention" in kinds:
        writer.add_full_attention_interval(kinds.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    if hasattr(config, "num_dense_layers"):
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_count(getattr(config, "n_routed_experts", None) or config.num_experts)
        chosen = getattr(config, "top_k_experts", None) or config.num_experts_per_tok
        writer.add_expert_used_count(chosen)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_rotary(writer, config):
    values = config.rope_parameters
    if config.model_type == "gemma4_text":
        writer.add_rope_freq_base(values["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(values["sliding_attention"]["rope_theta"])
        writer.add_rope_dimension_count(2 * HEAD)
        writer.add_rope_dimension_count_swa(HEAD)
        factors = np.where(np.arange(HEAD) < HEAD // 4, 1, 1e30).astype("float32")
        writer.add_tensor("rope_freqs.weight", factors)
        return
    values = values.get("full_attention", values)
    writer.add_rope_freq_base(values["rope_theta"])
    turned = getattr(config, "qk_rope_head_dim", HEAD) * values.get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(turned))
    if values["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(values["factor"])
        writer.add_rope_scaling_orig_ctx_len(values["original_max_position_embeddings"])
        if "llama_4_scaling_beta" in values:
            writer.add_attn_temperature_scale(values["llama_4_scaling_beta"])
            writer.add_rope_scaling_yarn_log_mul(values["mscale_all_dim"])
        elif "mscale_all_dim" in values:
            writer.add_rope_scaling_yarn_log_mul(0.1 * values["mscale_all_dim"])


@pytest.mark.parametrize("case", CASES)
def test_load__gguf_scores_are_those_of_the_model(tmp_path, case):
    architecture, kind, more = CASES[case]
    model = draw_model(getattr(transformers, kind)(**{**SIZES, **more}))
    write_gguf(tmp_path / "m.gguf", architecture, model)
    tokens = np.random.default_rng(0).integers(3, 96, (2, 24))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    options = rq.CausalLMOptions(max_length=32, cache="float32", sequences=2)
    found = run_chunks(*rq.load(tmp_path / "m.gguf", causal_lm=options), tokens, (9, 8, 1, 1, 4, 1))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_load__gguf_layers_that_guess_tokens_are_not_read(tmp_path):
    architecture, kind, more = CASES["qwen3_5"]
    model = draw_model(getattr(transformers, kind)(**{**SIZES, **more}))
    pairs = []
    for count in (0, 1):
        write_gguf(tmp_path / "m.gguf", architecture, model, count)
        pairs.append(rq.load(tmp_path / "m.gguf"))
    assert pairs[0][0].script(show_meta=True) == pairs[1][0].script(show_meta=True)
    assert pairs[0][1].keys() == pairs[1][1].keys()
