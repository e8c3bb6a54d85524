"""Mappings whose lines name classes and functions of PyTorch, in every call that takes a module."""

from __future__ import annotations

import operator
import re
import subprocess
import sys

import pytest

import relayquant as rq

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


class Gate(nn.Module):
    """A linear layer of its own, a call of F.linear, and an activation of several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.inner(x) * functional.linear(x, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.gate = Gate()
        self.swish = nn.SiLU()
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.swish(self.gate(self.act(self.first(x)))))


torch.manual_seed(0)
NET = Net().eval()
BATCHES = [torch.randn(4, 8) for _ in range(2)]
EACH = rq.get_backend_config("x86").default_qconfig
EVERY = rq.QConfigMapping().set_global(EACH)


def in_float(mapping) -> set[str]:
    qmod = rq.torch.quantize(
        NET, (BATCHES[0],), BATCHES, qconfig_mapping=mapping, effort="fast", backend="x86"
    )
    rows = rq.ledger(qmod).rows  # "act" is the first layer with its ReLU
    return {re.sub(r"[._]\d+$", "", row.name) for row in rows if not row.quantized}


def test_set_object_type__modules_of_a_class_are_those_of_the_model():
    assert {"act", "gate.inner", "last"} <= in_float(EVERY.set_object_type(nn.Linear, None))
    assert not any("mm" in name for name in in_float(EVERY.set_object_type(nn.Linear, None)))


def test_set_object_type__a_class_of_the_user_holds_what_is_inside():
    found = in_float(EVERY.set_object_type(Gate, None))
    assert {"gate.inner", "gate.mm", "gate.mul"} <= found
    assert not {"act", "last"} & found
    # The class of the innermost module decides.
    mapping = EVERY.set_object_type(Gate, None).set_object_type(nn.Linear, EACH)
    assert "gate.inner" not in in_float(mapping)
    assert "gate.mm" in in_float(mapping)


@pytest.mark.slow
def test_set_object_type__a_function_selects_modules_that_call_it():
    found = in_float(EVERY.set_object_type(functional.linear, None))
    assert {"act", "gate.inner", "gate.mm", "last"} <= found


@pytest.mark.slow
def test_set_object_type__a_name_wins_over_a_class():
    mapping = EVERY.set_object_type(nn.Linear, None).set_module_name("last", EACH)
    assert "last" not in in_float(mapping)
    assert "act" in in_float(mapping)


@pytest.mark.slow
def test_set_object_type__prepare_and_prepare_qat_know_classes():
    mapping = EVERY.set_object_type(nn.Linear, None)
    prepared = rq.torch.prepare(NET, (BATCHES[0],), qconfig_mapping=mapping, backend="x86")
    rows = rq.torch.convert(prepared).ledger.rows
    assert {"act", "last"} <= {row.name for row in rows if not row.quantized}
    trained = rq.torch.prepare_qat(NET, (BATCHES[0],), mapping, "x86")
    assert not any(name.startswith(("first", "last")) for name in trained.weights)


@pytest.mark.slow
def test_set_object_type__a_class_that_was_absorbed_does_not_select_what_absorbed_it():
    assert "act" not in in_float(EVERY.set_object_type(nn.ReLU, None, optional=True))
    with pytest.raises(rq.errors.ConfigError, match=r"'act' is part of 'act' \(dense_bias_relu\)"):
        in_float(EVERY.set_object_type(nn.ReLU, None))


def test_set_object_type__mistakes_are_named():
    with pytest.raises(rq.errors.ConfigError, match=r"no module of this class\. Known: .*Linear"):
        in_float(EVERY.set_object_type(nn.Conv2d, None))
    assert in_float(EVERY.set_object_type(nn.Conv2d, None, optional=True)) == in_float(EVERY)
    with pytest.raises(rq.errors.ConfigError, match=r"torch\.nn\.functional\.silu is not one"):
        EVERY.set_object_type(functional.silu, None)
    with pytest.raises(rq.errors.ConfigError, match="in_float is not one operator type"):
        EVERY.set_object_type(in_float, None)
    mod, params = rq.load(torch.export.export(NET, (BATCHES[0],)))
    with pytest.raises(rq.errors.ConfigError, match=r"Call relayquant\.torch\.quantize"):
        rq.prepare(mod, params, qconfig_mapping=EVERY.set_object_type(nn.Linear, None))


def test_set_object_type__classes_and_functions_are_plain_data():
    mapping = EVERY.set_object_type(nn.Linear, None).set_object_type(torch.add, None)
    assert rq.QConfigMapping.from_dict(mapping.to_dict()) == mapping
    assert mapping.to_dict()["module_class"][0]["key"] == "torch.nn.modules.linear.Linear"
    assert mapping.to_dict()["object_type"][0]["key"] == "aten.add"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (operator.add, "add"),
        (torch.Tensor.add, "add"),
        (torch.Tensor.add_, "add"),
        (torch.add, "add"),
        (torch.ops.aten.add.Tensor, "add"),
        (torch.ops.aten.linear, "linear"),
        (functional.max_pool2d, "max_pool2d"),
        (torch.cat, "cat"),
        (operator.truediv, "div"),
    ],
)
def test_set_object_type__a_function_is_known_by_any_of_its_names(function, name):
    (rule,) = rq.QConfigMapping().set_object_type(function, None).rules
    assert rule.key == f"aten.{name}"


FUNCTIONS = {
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), (2, 4, 8)),
    "conv1d": (nn.Conv1d(4, 5, 3), (2, 4, 8)),
    "conv2d": (nn.Conv2d(4, 5, 3), (2, 4, 8, 8)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 5, 3), (2, 4, 8, 8)),
    "relu6": (nn.ReLU6(), (2, 4)),
    "prelu": (nn.PReLU(), (2, 4)),
    "gelu": (nn.GELU("tanh"), (2, 4)),
    "softmax": (nn.Softmax(-1), (2, 4)),
    "layer_norm": (nn.LayerNorm(4), (2, 4)),
    "group_norm": (nn.GroupNorm(2, 4), (2, 4, 8)),
    "max_pool2d": (nn.MaxPool2d(2), (2, 4, 8, 8)),
    "avg_pool2d": (nn.AvgPool2d(2), (2, 4, 8, 8)),
    "amax": (lambda x: x.amax(-1), (2, 4)),
    "sub": (lambda x: x - x.flip(0), (2, 4)),
    "cat": (lambda x: torch.cat([x, x], 0), (2, 4)),
    "maximum": (lambda x: torch.maximum(x, x.flip(0)), (2, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_names__the_operators_that_programs_are_read_as(name):
    """A mapping of this function alone selects an operator, else `prepare` raises."""
    call, shape = FUNCTIONS[name]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = call

        def forward(self, x):
            return self.call(x)

    mod, params = rq.load(torch.export.export(Whole().eval(), (torch.randn(shape),)))
    function = getattr(torch.ops.aten, name)
    mapping = EVERY.set_object_type(function, None)
    prepared = rq.prepare(mod, params, qconfig_mapping=mapping, backend="x86")
    assert any(row.rule == f"object_type 'aten.{name}'" for row in prepared.plan.operators)


def test_torch_names__without_torch_nothing_is_imported():
    code = (
        "import relayquant as rq, sys\n"
        "rq.QConfigMapping().set_object_type('aten.linear', None).to_dict()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
