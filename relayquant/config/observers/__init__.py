"""From calibration batches to quantization parameters: observers stream values in O(1) memory.

An observer holds settings only. What it has seen is an explicit state that `update` and `merge`
return anew; a state becomes arrays with `to_arrays`, so that states may be saved, and merged across
processes:

    state = observer.start(info)
    for array in arrays:
        state = observer.update(state, array)
    qparams = observer.qparams(state, info)
"""

from relayquant.config.observers.base import AnyObserver, Observer, State, require_arrays
from relayquant.config.observers.distribution import MSE, KLDivergence, Percentile
from relayquant.config.observers.ranges import AverageMax, Fixed, MinMax, MovingAverageMinMax

__all__ = [
    "MSE",
    "AnyObserver",
    "AverageMax",
    "Fixed",
    "KLDivergence",
    "MinMax",
    "MovingAverageMinMax",
    "Observer",
    "Percentile",
    "State",
    "require_arrays",
]
