"""PyTorch modules from end to end, and programs that PT2E quantized."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import MissingDependencyError, ModelError


def test_torch_missing__extra_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'relayquant\[torch\]'"):
        rq.torch.quantize(object(), (), [])


torch = pytest.importorskip("torch", reason="pip install torch")

from torch_models import InvertedResiduals, ResidualNet, Transformer, make  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "shape", "left"),
    [
        (ResidualNet, (3, 8, 8), set()),
        (InvertedResiduals, (8, 8, 8), set()),
        (
            Transformer,
            (6, 16),
            {"nn.layer_norm", "nn.softmax", "multiply", "add", "reshape", "permute_dims"},
        ),
    ],
)
def test_quantize__any_batch_close_to_the_module(kind, shape, left):
    module = make(kind)
    batches = [torch.randn(2, *shape) for _ in range(4)]
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    qmod = rq.torch.quantize(module, (batches[0],), batches, dynamic_shapes=dynamic, effort="fast")
    assert module.training, "the module is as it was"
    rows = rq.ledger(qmod).rows
    assert {row.op for row in rows if not row.quantized} <= left
    x = torch.randn(3, *shape)
    expected = module.eval()(x).detach().numpy()
    (actual,) = rq.reference.run(qmod, [x.numpy()])
    assert np.abs(actual - expected).max() < 0.05 * np.abs(expected).max()
    assert rq.verify(qmod, [x.numpy()]).is_equal


def test_module_name__selects_the_layer():
    module, x = make(ResidualNet), torch.randn(2, 3, 8, 8)
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name("layer1.0.conv1", None)
    )
    qmod = rq.torch.quantize(module, (x,), [x], qconfig_mapping=mapping, effort="fast")
    (row,) = [row for row in rq.ledger(qmod).rows if not row.quantized]
    assert row.op == "nn.conv2d"
    assert "layer1.0.conv1" in " ".join(row.values)


def test_not_a_module__told():
    with pytest.raises(ModelError, match=r"takes a torch.nn.Module, got str"):
        rq.torch.quantize("model.pt2", (), [])


def make_pt2e():
    """A convolution as PT2E writes it: quantize - dequantize around it, an int8 weight."""
    import torch.ao.quantization.fx._decomposed

    ops = torch.ops.quantized_decomposed

    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            weight = torch.randint(-127, 128, (5, 3, 3, 3), dtype=torch.int8)
            self.register_buffer("weight", weight)
            self.register_buffer("scales", torch.rand(5) * 0.01 + 0.001)
            self.register_buffer("zeros", torch.zeros(5, dtype=torch.int64))
            self.bias = torch.nn.Parameter(torch.randn(5))

        def forward(self, x):
            x = ops.quantize_per_tensor(x, 0.02, 3, -128, 127, torch.int8)
            x = ops.dequantize_per_tensor(x, 0.02, 3, -128, 127, torch.int8)
            weight = ops.dequantize_per_channel(
                self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8
            )
            y = torch.nn.functional.conv2d(x, weight, self.bias).relu()
            y = ops.quantize_per_tensor(y, 0.05, -128, -128, 127, torch.int8)
            return ops.dequantize_per_tensor(y, 0.05, -128, -128, 127, torch.int8)

    return Quantized().eval()


def test_pt2e__keeps_its_parameters_and_computes_on_integers():
    module, x = make_pt2e(), torch.randn(2, 3, 6, 6)
    mod, params = rq.load(rq.torch.export(module, (x,)))
    assert params == {}
    assert "R.qnn.dequantize" in mod.script()
    expected = module(x).detach().numpy()
    (simulated,) = rq.reference.run(mod, [x.numpy()])
    assert np.abs(simulated - expected).max() <= 0.05 + 1e-6, "one step"

    qmod = rq.lower(mod, "arm")
    assert "qnn.conv2d" in qmod.script()
    assert all(row.quantized for row in rq.ledger(qmod).rows)
    (integers,) = rq.reference.run(qmod, [x.numpy()])
    assert np.abs(integers - expected).max() <= 0.05 + 1e-6, "one step"
    assert rq.verify(qmod, [x.numpy()]).is_equal


def make_dynamic():
    """A linear layer as PT2E writes it with parameters of the run time."""
    import torch.ao.quantization.fx._decomposed

    ops = torch.ops.quantized_decomposed

    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            weight = torch.randint(-127, 128, (5, 8), dtype=torch.int8)
            self.register_buffer("weight", weight)
            self.register_buffer("scales", torch.rand(5) * 0.01 + 0.001)
            self.register_buffer("zeros", torch.zeros(5, dtype=torch.int64))

        def forward(self, x):
            scale, zero = ops.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8)
            x = ops.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
            x = ops.dequantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
            weight = ops.dequantize_per_channel(
                self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8
            )
            return torch.nn.functional.linear(x, weight)

    return Quantized().eval()


def test_pt2e__dynamic_keeps_the_parameters_of_the_run_time():
    module, x = make_dynamic(), torch.randn(3, 8)
    mod, _ = rq.load(rq.torch.export(module, (x,)))
    qmod = rq.lower(mod)
    (row,) = [row for row in rq.ledger(qmod).rows if row.op == "matmul"]
    assert not row.quantized
    assert "data is not dequantized by constant parameters" in row.reason
    for data in (x, 7 * x + 3, torch.zeros(3, 8)):
        expected = module(data).numpy()
        for done in (mod, qmod):
            (got,) = rq.reference.run(done, [data.numpy()])
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


class Computed(torch.nn.Module):
    """Scales of channels that come from outside."""

    def forward(self, x, scales):
        zeros = torch.zeros(3, dtype=torch.int64)
        limits = 0, -128, 127, torch.int8
        q = torch.ops.quantized_decomposed.quantize_per_channel(x, scales, zeros, *limits)
        return torch.ops.quantized_decomposed.dequantize_per_channel(q, scales, zeros, *limits)


def test_pt2e__parameters_that_are_refused_in_words():
    import torch.ao.quantization.fx._decomposed

    program = rq.torch.export(Computed(), (torch.randn(3, 4), torch.rand(3) + 1))
    with pytest.raises(ModelError) as found:
        rq.load(program)
    assert "the scale of quantize_per_channel is computed at run time; supported:" in str(
        found.value
    )
    assert "TVM's frontend" not in str(found.value)
