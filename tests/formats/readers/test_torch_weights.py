"""Weights of torch.export programs are copied: what happens to the module afterwards changes
nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from module_constants import list_constants
from test_weight_copies import X, assert_unchanged, read_outputs

import relayquant as rq
from relayquant.base.runtime import as_array

torch = pytest.importorskip("torch", reason="pip install torch")


def make_module():
    class Module(torch.nn.Module):
        """A weight of each kind: each is read by an output."""

        def __init__(self):
            super().__init__()
            self.parameter = torch.nn.Parameter(torch.ones(4))
            self.every_second = torch.nn.Parameter(torch.ones(8)[::2])
            self.transposed = torch.nn.Parameter(torch.rand(4, 4).T)
            self.tied = self.parameter
            self.short = torch.nn.Parameter(torch.ones(4).half())
            self.brain = torch.nn.Parameter(torch.ones(4).bfloat16())
            self.register_buffer("buffer", torch.ones(4))
            self.register_buffer("row", torch.arange(8.0).reshape(2, 4)[1])
            self.register_buffer("scratch", torch.ones(4), persistent=False)
            self.register_buffer("integers", torch.arange(4))
            self.register_buffer("flags", torch.ones(4, dtype=torch.bool))
            self.register_buffer("number", torch.tensor(2.0, dtype=torch.float64))
            self.constant = torch.ones(4)

        def forward(self, x):
            read = (self.parameter, self.every_second, self.tied, self.buffer, self.row)
            more = (self.scratch, self.integers, self.constant, self.number)
            masked = torch.where(self.flags, x, -x)
            floats = (x.half() * self.short, x * self.brain.float(), x @ self.transposed)
            return *(x * each for each in (*read, *more)), masked, *floats

        def change(self):
            with torch.no_grad():
                for each in (*self.parameters(), *self.buffers(), self.constant):
                    each.copy_(~each if each.dtype == torch.bool else each * 3 + 1)

    torch.manual_seed(0)
    return Module().eval()


def test_program__may_change_afterwards():
    module = make_module()
    mod, _ = rq.load(torch.export.export(module, (torch.from_numpy(X),)))
    expected = module(torch.from_numpy(X))
    for got, want in zip(read_outputs(mod), expected, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-3)
    before = [want.detach().clone() for want in expected]
    assert_unchanged(mod, module.change)
    for old, new in zip(before, module(torch.from_numpy(X)), strict=True):
        assert not torch.equal(old, new)


def test_file__may_be_overwritten_afterwards(tmp_path):
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(make_module(), (torch.from_numpy(X),)), path)
    mod, _ = rq.load(path)
    with path.open("r+b") as file:
        assert_unchanged(mod, lambda: file.write(bytes(path.stat().st_size)) and file.flush())


def test_tied_weights__are_one_constant():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 4)
            self.head = torch.nn.Linear(4, 4, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    mod, _ = rq.load(torch.export.export(Tied(), (torch.arange(3),)))
    weights = [each.value for each in list_constants(mod["main"]) if each.value.shape == (4, 4)]
    assert len({as_array(weight).ctypes.data for weight in weights}) == 1
