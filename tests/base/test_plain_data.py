"""Frozen values as plain data: every class that is written by its fields reads itself back, and
names what is wrong with what it reads.
"""

from __future__ import annotations

import ast
import enum
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from package_sources import PACKAGE, SOURCES, list_nodes

import relayquant as rq
from relayquant.analysis import accumulators
from relayquant.base import qtypes
from relayquant.base.plain_data import (
    NamedSettings,
    PlainFields,
    PlainSettings,
    find_key,
    list_required,
)
from relayquant.config import backend
from relayquant.errors import ConfigError
from relayquant.ir import plan
from relayquant.ir.ledger import (
    GuardResult,
    InterfaceValue,
    Ledger,
    LedgerRow,
    SearchResult,
    SpeedResult,
)

SPEC = rq.QSpec(
    "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL, -127, scale_min=1e-6
)
TENSOR = rq.TensorConfig(SPEC, rq.observers.Percentile(99.9))
QCONFIG = rq.QConfig(TENSOR, TENSOR, bias=replace(TENSOR, spec=rq.QSpec("int16")))
INFO = qtypes.ValueInfo("w", rq.config.Role.WEIGHT, SPEC, ("n", 3), 1, ("conv",))
GROUP = plan.SharedQParams(
    INFO, ("w",), ("w",), rq.observers.MinMax(), ("conv", "weight"), None, (), True
)
OPERATOR = plan.OperatorPlan(
    *("conv", "relax.nn.conv2d", ("conv.1", "conv"), "conv2d", True, (("weight", "w"),), None),
    support=plan.Support.DTYPE_UNSUPPORTED,
    accumulator=rq.config.Accumulator(14, rq.config.Overflow.WRAP),
    dynamic=rq.QSpec("uint8", is_dynamic=True),
)
ROW = LedgerRow("conv", "nn.conv2d", True, "conv2d", "int8", values=("a",), scale=(0.1,))
FOUND = SearchResult(0.5, 1.0, True, 3, ("a",), "int16", rq.QConfigMapping().to_dict(), ("b",))

#: One value of each class, with as many fields as may be other than their defaults.
VALUES = [
    SPEC,
    *(rq.QParams(np.float32([0.1, 3]), np.int32([1, 2]), "int8", -1),),  # pyright: ignore
    *(rq.QParams(np.float32(0.3), np.int32(3), "uint8"),),  # pyright: ignore
    *(TENSOR, QCONFIG, INFO, GROUP, replace(GROUP, observer=None), OPERATOR),
    rq.TensorConfig(rq.QSpec("uint8", is_dynamic=True)),
    plan.Plan((OPERATOR,), (GROUP,), {"w": ("w", "w:2")}),
    rq.config.Accumulator(20, rq.config.Overflow.WRAP, rq.config.OverflowBound.WORST_CASE),
    rq.config.DTypeWithConstraints("int8", (rq.config.Scheme.AFFINE,), quant_min_lower_bound=-127),
    rq.config.DTypeConfig(
        input="int8", output=rq.config.DTypeWithConstraints("uint8", power_of_two=True)
    ),
    rq.config.DTypeConfig(input="int8", output="int8", accumulator="int14 wrap"),
    backend.FixedOutput("uint8", rq.config.Scheme.AFFINE, rq.observers.Fixed(1 / 256, 0)),
    *(ROW, FOUND, SpeedResult(1.0, 0.5, ("a",), {"global": "float"})),
    InterfaceValue("x", "uint8", "uint8", (0.5,), (3,)),
    GuardResult(4, 30.0, reverted=("a", "b"), worst=12.0),
    plan.PassedOver("swell", "only every second Tuesday", "come again"),
    Ledger((ROW,), "x86", "fast", search=FOUND, choices={"weights": "fitted"}),
]
each_value = pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
#: Written only: a report for people and programs.
WRITTEN = {accumulators.AccumulatorRow, accumulators.AccumulatorReport}


def list_classes(base: type) -> set[type]:
    below = {kind for one in base.__subclasses__() for kind in (one, *list_classes(one))}
    return {kind for kind in below if kind.__module__.startswith("relayquant.")}


def test_values__one_of_each_class():
    kinds = list_classes(PlainFields) - list_classes(NamedSettings) - WRITTEN
    assert kinds - {PlainSettings, NamedSettings} == {type(value) for value in VALUES}


@each_value
def test_from_dict__what_to_dict_wrote(value):
    data = json.loads(json.dumps(value.to_dict(), allow_nan=False))
    assert type(value).from_dict(data) == value


@each_value
def test_from_dict__unknown_key(value):
    data = value.to_dict()
    key = next(iter(data))
    with pytest.raises(ConfigError, match=rf"here.* has no key '{key}s'\. .*'{key}'"):
        type(value).from_dict({**data, f"{key}s": 1}, "here")


@each_value
def test_from_dict__missing_key(value):
    for key in set(list_required(type(value))) & set(value.to_dict()):
        data = {name: entry for name, entry in value.to_dict().items() if name != key}
        with pytest.raises(ConfigError, match=rf"here.* lacks '{key}'"):
            type(value).from_dict(data, "here")


@each_value
@pytest.mark.parametrize("data", [None, 3, [], ["dtype"], {1: 2}])
def test_from_dict__no_dict(value, data):
    with pytest.raises(ConfigError, match=r"here is .*; allowed: a dict with text keys"):
        type(value).from_dict(data, "here")


@each_value
def test_from_dict__a_wrong_value_names_its_path(value):
    """Enums, lists and dicts, as the values hold them; texts and numbers are the classes' own."""
    data = value.to_dict()
    for field in fields(value):
        key, held = find_key(field), getattr(value, field.name)
        if key not in data or not isinstance(held, enum.Enum | tuple | dict | PlainFields):
            continue
        with pytest.raises(ConfigError, match=rf"here\.{key}\b"):
            type(value).from_dict({**data, key: 3.5}, "here")


def test_from_dict__path_through_lists_and_dicts():
    data = plan.Plan((OPERATOR,), (GROUP,), {"w": ("w",)}).to_dict()
    data["operators"][0]["operands"] = [["weight", "w", "w"]]
    with pytest.raises(ConfigError, match=r"p\.operators\[0\]\.operands\[0\] is .*list of 2"):
        plan.Plan.from_dict(data, "p")
    data = plan.Plan((OPERATOR,), (GROUP,), {"w": ("w",)}).to_dict()
    data["groups"][0]["spec"]["scheme"] = "affin"
    with pytest.raises(ConfigError, match=r"p\.groups\[0\]\.spec\.scheme is 'affin'.*'affine'"):
        plan.Plan.from_dict(data, "p")
    with pytest.raises(ConfigError, match=r"p\.value_groups\.w is 'w'; allowed: a list"):
        plan.Plan.from_dict({**data, "groups": [], "value_groups": {"w": "w"}}, "p")


def test_to_dict__a_class_of_the_users_own():
    """`NamedSettings` need no annotations that can be evaluated."""
    data = rq.observers.Percentile(99.5).to_dict()
    assert data["name"] == "Percentile"
    assert NamedSettings.from_dict(data) == rq.observers.Percentile(99.5)


#: "file:class" -> why its fields are not its plain form.
OWN_FORMS = {
    "base/plain_data.py:PlainFields": "the one place",
    "base/plain_data.py:PlainSettings": "without None",
    "base/plain_data.py:NamedSettings": "with the name of its class",
    "base/qtypes.py:QSpec": "without is_dynamic where it is False",
    "ir/plan.py:SharedQParams": "the fields of `info` among the others; a callable is left out",
    "ir/ledger.py:Ledger": "the order in which it is read",
    "config/qconfig.py:TensorConfig": "a callable has no plain form",
    "stages/calibration/weights/ranges.py:RelativeMSE": "without the function of its consumer",
    "config/dtypes.py:DTypeConfig": "a dtype without constraints by name",
    "config/backend.py:PatternConfig": "the pattern by name",
    "config/backend.py:BackendConfig": "patterns and rules by name",
    "config/mapping.py:MappingRule": "its kind is the key of the list it is in",
    "config/mapping.py:QConfigMapping": "lines by kind",
    "analysis/accumulators.py:AccumulatorRow": "with what follows from its fields",
    "formats/readers/names.py:SourceNode": "an attribute of modules, not written where empty",
}


def test_sources__no_form_is_written_by_hand():
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}:{kind.name}"
        for module, path in SOURCES.items()
        for kind in list_nodes(module)
        if isinstance(kind, ast.ClassDef)
        if any(isinstance(f, ast.FunctionDef) and f.name == "to_dict" for f in kind.body)
    }
    assert found == set(OWN_FORMS)
