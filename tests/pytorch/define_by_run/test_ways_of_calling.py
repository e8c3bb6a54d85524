"""One small model, called in every way in which PyTorch lets a model be called: what is given, in
which mode, from where, and what becomes of the model when a call fails.
"""

from __future__ import annotations

import copy
import errno
import gc
import pickle
import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest

import relayquant as rq

torch = pytest.importorskip("torch", reason="pip install torch")
from run_models import sqnr  # noqa: E402
from torch import nn  # noqa: E402

from relayquant.torch.define_by_run import tensor_file  # noqa: E402

OPTIONS = {"backend": "x86", "effort": "fast"}


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Answer:
    first: torch.Tensor
    rest: dict


FORMS = {
    "dataclass": lambda r, h: Answer(r, {"h": h}),
    "tensor": lambda r, h: r,
    "tuple": lambda r, h: (r, h),
    "list": lambda r, h: [r, h],
    "dict": lambda r, h: {"r": r, "h": h},
    "named": Pair,
}


class Recurrent(nn.Module):
    """Steps round a GRU cell, as many as the values say."""

    def __init__(self):
        super().__init__()
        self.enter, self.cell, self.leave = nn.Linear(6, 8), nn.GRUCell(8, 8), nn.Linear(8, 3)
        self.fails_at, self.form = None, "tensor"

    def forward(self, x, *, steps=2, scale=None):
        y, h = torch.relu(self.enter(x)), torch.zeros(x.shape[0], 8)
        y = y if scale is None else y * scale
        for i in range(steps):
            h = self.cell(y, h)
            if i == self.fails_at:
                raise ValueError("half-way")
            if h.sum() > 100:
                break
        return FORMS[self.form](self.leave(h), h)


def prepare(model, *inputs):
    torch.manual_seed(1)
    prepared = rq.torch.prepare(model, (torch.randn(2, 6),), **OPTIONS)
    for x in inputs or [torch.randn(2, 6) for _ in range(3)]:
        prepared(x)
    return prepared


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model = Recurrent().eval()
    prepared = prepare(model)
    return model, prepared, rq.torch.convert(prepared)


def draw(count=2):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(2))


INPUTS = {
    "transposed": lambda: torch.randn(6, 2).t(),
    "expanded": lambda: torch.randn(1, 6).expand(2, 6),
    "every second": lambda: torch.randn(2, 12)[:, ::2],
    "not aligned": lambda: torch.randn(13)[1:].view(2, 6),
    "with a gradient": lambda: torch.randn(2, 6, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.randn(2, 6)),
}


@pytest.mark.parametrize("given", INPUTS)
def test_call__takes_any_strides(models, given):
    model, prepared, converted = models
    x = INPUTS[given]()
    got = converted(x)
    assert not got.requires_grad
    assert type(got) is torch.Tensor
    with torch.no_grad():
        want = model(x)
    assert torch.equal(got, converted(x.detach().clone(memory_format=torch.contiguous_format)))
    torch.testing.assert_close(prepared(x), want, rtol=0, atol=0)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_call__in_any_mode(models, mode):
    model, _, converted = models
    with torch.no_grad():
        want = model(draw())
    with MODES[mode]():
        inside = converted(draw())
    assert sqnr(want, inside.float()) > 20
    assert sqnr(want, converted(draw())) > 20


@pytest.mark.parametrize("form", FORMS)
def test_call__returns_what_the_model_returns(models, form):
    model, _, converted = models
    model.form = form
    try:
        got = converted(draw())
        with torch.no_grad():
            want = model(draw())
    finally:
        model.form = "tensor"
    assert type(got) is type(want)
    if form == "dataclass":
        got, want = ({"r": v.first, **v.rest} for v in (got, want))
    rows = [list(v.values()) if isinstance(v, dict) else list(v) for v in (got, want)]
    if form == "tensor":
        rows = [[got], [want]]
    for mine, theirs in zip(*rows, strict=True):
        assert type(mine) is torch.Tensor
        assert sqnr(theirs, mine) > 20


def test_call__of_one_integer_module_returns_what_is_no_tensor_too():
    class Straight(Recurrent):
        def forward(self, x):
            return {"name": "y", "rest": [None, (self.leave(self.enter(x).relu()), 3)]}

    torch.manual_seed(0)
    model = Straight().eval()
    converted = rq.torch.convert(prepare(model))
    assert len(converted.modules) == 1
    got, want = converted(x := draw()), model(x)
    assert got["rest"][0] is None
    assert (got["name"], got["rest"][1][1]) == ("y", 3)
    assert sqnr(want["rest"][1][0].detach(), got["rest"][1][0]) > 20


def test_call__that_fails_half_way_leaves_everything_as_it_was(models):
    model, prepared, converted = models
    want, calls = converted(draw()), prepared.calls
    for name in ("enter", "cell"):  # one training, one not
        model.get_submodule(name).train()
    model.fails_at = 1
    try:
        for each in (prepared, converted):
            with pytest.raises(ValueError, match="half-way"):
                each(draw())
    finally:
        model.fails_at = None
    assert [m.training for m in model.modules()] == [False, True, True, False]
    model.eval()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert prepared.calls == calls
    assert torch.equal(converted(draw()), want)


def test_call__with_another_dtype_is_named(models):
    for dtype in ("float64", "float16"):
        with pytest.raises(
            rq.ModelError, match=rf"is called with {dtype} \(2, 6\), float32 \(8, 6"
        ):
            models[2](draw().to(getattr(torch, dtype)))


def test_call__of_another_converted_model(models):
    _, _, converted = models
    torch.manual_seed(3)
    layer = nn.Linear(6, 6)

    def run(x):
        y = torch.relu(layer(x))
        return converted(y) + 1 if x.sum() > -1e9 else y

    outer = rq.torch.convert(rq.torch.prepare(run, (draw(),), **OPTIONS))
    with torch.no_grad():
        assert sqnr(run(draw()), outer(draw())) > 20


def test_call__with_hooks_that_come_and_go(models):
    """They are no part of what an operator is."""
    model, _, converted = models
    seen = []
    handle = model.cell.register_forward_hook(lambda m, args, result: seen.append(result.shape))
    try:
        want = converted(draw())
    finally:
        handle.remove()
    assert seen == [(2, 8)] * 2
    assert torch.equal(converted(draw()), want)


def test_prepare__calls_with_empty_batches():
    """They say which way the code goes, and nothing of ranges."""
    torch.manual_seed(0)
    model = Recurrent().eval()
    converted = rq.torch.convert(prepare(model, draw(), torch.zeros(0, 6), draw(3)))
    for count in (0, 1, 5):
        with torch.no_grad():
            want = model(draw(count))
        got = converted(draw(count))
        assert got.shape == want.shape
        assert not count or sqnr(want, got) > 15


def test_prepare__calibrated_from_several_threads(models):
    """As from one: every call is there, and ranges are those of its values."""
    prepared = prepare(models[0])
    before, errors = prepared.calls, []

    def work():
        try:
            for _ in range(8):
                prepared(draw())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert prepared.calls == before + 32
    assert len(prepared.sites) == len(models[1].sites)
    with torch.no_grad():
        assert sqnr(models[0](draw()), rq.torch.convert(prepared)(draw())) > 20


def test_prepare__without_space_for_the_values_of_a_call(models, monkeypatch):
    prepared = prepare(models[0])
    calls = prepared.calls

    def write(*_):
        raise OSError(errno.ENOSPC, "")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write_all", write)
        with pytest.raises(rq.errors.FileError, match=r"No space .*or set TMPDIR to another"):
            prepared(draw())
    assert prepared.calls == calls
    prepared(draw())
    with torch.no_grad():
        assert sqnr(models[0](draw()), rq.torch.convert(prepared)(draw())) > 20


def test_prepare__closes_its_file():
    prepared = prepare(nn.Linear(6, 3))
    file = prepared._file._file
    del prepared
    gc.collect()
    assert file.closed


def test_prepare__what_torch_compile_compiled():
    """The model itself is taken as it is written; a part is refused by name."""
    torch.manual_seed(0)
    model = Recurrent().eval()
    want = rq.torch.convert(prepare(model))(draw())
    compiled = torch.compile(model)
    assert torch.equal(rq.torch.convert(prepare(compiled))(draw()), want)
    with pytest.raises(rq.ModelError, match=r"compiled by torch\.compile.* attribute _orig_mod"):
        prepare(nn.Sequential(torch.compile(nn.Linear(6, 3))))


def test_copy__says_what_to_do_instead(models):
    linear = nn.Linear(6, 3)
    whole = rq.torch.convert(prepare(linear))
    for each in (*models[1:], whole):
        for make in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(rq.ConfigError, match=rf"A {type(each).__name__} cannot be copied"):
                make(each)
        with pytest.raises(rq.ConfigError, match=r"has no state_dict: .*as_module makes"):
            each.state_dict()


def test_convert__an_array_in_place_of_a_tensor_is_named():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 4).eval(), torch.randn(4, 8)
    prepared = rq.torch.prepare(model, (x,))
    prepared(x)
    converted = rq.torch.convert(prepared)
    with pytest.raises(rq.errors.DataError, match=r"is a ndarray; allowed: a torch\.Tensor\. For"):
        converted(x.numpy())


def test_call__an_array_in_code_that_needs_tensors_is_named(models):
    for model in models[1:]:
        with pytest.raises(rq.DataError, match=r"is a ndarray; allowed: a torch.Tensor.*from_num"):
            model(draw()[0].numpy())


@pytest.mark.parametrize("name", ["half", "double", "bfloat16", "to", "type", "cuda"])
def test_dtype__cannot_be_changed(models, name):
    for model in models[1:]:
        with pytest.raises(rq.ConfigError, match=r"no other dtype or device.*Leave to\(\), half"):
            getattr(model, name)(*([torch.float16] if name in ("to", "type") else []))
