"""Architectures that no other model here has: imported from PyTorch with equal results, quantized
without a loss that shows, compiled with the bits of the reference.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.formats.readers import import_torch

torch = pytest.importorskip("torch", reason="pip install torch")

from torch_architectures import ARCHITECTURES  # noqa: E402

#: Least signal to noise of the quantized outputs, in dB, with random weights.
LEAST_SQNR = 20.0


@pytest.mark.nightly
@pytest.mark.parametrize("batch", ["static", "symbolic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture__float_and_integer(name, batch):
    torch.manual_seed(0)
    make, shape = ARCHITECTURES[name]
    network = make().eval()

    def draw() -> np.ndarray:
        if len(shape) == 2:
            return torch.randint(0, 300, shape).numpy()
        return torch.randn(shape).numpy()

    samples = [draw() for _ in range(8)]
    axes = None
    example = samples[0]
    if batch == "symbolic":
        axes, example = ({0: torch.export.Dim("n", min=1, max=64)},), np.repeat(example, 2, 0)
    program = torch.export.export(network, (torch.from_numpy(example),), dynamic_shapes=axes)
    mod, _ = import_torch(program)
    expected = [network(torch.from_numpy(sample)).detach().numpy() for sample in samples]
    executor = Executor(rq.compile(mod))
    for sample, want in zip(samples, expected, strict=True):
        (got,) = executor.run("main", [sample])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    qmod = rq.quantize(mod, None, samples, guard=rq.config.Guard.OFF)
    assert rq.verify(qmod, [samples[0]]).is_equal
    executor = Executor(rq.compile(qmod))
    integer = [executor.run("main", [sample])[0] for sample in samples]
    noise = np.square(np.subtract(integer, expected)).sum()
    assert 10 * np.log10(np.square(expected).sum() / noise) > LEAST_SQNR
