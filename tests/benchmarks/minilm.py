"""MiniLM-L6 in PyTorch, read from a folder with `model.safetensors` and `vocab.txt`, and texts of
64 tokens: the docstrings of Python's own library and the pages of docs/, cut and shuffled.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

PAGES = Path(__file__).resolve().parents[2] / "docs"
LENGTH, WIDTH, HEADS, LAYERS = 64, 384, 12, 6
FIRST, LAST, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"

Tensors = Mapping[str, torch.Tensor]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The float32 tensors of a file of safetensors: the length of a header in JSON, the header,
    then all values.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if entry.get("dtype") == "F32":
            first, end = (start + at for at in entry["data_offsets"])
            values = np.frombuffer(data[first:end], "<f4").reshape(entry["shape"])
            found[name] = torch.tensor(values)
    return found


class Affine(nn.Module):
    """A weight and a bias by their name."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensors[f"{name}.weight"])
        self.bias = nn.Parameter(tensors[f"{name}.bias"])


class Linear(Affine):
    """x by the weight, and the bias"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Norm(Affine):
    """The layer norm of rows"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-12)


class Block(nn.Module):
    """Attention and a product of two layers, each normed behind its sum."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        super().__init__()
        attention = f"{name}.attention"
        self.query, self.key, self.value, self.out = (
            Linear(tensors, f"{attention}.{each}")
            for each in ("self.query", "self.key", "self.value", "output.dense")
        )
        self.first = Norm(tensors, f"{attention}.output.LayerNorm")
        self.up = Linear(tensors, f"{name}.intermediate.dense")
        self.down = Linear(tensors, f"{name}.output.dense")
        self.second = Norm(tensors, f"{name}.output.LayerNorm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(values: torch.Tensor) -> torch.Tensor:
            return values.reshape(-1, LENGTH, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

        query, key, value = part(self.query(x)), part(self.key(x)), part(self.value(x))
        score = query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5
        mixed = (torch.softmax(score, -1) @ value).permute(0, 2, 1, 3).reshape(-1, LENGTH, WIDTH)
        x = self.first(x + self.out(mixed))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class MiniLm(nn.Module):
    """ids (n, 64) int64, none of them padding -> embeddings (n, 384) of length 1"""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        table = "embeddings"
        self.words = nn.Parameter(tensors[f"{table}.word_embeddings.weight"])
        places = tensors[f"{table}.position_embeddings.weight"][:LENGTH]
        self.places = nn.Parameter(places + tensors[f"{table}.token_type_embeddings.weight"][0])
        self.norm = Norm(tensors, f"{table}.LayerNorm")
        self.blocks = nn.ModuleList(Block(tensors, f"encoder.layer.{i}") for i in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words[ids] + self.places)
        for block in self.blocks:
            x = block(x)
        mean = x.mean(1)
        return mean / mean.norm(dim=-1, keepdim=True)


def cut_words(text: str, vocabulary: Mapping[str, int]) -> Iterator[int]:
    """Tokens of a text in lower case: of each word the longest that is known, from its beginning on
    (WordPiece).
    """
    for word in re.findall(r"[a-z0-9]+|[^\sa-z0-9]", text.lower()):
        parts, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                token = vocabulary.get(("##" if start else "") + word[start:end])
                if token is not None:
                    parts.append(token)
                    start = end
                    break
            else:
                parts = [vocabulary[UNKNOWN]]
                break
        yield from parts


def draw_texts(folder: Path, count: int) -> np.ndarray:
    """ids (count, 64) int64 of texts in a random order."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: i for i, word in enumerate(words)}
    library = Path(sysconfig.get_path("stdlib"))
    texts = [
        doc
        for path in sorted(library.glob("*.py"))
        for doc in re.findall(r'"""(.*?)"""', path.read_text("utf-8", "ignore"), re.DOTALL)
    ]
    texts += [path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))]
    ids, own = list(cut_words("\n".join(texts), vocabulary)), LENGTH - 2
    rows = [
        [vocabulary[FIRST], *ids[i : i + own], vocabulary[LAST]]
        for i in range(0, len(ids) - own, own)
    ]
    return np.array(rows, "int64")[np.random.default_rng(0).permutation(len(rows))[:count]]


def export(folder: Path, path: Path) -> None:
    """Write the model of a folder as ONNX: ids -> embeddings, any number of texts."""
    model = MiniLm(read_tensors(folder / "model.safetensors")).eval()
    torch.onnx.export(
        model,
        (torch.zeros((1, LENGTH), dtype=torch.int64),),
        str(path),
        input_names=["ids"],
        output_names=["embeddings"],
        opset_version=17,
        dynamo=False,
    )
