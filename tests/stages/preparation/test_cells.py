"""Unrolled cells -> one recurrent operator, against PyTorch, which ran the steps one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_names import list_operators
from tvm import relax, tirx

import relayquant as rq
from relayquant.ir import reference
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.preparation import prepare_module

torch = pytest.importorskip("torch")
INPUTS, UNITS, STEPS, BATCH = 6, 8, 4, 2
CELLS = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell, "rnn": torch.nn.RNNCell}


def write_loop(cell, feedback, steps=STEPS):
    """LSTM steps as frontends write them: two products, a split, and four activations."""
    own, state = (each.detach().numpy().T for each in (cell.weight_ih, cell.weight_hh))
    bias = (cell.bias_ih + cell.bias_hh).detach().numpy()
    op = relax.op
    x = relax.Var("x", relax.TensorType((BATCH, steps, INPUTS), "float32"))

    def emit(bb):
        parts = bb.emit(op.split(x, steps, 1))
        hidden = memory = None
        outputs = []
        for at in range(steps):
            row = bb.emit(op.squeeze(bb.emit(parts[at]), [1]))
            if feedback and hidden is not None:
                row = bb.emit(op.add(row, bb.emit(op.strided_slice(hidden, [1], [0], [INPUTS]))))
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
        return op.stack(outputs, 1)

    return make_main([x], emit)


def test_written_loop__of_joined_operands_whose_result_has_the_first_name():
    """What joins input and state in a step is gone once the result is a slice of the layer's."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((INPUTS + UNITS, UNITS)).astype("float32")
    bb, op = relax.BlockBuilder(), relax.op
    x = relax.Var("x", relax.TensorType((STEPS, BATCH, INPUTS), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            state, states = relax.const(np.zeros((BATCH, UNITS), "float32")), []
            for at in range(STEPS):
                row = bb.emit(op.take(x, relax.const(at, "int64"), 0))
                both = bb.emit(op.concat([row, state], 1), f"joined{at}")
                state = bb.emit(op.tanh(bb.emit(op.matmul(both, relax.const(weight)))))
                states.append(state)
            result = bb.emit_output(op.stack(states, 0), "all")
        bb.emit_func_output(result)
    mod, state, expected = prepare_module(bb.finalize()), np.zeros((BATCH, UNITS)), []
    assert list_operators(mod).count("qnn.rnn") == 1
    rows = rng.standard_normal((STEPS, BATCH, INPUTS)).astype("float32")
    for row in rows:
        state = np.tanh(np.concatenate([row, state], 1) @ weight)
        expected.append(state)
    np.testing.assert_allclose(reference.run(mod, [rows])[0], expected, rtol=0, atol=1e-5)


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
    assert operators.count("qnn.lstm") == (not feedback)
    assert ("tanh" in operators) == feedback
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


def check_joined(module, kind, layers=1):
    mod, inputs, expected = prepare(module)
    operators = list_operators(mod)
    assert operators.count(f"qnn.{kind}") == operators.count("matmul") == layers
    assert not {"sigmoid", "tanh", "concat"} & {*operators}
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
    assert f"qnn.{kind}" not in list_operators(mod)
    assert "join_cells declines at" in caplog.text
    assert "an input depends on the state of a step before" in caplog.text
    np.testing.assert_allclose(reference.run(mod, inputs)[0], expected[0], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_cell__that_the_dialect_does_not_have_stays():
    mod, inputs, expected = prepare(Written(0.5))
    assert "qnn.lstm" not in list_operators(mod)
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
    assert "qnn.gru" not in list_operators(mod)
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


# -- what looks like a layer -----------------------------------------------------------------------

op = relax.op
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(scale=0.5, size=shape).astype("float32")


def check_alike(body, shapes, layers):
    """A module that computes body(emit, a value of each shape) computes the same when it is
    prepared, with so many recurrent operators.
    """
    given = [relax.Var(f"x{at}", relax.TensorType(s, "float32")) for at, s in enumerate(shapes)]
    built = make_main(given, lambda bb: body(bb.emit, *given))
    mod, inputs = built, [draw(*shape) for shape in shapes]
    prepared = prepare_module(mod)
    assert sum(name.startswith("qnn.") for name in list_operators(prepared)) == layers
    (expected,), (found,) = (reference.run(each, inputs) for each in (mod, prepared))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def cut(emit, value, start, size, axis=1):
    return emit(op.strided_slice(value, [axis], [start], [start + size]))


def take(emit, value, at, axis):
    return emit(op.take(value, relax.const(at), axis=axis))


def run_rnn(emit, rows, weights, state, own):
    """h' = tanh(sum of rows @ weights + h @ own)"""
    given = zip([*rows, state], [*weights, own], strict=True)
    products = [emit(op.matmul(x, relax.const(w))) for x, w in given if x is not None]
    while len(products) > 1:
        products[:2] = [emit(op.add(*products[:2]))]
    return emit(op.tanh(products[0]))


def write_lstm(
    row,
    read=lambda emit, hidden: hidden,
    keep=lambda emit, memory: memory,
    change=lambda emit, parts, others: parts,
):
    """Steps of an LSTM. `row` makes the gates without the state; `read`, `keep` and `change` stand
    between the state, the cell and the gates, and those who read them.
    """
    state = draw(UNITS, 4 * UNITS)

    def body(emit, x, memory=None, *others):
        hidden, outputs = None, []
        for at in range(STEPS):
            gates = row(emit, x, at)
            if hidden is not None:
                taken = read(emit, hidden)
                matrix = relax.const(state[: int(taken.ty.shape.values[1])])
                gates = emit(op.add(gates, emit(op.matmul(taken, matrix))))
            i, o, f, g = change(
                emit, [cut(emit, gates, k * UNITS, UNITS) for k in range(4)], others
            )
            new = emit(op.multiply(emit(op.sigmoid(i)), emit(op.tanh(g))))
            if memory is not None:
                kept = emit(op.multiply(emit(op.sigmoid(f)), keep(emit, memory)))
                new = emit(op.add(kept, new))
            memory, hidden = new, emit(op.multiply(emit(op.sigmoid(o)), emit(op.tanh(new))))
            outputs.append(hidden)
        return op.stack(outputs, 1)

    return body


def make_row(axis=1):
    weight = relax.const(draw(INPUTS, 4 * UNITS))
    return lambda emit, x, at: emit(op.matmul(take(emit, x, at, axis), weight))


SEQUENCE, STATE = (BATCH, STEPS, INPUTS), (BATCH, UNITS)
GATES = (BATCH, STEPS, 4 * UNITS)


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 0, 1]], ids=str)
def test_steps__that_read_other_columns_of_one_value(places):
    weight, own = draw(INPUTS, UNITS), draw(UNITS, UNITS)

    def body(emit, x):
        state = None
        for at in places:
            state = run_rnn(emit, [cut(emit, x, at * INPUTS, INPUTS)], [weight], state, own)
        return state

    check_alike(body, [(BATCH, 3 * INPUTS)], 1)


def test_steps__that_read_values_of_other_widths():
    weight, own = draw(INPUTS, UNITS), draw(UNITS, UNITS)

    def body(emit, *values):
        state = None
        for value in values:
            state = run_rnn(emit, [cut(emit, value, 0, INPUTS)], [weight], state, own)
        return state

    check_alike(body, [(BATCH, INPUTS + at) for at in range(3)], 1)


def test_gates__that_read_an_input_twice_stay():
    weights, own = [draw(INPUTS, UNITS), draw(INPUTS, UNITS)], draw(UNITS, UNITS)

    def body(emit, x):
        state = None
        for at in range(3):
            state = run_rnn(emit, [take(emit, x, at, 1)] * 2, weights, state, own)
        return state

    check_alike(body, [SEQUENCE], 0)


@pytest.mark.parametrize("shapes", [[GATES], [GATES, STATE]], ids=["zeros", "start"])
def test_gates__whose_products_are_not_known(shapes):
    check_alike(write_lstm(lambda emit, x, at: take(emit, x, at, 1)), shapes, 1)


def test_layers__one_of_which_begins_where_the_other_ends():
    """An encoder and a decoder."""
    rows = make_row(), make_row()
    check_alike(write_lstm(lambda emit, x, at: rows[at // 2](emit, x, at)), [SEQUENCE], 2)


def test_sequence__whose_last_axis_is_time():
    check_alike(write_lstm(make_row(2)), [(BATCH, INPUTS, STEPS)], 1)


def test_gate__with_an_input_of_its_own_stays():
    def change(emit, parts, others):
        return [*parts[:3], emit(op.add(parts[3], others[0]))]

    check_alike(write_lstm(make_row(), change=change), [SEQUENCE, STATE, STATE], 0)


@pytest.mark.parametrize("size", [UNITS // 2, UNITS])
def test_state__is_read_whole_or_the_steps_stay(size):
    read = lambda emit, hidden: cut(emit, hidden, 0, size)  # noqa: E731
    check_alike(write_lstm(make_row(), read), [SEQUENCE], int(size == UNITS))


@pytest.mark.parametrize("size", [1, BATCH])
def test_cell__of_all_samples_or_the_steps_stay(size):
    def keep(emit, memory):
        return cut(emit, memory, 0, size, axis=0)

    check_alike(write_lstm(make_row(), keep=keep), [SEQUENCE], int(size == BATCH))


def test_initial_cell__of_one_row_for_all_samples_stays():
    check_alike(write_lstm(make_row()), [SEQUENCE, (1, UNITS)], 0)


def test_initial_cell__with_its_own_last_axis():
    body = write_lstm(make_row())
    check_alike(
        lambda emit, x, both: body(emit, x, take(emit, both, 0, 2)), [SEQUENCE, (*STATE, 2)], 1
    )


@pytest.mark.parametrize("shape", [(), (1, 1), (1, UNITS), STATE], ids=str)
def test_initial_cell__that_is_a_constant(shape):
    """A scalar is no row: the step that reads it stays, and the others are joined."""
    body, start = write_lstm(make_row()), relax.const(draw(*shape) + np.float32(1))
    check_alike(lambda emit, x: body(emit, x, start), [SEQUENCE], 1)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gru__whose_first_step_has_no_bias_of_the_state(has_bias):
    own, states = ([draw(n, UNITS) for _ in range(3)] for n in (INPUTS, UNITS))
    bias, one = relax.const(draw(UNITS)), relax.const(np.float32(1))

    def body(emit, x):
        state = None
        for at in range(STEPS):
            row = take(emit, x, at, 1)
            update, reset, new = (emit(op.matmul(row, relax.const(w))) for w in own)
            inner = bias
            if state is not None:
                a, b, c = (emit(op.matmul(state, relax.const(w))) for w in states)
                update, reset = emit(op.add(update, a)), emit(op.add(reset, b))
                inner = emit(op.add(c, bias))
            if state is not None or has_bias:
                new = emit(op.add(new, emit(op.multiply(emit(op.sigmoid(reset)), inner))))
            update, new = emit(op.sigmoid(update)), emit(op.tanh(new))
            rest = emit(op.multiply(emit(op.subtract(one, update)), new))
            kept = None if state is None else emit(op.multiply(update, state))
            state = rest if kept is None else emit(op.add(kept, rest))
        return state

    check_alike(body, [SEQUENCE], 1)


def test_gates__that_look_like_those_of_a_gru_with_a_number_stay():
    def body(emit, u, a, b):
        scaled = emit(op.multiply(emit(op.sigmoid(b)), relax.const(np.float32(0.5))))
        new = emit(op.tanh(emit(op.add(a, scaled))))
        return op.multiply(emit(op.subtract(relax.const(np.float32(1)), emit(op.sigmoid(u)))), new)

    check_alike(body, [STATE] * 3, 0)


@pytest.mark.parametrize("layers", [2, 3])
def test_layers__that_read_each_other_are_not_all_joined(layers):
    """Joined, each would wait for the other."""
    weights = [(draw(UNITS, UNITS), draw(UNITS, UNITS)) for _ in range(layers)]

    def body(emit, *rows):
        states = [run_rnn(emit, [x], [w], None, u) for x, (w, u) in zip(rows, weights, strict=True)]
        mixed = zip(states[1:] + states[:1], states, weights, strict=True)
        return op.concat([run_rnn(emit, [x], [w], h, u) for x, h, (w, u) in mixed], 1)

    check_alike(body, [STATE] * layers, layers - 1)


@pytest.mark.parametrize(("terms", "is_new"), [(500, True), (30, False)], ids=["long", "doubled"])
def test_sums__of_many_terms_are_read_in_a_moment(terms, is_new):
    def body(emit, x):
        total = x
        for _ in range(terms):
            total = emit(op.add(total, emit(op.exp(x)) if is_new else total))
        return op.tanh(emit(op.multiply(total, relax.const(np.float32(2.0**-20)))))

    check_alike(lambda emit, x: op.nn.relu(emit(body(emit, x))), [STATE], 0)


def test_slice__at_a_symbolic_place_stays():
    size = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((1, size, UNITS), "float32"))

    def emit(bb):
        last = op.strided_slice(x, [1], [size - 1], [size], assume_inbound=True)
        return op.tanh(bb.emit(last))

    mod = make_main([x], emit)
    assert "tanh" in list_operators(prepare_module(mod))
