"""The architectures of `transformers`, one row each. All begin as Llama, and a row says what
differs.
"""

from __future__ import annotations

from relayquant.formats.readers.causal_lm.architectures.differences import (
    adjust_cohere,
    adjust_deepseek_v2,
    adjust_deepseek_v3,
    adjust_ernie,
    adjust_exaone4,
    adjust_gemma,
    adjust_gemma2,
    adjust_gemma3,
    adjust_gemma4,
    adjust_glm4,
    adjust_gpt2,
    adjust_gpt_oss,
    adjust_granite,
    adjust_granite_moe,
    adjust_lfm2,
    adjust_lfm2_moe,
    adjust_ministral3,
    adjust_mixtral,
    adjust_olmo2,
    adjust_olmoe,
    adjust_phi,
    adjust_qwen2,
    adjust_qwen2_moe,
    adjust_qwen3,
    adjust_qwen3_5,
    adjust_qwen3_moe,
    adjust_qwen3_next,
    adjust_starcoder2,
    read_delta,
    read_gemma4_heads,
    read_short_convolution,
)
from relayquant.formats.readers.causal_lm.architectures.row import ModelRow, ReadMixer
from relayquant.formats.readers.causal_lm.architectures.settings import (
    ALL_LAYERS,
    BIASES,
    BOTH_WAYS,
    COHERE2_SETTINGS,
    COHERE_SETTINGS,
    DEEPSEEK_V2_SETTINGS,
    DEEPSEEK_V3_SETTINGS,
    DELTA,
    ERNIE_SETTINGS,
    EXAONE4_SETTINGS,
    GEMMA1_SETTINGS,
    GEMMA2_SETTINGS,
    GEMMA3_SETTINGS,
    GEMMA3_SIZES,
    GEMMA4_ROTARY,
    GEMMA4_SETTINGS,
    GLM4_SETTINGS,
    GPT2_SETTINGS,
    GPT_OSS_ROTARY,
    GPT_OSS_SETTINGS,
    GRANITE_MOE_SETTINGS,
    LATE_LAYERS,
    LFM2_MOE_SETTINGS,
    LFM2_SETTINGS,
    LLAMA_SIZES,
    MINISTRAL3_ROTARY,
    MINISTRAL3_SETTINGS,
    MIXTRAL_SETTINGS,
    OLMO2_SETTINGS,
    OLMO3_SETTINGS,
    OLMOE_SETTINGS,
    PHI3_SETTINGS,
    PHI_SETTINGS,
    QWEN2_MOE_SETTINGS,
    QWEN3_5_MOE_SETTINGS,
    QWEN3_MOE_SETTINGS,
    QWEN3_NEXT_SETTINGS,
    SILU,
    SMOLLM3_SETTINGS,
    STARCODER2_SETTINGS,
)
from relayquant.formats.readers.causal_lm.architectures.tensor_names import (
    DEEPSEEK,
    DELTA_NAMES,
    GEMMA2,
    GEMMA4,
    GLM4,
    GPT2,
    GPT_OSS,
    GRANITE_MOE,
    LFM2,
    LLAMA,
    MIXTRAL,
    MOE,
    OLMO2,
    PAIRED,
    PHI,
    PHI3,
    STARCODER2,
)
from relayquant.formats.readers.causal_lm.layer_types import (
    in_pattern,
    list_attention,
    list_by_pattern,
    list_each_fourth,
    list_first_even,
    list_last_full,
    list_late,
    list_unturned,
    turn_windowed,
    turn_windowed_or_all,
)

DELTA_RULE: dict[str, ReadMixer] = {"linear_attention": read_delta}
SHORT_CONVOLUTION: dict[str, ReadMixer] = {"conv": read_short_convolution}
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
