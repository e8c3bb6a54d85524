"""LSTM, GRU and RNN of PyTorch: one operator per layer and direction, with PyTorch's results."""

from __future__ import annotations

import numpy as np
import pytest

from relayquant.ir import reference

torch = pytest.importorskip("torch")
from relayquant.formats.readers import import_torch  # noqa: E402

INPUTS, UNITS, BATCH, STEPS = 6, 5, 3, 7


class Layer(torch.nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.layer = getattr(torch.nn, kind)(INPUTS, UNITS, **settings)

    def forward(self, x, *states):
        given = states if len(states) > 1 else states[0] if states else None
        y, last = self.layer(x, given)
        return (y, *last) if isinstance(last, tuple) else (y, last)


def check(kind, layers=0, **settings):
    """Compare with PyTorch. `layers`: number of layers and directions, for initial states."""
    torch.manual_seed(0)
    module = Layer(kind, **settings).eval()
    is_first = settings.get("batch_first", False)
    x = torch.randn(*((BATCH, STEPS) if is_first else (STEPS, BATCH)), INPUTS)
    count = (2 if kind == "LSTM" else 1) if layers else 0
    inputs = [x, *(torch.randn(layers, BATCH, UNITS) for _ in range(count))]
    mod, _ = import_torch(torch.export.export(module, tuple(inputs)))
    found = reference.run(mod, [each.numpy() for each in inputs])
    with torch.no_grad():
        expected = module(*inputs)
    for have, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(have, want.numpy(), rtol=1e-5, atol=1e-5)
    return mod.script()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "layers", "settings"),
    [
        ("LSTM", 4, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        ("GRU", 4, {"num_layers": 2, "bidirectional": True}),
        ("GRU", 0, {"bias": False, "batch_first": True}),
        ("RNN", 0, {"bidirectional": True}),
        ("RNN", 1, {"nonlinearity": "relu"}),
    ],
)
def test_recurrent__as_pytorch(kind, layers, settings):
    text = check(kind, layers, **settings)
    count = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
    assert text.count(f"R.qnn.{kind.lower()}(") == count


@pytest.mark.filterwarnings("ignore")
def test_recurrent__with_projections_is_unrolled():
    assert "R.qnn.lstm(" not in check("LSTM", proj_size=4)
