"""How much work calibration does for accuracy: what each level of effort picks, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from relayquant.backends.defaults import DEFAULT_OBSERVER
from relayquant.calibrate.fit import BiasCorrection, FitSettings, WeightRounding
from relayquant.calibrate.fit_ranges import RelativeMSE
from relayquant.calibrate.observers import MinMax, Observer
from relayquant.config import QConfig
from relayquant.errors import ConfigError, suggest_name


class Effort(enum.Enum):
    """Levels of effort."""

    FAST = "fast"  #: ranges from the extremes, weights rounded to nearest
    BALANCED = "balanced"  #: ranges and weights by what they change in the results; the default
    #: as BALANCED, with a search of the weights' scales; for few bits or one scale per tensor
    BEST = "best"


@dataclass(frozen=True)
class EffortSettings:
    """What a level of effort picks.

    Attributes:
        activation: Observer of computed values, where neither the user nor the backend names one.
        fit: How weights are rounded and biases corrected.
    """

    activation: Observer
    fit: FitSettings


EFFORTS: Mapping[Effort, EffortSettings] = {
    Effort.FAST: EffortSettings(MinMax(), FitSettings(WeightRounding.NEAREST, BiasCorrection.NONE)),
    Effort.BALANCED: EffortSettings(RelativeMSE(), FitSettings()),
    Effort.BEST: EffortSettings(
        RelativeMSE(values=1 << 20),
        FitSettings(
            scale_factors=(1.0, 1.03, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7),
            sweeps=2,
            samples=32768,
        ),
    ),
}


def resolve_effort(effort: Effort | str) -> Effort:
    """A level of effort by its value ("balanced") or the member itself.

    Raises:
        ConfigError: there is no such level.
    """
    if isinstance(effort, Effort):
        return effort
    for level in Effort:
        if effort == level.value:
            return level
    names = [level.value for level in Effort]
    raise ConfigError(f"There is no effort {effort!r}. {suggest_name(str(effort), names)}")


def apply_effort(qconfig: QConfig, effort: Effort) -> QConfig:
    """`qconfig` with the level's observer for the activations that a backend leaves to it."""
    observer = EFFORTS[effort].activation
    changed = {
        name: replace(config, calibration=observer)
        for name in ("activation", "output")
        if (config := getattr(qconfig, name)) is not None and config.calibration is DEFAULT_OBSERVER
    }
    return replace(qconfig, **changed)
