"""Layers that keep a state of their own instead of the keys and values of all tokens.

A mixer says what its layer has: tensors, products, and state. `mixing` computes it. Its state has
read the tokens before the next position, each once and in order. So it can only go on, or begin
anew at position 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from relayquant.errors import ModelError, format_count

#: Most rows of a convolution that are believed of a file.
MOST_KERNEL = 64


class Mixer(ABC):
    """What a layer has instead of attention."""

    @abstractmethod
    def list_products(self, width: int) -> Mapping[str, tuple[int, int]]:
        """Return part -> (outputs, inputs) of the matrices that all rows share."""

    @abstractmethod
    def list_constants(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """Return part -> shape of the weights that stay in float."""

    @property
    @abstractmethod
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The products, those of the same data together."""

    @abstractmethod
    def list_states(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of the state of one sequence, float32."""


@dataclass(frozen=True)
class ShortConvolution(Mixer):
    """A short convolution between two gates (LFM2).

    a, b, c = conv_in(h)

    y[t] = conv_out(b[t] * sum over k of conv[:, k] * (a * c)[t - kernel + 1 + k])

    The state has the last kernel - 1 rows of a * c.

    Attributes:
        kernel: Rows that a result depends on.
    """

    kernel: int

    def __post_init__(self) -> None:
        check_kernel(self.kernel)

    def list_products(self, width: int) -> Mapping[str, tuple[int, int]]:
        return {"conv_in": (3 * width, width), "conv_out": (width, width)}

    def list_constants(self, width: int) -> Mapping[str, tuple[int, ...]]:
        return {"conv": (width, self.kernel)}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return (("conv_in",), ("conv_out",))

    def list_states(self, width: int) -> Mapping[str, tuple[int, ...]]:
        return {"rows": (self.kernel - 1, width)}


def check_kernel(kernel: int) -> None:
    """Raise ModelError unless a convolution may have so many rows."""
    if not 2 <= kernel <= MOST_KERNEL:
        raise ModelError(
            f"A convolution of the model has {format_count(kernel, 'row')}; allowed: 2 to "
            f"{MOST_KERNEL}.",
            code="RQ204",
        )
