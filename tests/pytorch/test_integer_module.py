"""Integer modules as modules of PyTorch: called, copied, pickled, compared."""

from __future__ import annotations

import copy
import io
import re

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
    (name,) = (param.name for param in qmod["main"].params)
    assert torch.equal(module(**{name: BATCHES[0]}), module(BATCHES[0]))
    for args, named, got in (
        ([BATCHES[0].numpy()], {}, "ndarray"),
        ([BATCHES[0]] * 2, {}, "Tensor, Tensor"),
        ([BATCHES[0]], {name: BATCHES[0]}, f"Tensor, {name}=Tensor"),
        ([], {"other": BATCHES[0]}, "other=Tensor"),
        ([], {}, "none"),
    ):
        told = rf"takes 1 tensor \({name}\), by position or by name, got {got}\."
        with pytest.raises(rq.errors.DataError, match=told):
            module(*args, **named)
    with pytest.raises(rq.errors.DataError, match=r"of shape \(3, 8\); allowed.*dynamic_shapes="):
        module(BATCHES[0][:3])
    with pytest.raises(
        rq.errors.DataError, match=r"is torch\.float64 .*tensor\.to\(torch\.float32"
    ):
        module(BATCHES[0].double())
    with pytest.raises(rq.errors.ModelError, match="state of an IntegerModule is a int"):
        module.set_extra_state(3)
    with pytest.raises(rq.errors.ModelError, match="as_module: mod is"):
        rq.torch.as_module(NET)


#: Tensors that compiled code cannot read: TVM ends the process where it describes complex numbers.
UNREADABLE = {
    "complex64 (16, 8) (cpu, strided)": lambda x: x.to(torch.complex64),
    "float32 (16, 8) (meta, strided)": lambda x: x.to("meta"),
    "float32 (16, 8) (cpu, sparse_coo)": lambda x: x.to_sparse(),
}


@pytest.fixture(scope="module")
def converted():
    prepared = rq.torch.prepare(NET, (BATCHES[0],), effort="fast")
    for batch in BATCHES:
        prepared(batch)
    return rq.torch.convert(prepared)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_call__with_memory_that_compiled_code_cannot_read(qmod, converted, kind):
    x = UNREADABLE[kind](BATCHES[0])
    for module in (rq.torch.as_module(qmod), converted):
        with pytest.raises(rq.errors.DataError, match=rf"are {re.escape(kind)}; allowed: real"):
            module(x)
        assert module(BATCHES[0]).shape == (16, 4)


def test_call__with_values_that_are_negated_when_they_are_read(qmod, converted):
    """PyTorch keeps the sign beside the memory: the imaginary part of a conjugate."""
    for module in (rq.torch.as_module(qmod), converted):
        negated = torch._neg_view(BATCHES[0])
        assert negated.is_contiguous()
        assert torch.equal(module(negated), module(-BATCHES[0]))


def test_call__by_name_as_the_float_module(converted):
    assert torch.equal(converted(input=BATCHES[0]), converted(BATCHES[0]))
    trainable = rq.torch.prepare_qat(NET, (BATCHES[0],), calibration_dataset=BATCHES)
    assert torch.equal(trainable(input=BATCHES[0]), trainable(BATCHES[0]))
    for module in (converted, trainable):
        for args, named in (((), {"other": BATCHES[0]}), ((BATCHES[0],), {"input": BATCHES[0]})):
            with pytest.raises(rq.errors.DataError, match=r"not fit the model: .*; allowed: \(inp"):
                module(*args, **named)


@pytest.mark.parametrize("trace", [torch.export.export, torch.jit.trace])
def test_as_module__is_not_traced(qmod, trace):
    module = rq.torch.as_module(qmod)
    with pytest.raises(rq.errors.ModelError, match=r"cannot trace\. To deploy .*export_library"):
        trace(module, (BATCHES[0],))
    assert module(BATCHES[0]).shape == (16, 4)


def test_example_inputs__one_tensor_is_told_to_be_a_tuple():
    with pytest.raises(rq.errors.ConfigError, match=r"For one input x: \(x,\)\."):
        rq.torch.quantize(NET, BATCHES[0], BATCHES)


def test_quantize__a_module_of_bfloat16_is_guarded():
    """Data and outputs are bfloat16, which numpy takes for bytes."""
    module = copy.deepcopy(NET).bfloat16()
    data = [batch.bfloat16() for batch in BATCHES]
    qmod = rq.torch.quantize(module, (data[0],), data, effort="fast")
    assert len(rq.ledger(qmod).quantized) == 2
    want = NET(BATCHES[0]).detach()
    got = rq.torch.as_module(qmod)(data[0])
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max()
    seen = rq.ledger(qmod).guard
    assert seen is not None
    assert 25 < seen.sqnr < 60
    assert seen.equal > 0.9 * seen.answers
    assert not seen.deviates


def test_quantize__a_module_that_was_exported():
    exported = torch.export.export(NET, (BATCHES[0],)).module()
    qmod = rq.torch.quantize(exported, (BATCHES[0],), BATCHES, effort="fast")
    assert len(rq.ledger(qmod).quantized) == 2


def test_compare__of_the_other_kind_of_module_says_what_takes_it(qmod):
    """Also with the arguments that the other function takes."""
    for args in ((NET, None, qmod, BATCHES), (NET, qmod, BATCHES)):
        with pytest.raises(rq.ModelError, match=r"torch\.compare\(module, qmod, dataset\)"):
            rq.compare(*args)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(rq.ModelError, match="Pass its attribute mod"):
        rq.ledger(rq.torch.as_module(qmod))
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    with pytest.raises(rq.ConfigError, match=r"torch\.quantize, prepare and prepare_qat take"):
        rq.quantize(qmod, None, [], qconfig_mapping=mapping)


@pytest.mark.slow
def test_compare__a_module_of_torch(qmod):
    report = rq.torch.compare(NET, qmod, BATCHES)
    mod, params = rq.load(torch.export.export(NET, (BATCHES[0],)))
    assert str(report) == str(rq.compare(mod, params, qmod, BATCHES))
    with pytest.raises(rq.errors.DataError, match="the first item of the data is a dict"):
        rq.torch.compare(NET, qmod, [{"input": BATCHES[0]}])
