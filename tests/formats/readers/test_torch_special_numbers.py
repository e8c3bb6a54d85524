"""Infinities and NaN as arguments of PyTorch's operators: from a program, from a file, compiled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch", reason="pip install torch")
functional = torch.nn.functional


def set_where_positive(x, v):
    y = x.clone()
    y[y > 0] = v
    return y


def set_row(x, v):
    y = x.clone()
    y[0] = v
    return y


#: name -> function of a tensor (2, 4) and a number
CASES = {
    "full": lambda x, v: x + torch.full((2, 4), v),
    "full of float64": lambda x, v: x + torch.full((2, 4), v, dtype=torch.float64),
    "full of float16": lambda x, v: torch.full((2, 4), v, dtype=torch.float16) + x.half(),
    "full of no axes": lambda x, v: x * torch.full((), v),
    "full_like": torch.full_like,
    "full_like of integers": lambda x, v: torch.full_like(x.int(), v, dtype=torch.float32) + x,
    "new_full": lambda x, v: x.new_full((2, 4), v),
    "fill": torch.fill,
    "fill in place": lambda x, v: x.clone().fill_(v),
    "mask above the diagonal": lambda x, v: x + torch.full((4, 4), v).triu(1)[:2],
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "masked_fill in place": lambda x, v: x.clone().masked_fill_(x > 0, v),
    "masked_fill with a tensor": lambda x, v: x.masked_fill(x > 0, torch.tensor(v)),
    "set where": set_where_positive,
    "set a row": set_row,
    "where": lambda x, v: torch.where(x > 0, x, v),
    "where of numbers": lambda x, v: torch.where(x > 0, v, 0.0) + x,
    "clamp below": lambda x, v: x.clamp(min=v),
    "clamp above": lambda x, v: x.clamp(max=v),
    "clamp": lambda x, v: x.clamp(-1, v),
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "pad": lambda x, v: functional.pad(x, (1, 1), value=v),
    "add": lambda x, v: x + v,
    "add scaled": lambda x, v: torch.add(x, x, alpha=v),
    "subtract from": lambda x, v: v - x,
    "multiply": lambda x, v: x * v,
    "divide": lambda x, v: x / v,
    "divide and round": lambda x, v: torch.div(x, v, rounding_mode="floor"),
    "power": lambda x, v: x**v,
    "equal": lambda x, v: x == v,
    "less": lambda x, v: x < v,
    "maximum": lambda x, v: torch.maximum(x, torch.tensor(v)),
    "remainder": torch.remainder,
    "nan_to_num of a quotient": lambda x, v: torch.nan_to_num(x / 0, 1.0) + v,
    "nan_to_num": lambda x, v: torch.nan_to_num(x, v, v, v),
    "threshold": lambda x, v: functional.threshold(x, 1.0, v),
    "leaky_relu": functional.leaky_relu,
    "hardshrink": functional.hardshrink,
    "norm": lambda x, v: torch.linalg.vector_norm(x, v, dim=1),
    "lerp": lambda x, v: torch.lerp(x, x * 2, v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "index_fill": lambda x, v: x.index_fill(1, torch.tensor([1]), v),
    "scatter": lambda x, v: x.scatter(1, torch.tensor([[1], [2]]), v),
    "constant": lambda x, v: x + torch.tensor([v, 1, 2, v]),
}
NUMBERS = [math.inf, -math.inf, math.nan]
X = np.asarray([[1, -2, 3, 2.5], [0.5, -0.25, -7, 4]], "float32")
#: those that are checked each time, compiled too; the rest of the table is slow
QUICK = {("full", 1), ("full_like", 2), ("masked_fill", 1), ("clamp", 1), ("clamp", 2), ("pad", 1)}
QUICK |= {("nan_to_num of a quotient", 2)}


def export(function, number):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x, number)

    return torch.export.export(Module(), (torch.ones(2, 4),))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=() if (name, at) in QUICK else pytest.mark.slow)
        for name in CASES
        for at in range(len(NUMBERS))
    ],
)
def test_special_number__is_what_torch_computes(name, at, tmp_path):
    function, number = CASES[name], NUMBERS[at]
    expected = function(torch.from_numpy(X), number).numpy()
    program = export(function, number)
    torch.export.save(program, tmp_path / "model.pt2")
    mod, _ = rq.load(tmp_path / "model.pt2")
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    for got in (
        rq.reference.run(mod, [X])[0],
        rq.reference.run(rq.load(program)[0], [X])[0],
        machine["main"](tvm.runtime.tensor(X)).numpy(),
    ):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", NUMBERS)
def test_elu__with_a_special_factor_refused(number):
    with pytest.raises(ModelError, match=r"elu has the factors .* supported: finite ones"):
        rq.load(export(functional.elu, number))
