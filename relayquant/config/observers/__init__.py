"""From calibration batches to quantization parameters: observers stream values in O(1) memory.

An observer holds settings only. What it has seen is an explicit state that `update` and `merge`
return anew; a state becomes arrays with `to_arrays`, so that states may be saved, and merged across
processes:

    state = observer.start(info)
    for array in arrays:
        state = observer.update(state, array)
    qparams = observer.qparams(state, info)
"""

from typing import TYPE_CHECKING, Any

from relayquant.base import lazy
from relayquant.base.qtypes import ValueInfo
from relayquant.config.observers.base import Observer
from relayquant.config.observers.distribution import MSE, KLDivergence, Percentile
from relayquant.config.observers.ranges import AverageMax, Fixed, MinMax, MovingAverageMinMax

if TYPE_CHECKING:
    CalibrationContext: Any
    OutputSQNR: Any
    RelativeMSE: Any

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

# They look at the calibration graph, which stands above this room.
__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.stages.calibration.observer_selection": "OutputSQNR",
        "relayquant.stages.calibration.parameters": "CalibrationContext",
        "relayquant.stages.calibration.weights.ranges": "RelativeMSE",
    },
)
