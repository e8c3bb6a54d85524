"""Operators of PyTorch that are converted here: they compute what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest

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
