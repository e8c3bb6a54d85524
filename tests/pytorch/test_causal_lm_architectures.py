"""Language models of `transformers`, tiny and random: their own scores against ours."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.architectures.reader import read_config
from relayquant.formats.readers.causal_lm.fields import Fields

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "formats" / "readers"))
from causal_lm_models import draw_model  # noqa: E402
from causal_lm_runs import run_chunks, run_function  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def scale(kind, **numbers):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **numbers}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = {
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [1 + i / 2 for i in range(8)],
}
WINDOW = {"sliding_window": 6}
FULL = ["full_attention"] * 2
SCALES = {
    "embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
}  # fmt: skip

EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_hidden_layers": 3,
}  # fmt: skip

CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
DELTA = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 40, "q_lora_rank": 48,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1,
}  # fmt: skip
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
MSCALE = scale(
    "yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.9, mscale_all_dim=0.7
)
GROWTH = scale(
    "yarn", factor=4.0, original_max_position_embeddings=5, llama_4_scaling_beta=0.3,
    mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0, max_position_embeddings=64,
)  # fmt: skip
GEMMA4 = {
    **WINDOW, "num_hidden_layers": 5, "head_dim": 16, "global_head_dim": 24,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 12,
    "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "full_attention",
    ],
}  # fmt: skip
#: case -> class of the config, what it has besides SIZES
CASES = {
    "llama": ("LlamaConfig", {}),
    "llama, biases and llama3": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, **scale("llama3", factor=8.0, **LLAMA3)},
    ),
    "llama, yarn": (
        "LlamaConfig",
        scale("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama, tied and linear": (
        "LlamaConfig",
        {"tie_word_embeddings": True, **scale("linear", factor=4.0)},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "mistral": ("MistralConfig", {**WINDOW, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "granite": ("GraniteConfig", SCALES),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", WINDOW),
    "phi3, longrope": (
        "Phi3Config",
        {"original_max_position_embeddings": 32, **scale("longrope", **FACTORS)},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {**WINDOW, "head_dim": 32, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 32, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    ),
    "starcoder2": ("Starcoder2Config", {}),
    "starcoder2, windows": ("Starcoder2Config", WINDOW),
    "ministral": ("MinistralConfig", {**WINDOW, "head_dim": 16, **scale("default")}),
    "qwen2, windows in late layers": (
        "Qwen2Config",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "smollm3, windows": (
        "SmolLM3Config",
        {**WINDOW, "num_hidden_layers": 4, "use_sliding_window": True},
    ),
    "gemma3, a cap that it does not read": (
        "Gemma3TextConfig",
        {"head_dim": 32, "attn_logit_softcapping": 0.3},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, **WINDOW}),
    "qwen2_moe, a dense layer": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_moe, experts in each second layer": (
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "olmoe": ("OlmoeConfig", EXPERTS),
    "granitemoe": ("GraniteMoeConfig", {**SCALES, "num_local_experts": 6}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40},
    ),
    "gpt_oss": ("GptOssConfig", {**WINDOW, "head_dim": 16, "num_local_experts": 6}),
    "gpt_oss, limits that are met": (
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 32, "swiglu_limit": 0.7, "swiglu_alpha": 1.1},
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {**WINDOW, "num_hidden_layers": 5}),
    "exaone4": ("Exaone4Config", {**WINDOW, "num_hidden_layers": 5, "head_dim": 32}),
    "exaone4, no windows": ("Exaone4Config", {"sliding_window": None, "layer_types": FULL}),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32}),
    "ernie4_5, biases": ("Ernie4_5Config", {"use_bias": True}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {**WINDOW, "num_hidden_layers": 5}),
    "lfm2": ("Lfm2Config", CONVOLUTIONS),
    "lfm2, biases": (
        "Lfm2Config",
        {**CONVOLUTIONS, "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "lfm2_moe, no bias of the choice": (
        "Lfm2MoeConfig",
        {**CONVOLUTIONS, **EXPERTS, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40}),
    "qwen3_next, a dense layer": (
        "Qwen3NextConfig",
        {**EXPERTS, **DELTA, "mlp_only_layers": [1], "linear_num_key_heads": 1},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5, attention in each second layer": (
        "Qwen3_5TextConfig",
        {
            **DELTA,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "attention_bias": True,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**EXPERTS, **DELTA}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None, "n_routed_experts": 6}),
    "deepseek_v2, groups and yarn": (
        "DeepseekV2Config",
        {
            **LATENT,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 1,
            **MSCALE,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, **GROUPS, **MSCALE}),
    "deepseek_v3, halves": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "rope_interleave": False, "q_lora_rank": None, "attention_bias": True},
    ),
    "ministral3": ("Ministral3Config", {"head_dim": 24, **GROWTH}),
    "ministral3, a window": ("Ministral3Config", {**WINDOW, "head_dim": 16, **GROWTH}),
    "gemma4": (
        "Gemma4TextConfig",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4, values of keys": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4, experts": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gpt2": ("GPT2Config", {}),
    "gpt2, not tied": ("GPT2Config", {"tie_word_embeddings": False}),
}
#: class of the config -> a setting that must be false
REFUSED = {
    "PhiConfig": "qk_layernorm",
    "GemmaConfig": "use_bidirectional_attention",
    "Gemma2Config": "use_bidirectional_attention",
    "Gemma3TextConfig": "use_bidirectional_attention",
    "CohereConfig": "use_qk_norm",
    "GPT2Config": "scale_attn_by_inverse_layer_idx",
}
KINDS = sorted({kind for kind, _ in CASES.values()})
#: Settings without a default of their own: sizes, which shapes of tensors show.
NEEDED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layer",
    "n_head", "n_positions", "max_position_embeddings", "intermediate_size", "num_key_value_heads",
    "head_dim", "model_type",
}  # fmt: skip


def make_config(kind, more):
    sizes = SIZES
    if kind == "GPT2Config":  # It has its own names, and others have no effect.
        known = {**transformers.GPT2Config.attribute_map, "intermediate_size": "n_inner"}
        sizes = {known.get(name, name): value for name, value in SIZES.items()}
        del sizes["num_key_value_heads"]
    if kind.startswith(("Qwen3Next", "Qwen3_5")):  # Attention is in each fourth layer.
        sizes = {**SIZES, "num_hidden_layers": 4}
    if kind == "DeepseekV2Config":
        sizes = {**SIZES, "num_experts_per_tok": 3}
    return getattr(transformers, kind)(**{**sizes, **more})


@pytest.mark.parametrize("case", CASES)
def test_load_causal_lm__scores_are_those_of_the_model(case):
    model = draw_model(make_config(*CASES[case]))
    tokens = np.random.default_rng(0).integers(3, 96, (2, 24))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    options = rq.CausalLMOptions(max_length=32, cache="float32", sequences=2)
    pair = rq.torch.load_causal_lm(model, options)
    found = run_chunks(*pair, tokens, (9, 8, 1, 1, 4, 1))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 * np.abs(want).max())


#: cases of layers whose state is replaced
RUNNING = [case for case in CASES if case.startswith(("lfm2", "qwen3_next", "qwen3_5"))]


def read_ragged(run, tokens):
    """Scores of the last rows of two sequences, of 10 and 6 tokens and then one more each. `run`
    takes the name of a function and its inputs. It has read something else before.
    """
    padded = tokens.astype("int32")
    padded[1, 6:] = -1
    run("prefill", [padded[:, :5] + 3, np.zeros(2, "int32"), np.zeros((2, 1), "int32")])
    found, ends = np.zeros((2, 2, 96), "float32"), np.array([10, 6])
    for at in (0, 4, 8):
        rows = padded[:, at : at + 4][:, : 10 - at]
        last = np.clip(ends - 1 - at, 0, rows.shape[1] - 1)
        scores = run("prefill", [rows, np.full(2, at, "int32"), last[:, None].astype("int32")])
        is_last = (at < ends) & (ends <= at + 4)
        found[is_last, 0] = scores[is_last, 0]
    next_rows = tokens[[0, 1], ends][:, None].astype("int32")
    found[:, 1] = run("decode", [next_rows, ends.astype("int32")])[:, 0]
    return found


@pytest.mark.parametrize("case", ["qwen3", "deepseek_v3", "gemma4", *RUNNING])
def test_load_causal_lm__sequences_of_different_lengths(case):
    """What fills up the shorter one is not read, nor what was there before a text began."""
    model = draw_model(make_config(*CASES[case]))
    tokens = np.random.default_rng(0).integers(3, 90, (2, 11))
    with torch.no_grad():
        scores = model(torch.tensor(tokens)).logits.numpy()
    want = np.stack([scores[0, 9:11], scores[1, 5:7]])
    options = rq.CausalLMOptions(max_length=32, cache="float32", sequences=2)
    mod, params = rq.torch.load_causal_lm(model, options)
    state = [value.value for value in rq.get_state(mod)]

    def run(name, inputs):
        found, *state[:] = run_function(mod, params, name, [*inputs, *state])
        return found

    found = read_ragged(run, tokens)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("case", ["lfm2", "qwen3_5", "deepseek_v3", "gemma4"])
def test_compile__sequences_of_different_lengths(tmp_path, case):
    """Float, and with weights of 4 bits that were kept in a file."""
    model = draw_model(make_config(*CASES[case]))
    tokens = np.random.default_rng(0).integers(3, 90, (2, 11))
    with torch.no_grad():
        scores = model(torch.tensor(tokens)).logits.numpy()
    want = np.stack([scores[0, 9:11], scores[1, 5:7]])
    options = rq.CausalLMOptions(max_length=32, cache="float32", sequences=2)
    pair = rq.torch.load_causal_lm(model, options)
    executor = rq.Executor(rq.compile(pair, precision="float32"))
    found = read_ragged(lambda name, inputs: executor.run(name, inputs)[0], tokens)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())

    rq.save_module(rq.compress_weights(pair, bits=4), tmp_path / "m.rqm")
    small, _ = rq.load(tmp_path / "m.rqm")
    state = [value.value for value in rq.get_state(small)]

    def run(name, inputs):
        found, *state[:] = run_function(small, {}, name, [*inputs, *state])
        return found

    want = read_ragged(run, tokens)
    executor = rq.Executor(rq.compile(small, precision="float32"))
    found = read_ragged(lambda name, inputs: executor.run(name, inputs)[0], tokens)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 * np.abs(want).max())


def read(values):
    """The description of a model with a classifier of its own, in a cache of 32."""
    return read_config(Fields(values), lambda most: min(most, 32), {"lm_head.weight"})[0]


@pytest.mark.parametrize("kind", KINDS)
def test_read_config__settings_that_are_missing_have_the_values_of_transformers(kind):
    config = make_config(kind, {})
    values = config.to_dict()
    # The class of DeepSeek-V2 has no number.
    needed = NEEDED | ({"num_experts_per_tok"} if kind == "DeepseekV2Config" else set())
    for name in values.keys() - needed:
        given = {key: value for key, value in values.items() if key != name}
        whole = type(config).from_dict(copy.deepcopy(given)).to_dict()
        assert read(given) == read(whole), name


@pytest.mark.parametrize("kind", KINDS)
def test_read_config__files_of_version_4(kind):
    """They have "rope_theta" and "rope_scaling", and no types of layers."""
    config = make_config(kind, {})
    later = ("layer_types", "rope_parameters", "no_rope_layers")
    values = {key: value for key, value in config.to_dict().items() if key not in later}
    # Version 5 takes the base of OLMo 3's windows from nowhere. All files have this one.
    base = {"rope_theta": 500000.0 if kind == "Olmo3Config" else 77.0}
    for more in (
        base,
        {**base, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.25} if kind.startswith("Phi") else {},
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    ):
        if kind == "Phi3Config" and "rope_scaling" in more:
            continue  # transformers refuses it.
        given = {**values, **more}
        whole = type(config).from_dict(copy.deepcopy(given)).to_dict()
        assert read(given) == read(whole), more


@pytest.mark.parametrize("kind", KINDS)
def test_read_config__settings_of_other_architectures_are_not_read(kind):
    config = make_config(kind, {})
    values = config.to_dict()
    foreign = {
        "attn_logit_softcapping": 0.3, "final_logit_softcapping": 0.3, "sliding_window": 4,
        "no_rope_layers": [0, 0], "no_rope_layer_interval": 2, "rope_local_base_freq": 5.0,
        "sliding_window_pattern": 2, "norm_epsilon": 0.5, "layer_norm_epsilon": 0.5,
        "layer_norm_eps": 0.5, "rms_norm_eps": 0.5, "query_pre_attn_scalar": 5,
    }  # fmt: skip
    own = {*values, *(["sliding_window_pattern"] if kind == "Gemma3TextConfig" else [])}
    # Version 5 has "rope_parameters" instead, which count.
    foreign = {key: value for key, value in foreign.items() if key not in own}
    assert read({**values, **foreign}) == read(values)


@pytest.mark.parametrize("kind", REFUSED)
def test_read_config__settings_that_must_be_false(kind):
    values = make_config(kind, {}).to_dict() | {REFUSED[kind]: True}
    with pytest.raises(ModelError, match=f"has '{REFUSED[kind]}', which is not supported"):
        read(values)


@pytest.mark.parametrize(
    "case",
    ["llama", *(case for case, (kind, _) in CASES.items() if "Moe" in kind or "Mix" in kind)],
)
def test_load__what_save_pretrained_wrote(tmp_path, case):
    model = draw_model(make_config(*CASES[case])).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    written, params = rq.load(tmp_path)
    mod, expected = rq.torch.load_causal_lm(model)
    assert written.script(show_meta=True) == mod.script(show_meta=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value)


def test_load__layers_that_guess_tokens_are_not_read(tmp_path):
    """Files of Qwen3.5 have them beside the model."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = draw_model(make_config(*CASES["qwen3_5"]))
    model.save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    more = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.ones(1)}
    safetensors.save_file({**tensors, **more}, tmp_path / "model.safetensors")
    mod, params = rq.load(tmp_path)
    expected, weights = rq.torch.load_causal_lm(model)
    assert mod.script(show_meta=True) == expected.script(show_meta=True)
    assert params.keys() == weights.keys()


VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
#: class of the config -> model types of its language model and of its tower, and other settings
SEEING = {
    "Gemma3Config": ("gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4}),
    "Mistral3Config": ("mistral", "pixtral", {}),
    "LlavaConfig": ("llama", "clip_vision_model", {}),
    "SmolVLMConfig": ("llama", "smolvlm_vision", {}),
    "InternVLConfig": ("qwen2", "internvl_vision", {}),
    "Gemma4Config": ("gemma4_text", "gemma4_vision", {}),
    "Qwen3_5Config": ("qwen3_5_text", "qwen3_5_vision", {}),
    "Qwen3_5MoeConfig": ("qwen3_5_moe_text", "qwen3_5_moe_vision", {}),
}


@pytest.mark.parametrize("kind", SEEING)
def test_load__language_model_of_a_model_that_sees(tmp_path, kind):
    text, vision, more = SEEING[kind]
    config = getattr(transformers, kind)(
        text_config={
            **SIZES,
            "num_hidden_layers": 4,
            "model_type": text,
            "head_dim": 16,
            **({"vocab_size_per_layer_input": 96} if text == "gemma4_text" else {}),
        },
        vision_config={**VISION, "model_type": vision},
        **more,
    )
    model = draw_model(config, transformers.AutoModelForImageTextToText)
    tokens = np.random.default_rng(0).integers(3, 90, (1, 12))
    with torch.no_grad():
        want = model(input_ids=torch.tensor(tokens)).logits.numpy()
    model.save_pretrained(tmp_path)
    options = rq.CausalLMOptions(max_length=32, cache="float32")
    for pair in (rq.load(tmp_path, causal_lm=options), rq.torch.load_causal_lm(model, options)):
        found = run_chunks(*pair, tokens, (9, 1, 2))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["LlamaConfig", "Gemma3TextConfig"])
def test_read_config__sizes_that_are_missing_are_those_of_transformers(kind):
    """As in the files of LLaVA and Gemma 3."""
    whole = getattr(transformers, kind)().to_dict()
    sizes = NEEDED - {"model_type", "n_embd", "n_layer", "n_head", "n_positions"}
    assert read({key: value for key, value in whole.items() if key not in sizes}) == read(whole)


def test_load_causal_lm__models_of_pictures_that_are_not_read():
    """Aya Vision scales scores otherwise than its language model alone."""
    config = transformers.AyaVisionConfig(
        text_config={**SIZES, "model_type": "cohere2"},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with pytest.raises(ModelError, match=r"'aya_vision'; supported: .*language models of gemma3"):
        rq.torch.load_causal_lm(model)


def test_load_causal_lm__takes_models_of_transformers():
    with pytest.raises(ModelError, match=r"model of transformers.*given a Linear"):
        rq.torch.load_causal_lm(torch.nn.Linear(2, 2))


def test_read_config__gemma4_sees_text_before_alone():
    values = make_config("Gemma4TextConfig", {}).to_dict()
    assert read(values | {"use_bidirectional_attention": "vision"}) == read(values)
    with pytest.raises(ModelError, match=r"'use_bidirectional_attention' of the model is all"):
        read(values | {"use_bidirectional_attention": "all"})
