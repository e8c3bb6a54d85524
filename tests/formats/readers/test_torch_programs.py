"""Whole torch.export programs that write in place, alias, or have arguments that are no tensors."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch", reason="pip install torch")
nn = torch.nn


def write_views(x):
    y = x.clone()
    y[:, 1] += 2
    y[..., ::2].mul_(3)
    y.transpose(1, 2).add_(torch.arange(3.0))
    flat = y.view(6, 4)
    flat[0] = 1
    flat.t()[1] = 9
    return y, flat


def write_parts(x):
    y = x.clone()
    first, second = y.chunk(2, -1)
    first.mul_(10)
    z = torch.empty(2, 3, 4)
    z[:] = 0
    z[:, :2] = x[:, 1:]
    return y, second, z, torch.stack(list(x.unbind(1)))


def write_constants(x):
    t, u = torch.zeros(4), torch.tensor([[1, 2], [3, 4]])
    t[1] = 1
    t += x[0, 0]
    u[0] = 9
    return t, u


def repeat_results(x):
    y = x + 1
    return y, y, x, x.view(-1), x.mT


def nest_results(x):
    return {"b": x + 1, "a": (x * 2, [x - 1, None]), "c": {"d": x.sum()}}


def mix_numbers(x):
    i = (x * 10).int()
    numbers = (x + torch.tensor(2), x * torch.tensor(True), x + torch.tensor(1.5).double())
    return *numbers, i // 3, i % 3, i / 4, i + 1.5, i * x, (x > 0) + i, (x > 0).sum()


def ask_for_truth(x):
    return (x > 0).any(), (x > 99).any(), x.any(), (x > -99).all(), x[:0].any()


FUNCTIONS = (
    write_views,
    write_parts,
    write_constants,
    repeat_results,
    nest_results,
    mix_numbers,
    ask_for_truth,
)
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")


def make_module(function):
    class Module(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Module()


def flatten(value):
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in flatten(part)]
    return [] if value is None else [value]


def assert_same(mod, inputs, expected):
    for got, want in zip(rq.reference.run(mod, inputs), flatten(expected), strict=True):
        assert (got.dtype, got.shape) == (want.numpy().dtype, tuple(want.shape))
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_program__computes_what_torch_computes(function):
    x = torch.from_numpy(X)
    mod, _ = rq.load(torch.export.export(make_module(function), (x,)))
    assert_same(mod, [X], function(x.clone()))


@pytest.mark.parametrize("constant", [3, 2.5, True, "a", None])
def test_argument__that_is_no_tensor_is_left_out(constant, tmp_path):
    def function(x, how, y):
        return x * how - y if isinstance(how, int | float) else x - y

    x = torch.from_numpy(X)
    program = torch.export.export(make_module(function), (x, constant), {"y": x * 2})
    before = copy.deepcopy(program.graph_signature)
    torch.export.save(program, tmp_path / "model.pt2")
    for given in (program, program.run_decompositions({}), tmp_path / "model.pt2"):
        mod, _ = rq.load(given)
        assert len(mod["main"].params) == 2
        assert_same(mod, [X, X * 2], function(x, constant, x * 2))
    assert program.graph_signature == before
    assert torch.equal(program.module()(x, constant, y=x * 2), function(x, constant, x * 2))


@pytest.mark.parametrize("constant", [3, True, "a"])
def test_result__that_is_no_tensor_refused(constant):
    module = make_module(lambda x: (x + 1, {"k": constant}))
    with pytest.raises(ModelError, match=rf"Result 1 of the program is {constant!r}; supported"):
        rq.load(torch.export.export(module, (torch.ones(3),)))
