"""The plan: look-ups by name, and what they say when the name is wrong."""

from __future__ import annotations

import dataclasses

import pytest
from float_models import MAP, build_model
from tvm.relax import op

import relayquant as rq


@pytest.fixture(scope="module")
def plan():
    def body(emit, x):
        return emit.conv("out", emit("r", op.nn.relu(emit.conv_bias("a", x))))

    return rq.prepare(build_model(body, MAP)).plan


def test_plan__finds_operators_and_groups(plan):
    assert plan.operator("r").values == ("a.conv", "a", "r")
    assert plan.has_operator("out")
    assert not plan.has_operator("a")
    assert plan.group("r").key == "r"
    assert plan.group("r:weight").constant == ("r", "weight")
    assert [group.key for group in plan.weights] == ["r:weight", "out:weight"]
    assert [group.key for group in plan.activations] == ["x", "r"]


def test_plan__wrong_names_are_answered_with_near_ones(plan):
    with pytest.raises(rq.ConfigError, match=r"no operator 'ou'.*'?out'?"):
        plan.operator("ou")
    with pytest.raises(rq.ConfigError, match=r"no quantized value 'r:wieght'.*r:weight"):
        plan.group("r:wieght")


def test_plan__is_frozen(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.operator("r").name = "q"
