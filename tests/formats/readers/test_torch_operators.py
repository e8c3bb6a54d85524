"""Operators of PyTorch that are converted here: they compute what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from operator_names import list_operators
from scipy import special
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_torch

torch = pytest.importorskip("torch", reason="pip install torch")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")

functional = torch.nn.functional

#: name -> (function, operators of Relax that must be there)
CASES = {
    "amax": (lambda x: x.amax((2, 3)), {"max"}),
    "amax_all": (lambda x: x.amax(), {"max"}),
    "amin": (lambda x: x.amin(1, keepdim=True), {"min"}),
    "max": (lambda x: x.max(2).values, {"max"}),
    "min": (lambda x: x.min(2, keepdim=True)[0], {"min"}),
    "min_index": (lambda x: x.min(2)[1], {"argmin"}),
    "elu": (lambda x: functional.elu(x, 0.4), {"exp"}),
    "selu": (functional.selu, {"exp"}),
    "celu": (lambda x: functional.celu(x, 0.7), {"exp"}),
    "global_max_pool": (lambda x: functional.adaptive_max_pool2d(x, 1), {"max"}),
}


def load(function, x):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return import_torch(torch.export.export(Module(), (x,)))[0]


@pytest.mark.parametrize("name", CASES)
def test_operator__computes_what_torch_computes(name):
    function, wanted = CASES[name]
    x = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6)).astype("float32"))
    mod = load(function, x)
    assert wanted <= {*list_operators(mod)}
    (got,) = rq.reference.run(mod, [x.numpy()])
    np.testing.assert_allclose(got, function(x).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [0, 2])
def test_topk__takes_as_many_as_torch(count):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 6)).astype("float32"))

    def take(x):
        return (*x.topk(count), x.topk(count, 0, largest=False).values)

    found = rq.Executor(rq.compile(load(take, x))).run("main", [x.numpy()])
    for got, want in zip(found, take(x), strict=True):
        np.testing.assert_array_equal(got, want.numpy())


def resize(**kwargs):
    return lambda x: functional.interpolate(x, **kwargs)


def sample(*args):
    grid = torch.from_numpy(np.random.default_rng(1).uniform(-1.5, 1.5, (2, 3, 7, 2)))
    return lambda x: functional.grid_sample(x, grid.float(), *args)


#: Compiled, as the reference has no images: what TVM's frontend got wrong, or could not.
I, J = torch.tensor([0, -1, 1]), torch.tensor([-2, 1, -4])

COMPILED = {
    "nearest_up": resize(scale_factor=1.7),
    "nearest_down": resize(scale_factor=0.6),
    "nearest_size": resize(size=(7, 13)),
    "bilinear_scale": resize(scale_factor=1.7, mode="bilinear"),
    "bilinear_corners": resize(scale_factor=1.7, mode="bilinear", align_corners=True),
    "bilinear_antialias": resize(size=(3, 2), mode="bilinear", antialias=True),
    "bicubic_scale": resize(scale_factor=0.6, mode="bicubic"),
    "bicubic_antialias": resize(size=(3, 2), mode="bicubic", antialias=True),
    "grid_bilinear": sample("bilinear", "zeros", False),
    "grid_nearest": sample("nearest", "border", False),
    "grid_reflection": sample("bilinear", "reflection", True),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "cumsum_of_bool": lambda x: (x > 0).cumsum(1),
    "index_pair": lambda x: x[I, J],
    "index_inner_pair": lambda x: x[:, J, I],
    "index_three": lambda x: x[:, J, J, I],
    "index_apart": lambda x: x[I, :, J],
    "index_table": lambda x: x[:, J[:, None], I],
    "index_computed": lambda x: x[:, (x[0, :3, 0, 0] > 0).long() - 2, I],
    "masked": lambda x: torch.ops.aten.index_put(x, [x > 0], torch.tensor(2.0)),
    "masked_rows": lambda x: torch.ops.aten.index_put(x, [x[:, :, 0, 0] > 0], torch.tensor(2.0)),
    "linear": lambda x: functional.interpolate(x[0], scale_factor=2, mode="linear"),
    "clamp_of_integers": lambda x: x.int().clamp(max=2),
    "max_pool": lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
}


def assert_compiled_equals(function, x):
    machine = relax.VirtualMachine(rq.compile(load(function, x)), tvm.cpu())
    got, expected = machine["main"](tvm.runtime.tensor(x.numpy())).numpy(), function(x)
    assert got.dtype == expected.numpy().dtype
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-4)


def draw_map():
    return torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6)).astype("float32"))


@pytest.mark.parametrize("name", COMPILED)
def test_operator__compiled_computes_what_torch_computes(name):
    """Also beside a number, which TVM's frontend takes beside a variable only."""
    assert_compiled_equals(lambda x: COMPILED[name](x) * 2, draw_map())


def draw_adaptive_max_pool(rng):
    rank = int(rng.integers(1, 4))
    sizes = rng.integers(1, 6, rank).tolist()
    pool = getattr(functional, f"adaptive_max_pool{rank}d")
    return lambda x: pool(x[0] if rank == 1 else x[None] if rank == 3 else x, sizes)


def draw_unfold(rng):
    pairs = {
        name: tuple(rng.integers(low, 3, 2).tolist())
        for name, low in (("kernel_size", 1), ("dilation", 1), ("padding", 0), ("stride", 1))
    }
    return lambda x: functional.unfold(x, **pairs)


def draw_embedding_bag(rng):
    table = torch.from_numpy(rng.normal(size=(7, 3)).astype("float32"))
    places = torch.from_numpy(rng.integers(0, 7, 9))
    mode = str(rng.choice(["sum", "mean"]))
    factors = torch.rand(9) if mode == "sum" and rng.integers(2) else None
    has_last = bool(rng.integers(2))
    offsets = torch.tensor([0, *sorted(rng.integers(0, 10, 3).tolist()), *[9] * has_last])
    return lambda x: functional.embedding_bag(
        places + (x.flatten()[:9] > 99).long(),
        table,
        offsets,
        mode=mode,
        per_sample_weights=factors,
        include_last_offset=has_last,
    )


def draw_index_put(rng):
    """Into points of some axes, each once unless they are added: the order is open."""
    axes = sorted(rng.choice(4, int(rng.integers(1, 4)), replace=False).tolist())
    sizes = [(2, 4, 5, 6)[axis] for axis in axes]
    adds = bool(rng.integers(2))
    flat = rng.choice(np.prod(sizes), 6 if adds else 2, replace=adds)
    points = [torch.from_numpy(part) for part in np.unravel_index(flat, sizes)]
    points[0] = points[0] - sizes[0]
    where = [None] * 4
    for axis, point in zip(axes, points, strict=True):
        where[axis] = point
    key = tuple(slice(None) if each is None else each for each in where)
    return lambda x: torch.ops.aten.index_put(x, where, x[key] * 2 + 1, adds)


def draw_scatter(rng):
    dim = int(rng.integers(0, 4))
    shape = rng.integers(1, np.array([2, 4, 5, 6]) + 1)
    shape[dim] = 7  # more than there are places: some are met twice
    places = torch.from_numpy(rng.integers(0, (2, 4, 5, 6)[dim], shape))
    source = torch.from_numpy(rng.normal(size=shape + rng.integers(0, 2, 4)).astype("float32"))
    kind = str(rng.choice(["sum", "prod", "mean", "amax", "amin", "add", "last"]))
    if kind == "last":
        places = torch.argsort(torch.rand(2, 4, 5, 6), dim)
        return lambda x: x.scatter(dim, places[:1, :3, :, :4], x[:1, :3, :, :4] + 1)
    if kind == "add":
        return lambda x: x.scatter_add(dim - 4, places, source)
    return lambda x: x.scatter_reduce(dim, places, source, kind)


def draw_gather(rng):
    """Of fewer indices than there are elements along the other dimensions."""
    dim = int(rng.integers(-4, 4))
    shape = rng.integers(1, np.array([2, 4, 5, 6]) + 1)
    shape[dim] = 7
    places = torch.from_numpy(rng.integers(0, (2, 4, 5, 6)[dim], shape))
    return lambda x: torch.gather(x, dim, places)


DRAWN = (
    draw_adaptive_max_pool,
    draw_unfold,
    draw_embedding_bag,
    draw_gather,
    draw_index_put,
    draw_scatter,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_operator__with_drawn_attributes(draw, seed):
    torch.manual_seed(seed)
    assert_compiled_equals(draw(np.random.default_rng(seed)), draw_map())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: functional.max_pool2d(x, 2, return_indices=True), "is asked for its results"),
        (
            resize(size=(3, 2), mode="bilinear", antialias=True, align_corners=True),
            "has antialias and align_corners",
        ),
        (
            lambda x: functional.adaptive_max_pool2d(x, 2, return_indices=True),
            r"Node '\w+' \(operator aten.adaptive_max_pool2d.default\).* \[1\]; supported: .*Wri",
        ),
        (
            lambda x: torch.ops.aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)[2],
            r"is asked for its results \[2\]; supported",
        ),
        (
            lambda x: torch.ops.aten.native_group_norm(x, None, None, 2, 4, 30, 2, 1e-5)[1],
            r"is asked for its results \[1\]; supported",
        ),
        (
            lambda x: x.int().scatter_reduce(1, x.long() * 0, x.int(), "mean"),
            "it takes the mean of int32; supported: floats",
        ),
        (lambda x: x + torch.randn_like(x), "draws random numbers; .* as an input"),
        (lambda x: x + torch.randn(6), "draws random numbers; .* as an input"),
        (lambda x: torch.bernoulli(x, 0.5), "draws random numbers; .* in eval mode"),
        (
            lambda x: functional.embedding_bag((x[0, 0] > 0).long(), x[0, 0], mode="max"),
            "mode is 'max'; supported: sum, mean",
        ),
        (
            lambda x: functional.conv_transpose3d(
                x[None], x.new_zeros(2, 3, 2, 2, 2), output_padding=1, dilation=2
            ),
            r"operator aten.convolution.default\) .*supported: what TVM's .*\. Write this part",
        ),
        (
            lambda x: x.logcumsumexp(1) + x.mode(1, keepdim=True)[0],
            r"Not supported, 2 operators of the model: aten.logcumsumexp.default \(nodes .*Write",
        ),
    ],
)
def test_operator__that_would_be_wrong_refused(function, message):
    with pytest.raises(ModelError, match=message):
        load(function, torch.zeros(2, 4, 5, 6))


def test_result__that_is_none_is_left_out():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)

    torch.manual_seed(0)
    module, x = Attention().eval(), torch.randn(2, 5, 8)
    mod, _ = import_torch(torch.export.export(module, (x,)))
    (got,) = rq.reference.run(mod, [x.numpy()])
    np.testing.assert_allclose(got, module(x)[0].detach().numpy(), rtol=1e-4, atol=1e-5)


def attend(**settings):
    return lambda *parts: functional.scaled_dot_product_attention(*parts, **settings)


def then_view(function):
    """Heads side by side, seen as rows: a view of what PyTorch computes, as GPT-2 has it."""

    def compute(*parts):
        y = function(*parts).transpose(1, 2).reshape(2, 7, 4 * 6)
        return y.view(-1, 4 * 6) + 1

    return compute


ATTENTION = {
    "plain": (attend(), (4, 4), None),
    "scale": (attend(scale=0.3), (4, 4), None),
    "causal": (attend(is_causal=True), (4, 4), None),
    "causal in order": (lambda *qkv: attend()(*qkv, None, 0.0, True), (4, 4), None),
    "few heads": (attend(enable_gqa=True), (4, 2), None),
    "causal, few heads": (attend(is_causal=True, enable_gqa=True), (4, 2), None),
    "mask": (attend(), (4, 4), "bool"),
    "sum mask": (attend(), (4, 4), "float"),
    "sum mask that hides": (attend(), (4, 4), "hiding"),
    "mask, few heads": (attend(enable_gqa=True), (4, 2), "bool"),
    "view": (then_view(attend()), (4, 4), None),
    "view of causal": (then_view(attend(is_causal=True)), (4, 4), None),
    "view of mask": (then_view(attend()), (4, 4), "bool"),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention__computes_what_torch_computes(name):
    """Of a batch; with more keys than queries, and fewer; a row that is masked as a whole is 0."""
    function, (heads, key_heads), mask = ATTENTION[name]
    torch.manual_seed(0)
    for keys in (9, 5):
        parts = [torch.randn(2, heads, 7, 8)]
        parts += [torch.randn(2, key_heads, keys, width) for width in (8, 6)]
        if mask == "bool":
            parts.append((torch.rand(7, keys) > 0.4) & (torch.arange(7) != 3)[:, None])
        elif mask == "float":
            parts.append(torch.randn(2, 1, 7, keys))
        elif mask == "hiding":
            hidden = (torch.rand(7, keys) > 0.6) | (torch.arange(7) == 3)[:, None]
            parts.append(torch.randn(7, keys).masked_fill(hidden, -torch.inf))
        assert_program_equals(function, parts)


def assert_program_equals(function, parts):
    class Module(torch.nn.Module):
        def forward(self, *parts):
            return function(*parts)

    module = Module()
    mod, _ = import_torch(torch.export.export(module, tuple(parts)))
    (got,) = rq.reference.run(mod, [part.numpy() for part in parts])
    np.testing.assert_allclose(got, module(*parts).numpy(), rtol=1e-5, atol=1e-5)


def split_packed(x):
    """Queries, keys and values of 3 heads of 4 from one product, as vision transformers have it."""
    return x.reshape(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)


def split_rows(x):
    """The same from three pieces of a row, as GPT-2 has it."""
    return [part.view(*x.shape[:2], 3, 4).transpose(1, 2) for part in x.split(12, 2)]


#: programs with views that the memory order of PyTorch's kernels allows, without a copy
VIEWS = {
    "packed": lambda x: attend()(*split_packed(x)).transpose(1, 2).view(2, 7, 12),
    "packed, copied": lambda x: (
        attend()(*split_packed(x)).transpose(1, 2).contiguous().view(14, 12)
    ),
    "rows": lambda x: attend(is_causal=True)(*split_rows(x)).transpose(1, 2).view(2, 7, 12),
    "rows, copied": lambda x: attend()(*split_rows(x)).transpose(1, 2).contiguous().view(2, -1),
    "channels last": lambda x: (
        functional.avg_pool2d(
            x.reshape(2, 3, 7, 12).contiguous(memory_format=torch.channels_last), (1, 2)
        )
        .permute(0, 2, 3, 1)
        .view(2, -1)
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view__of_the_memory_order_of_kernels_is_read(name):
    torch.manual_seed(0)
    assert_program_equals(VIEWS[name], [torch.randn(2, 7, 36)])


def test_view__that_is_written_into_is_no_copy():
    """Without a view of its memory order, the program is refused: a copy would lose the sum."""

    class Module(torch.nn.Module):
        def forward(self, x):
            y = attend()(*split_rows(x)).transpose(1, 2).contiguous()
            y.view(2, 7, 12).add_(x[..., :12])
            return y.sum(-1)

    with pytest.raises(ModelError, match="Cannot view a tensor"):
        import_torch(torch.export.export(Module(), (torch.randn(2, 7, 36),)))


def test_attention__of_a_length_that_is_known_at_run_time():
    class Module(torch.nn.Module):
        def forward(self, q):
            y = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            return y.transpose(1, 2).reshape(q.shape[0], q.shape[2], 32).view(-1, 32) + 1

    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Module(), (torch.zeros(2, 4, 12, 8),), dynamic_shapes=({2: length},)
    )
    mod, _ = import_torch(program)
    q = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 4, 7, 8)).astype("float32"))
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    got = machine["main"](tvm.runtime.tensor(q.numpy())).numpy()
    np.testing.assert_allclose(got, Module()(q).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_mask_of_padding__of_a_length_that_is_known_at_run_time():
    """As transformers makes it: picked by positions, which are cut from a table of 16. Padding
    changes nothing, and a sample that is all padding has what PyTorch gives.
    """

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(16, 8)
            self.register_buffer("places", torch.arange(16)[None])

        def forward(self, x, mask):
            count, length = mask.shape
            x = x + self.table(self.places[:, :length])
            rows, keys = torch.arange(count)[:, None, None, None], torch.arange(length)
            seen = mask.bool()[rows, keys[None, None, None]].expand(-1, -1, length, -1)
            x = x.reshape(count, length, 2, 4).transpose(1, 2)
            return functional.scaled_dot_product_attention(x, x, x, seen).transpose(1, 2)

    torch.manual_seed(0)
    module, x, mask = Module().eval(), torch.randn(3, 16, 8), torch.ones(3, 16).long()
    mask[1, 9:], mask[2] = 0, 0
    sizes = {0: torch.export.Dim("n", max=8), 1: torch.export.Dim("length", min=2, max=16)}
    program = torch.export.export(module, (x, mask), dynamic_shapes=(sizes, sizes))
    machine = relax.VirtualMachine(rq.compile(import_torch(program)[0]), tvm.cpu())

    def run(*values):
        return machine["main"](*(tvm.runtime.tensor(each.numpy()) for each in values)).numpy()

    padded = run(x, mask)
    np.testing.assert_allclose(padded, module(x, mask).detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(x[1:2, :9], mask[1:2, :9]), padded[1:2, :9])


WHOLE = torch.tensor([[5, 7, -3], [2, 9, 4]])
COUNTS = WHOLE.abs() + 1
REALS = torch.tensor([[0.3, -1.2, 2.0], [0.7, 1.9, -0.4]])
TRUTHS = WHOLE > 3
#: Tensors without dimensions do not raise the type of others of their kind.
WIDE, NARROW, WHOLE_SCALAR = (
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor(0.5),
    torch.tensor(3),
)

#: What PyTorch does with operands of several types: by integers, truth values, numbers.
PROMOTION = {
    "int / number": (lambda x: x / 2, (WHOLE,)),
    "int / int": (lambda x, y: x / y, (WHOLE, COUNTS)),
    "int // number": (lambda x: x // 2, (WHOLE,)),
    "int / int, to floor": (lambda x, y: x.div(y, rounding_mode="floor"), (WHOLE, COUNTS)),
    "int / int, to zero": (lambda x, y: x.div(y, rounding_mode="trunc"), (WHOLE, COUNTS)),
    "float // int": (lambda x: x.div(2, rounding_mode="floor"), (REALS,)),
    "float / number, to zero": (lambda x: x.div(0.75, rounding_mode="trunc"), (REALS,)),
    "number // float": (lambda x: 3 // x, (REALS,)),
    "truth // int": (lambda x: True // (x.abs() + 1), (WHOLE,)),
    "int32 + truth, scaled": (lambda x, y: torch.add(x.int(), y > 0, alpha=3), (WHOLE, COUNTS)),
    "truth + truth, scaled": (lambda x, y: torch.add(x > 0, y > 0, alpha=2), (WHOLE, COUNTS)),
    "truth + number, scaled": (lambda x: torch.add(x > 0, True, alpha=2), (WHOLE,)),
    "int32 & scalar of int64": (lambda x: x.int() & torch.tensor(6), (WHOLE,)),
    "truth | number": (lambda x: (x > 0) | 6, (WHOLE,)),
    "int32 ^ truth": (lambda x, y: x.int() ^ (y > 0), (WHOLE, COUNTS)),
    "int % number": (lambda x: x % 4, (WHOLE,)),
    "int + float": (lambda x, y: x + y, (WHOLE, REALS)),
    "int32 + int64": (lambda x, y: x.int() + y, (WHOLE, COUNTS)),
    "int + number": (lambda x: x + 0.5, (WHOLE,)),
    "int * number": (lambda x: x * 0.5, (WHOLE,)),
    "bool + number": (lambda x: x + 1, (TRUTHS,)),
    "bool * float": (lambda x, y: x * y, (TRUTHS, REALS)),
    "int ** number": (lambda x: x**0.5, (COUNTS,)),
    "number ** int": (lambda x: 2.0**x, (WHOLE,)),
    "int < number": (lambda x: x < 2.5, (WHOLE,)),
    "int == float": (lambda x, y: x == y, (WHOLE, REALS)),
    "maximum": (torch.maximum, (WHOLE, REALS)),
    "clamp": (lambda x: x.clamp(0.5, 3.5), (WHOLE,)),
    "clamp to int": (lambda x: x.clamp(0, 3), (WHOLE,)),
    "where": (torch.where, (TRUTHS, WHOLE, REALS)),
    "where number": (lambda c, x: torch.where(c, x, 0.5), (TRUTHS, WHOLE)),
    "any of int": (lambda x: x.any(1), (WHOLE - 4,)),
    "all of int": (lambda x: x.all(1), (WHOLE - 4,)),
    "all": (lambda x: x.all(), (TRUTHS,)),
    "add, alpha": (lambda x, y: torch.add(x, y, alpha=3), (REALS, REALS + 1)),
    "add, alpha, int": (lambda x, y: torch.add(x, y, alpha=3), (WHOLE, REALS)),
    "sub, alpha": (lambda x, y: torch.sub(x, y, alpha=0.3), (REALS, REALS + 1)),
    "rsub, alpha": (lambda x: torch.rsub(x, 2, alpha=3), (WHOLE,)),
    "arange / number": (lambda x: torch.arange(3) / 4 + x, (REALS,)),
    "sum of bool": (lambda x: x.sum(1), (TRUTHS,)),
    "float * scalar tensor of float64": (lambda x, y: x * y, (REALS, WIDE)),
    "scalar tensor of float64 - float": (lambda x, y: y - x, (REALS, WIDE)),
    "int * scalar tensor of float64": (lambda x, y: x * y, (WHOLE, WIDE)),
    "float + scalar tensor of int": (lambda x, y: y + x, (REALS, WHOLE_SCALAR)),
    "half * scalar tensor of float": (lambda x, y: y * x.half(), (REALS, NARROW)),
    "int8 + scalar tensor of int64": (lambda x, y: x.to(torch.int8) + y, (WHOLE, WHOLE_SCALAR)),
    "float < scalar tensor of float64": (lambda x, y: x < y, (REALS, WIDE)),
    "float ** scalar tensor of float64": (lambda x, y: x.abs() ** y, (REALS, WIDE)),
    "where, scalar tensor of float64": (torch.where, (TRUTHS, REALS, WIDE)),
    "clamp, scalar tensor of float64": (lambda x, y: x.clamp(max=y), (REALS, WIDE)),
    "half + float": (lambda x, y: x.half() + y, (REALS, REALS)),
}
UNARY_OF_INTEGERS = (
    *("log", "exp", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "reciprocal"),
    *("log2", "log10", "log1p", "expm1", "atan", "sinh"),
)
PROMOTION |= {f"{name} of int": (getattr(torch, name), (COUNTS,)) for name in UNARY_OF_INTEGERS}


@pytest.mark.parametrize("name", PROMOTION)
def test_types__are_promoted_as_in_torch(name):
    """The frontend takes the type of the first operand: 5 / 2 would be 2, and `alpha` nothing."""
    check_as_torch(*PROMOTION[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["expm1", "log1p", "atanh"])
def test_near_zero__digits_are_kept(name, dtype):
    """exp(x) - 1 and log(1 + x) are 0 for x = 1e-20, and atanh of TVM is."""
    sizes = torch.cat([10 ** torch.linspace(-30, -0.05, 99, dtype=dtype), torch.tensor([0.0, 1.0])])
    data = torch.cat([sizes, -sizes, torch.tensor([torch.nan, torch.inf, -torch.inf])]).to(dtype)
    check_as_torch(getattr(torch, name), (data,), rtol=32 * torch.finfo(dtype).eps, atol=0)


SQUARE = torch.linspace(-1.7, 2.2, 9).reshape(3, 3)
BATCH = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
SIGNS = torch.tensor([[0.0, -0.0, -3.0], [1.0, -1.0, 0.0]])
GAPS = torch.tensor([[float("nan"), 1.0, -2.0], [3.0, float("nan"), 0.5]])
BORDERS = torch.tensor([-1.2, 0.3, 0.3, 1.9])

#: Operators of PyTorch that TVM's frontend does not have.
COMPOSED = {
    "addbmm": (lambda x, y: torch.addbmm(y, x, x.mT, beta=0.5, alpha=2), (BATCH, SQUARE)),
    "addmv": (lambda x: torch.addmv(x[0], x, x[1], beta=2, alpha=3), (SQUARE,)),
    "cat of types": (lambda x, y: torch.cat([x, y], 1), (WHOLE, REALS)),
    "stack of types": (lambda x, y: torch.stack([x, y], -1), (TRUTHS, WHOLE)),
    "cdist": (torch.cdist, (BATCH, BATCH + 1)),
    "cdist, 1": (lambda x, y: torch.cdist(x, y, p=1), (REALS, SQUARE)),
    "cdist, 3": (lambda x, y: torch.cdist(x, y, p=3.0), (REALS, SQUARE)),
    "cdist, inf": (lambda x, y: torch.cdist(x, y, p=float("inf")), (REALS, SQUARE)),
    "cat of types, halves": (lambda x, y: torch.cat([x.half(), y], 1), (REALS, REALS)),
    "cat with nothing": (lambda x: torch.cat([torch.zeros(0), x], 0), (REALS,)),
    "cdist, 0": (lambda x, y: torch.cdist(x, y, p=0.0), (REALS, REALS[:2].flip(0))),
    "copysign": (torch.copysign, (REALS, SIGNS)),
    "copysign of number": (lambda x: torch.copysign(x, -0.0), (REALS,)),
    "copysign of int": (torch.copysign, (WHOLE, SIGNS)),
    "copysign of two types": (torch.copysign, (REALS, -REALS.double())),
    "copysign of double": (torch.copysign, (REALS.double(), -REALS)),
    "copysign of int, double": (torch.copysign, (WHOLE, -REALS.double())),
    "erfc": (torch.erfc, (REALS,)),
    "erfc of int": (torch.erfc, (WHOLE,)),
    "exp2": (torch.exp2, (REALS,)),
    "exp2 of int": (torch.exp2, (WHOLE,)),
    "fmax": (torch.fmax, (REALS, GAPS)),
    "fmin": (torch.fmin, (GAPS, REALS)),
    "histc": (lambda x: torch.histc(x, 7), (BATCH,)),
    "histc, range": (lambda x: torch.histc(x, 4, -1, 1.9), (BORDERS,)),
    "histc, gaps": (lambda x: torch.histc(x, 5, -2, 3), (GAPS,)),
    "histc, equal": (lambda x: torch.histc(x, 3), (torch.ones(2, 3),)),
    "hypot": (torch.hypot, (REALS, SIGNS)),
    "hypot, large": (torch.hypot, (REALS * 1e30, SIGNS * 1e30)),
    "hypot, small": (torch.hypot, (REALS * 1e-30, SIGNS * 1e-30)),
    "hypot, infinite": (torch.hypot, (REALS, torch.full((2, 3), -torch.inf))),
    "ldexp": (torch.ldexp, (REALS, WHOLE)),
    "masked_scatter": (
        lambda x, m, s: x.masked_scatter(m, s), (REALS, TRUTHS, torch.arange(9.0)),
    ),
    "masked_scatter, rows": (
        lambda x, s: x.masked_scatter(x[:, :1] > 0.5, s), (REALS, torch.arange(9.0)),
    ),
    "masked_scatter, wider mask": (
        lambda x, m, s: x[0].masked_scatter(m, s), (REALS, TRUTHS, torch.arange(9.0)),
    ),
    "one_hot": (lambda x: functional.one_hot(x, 12), (COUNTS,)),
    "pad, negative": (lambda x: functional.pad(x, (-1, 2, 1, -2), value=3), (BATCH,)),
    "pad, negative only": (lambda x: functional.pad(x, (-1, -1)), (WHOLE,)),
    "prod": (lambda x: x.prod(1), (REALS,)),
    "prod of int": (lambda x: x.int().prod(0, keepdim=True), (WHOLE,)),
    "number % int": (lambda x: 7 % x, (COUNTS,)),
    "number % float": (lambda x: -2.5 % x, (COUNTS.float(),)),
    "rrelu": (lambda x: functional.rrelu(x, 0.1, 0.3), (REALS,)),
    "searchsorted": (torch.searchsorted, (BORDERS, REALS)),
    "searchsorted, right": (lambda s, x: torch.searchsorted(s, x, side="right"), (BORDERS, REALS)),
    "sort, stable": (
        lambda x: x.sort(dim=1, stable=True).indices,
        (torch.tensor([[3.0, 1, 3, 1, 2]] * 2),),
    ),
    "sort, stable, descending": (
        lambda x: torch.sort(x, stable=True, dim=0, descending=True).indices,
        (torch.tensor([[3, 1], [3, 2], [1, 2], [3, 1]]),),
    ),
    "sort, stable, values": (
        lambda x: x.sort(stable=True, descending=True).values,
        (torch.tensor([[3.0, 1, 3, 1, 2]]),),
    ),
    "searchsorted of number": (lambda s: torch.searchsorted(s, 0.3, out_int32=True), (BORDERS,)),
    "searchsorted of double": (lambda s: torch.searchsorted(s, 0.3), (BORDERS.double(),)),
    "searchsorted of int": (lambda s: torch.searchsorted(s, 3.5), (torch.tensor([1, 3, 5]),)),
    "searchsorted of NaN": (torch.searchsorted, (BORDERS, GAPS)),
    "bucketize of number": (lambda s: torch.bucketize(0.3, s, right=True), (BORDERS,)),
    "searchsorted, rows": (
        torch.searchsorted, (torch.stack([BORDERS, BORDERS + 1]), REALS.contiguous()),
    ),
    "bucketize": (lambda x, s: torch.bucketize(x, s, right=True), (REALS, BORDERS)),
    "bilinear": (functional.bilinear, (REALS, REALS + 1, torch.ones(4, 3, 3).cumsum(1))),
    "unfold": (lambda x: x.unfold(1, 2, 1), (BATCH,)),
    "unfold, last": (lambda x: x.unfold(-1, 2, 2), (BATCH,)),
    "var_mean": (lambda x: torch.stack(torch.var_mean(x, -1, keepdim=True)), (BATCH,)),
    "var_mean, all": (lambda x: torch.stack(torch.var_mean(x, correction=2)), (BATCH,)),
    "int << number": (lambda x: x << 3, (WHOLE,)),
    "int >> number": (lambda x: x >> 1, (WHOLE,)),
    "int << int": (lambda x, y: x << y, (WHOLE, COUNTS)),
    "int >> int8": (lambda x, y: x >> y.to(torch.int8), (WHOLE * 1000, COUNTS)),
    "bitwise_left_shift": (lambda x: torch.bitwise_left_shift(x, 2), (WHOLE,)),
    "number >> int": (lambda x: torch.bitwise_right_shift(1000, x), (COUNTS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_operators__written_in_others(name):
    check_as_torch(*COMPOSED[name])


#: Sizes that are known at run time, where PyTorch takes a number.
SIZES = {
    "x / s": lambda x: x / x.shape[1],
    "s - x": lambda x: x.shape[1] - x,
    "int + s": lambda x: x.int() + x.shape[1],
    "int / s": lambda x: x.int() / x.shape[1],
    "int // s": lambda x: x.int() // x.shape[1],
    "int % s": lambda x: x.int() % x.shape[1],
    "x ** s": lambda x: x.abs() ** x.shape[1],
    "x < s": lambda x: x * 8 < x.shape[1],
    "clamp": lambda x: (x * 8).clamp(max=x.shape[1]),
    "where": lambda x: torch.where(x > 0, x, x.shape[1]),
    "positions": lambda x: torch.arange(x.shape[1]) / x.shape[1] + x[0, 0, 0],
    "unfold": lambda x: x.unfold(1, 3, 2) / x.shape[1],
    "repeat": lambda x: x.repeat(x.shape[1], 1, 2, 1),
    "repeat, then": lambda x: x.repeat(1, x.shape[1], 2)[:, : x.shape[1]],
    "var": lambda x: x.var((0, 1), keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 1, correction=0)[0],
}


@pytest.mark.parametrize("name", SIZES)
def test_size__known_at_run_time_in_arithmetic(name):
    class Module(torch.nn.Module):
        def forward(self, x):
            return SIZES[name](x)

    length = torch.export.Dim("length", min=6, max=64)
    program = torch.export.export(Module(), (torch.zeros(2, 8, 4),), dynamic_shapes=({1: length},))
    x = torch.linspace(-2, 2, 72).reshape(2, 9, 4)
    machine = relax.VirtualMachine(rq.compile(import_torch(program)[0]), tvm.cpu())
    got, expected = machine["main"](tvm.runtime.tensor(x.numpy())).numpy(), Module()(x).numpy()
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_shift__by_more_than_the_type_has():
    with pytest.raises(ModelError, match=r"shifts int64 by 64; supported: 0 to 63"):
        load(lambda x: x << 64, WHOLE)


@pytest.mark.parametrize(("dtype", "last", "rtol"), [("float32", 9, 2e-7), ("float64", 26, 2e-14)])
def test_erfc__is_exact_where_it_is_small(dtype, last, rtol):
    """Down to the smallest numbers of the type; 1 - erf(x) is 0 long before."""
    data = np.concatenate([np.linspace(-6, last, 2000), [np.inf, -np.inf, np.nan]]).astype(dtype)
    mod, _ = import_torch(load_program(torch.erfc, (torch.from_numpy(data),)))
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    expected = special.erfc(data.astype("float64"))
    for got in (machine["main"](tvm.runtime.tensor(data)).numpy(), *rq.reference.run(mod, [data])):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, expected, rtol=rtol)


def load_program(function, parts):
    """The exported program of a function."""

    class Module(torch.nn.Module):
        def forward(self, *parts):
            return function(*parts)

    return torch.export.export(Module(), parts)


def check_as_torch(function, parts, rtol=2e-5, atol=1e-6):
    """Reference and compiled code give PyTorch's type and values."""
    mod, _ = import_torch(load_program(function, parts))
    arrays = [part.numpy() for part in parts]
    expected = function(*parts).numpy()
    (found,) = rq.reference.run(mod, arrays)
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    for got in (found, compiled):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


#: what x[key] = values writes into x of shape (batch, 5, 4)
WRITES = {
    "x[:, i]": ((slice(None), torch.tensor([1, 3, -1])), lambda x: x[:, :3] * 2),
    "x[:, :, i]": ((slice(None), slice(None), torch.tensor([0, 2])), lambda x: x[..., :2] * 2),
    "x[:, i, j]": (
        (slice(None), torch.tensor([1, 3]), torch.tensor([[0], [2]])),
        lambda x: torch.tensor(7.0),
    ),
    "x[i, :, j]": (
        (torch.tensor([0]), slice(None), torch.tensor([2])),
        lambda x: torch.tensor(7.0),
    ),
    "x[i]": ((torch.tensor([0, -1]),), lambda x: x[:2] * 2),
    "x[:, 2]": ((slice(None), 2), lambda x: x[:, 1] * 2),
    "x[:]": ((slice(None),), lambda x: x * 2),
    "x[..., 2:]": ((..., slice(2, None)), lambda x: x[..., :2] * 2),
    "x[..., 1:3]": ((..., slice(1, 3)), lambda x: x[..., :2] * 2),
    "x[:, 3:1]": ((slice(None), slice(3, 1)), lambda x: x[:, :0]),
    "x[:, ::2]": ((slice(None), slice(None, None, 2)), lambda x: x[:, :3] * 2),
    "x[:, 4:1:2]": ((slice(None), slice(4, 1, 2)), lambda x: x[:, :0]),
    "x[:, 5::2]": ((slice(None), slice(5, None, 2)), lambda x: x[:, :0]),
    "x[:, no i]": ((slice(None), torch.zeros(0, dtype=torch.int64)), lambda x: x[:, :0]),
}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_writes__of_parts_also_with_a_batch_of_any_size_and_in_onnx(name, is_dynamic, tmp_path):
    key, make = WRITES[name]

    class Module(torch.nn.Module):
        def forward(self, x):
            written = x.clone()
            written[key] = make(x)
            return written

    batch = {0: torch.export.Dim("batch", min=2, max=9)}
    example = torch.zeros(4, 5, 4)
    sizes = (batch,) if is_dynamic else None
    mod, _ = import_torch(torch.export.export(Module(), (example,), dynamic_shapes=sizes))
    x = torch.linspace(-2, 2, 80).reshape(4, 5, 4)[: 3 if is_dynamic else 4]
    expected = Module()(x).numpy()
    np.testing.assert_array_equal(rq.reference.run(mod, [x.numpy()])[0], expected)
    (compiled,) = rq.Executor(rq.compile(mod)).run("main", [x.numpy()])
    np.testing.assert_array_equal(compiled, expected)
    session = onnxruntime.InferenceSession(rq.export_onnx(mod, tmp_path / "written.onnx"))
    (given,) = session.get_inputs()
    np.testing.assert_array_equal(session.run(None, {given.name: x.numpy()})[0], expected)
