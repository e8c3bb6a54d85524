"""Modules of PyTorch's taken at once, values that serve again, and threads: the same bits."""

from __future__ import annotations

import copy
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")

from run_models import Writer, draw_sequences, seed  # noqa: E402
from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import relayquant as rq  # noqa: E402
from relayquant.errors import ModelError  # noqa: E402
from relayquant.torch.define_by_run.deferred import DeferredTensor, ValuePool  # noqa: E402
from relayquant.torch.define_by_run.module_calls import KnownCall  # noqa: E402
from relayquant.torch.define_by_run.program import Evaluation  # noqa: E402


class Zoo(nn.Module):
    """Modules of PyTorch's of many kinds, with one tensor or several in and out, in a row and in a
    Sequential; a condition behind them.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.leaky, self.pool, self.flat = nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten()
        self.linear, self.norm = nn.Linear(16, 8), nn.LayerNorm(8)
        self.lstm, self.gru = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)
        self.drop, self.same = nn.Dropout(0.5), nn.Identity()
        self.twice, self.inplace = nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.watch = lambda x: x

    def forward(self, x):
        x = self.flat(self.pool(self.leaky(self.conv(x))))
        x = self.watch(self.norm(self.linear(x)))
        h, c = self.lstm(x, (torch.sigmoid(x), torch.tanh(x)))
        x = self.inplace(self.drop(self.gru(h, c)) + self.same(x))
        for _ in range(2):
            x = self.twice(x)
        return x if x.sum() > 1e6 else x + 1


def draw_maps(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 6, 6, generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def zoo():
    """A model, and what converts it."""
    model = seed(Zoo)
    images = draw_maps(4)
    prepared = rq.torch.prepare(model, (images[0],), effort="fast")
    for image in images[1:]:
        prepared(image)
    converted = rq.torch.convert(prepared)
    converted(images[0])  # learns
    return model, converted


@pytest.fixture
def played(monkeypatch):
    """Names of the modules that were taken at once."""
    names: list[str] = []
    play = KnownCall.play

    def note(self, *arguments):
        result = play(self, *arguments)
        if result is not None:
            names.append(type(self.span.module).__name__)
        return result

    monkeypatch.setattr(KnownCall, "play", note)
    return names


def call_slowly(converted, *inputs):
    """What a program gives without taking modules at once; or the error."""
    forwards, converted._forwards = converted._forwards, ()
    try:
        return converted(*inputs)
    except ModelError as error:
        return str(error)
    finally:
        converted._forwards = forwards


def test_modules__taken_at_once_give_the_same_bits(zoo, played):
    _, converted = zoo
    (image,) = draw_maps(1)
    expected = call_slowly(converted, image)
    assert not played
    assert torch.equal(converted(image), expected)
    assert set(played) >= {
        "Conv2d", "BatchNorm2d", "ReLU", "LeakyReLU", "MaxPool2d", "Flatten", "Linear", "LayerNorm",
        "LSTMCell", "GRUCell", "Dropout",
    }  # fmt: skip


def replace_weight(model):
    before = model.linear.weight
    model.linear.weight = nn.Parameter(2 * before.detach())
    return lambda: setattr(model.linear, "weight", before)


def change_attribute(model):
    model.leaky.negative_slope = 0.5
    return lambda: setattr(model.leaky, "negative_slope", 0.1)


def change_shape(model):
    model.watch = lambda x: x[:, None]
    return lambda: setattr(model, "watch", lambda x: x)


@pytest.mark.parametrize("change", [replace_weight, change_attribute, change_shape])
def test_modules__what_has_changed_is_named_as_by_their_operators(zoo, change):
    model, converted = zoo
    (image,) = draw_maps(1)
    undo = change(model)
    try:
        with pytest.raises((ModelError, RuntimeError)) as error:
            converted(image)
        if error.type is ModelError:
            assert str(error.value) == call_slowly(converted, image)
    finally:
        undo()
    assert "forward" not in model.leaky.__dict__


def test_modules__hooks_and_forwards_of_the_user_run(zoo, played):
    model, converted = zoo
    (image,) = draw_maps(1)
    expected = call_slowly(converted, image)
    seen = []
    handle = model.linear.register_forward_hook(lambda *args: seen.append("hook"))
    model.gru.forward = lambda *args: (
        seen.append("forward"),
        nn.GRUCell.forward(model.gru, *args),
    )[1]
    try:
        assert torch.equal(converted(image), expected)
    finally:
        handle.remove()
        del model.gru.forward
    assert seen == ["hook", "forward"]
    assert "GRUCell" not in played


def test_modules__a_mode_of_the_user_sees_their_operators(zoo):
    model, converted = zoo
    names = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    linear = model.linear

    def watch(x):
        with Watching():
            return linear(torch.cat([x, x], 1))

    model.watch = watch
    with Watching(), pytest.raises(ModelError, match="Calibration never reached cat"):
        converted(*draw_maps(1))
    model.watch = lambda x: x
    assert "cat" in names


def test_modules__those_of_the_user_are_as_they_were(zoo):
    """Also a copy of one that its code makes while it runs, and after an error."""
    model, converted = zoo
    (image,) = draw_maps(1)
    copies = []

    def watch(x):
        assert "forward" in model.linear.__dict__
        with torch._C.DisableTorchFunction():
            copies.append(copy.deepcopy(model.linear))
        return x

    model.watch = watch
    try:
        converted(image)
        model.watch = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            converted(image)
    finally:
        model.watch = lambda x: x
    assert not [part for part in model.modules() if "forward" in part.__dict__]
    x = torch.ones(1, 16)
    with torch.no_grad():
        copies[0].weight.zero_()
        assert torch.equal(copies[0](x)[0], copies[0].bias)
        assert not torch.equal(model.linear(x)[0], copies[0].bias)


# --- Values that serve again ------------------------------------------------------------------


class Nothing:
    """A pass that computes nothing."""

    def compute_in_float(self):
        raise AssertionError


@pytest.mark.parametrize("uncounted", [0, 1, -1])
def test_pool__value_that_is_held_never_serves_again(monkeypatch, uncounted):
    """However the interpreter counts: 3.14 leaves out references that it only borrows."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda value: count(value) - uncounted)
    pool, form = ValuePool(), ((1, 4), torch.float32)
    held = [pool.make("kind", form, Nothing(), 0) for _ in range(6)]
    assert len(set(map(id, held))) == 6
    kept = held[-1]
    numbers = set(map(id, held))
    del held
    assert id(pool.make("kind", form, Nothing(), 0)) in numbers - {id(kept)}
    assert kept is not pool.make("kind", form, Nothing(), 0)
    assert pool.make("kind", ((2, 4), torch.float32), Nothing(), 0).form == ((2, 4), torch.float32)


# --- Threads ----------------------------------------------------------------------------------


class Noisy(Writer):
    """State in Python that threads share, and a dropout that must not act."""

    def __init__(self):
        super().__init__(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, sequence):
        return self.drop(super().forward(sequence))


@pytest.fixture(scope="module")
def noisy():
    model = seed(Noisy).train()
    sequences = draw_sequences(4)
    prepared = rq.torch.prepare(model, (sequences[0],), effort="fast")
    for sequence in sequences[1:]:
        prepared(sequence)
    return model, rq.torch.convert(prepared)


def test_loop__holds_no_values_of_passes_before(noisy):
    """The last state does not hold the whole loop behind it."""
    model, converted = noisy
    for _ in range(3):
        converted(torch.ones(5, dtype=torch.int64))
    assert type(model.last) is DeferredTensor
    assert model.last.region_pass is None


def test_threads__give_what_one_gives(noisy):
    model, converted = noisy
    assert model.drop.training
    inputs = [torch.full((5,), i) for i in (1, 2)]
    expected = [converted(x) for x in inputs]
    wrong: list[object] = []

    def work(number):
        try:
            for _ in range(40):
                if not torch.equal(converted(inputs[number]), expected[number]):
                    wrong.append(number)
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert model.drop.training
    assert not [part for part in model.modules() if "forward" in part.__dict__]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([torch.ones(3, 4)], ModelError, r"'x' is float32 \(3, 4\), which calibration never saw"),
        ([torch.ones(2, 4).double()], ModelError, r"'x' is float64 \(2, 4\), which .*; allowed: "),
        ([], rq.DataError, r"takes 1 tensor, got 0"),
    ],
)
def test_one_integer_module__refuses_what_calibration_never_saw(inputs, error, message):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)

    converted = rq.torch.convert(rq.torch.prepare(Net(), (torch.ones(2, 4),), effort="fast"))
    assert len(converted.modules) == 1
    with pytest.raises(error, match=message):
        converted(*inputs)


def test_evaluation__until_the_last_one_leaves():
    module = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    state = Evaluation(list(module.modules()))
    with state:
        with state:
            assert not module[0].training
        assert not module[0].training, "the other one still runs"
    assert module[0].training
    assert module.training
    assert not module[1].training


def test_evaluation__is_what_the_class_says():
    """Statistics of each batch: `eval` leaves this norm in training mode, also in threads."""

    class Live(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].train()
            return self

    model, x = Live(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(8, 4)
    model[1].training = False
    modes = [module.training for module in model.modules()]
    state = Evaluation(list(model.modules()))
    with state, state:
        assert [module.training for module in model.modules()] == [False, False, True, False]
    assert [module.training for module in model.modules()] == modes
    prepared = rq.torch.prepare(model, (x,), effort="fast")
    with torch.no_grad():
        want = model.eval()(x)
    torch.testing.assert_close(prepared(x), want)


def test_evaluation__a_parent_has_the_last_word():
    """As `eval` of the whole model: what a parent says of its parts comes after their own."""

    class Own(nn.Dropout):
        def train(self, mode=True):
            return super().train(mode)

    class Parent(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].train(True)
            return self

    model = nn.Sequential(Parent(Own(), Own()), nn.Dropout())
    want = [module.training for module in model.eval().modules()]
    assert any(want)
    model.train()
    with Evaluation(list(model.modules())):
        assert [module.training for module in model.modules()] == want
    assert all(module.training for module in model.modules())
