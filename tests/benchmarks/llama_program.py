"""A small Llama as a `relax.frontend.nn` module: prefill and decode, with an explicit key-value
cache.

For tests and benchmarks of language models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec

from relayquant.errors import ModelError

#: Added to the mean square of a norm.
EPSILON = 1e-5


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama. The defaults are those of stories260K."""

    width: int = 64
    hidden: int = 172
    layers: int = 5
    heads: int = 8
    groups: int = 4  #: heads of keys and values
    vocabulary: int = 512
    length: int = 512

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape. A weight is (outputs, inputs)."""
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocabulary, self.width)}
        keys = self.head * self.groups
        for i in range(self.layers):
            shapes |= {
                f"layers.{i}.first.weight": (self.width,),
                f"layers.{i}.qkv.weight": (self.width + 2 * keys, self.width),
                f"layers.{i}.out.weight": (self.width, self.width),
                f"layers.{i}.second.weight": (self.width,),
                f"layers.{i}.gate.weight": (self.hidden, self.width),
                f"layers.{i}.down.weight": (self.width, self.hidden),
                f"layers.{i}.up.weight": (self.hidden, self.width),
            }
        return shapes | {"norm.weight": (self.width,)}


class LlamaLayer(nn.Module):
    """Attention and gated feed-forward network of one layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        self.sizes = sizes
        width, hidden, keys = sizes.width, sizes.hidden, sizes.head * sizes.groups
        self.first = nn.RMSNorm(width, -1, EPSILON, bias=False)
        self.qkv = nn.Linear(width, width + 2 * keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.second = nn.RMSNorm(width, -1, EPSILON, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)

    def forward(
        self, x: nn.Tensor, angles: Any, mask: nn.Tensor | None, past: Any
    ) -> tuple[nn.Tensor, Any]:
        """Compute one layer.

        Args:
            x: (1, rows, width).
            past: Keys and values of earlier tokens, (1, seen, groups, head) each, or None.

        Returns:
            The result, and keys and values with those of `x` appended.
        """
        sizes, rows = self.sizes, x.shape[1]
        keys = sizes.head * sizes.groups
        mixed = self.qkv(self.first(x))
        query, key, value = op.split(mixed, [sizes.width, sizes.width + keys], axis=-1)

        def part(values: nn.Tensor, heads: int) -> nn.Tensor:
            return op.reshape(values, (1, rows, heads, sizes.head))

        query, key = (
            rotate(part(v, n), angles) for v, n in ((query, sizes.heads), (key, sizes.groups))
        )
        value = part(value, sizes.groups)
        if past is not None:
            key, value = (
                op.concat([old, new], 1) for old, new in zip(past, (key, value), strict=True)
            )
        times = sizes.heads // sizes.groups
        q = op.permute_dims(query, [0, 2, 1, 3])
        k = op.permute_dims(op.repeat(key, times, 2), [0, 2, 3, 1])
        v = op.permute_dims(op.repeat(value, times, 2), [0, 2, 1, 3])
        score = op.matmul(q, k) * (sizes.head**-0.5)
        score = op.softmax(score if mask is None else score + mask, -1)
        seen = op.reshape(
            op.permute_dims(op.matmul(score, v), [0, 2, 1, 3]), (1, rows, sizes.width)
        )
        x = x + self.out(seen)
        h = self.second(x)
        return x + self.down(op.silu(self.gate(h)) * self.up(h)), (key, value)


def rotate(x: nn.Tensor, angles: tuple[nn.Tensor, nn.Tensor]) -> nn.Tensor:
    """Apply rotary positions to x (1, rows, heads, head). Cosines and sines are (rows, head /
    2).
    """
    _, rows, heads, _ = x.shape
    head = 2 * int(angles[0].shape[-1])
    cos, sin = (op.reshape(part, (1, rows, 1, head // 2, 1)) for part in angles)
    pairs = op.reshape(x, (1, rows, heads, head // 2, 2))
    a, b = op.split(pairs, 2, axis=-1)
    return op.reshape(op.concat([a * cos - b * sin, a * sin + b * cos], -1), (1, rows, heads, head))


class LlamaModule(nn.Module):
    """`prefill` for a text, `decode` for one more token. Embedding and classifier share a weight.

    Both take the cosines and sines of the positions. `prefill` returns the keys and values of every
    layer. `decode` takes and returns them.
    """

    def __init__(self, sizes: LlamaSizes) -> None:
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList([LlamaLayer(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.width, -1, EPSILON, bias=False)

    def prefill(
        self, tokens: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, mask: nn.Tensor
    ) -> tuple[nn.Tensor, list[nn.Tensor]]:
        """Map tokens (1, rows) to scores (1, rows, vocabulary) and the cache.

        `mask` (rows, rows) is added to the attention scores.
        """
        return self.compute(tokens, (cos, sin), mask, [None] * self.sizes.layers)

    def decode(
        self, token: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, past: list[nn.Tensor]
    ) -> tuple[nn.Tensor, list[nn.Tensor]]:
        """Decode a token (1, 1) after `past`: keys and values of each layer, (1, seen, groups,
        head).
        """
        pairs = [past[i : i + 2] for i in range(0, len(past), 2)]
        return self.compute(token, (cos, sin), None, pairs)

    def compute(
        self, tokens: nn.Tensor, angles: Any, mask: nn.Tensor | None, past: list[Any]
    ) -> tuple[nn.Tensor, list[nn.Tensor]]:
        """Compute scores, and the keys and values of every layer."""
        x, cache = self.embedding(tokens), []
        for layer, pair in zip(self.layers, past, strict=True):
            x, pair = layer(x, angles, mask, pair)
            cache += pair
        scores = op.matmul(self.norm(x), op.permute_dims(self.embedding.weight))
        return scores, cache


def export_llama(sizes: LlamaSizes) -> tvm.IRModule:
    """Export the module with functions prefill and decode, for any length.

    Parameters are inputs after the others, with the names of `LlamaSizes.shapes`.
    """
    half = sizes.head // 2
    cache = [spec.Tensor([1, "seen", sizes.groups, sizes.head], "float32")] * (2 * sizes.layers)
    modes = {"param_mode": "plain", "effect_mode": "none"}
    prefill = {
        "tokens": spec.Tensor([1, "rows"], "int32"),
        "cos": spec.Tensor(["rows", half], "float32"),
        "sin": spec.Tensor(["rows", half], "float32"),
        "mask": spec.Tensor(["rows", "rows"], "float32"),
        "$": modes,
    }
    decode = {
        "token": spec.Tensor([1, 1], "int32"),
        "cos": spec.Tensor([1, half], "float32"),
        "sin": spec.Tensor([1, half], "float32"),
        "past": cache,
        "$": modes,
    }
    mod, *_ = LlamaModule(sizes).export_tvm({"prefill": prefill, "decode": decode})
    return mod


def compute_angles(sizes: LlamaSizes, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of `count` positions from `first` on, float32 (count, head / 2)."""
    speed = 10000.0 ** (-np.arange(0, sizes.head, 2) / sizes.head)
    angle = np.arange(first, first + count)[:, None] * speed
    return np.cos(angle).astype("float32"), np.sin(angle).astype("float32")


def make_mask(rows: int) -> np.ndarray:
    """Return a causal mask, float32 (rows, rows). It is added so that no row sees later rows."""
    return np.triu(np.full((rows, rows), -1e9, "float32"), 1)


def draw_weights(sizes: LlamaSizes, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw random weights, scaled so that values neither vanish nor grow."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.ones(shape)
        ).astype("float32")
        for name, shape in sizes.shapes().items()
    }


def read_weights(path: Path) -> tuple[LlamaSizes, dict[str, np.ndarray]]:
    """Read sizes and weights from a llama2.c file.

    The file holds seven int32 (the fields of `LlamaSizes`), then float32: the embedding; norm, q,
    k, v, out, norm, gate, down, up of all layers; the final norm.

    Raises:
        ModelError: the file is too short for its sizes.
    """
    data = path.read_bytes()
    sizes = LlamaSizes(*np.frombuffer(data, "<i4", 7).tolist())
    numbers, at = np.frombuffer(data, "<f4", offset=28), 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        if at > numbers.size:
            raise ModelError(
                f"{path} is too short for the sizes in its header: {sizes}.", code="RQ502"
            )
        return numbers[at - int(np.prod(shape)) : at].reshape(shape).copy()

    width, hidden, layers = sizes.width, sizes.hidden, sizes.layers
    keys = sizes.head * sizes.groups
    weights = {"embedding.weight": take(sizes.vocabulary, width)}
    kinds = {
        "first": (width,), "q": (width, width), "k": (keys, width), "v": (keys, width),
        "out": (width, width), "second": (width,), "gate": (hidden, width),
        "down": (width, hidden), "up": (hidden, width),
    }  # fmt: skip
    stacked = {kind: take(layers, *shape) for kind, shape in kinds.items()}
    for i in range(layers):
        stacked_qkv = [stacked[kind][i] for kind in "qkv"]
        weights[f"layers.{i}.qkv.weight"] = np.concatenate(stacked_qkv)
        for kind in kinds.keys() - {*"qkv"}:
            weights[f"layers.{i}.{kind}.weight"] = stacked[kind][i]
    return sizes, weights | {"norm.weight": take(width)}
