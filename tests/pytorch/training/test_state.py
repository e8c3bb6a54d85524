"""State that a PyTorch module keeps between calls: refused by name where one integer module would
hold it as a constant, followed where the user's code runs.
"""

from __future__ import annotations

import copy
import warnings

import pytest

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch", reason="pip install torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

GLOBALS = {"h": torch.zeros(1, 4)}


class Layer(nn.Module):
    """A layer whose answer each kind of state below is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(1, 4))
        self.register_buffer("hidden", torch.zeros(1, 4), persistent=False)
        self.h, self.last = torch.zeros(1, 4), None
        self.row, self.named = [torch.zeros(1, 4)], {"h": torch.zeros(1, 4)}
        self.count = 0

    def join(self, x, state):
        return self.lin(x) + state


class BufferInPlace(Layer):
    def forward(self, x):
        return self.join(x, self.total.add_(x.mean(0, keepdim=True)))


class BufferAssigned(Layer):
    def forward(self, x):
        self.hidden = self.hidden + x.mean(0, keepdim=True)
        return self.join(x, self.hidden)


class ParameterInPlace(Layer):
    def forward(self, x):
        self.lin.weight.mul_(0.9)
        return self.lin(x)


class InputInPlace(Layer):
    def forward(self, x):
        y = self.lin(x)
        x.add_(1)
        return y


class NormOfBatches(Layer):
    def forward(self, x):
        return F.batch_norm(
            self.lin(x), self.norm.running_mean, self.norm.running_var, training=True
        )


class NormLeftTraining(Layer):
    def forward(self, x):
        return self.norm.train()(self.lin(x))


class Attribute(Layer):
    def forward(self, x):
        self.h = self.h + x.mean(0, keepdim=True)
        return self.join(x, self.h)


class AttributeInPlace(Layer):
    def forward(self, x):
        return self.join(x, self.h.add_(x.mean(0, keepdim=True)))


class Last(Layer):
    """What matters is the call before; the first one has none."""

    def forward(self, x):
        before, self.last = self.last, x
        return self.lin(x) if before is None else self.join(x, before)


class Row(Layer):
    def forward(self, x):
        self.row[0] = self.row[0] + x.mean(0, keepdim=True)
        return self.join(x, self.row[0])


class Named(Layer):
    def forward(self, x):
        self.named["h"] = self.named["h"] + x.mean(0, keepdim=True)
        return self.join(x, self.named["h"])


class Global(Layer):
    def forward(self, x):
        GLOBALS["h"] = GLOBALS["h"] + x.mean(0, keepdim=True)
        return self.join(x, GLOBALS["h"])


class Counter(Layer):
    def forward(self, x):
        self.count += 1
        return self.lin(x) * self.count


class Hook(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.lin.register_forward_hook(Hook.count_calls)

    @staticmethod
    def count_calls(module, args, result):
        module.calls = getattr(module, "calls", 0) + 1
        return result * module.calls

    def forward(self, x):
        return self.lin(x)


#: kind of state -> what the refusal names
KINDS = {
    BufferInPlace: "buffer 'total'",
    BufferAssigned: "buffer 'hidden'",
    ParameterInPlace: "'lin.weight'",
    InputInPlace: "input 'x'",
    NormOfBatches: "statistics of 'norm'",
    NormLeftTraining: "statistics of 'norm'",
    Attribute: "'h'",
    AttributeInPlace: "h",
    Last: "'last'",
    Row: "'row'",
    Named: "'named'",
    Global: "a global, a hook or a closure",
    Counter: "'count'",
    Hook: "'lin.calls'",
}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def make(kind):
    torch.manual_seed(0)
    GLOBALS["h"] = torch.zeros(1, 4)
    return kind().eval()


def draw(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) + 1 for _ in range(count)]


@pytest.mark.parametrize("batches", [draw(2), [torch.zeros(6, 4)] * 2], ids=["drawn", "zeros"])
@kinds
def test_prepare_qat__state_is_refused_by_name(kind, batches):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attribute", UserWarning)
        with pytest.raises(ModelError, match=KINDS[kind]):
            rq.torch.prepare_qat(
                make(kind), (batches[0],), calibration_dataset=batches, effort="fast", backend="x86"
            )


def test_quantize__writes_no_buffer_of_a_model_that_changes_none():
    """`prepare` takes a buffer that is written for one that the model changes."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).eval()
    versions = [buffer._version for buffer in model.buffers()]
    data = [torch.randn(1, 1, 5, 5) for _ in range(4)]
    rq.torch.quantize(model, (data[0],), data, effort="fast", callbacks=())
    assert [buffer._version for buffer in model.buffers()] == versions


def test_quantize__attributes_are_refused_by_name():
    (x,) = draw(1)
    with pytest.raises(ModelError, match=r"keeps state in 'count'.*relayquant\.torch\.prepare"):
        rq.torch.quantize(make(Counter), (x,), [x], effort="fast", backend="x86")


@pytest.mark.parametrize("calls", [1, 3])
@kinds
def test_define_by_run__state_goes_on_as_in_float(kind, calls):
    """The converted model goes on from the state that calibration has left, and so does what it
    leaves: buffers, and the inputs that it was given.
    """
    # Calibration sees wider ranges than what comes after it.
    batches = [x * (2 if i < calls else 0.5) for i, x in enumerate(draw(calls + 3))]
    model = make(kind)
    prepared = rq.torch.prepare(model, (batches[0],), effort="fast", backend="x86")
    for x in batches[1:calls]:
        prepared(x)
    if calls == 1 and kind in (Counter, Hook, Last):
        return  # numbers and ways that calibration never saw are errors: see below
    twin, there = copy.deepcopy(model), GLOBALS["h"]
    with torch.no_grad():
        inputs = [x.clone() for x in batches[calls:]]
        expected = [twin(x) for x in inputs]
    GLOBALS["h"] = there
    converted = rq.torch.convert(prepared)
    for x, want, changed in zip(batches[calls:], expected, inputs, strict=True):
        got = converted(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0.05 * float(want.abs().max()))
        assert torch.equal(x, changed)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0.03, atol=0.03)


def test_define_by_run__number_that_calibration_never_saw_is_named():
    prepared = rq.torch.prepare(make(Counter), (draw(1)[0],), effort="fast", backend="x86")
    with pytest.raises(ModelError, match=r"mul in the model .*test_state\.py.*never saw"):
        rq.torch.convert(prepared)(draw(1)[0])


def test_define_by_run__attribute_that_only_others_read_is_written():
    """The last answer is no part of what a call computes, but the caller asks for it."""

    class Remembers(Layer):
        def forward(self, x):
            self.last = self.lin(x)
            return torch.relu(self.last)

    first, second = draw(2)
    model = make(Remembers)
    converted = rq.torch.convert(rq.torch.prepare(model, (first,), effort="fast", backend="x86"))
    got = converted(second)
    assert torch.equal(torch.relu(torch.as_tensor(model.last)), got)
