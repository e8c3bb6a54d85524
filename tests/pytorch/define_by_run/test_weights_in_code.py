"""Every way that a constant tensor comes to an operator: it is a weight, as a parameter is. And
modules that the code makes or replaces while it runs.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch", reason="pip install torch")

from run_models import sqnr  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from relayquant.torch.define_by_run.executing import CompiledModule  # noqa: E402


def draw(*shape):
    """The same numbers each time that one shape is asked for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


GLOBAL, ROW = 0.3 * draw(8, 8), [0.3 * draw(8, 8)]


def close_over(weight):
    return lambda x: F.linear(x, weight)


class Holder:
    """An object of the user's that is no module."""

    def __init__(self):
        self.weight = 0.3 * draw(8, 8)


class Model(nn.Module):
    """Holds a weight in every way; `use` applies one of them."""

    shared = 0.3 * draw(8, 8)

    def __init__(self, use, branches):
        super().__init__()
        torch.manual_seed(0)
        self.use, self.branches = use, branches
        self.start, self.layer = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.start.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.weight, self.mask = nn.Parameter(0.3 * draw(8, 8)), (draw(8, 8) > 0).float()
        self.register_buffer("hidden", 0.3 * draw(8, 8), persistent=False)
        self.plain, self.row, self.named = 0.3 * draw(8, 8), [0.3 * draw(8, 8)] * 2, {}
        self.named["w"], self.pair, self.holder = 0.3 * draw(8, 8), (0.3 * draw(8, 8),), Holder()
        self.inner, self.half = close_over(0.3 * draw(8, 8)), (0.3 * draw(8, 8)).half()
        self.kernel, self.table = 0.3 * draw(8, 8, 3), draw(10, 8)
        self.bias, self.gain, self.variance = draw(8), draw(8).abs() + 0.5, torch.ones(8)
        self.steps = 0.3 * draw(16, 8)[::2]

    def forward(self, x):
        x = torch.relu(self.start(x))
        if self.branches and x.sum() > 1e9:
            return x
        return self.use(self, x) + 1


#: way -> how it is used. Names of Python below say what holds the tensor.
WEIGHTS = {
    "attribute": lambda m, x: F.linear(x, m.plain),
    "attribute @": lambda m, x: x @ m.plain,
    "attribute transposed": lambda m, x: x @ m.plain.t(),
    "attribute of strides": lambda m, x: F.linear(x, m.steps),
    "attribute, sliced": lambda m, x: F.linear(x, m.steps[:4]),
    "attribute, masked": lambda m, x: F.linear(x, m.plain * m.mask),
    "attribute, einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.plain),
    "attribute of float16": lambda m, x: F.linear(x, m.half.float()),
    "list": lambda m, x: F.linear(F.linear(x, m.row[0]), m.row[1]),
    "dict": lambda m, x: F.linear(x, m.named["w"]),
    "tuple": lambda m, x: F.linear(x, m.pair[0]),
    "object": lambda m, x: F.linear(x, m.holder.weight),
    "class": lambda m, x: F.linear(x, m.shared),
    "closure": lambda m, x: m.inner(x),
    "default argument": lambda m, x, w=GLOBAL: F.linear(x, w),
    "global": lambda m, x: F.linear(x, GLOBAL),
    "list in a global": lambda m, x: F.linear(x, ROW[0]),
    "buffer that is not saved": lambda m, x: F.linear(x, m.hidden),
    "parameter, masked": lambda m, x: F.linear(x, m.weight * m.mask),
    "parameter, standardized": lambda m, x: F.linear(x, m.weight / m.weight.std(1, keepdim=True)),
    "parameter, detached": lambda m, x: F.linear(x, m.weight.detach()),
    "parameter, data": lambda m, x: F.linear(x, m.weight.data),
    "parameters, joined": lambda m, x: F.linear(x, torch.cat([m.weight, m.plain])),
    "parametrization": lambda m, x: m.normed(x),
    "tied": lambda m, x: m.tied(x),
    "convolution": lambda m, x: F.conv1d(x[:, :, None].expand(-1, -1, 5), m.kernel),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.plain),
}
#: the same of operators whose constants are no weights
OTHERS = {
    "batch norm": lambda m, x: F.batch_norm(x, m.bias, m.variance, m.gain, m.bias),
    "layer norm": lambda m, x: F.layer_norm(x, (8,), m.gain, m.bias),
    "embedding": lambda m, x: F.embedding((x[:, 0] > 0.5).long(), m.table) + x,
    "literal": lambda m, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]),
    "literal of numpy": lambda m, x: x @ torch.from_numpy(np.eye(8, dtype="float32")),
}


def make_linear(m, x):
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = m.weight
    return layer(x)


def replace_module(m, x):
    m.act = nn.ReLU()
    return m.act(m.layer(x))


def replace_known(m, x):
    m.layer, m.tied = m.tied, m.layer
    return m.layer(x)


def make_once(m, x):
    if not hasattr(m, "late"):
        m.late = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return m.late(x)


class Scaled(nn.Module):
    """A module of the user's."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.sigmoid(x) * self.factor


#: modules that are not there when the model is prepared
MODULES = {
    "replaced": replace_module,
    "exchanged": replace_known,
    "made": lambda m, x: nn.Hardtanh()(m.layer(x)),
    "made in a row": lambda m, x: nn.Sequential(m.layer, nn.Tanh(), nn.Softmax(-1))(x),
    "made with a weight": make_linear,
    "made once": make_once,
    "of the user's": lambda m, x: Scaled(2.0)(m.layer(x)) + Scaled(3.0)(x),
}


def convert(use, branches, calls=4):
    """A model, its converted form, and inputs."""
    model = Model(use, branches).eval()
    batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(calls)]
    prepared = rq.torch.prepare(model, (batches[0],), effort="fast", backend="x86")
    for x in batches[1:]:
        prepared(x)
    return model, rq.torch.convert(prepared), batches


def check(model, converted, batches, monkeypatch):
    """Answers as in float, and every module that runs gives what the reference does."""
    with torch.no_grad():
        expected = [model(x) for x in batches]
    assert sqnr(expected, [converted(x) for x in batches]) > 35
    call, mods, seen = CompiledModule.call, find_mods(converted), []

    def watch(self, inputs):
        outputs = call(self, inputs)
        seen.append((mods[self], [t.numpy().copy() for t in inputs], outputs))
        return outputs

    monkeypatch.setattr(CompiledModule, "call", watch)
    converted(batches[-1])
    assert seen
    for mod, inputs, outputs in seen:
        for got, want in zip(outputs, rq.reference.run(mod, inputs), strict=True):
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)


def find_mods(converted):
    """Compiled module -> what it was compiled from."""
    if hasattr(converted, "mod"):
        return {converted._module: converted.mod}
    runners = [place.runner for place in converted._places.values() if place.runner]
    return {runner.module: runner.run.mod for runner in runners}


FAST = ["attribute", "list", "closure", "convolution", "parameters, joined"]


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in WEIGHTS]
)
def test_constants__are_weights_wherever_they_are_kept(name, monkeypatch):
    for branches in (False, True):
        model, converted, batches = convert(WEIGHTS[name], branches)
        check(model, converted, batches, monkeypatch)
        rows = converted.ledger.to_dict()["operators"]
        products = [row for row in rows if row["pattern"].startswith(("dense", "matmul", "conv"))]
        assert len(products) >= 2
        assert all(row["quantized"] for row in products)
        texts = [str(mod) for mod in converted.modules]
        assert texts
        assert not any("batch_matmul" in text for text in texts), "no weight is an input"
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_constants__of_operators_without_weights(name, monkeypatch):
    for branches in (False, True):
        check(*convert(OTHERS[name], branches), monkeypatch)
        monkeypatch.undo()


@pytest.mark.parametrize("name", MODULES)
def test_modules__made_or_replaced_by_the_code(name, monkeypatch):
    """A module that is new in each call has the operators of its class at that place."""
    model, converted, batches = convert(MODULES[name], True)
    check(model, converted, batches, monkeypatch)


def test_constants__replaced_after_conversion_are_named():
    model, converted, (x, *_) = convert(WEIGHTS["attribute"], True)
    model.plain = 2 * model.plain
    with pytest.raises(ModelError, match=r"linear in the model .*constants, that calib"):
        converted(x)


def test_constants__written_into_are_state():
    """What an operator has read is stored, and not what the tensor holds afterwards."""

    def use(m, x):
        y = F.linear(x, m.plain)
        m.plain.mul_(0.9)
        return y

    model, converted, (x, *_) = convert(use, True)
    before = model.plain.clone()
    got = converted(x)
    torch.testing.assert_close(model.plain, 0.9 * before)
    model.plain.copy_(before)
    with torch.no_grad():
        assert sqnr([model(x)], [got]) > 35


def test_constants__parameters_that_the_code_changes_are_state():
    def use(m, x):
        y = m.layer(x)
        m.layer.weight.mul_(0.9)
        return y

    model, converted, (x, *_) = convert(use, True, calls=1)
    before = model.layer.weight.detach().clone()
    got = converted(x)
    model.layer.weight.data.copy_(before)
    with torch.no_grad():
        assert sqnr([model(x)], [got]) > 35


def test_ledger__operator_that_reads_another_parameter_each_time():
    def use(m, x):
        for weight in (m.weight, m.layer.weight):
            x = F.linear(x, weight)
        return x

    _, converted, _ = convert(use, True)
    rows = converted.ledger.to_dict()["operators"]
    (row,) = [row for row in rows if "the parameter that it reads" in row["reason"]]
    assert not row["quantized"]
    assert "module" in row["advice"]


def test_attributes__may_have_the_names_of_ours():
    """The module that a run becomes has attributes, too."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps, self.outputs = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.steps(x)
            return x if x.sum() > 1e9 else self.outputs(x)

    x, model = draw(6, 8), Named().eval()
    converted = rq.torch.convert(rq.torch.prepare(model, (x,), effort="fast", backend="x86"))
    with torch.no_grad():
        assert sqnr([model(x)], [converted(x)]) > 35


def test_prepare__lazy_parameter_is_named():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelError, match=r"Parameter '0\.weight' has no shape yet.*Call the model"):
        rq.torch.prepare(model, (draw(6, 8),))
