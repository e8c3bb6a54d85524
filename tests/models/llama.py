"""A Llama in PyTorch, read from the format of llama2.c: seven int32 (width, hidden width, layers,
heads, heads of keys and values, vocabulary, length), then the weights as float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn


class Norm(nn.Module):
    """x / sqrt(mean(x^2)) * weight"""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


def make_linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


class Block(nn.Module):
    """One layer; `weights` are norm, q, k, v, o, norm, w1, w2, w3."""

    def __init__(self, weights: list[torch.Tensor], heads: int, groups: int) -> None:
        super().__init__()
        self.first, self.second = Norm(weights[0]), Norm(weights[5])
        self.query, self.key, self.value, self.out = map(make_linear, weights[1:5])
        self.gate, self.down, self.up = map(make_linear, weights[6:])
        self.heads, self.groups = heads, groups

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        size = width // self.heads

        def rotate(y: torch.Tensor, heads: int) -> torch.Tensor:
            pairs = y.reshape(n, length, heads, size // 2, 2)
            a, b = pairs[..., 0], pairs[..., 1]
            both = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
            return both.reshape(n, length, heads, size).transpose(1, 2)

        def repeat(y: torch.Tensor) -> torch.Tensor:
            return y.repeat_interleave(self.heads // self.groups, 1)

        h = self.first(x)
        query, key = rotate(self.query(h), self.heads), repeat(rotate(self.key(h), self.groups))
        value = repeat(self.value(h).reshape(n, length, self.groups, size).transpose(1, 2))
        score = query @ key.transpose(2, 3) / size**0.5
        later = torch.full((length, length), -1e9).triu(1)
        mixed = torch.softmax(score + later, -1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        h = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """tokens (n, length) int64 -> scores of the next token (n, length, vocabulary)"""

    def __init__(self, table: torch.Tensor, blocks: list[Block], norm: torch.Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table)
        self.blocks, self.norm = nn.ModuleList(blocks), Norm(norm)
        self.classifier = make_linear(table.clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        block = self.blocks[0]
        size = x.shape[-1] // block.heads
        speed = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * speed
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.classifier(self.norm(x))

    @classmethod
    def read(cls, path: Path) -> Llama:
        data = path.read_bytes()
        width, hidden, layers, heads, groups, vocabulary, _ = np.frombuffer(data, "<i4", 7).tolist()
        numbers = torch.tensor(np.frombuffer(data, "<f4", offset=28))
        at = 0

        def take(*shape: int) -> torch.Tensor:
            nonlocal at
            count = int(np.prod(shape))
            at += count
            return numbers[at - count : at].reshape(shape).clone()

        table, keys = take(vocabulary, width), width // heads * groups
        shapes = [(width,), (width, width), (keys, width), (keys, width), (width, width)]
        shapes += [(width,), (hidden, width), (width, hidden), (hidden, width)]
        stacked = [take(layers, *shape) for shape in shapes]
        blocks = [Block([part[k] for part in stacked], heads, groups) for k in range(layers)]
        return cls(table, blocks, take(width))


def draw_text(model: Llama, length: int, seed: int) -> np.ndarray:
    """Tokens (1, length) int64: a text that begins with token 1, drawn by the model."""
    rng, tokens = np.random.default_rng(seed), [1]
    with torch.no_grad():
        while len(tokens) < length:
            share = torch.softmax(model(torch.tensor([tokens]))[0, -1].double(), -1).numpy()
            tokens.append(int(rng.choice(len(share), p=share / share.sum())))
    return np.array([tokens], "int64")
