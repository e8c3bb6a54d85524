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
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    add_mixers(writer, config)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    add_rotary(writer, config)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, LAYERS)
    for name, value in list_tensors(model):
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert own, name
            writer.add_tensor(own, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def list_tensors(model):
    """Tensors as llama.cpp has them: names that the package knows, and no axes of size 1."""
    is_tiled = model.config.model_type.startswith("qwen3_5")
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
            continue
        if ".conv" in name and array.ndim == 3:
            array = array[:, 0]
        if name.endswith("A_log"):
            array = -np.exp(array)
        if hasattr(model.config, "linear_num_key_heads") and name.endswith("norm.weight"):
            array = array + np.float32(".linear_attn." not in name)
        if is_tiled and ".linear_attn." in name:
            array = tile_heads(name, array, model.config)
        name = name.replace("expert_bias", "expert_bias.bias").replace("dt_bias", "dt_proj.bias")
        yield f"{name}.weight" if name.endswith("down_proj") else name, array


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
    kinds, heads = getattr(config, "layer_types", None) or [], config.num_key_value_heads
    if "conv" in kinds:
        writer.add_head_count_kv([heads * (kind == "full_attention") for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(heads)
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
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_rotary(writer, config):
    values = config.rope_parameters
    values = values.get("full_attention", values)
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_rope_dimension_count(int(HEAD * values.get("partial_rotary_factor", 1)))
    if values["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(values["factor"])
        writer.add_rope_scaling_orig_ctx_len(values["original_max_position_embeddings"])


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
