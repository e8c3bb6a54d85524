"""Batch norms with live statistics, against PyTorch's own fused convolution and batch norm."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq

torch = pytest.importorskip("torch", reason="pip install torch")

from relayquant.config import BatchNorm, Ranges  # noqa: E402


class ConvNorm(torch.nn.Module):
    """Input (N, 3, 6, 6)."""

    def __init__(self, bias: bool, after: str = "norm") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 5, 3, padding=1, bias=bias)
        self.norm = torch.nn.BatchNorm2d(5)
        self.after = after
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)
            self.norm.bias.uniform_(-1, 1)
            self.norm.running_mean.uniform_(-0.5, 0.5)
            self.norm.running_var.uniform_(0.2, 2)

    def forward(self, x):
        if self.after == "relu":
            return self.norm(torch.relu(self.conv(x)))
        return self.norm(self.conv(x))


def prepare(module, batches, ranges=Ranges.FROZEN):
    return rq.torch.prepare_qat(
        module,
        (batches[0],),
        backend="x86",
        calibration_dataset=batches,
        ranges=ranges,
        batch_norm=BatchNorm.LIVE,
        effort="fast",
    )


@pytest.mark.parametrize("bias", [False, True])
def test_live__trains_as_conv_bn_of_pytorch(bias):
    """Outputs, gradients and running statistics, with the same rounding of the weight."""
    import torch.ao.nn.intrinsic.qat as nniqat
    from torch.ao.quantization import QConfig

    source, x = ConvNorm(bias), torch.randn(8, 3, 6, 6)
    module = prepare(source, [x])
    (norm,), weight_rounding = module.list_norms(), None
    for quantizer in module.list_quantizers():
        if quantizer.group.constant is not None:
            weight_rounding = quantizer

    class RoundWeight(torch.nn.Module):
        def forward(self, weight):
            return weight_rounding(weight, 0)

    theirs = nniqat.ConvBn2d(
        3, 5, 3, padding=1, bias=bias, qconfig=QConfig(torch.nn.Identity, RoundWeight)
    )
    theirs.load_state_dict(
        {
            "weight": source.conv.weight,
            **({"bias": source.conv.bias} if bias else {}),
            **{f"bn.{name}": value for name, value in source.norm.state_dict().items()},
        }
    )
    (data_rounding,) = (q for q in module.list_quantizers() if q.group.key == "x")
    rounded = data_rounding(x, -1).detach()
    weights = torch.randn(8, 5, 6, 6)
    for is_training in (True, True, False):
        module.train(is_training)
        theirs.train(is_training)
        module.zero_grad()
        theirs.zero_grad()
        got, expected = module(x), theirs(rounded)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        (got * weights).sum().backward()
        (expected * weights).sum().backward()
        (weight,) = (p for name, p in module.weights.items() if name.endswith(":weight"))
        torch.testing.assert_close(weight.grad, theirs.weight.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(norm.gamma.grad, theirs.bn.weight.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(norm.beta.grad, theirs.bn.bias.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(norm.running_var, theirs.bn.running_var)
        shift = source.conv.bias.detach() if bias else 0
        torch.testing.assert_close(norm.running_mean, theirs.bn.running_mean - shift)


def test_live__frozen_is_the_folded_module():
    """Both ways give the same module once frozen."""
    source, batches = ConvNorm(True), [torch.randn(8, 3, 6, 6) for _ in range(2)]
    live = prepare(source, batches)
    folded = rq.torch.prepare_qat(
        source, (batches[0],), backend="x86", calibration_dataset=batches, ranges=Ranges.FROZEN,
        effort="fast",
    )  # fmt: skip
    expected = folded(batches[0])
    torch.testing.assert_close(live.eval()(batches[0]), expected, rtol=1e-4, atol=1e-4)
    live.train().freeze_statistics()
    before = {name: value.clone() for name, value in live.state_dict().items()}
    torch.testing.assert_close(live(batches[0]), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], value) for name, value in live.state_dict().items())
    live.thaw_statistics()
    assert not torch.allclose(live(batches[0]), expected, atol=1e-2)
    (got,), (want,) = (
        rq.reference.run(rq.torch.convert(m.eval()), [batches[1].numpy()]) for m in (live, folded)
    )
    assert got.shape == want.shape


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("relu", "it is no part of a quantized operator"),
        ("zero", "one of its factors is zero"),
        ("momentum", "its momentum is 0 or None"),
    ],
)
def test_live__what_does_not_fit_stays_frozen_with_the_reason(change, reason):
    source, batch = ConvNorm(True, change), torch.randn(4, 3, 6, 6)
    if change == "zero":
        with torch.no_grad():
            source.norm.weight[1] = 0
    if change == "momentum":
        source.norm.momentum = None  # statistics of all batches, which an export does not keep
    with pytest.warns(UserWarning, match=f"1 batch norm .*'norm': ({reason})"):
        module = prepare(source, [batch])
    assert not [*module.list_norms()]
    expected = source.eval()(batch).detach().numpy()
    assert np.abs(module(batch).detach().numpy() - expected).max() < 0.1


def test_live__one_value_per_channel_refused():
    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.layer(x))

    module = prepare(Dense(), [torch.randn(8, 4)])
    assert len([*module.list_norms()]) == 1
    module.train()
    with pytest.raises(rq.ModelError, match="'norm': a batch of one value per channel"):
        module(torch.randn(1, 4))
    module.freeze_statistics()(torch.randn(1, 4))
