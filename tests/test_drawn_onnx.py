"""Drawn ONNX graphs: what is imported computes what ONNX Runtime computes, and compiled integer
modules compute what numpy computes, bit for bit. No graph ends in an error that is not ours.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx_graphs import draw_graph
from onnx_runtime import run_onnxruntime

import relayquant as rq

#: Graphs in all; of each PART of them the first FAST are quantized and compiled in every run, the
#: first SLOW with -m slow, and all with -m nightly.
GRAPHS, PART, FAST, SLOW = 500, 50, 2, 10
PARTS = range(0, GRAPHS, PART)
#: At most so many of GRAPHS are refused: of a symbolic size that an operator cannot have.
REFUSED = 20


def is_refused(error: Exception, samples) -> bool:
    """Whether an error names a symbolic dimension that is to be fixed."""
    message = str(error)
    return len(samples) > 1 and "symbolic" in message and "shapes=" in message


def load_graph(model, samples):
    """The float module; None where a symbolic dimension is refused by name."""
    try:
        mod, params = rq.load(model)
    except rq.ModelError as error:
        if is_refused(error, samples):
            return None
        raise
    assert not params
    return mod


def assert_near(found, expected, names) -> None:
    for got, want, name in zip(found, expected, names, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        if want.dtype.kind != "f":
            np.testing.assert_array_equal(got, want, name)
            continue
        atol = 1e-4 * max(1, np.nanmax(np.abs(want), initial=0))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=atol, err_msg=name)


def check_float(seed: int) -> bool:
    """Whether the graph is taken."""
    model, samples = draw_graph(seed)
    mod = load_graph(model, samples)
    for sample in samples if mod is not None else ():
        names = [output.name for output in model.graph.output]
        assert_near(
            rq.reference.run(mod, sample), run_onnxruntime(model, sample, rewrites=False), names
        )
    return mod is not None


def check_integer(seed: int) -> None:
    model, samples = draw_graph(seed)
    mod = load_graph(model, samples)
    if mod is None:
        return
    rng = np.random.default_rng(seed)
    data = [
        {name: rng.standard_normal(array.shape, "float32") for name, array in samples[0].items()},
        samples[0],
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random graphs, what looks wrong with them
        qmod = rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF)
    for sample in samples:
        try:
            report = rq.verify(qmod, sample)
        except rq.ModelError as error:
            if is_refused(error, samples):
                return
            raise
        assert report.is_equal, report.first


@pytest.mark.slow
@pytest.mark.parametrize("count", [GRAPHS // 4, pytest.param(GRAPHS, marks=pytest.mark.slow)])
def test_drawn_graphs__as_onnx_runtime(count):
    wrong, taken = {}, 0
    for seed in range(count):
        try:
            taken += check_float(seed)
        except Exception as error:
            wrong[seed] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{seed}: {error}" for seed, error in wrong.items())
    assert taken >= count - REFUSED


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        *((first, FAST) for first in PARTS),
        *(pytest.param(first, SLOW, marks=pytest.mark.slow) for first in PARTS),
        *(pytest.param(first, PART, marks=pytest.mark.nightly) for first in PARTS),
    ],
)
def test_drawn_graphs__compiled_as_numpy(first, count):
    wrong = {}
    for seed in range(first, first + count):
        try:
            check_integer(seed)
        except Exception as error:
            wrong[seed] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{seed}: {error}" for seed, error in wrong.items())
