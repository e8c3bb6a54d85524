"""torch.export programs that do more than to compute their outputs are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch", reason="pip install torch")
nn = torch.nn


class Holder(nn.Module):
    """What can change: buffers in and out of the state dict, a parameter; and the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.plain = torch.zeros(3)


def make_module(forward):
    return type("Module", (Holder,), {"forward": forward})()


def add_to_buffer(self, x):
    self.state.add_(x)
    return x + self.state


def add_without_gradients(self, x):
    with torch.no_grad():
        self.state.add_(x)
    return x + self.state


def assign_buffer(self, x):
    self.scratch = self.scratch + x
    return self.scratch * 2


def write_to_view(self, x):
    self.state[1:].copy_(x[1:])
    return x + self.state


def write_position(self, x):
    """As the static cache of a language model does."""
    self.state.index_copy_(0, torch.tensor([1]), x[:1])
    return self.state + x


def write_before_branch(self, x):
    self.state.add_(x)
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def count(self, x):
    """Changes what no output reads."""
    self.state += 1
    return x * 2


def change_both(self, x):
    self.state.add_(x)
    self.scratch.add_(x)
    x.mul_(2)
    return self.state + self.scratch


def scale_parameter(self, x):
    with torch.no_grad():
        self.weight.mul_(2)
    return x + self.weight


def write_to_input(self, x):
    x.add_(1)
    return x * 2


def write_to_view_of_input(self, x):
    x[:2][0] = 5
    return x * 2


def write_to_constant(self, x):
    self.plain.add_(x)
    return x + self.plain


BUFFER = r"changes the buffer '{}' in each run; .* Take the old value as an input and return the"
CHANGES = {
    add_to_buffer: BUFFER.format("state"),
    add_without_gradients: BUFFER.format("state"),
    assign_buffer: BUFFER.format("scratch"),
    write_to_view: BUFFER.format("state"),
    write_position: BUFFER.format("state"),
    write_before_branch: BUFFER.format("state"),
    count: BUFFER.format("state"),
    change_both: r"changes the buffers 'state', 'scratch' and the input 'x' in each run; .* Write",
    scale_parameter: r"changes the parameter 'weight' in each run; ",
    write_to_input: r"changes the input 'x' in each run; .* Write to a copy \(x = x.clone\(\)\)",
    write_to_view_of_input: r"changes the input 'x' in each run; ",
    write_to_constant: r"Constant plain is mutated",
}


def export(module, *shape):
    return torch.export.export(module, (torch.ones(*shape or (3,)),))


@pytest.mark.parametrize("forward", CHANGES, ids=lambda forward: forward.__name__)
def test_program__that_changes_something_refused(forward, tmp_path):
    module, path = make_module(forward).eval(), tmp_path / "model.pt2"
    program = export(module)
    torch.export.save(program, path)
    for given in (program, path):
        with pytest.raises(ModelError, match=CHANGES[forward]):
            rq.load(given)
    with pytest.raises(ModelError, match=CHANGES[forward]):
        rq.torch.quantize(module, (torch.ones(3),), [np.ones(3, "float32")])


def test_program__decomposed_before_it_was_saved_refused(tmp_path):
    program = export(make_module(add_to_buffer)).run_decompositions({})
    assert program.graph_signature.buffers_to_mutate
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(ModelError, match=CHANGES[add_to_buffer]):
        rq.load(tmp_path / "model.pt2")


STATISTICS = (
    r"the running statistics of '0'(, '2')? \(training mode\) in each run; .*model.eval\(\)"
)
RANDOM = r"draws random numbers; .* in eval mode \(model.eval\(\)\)"
TRAINING = {
    "batch norm": (nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)), STATISTICS),
    "instance norm": (nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)), STATISTICS),
    "dropout": (nn.Dropout(), RANDOM),
    "dropout of channels": (nn.Dropout1d(), RANDOM),
    "alpha dropout": (nn.AlphaDropout(), RANDOM),
    "rrelu": (nn.RReLU(), RANDOM),
    "recurrent dropout": (nn.LSTM(4, 4, 2, dropout=0.5), RANDOM),
    "attention": (nn.TransformerEncoderLayer(4, 2, batch_first=True), RANDOM),
}


@pytest.mark.parametrize("name", TRAINING)
def test_module_in_training_mode__refused_and_taken_in_evaluation_mode(name):
    module, message = TRAINING[name]
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32"))
    with pytest.raises(ModelError, match=message):
        rq.load(export(module.train(), 2, 3, 4))
    mod, _ = rq.load(export(module.eval(), 2, 3, 4))
    expected = module(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = rq.reference.run(mod, [x.numpy()])[0]
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_program__that_changes_its_own_values_only_is_taken():
    def forward(self, x):
        y = x.clone()
        y.add_(self.weight)
        t = torch.tensor([1.0, 2.0, 3.0])
        t[1:].mul_(y[:2])
        return y, t, self.state

    module = make_module(forward).eval()
    x = np.asarray([1.0, -2.0, 3.0], "float32")
    mod, _ = rq.load(export(module))
    for got, expected in zip(rq.reference.run(mod, [x]), module(torch.from_numpy(x)), strict=True):
        np.testing.assert_array_equal(got, expected.detach().numpy())


def test_many_buffers__are_counted():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            for k in range(8):
                self.register_buffer(f"layer{k}", torch.zeros(3))

        def forward(self, x):
            for k in range(8):
                getattr(self, f"layer{k}").add_(x)
            return self.layer0 + 1

    with pytest.raises(ModelError, match=r"buffers 'layer0', .*'layer4' and 3 names more in each"):
        rq.load(export(Cache()))
