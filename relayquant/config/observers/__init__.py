"""Observers: calibration batches -> quantization parameters, streamed in O(1) memory.

An observer holds only settings. The observed data is an explicit state. `update` and `merge` return
a new state. `to_arrays` turns a state into arrays, so that states can be saved and merged across
processes:

    state = observer.start(info)
    for array in arrays:
        state = observer.update(state, array)
    qparams = observer.qparams(state, info)
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relayquant.base import lazy
from relayquant.base.qtypes import ValueInfo
from relayquant.config.observers.base import Observer
from relayquant.config.observers.distribution import MSE, KLDivergence, Percentile
from relayquant.config.observers.ranges import AverageMax, Fixed, MinMax, MovingAverageMinMax
from relayquant.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    CalibrationContext: Any
    OutputSQNR: Any
    RelativeMSE: Any

#: What `observer=` takes as text, in Python and in the shell.
OBSERVERS: Mapping[str, Observer] = {
    "minmax": MinMax(),
    "average-max": AverageMax(),
    "moving-average": MovingAverageMinMax(),
    "percentile": Percentile(),
    "mse": MSE(),
    "kl": KLDivergence(),
}

__all__ = [
    "MSE",
    "AverageMax",
    "CalibrationContext",
    "Fixed",
    "KLDivergence",
    "MinMax",
    "MovingAverageMinMax",
    "Observer",
    "OutputSQNR",
    "Percentile",
    "RelativeMSE",
    "ValueInfo",
]

# They read the calibration graph, which is above this package in the import order.
__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.stages.calibration.observer_selection": "OutputSQNR",
        "relayquant.stages.calibration.parameters": "CalibrationContext",
        "relayquant.stages.calibration.weights.ranges": "RelativeMSE",
    },
)


def read_observer(observer: Any, where: str) -> Any:
    """Return the observer that a text names, and any other value as it is.

    Raises:
        ConfigError: no observer has this name.
    """
    if not isinstance(observer, str):
        return observer
    if observer not in OBSERVERS:
        raise ConfigError(
            f"{where} is {observer!r}; allowed: {', '.join(map(repr, OBSERVERS))}, an observer, "
            f"for instance MinMax(), or a callable. {suggest_name(observer, OBSERVERS)}",
            code="RQ101",
        )
    return OBSERVERS[observer]
