"""Calls of a user's functions: the error names function, file and line, and keeps the cause."""

from __future__ import annotations

import inspect
import json
from functools import partial

import numpy as np
import pytest
from float_models import build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.base.user_calls import call_user
from relayquant.errors import ConfigError


def find_number(function, text):
    """The number of the line of a function that holds a text, as the source says."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def divide():
    return 1 // 0


def call_deeper():
    return divide()


def ask_numpy():
    return np.reshape(np.ones(3), (2, 2))


def ask_python():
    return json.loads("{")


@pytest.mark.parametrize(
    ("function", "place", "text"),
    [
        (divide, divide, "1 // 0"),
        (call_deeper, divide, "1 // 0"),
        (ask_numpy, ask_numpy, "np.reshape"),
        (ask_python, ask_python, "json.loads"),
    ],
)
def test_call_user__names_the_line(function, place, text):
    with pytest.raises(ConfigError) as caught:
        call_user("Rule 'mine'", function)
    cause = caught.value.__cause__
    assert cause is not None
    number = find_number(place, text)
    assert str(caught.value) == (
        f"Rule 'mine' raised {type(cause).__name__}: {cause} ({__file__}:{number}) [RQ106]"
    )


def test_call_user__without_a_line_of_the_user_names_none():
    with pytest.raises(ConfigError, match=r"cannot reshape[^:]* \[RQ106\]$"):
        call_user("Rule", partial(np.reshape, np.ones(3), (2, 2)))


def test_quantize__names_the_line_of_a_broken_observer():
    def find_range(info, samples):
        return next(iter(samples)).maximum()

    mod = build_model(lambda emit, x: emit("relu", relax.op.nn.relu(emit.dense("a", x, 4))), (2, 4))
    with pytest.raises(ConfigError, match="raised AttributeError for value") as caught:
        rq.quantize(mod, None, draw_batches(mod, 1), observer=find_range, callbacks=())
    number = find_number(find_range, "maximum()")
    assert f" ({__file__}:{number})" in str(caught.value)
    assert isinstance(caught.value.__cause__, AttributeError)
