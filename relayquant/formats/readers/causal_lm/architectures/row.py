"""The row of an architecture: what `table` says of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relayquant.formats.readers.causal_lm.config import CausalLMConfig
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.layer_types import (
    ListTurned,
    ListTypes,
    list_turned,
    list_types,
)
from relayquant.formats.readers.causal_lm.mixers import Mixer
from relayquant.formats.readers.causal_lm.names import TensorNames

#: Changes the Llama that metadata describes to another network.
Adjust = Callable[[Fields, CausalLMConfig], CausalLMConfig]
#: Metadata -> what a layer of one type has instead of attention.
ReadMixer = Callable[[Fields], Mixer]
#: (metadata, number, type of a layer) -> its head width, and heads of keys and values, as
#: `LayerConfig` has them.
ReadSizes = Callable[[Fields, int, str], tuple[int, int]]


@dataclass(frozen=True)
class ModelRow:
    """An architecture of `transformers`.

    Attributes:
        names: Names of its tensors.
        settings: Settings that not every architecture has -> the value if config.json lacks one:
            the default in `transformers`. Settings that only other rows have are not read.
        adjust: What differs from Llama.
        types: Types of layers if metadata has no "layer_types". They count if there is a window,
            or if a type has a mixer.
        refused: Settings that must be false.
        turned: Which layers have rotary positions.
        scales_windows: Whether "rope_scaling" is for layers with a window, too.
        rotary: Settings of rotary positions, if config.json has none of them.
        sizes: As `settings`, for those that all architectures have. Files of models that also see
            lack them.
        mixers: Type of layers without attention -> what these have.
        heads: Sizes of heads in layers that differ.
    """

    names: TensorNames
    settings: Mapping[str, Any]
    adjust: Adjust = lambda _fields, config: config
    types: ListTypes = lambda _fields, count: list_types(0, count)
    refused: tuple[str, ...] = ()
    turned: ListTurned = lambda *given: list_turned(*given)
    scales_windows: bool = True
    rotary: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    mixers: Mapping[str, ReadMixer] = field(default_factory=dict)
    heads: ReadSizes = lambda _fields, _number, _kind: (0, 0)
