"""LSTM, GRU and RNN of ONNX against ONNX Runtime, and against PyTorch where it has what they do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from operator_names import list_operators
from test_onnx import check_against_onnxruntime

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx
from relayquant.formats.readers.onnx.operators.activations import ACTIVATIONS
from relayquant.ir import reference

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUTS, HIDDEN = 3, 2, 3, 4

#: attributes; "lengths", "peepholes", "bias", "states", "steps" and "variable" say which operands
#: there are: "variable" has the weights as inputs of the model
CASES = [
    ("LSTM", {}),
    ("GRU", {}),
    ("RNN", {}),
    ("LSTM", {"bias": False, "states": False, "steps": 1}),
    ("LSTM", {"direction": "bidirectional", "lengths": [2, 3]}),
    ("LSTM", {"direction": "reverse", "peepholes": True, "clip": 0.5}),
    ("LSTM", {"states": False, "peepholes": True, "input_forget": 1}),
    ("LSTM", {"input_forget": 1, "variable": True}),
    ("GRU", {"linear_before_reset": 1, "clip": 0.4}),
    ("GRU", {"linear_before_reset": 1, "states": False, "direction": "reverse"}),
    ("GRU", {"direction": "bidirectional", "lengths": [1, 3], "clip": 0.3}),
    ("GRU", {"states": False, "bias": False, "lengths": [0, 2]}),
    ("LSTM", {"lengths": [0, 2], "direction": "bidirectional"}),
    ("RNN", {"lengths": [0, 1], "direction": "reverse", "activations": ["Softsign"]}),
    ("RNN", {"direction": "bidirectional", "lengths": [1, 3], "variable": True}),
    (
        "LSTM",
        {
            "activations": ["HardSigmoid", "Tanh", "LeakyRelu"],
            "activation_alpha": [0.3, 0.1],
            "activation_beta": [0.4],
        },
    ),
    (
        "GRU",
        {
            "direction": "bidirectional",
            "activations": ["HardSigmoid", "Tanh", "sigmoid", "Elu"],
            "activation_alpha": [0.3, 0.7],
            "activation_beta": [0.4],
        },
    ),
    *(
        (
            "RNN",
            {"activations": [each.name], "activation_alpha": [0.3], "activation_beta": [0.7]},
        )
        for each in ACTIVATIONS
    ),
]


def make_case(
    op: str,
    *,
    bias: bool = True,
    states: bool = True,
    lengths: list[int] | None = None,
    peepholes: bool = False,
    variable: bool = False,
    steps: int = STEPS,
    **attributes,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """(model of one node, values of its inputs)"""
    rng = np.random.default_rng(0)
    directions = 1 + (attributes.get("direction") == "bidirectional")
    rows, layout = GATES[op] * HIDDEN, attributes.get("layout", 0)

    def draw(*shape):
        return rng.standard_normal(shape).astype("float32")

    weights = {"W": draw(directions, rows, INPUTS), "R": draw(directions, rows, HIDDEN)}
    if bias:
        weights["B"] = draw(directions, 2 * rows)
    if lengths is not None:
        weights["lengths"] = np.array(lengths, "int32")
    if peepholes:
        weights["P"] = draw(directions, 3 * HIDDEN)
    feeds = {"X": draw(BATCH, steps, INPUTS) if layout else draw(steps, BATCH, INPUTS)}
    names = ["h", "c"] if op == "LSTM" else ["h"]
    for name in names if states else ():
        feeds[name] = draw(*((BATCH, directions) if layout else (directions, BATCH)), HIDDEN)
    if variable:
        feeds, weights = feeds | weights, {}
    wanted = ["X", "W", "R", "B", "lengths", *names, *(["P"] if op == "LSTM" else [])]
    inputs = [name if name in feeds or name in weights else "" for name in wanted]
    while not inputs[-1]:
        inputs.pop()
    outputs = ["Y", "Y_h", "Y_c"][: 1 + len(names)]
    node = helper.make_node(op, inputs, outputs, "cell", hidden_size=HIDDEN, **attributes)
    return make_onnx([node], feeds, dict.fromkeys(outputs), weights, 14), feeds


def check(expected, model, feeds, **options):
    """Import, and compare what the operators of the module compute with `expected`.

    Nothing is compiled, which would take most of the time: the operators are ordinary ones.
    """
    got = reference.run(import_onnx(model, **options)[0], feeds)
    for want, have in zip(expected, got, strict=True):
        assert want.shape == have.shape
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "settings"), CASES)
def test_recurrent__as_onnxruntime(op, settings):
    model, feeds = make_case(op, **settings)
    check(run_onnxruntime(model, feeds), model, feeds)


def test_recurrent__compiled():
    check_against_onnxruntime(*make_case("GRU", linear_before_reset=1, lengths=[1, 2], steps=2))


@pytest.mark.parametrize("op", GATES)
def test_recurrent__layout_with_the_batch_first(op):
    """ONNX Runtime does not have it, and the reference evaluator the forward direction only."""
    model, feeds = make_case(op, layout=1)
    check(ReferenceEvaluator(model).run(None, feeds), model, feeds)


def test_recurrent__layout_of_two_directions():
    """What the other layout computes, transposed."""
    both = {"direction": "bidirectional", "lengths": [2, 3]}
    first, feeds = make_case("LSTM", layout=1, **both)
    second, _ = make_case("LSTM", **both)
    second.graph.initializer[0].CopyFrom(first.graph.initializer[0])
    turned = {name: value.swapaxes(0, 1) for name, value in feeds.items()}
    sequence, *last = reference.run(import_onnx(second)[0], turned)
    expected = [sequence.transpose(2, 0, 1, 3), *(value.swapaxes(0, 1) for value in last)]
    check(expected, first, feeds)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_recurrent__as_pytorch(op):
    torch = pytest.importorskip("torch")
    attributes = {"linear_before_reset": 1} if op == "GRU" else {}
    model, feeds = make_case(op, direction="bidirectional", **attributes)
    # PyTorch has the gates of an LSTM as i, f, c, o and those of a GRU as r, z, n.
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[op]
    module = getattr(torch.nn, op)(INPUTS, HIDDEN, bidirectional=True)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}

    def arrange(matrix):
        return torch.tensor(np.concatenate([np.split(matrix, GATES[op])[k] for k in order]))

    for at, suffix in enumerate(("", "_reverse")):
        biases = np.split(weights["B"][at], 2)
        arrays = (weights["W"][at], weights["R"][at], *biases)
        for name, array in zip(
            ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), arrays, strict=True
        ):
            getattr(module, f"{name}_l0{suffix}").data = arrange(array)
    states = tuple(torch.tensor(feeds[name]) for name in ("h", "c") if name in feeds)
    with torch.no_grad():
        output, last = module(torch.tensor(feeds["X"]), states if op == "LSTM" else states[0])
    expected = [output.numpy().reshape(STEPS, BATCH, 2, HIDDEN).swapaxes(1, 2)]
    expected += [value.numpy() for value in (last if op == "LSTM" else [last])]
    check(expected, model, feeds)


@pytest.mark.parametrize("op", GATES)
def test_recurrent__one_operator_for_all_steps(op):
    """The module does not grow with the number of steps."""
    few, many = (import_onnx(make_case(op, steps=n)[0])[0] for n in (3, 5000))
    assert list_operators(few) == list_operators(many)
    assert list_operators(few).count(f"qnn.{op.lower()}") == 1
    assert list_operators(few).count("matmul") == 1


def test_recurrent__one_constant_for_all_steps():
    """What is unrolled multiplies the inputs once, and the state always with the same constant."""
    names = ["Sigmoid", "Tanh", "Softsign"]
    mod, _ = import_onnx(make_case("LSTM", steps=5, activations=names)[0])
    (block,) = mod["main"].body.blocks
    products = [
        binding.value.args[1]
        for binding in block.bindings
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.matmul"
    ]
    assert len(products) == 1 + 5
    assert all(weight.same_as(products[1]) for weight in products[2:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activations": ["Tanh", "Tanh", "Swish"]}, "activation 'Swish' is not known; allowed"),
        ({"activations": ["Tanh"]}, "activations has 1 name; expected: 3"),
        ({"activations": ["Tanh", "Tanh", "Affine"]}, "'Affine' has no alpha"),
        ({"direction": "up"}, "direction is 'up'; allowed: forward, reverse, bidirectional"),
        ({"steps": 5000, "activations": ["Tanh", "Tanh", "Elu"]}, "more than 4096 steps"),
    ],
)
def test_recurrent__refused(settings, message):
    with pytest.raises(ModelError, match=f"'cell'.*LSTM.*{message}"):
        import_onnx(make_case("LSTM", **settings)[0])


def test_recurrent__weights_that_do_not_fit():
    model, _ = make_case("GRU")
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.zeros((1, 12, 5), "f4"), "R"))
    with pytest.raises(ModelError, match=r"W and R have the shapes .* expected: \(1, 15, 3\)"):
        import_onnx(model)


def make_symbolic(**settings):
    model, feeds = make_case("GRU", states=False, **settings)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_param, dims[1].dim_param = "T", "N"
    return model, feeds


def test_recurrent__length_known_at_run_time():
    model, feeds = make_symbolic()
    check(ReferenceEvaluator(model).run(None, feeds), model, feeds)


@pytest.mark.slow
def test_recurrent__length_known_at_run_time_in_both_directions():
    model, feeds = make_symbolic(direction="bidirectional", linear_before_reset=1)
    check_against_onnxruntime(model, feeds)


def test_recurrent__length_of_unrolled_steps_must_be_known():
    model, _ = make_symbolic(activations=["Sigmoid", "Softsign"])
    with pytest.raises(ModelError, match=r"length of its sequence is T; .*shapes={'X': "):
        import_onnx(model)
    import_onnx(model, shapes={"X": (STEPS, "N", INPUTS)})


@pytest.mark.slow
@pytest.mark.parametrize("op", GATES)
def test_recurrent__layers_of_symbolic_steps_are_quantized(op):
    """Steps and inputs have no size in the file; the weights say the inputs. The sizes of a layer's
    steps stay simple behind it: one with a condition ended in TVM.
    """
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.standard_normal(shape).astype("float32") / 2

    rows, nodes, weights = GATES[op] * HIDDEN, [], {"axis": np.array([1])}
    value = "X"
    for at, inputs in enumerate((INPUTS, HIDDEN, HIDDEN)):
        weights |= {f"W{at}": draw(1, rows, inputs), f"R{at}": draw(1, rows, HIDDEN)}
        nodes += [
            helper.make_node(op, [value, f"W{at}", f"R{at}"], [f"Y{at}"], hidden_size=HIDDEN),
            helper.make_node("Squeeze", [f"Y{at}", "axis"], [f"Z{at}"]),
        ]
        value = f"Z{at}"
    model = make_onnx(nodes, {"X": ["T", 1, "K"]}, {value: None}, weights, 14)
    samples = [draw(STEPS + at, 1, INPUTS) for at in range(4)]
    mod, params = import_onnx(model)
    exe = rq.Executor(rq.compile(rq.quantize(mod, params, samples, effort="fast")))
    for x in (draw(1, 1, INPUTS), draw(9, 1, INPUTS)):
        (want,) = run_onnxruntime(model, {"X": x})
        (got,) = exe.run("main", [x])
        assert got.shape == want.shape
        assert np.square(want).sum() > 30 * np.square(got - want).sum()  # 15 dB
