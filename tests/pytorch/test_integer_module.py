"""Integer modules as modules of PyTorch: called, copied, pickled, compared."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

import relayquant as rq

torch = pytest.importorskip("torch")
nn = torch.nn
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
BATCHES = [torch.randn(16, 8) for _ in range(4)]


@pytest.fixture(scope="module")
def qmod():
    return rq.torch.quantize(NET, (BATCHES[0],), BATCHES, effort="fast")


def test_as_module__is_called_copied_and_saved_like_a_module(qmod):
    module = rq.torch.as_module(qmod)
    wanted = rq.reference.run(qmod, [BATCHES[0].numpy()])[0]
    np.testing.assert_allclose(module(BATCHES[0]), wanted, rtol=1e-5, atol=1e-6)
    # As a part of a module, through a file and through a copy, bit for bit
    whole, other = nn.Sequential(module), nn.Sequential(rq.torch.as_module(tvm_identity()))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(BATCHES[0]), module(BATCHES[0]))
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(BATCHES[0]), module(BATCHES[0]))
    assert torch.equal(copy.deepcopy(whole)(BATCHES[0]), module(BATCHES[0]))


def tvm_identity():
    """A module that a state_dict is loaded into."""
    return rq.load(torch.export.export(nn.Identity(), (BATCHES[0],)))[0]


def test_as_module__wrong_inputs_are_named(qmod):
    module = rq.torch.as_module(qmod)
    with pytest.raises(rq.errors.DataError, match=r"takes 1 tensor by position, got ndarray"):
        module(BATCHES[0].numpy())
    with pytest.raises(rq.errors.ModelError, match="state of an IntegerModule is a int"):
        module.set_extra_state(3)
    with pytest.raises(rq.errors.ModelError, match="as_module: mod is"):
        rq.torch.as_module(NET)


@pytest.mark.slow
def test_compare__a_module_of_torch(qmod):
    report = rq.torch.compare(NET, qmod, BATCHES)
    mod, params = rq.load(torch.export.export(NET, (BATCHES[0],)))
    assert str(report) == str(rq.compare(mod, params, qmod, BATCHES))
    with pytest.raises(rq.errors.DataError, match="the first item of the data is a dict"):
        rq.torch.compare(NET, qmod, [{"input": BATCHES[0]}])
