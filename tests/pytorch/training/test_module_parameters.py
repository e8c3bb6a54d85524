"""Parameters of the module that is prepared: frozen ones stay frozen, tied ones tied, and gradients
are PyTorch's.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import relayquant as rq
from relayquant.config import QConfigMapping
from relayquant.errors import ConfigError

torch = pytest.importorskip("torch", reason="pip install torch")
nn = torch.nn


class Tied(nn.Module):
    """A table of vectors is the last weight too, and one layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("place", torch.randn(5, 8))

    def forward(self, ids):
        x = self.table(ids) + self.place
        return self.head(torch.relu(self.inner(torch.relu(self.inner(x)))))


class Frozen(nn.Module):
    """The first layers are frozen, and the bias of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = nn.LayerNorm(6)
        self.last = nn.Conv2d(4, 4, 3)
        self.first.requires_grad_(False)
        self.norm.weight.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def draw(kind):
    torch.manual_seed(0)
    inputs = torch.randint(0, 20, (4, 5)) if kind is Tied else torch.randn(4, 3, 8, 8)
    return kind().eval(), inputs


def take_step(module, inputs):
    """One step of gradient descent on the sum of squares. Return the results after it."""
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    module(inputs).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        return module(inputs).numpy()


@pytest.mark.parametrize("kind", [Tied, Frozen])
def test_float_module__trains_as_in_pytorch(kind):
    """Nothing is rounded: a step changes the results exactly as a step of the module itself."""
    module, inputs = draw(kind)
    prepared = rq.torch.prepare_qat(
        module, (inputs,), QConfigMapping(), calibration_dataset=[inputs.numpy()], effort="fast"
    ).eval()
    before = prepared(inputs).detach().numpy()
    after = take_step(prepared, inputs)
    expected = take_step(module, inputs)
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - before).max() > 0.01


@pytest.mark.parametrize("batch_norm", ["frozen", "live"])
def test_frozen__stays_as_it_is(batch_norm):
    module, x = draw(Frozen)
    prepared = rq.torch.prepare_qat(
        module,
        (x,),
        calibration_dataset=[x.numpy()],
        backend="x86",
        effort="fast",
        batch_norm=batch_norm,
    )
    fixed = {name for name, each in prepared.named_parameters() if not each.requires_grad}
    before = {name: each.detach().clone() for name, each in prepared.named_parameters()}
    take_step(prepared.train(), x)
    after = dict(prepared.named_parameters())
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert not moved & fixed
    assert {"weights.last:weight"} <= moved
    assert {"weights.first/2:weight", "weights.last:bias", "floats.norm:1"} <= fixed
    assert {"weights.last:weight", "floats.norm:2"}.isdisjoint(fixed)


def test_tied__are_one_parameter():
    module, ids = draw(Tied)
    prepared = rq.torch.prepare_qat(
        module, (ids,), calibration_dataset=[ids.numpy()], backend="x86", effort="fast"
    )
    assert sum(each.numel() == 160 for each in prepared.parameters()) == 1
    assert sum(each.numel() == 64 for each in prepared.parameters()) == 1
    take_step(prepared.train(), ids)
    found = prepared.collect().constants
    inner = [value for key, value in found.items() if key.endswith(":weight") and value.size == 64]
    assert len(inner) == 2
    np.testing.assert_array_equal(*inner)
    state = prepared.state_dict()
    again = rq.torch.prepare_qat(
        module, (ids,), calibration_dataset=[ids.numpy()], backend="x86", effort="fast"
    )
    again.load_state_dict(state)
    np.testing.assert_array_equal(
        again.eval()(ids).detach().numpy(), prepared.eval()(ids).detach().numpy()
    )


def test_tied__that_became_different_refused():
    """One convolution before two batch norms, whose factors differ."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))
            self.norms[0].running_var.fill_(0.5)

        def forward(self, x):
            return self.norms[1](self.conv(self.norms[0](self.conv(x)).relu()))

    x = torch.randn(4, 3, 6, 6)
    prepare = {"calibration_dataset": [x.numpy()], "backend": "x86", "effort": "fast"}
    with pytest.raises(ConfigError, match=r"'weights.\w+:weight' and .*are one parameter"):
        rq.torch.prepare_qat(Model(), (x,), **prepare)
    live = rq.torch.prepare_qat(Model(), (x,), **prepare, batch_norm="live")
    assert sum(each.numel() == 9 for each in live.parameters()) == 1


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))

    def forward(self, x):
        x = self.layers(x)
        return x * torch.bernoulli(torch.full((4,), 0.9)) if self.training else x


def test_random_numbers_of_training__are_said():
    """Of a module, and of a function that is no module."""
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match=r"draws random numbers.*'layers.1', the model itse"):
        prepared = rq.torch.prepare_qat(Random(), (x,), calibration_dataset=[x.numpy()])
    prepared.train()
    assert torch.equal(prepared(x), prepared(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rq.torch.prepare_qat(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), (x,))


class Built(nn.Module):
    """A product, and constants that forward builds: an addend, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.layer(x)) + torch.arange(8.0)
        return nn.functional.linear(x, torch.eye(8) + 0.5)


def test_constants_that_forward_builds__do_not_train():
    """They are no parameters in PyTorch, where training does not change them."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Built().eval()
    module = rq.torch.prepare_qat(
        model, (x,), calibration_dataset=[x.numpy()], ranges="frozen", effort="fast"
    )
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    assert {name.partition(":")[2] for name in trained} == {"weight", "bias"}
    assert len(trained) == sum(each.requires_grad for each in model.parameters())
    before = {name: each.clone() for name, each in module.named_parameters()}
    take_step(module, x)
    changed = {name for name, each in module.named_parameters() if not each.equal(before[name])}
    assert changed == trained
