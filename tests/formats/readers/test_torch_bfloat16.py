"""Programs that compute in bfloat16: the reference and compiled code give PyTorch's bits, which
rounds each operator's result once.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq

torch = pytest.importorskip("torch")
F = torch.nn.functional

#: Several values go to the same place.
PLACES = torch.arange(16) % 5
#: Functions of two tensors (16, 16).
FUNCTIONS = {
    "add": lambda x, y: x + y,
    "chain": lambda x, y: (x + y) * x - y,
    "divide": lambda x, y: x / y,
    "power": lambda x, y: x.abs() ** 1.5 + y,
    "sigmoid twice read": lambda x, y: F.silu(x),
    "gate": lambda x, y: F.silu(x) * y,
    "exp": lambda x, y: torch.exp(x),
    "tanh": lambda x, y: torch.tanh(x) + y,
    "softmax": lambda x, y: F.softmax(x, -1),
    "layer norm": lambda x, y: F.layer_norm(x, (16,), y[0], y[1]),
    "sum": lambda x, y: x.sum(-1),
    "mean": lambda x, y: x.mean(0),
    "cumulative sum": lambda x, y: torch.cumsum(x, -1),
    "product": lambda x, y: x @ y,
    "linear": lambda x, y: F.linear(x, y, x[0]),
    "batches of products": lambda x, y: torch.bmm(x.reshape(2, 8, 16), y.reshape(2, 16, 8)),
    "convolution": lambda x, y: F.conv2d(x.reshape(1, 4, 8, 8), y.reshape(4, 4, 4, 4)),
    "logarithm of a sum": lambda x, y: torch.log1p(x.abs()),
    "power less one": lambda x, y: torch.expm1(x),
    "softplus": lambda x, y: F.softplus(x),
    "mish": lambda x, y: F.mish(x),
    "added at indices": lambda x, y: torch.zeros_like(x).index_add(0, PLACES, y),
    "scattered sums": lambda x, y: torch.zeros_like(x).scatter_add(1, PLACES.repeat(16, 1), y),
    "variance": lambda x, y: x.var(-1),
    "norm": lambda x, y: x.norm(dim=-1),
    "elu": lambda x, y: F.elu(x),
    "group norm": lambda x, y: F.group_norm(x.reshape(2, 8, 16), 4, y[0, :8], y[1, :8]),
    "group norm without weights": lambda x, y: F.group_norm(x.reshape(2, 8, 16), 2),
    "batch norm": lambda x, y: F.batch_norm(x, y[0], y[1].abs(), y[2], y[3]),
    "rest of a division": lambda x, y: torch.fmod(x, y),
    "cosine": lambda x, y: F.cosine_similarity(x, y),
    "average pool": lambda x, y: F.avg_pool2d(x.reshape(1, 4, 8, 8), 2),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16__as_pytorch_computes_it(name):
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return FUNCTIONS[name](x.to(torch.bfloat16), y.to(torch.bfloat16)).float()

    numbers = torch.Generator().manual_seed(0)
    inputs = tuple(2 * torch.randn(16, 16, generator=numbers) for _ in range(2))
    model = Model().eval()
    mod, params = rq.load(torch.export.export(model, inputs))
    expected, arrays = model(*inputs).numpy(), [each.numpy() for each in inputs]
    np.testing.assert_array_equal(rq.reference.run((mod, params), arrays)[0], expected)
    compiled = rq.Executor(rq.compile((mod, params))).run("main", arrays)[0]
    np.testing.assert_array_equal(compiled, expected)
