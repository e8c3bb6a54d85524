"""Models whose sizes are values of an input, and models that return the same value twice."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq

RNG = np.random.default_rng(4)
WEIGHTS = {
    "w": RNG.standard_normal((4, 3, 3, 3)).astype("float32"),
    "b": RNG.standard_normal(4).astype("float32"),
    "w2": RNG.standard_normal((3, 4, 1, 1)).astype("float32"),
    "around": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "zero": np.array([0]),
    "two": np.array([2]),
    "start": np.int64(0),
    "step": np.int64(1),
}
#: name -> (nodes between two convolutions, from "c" to "t"; value of the second input, "n")
SIZES = {
    "reshape": ([("Reshape", ["c", "n"], ["t"])], np.array([1, 4, 4, 9])),
    "expand": ([("Expand", ["c", "n"], ["t"])], np.array([2, 4, 6, 6])),
    "slice": ([("Slice", ["c", "zero", "n", "two"], ["t"])], np.array([4])),
    "pad": ([("Pad", ["c", "n"], ["t"])], np.array([0, 0, 1, 1, 0, 0, 1, 1])),
    "value of a pad": ([("Pad", ["c", "around", "n"], ["t"])], np.array(0.5, "float32")),
    "range": (
        [
            ("Range", ["start", "n", "step"], ["r"]),
            ("Cast", ["r"], ["f"]),
            ("Add", ["c", "f"], ["t"]),
        ],
        np.array(6),
    ),
    "tile": ([("Tile", ["c", "n"], ["t"])], np.array([1, 1, 2, 1])),
}


def make_file(nodes, inputs, outputs) -> onnx.ModelProto:
    used = {name for node in nodes for name in node.input}
    arrays = {name: np.asarray(array) for name, array in inputs.items()}
    weights = {name: array for name, array in WEIGHTS.items() if name in used}
    model = make_onnx(nodes, arrays, dict.fromkeys(outputs), weights)
    return onnx.shape_inference.infer_shapes(model)


def check_file(model: onnx.ModelProto, inputs) -> None:
    """Quantized with the default settings, to 4 % of the largest value of each result."""
    mod, params = rq.load(model)
    module = rq.quantize(mod, params, [inputs])
    wanted = run_onnxruntime(model, inputs)
    for found, real in zip(rq.reference.run(module, inputs), wanted, strict=True):
        assert found.shape == real.shape
        assert np.abs(found - real).max() <= 0.04 * np.abs(real).max()


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_of_a_value__are_calibrated_in_every_part(case):
    rows, value = SIZES[case]
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"])]
    for op, reads, results in rows:
        attrs = {"to": TensorProto.FLOAT} if op == "Cast" else {}
        nodes.append(helper.make_node(op, reads, results, **attrs))
    nodes.append(helper.make_node("Conv", ["t", "w2"], ["y"]))
    inputs = {"x": RNG.standard_normal((1, 3, 8, 8)).astype("float32"), "n": value}
    check_file(make_file(nodes, inputs, ["y"]), inputs)


#: name -> (opset, node between products that read its parts, sizes "n" of the second input)
CUTS = {
    "split": (13, ("Split", ["c", "n"], ["t", "u"]), [20, 12]),
    "split into halves": (13, ("Split", ["c"], ["t", "u"]), None),
    "split into near halves": (18, ("Split", ["c"], ["t", "u"]), None),
    "expand": (17, ("Expand", ["c", "n"], ["t"]), [32, 8]),
    "slice": (17, ("Slice", ["c", "n", "end", "zero"], ["t"]), [5]),
    "tile": (17, ("Tile", ["c", "n"], ["t"]), [2, 1]),
    "pad": (17, ("Pad", ["c", "n"], ["t"]), [3, 0, 2, 0]),
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CUTS)
def test_sizes_of_the_run_time__between_products(name):
    """What an operator cuts out of rows of an unknown number is read by other products. Compiled,
    more than 20 dB beside ONNX Runtime.
    """
    opset, (op, reads, parts), sizes = CUTS[name]
    weights = {
        "v": RNG.standard_normal((8, 8)).astype("float32"),
        "v2": RNG.standard_normal((8, 8)).astype("float32"),
        "end": np.array([1000]),
        "zero": np.array([0]),
    }
    counts = {"num_outputs": 2} if opset == 18 else {}
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["c"]),
        helper.make_node(op, reads, parts, **counts),
        *(helper.make_node("MatMul", [part, "v2"], [f"{part}2"]) for part in parts),
    ]
    feeds = {"x": RNG.standard_normal((32, 8)).astype("float32")}
    infos: dict[str, object] = {"x": ["rows", 8]}
    if sizes is not None:
        feeds["n"] = infos["n"] = np.array(sizes)
    used = {each for node in nodes for each in node.input}
    constants = {name: array for name, array in weights.items() if name in used}
    model = make_onnx(nodes, infos, [f"{part}2" for part in parts], constants, opset)
    module = rq.quantize(*rq.load(model), [tuple(feeds.values())] * 2)
    machine = rq.Executor(rq.compile(module))
    found = machine.run("main", [feeds[param.name] for param in module["main"].params])
    for have, want in zip(found, run_onnxruntime(model, feeds), strict=True):
        assert have.shape == want.shape
        assert 10 * np.log10(np.square(want).sum() / np.square(have - want).sum()) > 20


@pytest.mark.parametrize("second", ["Identity", "Dropout"])
@pytest.mark.parametrize("last", ["Relu", "Sigmoid", "Add"])
def test_names_of_one_value__are_all_returned(last, second):
    """Every value between two operators of a pattern is an output."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"]),
        helper.make_node(second, ["c"], ["i"]),
        helper.make_node(last, ["i", "c"] if last == "Add" else ["i"], ["r"]),
        helper.make_node(second, ["r"], ["j"]),
        helper.make_node("Conv", ["j", "w2"], ["y"]),
    ]
    inputs = {"x": RNG.standard_normal((1, 3, 8, 8)).astype("float32")}
    check_file(make_file(nodes, inputs, ["c", "i", "r", "j", "y"]), inputs)
