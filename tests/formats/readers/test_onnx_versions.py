"""Every operator in each of its versions, with drawn attributes: as the reference evaluator of the
onnx package computes it, or refused.

A row of `ROWS` lists values for the inputs and attributes of an operator by name. What is an input,
what an attribute and what there is at all says the schema of each version, so that a row serves all
of them.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx.shape_inference
import onnxruntime
import pytest
import tvm
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_node_cases import TARGET, find_difference
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers.onnx.graph.file import MIN_OPSET

RNG = np.random.default_rng(3)

#: Samples of each version of an operator in every run, and with -m slow.
SAMPLES, MANY = 1, 12


def draw(*shape):
    return RNG.standard_normal(shape).astype("float32")


def ints(*values):
    return np.array(values, "int64")


@dataclass(frozen=True)
class Row:
    """An operator and what its operands and attributes may be.

    Attributes:
        op: Operator type.
        data: Values of the inputs that are known at run time only, by name, or several such.
        options: Other inputs (constants) and attributes: name -> values to draw from; None is left
            out.
        outputs: How many outputs are asked for.
        rtol: Relative tolerance.
        fault: What the reference evaluator does wrong here, so that ONNX Runtime is asked.
    """

    op: str
    data: tuple[dict[str, np.ndarray], ...]
    options: dict[str, list] = field(default_factory=dict)
    outputs: int = 1
    rtol: float = 1e-4
    fault: str = ""


def row(op, *data, outputs=1, rtol=1e-4, fault="", **options):
    return Row(op, tuple(data), options, outputs, rtol, fault)


IMAGE = draw(1, 2, 6, 8)
TABLE = draw(3, 4, 5)
POSITIVE = np.abs(TABLE) + np.float32(0.1)
UNIT = np.tanh(TABLE)

UNARY = {
    **dict.fromkeys(("Acos", "Asin", "Atanh"), ("input", UNIT)),
    **dict.fromkeys(
        ("Cos", "Sin", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Tanh"), ("input", TABLE)
    ),
    **dict.fromkeys(("Exp", "Sign", "Erf"), ("input", TABLE)),
    **dict.fromkeys(("Abs", "Neg", "Floor", "Ceil", "Reciprocal"), ("X", TABLE)),
    **dict.fromkeys(
        ("Relu", "Sigmoid", "Softplus", "Round", "Mish", "HardSwish", "IsNaN"), ("X", TABLE)
    ),
    "Softsign": ("input", TABLE),
    "Identity": ("input", TABLE),
    "Sqrt": ("X", POSITIVE),
    "Log": ("input", POSITIVE),
    "Acosh": ("input", POSITIVE + 1),
    "GlobalAveragePool": ("X", IMAGE),
    "GlobalMaxPool": ("X", IMAGE),
}

REDUCTIONS = (
    *("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
)

ROWS = [
    *(row(op, {name: value}) for op, (name, value) in UNARY.items()),
    row("Not", {"X": TABLE > 0}),
    *(
        row(op, {"A": POSITIVE, "B": POSITIVE[::-1].copy()}, {"A": POSITIVE, "B": POSITIVE[0, :1]})
        for op in ("Add", "Sub", "Mul", "Div", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
    ),
    row("Equal", {"A": np.round(TABLE), "B": np.round(TABLE[0])}),
    *(row(op, {"A": TABLE > 0, "B": TABLE[::-1] > 0.3}) for op in ("And", "Or", "Xor")),
    row("Pow", {"X": POSITIVE, "Y": TABLE}, {"X": POSITIVE, "Y": ints(2, 3, 0, 1, 2)}),
    row(
        "Mod",
        {"A": TABLE * 5, "B": TABLE[::-1].copy()},
        {"A": ints(-7, 7, -3), "B": ints(3, -3, 2)},
        fmod=[0, 1],
    ),
    row(
        "BitShift",
        {"X": np.array([1, 255, 8], "uint8"), "Y": np.array([1, 3, 9], "uint8")},
        direction=["LEFT", "RIGHT"],
    ),
    row("IsInf", {"X": np.array([1, np.inf, -np.inf, np.nan], "float32")},
        detect_negative=[None, 0, 1], detect_positive=[None, 0, 1]),
    *(
        row(op, {"X": TABLE}, alpha=[None, 0.3], beta=[None, 0.7], gamma=[None, 1.5],
            bias=[None, 0.2], lambd=[None, 0.4])
        for op in ("Elu", "LeakyRelu", "Selu", "HardSigmoid", "ThresholdedRelu", "Celu", "Swish")
    ),
    row("Shrink", {"input": TABLE}, bias=[None, 0.2], lambd=[None, 0.4]),
    row("Gelu", {"X": TABLE}, approximate=[None, "tanh"]),
    row("PRelu", {"X": TABLE}, slope=[draw(5), draw(4, 1), draw(1)]),
    row("Clip", {"input": TABLE}, min=[None, np.float32(-0.3)], max=[None, np.float32(0.4)]),
    *(row(op, {"input": TABLE}, axis=[None, 0, 1, -1, 2])
      for op in ("Flatten",)),
    *(row(op, {"input": TABLE}, axis=[None, 0, 1, -1, 2], fault="opset 11 as 13")
      for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(
        row(op, {"data": POSITIVE}, axes=[None, ints(1), ints(0, -1), ints(2, 1, 0), ints()],
            keepdims=[None, 0, 1], noop_with_empty_axes=[None, 0, 1])
        for op in REDUCTIONS
    ),
    *(row(op, {"data": TABLE}, {"data": np.round(TABLE)}, axis=[None, 1, -1], keepdims=[None, 0, 1],
          select_last_index=[None, 1]) for op in ("ArgMax", "ArgMin")),
    row("Transpose", {"data": TABLE}, perm=[None, [0, 2, 1], [2, 0, 1]]),
    row("Squeeze", {"data": draw(1, 3, 1, 2)}, axes=[None, ints(0), ints(-2), ints(2, 0)]),
    row("Unsqueeze", {"data": TABLE}, axes=[ints(0), ints(-1), ints(3, 1), ints(1, -1)],
        fault="axes in turn below 13"),
    row("Reshape", {"data": TABLE}, shape=[ints(-1), ints(0, -1), ints(5, 2, 6)],
        allowzero=[None, 0]),
    row("Slice", {"data": TABLE}, starts=[ints(1, 0), ints(-2, -9)], ends=[ints(3, 99), ints(-1,
        4)],
        axes=[ints(0, 1), ints(-1, 1)], steps=[None, ints(1, 2), ints(1, 3)]),
    row("Split", {"input": draw(4, 6)}, axis=[None, 0, 1, -1], num_outputs=[2], outputs=2),
    row("Split", {"input": draw(5, 5)}, axis=[None, 0, 1, -1], split=[ints(1, 4), ints(3, 2)],
        outputs=2),
    row("Concat", {"inputs": TABLE}, axis=[0, -1]),
    row("Gather", {"data": TABLE}, indices=[ints(0, 2), ints(-1), ints([1, 2], [0, -1])],
        axis=[None, 0, 1, -1]),
    row("GatherElements", {"data": TABLE}, indices=[np.abs(np.round(TABLE)).astype("int64") % 3],
        axis=[None, 0, 1, -1]),
    row("GatherND", {"data": TABLE}, indices=[ints([0, 1], [2, 3]), ints([[0], [2]], [[1], [1]])],
        batch_dims=[None]),
    row("ScatterElements", {"data": TABLE}, indices=[ints([[1, 0, 2]])], updates=[draw(1, 1, 3)],
        axis=[None, 1, -1], reduction=[None, "add", "mul", "max", "min"]),
    row("ScatterND", {"data": TABLE}, indices=[ints([0], [2])], updates=[draw(2, 4, 5)],
        reduction=[None, "add", "mul", "max", "min"]),
    row("Expand", {"input": draw(3, 1)}, shape=[ints(3, 4), ints(2, 1, 6), ints(1, 1)]),
    row("Tile", {"input": draw(2, 3)}, repeats=[ints(1, 2), ints(3, 1)]),
    row("Pad", {"data": TABLE}, pads=[ints(0, 1, 2, 1, 0, 0)], mode=[None, "reflect", "edge"],
        constant_value=[None, np.float32(1.5)], value=[None, 1.5]),
    row("Where", {"condition": TABLE > 0}, X=[draw(5)], Y=[draw(4, 1)]),
    row("OneHot", {"indices": ints(0, 2, -1)}, depth=[np.array(4)], values=[np.array([1, 3],
        "float32")],
        axis=[None, 0, -1]),
    row("CumSum", {"x": TABLE}, axis=[np.array(1), np.array(-1)], exclusive=[None, 1],
        reverse=[None, 1]),
    row("TopK", {"X": TABLE}, K=[ints(2), ints(3)], k=[2], axis=[None, 0, 1, -1], largest=[None,
        0, 1],
        sorted=[None, 1], outputs=2),
    row("Trilu", {"input": draw(4, 5)}, k=[None, np.array(1), np.array(-1)], upper=[None, 0, 1]),
    row("EyeLike", {"input": draw(4, 5)}, k=[None, 1, -1]),
    *(row(op, {"data_0": TABLE}) for op in ("Sum", "Max", "Min", "Mean")),
    row("MatMul", {"A": TABLE}, B=[draw(5, 2), draw(3, 5, 2)]),
    row("Gemm", {"A": draw(3, 4)}, B=[draw(4, 4)], C=[draw(4), draw(3, 1)], alpha=[None, 0.5],
        beta=[None, 2.0], transB=[None, 0, 1]),
    row("Einsum", {"Inputs": TABLE}, equation=["abc->cab", "abc->b"]),
    row("Conv", {"X": IMAGE}, W=[draw(4, 2, 3, 3)], B=[None, draw(4)], strides=[None, [2, 1]],
        dilations=[None, [1, 2]], pads=[None, [1, 0, 2, 1]], group=[1]),
    row("Conv", {"X": IMAGE}, W=[draw(4, 1, 3, 3)], group=[2],
        auto_pad=[None, "VALID", "SAME_UPPER", "SAME_LOWER"]),
    row("ConvTranspose", {"X": IMAGE}, W=[draw(2, 3, 3, 3)], B=[None, draw(3)],
        strides=[None, [2, 2]], pads=[None, [1, 0, 1, 1]], output_padding=[None, [0, 0]]),
    row("MaxPool", {"X": IMAGE}, kernel_shape=[[3, 2]], strides=[None, [2, 3]],
        pads=[None, [1, 0, 1, 1]], ceil_mode=[None, 0, 1], dilations=[None, [1, 2]],
        fault="shape of uneven padding"),
    row("AveragePool", {"X": IMAGE}, kernel_shape=[[3, 2]], strides=[None, [2, 3]],
        pads=[None, [1, 0, 1, 1]], ceil_mode=[None, 0, 1], count_include_pad=[None, 0, 1]),
    row("LpPool", {"X": IMAGE}, kernel_shape=[[3, 2]], strides=[None, [2, 2]], p=[None, 1, 2]),
    row("BatchNormalization", {"X": IMAGE}, scale=[draw(2)], B=[draw(2)],
        mean=[draw(2)], var=[np.array([0.5, 2], "float32")], input_mean=[draw(2)],
        input_var=[np.array([0.5, 2], "float32")], epsilon=[None, 0.01], fault="trains below 14"),
    row("InstanceNormalization", {"input": IMAGE}, scale=[draw(2)], B=[draw(2)],
        epsilon=[None, 0.01]),
    row("LayerNormalization", {"X": TABLE}, Scale=[draw(5), draw(1)], B=[None, draw(5)],
        epsilon=[None, 0.01]),
    row("LayerNormalization", {"X": TABLE}, Scale=[draw(4, 5), draw(5)], B=[None, draw(4, 5)],
        axis=[1, -2], outputs=3),
    row("RMSNormalization", {"X": TABLE}, scale=[draw(5), draw(1)], epsilon=[None, 0.01],
        axis=[None, -1, 0, 1]),
    row("GroupNormalization", {"X": draw(2, 4, 3, 3)}, scale=[draw(4)],
        bias=[draw(4)], num_groups=[2], epsilon=[None, 0.01]),
    row("LpNormalization", {"input": TABLE}, axis=[None, 0, 1], p=[None, 1, 2],
        fault="signed sum for p=1"),
    row("MeanVarianceNormalization", {"X": IMAGE}, axes=[None, [0, 2, 3], [1, 2]]),
    row("LRN", {"X": draw(1, 7, 3, 3)}, size=[3, 5], alpha=[None, 0.01], beta=[None, 0.5],
        bias=[None, 2.0], fault="window of size 5 wrong"),
    row("DepthToSpace", {"input": draw(1, 8, 2, 3)}, blocksize=[2], mode=[None, "DCR", "CRD"]),
    row("SpaceToDepth", {"input": draw(1, 2, 4, 6)}, blocksize=[2], mode=[None, "DCR", "CRD"]),
    row("Upsample", {"X": IMAGE}, scales=[np.array([1, 1, 2, 3], "float32")],
        mode=["nearest", "linear"]),
    row("Resize", {"X": IMAGE}, {"X": draw(1, 1, 5, 7)},
        # no 0.6: (1 + 0.5) / 0.6 - 0.5 is 2 but for the rounding, and evaluators differ there
        scales=[np.array([1, 1, 2, 3], "float32"), np.array([1, 1, 0.65, 1.7], "float32")],
        mode=["nearest", "linear", "cubic"], nearest_mode=[None, "floor", "ceil",
        "round_prefer_ceil"],
        coordinate_transformation_mode=[None, "asymmetric", "align_corners", "pytorch_half_pixel",
                                        "half_pixel_symmetric"],
        cubic_coeff_a=[None, -0.5], exclude_outside=[None, 1], antialias=[None, 1]),
    row("Resize", {"X": IMAGE}, sizes=[ints(1, 2, 9, 5), ints(1, 2, 12, 4)],
        mode=["nearest", "linear", "cubic"],
        coordinate_transformation_mode=[None, "asymmetric", "align_corners"],
        keep_aspect_ratio_policy=[None, "not_larger", "not_smaller"]),
    row("NonMaxSuppression", {"boxes": np.abs(draw(1, 6, 4)), "scores": np.abs(draw(1, 2, 6))},
        max_output_boxes_per_class=[ints(3), ints(1)], iou_threshold=[np.array([0.3], "float32")],
        score_threshold=[None, np.array([0.5], "float32")], center_point_box=[None, 0, 1]),
    row("GridSample", {"X": IMAGE}, grid=[np.tanh(draw(1, 3, 4, 2))], align_corners=[None, 0, 1],
        mode=[None, "nearest", "bilinear", "linear", "cubic", "bicubic"],
        padding_mode=[None, "border", "reflection"]),
    row("Compress", {"input": TABLE}, condition=[np.array([True, False, True])], axis=[None, 0, 1]),
    row("NonZero", {"X": TABLE}),
    row("Shape", {"data": TABLE}, start=[None, 1, -1, 2], end=[None, 2, -1, 1]),
    row("Size", {"data": TABLE}),
    row("Cast", {"input": TABLE * 3}, to=[6, 7, 9, 10, 11]),
    row("Dropout", {"data": TABLE}),
]  # fmt: skip


def list_versions(op: str) -> list[int]:
    """An opset for each version of an operator since `MIN_OPSET`."""
    newest = onnx.defs.onnx_opset_version()
    found = {}
    for opset in range(MIN_OPSET, newest + 1):
        try:
            schema = onnx.defs.get_schema(op, opset)
        except onnx.defs.SchemaError:
            continue
        if not schema.deprecated:
            found.setdefault(schema.since_version, opset)
    return list(found.values())


def make_model(row: Row, opset: int, rng) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """(model of one node, inputs) with drawn values for what the version has."""
    schema = onnx.defs.get_schema(row.op, opset)
    data = row.data[rng.integers(len(row.data))]
    picked = {name: options[rng.integers(len(options))] for name, options in row.options.items()}
    names, constants = [], []
    for formal in schema.inputs:
        value = picked.get(formal.name)
        if formal.name in data:
            names.append(formal.name)
        elif value is not None:
            constants.append(numpy_helper.from_array(np.asarray(value), formal.name))
            names.append(formal.name)
        else:
            names.append("")
    while names and not names[-1]:
        names.pop()
    if schema.inputs[0].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        names = names * (1 if row.op == "Einsum" else 2)
    attributes = {
        name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        for name, value in picked.items()
        if name in schema.attributes and value is not None and np.size(value)
    }
    outputs = [f"y{at}" for at in range(row.outputs)]
    node = helper.make_node(row.op, names, outputs, **attributes)
    return make_onnx([node], data, outputs, constants, opset), data


def find_reference(row: Row, model: onnx.ModelProto, data) -> list[np.ndarray] | None:
    """Outputs by the reference evaluator, or by ONNX Runtime where that is wrong or cannot."""
    if not row.fault:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            return [np.asarray(value) for value in ReferenceEvaluator(model).run(None, data)]
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(infer_types(model), options)
        return session.run(None, data)
    except Exception:
        return None


def infer_types(model: onnx.ModelProto) -> bytes:
    """The model with types of its outputs, which ONNX Runtime wants."""
    inferred = onnx.shape_inference.infer_shapes(model)
    return inferred.SerializeToString()


def compare(row: Row, model: onnx.ModelProto, data: dict[str, np.ndarray]) -> str:
    """ "right", "refused", "no reference", or what differs."""
    want = find_reference(row, model, data)
    if want is None:
        return "no reference"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            mod, _ = rq.load(model)
    except ModelError as error:
        return f"refused: {error}"
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    given = [tvm.runtime.tensor(data[param.name].copy()) for param in mod["main"].params]
    result = machine["main"](*given)
    have = [out.numpy() for out in ([result] if hasattr(result, "numpy") else result)]
    return find_difference(have, want, row.rtol, 1e-5) or "right"


def check(row: Row, samples: int) -> None:
    """Each version of a row's operator with drawn attributes; at least one is compared."""
    rng = np.random.default_rng(len(row.op))
    results = {}
    for opset in list_versions(row.op):
        for sample in range(samples):
            model, data = make_model(row, opset, rng)
            results[opset, sample] = compare(row, model, data)
    known = ("right", "refused", "no reference")
    assert not {at: fault for at, fault in results.items() if not fault.startswith(known)}
    assert "right" in results.values()


def names_of(rows) -> list[str]:
    return [f"{at}-{row.op}" for at, row in enumerate(rows)]


#: Where one value decides: fractions as attributes of integers, and nothing at all to take.
EDGES = [
    row("Shrink", {"input": ints(-3, -1, 0, 2, 100)}, lambd=[1.5], bias=[0.5, 3.0]),
    row("Shrink", {"input": np.array([0, 1, 2, 200], "uint8")}, lambd=[1.0, 1.5], bias=[3.0]),
    # Below -lambd and above lambd, both: the first one decides.
    row("Shrink", {"input": TABLE}, lambd=[-0.5, -3.0], bias=[None, 0.25]),
    row("Shrink", {"input": ints(-3, -1, 0, 2, 100)}, lambd=[-1.5, -2.0], bias=[None, 0.5, -1.5]),
    row("Shrink", {"input": np.array([0, 2, 200], "uint8")}, lambd=[-1.5, -300.0], bias=[2.5]),
    *(
        row(
            "Gemm",
            {"A": ints([3, -2], [-9, 1]).astype(dtype)},
            B=[ints([2, 3], [5, -4]).astype(dtype)],
            C=[ints(1, -3).astype(dtype)],
            alpha=[0.5, 1.5],
            beta=[None, 0.5],
        )
        for dtype in ("int32", "int64")
    ),
    row("TopK", {"X": TABLE}, K=[ints(0)], axis=[None, 1], largest=[None, 0], outputs=2),
]


@pytest.mark.parametrize("row", EDGES, ids=names_of(EDGES))
def test_versions__edges(row):
    check(row, 2)


@pytest.mark.sample(18)
@pytest.mark.parametrize("row", ROWS, ids=names_of(ROWS))
def test_versions__as_the_reference_evaluator(row):
    check(row, SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=names_of(ROWS))
def test_versions__many_samples(row):
    check(row, MANY)
