"""Submodules that are not quantized as the rest is: the rows of FX's `PrepareCustomConfig`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relayquant as rq

torch = pytest.importorskip("torch", reason="pip install torch")
sys.path.append(str(Path(__file__).parents[1] / "importers"))

from torch.ao.quantization import get_default_qconfig_mapping  # noqa: E402
from torch.ao.quantization.fx.custom_config import (  # noqa: E402
    PrepareCustomConfig as TheirConfig,
)
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # noqa: E402
from torch_models import ResidualBlock, ResidualNet, make  # noqa: E402

from relayquant.torch import PrepareCustomConfig  # noqa: E402
from relayquant.torch.custom_config import SubmoduleRule  # noqa: E402

OPTIONS = {"backend": "x86", "effort": "fast"}
FOUR_BITS = rq.QConfigMapping().set_global(
    rq.QConfig(
        rq.X86.default_qconfig.activation,
        rq.TensorConfig(
            rq.QSpec(
                "int8",
                rq.Scheme.SYMMETRIC,
                rq.Granularity.PER_CHANNEL,
                quant_min=-7,
                quant_max=7,
            ),
            rq.MinMax(),
        ),
    )
)


def make_net():
    torch.manual_seed(0)
    return make(ResidualNet).eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]


def measure_sqnr(want: np.ndarray, got: np.ndarray) -> float:
    return float(10 * np.log10(np.square(want).sum() / np.square(want - got).sum()))


def calibrate_fx(module, data, config):
    """FX's quantized module of PyTorch."""
    mapping = get_default_qconfig_mapping("x86")
    prepared = prepare_fx(module, mapping, (data[0],), prepare_custom_config=config)
    for batch in data:
        prepared(batch)
    return convert_fx(prepared)


@pytest.mark.parametrize("by_class", [True, False])
def test_set_non_traceable_module_classes__stay_in_float_as_in_fx(by_class):
    net, data = make_net()
    paths = ["layer1.0", "layer1.1"]
    ours, theirs = PrepareCustomConfig(), TheirConfig()
    if by_class:
        ours = ours.set_non_traceable_module_classes([ResidualBlock])
        theirs.set_non_traceable_module_classes([ResidualBlock])
    else:
        ours = ours.set_non_traceable_module_names(paths)
        theirs.set_non_traceable_module_names(paths)
    converted = calibrate_fx(net, data, theirs)
    assert all(type(converted.get_submodule(path)) is ResidualBlock for path in paths)
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=ours, **OPTIONS)
    rows = rq.ledger(qmod).rows
    within = [row for row in rows if row.name.startswith("layer1.")]
    assert within
    assert not any(row.quantized for row in within)
    assert {row.name for row in rows if row.quantized} >= {"relu", "fc"}
    # A line of the user's for a part of them does not count.
    mapping = rq.QConfigMapping().set_global(rq.X86.default_qconfig)
    mapping = mapping.set_module_name("layer1.0.conv1", rq.X86.default_qconfig)
    again = rq.torch.quantize(
        net, (data[0],), data, prepare_custom_config=ours, qconfig_mapping=mapping, **OPTIONS
    )
    assert not any(r.quantized for r in rq.ledger(again).rows if r.name.startswith("layer1."))


class Around(torch.nn.Module):
    """Float code around a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize("mapping", [None, FOUR_BITS])
def test_set_standalone_module_name__quantized_by_itself(mapping):
    """In a model of floats it is the module that quantizing it alone gives, with its own config."""
    torch.manual_seed(0)
    block = ResidualBlock(8, 8, 1).eval()
    net, data = Around(block), [torch.randn(4, 8, 8, 8) for _ in range(2)]
    config = PrepareCustomConfig().set_standalone_module_name("block", mapping)
    rest = rq.QConfigMapping().set_global(None)
    whole = rq.torch.quantize(
        net, (data[0],), data, prepare_custom_config=config, qconfig_mapping=rest, **OPTIONS
    )
    options = {**OPTIONS, "guard": rq.Guard.OFF}
    alone = rq.torch.quantize(block, (data[0],), data, qconfig_mapping=mapping, **options)
    (got,), (want,) = (rq.reference.run(m, [data[1].numpy()]) for m in (whole, alone))
    np.testing.assert_array_equal(got, want)
    assert rq.verify(whole, [data[1].numpy()]).is_equal


def test_set_standalone_module_class__each_by_itself_and_no_worse_than_fx():
    net, data = make_net()
    config = PrepareCustomConfig().set_standalone_module_class(ResidualBlock)
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **OPTIONS)
    assert rq.verify(qmod, [data[0].numpy()]).is_equal
    convolutions = [row for row in rq.ledger(qmod).rows if row.op.endswith("conv2d")]
    assert len(convolutions) >= 5
    assert all(row.quantized for row in convolutions)
    theirs = TheirConfig().set_standalone_module_class(ResidualBlock, None, None, None, None)
    with torch.no_grad():
        want = net(data[0]).numpy()
        peer = calibrate_fx(net, data, theirs)(data[0]).numpy()
    (got,) = rq.reference.run(qmod, [data[0].numpy()])
    assert measure_sqnr(want, got) > max(20, measure_sqnr(want, peer) - 3)


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (lambda c: c.set_standalone_module_name("layer2"), "'layer2', but .* no such submodule"),
        (lambda c: c.set_non_traceable_module_classes([torch.nn.GRU]), "'GRU', but the module"),
        (lambda c: c.set_non_traceable_module_names([3]), r"names is \[3\]; allowed: a list"),
        (lambda c: replace(c, standalone=(SubmoduleRule(3),)), "got 3; allowed: the path"),
        (
            lambda c: c.set_standalone_module_name("layer1").set_standalone_module_name("layer1.0"),
            "makes 'layer1.0' standalone, and 'layer1', which holds it",
        ),
    ],
)
def test_prepare_custom_config__names_what_is_wrong(make_config, message):
    net, data = make_net()
    with pytest.raises(rq.ConfigError, match=message):
        rq.torch.quantize(
            net, (data[0],), data, prepare_custom_config=make_config(PrepareCustomConfig()),
            **OPTIONS,
        )  # fmt: skip


def test_set_standalone_module_name__refuses_shapes_of_the_run_time():
    net, data = make_net()
    config = PrepareCustomConfig().set_standalone_module_name("layer1.0")
    shapes = ({0: torch.export.Dim("n")},)
    with pytest.raises(rq.ConfigError, match="leave out example_kwargs and dynamic_shapes"):
        rq.torch.quantize(
            net, (data[0],), data, prepare_custom_config=config, dynamic_shapes=shapes, **OPTIONS
        )
