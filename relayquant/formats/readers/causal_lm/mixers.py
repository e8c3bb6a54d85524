"""Layers that keep a state of their own instead of the keys and values of all tokens.

A mixer says what its layer has: tensors, products, and state. `mixing` computes it. Its state has
read the tokens before the next position, each once and in order. So it can only go on, or begin
anew at position 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from relayquant.errors import ModelError, format_count

#: Most rows of a convolution, and most elements of a state, that are believed of a file.
MOST_KERNEL, MOST_STATE = 64, 1 << 31
#: Parts of latent attention that have a matrix for each head.
LATENT = ("latent_keys", "latent_values")
#: A tensor of a source -> the parts that it consists of, and the rows of each.
Joined = Mapping[str, Mapping[str, np.ndarray]]


class Mixer(ABC):
    """What a layer has instead of attention."""

    @abstractmethod
    def list_products(self, width: int) -> Mapping[str, tuple[int, int]]:
        """Return part -> (outputs, inputs) of the matrices that all rows share."""

    @abstractmethod
    def list_constants(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of what stays in float: "conv.weight"."""

    @property
    @abstractmethod
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The products, those of the same data together."""

    @abstractmethod
    def list_states(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of the state of one sequence, float32."""

    def list_joined(self) -> Joined:
        """Return what sources may have as one tensor, by rows that take turns."""
        return {}


@dataclass(frozen=True)
class ShortConvolution(Mixer):
    """A short convolution between two gates (LFM2).

    a, b, c = conv_in(h)

    y[t] = conv_out(b[t] * sum over k of conv[:, k] * (a * c)[t - kernel + 1 + k])

    The state has the last kernel - 1 rows of a * c.

    Attributes:
        kernel: Rows that a result depends on.
        has_bias: Whether the convolution adds a bias.
    """

    kernel: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_kernel(self.kernel)

    def list_products(self, width: int) -> Mapping[str, tuple[int, int]]:
        return {"conv_in": (3 * width, width), "conv_out": (width, width)}

    def list_constants(self, width: int) -> Mapping[str, tuple[int, ...]]:
        biases = {"conv.bias": (width,)} if self.has_bias else {}
        return {"conv.weight": (width, self.kernel), **biases}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return (("conv_in",), ("conv_out",))

    def list_states(self, width: int) -> Mapping[str, tuple[int, ...]]:
        return {"rows": (self.kernel - 1, width)}


@dataclass(frozen=True)
class DeltaNet(Mixer):
    """A gated delta net (Qwen3-Next, Qwen3.5): a matrix for each head instead of keys and values.

    q, k, v = silu(convolution(delta_in(h))), as rows of heads; q and k are normalized

    decay = exp(delta_rate * softplus(delta_decay(h) + delta_shift))

    y = qnn.gated_delta(q, k, v, decay, sigmoid(delta_strength(h)), memory)

    result = delta_out(rms_norm(y) * silu(delta_gate(h)))

    Attributes:
        key_heads, key_width: Heads of queries and keys, and their width.
        value_heads, value_width: Heads of values, and their width.
        kernel: Rows that a result of the convolution depends on.
        is_tiled: Whether value head h reads key head h % key_heads, see `qnn.gated_delta`.
    """

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    kernel: int
    is_tiled: bool = False

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        sizes = (self.key_heads, self.key_width, self.value_heads, self.value_width)
        if not all(1 <= size < MOST_STATE for size in sizes) or self.value_heads % self.key_heads:
            raise ModelError(
                f"A layer of the model has {format_count(self.value_heads, 'head')} of values of "
                f"width {self.value_width} and {self.key_heads} of keys of width "
                f"{self.key_width}; allowed: numbers from 1 on, and a divisor of the first.",
                code="RQ204",
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values."""
        keys = self.key_heads * self.key_width
        return keys, keys, self.value_heads * self.value_width

    def list_products(self, width: int) -> Mapping[str, tuple[int, int]]:
        return {
            "delta_in": (sum(self.sizes), width),
            "delta_gate": (self.sizes[2], width),
            "delta_strength": (self.value_heads, width),
            "delta_decay": (self.value_heads, width),
            "delta_out": (width, self.sizes[2]),
        }

    def list_constants(self, width: int) -> Mapping[str, tuple[int, ...]]:
        return {
            "delta_conv.weight": (sum(self.sizes), self.kernel),
            "delta_rate.weight": (self.value_heads,),
            "delta_shift.bias": (self.value_heads,),
            "delta_gain.weight": (self.value_width,),
        }

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return (("delta_in", "delta_gate", "delta_strength", "delta_decay"), ("delta_out",))

    def list_states(self, width: int) -> Mapping[str, tuple[int, ...]]:
        return {
            "rows": (self.kernel - 1, sum(self.sizes)),
            "memory": (self.value_heads, self.key_width, self.value_width),
        }

    def list_joined(self) -> Joined:
        """Qwen3-Next has queries, keys, values and gates of one key head after the other."""
        share = self.value_heads // self.key_heads
        values = share * self.value_width
        q, k, v, gate = take_turns((self.key_width, self.key_width, values, values), self.key_heads)
        strength, decay = take_turns((share, share), self.key_heads)
        return {
            "delta_in_gate": {"delta_in": np.concatenate([q, k, v]), "delta_gate": gate},
            "delta_strength_decay": {"delta_strength": strength, "delta_decay": decay},
        }


@dataclass(frozen=True)
class LatentAttention:
    """Attention to one latent vector of each token, from which all heads make keys and values
    (MLA; DeepSeek-V2, arXiv 2405.04434).

    c, r = latent_norm(latent(h)), turn(k_turned(h))

    With a head's query p, t = q_plain(g), turn(q_turned(g)) and its matrices K and V, the key of a
    token is (K c, r) and its value V c. So p^T K c = (K^T p)^T c: the cache has (r, c) alone.

    g is h, or q_latent_norm(q_latent(h)).

    Attributes:
        rank: Elements of c.
        plain, turned: Elements of p and of t.
        values: Elements of a head's value.
        query_rank: Elements of q_latent(h). 0: g is h.
        epsilon: What the norms add to the variance.
        is_paired: Whether sources store rows of t and r for pairs of neighbours.
    """

    rank: int
    plain: int
    turned: int
    values: int
    query_rank: int = 0
    epsilon: float = 1e-6
    is_paired: bool = True

    def __post_init__(self) -> None:
        sizes = (self.rank, self.plain, self.turned, self.values, self.query_rank + 1)
        if not all(1 <= size < MOST_STATE for size in sizes) or self.turned % 2:
            raise ModelError(
                f"Latent attention of the model has the sizes {sizes}; allowed: numbers from 1 on.",
                code="RQ204",
            )

    @property
    def width(self) -> int:
        """Elements of a row of the cache."""
        return self.turned + self.rank

    def list_products(self, width: int, heads: int) -> dict[str, tuple[int, int]]:
        """Return part -> (outputs, inputs) of the matrices. Those of heads are one matrix, head by
        head, `latent_keys` turned.
        """
        known = {"q_latent": (self.query_rank, width)} if self.query_rank else {}
        source = self.query_rank or width
        return {
            "latent": (self.rank, width),
            "k_turned": (self.turned, width),
            **known,
            "q_plain": (heads * self.plain, source),
            "q_turned": (heads * self.turned, source),
            "latent_keys": (heads * self.rank, self.plain),
            "latent_values": (heads * self.values, self.rank),
            "out": (width, heads * self.values),
        }

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The products that all rows share, those of the same data together."""
        queries = ("q_plain", "q_turned")
        if self.query_rank:
            return [("latent", "k_turned", "q_latent"), queries, ("out",)]
        return [("latent", "k_turned", *queries), ("out",)]

    def list_norms(self) -> dict[str, int]:
        """Return name -> size of the norms."""
        known = {"q_latent_norm": self.query_rank} if self.query_rank else {}
        return {"latent_norm": self.rank, **known}

    def list_joined(self, heads: int) -> Joined:
        """Return what sources have as one tensor."""
        order = np.arange(self.turned)
        if self.is_paired:
            order = np.concatenate([order[::2], order[1::2]])
        plain, turned = take_turns((self.plain, self.turned), heads)
        keys, values = take_turns((self.plain, self.values), heads)
        turned = turned.reshape(heads, self.turned)[:, order].reshape(-1)
        return {
            "q_b_all" if self.query_rank else "q_all": {"q_plain": plain, "q_turned": turned},
            "latent_all": {"latent": np.arange(self.rank), "k_turned": self.rank + order},
            "latent_both": {"latent_keys": keys, "latent_values": values},
        }


def take_turns(sizes: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Return the rows of each part if parts of `sizes` rows take turns `count` times."""
    starts = np.arange(count)[:, None] * sum(sizes)
    return [(starts + sum(sizes[:i]) + np.arange(size)).reshape(-1) for i, size in enumerate(sizes)]


def check_kernel(kernel: int) -> None:
    """Raise ModelError unless a convolution may have so many rows."""
    if not 2 <= kernel <= MOST_KERNEL:
        raise ModelError(
            f"A convolution of the model has {format_count(kernel, 'row')}; allowed: 2 to "
            f"{MOST_KERNEL}.",
            code="RQ204",
        )
