"""Convolutions and pools of volumes, as PyTorch computes them: float, compiled, and quantized."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.analysis.speed.profile import compile_with_sites
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.stages.preparation import prepare_module

torch = pytest.importorskip("torch")
nn = torch.nn

LAYERS = {
    "transposed, twice as large": lambda: nn.ConvTranspose3d(4, 6, 2, 2),
    "transposed, taps overlap": lambda: nn.ConvTranspose3d(4, 6, 3, 2, 1, output_padding=1),
    "transposed, every phase has several taps": lambda: nn.ConvTranspose3d(4, 2, 4, 2, 1),
    "transposed, a phase without taps": lambda: nn.ConvTranspose3d(4, 2, 1, (3, 2, 1)),
    "transposed, groups, dilation, no bias": lambda: nn.ConvTranspose3d(
        4, 6, (3, 2, 1), (2, 1, 2), (2, 0, 0), groups=2, bias=False, dilation=(2, 1, 1)
    ),
    "groups": lambda: nn.Conv3d(4, 8, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv3d(4, 4, 3, padding=1, groups=4),
    "depthwise, strides, uneven taps": lambda: nn.Conv3d(
        4, 4, (2, 3, 1), (2, 1, 2), (1, 1, 0), groups=4
    ),
    "depthwise, dilation along depth and width": lambda: nn.Conv3d(
        4, 4, (3, 2, 2), padding=(2, 0, 1), dilation=(2, 1, 2), groups=4
    ),
    "depthwise, dilation": lambda: nn.Conv3d(4, 4, 2, dilation=2, groups=4),
    "depth strides, dilation": lambda: nn.Conv3d(4, 5, 2, (2, 1, 1), (1, 0, 1), (3, 2, 1)),
    "batch norm": lambda: nn.Sequential(nn.Conv3d(4, 5, 3, bias=False), nn.BatchNorm3d(5)),
    "transposed, batch norm": lambda: nn.Sequential(
        nn.ConvTranspose3d(4, 5, 2, 2), nn.BatchNorm3d(5), nn.PReLU()
    ),
    "max pool": lambda: nn.Sequential(nn.Conv3d(4, 5, 1), nn.MaxPool3d(3, 2, 1)),
    "average pool": lambda: nn.Sequential(nn.Conv3d(4, 5, 1), nn.AvgPool3d(3, 2, 1)),
    "average pool beyond the padding": lambda: nn.Sequential(
        nn.Conv3d(4, 5, 1), nn.AvgPool3d((2, 3, 2), 2, (1, 1, 0), ceil_mode=True)
    ),
    "average pool without pads": lambda: nn.Sequential(
        nn.Conv3d(4, 5, 1),
        nn.AvgPool3d(3, (1, 2, 3), 1, ceil_mode=True, count_include_pad=False),
    ),
    "mean": lambda: nn.Sequential(nn.Conv3d(4, 5, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_volumes__equal_torch(name):
    torch.manual_seed(0)
    module, x = nn.Sequential(LAYERS[name](), nn.ReLU()).eval(), torch.randn(2, 4, 5, 6, 7)
    with torch.no_grad():
        wanted = module(x).numpy()
    mod, params = rq.load(torch.export.export(module, (x,)))
    got = rq.Executor(rq.compile(prepare_module(mod, params))).run("main", [x.numpy()])[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    batches = [{mod["main"].params[0].name: x.numpy()}]
    qmod = rq.quantize(mod, params, batches, effort="fast")
    floating = [row.op for row in rq.ledger(qmod).floating]
    assert not [op for op in floating if "conv" in op or "pool" in op]
    got = rq.Executor(rq.compile(qmod)).run("main", [x.numpy()])[0]
    assert ((got - wanted) ** 2).sum() < 0.003 * (wanted**2).sum()
    assert rq.verify(qmod, [x.numpy()]).differences == ()


def test_volumes__depthwise_kernels_read_slices_in_place():
    """Nothing between two layers but the padding along the depth."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(8, 8, 3, padding=(p, 1, 1), groups=8, bias=False) for p in (1, 0)]
    module, x = nn.Sequential(layers[0], nn.ReLU(), layers[1]).eval(), torch.randn(2, 8, 5, 6, 7)
    mod, params = rq.load(torch.export.export(module, (x,)))
    batches = [{mod["main"].params[0].name: x.numpy()}]
    qmod = rq.quantize(mod, params, batches, effort="fast")
    prepared = prepare_module(mod, params)
    for each, kernel in ((prepared, "float_conv2d"), (qmod, "qnn_conv2d")):
        _, sites = compile_with_sites(each, rq.compile)
        names = [site.kernel.rstrip("0123456789") for site in sites]
        assert names.count(kernel) == 2
        assert not [name for name in names if "slice" in name or "concat" in name]


def test_volumes__of_any_batch():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(8, 4, 2, 2)
    ).eval()
    x = torch.randn(2, 3, 4, 6, 6)
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    mod, params = rq.load(program)
    name = mod["main"].params[0].name
    qmod = rq.quantize(mod, params, [{name: x.numpy()}], effort="fast")
    runner = rq.Executor(rq.compile(qmod))
    for size in (1, 3):
        data = torch.randn(size, 3, 4, 6, 6)
        with torch.no_grad():
            wanted = module(data).numpy()
        got = runner.run("main", [data.numpy()])[0]
        assert ((got - wanted) ** 2).sum() < 0.003 * (wanted**2).sum()


@pytest.mark.parametrize("groups", [1, 4])
def test_volumes__are_quantized_before_they_are_joined(groups):
    """Each value of the input once, and those of the padding, whatever the taps along the depth."""
    torch.manual_seed(0)
    module, x = nn.Conv3d(4, 4, 3, padding=1, groups=groups).eval(), torch.randn(2, 4, 6, 6, 7)
    mod, params = rq.load(torch.export.export(module, (x,)))
    batches = [{mod["main"].params[0].name: x.numpy()}]
    qmod = rq.quantize(mod, params, batches, effort="fast")
    graph = Graph(qmod)
    (quantize,) = (var for var in graph.order if graph.op_name(var) == "relax.qnn.quantize")
    assert np.prod(tensor_shape(quantize)) <= x.numel() * 8 / 6
    assert rq.verify(qmod, [x.numpy()]).differences == ()
