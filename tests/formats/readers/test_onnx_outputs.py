"""Outputs of ONNX operators that a model leaves out or asks for: each as ONNX Runtime or the
evaluator of onnx computes it, or refused by its name.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers.onnx.foreign.table import FOREIGN

RNG = np.random.default_rng(23)
MICROSOFT = "com.microsoft"


def draw(*shape):
    return RNG.standard_normal(shape).astype("float32")


@dataclass(frozen=True)
class Case:
    """An operator with several outputs.

    Attributes:
        op: Operator type.
        data: Operands of the run time, by name.
        operands: All operands; an array is a constant, a string stands for itself.
        outputs: How many outputs it has.
        attrs: Its attributes.
        opset: Opset of the model.
        domain: Its domain.
        needed: Numbers of the outputs, from 0, that a valid node has.
        missing: Numbers of the outputs that are not computed here.
        by_evaluator: Whether the evaluator of onnx is asked, as ONNX Runtime has no such node.
    """

    op: str
    data: dict[str, np.ndarray]
    operands: list[Any]
    outputs: int
    attrs: dict[str, Any] = field(default_factory=dict)
    opset: int = 17
    domain: str = ""
    needed: tuple[int, ...] = (0,)
    missing: tuple[int, ...] = ()
    by_evaluator: bool = False

    def list_choices(self) -> list[tuple[str, ...]]:
        """List the names of the outputs of each valid node."""
        optional = [at for at in range(self.outputs) if at not in self.needed]
        found = []
        for count in range(len(optional) + 1):
            for chosen in itertools.combinations(optional, count):
                named = (*self.needed, *chosen)
                if named:
                    found.append(tuple(f"y{at}" * (at in named) for at in range(self.outputs)))
        return found


IMAGE, STEPS, TOKENS = draw(1, 2, 6, 8), draw(4, 2, 3), draw(2, 3, 8)
NORMS = [draw(2), draw(2), draw(2), np.abs(draw(2))]
HEADS = {"q_num_heads": 2, "kv_num_heads": 2}
PAIR = {"x": TOKENS, "skip": draw(2, 3, 8)}


def recurrent(op: str, gates: int, outputs: int) -> Case:
    weights = [draw(1, gates * 5, 3), draw(1, gates * 5, 5), draw(1, gates * 10)]
    return Case(op, {"x": STEPS}, ["x", *weights], outputs, {"hidden_size": 5}, 14, needed=())


CASES = [
    Case("BatchNormalization", {"x": IMAGE}, ["x", *NORMS], 5, opset=9, missing=(1, 2, 3, 4)),
    Case("BatchNormalization", {"x": IMAGE}, ["x", *NORMS], 3, {"training_mode": 1}, 15,
         needed=(0, 1, 2), by_evaluator=True),
    Case("Dropout", {"x": IMAGE}, ["x"], 2, opset=13),
    Case("MaxPool", {"x": IMAGE}, ["x"], 2, {"kernel_shape": [2, 2]}, missing=(1,)),
    Case("LayerNormalization", {"x": STEPS}, ["x", draw(3), draw(3)], 3),
    recurrent("LSTM", 4, 3),
    recurrent("GRU", 3, 2),
    recurrent("RNN", 1, 2),
    Case("TopK", {"x": STEPS}, ["x", np.array([2])], 2, needed=(0, 1)),
    Case("Unique", {"x": np.round(STEPS)}, ["x"], 4),
    Case("Unique", {"x": np.round(STEPS)}, ["x"], 4, {"axis": 1}),
    Case("SoftmaxCrossEntropyLoss", {"x": draw(3, 4)}, ["x", np.array([1, 0, 3])], 2, opset=13,
         by_evaluator=True),
    Case("Attention", {"x": TOKENS, "k": TOKENS, "v": TOKENS}, ["x", "k", "v"], 4, HEADS, 23,
         by_evaluator=True),
    Case("SkipLayerNormalization", PAIR, ["x", "skip", draw(8), draw(8)], 4, domain=MICROSOFT,
         ),
    Case("SkipSimplifiedLayerNormalization", PAIR, ["x", "skip", draw(8)], 4, {"epsilon": 1e-5},
         domain=MICROSOFT, missing=(1, 2)),
    Case("EmbedLayerNormalization", {"ids": np.array([[1, 2, 3]], "int32")},
         ["ids", None, draw(9, 8), draw(5, 8), None, draw(8), draw(8)], 3, domain=MICROSOFT,
         needed=(0, 1)),
    Case("Attention", {"x": TOKENS}, ["x", draw(8, 24), draw(24)], 2, {"num_heads": 2},
         domain=MICROSOFT, missing=(1,)),
]  # fmt: skip


def make_model(case: Case, names) -> onnx.ModelProto:
    operands = [f"c{at}" for at in range(len(case.operands))]
    weights = []
    for at, operand in enumerate(case.operands):
        if operand is None or isinstance(operand, str):
            operands[at] = operand or ""
        else:
            weights.append(numpy_helper.from_array(operand, operands[at]))
    node = helper.make_node(case.op, operands, names, domain=case.domain, **case.attrs)
    return make_onnx([node], case.data, filter(None, names), weights, case.opset)


def find_reference(case: Case, names) -> list[np.ndarray]:
    while not names[-1]:  # ONNX Runtime ends the process for some such nodes
        names = names[:-1]
    model = onnx.shape_inference.infer_shapes(make_model(case, names))
    if not case.by_evaluator:
        return run_onnxruntime(model, case.data, rewrites=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, case.data)]


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{case.op}" for at, case in enumerate(CASES)])
def test_named_outputs__computed_or_refused_by_name(case):
    for names in case.list_choices():
        model = make_model(case, names)
        refused = [at for at in case.missing if names[at]]
        if refused:
            fault = f"its output {names[refused[0]]!r}, number {refused[0] + 1}, is not computed"
            with pytest.raises(ModelError, match=fault):
                rq.load(model)
            continue
        results = rq.reference.run(rq.load(model)[0], case.data)
        if case.op == "SkipLayerNormalization" and (names[1] or names[2]):
            # ONNX Runtime leaves them out: test_skip_layer_normalization__all_outputs
            assert len(results) == sum(map(bool, names))
            continue
        for found, want in zip(results, find_reference(case, names), strict=True):
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_named_outputs__every_operator_that_has_several():
    """Operators of quantized values are tested with their operands, and bodies with their loops."""
    several = {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if schema.domain == "" and any(each.option.name == "Optional" for each in schema.outputs)
    }
    assert several <= {case.op for case in CASES}
    runtime = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    foreign = {
        schema.name
        for schema in runtime.get_all_operator_schema()
        if schema.domain == MICROSOFT and len(schema.outputs) > 1
    }
    tested = {case.op for case in CASES if case.domain}
    assert foreign & {*FOREIGN[MICROSOFT]} - tested == {
        "DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization",
    }  # fmt: skip


IMAGE = (2, 3, 4, 4)


def build_unread(op, operands, outputs, *, opset=17, domain="", read=1, shape=IMAGE, **attrs):
    """The model of a node whose outputs after the first `read` have names, and nobody reads."""
    names = [f"y{number}" for number in range(outputs)]
    constants = {f"c{at}": v for at, v in enumerate(operands) if isinstance(v, np.ndarray)}
    given = [f"c{at}" if isinstance(each, np.ndarray) else each for at, each in enumerate(operands)]
    node = helper.make_node(op, given, names, domain=domain, **attrs)
    return make_onnx([node], {"x": shape}, dict.fromkeys(names[:read]), constants, opset)


@pytest.mark.parametrize(
    ("op", "operands", "outputs", "settings"),
    [
        ("MaxPool", ["x"], 2, {"kernel_shape": [2, 2]}),
        ("Dropout", ["x"], 2, {}),
        ("LayerNormalization", ["x", draw(4)], 3, {}),
        (
            "SkipSimplifiedLayerNormalization",
            ["x", "x", draw(4)],
            3,
            {"shape": (2, 3, 4), "domain": MICROSOFT, "epsilon": 1e-5},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outputs__that_have_names_and_nobody_reads_are_left_out(op, operands, outputs, settings):
    model = build_unread(op, operands, outputs, **settings)
    x = draw(*settings.get("shape", IMAGE))
    (want,) = run_onnxruntime(model, {"x": x})
    mod, _ = rq.load(model)
    np.testing.assert_allclose(rq.reference.run(mod, [x])[0], want, rtol=1e-5, atol=1e-5)


def test_outputs__that_are_read_and_not_computed_are_refused():
    model = build_unread("MaxPool", ["x"], 2, kernel_shape=[2, 2], read=2)
    model.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(ModelError, match="output"):
        rq.load(model)
