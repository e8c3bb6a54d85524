"""Convolutions of one value whose results are added: the numbers stay, and the operators become
one.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import relax as R

from relayquant.ir.rewrite.expressions import list_bindings, op_name

RNG = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def const(array: np.ndarray) -> relax.Expr:
    return relax.const(np.asarray(array, "float32"))


def build(write, shape=(2, 4, 9, 8)) -> tvm.IRModule:
    """The module whose main gives write(x, conv); conv makes a convolution of an input."""
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(write(x, lambda call: bb.emit(call)))
        bb.emit_func_output(out)
    return bb.get()


def list_operators(mod: tvm.IRModule) -> list[str]:
    return [op_name(binding.value).removeprefix("relax.") for binding in list_bindings(mod["main"])]


def conv(x, *kernel, outputs=4, inputs=4, bias=True, size=1.0, **settings):
    """A convolution with drawn weights, and a bias for each channel."""
    weight = const(size * draw(outputs, inputs, *kernel))
    make = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d}[len(kernel)]
    result = make(x, weight, **settings)
    return relax.op.add(result, const(draw(1, outputs, *[1] * len(kernel)))) if bias else result


def depthwise(x, *kernel, **settings):
    return conv(x, *kernel, inputs=1, groups=4, **settings)


def scaled(x):
    return relax.op.add(relax.op.multiply(x, const(draw(1, 4, 1, 1))), const(draw(1, 4, 1, 1)))


add = relax.op.add
JOINED = {
    "3x3 and 1x1": lambda x, emit: add(conv(x, 3, 3, padding=1), conv(x, 1, 1)),
    "1x1 and 3x3": lambda x, emit: add(conv(x, 1, 1, bias=False), conv(x, 3, 3, padding=1)),
    "without biases": lambda x, emit: add(conv(x, 1, 1, bias=False), conv(x, 1, 1, bias=False)),
    "steps": lambda x, emit: add(
        depthwise(x, 5, 5, padding=2, strides=2), depthwise(x, 3, 3, padding=1, strides=2)
    ),
    "the data": lambda x, emit: add(depthwise(x, 3, 3, padding=1), x),
    "the data first": lambda x, emit: add(x, depthwise(x, 3, 3, padding=1)),
    "scaled data": lambda x, emit: add(depthwise(x, 3, 3, padding=1), scaled(x)),
    "data scaled otherwise": lambda x, emit: add(
        relax.op.subtract(
            const(draw(1, 4, 1, 1)), relax.op.divide(x, const(1 + draw(1, 4, 1, 1) ** 2))
        ),
        conv(x, 3, 3, padding=1),
    ),
    "groups": lambda x, emit: add(conv(x, 3, 3, inputs=2, groups=2, padding=1), scaled(x)),
    "far values": lambda x, emit: add(conv(x, 3, 3, padding=2, dilation=2), conv(x, 1, 1)),
    "far values in both": lambda x, emit: add(
        conv(x, 5, 3, padding=(4, 2), dilation=2), conv(x, 3, 3, padding=2, dilation=2)
    ),
    "uneven pads": lambda x, emit: add(
        conv(x, 3, 3, padding=1), conv(x, 2, 2, padding=(0, 0, 1, 1))
    ),
    "RepViT": lambda x, emit: add(add(depthwise(x, 3, 3, padding=1), depthwise(x, 1, 1)), x),
    "MobileOne": lambda x, emit: add(add(scaled(x), conv(x, 1, 1)), conv(x, 1, 1)),
}


@pytest.mark.parametrize("name", JOINED)
def test_branches__are_one_convolution_with_the_same_numbers(name, check_same_numbers):
    prepared = check_same_numbers(build(JOINED[name]), draw(2, 4, 9, 8))
    assert list_operators(prepared) == ["nn.conv2d", "add"]


def test_branches__of_one_axis_and_of_channels_last(check_same_numbers):
    def flat(x, emit):
        return add(conv(x, 3, padding=1), relax.op.multiply(x, const(draw(1, 4, 1))))

    prepared = check_same_numbers(build(flat, (2, 4, 9)), draw(2, 4, 9))
    assert list_operators(prepared) == ["nn.conv1d", "add"]

    def last(x, emit):
        parts = [
            relax.op.nn.conv2d(
                x, const(draw(k, k, 4, 4)), padding=k // 2, data_layout="NHWC", kernel_layout="HWIO"
            )
            for k in (1, 3)
        ]
        return add(add(*parts), relax.op.multiply(x, const(draw(4))))

    prepared = check_same_numbers(build(last, (2, 9, 8, 4)), draw(2, 9, 8, 4))
    assert list_operators(prepared) == ["nn.conv2d", "add"]


def test_branches__of_a_longer_sum(check_same_numbers):
    """What cannot be joined is added at the end, whatever the order of the sum."""

    def write(x, emit):
        other = emit(relax.op.nn.relu(x))
        first = add(other, conv(x, 3, 3, padding=1))
        return add(add(first, conv(x, 1, 1)), conv(x, 3, 3, padding=1))

    prepared = check_same_numbers(build(write), draw(2, 4, 9, 8))
    assert sorted(list_operators(prepared)) == ["add", "add", "nn.conv2d", "nn.relu"]


def test_branches__weights_are_added_where_they_read_the_same_data(check_prepared):
    wide, point = draw(4, 1, 3, 3), draw(4, 1, 1, 1)
    total = wide.copy()
    for value in (point, np.float32(1)):  # rounded after each
        total[:, :, 1:2, 1:2] += value
    w, p, joined, b = (const(a) for a in (wide, point, total, np.zeros((1, 4, 1, 1))))

    @as_main
    def before(x: R.Tensor(("n", 4, 8, 8), "float32")):
        c = R.nn.conv2d(x, w, padding=1, groups=4)
        d = R.nn.conv2d(x, p, groups=4)
        e = R.add(c, d)
        return R.add(e, x)

    @as_main
    def expected(x: R.Tensor(("n", 4, 8, 8), "float32")):
        c = R.nn.conv2d(x, joined, padding=1, groups=4)
        return R.add(c, b)

    check_prepared(before, expected)


def read_twice(x, emit):
    first = emit(conv(x, 3, 3, padding=1, bias=False))
    return add(add(first, conv(x, 1, 1)), relax.op.nn.relu(first))


STAY = {
    "other data": lambda x, emit: add(conv(x, 1, 1), conv(emit(relax.op.nn.relu(x)), 1, 1)),
    "steps and data": lambda x, emit: add(conv(x, 3, 3, padding=(2, 2, 9, 8), strides=2), x),
    "groups": lambda x, emit: add(conv(x, 1, 1), depthwise(x, 1, 1)),
    "a row and a column": lambda x, emit: add(
        conv(x, 3, 1, padding=(1, 0)), conv(x, 1, 3, padding=(0, 1))
    ),
    "other distances": lambda x, emit: add(
        conv(x, 3, 3, padding=1), conv(x, 3, 3, padding=2, dilation=2)
    ),
    "other distances that fit": lambda x, emit: add(
        conv(x, 5, 5, padding=2), conv(x, 3, 3, padding=2, dilation=2)
    ),
    "read by others": read_twice,
    "one value beside many small": lambda x, emit: add(
        conv(x, 7, 7, padding=3, size=0.01), relax.op.multiply(x, const(draw(1, 4, 1, 1)))
    ),
    "a residual": lambda x, emit: add(conv(x, 3, 3, padding=1), x),
}


@pytest.mark.parametrize("name", STAY)
def test_branches__that_are_not_one_convolution_stay(name, check_same_numbers):
    before = build(STAY[name])
    prepared = check_same_numbers(before, draw(2, 4, 9, 8))
    assert sorted(list_operators(prepared)) == sorted(list_operators(before))
