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


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient__is_pytorchs(name):
    class Model(torch.nn.Module):
        def forward(self, x):
            return FUNCTIONS[name](x)

    trained = from_relax(rq.load(torch.export.export(Model(), (NUMBERS,)))[0]).train()
    found = []
    for model in (trained, Model()):
        x = NUMBERS.clone().requires_grad_()
        result = model(x)
        numbers = torch.Generator().manual_seed(0)
        factors = torch.randn(result.shape, generator=numbers)
        found.append((result.detach(), *torch.autograd.grad(result, x, factors)))
    for got, want in zip(*found, strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
