"""Products of PyTorch in every type: they have the type, shape and values that PyTorch computes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import relayquant as rq
from relayquant.formats.readers import import_torch

torch = pytest.importorskip("torch", reason="pip install torch")
functional = torch.nn.functional

#: name -> function of matrices a (3, 4), b (4, 5) and a vector c (5,)
PRODUCTS = {
    "mm": lambda a, b, c: a @ b,
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=3, alpha=2),
    "addmm without its first term": lambda a, b, c: torch.addmm(c, a, b, beta=0),
    "addmm without its product": lambda a, b, c: torch.addmm(c, a, b, alpha=0),
    "addmm of nothing": lambda a, b, c: torch.addmm(c, a, b, beta=0, alpha=0),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a[None], b[None], alpha=2),
    "addmv": lambda a, b, c: torch.addmv(c[:3], a, c[:4], beta=2),
    "addmv without its product": lambda a, b, c: torch.addmv(c[:1], a, c[:4], alpha=0),
    "addbmm": lambda a, b, c: torch.addbmm(c, a[None], b[None], beta=2, alpha=3),
}
DTYPES = ["float64", "float32", "int64", "int32", "int8"]


def check(function, *values):
    """The module has what PyTorch computes: dtype and shape, and values to the last digits."""

    class Module(torch.nn.Module):
        def forward(self, *values):
            return function(*values)

    wanted = function(*values).numpy()
    (made,) = rq.reference.run(
        import_torch(torch.export.export(Module(), values))[0], [each.numpy() for each in values]
    )
    assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
    digits = {"float64": 1e-13, "float32": 1e-5}.get(str(made.dtype), 0)
    np.testing.assert_allclose(made, wanted, rtol=digits, atol=10 * digits)


def draw(dtype, *shape):
    values = torch.from_numpy(np.random.default_rng([7, *shape]).normal(0, 9, shape))
    return values.to(getattr(torch, dtype))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_product__has_the_type_and_values_of_torch(dtype, name):
    check(PRODUCTS[name], draw(dtype, 3, 4), draw(dtype, 4, 5), draw(dtype, 5))


@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm", "baddbmm"])
def test_factors_of_integers__lose_their_fractions(name):
    rows, columns = draw("int32", 3, 4), draw("int32", 4, 5)
    operands = {
        "addmm": (draw("int32", 5), rows, columns),
        "addmv": (draw("int32", 3), rows, columns[:, 0]),
        "addbmm": (draw("int32", 5), rows[None], columns[None]),
        "baddbmm": (draw("int32", 5), rows[None], columns[None]),
    }[name]
    check(lambda *values: getattr(torch, name)(*values, beta=1.6, alpha=2.7), *operands)


def test_factor_zero__leaves_nan_out():
    matrix, nan = draw("float32", 3, 3), torch.full((3, 3), torch.nan)
    check(lambda a, b: torch.addmm(b, a, a, beta=0), matrix, nan)
    check(lambda a, b: torch.addmv(b[0], a, a[0], beta=0), matrix, nan)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_sum_of_a_number__is_the_number(dtype):
    check(lambda x: x.cumsum(0), draw(dtype))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_convolution__has_the_type_and_values_of_torch(dtype, rank):
    data, bias = draw(dtype, 2, 4, *[5] * rank), draw(dtype, 6)
    convolve = getattr(functional, f"conv{rank}d")
    check(
        lambda x, w, b: convolve(x, w, b, groups=2, padding=1, stride=2),
        data,
        draw(dtype, 6, 2, *[3] * rank),
        bias,
    )
    if dtype == "int32":  # PyTorch has no transposed convolution of integers
        return
    spread = getattr(functional, f"conv_transpose{rank}d")
    check(
        lambda x, w, b: spread(x, w, b, groups=2, padding=1, stride=2, output_padding=1),
        data,
        draw(dtype, 4, 3, *[3] * rank),
        bias,
    )


@pytest.fixture(scope="module")
def multiply_groups():
    """The operator with which `transformers` writes experts in float32."""

    def multiply(rows, stack, offs):
        ends = [0, *offs.tolist(), len(rows)]
        parts = zip(pairwise(ends), [*stack, torch.zeros_like(stack[0])], strict=True)
        return torch.cat([rows[slice(*part)] @ matrix for part, matrix in parts])

    name = "transformers::grouped_mm_fallback"
    schema = "(Tensor rows, Tensor stack, Tensor offs) -> Tensor"
    operator = torch.library.custom_op(name, multiply, mutates_args=(), schema=schema)
    operator.register_fake(lambda rows, stack, _: rows.new_empty(len(rows), stack.shape[2]))
    return torch.ops.transformers.grouped_mm_fallback


class Experts(torch.nn.Module):
    """Each row of the input goes to the two experts with the largest scores."""

    def __init__(self, multiply) -> None:
        super().__init__()
        self.multiply, self.router = multiply, torch.nn.Linear(16, 4, bias=False)
        self.stack = torch.nn.Parameter(torch.randn(4, 24, 16))

    def forward(self, x):
        scores, expert = self.router(x).softmax(-1).topk(2)
        order = expert.flatten().argsort()
        counts = torch.histc(expert.flatten().float(), bins=4, min=0, max=3)
        ends = counts.cumsum(0, dtype=torch.int32)
        made = self.multiply(x.repeat_interleave(2, 0)[order], self.stack.mT, ends)
        back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
        return (made[back].reshape(-1, 2, 24) * scores[..., None]).sum(1)


def test_experts__are_products_by_row(multiply_groups):
    torch.manual_seed(0)
    module, x = Experts(multiply_groups), torch.randn(6, 16)
    mod = rq.load(torch.export.export(module, (x,)))
    data = torch.randn(32, 6, 16)
    for rows in (x, *data[:3]):
        (found,) = rq.Executor(rq.compile(mod)).run("main", [rows.numpy()])
        np.testing.assert_allclose(found, module(rows).detach(), rtol=1e-5, atol=1e-5)
    integers = rq.quantize(mod, None, [(each.numpy(),) for each in data], effort="fast")
    taken = [row for row in rq.ledger(integers).rows if row.op == "matmul" and row.quantized]
    assert len(taken) == 5  # the router and the experts
    assert rq.verify(integers, [x.numpy()]).is_equal


@pytest.mark.parametrize("ends", [(2, 2, 8), (0, 3, 8), (8, 8, 8)])
def test_groups_of_bfloat16__have_the_bits_of_torch(ends):
    class Module(torch.nn.Module):
        def forward(self, rows, stack, ends):
            rows, stack = rows.bfloat16(), stack.bfloat16()
            return functional.grouped_mm(rows, stack, offs=ends).float()

    values = draw("float32", 8, 16), draw("float32", 3, 16, 24), torch.tensor(ends).int()
    mod = rq.load(torch.export.export(Module(), values))
    (found,) = rq.reference.run(mod, [each.numpy() for each in values])
    np.testing.assert_array_equal(found, Module()(*values))
