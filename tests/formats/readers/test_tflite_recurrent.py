"""TensorFlow Lite's recurrent operators as its interpreter computes them, with their state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tflite_models import Operator, Tensor, write_model

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_tflite
from relayquant.ir import reference

STEPS, BATCH, INPUTS, UNITS = 3, 2, 5, 6
RELU, TANH = 1, 4
#: Operator -> its options.
OPTIONS = {
    "BIDIRECTIONAL_SEQUENCE_LSTM": "BidirectionalSequenceLSTMOptions",
    "BIDIRECTIONAL_SEQUENCE_RNN": "BidirectionalSequenceRNNOptions",
    "LSTM": "LSTMOptions",
    "RNN": "RNNOptions",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTMOptions",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "SequenceRNNOptions",
}


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


@dataclass
class Layer:
    """A model of one recurrent operator, and its arithmetic.

    Attributes:
        outputs: Width of the hidden state. Other than UNITS: an LSTM with a projection.
        fields: More options.
    """

    kind: str
    activation: int = TANH
    coupled: bool = False
    look: bool = False
    outputs: int = UNITS
    cell_clip: float = 0.0
    merge: bool = False
    time_major: bool = True
    fields: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.is_lstm, self.both = "LSTM" in self.kind, self.kind.startswith("BI")
        self.is_sequence = "SEQUENCE" in self.kind
        count = 1 + self.both
        self.constants: list[list[np.ndarray | None]] = [[] for _ in range(count)]
        for rows in self.constants:
            for is_given, shape in self.list_shapes():
                array = rng.normal(size=shape, scale=0.6).astype("float32")
                rows.append(array if is_given else None)
        widths = [self.outputs, UNITS] if self.is_lstm else [UNITS]
        self.start = [[np.zeros((BATCH, n), "float32") for n in widths] for _ in range(count)]

    def list_shapes(self):
        """(whether it is given, shape) of the constants of one direction."""
        if not self.is_lstm:
            return [(True, (UNITS, INPUTS)), (True, (UNITS, UNITS)), (True, (UNITS,))]
        gates = [not self.coupled, True, True, True]
        projects = self.outputs != UNITS
        return [
            *((given, (UNITS, INPUTS)) for given in gates),
            *((given, (UNITS, self.outputs)) for given in gates),
            *((given and self.look, (UNITS,)) for given in gates[:3]),
            *((given, (UNITS,)) for given in gates),
            (projects, (self.outputs, UNITS)),
            (projects, (self.outputs,)),
        ]

    def write(self, path: Path, extra: tuple[int, ...] = ()) -> Path:
        """Write the model. `extra` are numbers of operands that are usually left out."""
        tensors: list[Tensor] = []

        def add(shape, values=None, variable=False):
            tensors.append(
                Tensor(f"t{len(tensors)}", shape, "float32", values, None, None, variable)
            )
            return tensors[-1].name

        names = ["x"]
        for rows in self.constants:
            names += ["" if row is None else add(row.shape, row) for row in rows]
            if not self.is_lstm:
                names.append(add((BATCH, UNITS), variable=True))
        for at in range(len(self.constants) if self.is_lstm else 0):
            names += [add(state.shape, variable=True) for state in self.start[at]]
        count = {"LSTM": 24, "BIDIRECTIONAL_SEQUENCE_LSTM": 48, "BIDIRECTIONAL_SEQUENCE_RNN": 12}
        names += [""] * (count.get(self.kind, 24 if self.is_lstm else 5) - len(names))
        for at in extra:
            names[at] = add((UNITS,), np.ones(UNITS))
        lead = self.lead
        width = self.outputs * (1 + (self.both and self.merge))
        outputs = ["y", "z"] if self.both and not self.merge else ["y"]
        fields: dict[str, object] = {"FusedActivationFunction": self.activation}
        if self.is_lstm:
            fields["CellClip"] = self.cell_clip
        if self.is_sequence:
            fields["TimeMajor"] = self.time_major
        if self.both:
            fields["MergeOutputs"] = self.merge
        call = Operator(self.kind, names, outputs, OPTIONS[self.kind], fields | self.fields)
        results = [Tensor(name, (*lead, width)) for name in outputs]
        return write_model(
            path / "model.tflite",
            [Tensor("x", (*lead, INPUTS)), *tensors, *results],
            [call],
            ["x"],
            outputs,
        )

    @property
    def lead(self) -> tuple[int, ...]:
        if not self.is_sequence:
            return (BATCH,)
        return (STEPS, BATCH) if self.time_major else (BATCH, STEPS)

    def run(self, x: np.ndarray, states) -> list[np.ndarray]:
        """Compute the operator with numpy, in float64. `states` are changed."""
        x = x[None] if not self.is_sequence else x if self.time_major else x.swapaxes(0, 1)
        results = []
        for at, rows in enumerate(self.constants):
            step = self.step_lstm if self.is_lstm else self.step_rnn
            outputs = {}
            for t in range(len(x))[:: -1 if at else 1]:
                states[at] = step(x[t].astype("float64"), rows, *states[at])
                outputs[t] = states[at][0]
            y = np.stack([outputs[t] for t in range(len(x))])
            results.append(y if self.time_major else y.swapaxes(0, 1))
        if not self.is_sequence:
            return [results[0][0]]
        return [np.concatenate(results, 2)] if self.both and self.merge else results

    def activate(self, value):
        return np.tanh(value) if self.activation == TANH else np.maximum(value, 0)

    def step_rnn(self, x, rows, hidden):
        own, state, bias = rows
        return [self.activate(x @ own.T + hidden @ state.T + bias)]

    def step_lstm(self, x, rows, hidden, cell):
        own, state, look, bias = rows[:4], rows[4:8], rows[8:11], rows[11:15]

        def add(gate, peephole=None, seen=cell):
            value = x @ own[gate].T + hidden @ state[gate].T + bias[gate]
            return value if peephole is None else value + peephole * seen

        forget = sigmoid(add(1, look[1]))
        entry = 1 - forget if self.coupled else sigmoid(add(0, look[0]))
        cell = forget * cell + entry * self.activate(add(2))
        if self.cell_clip:
            cell = np.clip(cell, -self.cell_clip, self.cell_clip)
        hidden = sigmoid(add(3, look[2], cell)) * self.activate(cell)
        if rows[15] is not None:
            hidden = hidden @ rows[15].T + rows[16]
        return [hidden, cell]


UNI, BI = "UNIDIRECTIONAL_SEQUENCE_", "BIDIRECTIONAL_SEQUENCE_"
LAYERS = {
    "plain": Layer(f"{UNI}LSTM", cell_clip=10.0),
    "cell clip": Layer(f"{UNI}LSTM", cell_clip=0.4),
    "peepholes, batch first": Layer(f"{UNI}LSTM", look=True, time_major=False),
    "coupled gates": Layer(f"{UNI}LSTM", coupled=True),
    "coupled gates, peepholes": Layer(f"{UNI}LSTM", coupled=True, look=True),
    "projection": Layer(f"{UNI}LSTM", outputs=4, cell_clip=0.8),
    "relu": Layer(f"{UNI}LSTM", RELU, cell_clip=0.7),
    "one step": Layer("LSTM", look=True),
    "one step, projection": Layer("LSTM", outputs=4),
    "both": Layer(f"{BI}LSTM", outputs=4, time_major=False),
    "both, merged": Layer(f"{BI}LSTM", merge=True),
    "rnn": Layer(f"{UNI}RNN"),
    "rnn, relu, batch first": Layer(f"{UNI}RNN", RELU, time_major=False),
    "rnn, one step": Layer("RNN"),
    "rnn, both": Layer(f"{BI}RNN"),
    "rnn, both, merged": Layer(f"{BI}RNN", merge=True),
}


def draw_runs(layer: Layer) -> list[np.ndarray]:
    """Inputs of several runs. The state of one run is where the next begins."""
    rng = np.random.default_rng(1)
    return [rng.normal(size=(*layer.lead, INPUTS)).astype("float32") for _ in range(3)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LAYERS)
def test_layer__as_numpy_computes_it(name, tmp_path):
    layer = LAYERS[name]
    mod, _ = import_tflite(layer.write(tmp_path))
    values, states = [state.value for state in rq.get_state(mod)], [*layer.start]
    for x in draw_runs(layer):
        expected = layer.run(x, states)
        found = reference.run(mod, [x, *values])
        values = found[len(expected) :]
        for one, other in zip(found, expected, strict=False):
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYERS)
def test_expectation__is_that_of_the_interpreter(name, tmp_path):
    """Only where TFLite itself is installed."""
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    layer = LAYERS[name]
    machine = litert.Interpreter(
        str(layer.write(tmp_path)),
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    machine.allocate_tensors()
    states = [*layer.start]
    for x in draw_runs(layer):
        machine.set_tensor(machine.get_input_details()[0]["index"], x)
        machine.invoke()
        expected = layer.run(x, states)
        for place, value in zip(machine.get_output_details(), expected, strict=True):
            np.testing.assert_allclose(machine.get_tensor(place["index"]), value, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_state__is_held_between_runs_and_quantized(tmp_path):
    layer = LAYERS["projection"]
    mod, params = rq.load(layer.write(tmp_path))
    assert [state.shape for state in rq.get_state(mod)] == [(BATCH, 4), (BATCH, UNITS)]
    runs = draw_runs(layer)
    qmod = rq.quantize(mod, params, [rq.SampleSequence(runs)], effort="fast")
    row = next(row for row in rq.ledger(qmod).to_dict()["operators"] if row["op"] == "qnn.lstm")
    assert row["quantized"]
    executor, states = rq.Executor(rq.compile(qmod)), [*layer.start]
    for x in runs:
        (found,), (expected,) = executor.run("main", [x]), layer.run(x, states)
        assert np.abs(found - expected).max() < 0.02


@pytest.mark.parametrize(
    ("layer", "extra", "message"),
    [
        (Layer(f"{UNI}LSTM"), (20,), "it has layer normalization; supported: none"),
        (Layer(f"{BI}LSTM"), (39,), "it has an auxiliary input; supported: none"),
        (Layer(f"{BI}RNN"), (10,), "it has an auxiliary input; supported: none"),
        (Layer("LSTM", fields={"KernelType": 1}), (), "its kernel is BASIC; supported: FULL"),
        (Layer(f"{UNI}RNN", 3), (), "its fused activation is RELU6; supported: RELU, TANH"),
        (
            Layer(f"{UNI}LSTM", outputs=4, fields={"ProjClip": 0.5}),
            (),
            r"its projection is clipped at 0\.5; supported: no clip",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layer__what_the_dialect_does_not_have(layer, extra, message, tmp_path):
    with pytest.raises(ModelError, match=rf"{layer.kind} .*{message}"):
        import_tflite(layer.write(tmp_path, extra))


ROWS = np.array([[3, -2, 0], [0, 1, -1], [2, 0, 5]], "int8")


def write_rnn(path: Path, names: str, signature: tuple[int, ...] = ()) -> Path:
    """Write a simple recurrent layer of the operands with these letters."""
    tensors = [
        Tensor("x", (2, 1, 3), signature=signature),
        Tensor("q", (2, 1, 3), "int8", scale=(0.1, 0)),
        Tensor("w", (3, 3), "int8", ROWS, scale=(0.1, 0)),
        Tensor("f", (3, 3), "float32", ROWS * np.float32(0.1)),
        Tensor("b", (3,), "float32", np.zeros(3)),
        Tensor("h", (1, 3), variable=True),
        Tensor("c", (1, 3)),
        Tensor("y", (2, 1, 3), signature=signature),
    ]
    fields = {"FusedActivationFunction": TANH, "TimeMajor": True}
    kind = f"{UNI}RNN"
    call = Operator(kind, list(names), ["y"], OPTIONS[kind], fields)
    return write_model(path / "m.tflite", tensors, [call], [names[0]], ["y"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("qffbh", "its operand 'q' is int8; supported: float32. Convert the model without"),
        ("qwwbh", "its operand 'q' is int8"),
        ("xffbc", "its state 'c' is not marked as a variable"),
    ],
)
def test_layer__of_integers_or_without_a_variable(names, message, tmp_path):
    with pytest.raises(ModelError, match=f"{UNI}RNN .*{message}"):
        import_tflite(write_rnn(tmp_path, names))


def test_layer__with_weights_of_integers(tmp_path):
    """Dynamic range quantization: as with the numbers that they stand for."""
    (integers, _), (floats, _) = (import_tflite(write_rnn(tmp_path, n)) for n in ("xwwbh", "xffbh"))
    inputs = [np.linspace(-1, 2, 6, dtype="float32").reshape(2, 1, 3), np.ones((1, 3), "float32")]
    found, expected = reference.run(integers, inputs), reference.run(floats, inputs)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("batch", [4, "N"])
def test_layer__whose_state_fixes_the_batch(batch, tmp_path):
    path = write_rnn(tmp_path, "xffbh", (-1, -1, 3))
    says = rf"its state has the batch 1 and its input {batch}; supported: equal .*shapes=, here 1"
    with pytest.raises(ModelError, match=says):
        rq.load(path, shapes={"x": (5, batch, 3)})
    assert rq.load(path, shapes={"x": (5, 1, 3)})[0]
