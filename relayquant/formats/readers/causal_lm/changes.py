"""A language model's config -> the same with experts, shared caches or other rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.config import CausalLMConfig, ExpertConfig, LayerConfig


def change_rotary(config: CausalLMConfig, **changes: float) -> CausalLMConfig:
    """Return the model with rotary positions that differ in some fields."""
    layers = (
        replace(layer, rotary=layer.rotary and replace(layer.rotary, **changes))  # pyright: ignore[reportArgumentType]
        for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


def grow_queries(config: CausalLMConfig, growth: float, length: int) -> CausalLMConfig:
    """Return the model with queries that grow each `length` positions."""
    return change_rotary(config, growth=growth, growth_length=length)


def share_caches(layers: Sequence[LayerConfig], own: int) -> list[LayerConfig]:
    """Return the layers, of which those from number `own` on read keys and values of the last layer
    before it that has a window as they have, or none.

    Raises:
        ModelError: there is no such layer.
    """
    found = [*layers]
    for i in range(max(own, 0), len(layers)):
        alike = [k for k in range(own) if (layers[k].window > 0) == (layers[i].window > 0)]
        if not alike:
            raise ModelError(
                f"Layer {i} of the model reads keys and values of another layer, but all others "
                "with keys and values have another window.",
                code="RQ204",
            )
        found[i] = replace(layers[i], source=alike[-1])
    return found


def add_experts(
    config: CausalLMConfig,
    experts: ExpertConfig,
    is_dense: Callable[[int], bool] = lambda _i: False,
) -> CausalLMConfig:
    """Return the model with experts in all layers but those that are dense."""
    layers = (
        layer if is_dense(i) else replace(layer, experts=experts)
        for i, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers))
