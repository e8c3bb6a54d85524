"""The row of an architecture: what `table` says of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from relayquant.formats.readers.causal_lm.config import CausalLMConfig
from relayquant.formats.readers.causal_lm.fields import Fields
from relayquant.formats.readers.causal_lm.gguf.tensor_names import PLAIN
from relayquant.formats.readers.causal_lm.layer_types import TURN_ALL, ListTurned
from relayquant.formats.readers.causal_lm.mixers import Mixer
from relayquant.formats.readers.causal_lm.names import TensorNames

#: "expert_gating_func" -> whether shares are sigmoids. 0: as the architecture has it.
SOFTMAX = {0: False, 1: False}
SOFTMAX_OR_SIGMOID = {1: False, 2: True}


@dataclass(frozen=True)
class GgufModelRow:
    """An architecture of llama.cpp.

    Attributes:
        names: Names of its tensors.
        changes: Fields of `CausalLMConfig` that differ from Llama.
        pattern: Where the window holds, see `list_types`.
        reads_pattern: Whether metadata says which layers have the window. It says so of each.
        local_base: Base of rotary positions in layers with a window, if metadata has none. 0: as
            in the others.
        scales_windows: Whether rotary positions of layers with a window are scaled.
        turned: Which layers have rotary positions.
        is_normalized: Whether shares of chosen experts are divided by their sum, if metadata does
            not say so.
        limit: Bound of values inside of experts, see `ExpertConfig`.
        router: Values of "expert_gating_func" that it reads -> whether shares are sigmoids.
        sum_shift: See `ExpertConfig`.
        is_beside: Whether layers with experts have their feed-forward network, too.
        has_equal_values: Whether layers without a product for values have keys as values.
        scales_shares: Whether it reads groups of experts and the factor of their shares.
        has_latents: Whether heads have other widths than "attention.key_length".
        scaling: More settings "rope.scaling.*" that it reads.
        mixers: (metadata, number of layers) -> what each layer has instead of attention.
        adjust: What depends on other metadata.
    """

    names: TensorNames = PLAIN
    changes: Mapping[str, object] = field(default_factory=dict)
    pattern: int = 0
    reads_pattern: bool = False
    local_base: float = 0.0
    scales_windows: bool = True
    turned: ListTurned = TURN_ALL
    is_normalized: bool = True
    limit: float = 0.0
    router: Mapping[int, bool] = field(default_factory=lambda: SOFTMAX)
    sum_shift: float = 0.0
    is_beside: bool = False
    has_equal_values: bool = False
    scales_shares: bool = False
    has_latents: bool = False
    scaling: tuple[str, ...] = ()
    mixers: Callable[[Fields, int], Sequence[Mixer | None]] = lambda _fields, count: [None] * count
    adjust: Callable[[Fields, CausalLMConfig], CausalLMConfig] = lambda _fields, config: config
