"""Operators of PyTorch on axes of free sizes: one compiled module computes what PyTorch computes,
for several sizes.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.formats.readers import import_torch
from relayquant.ir.rewrite.expressions import list_bindings, op_name
from relayquant.ir.rewrite.graph import call_name

torch = pytest.importorskip("torch", reason="pip install torch")

functional = torch.nn.functional

KINDS = ("sum", "prod", "mean", "amax", "amin")


def assert_same_for_all_sizes(function, make, axes):
    """`make(n, l)` gives the inputs; `axes` names the free axes of each: {axis: "n" or "l"}."""

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    free = {"n": torch.export.Dim("n", max=16), "l": torch.export.Dim("l", min=4, max=32)}
    shapes = (tuple({axis: free[name] for axis, name in each.items()} for each in axes),)
    program = torch.export.export(Module(), make(3, 8), dynamic_shapes=shapes)
    mod, _ = import_torch(program)
    executor = rq.Executor(rq.compile(mod))
    for sizes in ((3, 8), (1, 5), (7, 11)):
        arrays = [tensor.numpy() for tensor in make(*sizes)]
        expected = function(*map(torch.from_numpy, arrays)).numpy()
        for (got,) in (rq.reference.run(mod, arrays), executor.run("main", arrays)):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def draw(*shape):
    return torch.from_numpy(np.random.default_rng(shape).normal(size=shape).astype("float32"))


def draw_places(count, *shape):
    return torch.from_numpy(np.random.default_rng(shape).integers(0, count, shape))


def convolve(rank, **settings):
    """Each sample has its own weights, so there are as many groups as samples."""
    is_transposed = settings.pop("transposed", False)
    name = f"conv_transpose{rank}d" if is_transposed else f"conv{rank}d"

    def compute(x, factors):
        sizes = (2, 4) if is_transposed else (4, 2)
        table = draw(*sizes, *(3, 2, 1)[:rank])
        weights = table * factors[:, None].reshape(-1, *[1] * (2 + rank))
        y = getattr(functional, name)(
            x.reshape(1, -1, *x.shape[2:]),
            weights.flatten(0, 1),
            None if is_transposed else factors.repeat_interleave(4),
            groups=x.shape[0],
            **settings,
        )
        return y.reshape(x.shape[0], 4, *y.shape[2:])

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": 2},
        {"transposed": True},
        {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1},
        {"transposed": True, "dilation": 2, "padding": 0},
    ],
)
def test_convolution__of_as_many_groups_as_samples(rank, settings):
    assert_same_for_all_sizes(
        convolve(rank, **settings),
        lambda n, _: (draw(n, 2, *(7, 6, 5)[:rank]), draw(n)),
        [{0: "n"}, {0: "n"}],
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("is_included", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_scatter_reduce__of_free_sizes(kind, is_included):
    """The index is smaller than its source."""
    assert_same_for_all_sizes(
        lambda x, i, s: x.scatter_reduce(1, i[:, :3], s, kind, include_self=is_included),
        lambda n, length: (draw(n, 5), draw_places(5, n, length), draw(n, length)),
        [{0: "n"}, {0: "n", 1: "l"}, {0: "n", 1: "l"}],
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.index_add(1, i[0], x[:, i[0]]),
        lambda x, i: x.new_zeros(6, 6).index_add(0, i[:, 1], x),
        lambda x, i: torch.ops.aten.index_put(x, [None, i[0]], torch.tensor(2.0)),
        lambda x, i: torch.ops.aten.index_put(
            x, [torch.arange(x.shape[0])[:, None], i], torch.tensor(2.0), True
        ),
        lambda x, i: torch.zeros_like(x).scatter(1, x.topk(2, 1)[1], x) + i[:, 0, None],
    ],
    ids=["add columns", "add rows", "put columns", "add points", "scatter"],
)
def test_writes_by_index__of_free_sizes(function):
    assert_same_for_all_sizes(
        function,
        lambda n, length: (draw(n, 6), draw_places(6, n, length)),
        [{0: "n"}, {0: "n", 1: "l"}],
    )


def write(*key):
    """x with a part of it replaced."""

    def compute(x):
        y = x.clone()
        y[key] = y[key] * 2 + 1
        return y

    return compute


#: Functions of x (n, l, 6), both sizes free.
FUNCTIONS = {
    "difference": lambda x: x[:, 1:] - x[:, :-1],
    "difference of the last axis": lambda x: x.mT[..., 2:] * x.mT[..., :-2],
    "every second": lambda x: x[:, 1::2] + 1,
    "more than there is": lambda x: x[:, 2:100] * 2,
    "first, repeated": lambda x: x[:, :1].expand(-1, 5, -1),
    "last": lambda x: x[:, -3:] - x[:, :3],
    "write a slice": write(slice(None), slice(1, 3)),
    "write all but the last": write(slice(None), slice(None, -1)),
    "write the last two": write(slice(None), slice(-2, None)),
    "write every second": write(slice(None), slice(1, None, 2)),
    "pad by zeros": lambda x: functional.pad(x, (1, 0)).view(x.shape[0], -1)[:, 1:],
    "pad to a length": lambda x: functional.pad(x, (0, 0, x.shape[0], 40 - x.shape[1]), value=2.0),
    "pad circular": lambda x: functional.pad(x.mT, (2, 1), "circular"),
    "pad by edges": lambda x: functional.pad(x.mT, (2, 1), "replicate"),
    "instance norm": lambda x: functional.instance_norm(x.mT),
    "instance norm, affine": lambda x: functional.instance_norm(
        x.mT, weight=torch.arange(1.0, 7), bias=torch.arange(6.0)
    ),
    "count down": lambda x: torch.arange(x.shape[1] - 1, -1, -1),
    "count down by two": lambda x: torch.arange(x.shape[1], 0, -2) + 1,
    "count in floats": lambda x: torch.arange(0.0, x.shape[1]) * 2,
    "clamp by a size": lambda x: torch.arange(x.shape[1]).clamp(1, x.shape[1] - 2),
    "clamp below": lambda x: x.int().clamp(max=x.int().amax() - 1),
    "view as one sample and back": lambda x: x.view(1, -1, 6).mul(2).view(x.shape[0], -1, 6),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operator__of_free_sizes(name):
    assert_same_for_all_sizes(
        FUNCTIONS[name], lambda n, length: (draw(n, length, 6),), [{0: "n", 1: "l"}]
    )


def export_along(function, size, **limits):
    """The program of function(x), x (2, `size`), whose size is free within limits."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    free = ({1: torch.export.Dim("n", **limits)},) if limits else None
    mod, _ = import_torch(torch.export.export(Module(), (draw(2, size),), dynamic_shapes=free))
    return mod


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :4] * 2,
        lambda x: x[:, -4:] * 2,
        lambda x: x[:, 1:8:2] * 2,
        write(slice(None), slice(2, 6)),
    ],
    ids=["first", "last", "every second", "write"],
)
def test_slice__reads_nothing_behind_a_size_below_the_export_s_limit(function):
    executor = rq.Executor(rq.compile(export_along(function, 9, min=8)))
    x = draw(2, 11)
    (got,) = executor.run("main", [x.numpy()])
    np.testing.assert_array_equal(got, function(x).numpy())
    with pytest.raises(ValueError, match="sizes do not fit"):
        executor.run("main", [np.ones((2, 3), "float32")])


def test_dim__a_size_above_its_max_is_refused():
    """As PyTorch's program does."""
    executor = rq.Executor(rq.compile(export_along(lambda x: x.softmax(-1) + 1, 9, max=16)))
    x = draw(2, 16)
    np.testing.assert_allclose(executor.run("main", [x.numpy()])[0], x.softmax(-1) + 1, 1e-6)
    with pytest.raises(ValueError, match=r"'x', which has at most 16 along axis 1"):
        executor.run("main", [np.ones((2, 17), "float32")])


@pytest.mark.sample(2)
@pytest.mark.parametrize("example", [9, 15])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.pad(x, (0, 10 - x.shape[1])) * 2,
        lambda x: functional.pad(x, (10 - x.shape[1], 3), value=2.0) * 2,
    ],
    ids=["after", "before"],
)
def test_pad__to_a_length_crops_what_is_longer(function, example):
    """Whatever the size at the export was."""
    mod = export_along(function, example, min=3, max=20)
    executor = rq.Executor(rq.compile(mod))
    for size in (4, 9, 10, 11, 15):
        x = draw(2, size)
        expected = function(x).numpy()
        for (got,) in (rq.reference.run(mod, [x.numpy()]), executor.run("main", [x.numpy()])):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("key", [slice(4, None), slice(None, 4)], ids=["last", "first"])
def test_write_of_a_slice__has_no_empty_part(key):
    mod = export_along(write(slice(None), key), 8)
    (joined,) = (
        binding.value
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if call_name(binding.value) == "relax.concat"
    )
    assert len(joined.args[0].fields) == 2


def test_attention_of_batches__repeats_no_weight():
    """PyTorch writes the first layers as a product per place, of as many copies of the weight."""
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)

    def attend(query, key):
        return attention(query, key, key, need_weights=False)[0]

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, query, key):
            return attend(query, key)

    def make(n, length):
        return torch.randn(n, 5, 16), torch.randn(n, length, 16)

    free = {"n": torch.export.Dim("n", max=16), "l": torch.export.Dim("l", min=4, max=32)}
    shapes = ({0: free["n"]}, {0: free["n"], 1: free["l"]})
    mod, _ = import_torch(torch.export.export(Module(), make(3, 8), dynamic_shapes=shapes))
    ranks = [
        tuple(operand.ty.ndim for operand in binding.value.args)
        for binding in list_bindings(mod["main"])
        if op_name(binding.value) == "relax.matmul"
    ]
    assert sum(second == 2 for _, second in ranks) == 3  # queries; keys and values; the result
    executor = rq.Executor(rq.compile(mod))
    for sizes in ((3, 8), (1, 5), (7, 11)):
        inputs = make(*sizes)
        (got,) = executor.run("main", [each.numpy() for each in inputs])
        np.testing.assert_allclose(got, attend(*inputs).numpy(), rtol=1e-5, atol=1e-5)
