"""GPT-OSS with experts in MXFP4, tiny and random: scores of `transformers` against ours, of the
folder that it was published as and of a GGUF file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import relayquant as rq

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[1] / "formats" / "readers"))
from causal_lm_runs import run_chunks  # noqa: E402
from llama_files import write_safetensors  # noqa: E402

LAYERS, EXPERTS, HEADS = 3, 6, 4
#: Sizes of what is multiplied are whole groups of 32.
CONFIG = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 6,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
OPTIONS = rq.CausalLMOptions(max_length=32, cache="float32")
MXFP4 = gguf.GGMLQuantizationType.MXFP4
#: Name of a tensor in GGUF -> its name in transformers. Those of a layer are without its number.
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.router",
}  # fmt: skip


def draw_experts(rng, outputs, inputs):
    """Codes of floats of 4 bits, (E, outputs, inputs / 32, 16), and their exponents."""
    shape = (EXPERTS, outputs, inputs // 32)
    codes = rng.integers(0, 256, (*shape, 16)).astype("uint8")
    return codes, rng.integers(120, 124, shape).astype("uint8")


def widen(codes, exponents):
    """The values, (E, outputs, inputs), by the package gguf: its blocks keep two halves apart."""
    low, high = codes & 15, codes >> 4
    values = np.stack([low, high], -1).reshape(*codes.shape[:-1], 32)
    halves = values[..., :16] | values[..., 16:] << 4
    blocks = np.concatenate([exponents[..., None], halves], -1)
    rows = blocks.reshape(*codes.shape[:2], -1)
    return rows, gguf.quants.dequantize(rows, MXFP4)


@pytest.fixture(scope="module")
def model():
    """A model whose experts are floats of 4 bits, and what they are stored as, by name."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**CONFIG)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    rng, stored = np.random.default_rng(0), {}
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.endswith("_proj") and "experts" in name:
                packed = draw_experts(rng, value.shape[2], value.shape[1])
                stored[name] = packed
                value.copy_(torch.tensor(widen(*packed)[1]).swapaxes(1, 2))
            else:
                size = value.shape[-1] ** 0.5 if value.ndim > 1 else 5
                value.copy_(torch.randn(value.shape) / size + (name.endswith("norm.weight")))
    return network, stored


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(3, 96, (1, 24))


def list_floats(network, stored):
    """What is not in 4 bits, by name."""
    return {
        name: value.detach().numpy()
        for name, value in network.state_dict().items()
        if name not in stored
    }


def check(source, model, tokens):
    """Products with experts round their data to 8 bits, so scores are not equal."""
    with torch.no_grad():
        want = model[0](torch.tensor(tokens)).logits.numpy()
    pair = rq.load(source, causal_lm=OPTIONS)
    rows = [row for row in rq.ledger(pair[0]).rows if row.name.startswith("decode")]
    assert {row.dtype for row in rows} == {"int4"}
    assert len(rows) == 3 * LAYERS
    found = run_chunks(*pair, tokens, (9, 8, 1, 1, 4, 1))
    error = np.sqrt(np.mean((found - want) ** 2) / np.mean(want**2))
    assert error < 0.02
    return pair


def write_folder(folder, model):
    network, stored = model
    tensors = list_floats(network, stored)
    for name, (codes, exponents) in stored.items():
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
    dtypes = dict.fromkeys(
        (name for name in tensors if name.endswith(("_blocks", "_scales"))), "U8"
    )
    write_safetensors(folder / "model.safetensors", tensors, dtypes)
    values = network.config.to_dict() | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_load__folder_in_mxfp4(tmp_path, model, tokens):
    mod, _ = check(write_folder(tmp_path, model), model, tokens)
    exe = rq.compile(rq.load(tmp_path, causal_lm=OPTIONS), precision="float32")
    executor, places = rq.Executor(exe), np.zeros(1, "int32")
    picked = np.arange(23, dtype="int32")[None]
    first = executor.run("prefill", [tokens[:, :23].astype("int32"), places, picked])[0]
    second = executor.run("decode", [tokens[:, 23:].astype("int32"), places + 23])[0]
    found = run_chunks(mod, rq.load(tmp_path, causal_lm=OPTIONS)[1], tokens, (23, 1))
    compiled = np.concatenate([first, second], 1)
    np.testing.assert_allclose(compiled, found, rtol=0, atol=1e-4 * np.abs(found).max())


def test_load__folder_with_scales_of_another_shape(tmp_path, model):
    network, stored = model
    name = next(iter(stored))
    cut = {**stored, name: (stored[name][0], stored[name][1][:, 1:])}
    with pytest.raises(rq.ModelError, match=rf"no tensor '{name}'"):
        rq.load(write_folder(tmp_path, (network, cut)))


def write_gguf(path, model):
    network, stored = model
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    config, floats = network.config, list_floats(network, stored)
    numbers = {
        "block_count": LAYERS, "context_length": 64, "embedding_length": 64,
        "feed_forward_length": 96, "expert_feed_forward_length": 96, "attention.head_count": HEADS,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
        "attention.sliding_window": 6, "expert_count": EXPERTS, "expert_used_count": 2,
        "rope.scaling.original_context_length": 16,
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"gpt-oss.{key}", number)
    writer.add_string("gpt-oss.rope.scaling.type", "yarn")
    writer.add_float32("gpt-oss.rope.scaling.factor", 4.0)
    writer.add_float32("gpt-oss.rope.freq_base", 150000.0)
    writer.add_float32("gpt-oss.attention.layer_norm_rms_epsilon", config.rms_norm_eps)

    def add(name, prefix=""):
        for suffix in ("weight", "bias"):
            if f"{prefix}{NAMES[name]}.{suffix}" in floats:
                own = f"blk.{layer}.{name}" if prefix else name
                writer.add_tensor(f"{own}.{suffix}", floats[f"{prefix}{NAMES[name]}.{suffix}"])

    layer = 0
    for name in ("token_embd", "output_norm", "output"):
        add(name)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in list(NAMES)[3:]:
            add(name, prefix)
        writer.add_tensor(f"blk.{layer}.attn_sinks.weight", floats[f"{prefix}self_attn.sinks"])
        for name, part, rows in (
            ("gate", "gate_up", slice(0, None, 2)), ("up", "gate_up", slice(1, None, 2)),
            ("down", "down", slice(None)),
        ):  # fmt: skip
            own = f"{prefix}mlp.experts.{part}_proj"
            blocks = widen(*stored[own])[0][:, rows]
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", blocks, raw_dtype=MXFP4)
            bias = floats[f"{own}_bias"][:, rows]
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.bias", np.ascontiguousarray(bias))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_load__gguf(tmp_path, model, tokens):
    check(write_gguf(tmp_path / "m.gguf", model), model, tokens)
