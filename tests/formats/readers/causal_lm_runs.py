"""Runs modules of language models as the numpy reference computes them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tvm

import relayquant as rq
from relayquant.ir.state import get_state


def run_chunks(
    mod: tvm.IRModule,
    params: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    chunks: Sequence[int],
) -> np.ndarray:
    """Scores of every row, (B, rows, vocabulary). Chunks of 1 run decode, others prefill."""
    state = [value.value for value in get_state(mod)]
    at, scores = 0, []
    for size in chunks:
        name = "decode" if size == 1 else "prefill"
        inputs = [
            tokens[:, at : at + size].astype("int32"),
            np.full(len(tokens), at, "int32"),
        ]
        if size > 1:
            inputs.append(np.tile(np.arange(size, dtype="int32"), (len(tokens), 1)))
        found, *state = run_function(mod, params, name, [*inputs, *state])
        scores.append(found)
        at += size
    return np.concatenate(scores, 1)


def run_function(
    mod: tvm.IRModule,
    params: Mapping[str, np.ndarray],
    name: str,
    inputs: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Results of one function."""
    main = mod[name].with_attr("global_symbol", "main")
    weights = [params[param.name] for param in main.params[len(inputs) :]]
    return rq.reference.run(tvm.IRModule({"main": main}), [*inputs, *weights])
