"""The architectures of llama.cpp, one row each. All begin as Llama, and a row says what differs."""

from __future__ import annotations

from dataclasses import replace

from relayquant.formats.readers.causal_lm.config import HiddenFunction, NormKind
from relayquant.formats.readers.causal_lm.gguf.differences import (
    adjust_gemma_scale,
    adjust_gguf_cohere,
    adjust_gguf_deepseek,
    adjust_gguf_gemma4,
    adjust_gguf_granite,
    adjust_gguf_mistral3,
    list_convolutions,
    list_deltas,
    list_tiled_deltas,
    scale_embedding,
)
from relayquant.formats.readers.causal_lm.gguf.row import SOFTMAX, SOFTMAX_OR_SIGMOID, GgufModelRow
from relayquant.formats.readers.causal_lm.gguf.tensor_names import (
    DELTA_NAMES,
    LFM2,
    NAMES,
    PAIRED,
    PLAIN,
    UNREAD,
)
from relayquant.formats.readers.causal_lm.layer_types import (
    leave_out,
    turn_windowed,
    turn_windowed_or_all,
)

GELU = {"activation": HiddenFunction.GELU_TANH}
#: Layer norms and a feed-forward network without a gate.
LAYER_NORMS = {**GELU, "norm": NormKind.LAYER, "is_gated": False}
GEMMA2 = {**GELU, "has_post_norms": True}
POST_NORMS = {"has_pre_norms": False, "has_post_norms": True}
GATES = {"has_head_norms": True, "has_gates": True}
COHERE = {"norm": NormKind.LAYER, "has_norm_biases": False, "is_parallel": True}
#: "general.architecture" -> architecture.
GGUF_ARCHITECTURES: dict[str, GgufModelRow] = {
    "llama": GgufModelRow(PAIRED),
    "smollm3": GgufModelRow(PAIRED, turned=leave_out(4)),
    "granite": GgufModelRow(PAIRED, adjust=adjust_gguf_granite),
    "qwen2": GgufModelRow(),
    "qwen3": GgufModelRow(changes={"has_head_norms": True}),
    "granitemoe": GgufModelRow(PAIRED, adjust=adjust_gguf_granite),
    "qwen2moe": GgufModelRow(is_normalized=False),
    "qwen3moe": GgufModelRow(changes={"has_head_norms": True}),
    "olmoe": GgufModelRow(changes={"has_row_norms": True}, is_normalized=False),
    "gpt-oss": GgufModelRow(
        replace(PLAIN, names={**NAMES, "ffn_norm": NAMES["post_attention_norm"]}),
        changes={"has_sinks": True},
        pattern=2,
        limit=7.0,
    ),
    "lfm2": GgufModelRow(LFM2, changes={"has_head_norms": True}, mixers=list_convolutions),
    "lfm2moe": GgufModelRow(
        LFM2,
        changes={"has_head_norms": True},
        router=SOFTMAX_OR_SIGMOID,
        sum_shift=1e-6,
        mixers=list_convolutions,
    ),
    "qwen3next": GgufModelRow(DELTA_NAMES, changes=GATES, mixers=list_deltas),
    "qwen35": GgufModelRow(DELTA_NAMES, changes=GATES, mixers=list_tiled_deltas),
    "qwen35moe": GgufModelRow(DELTA_NAMES, changes=GATES, mixers=list_tiled_deltas),
    "deepseek2": GgufModelRow(
        is_normalized=False,
        router=SOFTMAX | SOFTMAX_OR_SIGMOID,
        scales_shares=True,
        has_latents=True,
        scaling=("yarn_log_multiplier",),
        adjust=adjust_gguf_deepseek,
    ),
    "mistral3": GgufModelRow(PAIRED, scaling=("yarn_log_multiplier",), adjust=adjust_gguf_mistral3),
    "phi2": GgufModelRow(changes={**LAYER_NORMS, "is_parallel": True}),
    "phi3": GgufModelRow(replace(PLAIN, names={**NAMES, "gate_up": "blk.{}.ffn_up"}), pattern=1),
    "gemma": GgufModelRow(changes=GELU, adjust=scale_embedding),
    "gemma2": GgufModelRow(changes=GEMMA2, pattern=2, adjust=adjust_gemma_scale),
    "gemma3": GgufModelRow(
        changes={**GEMMA2, "has_head_norms": True},
        pattern=6,
        local_base=10000.0,
        adjust=adjust_gemma_scale,
    ),
    "gemma4": GgufModelRow(
        replace(
            PLAIN,
            unread=rf"{UNREAD}|blk\.\d+\.attn_[kv](_norm)?\.weight",
            renamed={
                ".ffn_gate_inp.scale": ".ffn_router_norm.weight",
                ".ffn_down_exps.scale": ".ffn_share_scale.weight",
            },
        ),
        changes={
            **GEMMA2,
            "has_head_norms": True,
            "has_value_norms": True,
            "has_layer_scales": True,
            "query_scale": 1.0,
        },
        reads_pattern=True,
        is_beside=True,
        has_equal_values=True,
        local_base=10000.0,
        adjust=adjust_gguf_gemma4,
    ),
    "olmo2": GgufModelRow(
        changes={**POST_NORMS, "has_row_norms": True}, pattern=4, scales_windows=False
    ),
    "exaone4": GgufModelRow(
        changes={**POST_NORMS, "has_head_norms": True}, pattern=4, turned=turn_windowed_or_all
    ),
    "glm4": GgufModelRow(
        replace(PAIRED, names={**NAMES, "gate_up": "blk.{}.ffn_up"}),
        changes={"has_post_norms": True},
    ),
    "ernie4_5": GgufModelRow(PAIRED),
    "command-r": GgufModelRow(PAIRED, changes=COHERE, adjust=adjust_gguf_cohere),
    "cohere2": GgufModelRow(
        PAIRED, changes=COHERE, pattern=4, turned=turn_windowed, adjust=adjust_gguf_cohere
    ),
    "starcoder2": GgufModelRow(changes=LAYER_NORMS),
    "gpt2": GgufModelRow(changes={**LAYER_NORMS, "has_positions": True}, turned=leave_out(1)),
}
