"""Quantized operators of com.microsoft in every type and form that ONNX Runtime has for them."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_files import find_deviation
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.ir.rewrite.constants import count_constant_bytes

MICROSOFT = "com.microsoft"
TYPES = ("uint8", "int8")

#: Types of data and weight that ONNX Runtime multiplies.
PAIRS = (("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8"))


class Node:
    """One operator: constants, inputs of the run time (`None`: left out), attributes."""

    def __init__(self, op: str, seed: int = 0) -> None:
        self.op, self.rng = op, np.random.default_rng(seed)
        self.names: list[str] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.shapes: dict[str, tuple] = {}

    def constant(self, array) -> None:
        self.names.append(f"c{len(self.names)}")
        self.tensors.append(numpy_helper.from_array(np.asarray(array), self.names[-1]))

    def input(self, array, shape=None) -> None:
        self.names.append(f"x{len(self.names)}")
        self.inputs[self.names[-1]] = np.asarray(array)
        self.shapes[self.names[-1]] = np.shape(array) if shape is None else shape

    def absent(self, count: int = 1) -> None:
        self.names.extend([""] * count)

    def integers(self, dtype: str, shape) -> np.ndarray:
        limits = np.iinfo(dtype)
        return self.rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    def scales(self, size=()) -> np.ndarray:
        return self.rng.uniform(0.005, 0.015, size).astype("float32")

    def zeros(self, dtype: str, size=()) -> np.ndarray:
        middle = 128 if dtype == "uint8" else 0
        return (self.rng.integers(-9, 10, size) + middle).astype(dtype)

    def model(self, outputs: int = 1, **attrs) -> onnx.ModelProto:
        names = list(self.names)
        while names and not names[-1]:
            names.pop()
        found = [f"y{at}" for at in range(outputs)]
        node = helper.make_node(self.op, names, found, "n", domain=MICROSOFT, **attrs)
        infos = {name: (str(a.dtype), self.shapes[name]) for name, a in self.inputs.items()}
        return make_onnx([node], infos, found, self.tensors)

    def check(self, outputs: int = 1, **attrs) -> None:
        """What is loaded, lowered and compiled gives what ONNX Runtime gives."""
        model = self.model(outputs, **attrs)
        wanted = run_onnxruntime(model, self.inputs, rewrites=False)
        mod, _ = rq.load(model)
        qmod = rq.lower(mod)
        arrays = list(self.inputs.values())
        for found in (
            rq.reference.run(mod, arrays),
            rq.reference.run(qmod, arrays),
            Executor(rq.compile(qmod)).run("main", arrays),
        ):
            assert not find_deviation(found, wanted)


# -- products --------------------------------------------------------------------------------------


def make_product(types, *, columns, zeros, bias, is_constant, shape=(3, 7)) -> Node:
    """MatMulIntegerToFloat of data (..., 7) by (7, 5)."""
    n = Node("MatMulIntegerToFloat")
    n.input(n.integers(types[0], shape), ("n", *shape[1:]))
    n.constant(n.integers(types[1], (7, 5)))
    add = n.constant if is_constant else n.input
    add(n.scales(1))
    n.constant(n.scales(5 if columns else 1))
    if zeros:
        add(n.zeros(types[0], 1))
        n.constant(n.zeros(types[1], 5 if columns else 1))
    else:
        n.absent(2)
    if bias:
        n.constant(n.rng.normal(size=5).astype("float32"))
    return n


@pytest.mark.slow
@pytest.mark.parametrize("types", PAIRS, ids="-".join)
@pytest.mark.parametrize("is_constant", [True, False], ids=["static", "dynamic"])
def test_matmul_integer_to_float__in_every_form(types, is_constant):
    for columns, zeros, bias in itertools.product((False, True), repeat=3):
        form = {"columns": columns, "zeros": zeros, "bias": bias, "is_constant": is_constant}
        make_product(types, shape=(3, 7) if bias else (2, 3, 7), **form).check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_dynamic_quantize_matmul__in_every_form(dtype):
    for columns, zeros, bias in itertools.product((False, True), repeat=3):
        n = Node("DynamicQuantizeMatMul")
        n.input(n.rng.normal(size=(2, 3, 7)).astype("float32"), ("n", 3, 7))
        n.constant(n.integers(dtype, (7, 5)))
        n.constant(n.scales(5 if columns else ()))
        if zeros:
            n.constant(n.zeros(dtype, 5 if columns else ()))
        else:
            n.absent()
        if bias:
            n.constant(n.rng.normal(size=5).astype("float32"))
        n.check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_qgemm__with_scales_of_the_run_time(dtype):
    for bias, transposed in itertools.product((False, True), repeat=2):
        n = Node("QGemm")
        n.input(n.integers(dtype, (3, 7)))
        n.input(n.scales())
        n.constant(n.zeros(dtype))
        n.constant(n.integers(dtype, (5, 7) if transposed else (7, 5)))
        n.constant(n.scales())
        n.constant(n.zeros(dtype))
        if bias:
            n.constant(n.rng.integers(-3000, 3000, 5).astype("int32"))
        n.check(transB=int(transposed))


# -- choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 4), (2, 3, 4), (2, 3, 4)), ((3, 1), (2, 1, 4), (4,)), ((1,), (), (2, 3, 4))],
    ids=str,
)
def test_qlinear_where__broadcasts(dtype, shapes):
    n = Node("QLinearWhere")
    n.input(n.rng.integers(0, 2, shapes[0]).astype(bool))
    for shape in shapes[1:]:
        n.input(n.integers(dtype, shape))
        n.constant(n.scales())
        n.constant(n.zeros(dtype))
    n.constant(n.scales())
    n.constant(n.zeros(dtype))
    n.check()


# -- recurrence ------------------------------------------------------------------------------------

LSTM_FORMS = [
    {},
    {"direction": "reverse"},
    {"direction": "bidirectional", "columns": True},
    {"columns": True, "dtype": "uint8"},
    {"states": True, "bias": True},
    {"states": True, "bias": True, "lengths": True, "direction": "bidirectional"},
    {"states": True, "peepholes": True, "bias": True},
    {"input_forget": 1, "bias": True},
    {"clip": 0.3, "bias": True},
    {"activations": ["HardSigmoid", "Softsign", "Relu"], "dtype": "uint8"},
    {
        "activations": ["Sigmoid", "Tanh", "Affine"],
        "activation_alpha": [2.0],
        "activation_beta": [0.5],
    },
]


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("form", LSTM_FORMS, ids=str)
def test_dynamic_quantize_lstm__in_every_form(form):
    make_lstm(**form).check(3, **select_lstm_attributes(form))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "form", [form for form in LSTM_FORMS if "activations" not in form], ids=str
)
def test_dynamic_quantize_lstm__of_a_length_of_the_run(form):
    """It is the LSTM of the numbers that the weights stand for, as ONNX Runtime computes it."""
    n = make_lstm(**form)
    n.shapes[n.names[0]] = ("t", *np.shape(n.inputs[n.names[0]])[1:])
    quantized = n.model(3, **select_lstm_attributes(form))
    arrays = {each.name: numpy_helper.to_array(each) for each in n.tensors}
    names = [*n.names]
    for at in (1, 2):
        weight, scale, zero = (arrays.pop(names[place]) for place in (at, 6 + 2 * at, 7 + 2 * at))
        columns = [part.reshape(len(weight), 1, -1).astype("float32") for part in (zero, scale)]
        arrays[names[at]] = ((weight - columns[0]) * columns[1]).swapaxes(1, 2).copy()
    n.tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    n.names[8:], n.op = [], "LSTM"
    real = n.model(3, **select_lstm_attributes(form))
    real.graph.node[0].domain = ""
    mod, _ = rq.load(quantized)
    for steps in (1, 4):
        given = dict(n.inputs) | {names[0]: n.inputs[names[0]][:steps]}
        if form.get("lengths"):
            given[names[4]] = np.minimum(given[names[4]], steps)
        wanted = run_onnxruntime(real, given)
        assert not find_deviation(
            Executor(rq.compile(mod)).run("main", list(given.values())), wanted
        )


def select_lstm_attributes(form) -> dict:
    known: tuple[str, ...] = (
        "direction",
        "input_forget",
        "clip",
        "activations",
        "activation_alpha",
        "activation_beta",
    )
    return {"hidden_size": 6, **{name: form[name] for name in known if name in form}}


def make_lstm(
    *,
    direction="forward",
    columns=False,
    dtype="int8",
    states=False,
    bias=False,
    lengths=False,
    peepholes=False,
    **_,
) -> Node:
    n = Node("DynamicQuantizeLSTM")
    steps, batch, features, hidden = 4, 3, 5, 6
    count = 2 if direction == "bidirectional" else 1
    n.input(n.rng.normal(size=(steps, batch, features)).astype("float32"))
    n.constant(n.integers(dtype, (count, features, 4 * hidden)))
    n.constant(n.integers(dtype, (count, hidden, 4 * hidden)))
    for is_given, shape in (
        (bias, (count, 8 * hidden)),
        (lengths, None),
        (states, (count, batch, hidden)),
        (states, (count, batch, hidden)),
        (peepholes, (count, 3 * hidden)),
    ):
        if not is_given:
            n.absent()
        elif shape is None:
            n.input(np.array([4, 2, 3], "int32"))
        else:
            n.constant(n.rng.normal(size=shape).astype("float32"))
    for _ in range(2):
        size = (count, 4 * hidden) if columns else (count,)
        n.constant(n.scales(size) / 3)
        n.constant(np.full(size, 131 if dtype == "uint8" else 0, dtype))
    return n


def test_dynamic_quantize_lstm__steps_share_the_weights():
    node = make_lstm(direction="bidirectional")
    constants = sum(len(tensor.raw_data) for tensor in node.tensors)
    mod, _ = rq.load(node.model(3, hidden_size=6, direction="bidirectional"))
    assert count_constant_bytes(mod) < 2 * constants


# -- transformers ----------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batch", [2, "n"])
@pytest.mark.parametrize("has_segments", [True, False])
@pytest.mark.parametrize("has_mask", [True, False])
def test_qembed_layer_normalization__in_every_form(dtype, batch, has_segments, has_mask):
    n = Node("QEmbedLayerNormalization")
    length, width = 5, 8
    n.input(n.rng.integers(0, 9, (2, length)).astype("int32"), (batch, length))
    if has_segments:
        n.input(n.rng.integers(0, 2, (2, length)).astype("int32"), (batch, length))
    else:
        n.absent()
    tables = [(9, width), (7, width), (2, width) if has_segments else None, (width,), (width,)]

    def add_each(draw) -> None:
        for shape in tables:
            n.absent() if shape is None else n.constant(draw(shape))

    add_each(lambda shape: n.integers(dtype, shape))
    if has_mask:
        n.input(np.array([[1, 1, 1, 0, 0], [1] * 5], "int32"), (batch, length))
    else:
        n.absent()
    add_each(lambda _: n.scales())
    add_each(lambda _: n.zeros(dtype))
    n.check(2, epsilon=1e-5)


ATTENTION_FORMS = [
    {},
    {"columns": True},
    {"mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]], "int32")},
    {"mask": np.array([3, 4], "int32")},
    {"mask": np.tril(np.ones((2, 4, 4), "int32"))},
    {"mask": np.array([[1, 1, 0, 0], [1, 1, 1, 1]], "int32"), "mask_filter_value": -1.5},
    {"unidirectional": 1},
    {"past": 3, "unidirectional": 1},
    {"past": 2},
    {"past": 2, "mask": np.array([[0, 1, 1, 1, 1, 0], [1] * 6], "int32"), "unidirectional": 1},
    {"symbolic": True, "mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]], "int32")},
    {"symbolic": True, "unidirectional": 1},
    {"dynamic": True},
]


def make_attention(
    *,
    types=("uint8", "int8"),
    columns=False,
    mask=None,
    past=None,
    symbolic=False,
    dynamic=False,
    **_,
) -> Node:
    n = Node("QAttention")
    batch, length, width, heads, size = 2, 4, 6, 2, 3
    n.input(n.integers(types[0], (batch, length, width)), ("b", "s", width) if symbolic else None)
    n.constant(n.integers(types[1], (width, 3 * heads * size)))
    n.constant(n.rng.normal(size=3 * heads * size).astype("float32"))
    add = n.input if dynamic else n.constant
    add(n.scales(()))
    n.constant(n.scales(3 * heads * size if columns else ()))
    if mask is None:
        n.absent()
    else:
        n.input(mask, ("b", "s") if symbolic else None)
    add(n.zeros(types[0]))
    n.constant(n.zeros(types[1], 3 * heads * size if columns else ()))
    if past is not None:
        n.input(n.rng.normal(size=(2, batch, heads, past, size)).astype("float32"))
    return n


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", ATTENTION_FORMS, ids=lambda form: "-".join(form))
def test_qattention__in_every_form(form):
    known = ("unidirectional", "mask_filter_value")
    attrs = {name: form[name] for name in known if name in form}
    make_attention(**form).check(2 if "past" in form else 1, num_heads=2, **attrs)


#: operator, message -> attributes that are refused by name
REFUSED = {
    r"QAttention, .*attribute do_rotary is 1; supported: 0": (
        make_attention,
        {"num_heads": 2, "do_rotary": 1},
    ),
    r"QAttention, .*past_present_share_buffer is 1; supported: 0": (
        make_attention,
        {"num_heads": 2, "past_present_share_buffer": 1},
    ),
    r"QAttention, .*it has no attribute num_heads; required": (make_attention, {}),
    r"DynamicQuantizeLSTM, .*attribute layout is 1; supported: none of that name": (
        make_lstm,
        {"hidden_size": 6, "layout": 1},
    ),
    r"DynamicQuantizeLSTM, .*activation 'Cube'": (
        make_lstm,
        {"hidden_size": 6, "activations": ["Cube", "Tanh", "Tanh"]},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_operator__refuses_by_name(message):
    make, attrs = REFUSED[message]
    with pytest.raises(ModelError, match=message.replace(", .*", ".*")):
        rq.load(make().model(**attrs))


@pytest.mark.parametrize(
    "op", ["QMoE", "QOrderedMatMul", "QOrderedAttention", "QuantizeBFP", "MatMulNBitsMlp"]
)
def test_operator__that_is_not_read_is_named(op):
    n = Node(op)
    n.input(np.zeros((2, 2), "float32"))
    with pytest.raises(ModelError, match=rf"1 operator of the model: com.microsoft.{op} \(nodes"):
        rq.load(n.model())
