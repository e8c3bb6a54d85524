"""Reader of batch norm statistics: float module -> mean and deviation of the data that the model
was trained on. It runs beside prepare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.ir.rewrite.bind import bind_params
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value


@dataclass(frozen=True, eq=False)
class NormStatistics:
    """Mean and standard deviation of a batch norm's results over the training data, per channel,
    (C,) float64. The mean is beta. The deviation is the magnitude of gamma, reduced where
    epsilon matters.
    """

    mean: np.ndarray
    deviation: np.ndarray


def read_norm_statistics(
    mod: tvm.IRModule, params: Mapping[str, Any] | None
) -> dict[str, NormStatistics]:
    """Map the name of each batch norm's result to its statistics.

    `prepare_module` folds the norms into the weights before them and keeps the names of the
    results.

    Raises:
        ModelError: as `prepare_module`.
    """
    editor = Editor(mod)
    bind_params(editor, params)
    found = {}
    for var, value in editor.values.items():
        if not isinstance(value, relax.TupleGetItem) or value.index != 0:
            continue
        call = editor.call_of(value.tuple_value)
        if call is None or editor.op_name(value.tuple_value) != "relax.nn.batch_norm":
            continue
        arrays = [constant_value(arg) for arg in (call.args[1], call.args[2], call.args[4])]
        if not (call.attrs.scale and call.attrs.center):
            continue  # a norm without factors: its results were not scaled
        gamma, beta, variance = (
            None if array is None else array.astype("float64").reshape(-1) for array in arrays
        )
        if gamma is None or beta is None or variance is None:
            continue
        # The norm divides by variance + epsilon. This matters where a channel is nearly 0.
        share = np.sqrt(variance / (variance + float(call.attrs.epsilon)))
        found[editor.names[var]] = NormStatistics(beta, np.abs(gamma) * share)
    return found
