"""Unrolled cells -> one recurrent operator, against PyTorch, which ran the steps one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

import relayquant as rq
from relayquant.ir import reference
from relayquant.ir.rewrite.graph import call_name
from relayquant.stages.preparation import prepare_module

torch = pytest.importorskip("torch")
INPUTS, UNITS, STEPS, BATCH = 6, 8, 4, 2
CELLS = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell, "rnn": torch.nn.RNNCell}


def write_loop(cell, feedback, steps=STEPS):
    """LSTM steps as frontends write them: two products, a split, and four activations."""
    own, state = (each.detach().numpy().T for each in (cell.weight_ih, cell.weight_hh))
    bias = (cell.bias_ih + cell.bias_hh).detach().numpy()
    bb, op = relax.BlockBuilder(), relax.op
    x = relax.Var("x", relax.TensorType((BATCH, steps, INPUTS), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            parts = bb.emit(op.split(x, steps, 1))
            hidden = memory = None
            outputs = []
            for at in range(steps):
                row = bb.emit(op.squeeze(bb.emit(parts[at]), [1]))
                if feedback and hidden is not None:
                    row = bb.emit(
                        op.add(row, bb.emit(op.strided_slice(hidden, [1], [0], [INPUTS])))
                    )
                gates = bb.emit(op.matmul(row, relax.const(own)))
                if hidden is not None:
                    gates = bb.emit(op.add(gates, bb.emit(op.matmul(hidden, relax.const(state)))))
                gates = bb.emit(op.split(bb.emit(op.add(gates, relax.const(bias))), 4, 1))
                entry, forget, out = (bb.emit(op.sigmoid(gates[k])) for k in (0, 1, 3))
                new = bb.emit(op.multiply(entry, bb.emit(op.tanh(gates[2]))))
                if memory is not None:
                    new = bb.emit(op.add(new, bb.emit(op.multiply(memory, forget))))
                memory = new
                hidden = bb.emit(op.multiply(out, bb.emit(op.tanh(memory))))
                outputs.append(hidden)
            result = bb.emit_output(op.stack(outputs, 1))
        bb.emit_func_output(result)
    return bb.finalize()


@pytest.mark.parametrize("feedback", [False, True])
def test_written_loop__is_one_operator_unless_an_input_depends_on_it(feedback):
    torch.manual_seed(0)
    cell, x = torch.nn.LSTMCell(INPUTS, UNITS), torch.randn(BATCH, STEPS, INPUTS)
    states, expected = None, []
    with torch.no_grad():
        for at in range(STEPS):
            back = states[0][:, :INPUTS] if feedback and states else 0
            states = cell(x[:, at] + back, states)
            expected.append(states[0])
    mod = prepare_module(write_loop(cell, feedback))
    operators = list_operators(mod)
    assert operators.count("relax.qnn.lstm") == (not feedback)
    assert ("relax.tanh" in operators) == feedback
    found = reference.run(mod, [x.numpy()])[0]
    np.testing.assert_allclose(found, torch.stack(expected, 1).numpy(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_written_loop__of_many_steps():
    """Nothing recurs from step to step: Python's stack has room for some hundred."""
    mod = prepare_module(write_loop(torch.nn.LSTMCell(INPUTS, UNITS), False, 300))
    assert len(list_operators(mod)) < 10


class Loop(torch.nn.Module):
    """Cells in a loop over the steps.

    `order` is the order of the steps. The states begin with zeros unless `start`. What `feedback`
    is set for takes the state of the step before as an input.
    """

    def __init__(self, kind, *, order=1, start=False, layers=1, feedback=False, last=False, axis=1):
        super().__init__()
        self.kind, self.order, self.start, self.feedback = kind, order, start, feedback
        self.last, self.axis = last, axis
        sizes = [INPUTS, *[UNITS] * (layers - 1)]
        self.cells = torch.nn.ModuleList([CELLS[kind](size, UNITS) for size in sizes])
        self.back = torch.nn.Linear(UNITS, INPUTS)

    def forward(self, x, h=None):
        zero = h if self.start else x.new_zeros(BATCH, UNITS)
        states: list[Any] = [(zero, zero) if self.kind == "lstm" else zero for _ in self.cells]
        outputs = []
        for at in range(STEPS)[:: self.order]:
            value = x.select(self.axis, at)
            if self.feedback and outputs:
                value = value + self.back(outputs[-1])
            for k, cell in enumerate(self.cells):
                states[k] = cell(value, states[k])
                value = states[k][0] if self.kind == "lstm" else states[k]
            outputs.append(value)
        if self.last:
            return outputs[-1], states[0][1] if self.kind == "lstm" else outputs[0]
        return torch.stack(outputs[:: self.order], self.axis)


class Written(torch.nn.Module):
    """An LSTM as people write it: one matrix for input and state."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.gates, self.scale = torch.nn.Linear(INPUTS + UNITS, 4 * UNITS), scale

    def forward(self, x):
        h = c = x.new_zeros(BATCH, UNITS)
        outputs = []
        for at in range(STEPS):
            i, f, o, g = self.gates(torch.cat([x[:, at], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g) * self.scale
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.cat(outputs, 1)


def prepare(module):
    """(canonical module, inputs, what PyTorch computes)"""
    torch.manual_seed(0)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.5)
    sizes = (BATCH, STEPS, INPUTS) if getattr(module, "axis", 1) else (STEPS, BATCH, INPUTS)
    inputs = [torch.randn(*sizes)]
    if getattr(module, "start", False):
        inputs.append(torch.randn(BATCH, UNITS))
    with torch.no_grad():
        expected = module.eval()(*inputs)
    mod, params = rq.load(torch.export.export(module, tuple(inputs)))
    results = expected if isinstance(expected, tuple) else (expected,)
    return (
        prepare_module(mod, params),
        [each.numpy() for each in inputs],
        [each.numpy() for each in results],
    )


def list_operators(mod):
    return [call_name(binding.value) for binding in mod["main"].body.blocks[0].bindings]


def check_joined(module, kind, layers=1):
    mod, inputs, expected = prepare(module)
    operators = list_operators(mod)
    assert operators.count(f"relax.qnn.{kind}") == operators.count("relax.matmul") == layers
    assert not {"relax.sigmoid", "relax.tanh", "relax.concat"} & {*operators}
    for found, wanted in zip(reference.run(mod, inputs), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CELLS)
def test_loop__is_one_operator(kind):
    check_joined(Loop(kind, layers=2), kind, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"order": -1}, {"start": True}, {"last": True}, {"axis": 0}], ids=str
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", CELLS)
def test_loop__is_one_operator_in_each_form(kind, settings):
    check_joined(Loop(kind, **settings), kind)


@pytest.mark.slow
def test_cell__of_one_matrix_for_input_and_state():
    check_joined(Written(), "lstm")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CELLS)
def test_loop__whose_inputs_depend_on_the_state_stays(kind, caplog):
    caplog.set_level("DEBUG", "relayquant.ir.rewrite")
    mod, inputs, expected = prepare(Loop(kind, feedback=True))
    assert f"relax.qnn.{kind}" not in list_operators(mod)
    assert "join_cells declines at" in caplog.text
    assert "an input depends on the state of a step before" in caplog.text
    np.testing.assert_allclose(reference.run(mod, inputs)[0], expected[0], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_cell__that_the_dialect_does_not_have_stays():
    mod, inputs, expected = prepare(Written(0.5))
    assert "relax.qnn.lstm" not in list_operators(mod)
    np.testing.assert_allclose(reference.run(mod, inputs)[0], expected[0], rtol=0, atol=2e-6)


class Different(torch.nn.Module):
    """Each step has its own weights."""

    def __init__(self):
        super().__init__()
        self.cells = torch.nn.ModuleList([torch.nn.GRUCell(INPUTS, UNITS) for _ in range(STEPS)])

    def forward(self, x):
        h = x.new_zeros(BATCH, UNITS)
        for at, cell in enumerate(self.cells):
            h = cell(x[:, at], h)
        return h


@pytest.mark.slow
def test_steps__with_other_weights_stay(caplog):
    caplog.set_level("DEBUG", "relayquant.ir.rewrite")
    mod, inputs, expected = prepare(Different())
    assert "relax.qnn.gru" not in list_operators(mod)
    assert "gates have different" in caplog.text
    np.testing.assert_allclose(reference.run(mod, inputs)[0], expected[0], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_joined_layer__is_quantized_as_one_row():
    module = Loop("lstm")
    mod, inputs, expected = prepare(module)
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=inputs[0].shape).astype("float32") for _ in range(8)]
    qmod = rq.quantize(mod, None, [*samples, inputs[0]], effort="fast")
    rows = rq.ledger(qmod).to_dict()["operators"]
    assert {row["op"] for row in rows if row["quantized"]} >= {"matmul", "qnn.lstm"}
    assert not {row["op"] for row in rows} & {"sigmoid", "tanh", "multiply", "add"}
    found = rq.Executor(rq.compile(qmod)).run("main", inputs)[0]
    assert np.abs(found - expected[0]).max() < 0.05
