"""Reshapes behind what moves elements: which stay views, and that values do."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.schedule.fusion import KEEP_APART
from relayquant.ir.dialect.loops import OPAQUE
from relayquant.ir.rewrite.function import make_main

SHAPE = (2, 3, 20, 16)


def make_module(body, shape=SHAPE, dtype="uint8"):
    """main(x) of what `body(emit, x)` gives."""
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n if e == "n" else e for e in shape], dtype))
    return make_main([x], lambda builder: body(builder.emit, x))


def list_views(mod):
    """Names of the functions that the pass marks."""
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), KEEP_APART]
    marked = tvm.transform.Sequential(passes)(mod)
    return [
        gv.name_hint
        for gv, func in marked.functions.items()
        if isinstance(func, tvm.tirx.PrimFunc) and int(func.attrs["op_pattern"]) == OPAQUE
    ]


def turn(emit, x):
    return emit(op.permute_dims(x, [0, 2, 1, 3]))


def join(emit, x):
    return emit(op.reshape(x, (2, 20, 48)))


def join_heads(emit, x):
    return join(emit, turn(emit, x))


def join_and_add(emit, x):
    return emit(op.add(join_heads(emit, x), relax.const(np.uint8(3))))


def turn_join_and_turn(emit, x):
    return emit(op.permute_dims(join_heads(emit, x), [0, 2, 1]))


def reshape_alone(emit, x):
    return emit(op.reshape(x, (2, 3, 320)))


def behind_arithmetic(emit, x):
    return emit(op.reshape(emit(op.add(x, x)), (2, 3, 320)))


@pytest.mark.parametrize(
    ("body", "views"),
    [
        (join_heads, ["reshape"]),
        (join_and_add, ["reshape"]),
        (turn_join_and_turn, []),
        (reshape_alone, []),
        (behind_arithmetic, []),
    ],
)
def test_keep_views__behind_what_moves_elements(body, views):
    x = np.random.default_rng(0).integers(0, 200, SHAPE).astype("uint8")
    mod = make_module(body)
    assert list_views(mod) == views
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    (expected,) = rq.reference.run(mod, [x])
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), expected)


def test_keep_views__of_symbolic_sizes():
    def body(emit, x):
        n = x.ty.shape.values[2]
        return emit(op.reshape(turn(emit, x), (2, n, 48)))

    mod = make_module(body, (2, 3, "n", 16), "float32")
    x = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    expected = x.transpose(0, 2, 1, 3).reshape(2, 20, 48)
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), expected)
