"""`prepare_qat`: whatever `quantize` takes it takes, with data for calibration or without; it is
called as the model is. PyTorch's own quantization-aware training says what the ranges are.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ConfigError, DataError

torch = pytest.importorskip("torch", reason="pip install torch")

from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from relayquant.config import BatchNorm, Ranges  # noqa: E402


class Layers(nn.Module):
    """All that the models below are made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.sums = nn.EmbeddingBag(20, 8), nn.EmbeddingBag(20, 8, mode="sum")
        self.sums.include_last_offset = True
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.a, self.b, self.row = nn.Linear(8, 4), nn.Linear(6, 4), nn.Parameter(torch.ones(6, 4))
        self.lstm, self.attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)


class Bag(Layers):
    def forward(self, words):
        return self.a(self.bag(words))


class BagOfOffsets(Layers):
    def forward(self, words, offsets):
        return self.a(self.sums(words, offsets))


class Instances(Layers):
    def forward(self, x):
        return self.head(torch.relu(self.instance(self.conv(x))))


class Nested(Layers):
    def forward(self, x):
        return {"sum": self.a(x["a"]) + self.b(x["b"][0]), "all": (self.a(x["a"]), None)}


class Named(Layers):
    def forward(self, x, *, other=None):
        return self.a(x) if other is None else self.a(x) + self.b(other)


class OfSix(Layers):
    """One parameter for each sample."""

    def forward(self, x):
        return self.a(x) + self.row


class Reshaped(Layers):
    def forward(self, x):
        return self.a(x.reshape(3, 2, 8)).reshape(6, 4)


class Recurrent(Layers):
    def forward(self, x):
        return self.a(self.lstm(x)[0])


class Attention(Layers):
    def forward(self, x):
        return self.attention(x, x, x)


def words(*shape):
    return torch.randint(0, 20, shape)


#: model -> (arguments of a call, whether it takes another number of samples)
MODELS = {
    Bag: (lambda: ((words(6, 5),), {}), False),
    BagOfOffsets: (lambda: ((words(10), torch.tensor([0, 3, 7, 10])), {}), False),
    Instances: (lambda: ((torch.randn(6, 3, 8, 8),), {}), False),
    Nested: (lambda: (({"a": torch.randn(6, 8), "b": [torch.randn(6, 6)]},), {}), True),
    Named: (lambda: ((torch.randn(6, 8),), {"other": torch.randn(6, 6)}), False),
    OfSix: (lambda: ((torch.randn(6, 8),), {}), False),
    Reshaped: (lambda: ((torch.randn(6, 8),), {}), False),
    Recurrent: (lambda: ((torch.randn(6, 5, 8),), {}), False),
    Attention: (lambda: ((torch.randn(6, 5, 8),), {}), True),
}


def flatten(tree):
    return [leaf.detach().numpy() for leaf in pytree.tree_leaves(tree) if leaf is not None]


def sqnr(expected, got):
    noise = sum(float(np.square(x - y).sum()) for x, y in zip(expected, got, strict=True))
    return 10 * np.log10(sum(float(np.square(x).sum()) for x in expected) / noise)


@pytest.mark.parametrize("is_calibrated", [True, False], ids=["data", "no data"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_prepare_qat__takes_what_quantize_takes(kind, is_calibrated):
    """And trains in the form that the model is called in; the integer module has the shapes of the
    example inputs, as that of `quantize`.
    """
    model, (draw, _) = kind().eval(), MODELS[kind]
    calls = [draw() for _ in range(4)]
    (args, kwargs), data = calls[0], [tuple(flatten(call)) for call in calls]
    options = {"example_kwargs": kwargs or None, "backend": "x86", "effort": "fast"}
    module = rq.torch.prepare_qat(
        model, args, calibration_dataset=data if is_calibrated else None, **options
    )
    optimizer = torch.optim.SGD(module.parameters(), 1e-5)
    module.train()
    for args, kwargs in calls:
        result = module(*args, **kwargs)
        loss = sum(x.square().mean() for x in pytree.tree_leaves(result) if x is not None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    module.eval()
    qmod = rq.torch.convert(module)
    quantized = rq.torch.quantize(model, *calls[0][:1], data, **options)
    for (args, kwargs), row in zip(calls, data, strict=True):
        with torch.no_grad():
            want, trained = model(*args, **kwargs), module(*args, **kwargs)
        assert pytree.tree_structure(trained) == pytree.tree_structure(want)
        got, expected = rq.reference.run(qmod, list(row)), flatten(want)
        assert sqnr(flatten(trained), got) > 40
        bound = sqnr(expected, rq.reference.run(quantized, list(row)))
        assert sqnr(expected, got) > bound - 3
    assert rq.verify(qmod, list(data[0])).is_equal
    shapes = [[str(param.ty.shape) for param in mod["main"].params] for mod in (qmod, quantized)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", [kind for kind, (_, is_free) in MODELS.items() if is_free])
def test_batch__of_another_size_trains_where_the_model_allows_it(kind):
    model, (draw, _) = kind().eval(), MODELS[kind]
    args, _ = draw()
    module = rq.torch.prepare_qat(model, args, effort="fast", backend="x86").train()
    half = pytree.tree_map(lambda x: x[:3], args)
    assert flatten(module(*half))[0].shape[0] == 3
    x = [tuple(flatten(half))]
    assert rq.torch.convert(module)["main"].params[0].ty.shape.values[0] == 6
    shapes = pytree.tree_map(lambda x: {0: torch.export.Dim.AUTO}, args)
    free = rq.torch.prepare_qat(
        model, args, calibration_dataset=x, effort="fast", backend="x86", dynamic_shapes=shapes
    )
    qmod = rq.torch.convert(free)
    assert rq.verify(qmod, list(x[0])).is_equal, "as it was asked for"


def test_call__in_another_form_is_named():
    (args, _) = MODELS[Nested][0]()
    module = rq.torch.prepare_qat(Nested().eval(), args, effort="fast", backend="x86")
    with pytest.raises(DataError, match="another structure than the example inputs"):
        module({"a": args[0]["a"]})
    swapped = {"b": args[0]["b"], "a": args[0]["a"]}
    module.eval()
    assert torch.equal(module(swapped)["sum"], module(*args)["sum"]), "a dict has no order"


# --- Without data for calibration ----------------------------------------------------------------


class Small(nn.Module):
    """A small network, its norms behind what they are folded into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def train(module, batches, lr=1e-3):
    """Losses toward the sum of each image's channels and quarter."""
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum=0.9)
    losses = []
    module.train()
    for x in batches:
        target = torch.cat([x.mean((2, 3)), x.amax((1, 2, 3))[:, None]], 1)
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    return losses


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 10, 10, generator=generator) + 0.3 for _ in range(30)]


@pytest.mark.filterwarnings("ignore")
def test_moving_average__ranges_and_losses_of_fx(batches):
    """PyTorch's `prepare_qat_fx` with 8 bits on both sides: the same observers from the first step
    on, the same batch norms, hence the same loss, step by step, and the same scales.
    """
    from torch.ao.quantization import (
        FakeQuantize,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        QConfig,
        QConfigMapping,
        quantize_fx,
    )

    activation = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    weight = FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, quant_min=-127, quant_max=127,
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, averaging_constant=1.0,
    )  # fmt: skip
    mapping = QConfigMapping().set_global(QConfig(activation, weight))
    theirs = quantize_fx.prepare_qat_fx(Small().train(), mapping, (batches[0],))
    ours = rq.torch.prepare_qat(
        Small().train(), (torch.zeros_like(batches[0]),), backend="x86",
        ranges=Ranges.MOVING_AVERAGE, batch_norm=BatchNorm.LIVE,
    )  # fmt: skip
    expected, got = train(theirs, batches), train(ours, batches)
    np.testing.assert_allclose(got[:10], expected[:10], rtol=0.005)
    np.testing.assert_allclose(got, expected, rtol=0.06)  # roundings part ways in time
    # What FX has behind the second relu watches the mean, too. Its other ranges are ours.
    parts = dict(theirs.named_modules())
    own = {q.group.key: q for q in ours.list_quantizers()}
    name = "activation_post_process_{}"
    torch.testing.assert_close(own["x"].scale, parts[name.format(0)].scale)
    torch.testing.assert_close(own["relu"].scale, parts[name.format(2)].scale, rtol=0.01, atol=0)
    watched = parts[name.format(3)].activation_post_process.max_val
    torch.testing.assert_close(own["relu_1"].high[0], watched, rtol=0.02, atol=0)
    with torch.no_grad():
        want = torch.cat([theirs(x) for x in batches[:5]]).numpy()
        answers = torch.cat([ours(x) for x in batches[:5]]).numpy()
    assert sqnr([want], [answers]) > 25


@pytest.mark.parametrize("ranges", Ranges)
def test_ranges__found_by_the_first_batches(ranges, batches):
    """As good as calibration on them; what the example inputs hold says nothing."""
    examples = (torch.zeros_like(batches[0]),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = rq.torch.prepare_qat(Small(), examples, backend="x86", ranges=ranges)
    train(module, batches[:12], lr=0)
    calibrated = rq.torch.prepare_qat(
        Small(), examples, backend="x86", calibration_dataset=batches[:12], effort="fast"
    )
    model = Small().eval()
    with torch.no_grad():
        expected, got, other = (
            torch.cat([m.eval()(x) for x in batches]).numpy() for m in (model, module, calibrated)
        )
    assert sqnr([expected], [got]) > sqnr([expected], [other]) - 3
    qmod = rq.torch.convert(module)
    x = batches[0].numpy()
    with torch.no_grad():
        want = module(batches[0]).numpy()
    np.testing.assert_allclose(rq.reference.run(qmod, [x])[0], want, atol=0.02)


def test_ranges__unknown_before_the_first_batch_and_saved_with_the_state(batches):
    module = rq.torch.prepare_qat(Small(), (batches[0],), backend="x86")
    module.eval()(batches[0])
    for door in (rq.torch.convert, rq.torch.convert_to_reference):
        with pytest.raises(ConfigError, match=r"without calibration data.*module\.train\(\)"):
            door(module)
    twin = rq.torch.prepare_qat(Small(), (batches[0],), backend="x86")
    train(module, batches[:2])
    twin.load_state_dict(module.state_dict())
    rq.torch.convert(twin)


def test_ranges__frozen_before_the_first_batch_stay_unknown(batches):
    module = rq.torch.prepare_qat(Small(), (batches[0],), backend="x86").freeze_ranges()
    train(module, batches[:1])
    with pytest.raises(ConfigError, match="range of"):
        rq.torch.convert(module)
    train(module.thaw_ranges(), batches[:1])
    rq.torch.convert(module)


def test_prepare_qat__an_array_in_place_of_a_tensor_is_named():
    """It is not left out, so that the module would lack an input."""
    inputs = torch.zeros(2, 3)
    prepared = rq.torch.prepare_qat(torch.nn.Linear(3, 2), (inputs,))
    with pytest.raises(rq.DataError, match=r"is a ndarray; allowed: a torch.Tensor.*from_numpy"):
        prepared(inputs.numpy())


CONVERSIONS = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to": lambda module: module.to(torch.float16),
    "to by name": lambda module: module.to(dtype=torch.float64),
    "to a tensor's": lambda module: module.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda module: module.type(torch.float16),
    "inside another": lambda module: torch.nn.Sequential(module).half(),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_prepare_qat__another_dtype_is_refused(convert):
    prepared = rq.torch.prepare_qat(torch.nn.Linear(3, 2), (torch.zeros(2, 3),))
    with pytest.raises(ConfigError, match=r"computes in float32.*allowed: float\(\), and to\(dev"):
        convert(prepared)
    kept = prepared.float().to("cpu").to(torch.float32)
    assert kept is prepared
    assert {each.dtype for each in prepared.parameters()} == {torch.float32}
    assert prepared(torch.zeros(2, 3)).dtype == torch.float32
