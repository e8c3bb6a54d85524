"""The reference form as a torch module: values, export, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from operator_names import list_operators

import relayquant as rq

torch = pytest.importorskip("torch", reason="pip install torch")

from torch_models import InvertedResiduals, ResidualNet, Transformer, make  # noqa: E402

MODELS = {ResidualNet: (3, 8, 8), InvertedResiduals: (8, 8, 8), Transformer: (6, 16)}


def calibrate(kind, backend):
    torch.manual_seed(0)
    module, data = make(kind), [torch.randn(4, *MODELS[kind]) for _ in range(2)]
    mod, params = rq.load(rq.torch.export(module, (data[0],)))
    prepared = rq.prepare(mod, params, data, backend=backend, effort="fast")
    return rq.calibrate(prepared, data), data[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["x86", "arm"])
def test_convert_to_reference_fx__torch_module_and_back(kind, backend):
    """As FX's reference model: the same function; its program is read back to the same bits."""
    prepared, x = calibrate(kind, backend)
    module = rq.torch.convert_to_reference(prepared)
    (want,) = rq.reference.run(rq.convert_to_reference(prepared), [x.numpy()])
    got = module(x).numpy()
    # Near ties are rounded by a product with 1 / scale.
    assert np.square(got - want).sum() <= 1e-3 * np.square(want).sum()
    assert not list(module.parameters())
    assert {str(b.dtype) for b in module.buffers()} >= {"torch.int8"}
    program = torch.export.export(module, (x,))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "quantized_decomposed.quantize_per_tensor.default" in called
    read, params = rq.load(program)
    assert not params
    (again,) = rq.reference.run(rq.lower(read, backend), [x.numpy()])
    (direct,) = rq.reference.run(rq.lower(prepared), [x.numpy()])
    if kind is Transformer:  # PyTorch has layer norm as other float operators
        np.testing.assert_allclose(again, direct, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(again, direct)
    assert "qnn.quantize" in list_operators(read)


def test_convert_to_reference_fx__of_what_was_trained():
    module, x = make(ResidualNet), torch.randn(4, 3, 8, 8)
    trained = rq.torch.prepare_qat(
        module, (x,), calibration_dataset=[x], backend="x86", effort="fast"
    )
    with torch.no_grad():
        trained.weights["relu:weight"] *= 1.1
    trained.eval()
    got = rq.torch.convert_to_reference(trained)(x)
    want = trained(x).detach()
    assert (got - want).square().sum() <= 1e-3 * want.square().sum()


@pytest.mark.parametrize("backend", ["x86", "arm"])
@pytest.mark.parametrize("scheme", rq.config.Scheme)
@pytest.mark.parametrize(
    "granularity", [rq.config.Granularity.PER_TENSOR, rq.config.Granularity.PER_ROW]
)
def test_convert_to_reference_fx__parameters_of_the_run_time(granularity, scheme, backend):
    default = rq.get_backend_config("x86") if backend == "x86" else rq.get_backend_config("arm")
    dtype = default.default_qconfig.activation.spec.dtype
    spec = rq.QSpec(dtype, scheme, granularity, is_dynamic=True)
    qconfig = rq.QConfig(rq.TensorConfig(spec), default.default_qconfig.weight)
    module, x = torch.nn.Linear(8, 4), torch.randn(2, 3, 8)
    mod, params = rq.load(rq.torch.export(module, (x,)))
    mapping = rq.QConfigMapping().set_global(qconfig)
    prepared = rq.calibrate(rq.prepare(mod, params, qconfig_mapping=mapping, backend=backend), None)
    got = rq.torch.convert_to_reference(prepared)(x).numpy()
    (want,) = rq.reference.run(rq.convert_to_reference(prepared), [x.numpy()])
    np.testing.assert_allclose(got, want, atol=1e-2 * np.abs(want).max())


def test_convert_to_reference_fx__names_what_it_takes():
    with pytest.raises(rq.ConfigError, match=r"takes a calibrated model.*got Linear"):
        rq.torch.convert_to_reference(torch.nn.Linear(2, 2))
