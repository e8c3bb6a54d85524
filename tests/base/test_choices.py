"""Every argument and field that takes a member of an enum takes its value as text."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import relayquant as rq
from relayquant.base.arguments import check_arguments, find_enums, find_hints
from relayquant.config import Order, Role, Scheme, observers
from relayquant.demo import load_digits
from relayquant.flow.settings import CalibrateSettings, QuantizeSettings

FACADES = (rq, rq.config, rq.observers, rq.analysis, rq.plots, rq.torch)
PUBLIC = {
    f"{facade.__name__}.{name}": getattr(facade, name)
    for facade in FACADES
    for name in facade.__all__
    if callable(getattr(facade, name))
}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if dataclasses.is_dataclass(value)}


def list_choices(of: Any) -> list[tuple[str, Any]]:
    """(argument or field, its annotation) where an enum is allowed."""
    return [
        (name, hint)
        for name, hint in find_hints(getattr(of, "__wrapped__", of)).items()
        if name != "return" and find_enums(hint)
    ]


ARGUMENTS = [
    (function, name, hint)
    for function, value in FUNCTIONS.items()
    for name, hint in list_choices(value)
]
FIELDS = [
    (kind, name, hint) for kind, value in CLASSES.items() for name, hint in list_choices(value)
]

#: What the classes need besides the field.
NEEDED: dict[str, dict[str, Any]] = {
    "DTypeWithConstraints": {"dtype": "int8"},
    "Finding": {"severity": "info", "check": "data", "where": "", "what": "w", "advice": "a"},
    "FixedOutput": {"dtype": "int8", "observer": rq.observers.Fixed(1.0, 0)},
    "PatternConfig": {
        "pattern": rq.get_backend_config("x86").find_pattern("conv2d").pattern,
        "dtypes": (rq.config.DTypeConfig(input="uint8", output="uint8"),),
    },
    "ValueInfo": {"name": "x", "spec": rq.QSpec("int8"), "shape": (2,)},
}


@pytest.fixture(scope="module")
def digits():
    demo = load_digits()
    return (*rq.load(demo.model_path), demo.calibration[:1])


def test_choices__are_found() -> None:
    assert {
        f"relayquant.{name}" for name in ("quantize", "calibrate", "prepare", "torch.finetune")
    } <= {row[0] for row in ARGUMENTS}
    assert {"QSpec", "FitSettings", "GuardSettings", "Accumulator"} <= {
        row[0].rpartition(".")[2] for row in FIELDS
    }


def make(kind: str, name: str, value: Any, hint: Any) -> Any:
    """What a field holds of an instance made with the value, the only one of a tuple where it takes
    several; the text of an error where the value does not go with the other fields.
    """
    several = "tuple" in str(hint)
    try:
        made = CLASSES[kind](
            **{**NEEDED.get(kind.rpartition(".")[2], {}), name: (value,) if several else value}
        )
    except rq.RelayQuantError as error:
        return str(error)
    return getattr(made, name)[0] if several else getattr(made, name)


@pytest.mark.parametrize(("kind", "name", "hint"), FIELDS, ids=lambda value: str(value)[:40])
def test_field__takes_the_value_as_text(kind: str, name: str, hint: Any) -> None:
    members = [member for enum in find_enums(hint) for member in enum]
    found = {member: make(kind, name, member.value, hint) for member in members}
    assert found == {member: make(kind, name, member, hint) for member in members}
    assert any(found[member] is member for member in members)


@pytest.mark.parametrize(("kind", "name", "hint"), FIELDS, ids=lambda value: str(value)[:40])
def test_field__unknown_text_is_an_error_with_what_is_allowed(kind, name, hint) -> None:
    value = ("nonsense",) if "tuple" in str(hint) else "nonsense"
    with pytest.raises(rq.ConfigError, match=r"'nonsense'; allowed: '.*RQ101"):
        CLASSES[kind](**{**NEEDED.get(kind.rpartition(".")[2], {}), name: value})


@pytest.mark.parametrize(("function", "name", "hint"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_argument__is_the_member_that_its_text_names(function, name, hint) -> None:
    assert hasattr(FUNCTIONS[function], "__wrapped__"), "its arguments are not checked"

    def take(value):
        return value

    take.__annotations__ = {"value": hint}
    checked = check_arguments(take)
    for enum in find_enums(hint):
        assert [checked(member.value) for member in enum] == list(enum)


def test_argument__unknown_text_is_an_error_with_what_is_allowed(digits) -> None:
    mod, params, data = digits
    with pytest.raises(rq.ConfigError, match=r"quantize: guard is 'of'; allowed: .*mean 'off'"):
        rq.quantize(mod, params, data, guard="of")
    with pytest.raises(rq.ConfigError, match="model_type is 'cnn'; allowed: 'general', 'transf"):
        rq.quantize(mod, params, data, model_type="cnn")


def test_argument__as_text_does_what_its_member_does(digits) -> None:
    mod, params, data = digits
    prepared = rq.prepare(mod, params, effort="fast")
    found = [rq.calibrate(prepared, data, order=order) for order in ("parallel", Order.PARALLEL)]
    assert found[0].parameters == found[1].parameters
    assert found[0].statistics.keys() == found[1].statistics.keys() != set()
    qconfig = rq.get_backend_config("x86").default_qconfig
    assert qconfig.tensor("weight") == qconfig.tensor(Role.WEIGHT) != qconfig.tensor("activation")
    assert str(rq.analysis.Finding("info", "data", "", "Seen.", "Do.")) == "info: Seen. Do."


def test_text__of_a_near_value_is_suggested() -> None:
    with pytest.raises(rq.ConfigError, match=r"QSpec\.scheme is 'symetric'.*mean 'symmetric'"):
        rq.QSpec("int8", "symetric")
    assert rq.QSpec("int8", "symmetric").scheme is Scheme.SYMMETRIC


@pytest.mark.parametrize("name", observers.OBSERVERS)
def test_observer__by_name(name: str) -> None:
    spec = rq.QSpec("uint8")
    assert rq.TensorConfig(spec, name) == rq.TensorConfig(spec, observers.OBSERVERS[name])
    assert QuantizeSettings(observer=name).observer is observers.OBSERVERS[name]
    assert CalibrateSettings(observer=name).observer is observers.OBSERVERS[name]
    with pytest.raises(rq.ConfigError, match=rf"observer is '{name}x'.*Did you mean '{name}'"):
        rq.TensorConfig(spec, f"{name}x")
