"""Programs that compute in bfloat16: the reference and compiled code give PyTorch's bits, which
rounds each operator's result once.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm

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
    "scaled sum": lambda x, y: torch.add(x, y, alpha=0.3) + torch.sub(x, 1.3, alpha=0.7),
    "scaled difference": lambda x, y: torch.rsub(x, y, alpha=1.7) * torch.rsub(x, 2.3, alpha=0.3),
    "times a number": lambda x, y: x * 0.3 + y / 0.7 - 0.1 / x,
    "hypotenuse": torch.hypot,
    "sum with a product": lambda x, y: torch.addmv(x[0], y, x[1]),
    "quotient cut off": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "quotient by a number": lambda x, y: torch.div(x, 0.3, rounding_mode="trunc") + y // 0.7,
    "cube": lambda x, y: x**3 + y**-2,
    "times a power of 2": lambda x, y: torch.ldexp(x, PLACES.int()),
    "mean of scattered": lambda x, y: x.scatter_reduce(1, PLACES.repeat(16, 1)[:, :3], y, "mean"),
}
#: Of them, those that float16 has with PyTorch's bits, too.
HALVES = (
    *("scaled sum", "scaled difference", "times a number", "hypotenuse", "quotient cut off"),
    *("sum", "mean", "softmax", "layer norm", "variance", "exp", "average pool", "batch norm"),
)


def assert_pytorchs_bits(function, dtype):
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return function(x.to(dtype), y.to(dtype)).float()

    numbers = torch.Generator().manual_seed(0)
    inputs = tuple(2 * torch.randn(16, 16, generator=numbers) for _ in range(2))
    model = Model().eval()
    mod, params = rq.load(torch.export.export(model, inputs))
    expected, arrays = model(*inputs).numpy(), [each.numpy() for each in inputs]
    np.testing.assert_array_equal(rq.reference.run((mod, params), arrays)[0], expected)
    compiled = rq.Executor(rq.compile((mod, params))).run("main", arrays)[0]
    np.testing.assert_array_equal(compiled, expected)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16__as_pytorch_computes_it(name):
    assert_pytorchs_bits(FUNCTIONS[name], torch.bfloat16)


def test_product_of_bfloat16__is_rounded_once():
    """PyTorch rounds after each factor, in an order that depends on the CPU."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return x.bfloat16().prod(1).float()

    x = 1 + torch.rand(16, 9, generator=torch.Generator().manual_seed(0))
    model = rq.load(torch.export.export(Model(), (x,)))
    exact = x.bfloat16().double().prod(1).bfloat16().float().numpy()
    compiled = rq.Executor(rq.compile(model)).run("main", [x.numpy()])
    for (found,) in (rq.reference.run(model, [x.numpy()]), compiled):
        np.testing.assert_array_equal(found, exact)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", HALVES)
def test_float16__as_pytorch_computes_it(name):
    assert_pytorchs_bits(FUNCTIONS[name], torch.float16)


def test_float16__of_sums_beyond_its_range():
    """The sum is 80000 and float16 ends at 65504. PyTorch sums in float32."""
    x = torch.full((1, 800), 100.0, dtype=torch.float16)

    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.mean(1), torch.nn.functional.avg_pool1d(x, 800), x.var(1, correction=0)

    model = rq.load(torch.export.export(Mean(), (x,)))
    compiled = rq.Executor(rq.compile(model)).run("main", [x.numpy()])
    for found in (rq.reference.run(model, [x.numpy()]), compiled):
        assert [float(each.reshape(())) for each in found] == [100.0, 100.0, 0.0]


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_bfloat16__as_near_as_pytorch(is_causal):
    """To the result in float64: PyTorch rounds the probabilities, too."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    numbers = torch.Generator().manual_seed(0)
    inputs = [2 * torch.randn(1, 2, 16, 16, generator=numbers).bfloat16() for _ in range(3)]
    program = torch.export.export(Attention(), tuple(inputs))
    arrays = [tvm.runtime.from_dlpack(each).numpy() for each in inputs]
    exact = Attention()(*(each.double() for each in inputs)).numpy()
    (found,) = rq.reference.run(rq.load(program), arrays)
    allowed = np.abs(Attention()(*inputs).double().numpy() - exact)
    distance = np.abs(found.astype("float64") - exact)
    assert distance.max() <= allowed.max()
    assert distance.mean() <= allowed.mean()
