"""Models that only run: control flow on what is computed, state in Python."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    """conv - bn - relu - conv - bn - add in place - relu, as torchvision writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class EarlyExit(nn.Module):
    """A small ResNet that stops early where it is sure, and refines what is large as often as it
    takes; it remembers how often in a list.
    """

    def __init__(self, channels: int = 16, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.refine, self.shrink = Residual(channels), nn.Conv2d(channels, channels, 1)
        self.early, self.late = nn.Linear(channels, 5), nn.Linear(channels, 5)
        self.counts: list[int] = []

    def forward(self, x):
        x = self.body(torch.relu(self.stem(x)))
        if x.mean() < 0.5:
            self.counts.append(-1)
            return self.early(x.mean((2, 3)))
        count = 0
        while x.amax() > 1 and count < 6:
            x = torch.relu(self.shrink(self.refine(x)))
            count += 1
        self.counts.append(count)
        return self.late(x.mean((2, 3)))


class Writer(nn.Module):
    """Reads tokens one after the other until token 0 into the state of a GRU cell; the last state
    stays in Python.
    """

    def __init__(self, hidden: int = 32, tokens: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, tokens)
        self.last: torch.Tensor | None = None

    def forward(self, sequence):
        state = torch.zeros(1, self.cell.hidden_size)
        scores = []
        for token in sequence:
            state = self.cell(self.embed(token)[None], state)
            scores.append(self.out(state))
            if token.item() == 0:
                break
        self.last = state
        return torch.cat(scores)


def seed(kind, number=0):
    """A model of that kind, with weights and statistics as after training, from a seed."""
    torch.manual_seed(number)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.3, 1.0)
    return model.eval()


def draw_images(count, number=0):
    """Images of different strength, so that calls go different ways."""
    generator = torch.Generator().manual_seed(number)
    strengths = torch.tensor([0.2, 1.0, 2.0, 4.0, 7.0])
    return [torch.randn(1, 3, 8, 8, generator=generator) * strengths[i % 5] for i in range(count)]


def draw_sequences(count, number=0):
    """Token sequences that end at different places."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(0, 12, (10,), generator=generator) for _ in range(count)]


def sqnr(expected, got):
    """dB of all outputs together."""
    signal = sum(float((x.double() ** 2).sum()) for x in expected)
    noise = sum(float(((x - y).double() ** 2).sum()) for x, y in zip(expected, got, strict=True))
    return 10 * float(torch.log10(torch.tensor(signal / max(noise, 1e-30), dtype=torch.float64)))
