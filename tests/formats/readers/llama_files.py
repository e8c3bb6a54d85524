"""A tiny random Llama, also with experts (Mixtral): its files, and its scores as numpy computes
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, GROUPS, LENGTH = 48, 64, 96, 2, 4, 2, 40
HEAD = WIDTH // HEADS
BASE, EPSILON = 500.0, 1e-5
#: Experts of a mixture, those that a row chooses, and elements inside each.
EXPERTS, CHOSEN, INNER = 3, 2, 64

CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "max_position_embeddings": LENGTH, "rms_norm_eps": EPSILON,
    "hidden_act": "silu", "rope_theta": BASE, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip

#: Name in transformers -> name in GGUF.
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{
        f"model.layers.{i}.{name}.weight": f"blk.{i}.{short}.weight"
        for i in range(LAYERS)
        for name, short in LAYER_NAMES.items()
    },
}


def draw_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by the names of transformers."""
    rng = np.random.default_rng(seed)
    sizes = {
        "q_proj": (WIDTH, WIDTH), "o_proj": (WIDTH, WIDTH),
        "k_proj": (GROUPS * HEAD, WIDTH), "v_proj": (GROUPS * HEAD, WIDTH),
        "gate_proj": (HIDDEN, WIDTH), "up_proj": (HIDDEN, WIDTH),
        "down_proj": (WIDTH, HIDDEN), "embed_tokens": (VOCABULARY, WIDTH),
        "lm_head": (VOCABULARY, WIDTH),
    }  # fmt: skip
    weights = {}
    for name in NAMES:
        shape = sizes.get(name.split(".")[-2])
        drawn = rng.normal(size=shape or WIDTH) / (np.sqrt(shape[-1]) if shape else 5)
        weights[name] = (drawn if shape else 1 + drawn).astype("float32")
    return weights


def draw_experts(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights with experts instead of the feed-forward networks."""
    rng = np.random.default_rng(seed)
    weights = {name: value for name, value in draw_weights().items() if ".mlp." not in name}
    for i in range(LAYERS):
        place = f"model.layers.{i}.mlp."
        shapes = {"gate": (EXPERTS, WIDTH)}
        for e in range(EXPERTS):
            shapes |= {f"experts.{e}.{part}": (INNER, WIDTH) for part in ("gate_proj", "up_proj")}
            shapes |= {f"experts.{e}.down_proj": (WIDTH, INNER)}
        for name, shape in shapes.items():
            drawn = rng.normal(size=shape) / np.sqrt(shape[-1])
            weights[f"{place}{name}.weight"] = drawn.astype("float32")
    return weights


def stack_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Name in GGUF -> the router and the weights of all experts."""
    found = {}
    for i in range(LAYERS):
        place = f"model.layers.{i}.mlp."
        found[f"blk.{i}.ffn_gate_inp.weight"] = weights[f"{place}gate.weight"]
        for part in ("gate", "up", "down"):
            each = [weights[f"{place}experts.{e}.{part}_proj.weight"] for e in range(EXPERTS)]
            found[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(each)
    return found


def mix_experts(w: dict[str, np.ndarray], place: str, h: np.ndarray) -> np.ndarray:
    """What the experts of each row compute, times their shares among the chosen."""
    scores = np.exp(h @ w[f"{place}gate.weight"].T)
    found = np.zeros_like(h)
    for row, own in enumerate(scores):
        best = np.argsort(-own)[:CHOSEN]
        for e in best:
            gate, up, down = (
                w[f"{place}experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            inner = gate @ h[row]
            inner = inner / (1 + np.exp(-inner)) * (up @ h[row])
            found[row] += own[e] / own[best].sum() * (down @ inner)
    return found


def compute_scores(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Scores of every row of a sequence (rows,), float64 (rows, vocabulary)."""
    w = {name: value.astype("float64") for name, value in weights.items()}
    rows = len(tokens)
    angles = np.arange(rows)[:, None, None] * BASE ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name]

    def turn(x):
        a, b = np.split(x.reshape(rows, -1, HEAD), 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        of = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]  # noqa: E731
        h = norm(x, f"model.layers.{i}.input_layernorm.weight")
        q, k = turn(h @ of("self_attn.q_proj").T), turn(h @ of("self_attn.k_proj").T)
        v = (h @ of("self_attn.v_proj").T).reshape(rows, GROUPS, HEAD)
        k, v = (np.repeat(each, HEADS // GROUPS, 1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
        scores += np.triu(np.full((rows, rows), -np.inf), 1)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", share, v).reshape(rows, WIDTH) @ of("self_attn.o_proj").T
        h = norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
        if f"model.layers.{i}.mlp.gate.weight" in w:
            x = x + mix_experts(w, f"model.layers.{i}.mlp.", h)
            continue
        gate, up = h @ of("mlp.gate_proj").T, h @ of("mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ of("mlp.down_proj").T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def pair_rows(weight: np.ndarray) -> np.ndarray:
    """Rows of q or k as llama.cpp stores them: halves of a head become pairs."""
    rows, columns = weight.shape
    return weight.reshape(rows // HEAD, 2, HEAD // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@dataclass(frozen=True)
class GgufFile:
    """A file that the package's writer wrote, and its weights by the names of transformers."""

    path: Path
    weights: dict[str, np.ndarray]


def write_gguf(
    path: Path,
    kinds: dict[str, str] | None = None,
    extra: dict[str, tuple[np.ndarray, Any]] | None = None,
    *,
    has_experts: bool = False,
    **metadata: float,
) -> GgufFile:
    """Write the model as GGUF.

    Args:
        kinds: Part of a name in GGUF -> kind of blocks ("Q4_0"). Others are float32.
        extra: Name -> blocks and their type, which replace a tensor.
        has_experts: Whether it is the model of `draw_experts`.
        metadata: Numbers that replace others: block_count=3.
    """
    import gguf

    weights = draw_experts() if has_experts else draw_weights()
    stacks = stack_experts(weights) if has_experts else {}
    if has_experts:
        metadata = {"expert_count": EXPERTS, "expert_used_count": CHOSEN, **metadata}
        metadata = {"feed_forward_length": INNER, **metadata}
    writer = gguf.GGUFWriter(str(path), "llama")
    numbers = {
        "block_count": LAYERS, "context_length": LENGTH, "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN, "attention.head_count": HEADS,
        "attention.head_count_kv": GROUPS, "rope.dimension_count": HEAD, **metadata,
    }  # fmt: skip
    for key, number in numbers.items():
        adders = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}
        adders[type(number)](key if key.startswith("split") else f"llama.{key}", number)
    writer.add_float32("llama.rope.freq_base", BASE)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", EPSILON)
    for short, stack in stacks.items():
        kind = next((kind for part, kind in (kinds or {}).items() if part in short), None)
        if kind is None:
            writer.add_tensor(short, stack)
        else:
            form = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(short, gguf.quants.quantize(stack, form), raw_dtype=form)
    for name, short in NAMES.items():
        if name not in weights:
            continue
        weight = weights[name]
        if short in (extra or {}):
            blocks, form = (extra or {})[short]
            writer.add_tensor(short, blocks, raw_dtype=form)
            continue
        kind = next((kind for part, kind in (kinds or {}).items() if part in short), None)
        if kind is None:
            writer.add_tensor(short, pair_rows(weight) if needs_pairs(short) else weight)
            continue
        form = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(weight, form)
        weights[name] = gguf.quants.dequantize(blocks, form)
        stored = pair_rows(weight) if needs_pairs(short) else weight
        writer.add_tensor(short, gguf.quants.quantize(stored, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path, weights)


def needs_pairs(short: str) -> bool:
    return ".attn_q." in short or ".attn_k." in short


def write_folder(
    folder: Path,
    tensors: dict[str, np.ndarray],
    *,
    files: int = 1,
    dtypes: dict[str, str] | None = None,
    **config: object,
) -> Path:
    """Write config.json and safetensors files. uint16 arrays are bits of bfloat16. `dtypes` names
    the dtypes of tensors that numpy has no dtype for.
    """
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtypes or {})
        return folder
    places = {}
    for i in range(files):
        name = f"model-{i}.safetensors"
        own = dict(list(tensors.items())[i::files])
        write_safetensors(folder / name, own)
        places |= dict.fromkeys(own, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], dtypes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write one file, as https://github.com/huggingface/safetensors describes it."""
    kinds = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int64": "I64"}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        dtype = dtypes.get(name) or kinds[str(array.dtype)]
        *outer, last = array.shape
        header[name] = {
            "dtype": dtype,
            "shape": [*outer, 2 * last if dtype == "F4" else last],  # two values in a byte
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    body = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


#: Text of each token. The first one ends a text.
TOKEN_TEXTS = ["</s>", *"abcdefghijklmnopqrstuvwxyz .,!?0123456789'-:;()"][:VOCABULARY]


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json with a token for each character."""
    import tokenizers

    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: i for i, text in enumerate(TOKEN_TEXTS)}, [])
    )
    core.add_special_tokens(TOKEN_TEXTS[:1])
    core.decoder = tokenizers.decoders.Fuse()
    core.save(str(folder / "tokenizer.json"))
    return folder
