"""Recognition: prepared float module + a few samples -> the type of the model, if it needs special
settings (`ModelType`).

A transformer is recognized by its attention: a softmax of a product of two activations. Only some
transformers lose accuracy on integers: trained language models, whose normed residual sums have a
few channels that are far larger than the rest. MiniLM-L6 has 23 times the median channel, a keyword
spotter (KWT-1) and encoders with random weights 2 to 4 times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.config import ModelType
from relayquant.data import open_share, take_samples
from relayquant.data.item import describe_inputs
from relayquant.ir.rewrite import Graph
from relayquant.stages.equalization.smooth import find_sites, measure_sites

#: samples that the channels are measured on
SAMPLES = 4
#: how many times the median channel the largest channel of a normed sum is at least
LARGE = 8.0
NORMS = ("relax.nn.layer_norm", "relax.nn.rms_norm")
#: operators between a product of two activations and its softmax: scale, mask and layout
BETWEEN = frozenset(
    f"relax.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "where", "maximum", "minimum", "clip", "astype",
        "reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to",
    )
)  # fmt: skip
#: values that are followed back from a softmax
MOST_BETWEEN = 16


def recognize_type(canonical: tvm.IRModule, dataset: Any) -> ModelType | None:
    """Return the model's type, or None if all of its operators may run on integers.

    Raises:
        DataError: the data does not fit the model.
    """
    graph = Graph(canonical)
    softmaxes = [var for var in graph.vars.values() if graph.op_name(var) == "relax.nn.softmax"]
    if not any(is_attention(graph, var) for var in softmaxes):
        return None
    sites = [
        site
        for site in find_sites(graph, absorbs=False, inserts=True)[0]
        if graph.op_name(site.left) in NORMS
    ]
    samples = take_samples(open_share(dataset, describe_inputs(canonical)), SAMPLES)
    measured = measure_sites(canonical, sites, samples)
    is_uneven = any(
        statistics.largest.max() >= LARGE * np.median(statistics.largest) > 0
        for statistics in measured.values()
    )
    return ModelType.TRANSFORMER if is_uneven else None


def is_attention(graph: Graph, softmax: relax.Var) -> bool:
    """Whether `softmax` reads a product of two activations, which may be scaled and masked."""
    waiting, seen = [softmax], 0
    while waiting and seen < MOST_BETWEEN:
        seen += 1
        call = graph.call_of(waiting.pop())
        operands = [] if call is None else [arg for arg in call.args if isinstance(arg, relax.Var)]
        for var in operands:
            name = graph.op_name(var) if var in graph.values else ""
            if name == "relax.matmul":
                factors = graph.values[var].args
                if all(factor in graph.values for factor in factors):
                    return True
            elif name in BETWEEN:
                waiting.append(var)
    return False
