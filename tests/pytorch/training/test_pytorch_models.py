"""PyTorch's own models for tests of quantization: exported, trained, and run by their own code,
each is as good as in float, or is refused with a reason.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import RelayQuantError

torch = pytest.importorskip("torch", reason="pip install torch")

from torch.utils import _pytree as pytree  # noqa: E402

BATCH = 4


@pytest.fixture(scope="module")
def models():
    """PyTorch's module of models; it compares texts by a package that nothing here needs."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = __import__("unittest").TestCase
    stub.assert_expected_inline = None
    sys.modules.setdefault("expecttest", stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_quantization
    return common_quantization


def floats(*shapes):
    return lambda: tuple(torch.rand(shape) - 0.3 for shape in shapes)


def words(*shape):
    return torch.randint(0, 10, shape)


OFFSETS = torch.tensor([0, 2, 5])
IMAGE, ROWS, PLANES = floats((1, 3, 9, 9)), floats((BATCH, 5)), floats((BATCH, 3, 10, 10))

#: model -> (arguments of its constructor, a function that draws inputs); () and None: it has none,
#: and says itself what it takes
MODELS = {
    "ActivationsTestModel": ((), ROWS),
    "AnnotatedConvBnModel": ((), None),
    "AnnotatedConvBnReLUModel": ((), None),
    "AnnotatedConvModel": (("fbgemm",), None),
    "AnnotatedConvTransposeModel": (("qnnpack",), None),
    "AnnotatedCustomConfigNestedModel": ((), ROWS),
    "AnnotatedNestedModel": (("fbgemm",), ROWS),
    "AnnotatedSingleLayerLinearModel": ((), None),
    "AnnotatedSkipQuantModel": (("fbgemm",), ROWS),
    "AnnotatedSubNestedModel": ((), ROWS),
    "AnnotatedTwoLayerLinearModel": ((), None),
    "ConvBNReLU": ((), PLANES),
    "ConvBnAddReluModel": ((), None),
    "ConvBnModel": ((), None),
    "ConvBnReLUModel": ((), None),
    "ConvModel": ((), None),
    "ConvReluAddModel": ((), None),
    "ConvReluConvModel": ((), None),
    "ConvReluModel": ((), None),
    "ConvTransposeModel": ((), None),
    "DeFusedEmbeddingBagLinear": ((), lambda: (words(3, 5),)),
    "DenseTopMLP": ((4, 2, 5, 2, 2), floats((BATCH, 5), (BATCH, 4))),
    "EmbBagWrapper": ((10, 5), lambda: (words(7), OFFSETS)),
    "EmbeddingBagModule": ((), lambda: (words(7), torch.tensor([0, 2, 7]), torch.rand(7))),
    "EmbeddingModule": ((), lambda: (words(3, 5),)),
    "EmbeddingWithStaticLinear": ((), lambda: (words(7), OFFSETS, torch.rand(3, 4))),
    "FunctionalConv2d": ((), None),
    "FunctionalConvReluConvModel": ((), None),
    "FunctionalConvReluModel": ((), None),
    "FunctionalLinear": ((), None),
    "FunctionalLinearAddModel": ((), None),
    "FunctionalLinearReluLinearModel": ((), None),
    "FunctionalLinearReluModel": ((), None),
    "InnerModule": ((), ROWS),
    "LSTMwithHiddenDynamicModel": (
        (), lambda: (torch.rand(3, 2, 2), (torch.rand(1, 2, 2), torch.rand(1, 2, 2))),
    ),
    "LinearAddModel": ((), None),
    "LinearBnLeakyReluModel": ((), None),
    "LinearModelWithSubmodule": ((), None),
    "LinearReluAddModel": ((), None),
    "LinearReluLinearModel": ((), None),
    "LinearReluModel": ((), None),
    "LinearTanhModel": ((), None),
    "ManualConvLinearQATModel": ((), floats((1, 3, 10, 10))),
    "ManualConvLinearSymmQATModel": ((), floats((1, 3, 10, 10))),
    "ManualDropoutQATModel": (("fbgemm",), ROWS),
    "ManualEmbeddingBagLinear": ((), lambda: (words(3, 5),)),
    "ManualLinearDynamicQATModel": ((), ROWS),
    "ManualLinearQATModel": (("fbgemm",), ROWS),
    "ModelForConvTransposeBNFusion": ((), floats((BATCH, 3, 4))),
    "ModelForFusion": ((None,), floats((2, 3, 1, 10))),
    "ModelForFusionWithBias": ((), PLANES),
    "ModelForLinearBNFusion": ((), floats((BATCH, 20))),
    "ModelMultipleOps": ((), PLANES),
    "ModelMultipleOpsNoAvgPool": ((), PLANES),
    "ModelWithFunctionals": ((), floats((3, 3))),
    "ModelWithSequentialFusion": ((), PLANES),
    "NestedModel": ((), ROWS),
    "NormalizationTestModel": ((), ROWS),
    "QuantStubModel": ((), ROWS),
    "QuantSubModel": ((), ROWS),
    "RNNCellDynamicModel": (("LSTMCell",), floats((BATCH, 2))),
    "RNNDynamicModel": (("GRU",), floats((3, BATCH, 2))),
    "ResNetBase": ((), PLANES),
    "SingleLayerFunctionalConvModel": ((), None),
    "SingleLayerFunctionalLinearModel": ((), None),
    "SingleLayerLinearDynamicModel": ((), None),
    "SingleLayerLinearModel": ((), None),
    "SkipQuantModel": ((), ROWS),
    "SparseNNModel": ((), lambda: (words(7), OFFSETS, torch.rand(3, 4))),
    "SubModelForFusion": ((), floats((BATCH, 2, 5, 5))),
    "SubModelWithoutFusion": ((), floats((BATCH, 2, 5, 5))),
    "TwoLayerConvModel": ((), None),
    "TwoLayerFunctionalConvModel": ((), None),
    "TwoLayerFunctionalLinearModel": ((), None),
    "TwoLayerLinearModel": ((), None),
    "TestHelperModules.AddInplaceAdd": ((), floats((2, 3), (2, 3))),
    "TestHelperModules.AddMulScalar": ((), floats((2, 3))),
    "TestHelperModules.ControlFlow": (
        (),
        lambda: (torch.rand(2, 2), torch.tensor(True), torch.tensor(False), torch.rand(2, 2)),
    ),
    "TestHelperModules.Conv2dPropAnnotaton": ((), floats((1, 3, 5, 5))),
    "TestHelperModules.Conv2dThenConv1d": ((), floats((1, 3, 5, 5))),
    "TestHelperModules.Conv2dWithCat": ((), floats((1, 3, 5, 5), (1, 3, 5, 5))),
    "TestHelperModules.Conv2dWithObsSharingOps": ((), floats((1, 3, 5, 5))),
    "TestHelperModules.Conv2dWithSplit": ((), floats((1, 3, 16, 16))),
    "TestHelperModules.Conv2dWithTwoCat": (
        (), floats((1, 3, 5, 5), (1, 3, 5, 5), (1, 6, 3, 3), (1, 6, 3, 3)),
    ),
    "TestHelperModules.Conv2dWithTwoLinear": ((), floats((1, 3, 6, 4))),
    "TestHelperModules.Conv2dWithTwoLinearPermute": ((), floats((3, 3, 4, 4))),
    "TestHelperModules.ConvBnReLU2dAndLinearReLU": ((), floats((3, 3, 10, 10))),
    "TestHelperModules.ConvLinearWPermute": ((), floats((1, 3, 10, 10))),
    "TestHelperModules.ConvMaxPool2d": ((), floats((1, 2, 5, 5))),
    "TestHelperModules.ConvTWithBNRelu": ((True,), floats((1, 3, 5, 5))),
    "TestHelperModules.ConvWithAdaptiveAvgPool2d": ((), floats((1, 3, 5, 5))),
    "TestHelperModules.ConvWithBNRelu": ((True,), floats((1, 3, 5, 5))),
    "TestHelperModules.EmbeddingConvLinearModule": ((), lambda: (words(3, 5),)),
    "TestHelperModules.EmbeddingModule": ((), lambda: (words(3, 5),)),
    "TestHelperModules.GroupwiseConv2d": ((), floats((2, 4, 10, 10))),
    "TestHelperModules.LinearReluModel": ((), ROWS),
    "TestHelperModules.MulInplaceMul": ((), floats((2, 3), (2, 3))),
    "TestHelperModules.ThreeAdd": ((), floats(*[(1, 3, 5, 5)] * 4)),
    "TestHelperModules.TwoLinearModule": ((), floats((2, 8))),
}  # fmt: skip
#: a module that is no model
LEFT_OUT = {"DummyObserver"}


def make(models, name):
    """A model in evaluation mode, and inputs of some calls."""
    arguments, draw = MODELS[name]
    kind = models
    for part in name.split("."):
        kind = getattr(kind, part)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(*arguments).eval()
    if draw is None:
        examples = model.get_example_inputs()
        return model, [pytree.tree_map(lambda x, i=i: x + 0.1 * i, examples) for i in range(3)]
    return model, [draw() for _ in range(3)]


def flatten(tree):
    return [leaf.detach().numpy() for leaf in pytree.tree_leaves(tree) if leaf is not None]


def check(expected, got):
    """Outputs near those of float."""
    assert len(expected) == len(got)
    for want, have in zip(expected, got, strict=True):
        assert want.shape == have.shape
        assert want.dtype == have.dtype
        np.testing.assert_allclose(have, want, rtol=0, atol=0.1 * max(np.abs(want).max(), 1e-6))


def run_float(model, calls):
    with torch.no_grad():
        return [flatten(model(*pytree.tree_map(torch.clone, call))) for call in calls]


def export(model, calls):
    data = [tuple(flatten(call)) for call in calls]
    qmod = rq.torch.quantize(model, calls[0], data, effort="fast", backend="x86")
    for want, row in zip(run_float(model, calls), data, strict=True):
        check(want, rq.reference.run(qmod, list(row)))
    assert rq.verify(qmod, list(data[0])).is_equal


def train(model, calls):
    """A step, after which the integer module gives what the module gives."""
    expected = run_float(model, calls)
    module = rq.torch.prepare_qat(model, calls[0], effort="fast", backend="x86").train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-6) if parameters else None
    for call in calls:
        loss = sum(x.float().square().mean() for x in pytree.tree_leaves(module(*call)))
        if optimizer is not None and loss.requires_grad:
            loss.backward()
            optimizer.step()
    module.eval()
    qmod = rq.torch.convert(module)
    for want, call in zip(expected, calls, strict=True):
        check(want, flatten(module(*call)))
        check(want, rq.reference.run(qmod, flatten(call)))
    assert rq.verify(qmod, flatten(calls[0])).is_equal


def run_code(model, calls):
    prepared = rq.torch.prepare(
        model, pytree.tree_map(torch.clone, calls[0]), effort="fast", backend="x86"
    )
    for call in calls[1:]:
        prepared(*pytree.tree_map(torch.clone, call))
    converted = rq.torch.convert(prepared)
    for want, call in zip(run_float(model, calls), calls, strict=True):
        check(want, flatten(converted(*pytree.tree_map(torch.clone, call))))
    if hasattr(converted, "mod"):
        assert rq.verify(converted.mod, flatten(calls[0])).is_equal


WAYS = [export, train, run_code]
#: (model, way) -> what the refusal says
REFUSED = {
    ("TestHelperModules.ControlFlow", "export"): "map_impl",
    ("TestHelperModules.ControlFlow", "train"): "map_impl",
    ("TestHelperModules.ControlFlow", "run_code"): "compile a part of its code.*plain code",
}
FAST = ["EmbeddingWithStaticLinear", "ResNetBase", "TestHelperModules.AddInplaceAdd"]


def check_way(models, name, way):
    model, calls = make(models, name)
    reason = REFUSED.get((name, way.__name__))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reason is None:
            way(model, calls)
        else:
            with pytest.raises(RelayQuantError, match=reason):
                way(model, calls)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", FAST)
def test_models__some(models, name, way):
    check_way(models, name, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(FAST)))
def test_models__all(models, name, way):
    check_way(models, name, way)


def test_models__none_is_left_out(models):
    holders = {"": models, "TestHelperModules.": models.TestHelperModules}
    found = {
        prefix + name
        for prefix, holder in holders.items()
        for name, kind in vars(holder).items()
        if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)
        if kind.__module__ == models.__name__ and not kind.__name__.startswith("_")
    }
    assert found == MODELS.keys() | LEFT_OUT
