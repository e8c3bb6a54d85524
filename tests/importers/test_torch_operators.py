"""Operators of PyTorch that are converted here: they compute what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.rewrite import Graph

torch = pytest.importorskip("torch", reason="pip install torch")

functional = torch.nn.functional

#: name -> (function, operators of Relax that must be there)
CASES = {
    "amax": (lambda x: x.amax((2, 3)), {"relax.max"}),
    "amax_all": (lambda x: x.amax(), {"relax.max"}),
    "amin": (lambda x: x.amin(1, keepdim=True), {"relax.min"}),
    "max": (lambda x: x.max(2).values, {"relax.max"}),
    "min": (lambda x: x.min(2, keepdim=True)[0], {"relax.min"}),
    "min_index": (lambda x: x.min(2)[1], {"relax.argmin"}),
    "elu": (lambda x: functional.elu(x, 0.4), {"relax.exp"}),
    "selu": (functional.selu, {"relax.exp"}),
    "celu": (lambda x: functional.celu(x, 0.7), {"relax.exp"}),
    "global_max_pool": (lambda x: functional.adaptive_max_pool2d(x, 1), {"relax.max"}),
}


def load(function, x):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return rq.import_torch(torch.export.export(Module(), (x,)))[0]


@pytest.mark.parametrize("name", CASES)
def test_operator__computes_what_torch_computes(name):
    function, wanted = CASES[name]
    x = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6)).astype("float32"))
    mod = load(function, x)
    graph = Graph(mod)
    assert wanted <= {graph.op_name(binding.var) for binding in graph.bindings}
    (got,) = rq.reference.run(mod, [x.numpy()])
    np.testing.assert_allclose(got, function(x).numpy(), rtol=1e-5, atol=1e-5)


def test_adaptive_max_pool__of_another_size_refused():
    with pytest.raises(ModelError, match=r"pools to \[2, 2\]; supported: \[1, 1\]"):
        load(lambda x: functional.adaptive_max_pool2d(x, 2), torch.zeros(1, 2, 4, 4))


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
    "linear": lambda x: functional.interpolate(x[0], scale_factor=2, mode="linear"),
    "clamp_of_integers": lambda x: x.int().clamp(max=2),
    "max_pool": lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
}


@pytest.mark.parametrize("name", COMPILED)
def test_operator__compiled_computes_what_torch_computes(name):
    x = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6)).astype("float32"))
    machine = relax.VirtualMachine(rq.compile(load(COMPILED[name], x)), tvm.cpu())
    got, expected = machine["main"](tvm.runtime.tensor(x.numpy())).numpy(), COMPILED[name](x)
    assert got.dtype == expected.numpy().dtype
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: functional.avg_pool2d(x, 2, divisor_override=3), "has divisor_override 3"),
        (lambda x: functional.max_pool2d(x, 2, return_indices=True), "is asked for indices"),
        (
            resize(size=(3, 2), mode="bilinear", antialias=True, align_corners=True),
            "has antialias and align_corners",
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
    mod, _ = rq.import_torch(torch.export.export(module, (x,)))
    (got,) = rq.reference.run(mod, [x.numpy()])
    np.testing.assert_allclose(got, module(x)[0].detach().numpy(), rtol=1e-4, atol=1e-5)
