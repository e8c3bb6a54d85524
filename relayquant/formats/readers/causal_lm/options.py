"""What the user chooses when a language model is loaded: lengths and the cache."""

from __future__ import annotations

from dataclasses import dataclass

from relayquant.base.arguments import check_fields
from relayquant.errors import ConfigError

#: Longest length unless the user asks for another: memory of the cache grows with it.
DEFAULT_LENGTH = 2048
CACHE_DTYPES = ("float16", "int8", "float32")


@check_fields
@dataclass(frozen=True, kw_only=True)
class CausalLMOptions:
    """How the module of a language model is built.

    Attributes:
        max_length: Most tokens of a sequence, prompt included. The cache has memory for all of
            them. None: what the model allows, and at most 2048.
        sequences: Number of sequences that are computed at once.
        cache: Dtype of keys and values: "float16", "int8" (with a scale for each row) or
            "float32".

    Raises:
        ConfigError: one of them is out of range.
    """

    max_length: int | None = None
    sequences: int = 1
    cache: str = "float16"

    def __post_init__(self) -> None:
        for name in ("max_length", "sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"CausalLMOptions: {name}={value}; allowed: integers from 1 on.", code="RQ101"
                )
        if self.cache not in CACHE_DTYPES:
            raise ConfigError(
                f"CausalLMOptions: cache={self.cache!r}; allowed: {', '.join(CACHE_DTYPES)}.",
                code="RQ101",
            )

    def choose_length(self, most: int) -> int:
        """Return the length of the cache for a model of at most `most` tokens.

        Raises:
            ConfigError: the user asks for more.
        """
        if self.max_length is None:
            return min(most, DEFAULT_LENGTH)
        if self.max_length > most:
            raise ConfigError(
                f"CausalLMOptions: max_length={self.max_length}; the model allows at most {most}.",
                code="RQ101",
            )
        return self.max_length
