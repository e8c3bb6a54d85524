"""Operators of ONNX Runtime (com.microsoft), attribute by attribute as ONNX Runtime computes them.

`CASES` has values for each attribute that ONNX Runtime's own schema of the operator lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx_runtime import run_onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state
from test_onnx_lost_shapes import make_model

import relayquant as rq
from relayquant.errors import ModelError

MICROSOFT = "com.microsoft"
RNG = np.random.default_rng(17)


def draw(*shape):
    return RNG.standard_normal(shape).astype("float32")


def codes(*shape, dtype="uint8"):
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def scale(value):
    return np.array(value, "float32")


@dataclass(frozen=True)
class Case:
    """An operator with operands and what its attributes may be.

    Attributes:
        op: Operator type.
        data: Operands of the run time, by name.
        constants: Other operands, in the order of the operator; None is left out, a name of `data`
            stands for itself.
        base: Attributes that every node has.
        options: Attribute -> values, each of which is set alone.
        outputs: Their names.
        refused: Attributes that ONNX Runtime's kernel ignores or has only on GPUs, so that they
            are refused here where they are not neutral.
    """

    op: str
    data: dict[str, np.ndarray]
    constants: list[Any]
    base: dict[str, Any] = field(default_factory=dict)
    options: dict[str, list[Any]] = field(default_factory=dict)
    refused: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)


ZERO, STEP = np.uint8(120), scale(0.05)
IMAGE, TABLE = codes(1, 2, 6, 7), codes(3, 4, 5)
WINDOW = {"kernel_shape": [3, 2]}
FLOATS = draw(1, 2, 6, 7)

CASES = [
    Case("QGemm", {"a": codes(3, 4)},
         ["a", STEP, ZERO, codes(4, 4, dtype="int8"), scale(0.02), np.int8(3),
          codes(4, dtype="int16").astype("int32"), scale(0.4), np.uint8(128)],
         options={"alpha": [0.5, 2.0], "transB": [0, 1]}),
    Case("QGemm", {"a": codes(3, 4)},
         ["a", STEP, ZERO, codes(4, 4, dtype="int8"), scale(0.02), np.int8(3),
          codes(4, dtype="int16").astype("int32"), scale(0.4)]),
    Case("QGemm", {"a": codes(4, 3)},
         ["a", STEP, ZERO, codes(5, 4, dtype="int8"), scale(RNG.random(5) / 9 + 0.01),
          np.zeros(5, "int8"), codes(5, dtype="int16").astype("int32")],
         base={"transA": 1, "transB": 1}, options={"alpha": [0.5, 3.0], "transA": [1]}),
    Case("QLinearLeakyRelu", {"x": TABLE}, ["x", STEP, ZERO, scale(0.04), np.uint8(100)],
         options={"alpha": [0.0, 0.3]}),
    Case("QLinearConcat", {"x": TABLE},
         [scale(0.06), np.uint8(110), "x", STEP, ZERO, codes(3, 4, 5), scale(0.08), np.uint8(90)],
         base={"axis": 0}, options={"axis": [0, 1, -1]}),
    *(Case("QLinearSoftmax", {"x": TABLE}, ["x", scale(0.02), ZERO, scale(1 / 256), np.uint8(0)],
           base={"opset": opset}, options={"axis": [0, 1, 2, -1], "opset": [opset]})
      for opset in (11, 12, 13)),
    Case("QLinearAveragePool", {"x": IMAGE}, ["x", STEP, ZERO, scale(0.04), np.uint8(100)],
         base=WINDOW,
         options={"kernel_shape": [[2, 2]], "strides": [[2, 3]], "pads": [[1, 0, 1, 1]],
                  "ceil_mode": [0, 1], "count_include_pad": [1],
                  "auto_pad": ["SAME_UPPER", "SAME_LOWER", "VALID"]},
         refused={"channels_last": 1}),
    Case("QLinearAveragePool", {"x": IMAGE}, ["x", STEP, ZERO, scale(0.04), np.uint8(100)],
         base={**WINDOW, "pads": [1, 1, 1, 1]}, options={"count_include_pad": [0, 1]}),
    Case("QLinearGlobalAveragePool", {"x": IMAGE}, ["x", STEP, ZERO, scale(0.04), np.uint8(100)],
         options={"channels_last": [0]}, refused={"channels_last": 1}),
    Case("QuantizeLinear", {"x": draw(3, 4, 5)},
         ["x", scale(RNG.random(4) + 0.1), np.zeros(4, "uint8") + ZERO],
         base={"axis": 1}, options={"axis": [1, -2]}),
    Case("DequantizeLinear", {"x": TABLE},
         ["x", scale(RNG.random(4) + 0.1), np.zeros(4, "uint8") + ZERO],
         base={"axis": 1}, options={"axis": [1, -2]}),
    Case("FusedConv", {"x": FLOATS}, ["x", draw(4, 2, 3, 3), draw(4)],
         options={"activation": ["Relu", "Tanh", "Sigmoid"], "kernel_shape": [[3, 3]],
                  "pads": [[1, 0, 1, 1]], "strides": [[2, 1]], "dilations": [[1, 2]],
                  "auto_pad": ["SAME_UPPER", "VALID"], "group": [1]}),
    Case("FusedConv", {"x": FLOATS}, ["x", draw(4, 1, 3, 3), draw(4)],
         base={"group": 2, "activation": "LeakyRelu", "activation_params": [0.2]},
         options={"activation_params": [[0.1], [0.3]]}),
    Case("SkipLayerNormalization", {"x": draw(2, 3, 8), "skip": draw(2, 3, 8)},
         ["x", "skip", draw(8), draw(8), draw(8)], options={"epsilon": [1e-3, 0.1]}),
    Case("SkipLayerNormalization", {"x": draw(2, 3, 8), "skip": draw(3, 8)},
         ["x", "skip", draw(8)], options={"epsilon": [1e-3]}),
    Case("SkipSimplifiedLayerNormalization", {"x": draw(2, 3, 8), "skip": draw(2, 3, 8)},
         ["x", "skip", draw(8), draw(8)], base={"epsilon": 1e-5}, options={"epsilon": [0.1]}),
    Case("SkipSimplifiedLayerNormalization", {"x": draw(2, 3, 8), "skip": draw(2, 3, 8)},
         ["x", "skip", draw(8)], base={"epsilon": 1e-3}, outputs=("y", "", "", "sum")),
    Case("FusedMatMul", {"a": draw(2, 4, 4), "b": draw(2, 4, 4)}, ["a", "b"],
         options={"alpha": [0.5, -2.0], "transA": [1], "transB": [1]},
         refused={"transBatchA": 1, "transBatchB": 1}),
    Case("FusedMatMul", {"a": draw(2, 4, 3), "b": draw(5, 4)}, ["a", "b"],
         base={"transA": 1, "transB": 1}),
    Case("FusedGemm", {"a": draw(4, 4)}, ["a", draw(4, 4), draw(4)],
         base={"activation": "LeakyRelu", "activation_alpha": 0.3},
         options={"activation_alpha": [0.2], "activation": ["Relu", "Tanh", "Sigmoid"],
                  "alpha": [0.5], "beta": [2.0], "transA": [1], "transB": [1]},
         refused={"activation_gamma": 1.0}),
    Case("FusedGemm", {"a": draw(4, 3)}, ["a", draw(3, 5)],
         base={"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
         options={"activation_beta": [0.1]}),
    Case("QuickGelu", {"x": draw(3, 4)}, ["x"], options={"alpha": [1.0, 3.0]}),
    Case("EmbedLayerNormalization",
         {"ids": RNG.integers(0, 9, (2, 3)).astype("int32"),
          "kinds": RNG.integers(0, 2, (2, 3)).astype("int32")},
         ["ids", "kinds", draw(9, 8), draw(5, 8), draw(2, 8), draw(8), draw(8),
          np.array([[1, 1, 0], [1, 0, 0]], "int32")],
         options={"epsilon": [1e-3], "mask_index_type": [0, 1]}, outputs=("y", "counts")),
    Case("EmbedLayerNormalization", {"ids": RNG.integers(0, 9, (2, 3)).astype("int32")},
         ["ids", None, draw(9, 8), draw(5, 8), None, draw(8), draw(8), None,
          RNG.integers(0, 5, (2, 3)).astype("int32")], options={"epsilon": [1e-3]},
         outputs=("y", "counts")),
    Case("Attention", {"x": draw(2, 3, 8)},
         ["x", draw(8, 24), draw(24), np.array([[1, 1, 0], [1, 1, 1]], "int32"), None,
          draw(2, 2, 3, 3)],
         base={"num_heads": 2},
         options={"num_heads": [2], "mask_filter_value": [-3.0], "qkv_hidden_sizes": [[8, 8, 8]]},
         refused={"unidirectional": 1, "do_rotary": 1, "scale": 0.3,
                  "past_present_share_buffer": 1, "rotary_embedding_dim": 4}),
]  # fmt: skip


def list_attributes(op: str) -> set[str]:
    """What ONNX Runtime's schema of an operator lists."""
    schemas = onnxruntime_pybind11_state.get_all_operator_schema()
    return next(set(s.attributes) for s in schemas if s.domain == MICROSOFT and s.name == op)


def make_node_model(case: Case, attributes: dict[str, Any], outputs=None) -> onnx.ModelProto:
    names, weights = [], {}
    outputs = case.outputs if outputs is None else outputs
    for at, operand in enumerate(case.constants):
        if operand is None or isinstance(operand, str):
            names.append(operand or "")
        else:
            names.append(f"c{at}")
            weights[f"c{at}"] = np.asarray(operand)
    node = helper.make_node(case.op, names, outputs, domain=MICROSOFT, **attributes)
    inputs = {name: (array.dtype, array.shape) for name, array in case.data.items()}
    model = make_model([node], inputs, 13, weights, [MICROSOFT])
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name)
    return model


def compare(case: Case, attributes: dict[str, Any], outputs=None) -> None:
    model = make_node_model(case, attributes, outputs)
    wants = run_onnxruntime(model, case.data, rewrites=False)
    mod, _ = rq.load(model)
    for found, want in zip(rq.reference.run(mod, case.data), wants, strict=True):
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        if want.dtype.kind == "f":
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
        else:  # ONNX Runtime computes some in fixed point: a step more or less
            assert np.abs(found.astype(int) - want.astype(int)).max(initial=0) <= 1


EACH = [pytest.param(case, id=f"{case.op}-{at}") for at, case in enumerate(CASES)]


@pytest.mark.parametrize("case", EACH)
def test_attributes__as_onnx_runtime(case):
    compare(case, case.base)
    for name, values in case.options.items():
        for value in values:
            compare(case, {**case.base, name: value})


@pytest.mark.parametrize("case", EACH)
def test_attributes__refused_by_name(case):
    for name, value in case.refused.items():
        with pytest.raises(ModelError, match=rf"operator {case.op}.*\b{name}\b"):
            rq.load(make_node_model(case, {**case.base, name: value}))


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_attributes__every_one_of_the_schema(op):
    cases = [case for case in CASES if case.op == op]
    tried = {name for case in cases for name in (*case.options, *case.refused)}
    assert tried >= list_attributes(op)


def test_skip_layer_normalization__all_outputs():
    """ONNX Runtime's CPU kernel leaves the statistics out; LayerNormalization has them."""
    case = next(case for case in CASES if case.op == "SkipLayerNormalization")
    compare(case, {"epsilon": 1e-3}, ("y", "", "", "sum"))
    model = make_node_model(case, {"epsilon": 1e-3}, ("y", "mean", "inverse", "sum"))
    y, mean, inverse, total = rq.reference.run(rq.load(model)[0], case.data)
    node = helper.make_node("LayerNormalization", ["x", "s", "b"], ["y", "m", "i"], epsilon=1e-3)
    weights = {"s": case.constants[2], "b": case.constants[3]}
    plain = make_model([node], {"x": ("float32", total.shape)}, 17, weights)
    del plain.graph.output[:]
    plain.graph.output.extend(onnx.ValueInfoProto(name=name) for name in "ymi")
    for found, want in zip(
        (y, mean, inverse), run_onnxruntime(plain, {"x": total}, rewrites=False), strict=True
    ):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_embed_layer_normalization__all_outputs():
    for case in (case for case in CASES if case.op == "EmbedLayerNormalization"):
        compare(case, {"mask_index_type": 1}, ("y", "counts", "sum"))


def test_outputs__that_are_not_computed():
    case = next(case for case in CASES if case.op == "Attention")
    model = make_node_model(case, case.base, ("y", "present"))
    with pytest.raises(
        ModelError, match="its output 'present', number 2, is not computed; supported: output 1"
    ):
        rq.load(model)
    assert numpy_helper.to_array(model.graph.initializer[0]).shape == (8, 24)


def make_rms_norm() -> onnx.ModelProto:
    """The operators of which ONNX Runtime makes one, SimplifiedLayerNormalization."""
    steps = [
        ("Pow", ["x", "two"], "square"),
        ("ReduceMean", ["square"], "mean"),
        ("Add", ["mean", "epsilon"], "power"),
        ("Sqrt", ["power"], "root"),
        ("Div", ["x", "root"], "value"),
        ("Mul", ["value", "scale"], "y"),
    ]
    nodes = [
        helper.make_node(op, names, [name], **({"axes": [-1]} if op == "ReduceMean" else {}))
        for op, names, name in steps
    ]
    weights = {"two": scale(2.0), "epsilon": scale(0.01), "scale": draw(8)}
    model = make_model(nodes, {"x": ("float32", (2, 3, 8))}, 13, weights)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def test_simplified_layer_normalization__of_a_file_that_onnx_runtime_optimized(tmp_path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = make_rms_norm()
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    optimized = onnx.load(options.optimized_model_filepath)
    assert [(n.domain, n.op_type) for n in optimized.graph.node] == [
        ("", "SimplifiedLayerNormalization")
    ]
    data = {"x": draw(2, 3, 8)}
    (want,) = run_onnxruntime(model, data, rewrites=False)
    (found,) = rq.reference.run(rq.load(optimized)[0], data)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    optimized.graph.node[0].attribute.append(helper.make_attribute("unheard_of", 1))
    with pytest.raises(ModelError, match=r"operator Simplified.*attribute unheard_of is 1"):
        rq.load(optimized)


@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_simplified_layer_normalization__attributes(axis):
    weights, data = {"c": draw(*(2, 3, 8)[axis:])}, {"x": draw(2, 3, 8)}
    for outputs in (["y"], ["y", "inverse"]):
        node = helper.make_node(
            "SimplifiedLayerNormalization", ["x", "c"], outputs, axis=axis, epsilon=0.1,
            stash_type=1,
        )  # fmt: skip
        model = make_model([node], {"x": ("float32", (2, 3, 8))}, 13, weights)
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        if len(outputs) > 1:
            read = onnx.ModelProto.FromString(model.SerializeToString())
            read.graph.output.add().CopyFrom(model.graph.output[0])
            read.graph.output[1].name = "inverse"
            with pytest.raises(ModelError, match="its output 'inverse', number 2, is not comp"):
                rq.load(read)
        (want,) = run_onnxruntime(model, data, rewrites=False)
        (found,) = rq.reference.run(rq.load(model)[0], data)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
