"""Attention of float modules, operator by operator: one kernel, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from test_floating import const, list_operators, make_module
from tvm import relax

import relayquant as rq
from relayquant.codegen import passes
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.masked_attention import lower_masked_attention

TARGET = resolve_target()
op = relax.op
#: Operands of the module: x, keys, values of two heads, and a mask.
SHAPES = ((1, 2, 96, 16), (1, 2, 48, 16), (1, 2, 48, 32), (96, 48))
#: The same with scores that fit no near cache.
LARGE = ((1, 200, 96, 16), (1, 200, 48, 16), (1, 200, 48, 32), (96, 48))


def attend(emit_scores, mask=op.add, softmax=op.nn.softmax):
    """A module that computes softmax(mask(emit_scores(x, columns), m)) @ values."""

    def emit(bb, x, keys, values, m):
        columns = bb.emit(op.permute_dims(keys, [0, 1, 3, 2]))
        score = bb.emit(emit_scores(bb, x, columns))
        score = score if mask is None else bb.emit(mask(score, m))
        return bb.emit(op.matmul(bb.emit(softmax(score, axis=-1)), values))

    return emit


def scale(bb, score, number=0.25):
    return op.multiply(bb.emit(score), relax.const(np.float32(number)))


def run(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    vm = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    return vm["main"](*[tvm.runtime.tensor(each) for each in arrays]).numpy()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("emit", "factor", "mask"),
    [
        (attend(lambda bb, x, k: scale(bb, op.matmul(x, k))), 0.25, True),
        (attend(lambda bb, x, k: op.matmul(x, k)), 1, True),
        (attend(lambda bb, x, k: op.matmul(x, k), mask=None), 1, False),
        (
            attend(
                lambda bb, x, k: op.divide(bb.emit(op.matmul(x, k)), relax.const(np.float32(4)))
            ),
            0.25,
            True,
        ),
        (
            attend(lambda bb, x, k: scale(bb, op.matmul(x, k)), mask=lambda s, m: op.add(m, s)),
            0.25,
            True,
        ),
    ],
)
def test_lower_masked_attention__one_kernel_with_the_same_bits(emit, factor, mask, monkeypatch):
    shapes = SHAPES if mask else LARGE
    mod = make_module(emit, *shapes)
    assert list_operators(lower_masked_attention(mod, TARGET)) == ["masked_attention"]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, "float32") for shape in shapes]
    arrays[3][:, 30:] = -1e9
    got = run(mod, *arrays)
    monkeypatch.setattr(passes, "lower_masked_attention", lambda mod, _: mod)
    np.testing.assert_array_equal(got, run(mod, *arrays))
    x, keys, values, added = (each.astype("float64") for each in arrays)
    score = x @ keys.swapaxes(-1, -2) * factor + (added if mask else 0)
    power = np.exp(score - score.max(-1, keepdims=True))
    np.testing.assert_allclose(
        got, power / power.sum(-1, keepdims=True) @ values, rtol=1e-4, atol=1e-5
    )


def test_lower_masked_attention__keys_in_another_order_are_transposed_first():
    def emit(bb, x, keys, values):
        columns = bb.emit(op.permute_dims(keys, [0, 2, 3, 1]))
        score = bb.emit(op.matmul(x, columns))
        return bb.emit(op.matmul(bb.emit(op.nn.softmax(score, -1)), values))

    shapes = (1, 200, 96, 16), (1, 48, 200, 16), (1, 200, 48, 16)
    mod = make_module(emit, *shapes)
    lowered = lower_masked_attention(mod, TARGET)
    assert list_operators(lowered) == ["moved_rows", "masked_attention"]
    rng = np.random.default_rng(0)
    x, keys, values = (rng.standard_normal(shape, "float32") for shape in shapes)
    power = np.exp(x.astype("float64") @ keys.transpose(0, 2, 3, 1))
    expected = power / power.sum(-1, keepdims=True) @ values
    np.testing.assert_allclose(run(mod, x, keys, values), expected, rtol=1e-3, atol=1e-4)


def read_twice(bb, x, keys, values, m):
    columns = bb.emit(op.permute_dims(keys, [0, 1, 3, 2]))
    power = bb.emit(op.nn.softmax(bb.emit(op.matmul(x, columns)), -1))
    return bb.emit(relax.Tuple([power, bb.emit(op.matmul(power, values))]))


def of_columns(bb, x, columns, values, m):
    power = bb.emit(op.nn.softmax(bb.emit(op.matmul(x, columns)), -1))
    return bb.emit(op.matmul(power, values))


def plain(bb, x, k):
    return op.matmul(x, k)


N = tvm.tirx.Var("n", "int64")
REFUSED = {
    "powers that are a result": (read_twice, SHAPES),
    "keys that are columns": (of_columns, (SHAPES[0], (1, 2, 16, 48), *SHAPES[2:])),
    "a factor for each key": (
        attend(lambda bb, x, k: op.multiply(bb.emit(op.matmul(x, k)), const(bb.rng, 48))),
        SHAPES,
    ),
    "a quotient that is no product": (
        attend(lambda bb, x, k: op.divide(bb.emit(op.matmul(x, k)), relax.const(np.float32(3)))),
        SHAPES,
    ),
    "a softmax along rows": (
        attend(plain, softmax=lambda score, axis: op.nn.softmax(score, axis=-2)),
        SHAPES,
    ),
    "another function": (attend(plain, mask=op.maximum), SHAPES),
    "a mask of one key": (attend(plain), (*SHAPES[:3], (96, 1))),
    "scores that fit a cache": (attend(plain, mask=None), SHAPES),
    "few rows": (attend(plain), ((1, 2, 1, 16), *SHAPES[1:3], (1, 48))),
    "rows of any number": (attend(plain), ((1, 2, N, 16), *SHAPES[1:3], (1, 48))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_lower_masked_attention__what_has_no_kernel_stays(why):
    emit, shapes = REFUSED[why]

    def draw(bb, *args):
        bb.rng = np.random.default_rng(0)
        return emit(bb, *args)

    mod = make_module(draw, *shapes)
    with hear_declined() as heard:
        lowered = lower_masked_attention(mod, TARGET)
    tvm.ir.assert_structural_equal(lowered, mod)
    assert heard


def test_compile__attention_in_bf16_keeps_its_products_of_bf16(monkeypatch):
    seen = []

    def note(mod, _):
        seen.append(mod)
        return mod

    monkeypatch.setattr(passes, "lower_masked_attention", note)
    mod = make_module(attend(plain), *SHAPES)
    rq.compile(mod, "llvm -mtriple=x86_64-linux-gnu -mcpu=znver4", precision="bf16")
    assert not seen
    rq.compile(mod, "llvm -mtriple=x86_64-linux-gnu -mcpu=znver4")
    assert len(seen) == 1
