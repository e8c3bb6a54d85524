"""config.json -> `CausalLMConfig`, and names of tensors, by the row of `table`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping

from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.architectures.row import ModelRow
from relayquant.formats.readers.causal_lm.architectures.table import ARCHITECTURES
from relayquant.formats.readers.causal_lm.config import (
    MOST_LAYERS,
    CausalLMConfig,
    HiddenFunction,
    LayerConfig,
    Rotary,
)
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.layer_types import LAYER_TYPES, list_types
from relayquant.formats.readers.causal_lm.names import TensorNames, leave_out_layers
from relayquant.formats.readers.causal_lm.rotary import make_rotary

#: Name in config.json -> function.
ACTIVATIONS = {
    "silu": HiddenFunction.SILU,
    "swish": HiddenFunction.SILU,
    "gelu": HiddenFunction.GELU,
    "gelu_new": HiddenFunction.GELU_TANH,
    "gelu_fast": HiddenFunction.GELU_TANH,
    "gelu_pytorch_tanh": HiddenFunction.GELU_TANH,
    "relu": HiddenFunction.RELU,
}
#: The "quant_method" whose tensors are read.
MXFP4 = "mxfp4"
#: "model_type" of models of pictures and text, of which the language model is read.
WITH_PICTURES = (
    "gemma3", "gemma4", "internvl", "llava", "mistral3", "qwen3_5", "qwen3_5_moe", "smolvlm",
)  # fmt: skip


def read_config(
    fields: Fields, length: Callable[[int], int], tensors: Container[str]
) -> tuple[CausalLMConfig, TensorNames]:
    """Read the metadata of a model of `transformers`.

    Args:
        fields: What config.json holds.
        length: Most tokens of the model -> length of the cache.
        tensors: Names of the model's tensors.

    Raises:
        ModelError: the architecture or a setting is not supported, or a value is missing or wrong.
    """
    kind = fields.text("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"The model's architecture is {kind[:60]!r}; supported: {', '.join(ARCHITECTURES)}, "
            f"and the language models of {', '.join(WITH_PICTURES)}.",
            code="RQ202",
        )
    packed = fields.get("quantization_config")
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, Mapping) else None
        if method != MXFP4:
            raise ModelError(
                f"The model's weights are quantized ('quantization_config', {str(method)[:20]}), "
                f"which is not read; allowed: {MXFP4}. Load the float model and call "
                "compress_weights, or load a GGUF file.",
                code="RQ202",
            )
    row = ARCHITECTURES[kind]
    says_tied = fields.get("tie_word_embeddings") is not None
    fields = choose_settings(fields, row)
    count = fields.integer("num_hidden_layers", "n_layer")
    if not 1 <= count <= MOST_LAYERS:
        raise fields.refuse(("num_hidden_layers",), count, f"1 to {MOST_LAYERS}")
    width, heads = (
        fields.integer("hidden_size", "n_embd"),
        fields.integer("num_attention_heads", "n_head"),
    )
    if heads < 1:
        raise fields.refuse(("num_attention_heads",), heads, "an integer from 1 on")
    head = fields.integer("qk_rope_head_dim", "head_dim", default=width // heads)
    most = fields.integer("max_position_embeddings", "n_positions")
    activation = fields.text(
        "hidden_activation", "hidden_act", "activation_function", default="silu"
    )
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"The model's activation is {activation!r}; supported: {', '.join(ACTIVATIONS)}.",
            code="RQ202",
        )
    classifier = row.names.names["classifier"] + ".weight"
    biases: set[str] = set()
    if fields.flag("attention_bias"):
        biases |= {"q", "k", "v", "out"}
    if fields.flag("mlp_bias"):
        biases |= {"gate", "up", "down"}
    config = CausalLMConfig(
        architecture=kind,
        vocabulary=fields.integer("vocab_size"),
        width=width,
        hidden=fields.integer("intermediate_size", "n_inner", default=4 * width),
        heads=heads,
        groups=fields.integer("num_key_value_heads", default=heads),
        head_width=head,
        max_length=most,
        layers=read_layers(fields, row, count, head, length(most)),
        epsilon=fields.number(
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
        ),
        activation=ACTIVATIONS[activation],
        biases=frozenset(biases),
        query_scale=1 / math.sqrt(max(head, 1)),
        attention_cap=fields.number("attn_logit_softcapping", default=0.0),
        score_cap=fields.number("final_logit_softcapping", default=0.0),
        is_tied=fields.flag("tie_word_embeddings") or not (says_tied or classifier in tensors),
    )
    guessing = fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0)
    names = leave_out_layers(row.names, range(count, count + guessing))
    return row.adjust(fields, config), names


def choose_settings(fields: Fields, row: ModelRow) -> Fields:
    """Return what a model of an architecture reads.

    Raises:
        ModelError: a setting must be false and is not.
    """
    for name in row.refused:
        if fields.flag(name):
            raise ModelError(
                f"The model has {name!r}, which is not supported.",
                code="RQ202",
            )
    others = {name for other in ARCHITECTURES.values() for name in other.settings}
    own = {name: value for name, value in fields.values.items() if name not in others}
    return Fields(
        {**row.sizes, **own}
        | {name: fields.values.get(name, value) for name, value in row.settings.items()}
    )


def read_layers(
    fields: Fields, row: ModelRow, count: int, head: int, length: int
) -> tuple[LayerConfig, ...]:
    """Read windows, rotary positions and mixers of all layers."""
    window = fields.integer("sliding_window", default=0)
    if not fields.flag("use_sliding_window", default=True):
        window = 0
    types = fields.items(count, "layer_types")
    if types is None:
        types = row.types(fields, count) if window or row.mixers else list_types(0, count)
    turned = row.turned(fields, types, window)
    layers = []
    rotaries: dict[tuple[str, int], Rotary] = {}
    for i, (kind, is_turned) in enumerate(zip(types, turned, strict=True)):
        if kind in row.mixers:
            layers.append(LayerConfig(mixer=row.mixers[kind](fields)))
            continue
        if kind not in LAYER_TYPES:
            raise ModelError(
                f"The model has layers of type {str(kind)[:60]!r}; supported: "
                f"{', '.join([*LAYER_TYPES, *row.mixers])}.",
                code="RQ202",
            )
        width, groups = row.heads(fields, i, kind)
        place = kind, width or head
        if place not in rotaries:
            rotaries[place] = read_rotary(fields, row, kind, width or head, length)
        layers.append(
            LayerConfig(
                rotaries[place] if is_turned else None,
                window if LAYER_TYPES[kind] else 0,
                groups=groups,
                head_width=width,
            )
        )
    return tuple(layers)


def read_rotary(fields: Fields, row: ModelRow, kind: str, head: int, length: int) -> Rotary:
    """Read the rotary positions of layers of one type.

    Since version 5 "rope_parameters" has them all, perhaps by type of layer. Before, "rope_theta"
    and "rope_scaling" had them.
    """
    values = fields.get("rope_scaling", "rope_parameters") or dict(row.rotary)
    if fields.get("rope_scaling") and LAYER_TYPES[kind] and not row.scales_windows:
        values = {}
    if isinstance(values, dict) and isinstance(values.get(kind), dict):
        values = values[kind]
    elif LAYER_TYPES[kind] and fields.get("rope_local_base_freq") is not None:
        values = {"rope_theta": fields.get("rope_local_base_freq")}
    if not isinstance(values, dict):
        raise fields.refuse(("rope_parameters",), values, "a table")
    known = {
        "original_max_position_embeddings": fields.get("max_position_embeddings"),
        "max_position_embeddings": fields.get("max_position_embeddings"),
        "rope_theta": fields.get("rope_theta"),
        "partial_rotary_factor": fields.get("partial_rotary_factor"),
    }
    known |= {name: value for name, value in values.items() if value is not None}
    original = fields.get("original_max_position_embeddings")
    scaling = Fields(
        known if original is None else known | {"original_max_position_embeddings": original}
    )
    # Other architectures turn whole heads, whatever their metadata says.
    is_partial = "partial_rotary_factor" in row.settings
    share = scaling.number("partial_rotary_factor", default=1.0) if is_partial else 1.0
    return make_rotary(scaling.number("rope_theta"), int(head * share), scaling, length)
