"""Scores of the next token -> the token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relayquant.base.arguments import check_fields
from relayquant.errors import ConfigError

#: How many of the likeliest tokens are sorted first to find those that `top_p` keeps.
FIRST_SORTED = 64


@check_fields
@dataclass(frozen=True)
class TokenSampling:
    """How the next token is chosen. The default takes the likeliest one (greedy).

    Attributes:
        temperature: Scores are divided by it. 0: greedy. 1: as likely as the model says.
        top_k: Choose among that many of the likeliest tokens. 0: all.
        top_p: Then choose among the fewest tokens whose probabilities add up to this.
        seed: The same seed and prompt give the same text.

    Raises:
        ConfigError: a value is out of range, or `top_k` or `top_p` is set while the temperature is
            0, where they change nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_right, allowed in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not is_right:
                raise ConfigError(
                    f"TokenSampling: {name} is {getattr(self, name)}; allowed: {allowed}.",
                    code="RQ101",
                )
        if self.temperature == 0 and (self.top_k != 0 or self.top_p != 1):
            raise ConfigError(
                f"TokenSampling: temperature is 0, which takes the likeliest token, so top_k="
                f"{self.top_k} and top_p={self.top_p} change nothing. Set a temperature above 0, "
                "such as 0.8, or leave them out.",
                code="RQ101",
            )


def choose_token(scores: np.ndarray, sampling: TokenSampling, rng: np.random.Generator) -> int:
    """Choose a token by its score, float32 (vocabulary,)."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    tokens, weights = find_candidates(scores, sampling)
    sums = np.cumsum(weights)
    return int(tokens[np.searchsorted(sums[:-1], rng.random() * sums[-1], side="right")])


def find_candidates(scores: np.ndarray, sampling: TokenSampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to choose from, and how likely each is but for a factor, float64."""
    top = scores.max()
    with np.errstate(over="ignore"):  # A tiny temperature gives -inf, whose weight is 0.
        weights = np.exp((scores.astype("float64") - top) / sampling.temperature)
    tokens = np.arange(len(weights))
    if 0 < sampling.top_k < len(weights):
        tokens = rank(weights, sampling.top_k)
        weights = weights[tokens]
    if sampling.top_p == 1:
        return tokens, weights
    # To sort a whole vocabulary takes as long as a small model.
    wanted, count = sampling.top_p * weights.sum(), FIRST_SORTED
    while True:
        count = min(count, len(weights))
        order = rank(weights, count)
        sums = np.cumsum(weights[order])
        if sums[-1] >= wanted or count == len(weights):
            kept = order[: np.searchsorted(sums, wanted) + 1]
            return tokens[kept], weights[kept]
        count *= 8


def rank(weights: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the `count` largest weights, the largest first."""
    places = np.argpartition(weights, len(weights) - count)[len(weights) - count :]
    return places[np.argsort(-weights[places], kind="stable")]
