"""Gradients of float modules in training are PyTorch's own, also where a function has a corner, at
0, and for large numbers.
"""

from __future__ import annotations

import pytest

import relayquant as rq
from relayquant.torch import from_relax

torch = pytest.importorskip("torch", reason="pip install torch")
F = torch.nn.functional

#: Numbers with ties, zeros and large ones.
NUMBERS = torch.tensor([[0.0, 1.0, -2.0, 0.0], [2.0, 2.0, -1.0, 90.0], [-90.0, 5.0, 0.03, -0.03]])
#: Numbers among which each row has equal ones: the largest and smallest, zeros, and bounds.
TIES = torch.tensor([[1.0, 1.0, -2.0, -2.0], [2.0, 2.0, 2.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
#: Functions whose gradient at equal values is a choice.
CHOICES = {
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp below": lambda x: x.clamp(min=0),
    "clamp above": lambda x: x.clamp(max=1),
    "clamp in place": lambda x: (x * 1).clamp_(0, 1),
    "clamp by a tensor": lambda x: torch.clamp(x, torch.tensor(-1.0), torch.tensor(2.0)),
    "clamp by tensors": lambda x: torch.clamp(x, x.flip(0) - 1, x.flip(0) + 1),
    "relu": F.relu,
    "relu6": lambda x: F.relu6(x + 4),
    "hardtanh": lambda x: F.hardtanh(x, -2, 2),
    "clamp above behind relu": lambda x: F.relu(x).clamp(max=2),
    "clamp behind relu": lambda x: F.relu(x).clamp(-1, 2),
    "clamp below behind relu": lambda x: F.relu(x).clamp(min=0),
    "relu behind clamp": lambda x: F.relu(x.clamp(-2, 2)),
    "relu behind clamp below": lambda x: F.relu(x.clamp(min=0)),
    "relu6 behind clamp": lambda x: F.relu6(x.clamp(-1, 2)),
    "clamp behind hardtanh": lambda x: F.hardtanh(x, -2, 2).clamp(0, 5),
    "three clamps": lambda x: F.relu(F.hardtanh(x, -2, 5)).clamp(max=2),
    "hardswish": lambda x: F.hardswish(x * 3),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "maximum with a number": lambda x: torch.maximum(x, torch.tensor(1.0)),
    "largest number": lambda x: torch.fmax(x, x.flip(1)),
    "smallest number": lambda x: torch.fmin(x, x.flip(1)),
    "max": lambda x: x.max(),
    "max of an axis": lambda x: x.max(1).values,
    "min of an axis": lambda x: x.min(0, keepdim=True).values,
    "shared max": lambda x: x.amax(1),
    "both": lambda x: torch.aminmax(x, dim=1)[0],
    "adaptive pool": lambda x: F.adaptive_max_pool2d(x[None, None], (2, 3)),
    "one window": lambda x: F.adaptive_max_pool2d(x[None, None], 1),
    "entropy": lambda x: torch.xlogy(x.abs(), x.abs()),
    "product with a logarithm": lambda x: torch.xlogy(x.abs(), torch.tensor([0.0, 1, 2, 3])),
    "cross entropy": lambda x: F.kl_div(x, x.abs(), reduction="none"),
    "sorted": lambda x: x.sort(dim=1, stable=True).values,
}
FUNCTIONS = {
    "softplus": F.softplus,
    "softplus with a slope": lambda x: F.softplus(x, 2.0, 15.0),
    "mish": F.mish,
    "logarithm of 1 more": lambda x: torch.log1p(x.abs() * 100 + 1),
    "exponential less 1": lambda x: torch.expm1(x / 2),
    "inverse hyperbolic tangent": lambda x: torch.atanh(x / 91),
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "norm": lambda x: (x * torch.tensor([[0.0], [1.0], [2.0]])).norm(dim=1),
    "normalized": lambda x: F.normalize(x * torch.tensor([[0.0], [1.0], [2.0]])),
    "deviation": lambda x: (x * torch.tensor([[0.0], [1.0], [2.0]])).std(1),
    "largest of all": lambda x: x.amax(1),
    "smallest of two": lambda x: torch.minimum(x, x.flip(0)),
    "sigmoid of large numbers": lambda x: F.logsigmoid(x) + torch.sigmoid(x),
    "sine over number": torch.sinc,
    "product with zeros": lambda x: x.prod(1),
    "running product": lambda x: x[:, :3].cumprod(1),
    "logarithm of a sum": lambda x: x.logsumexp(1),
    "power": lambda x: x**3 + x**2,
    "remainder": lambda x: torch.remainder(x + 0.1, 0.7) + torch.fmod(x + 0.1, 0.7),
    "pool": lambda x: F.max_pool1d(x[None], 3, 1, 1),
    "parts": lambda x: torch.cat([x[:0, :2], x[:, 1::2] * x[-2:-1, :2], x[:, :1].expand(3, 2)]),
    "written into": lambda x: (x * 2).add_(x).mul_(x),
    "one element": lambda x: x[:1, :1].softmax(1) * x[:, :1],
}


def find_gradients(function, numbers):
    """Return (result, gradient) of the trained module, and PyTorch's."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    trained = from_relax(rq.load(torch.export.export(Model(), (numbers,)))[0]).train()
    found = []
    for model in (trained, Model()):
        x = numbers.clone().requires_grad_()
        result = model(x)
        factors = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
        found.append((result.detach(), *torch.autograd.grad(result, x, factors)))
    return found


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient__is_pytorchs(name):
    for got, want in zip(*find_gradients(FUNCTIONS[name], NUMBERS), strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CHOICES)
def test_gradient_at_equal_values__is_pytorchs(name):
    for got, want in zip(*find_gradients(CHOICES[name], TIES), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_gradient__of_masks_joined_by_and_or_xor():
    def function(x):
        mask = ((x > -2) & (x < 2)) | (x == 2) ^ (x < 0)
        return torch.where(mask, x * x, x)

    for got, want in zip(*find_gradients(function, TIES), strict=True):
        torch.testing.assert_close(got, want)
