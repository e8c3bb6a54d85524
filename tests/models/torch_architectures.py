"""Small networks of PyTorch, random weights: each of another architecture that people deploy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def block(inputs: int, outputs: int, kernel: int = 3, act: type = nn.ReLU, **attrs) -> nn.Module:
    """Convolution, batch norm, activation; maps keep their size at stride 1."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **attrs)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


class LastStep(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, layer: type) -> None:
        super().__init__()
        self.layer, self.head = layer(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class UNet(nn.Module):
    """Down, up by transposed convolutions, skips by concat."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.bottom = block(3, 16), block(16, 32)
        self.up, self.right = nn.ConvTranspose2d(32, 16, 2, 2), block(32, 16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        left = self.left(x)
        up = self.up(self.bottom(functional.max_pool2d(left, 2)))
        return self.head(self.right(torch.cat([up, left], 1)))


class VisionTransformer(nn.Module):
    """Patches, class token, two encoder layers."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.encoder(x)[:, 0])


class Language(nn.Module):
    """Embedding, causal attention, feed forward with GELU, logits of every position."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(300, width), 4
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.logits = nn.Linear(width, 300)

    def forward(self, ids):
        x = self.words(ids)
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return self.logits(x + self.feed(self.norms[1](x)))


class Detector(nn.Module):
    """Split and concat of channels, pooled pyramid, nearest upsampling, two heads as one list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side = block(3, 32, act=nn.SiLU, stride=2), block(16, 16, act=nn.SiLU)
        self.down = block(48, 32, act=nn.SiLU, stride=2)
        self.squeeze, self.join = block(64, 32, 1, nn.SiLU), block(80, 32, 1, nn.SiLU)
        self.heads = nn.ModuleList(nn.Conv2d(32, 24, 1) for _ in range(2))

    def forward(self, x):
        left, right = self.stem(x).chunk(2, 1)
        fine = torch.cat([left, right, right + self.side(right)], 1)
        coarse = self.down(fine)
        coarse = self.squeeze(torch.cat([coarse, functional.max_pool2d(coarse, 5, 1, 2)], 1))
        up = functional.interpolate(coarse, scale_factor=2, mode="nearest")
        maps = self.join(torch.cat([up, fine], 1)), coarse
        rows = [head(x).flatten(2) for head, x in zip(self.heads, maps, strict=True)]
        box, score = torch.cat(rows, 2).transpose(1, 2).split([4, 20], -1)
        return torch.cat([box.sigmoid() * 64, score.sigmoid()], -1)


def super_resolution() -> nn.Module:
    """PReLU with one slope and with one per channel, pixel shuffle."""
    by_channel = nn.PReLU(16)
    nn.init.uniform_(by_channel.weight, 0.1, 0.4)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.PReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        by_channel,
        nn.Conv2d(16, 9, 3, padding=1),
        nn.PixelShuffle(3),
    )


#: name -> network, shape of its input
ARCHITECTURES = {
    "lstm": (lambda: LastStep(nn.LSTM), (1, 6, 16)),
    "gru": (lambda: LastStep(nn.GRU), (1, 6, 16)),
    "u-net": (UNet, (1, 3, 32, 32)),
    "vision transformer": (VisionTransformer, (1, 3, 32, 32)),
    "language model": (Language, (1, 12)),
    "detector": (Detector, (1, 3, 32, 32)),
    "super resolution": (super_resolution, (1, 1, 20, 20)),
}
