"""Drawn ONNX graphs: what is imported computes what ONNX Runtime computes, and compiled integer
modules compute what numpy computes, bit for bit. No graph ends in an error that is not ours.

Quantized in different ways, they stay near ONNX Runtime's float results, ONNX Runtime computes the
same from what `export_onnx` writes, and a .rqm file holds the same module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from onnx_graphs import draw_graph
from onnx_runtime import run_onnxruntime

import relayquant as rq

#: Graphs in all; of each PART of them the first FAST are quantized and compiled in every run, the
#: first SLOW with -m slow, and all with -m nightly.
GRAPHS, PART, FAST, SLOW = 500, 50, 2, 10
PARTS = range(0, GRAPHS, PART)
#: So many graphs are quantized in different ways with -m slow.
BRIEF = 18
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


def check_bits(qmod, sample, samples) -> None:
    """Compiled code computes the bits of numpy, unless a symbolic dimension is refused by name."""
    try:
        report = rq.verify(qmod, sample)
    except rq.ModelError as error:
        if not is_refused(error, samples):
            raise
    else:
        assert report.is_equal, report.first


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
        check_bits(qmod, sample, samples)


@dataclass(frozen=True)
class Way:
    """How a graph is quantized: (default QConfig, name -> kind of operator) -> the mapping and the
    names of the operators that stay in float.
    """

    choose: Callable[[rq.QConfig, dict[str, str]], tuple[rq.QConfigMapping, list[str]]]
    least: float  #: signal-to-noise ratio of each output in dB
    backend: str = "x86"
    effort: str = "fast"


def map_all(config: rq.QConfig) -> rq.QConfigMapping:
    return rq.QConfigMapping().set_global(config)


def take_default(default: rq.QConfig, kinds: dict[str, str]):
    return map_all(default), []


def take_int16(default: rq.QConfig, kinds: dict[str, str]):
    wide = rq.TensorConfig(rq.QSpec("int16"), rq.observers.MinMax())
    return map_all(replace(default, activation=wide)), []


def leave_half(default: rq.QConfig, kinds: dict[str, str]):
    """Every other operator stays in float."""
    mapping = map_all(default)
    kept = [*kinds][::2]
    for name in kept:
        mapping = mapping.set_module_name(name, None)
    return mapping, kept


def take_dynamic(dtype: str, **granularity):
    spec = rq.QSpec(dtype, is_dynamic=True, **granularity)

    def choose(default: rq.QConfig, kinds: dict[str, str]):
        dynamic = replace(default, activation=rq.TensorConfig(spec))
        mapping = map_all(default)
        for op in {"matmul", "nn.conv1d", "nn.conv2d"}.intersection(kinds.values()):
            mapping = mapping.set_object_type(op, dynamic)
        return mapping, []

    return choose


BY_ROW = {"granularity": rq.config.Granularity.PER_ROW}
WAYS = {
    "default": Way(take_default, 12),
    "default, arm": Way(take_default, 12, "arm"),
    "balanced": Way(take_default, 12, effort="balanced"),
    "int16": Way(take_int16, 25),
    "int16, arm": Way(take_int16, 25, "arm"),
    "half": Way(leave_half, 12),
    "dynamic": Way(take_dynamic("uint8"), 12),
    "dynamic by row": Way(take_dynamic("int8", **BY_ROW), 12),
    "dynamic by row, arm": Way(take_dynamic("int8", **BY_ROW), 12, "arm"),
}


def measure_noise(found: np.ndarray, wanted: np.ndarray) -> float:
    """The signal-to-noise ratio in dB."""
    noise = np.square(found - np.float64(wanted)).sum()
    return 10 * np.log10((np.square(np.float64(wanted)).sum() + 1e-12) / (noise + 1e-20))


def check_way(seed: int, way: Way, folder) -> None:
    model, samples = draw_graph(seed)
    mod = load_graph(model, samples)
    rng = np.random.default_rng(seed)
    data = [
        {name: rng.standard_normal(array.shape, "float32") for name, array in samples[0].items()}
        for _ in range(7)
    ]
    data.append(samples[0])
    wanted = [run_onnxruntime(model, each, rewrites=False) for each in data]
    if mod is None or not all(np.isfinite(part).all() for parts in wanted for part in parts):
        return  # a logarithm or a root of other data
    plan = rq.prepare(mod, {}, backend=way.backend).plan
    default = rq.get_backend_config(way.backend).default_qconfig
    mapping, kept = way.choose(default, {each.name: each.op for each in plan.operators})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random graphs, what looks wrong with them
        qmod = rq.quantize(
            mod, None, data, qconfig_mapping=mapping, backend=way.backend, effort=way.effort,
            guard=rq.config.Guard.OFF,
        )  # fmt: skip
    assert not [row for row in rq.ledger(qmod).rows if row.quantized and row.name in kept]
    found = [rq.reference.run(qmod, each) for each in data]
    names = [output.name for output in model.graph.output]
    floats = [at for at, each in enumerate(wanted[0]) if each.dtype.kind == "f"]
    is_steady = all(node.op_type != "ReduceProd" for node in model.graph.node)
    for at in floats if is_steady else ():  # a product of many factors multiplies their errors
        both = (np.stack([parts[at] for parts in side]) for side in (found, wanted))
        assert measure_noise(*both) >= way.least, names[at]

    check_bits(qmod, data[0], samples)
    rq.save_module(qmod, folder / "model.rqm")
    again = rq.reference.run(rq.load(folder / "model.rqm")[0], data[0])
    assert [each.tobytes() for each in again] == [each.tobytes() for each in found[0]]

    written = onnx.load(rq.export_onnx(qmod, folder / "model.onnx"))
    for each, ours in zip(data[:3], found, strict=False):
        theirs = run_onnxruntime(written, each, rewrites=False)
        for at, (one, two) in enumerate(zip(theirs, ours, strict=True)):
            assert (one.shape, one.dtype) == (two.shape, two.dtype), names[at]
            if at in floats:  # up to two steps of 8 bits
                span = np.ptp([parts[at] for parts in wanted])
                np.testing.assert_allclose(one, two, 1e-5, 1e-6 + span * 2.5 / 255, names[at])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, BRIEF), *(pytest.param(first, PART, marks=pytest.mark.nightly) for first in PARTS[:5])],
)
def test_drawn_graphs__quantized_as_onnx_runtime(first, count, tmp_path):
    wrong, ways = {}, [*WAYS]
    for seed in range(first, first + count):
        way = ways[seed % len(ways)]
        try:
            check_way(seed, WAYS[way], tmp_path)
        except Exception as error:
            wrong[f"{seed}, {way}"] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{case}: {error}" for case, error in wrong.items())


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
