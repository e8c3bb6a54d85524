"""Programs of drawn forms and dtypes: the reference and compiled code give PyTorch's dtypes, shapes
and bits.
"""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers.torch import operators

torch = pytest.importorskip("torch", reason="pip install torch")
functional = torch.nn.functional


def export(function, *inputs):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    return torch.export.export(Module(), inputs)


def assert_same_bits(function, *inputs):
    """Of all results, by numpy and compiled."""
    model = rq.load(export(function, *inputs))
    wanted = function(*inputs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    arrays = [each.numpy() for each in inputs]
    for found in (
        rq.reference.run(model, arrays),
        rq.Executor(rq.compile(model)).run("main", arrays),
    ):
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.numpy().dtype
            np.testing.assert_array_equal(got, want.numpy())


#: Reductions of integers: PyTorch computes sums and products in int64, or in the dtype asked for.
REDUCTIONS = {
    "product": lambda x: (x.prod(), x.prod(1), x.prod(0, keepdim=True)),
    "product in another dtype": lambda x: (x.prod(dtype=torch.float64), x.prod(1, dtype=torch.int)),
    "cumulative product": lambda x: (x.cumprod(1), x.cumprod(0, dtype=torch.float64)),
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, 1), keepdim=True, dtype=torch.int16)),
    "cumulative sum": lambda x: (x.cumsum(1), x.cumsum(0, dtype=torch.float64)),
    "mean": lambda x: (x.mean(dtype=torch.float64), x.mean(1, dtype=torch.float32)),
    "extremes": lambda x: (x.amax(1), x.amin(0, keepdim=True), x.max(), *x.min(1)),
    "place of the extreme": lambda x: (x.argmax(), x.argmax(1), x.argmin(0, keepdim=True)),
    "truth": lambda x: (x.all(), x.any(), x.all(1), x.any(0, keepdim=True)),
    "count": lambda x: (x.count_nonzero(), x.count_nonzero(1)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int32", "int64"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_of_integers__has_pytorchs_dtype(name, dtype):
    if (name, dtype) == ("place of the extreme", "bool"):
        pytest.skip("PyTorch does not look for an extreme among truths")
    numbers = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (3, 4))
    x = torch.from_numpy(numbers).to(getattr(torch, dtype))
    assert_same_bits(REDUCTIONS[name], x)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(20))
def test_resize_of_bytes__gives_pytorchs_bytes(seed):
    """PyTorch itself reads beyond its memory for more than 4 channels and a width of 1."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 12, 2).tolist()
    if seed % 2:
        sizes = {"size": rng.integers(1, 14, 2).tolist()}
    else:
        least = 1.0 if min(height, width) == 1 else 0.5
        sizes = {
            "scale_factor": rng.choice([least, 0.75 + least / 4, 1.0, 1.7, 2.0, 3.0], 2).tolist()
        }
    is_smooth = bool(rng.integers(2))
    options = {
        "mode": str(rng.choice(["bilinear", "bicubic"])),
        "antialias": is_smooth,
        "align_corners": not is_smooth and bool(rng.integers(2)),
    }
    x = torch.from_numpy(rng.integers(0, 256, (2, 3, height, width)).astype("uint8"))
    assert_same_bits(lambda x: functional.interpolate(x, **sizes, **options), x)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "numbers",
    [
        (5, 0, -2),
        (0, 5, 2),
        (-3, -9, -4),
        (5, 0, -7),
        (0.0, 1.0, 0.1),
        (1.0, -1.0, -0.3),
        (3, 3, -1),
    ],
)
def test_arange__counts_as_pytorch(numbers):
    assert_same_bits(lambda x: torch.arange(*numbers) * x, torch.tensor([2]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda x: relax.op.astype(x, "float16"),
            r"become float16 \(2, 3\), and is float32 \(2, 3\) in",
        ),
        (
            lambda x: relax.op.max(x, 0),
            r"become float32 \(3,\), and is float32 \(2, 3\) in PyTorch",
        ),
    ],
)
def test_conversion__of_another_form_refused(wrong, message, monkeypatch):
    """Whatever converts an operator, its result has the dtype and the sizes of PyTorch."""

    def convert(node, importer):
        return importer.block_builder.emit(wrong(importer.env[node.args[0]]))

    monkeypatch.setitem(operators.OPERATORS, "elu.default", convert)
    with pytest.raises(ModelError, match=message):
        rq.load(export(functional.elu, torch.zeros(2, 3)))


#: Of a tensor without axes, whose axis 0 PyTorch takes for one of one element.
NUMBERS = {
    "sum": lambda x: (x.sum(0), x.prod(0), x.mean(0), x.cumsum(0), x.cumprod(-1)),
    "extremes": lambda x: (*x.max(0), *x.min(-1), x.amax(0), x.argmin(0), *x.topk(1)),
    "order": lambda x: (*x.sort(0), x.argsort(), x.flip(0)),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(0), x.logsumexp(0)),
    "truth": lambda x: (x.any(0), x.all(0)),
    "places": lambda x: (x.gather(0, x.long()), x.index_select(0, x.long()), x.squeeze(0)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NUMBERS)
def test_axis_of_a_number__is_one_of_one_element(name):
    assert_same_bits(NUMBERS[name], torch.tensor(0.0))
