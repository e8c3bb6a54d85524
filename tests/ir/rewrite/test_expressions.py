"""Calls on other operands: the type is kept, or inferred again."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.ir.rewrite.expressions import same_extents, with_operands


def make_var(shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def make_constant(shape, dtype="float32"):
    return relax.const(np.ones(shape, dtype), dtype)


CONV = relax.BlockBuilder().normalize(
    relax.op.nn.conv2d(make_var((1, 4, 9, 9)), make_constant((8, 4, 3, 3)))
)


@pytest.mark.parametrize(
    ("data", "weight", "is_kept"),
    [
        (make_var((1, 4, 9, 9)), make_var((8, 4, 3, 3)), True),
        (make_constant((1, 4, 9, 9)), make_constant((8, 4, 3, 3)), True),
        (make_var((1, 4, 11, 9)), make_var((8, 4, 3, 3)), False),
        (make_var((1, 4, 9, 9)), make_var((6, 4, 3, 3)), False),
        (make_var((1, 4, 9, 9), "float64"), make_var((8, 4, 3, 3), "float64"), False),
    ],
)
def test_with_operands__the_type_is_that_of_tvm(data, weight, is_kept):
    """Kept where the operands have the types of before, and what TVM infers in any case."""
    new = with_operands(CONV, [data, weight])
    assert new.ty.same_as(CONV.ty) == is_kept
    expected = Call(CONV.op, [data, weight], CONV.attrs, CONV.ty_args)
    got, want = (relax.BlockBuilder().normalize(call) for call in (new, expected))
    assert tvm_ffi.structural_equal(got.ty, want.ty)


def test_with_operands__integers_may_determine_a_type():
    """A constant in the place of a variable, and another constant, both of the same type."""
    index = make_var((2,), "int64")
    before = relax.BlockBuilder().normalize(relax.op.take(make_var((5, 3)), index, axis=0))
    table = before.args[0]
    assert with_operands(before, [table, make_var((2,), "int64")]).ty.same_as(before.ty)
    constant = make_constant((2,), "int64")
    assert not with_operands(before, [table, constant]).ty.same_as(before.ty)
    found = with_operands(with_operands(before, [table, constant]), [table, index])
    assert not found.ty.same_as(before.ty)


def test_same_extents__however_they_are_written():
    n, m, four = (*(tirx.Var(name, "int64") for name in "nm"), tirx.IntImm("int64", 4))
    assert same_extents([tirx.Mul(four, n), 3], [tirx.Mul(n, four), 3])
    assert same_extents([n * m], [m * n])
    assert not same_extents([n * 4], [m * 4])
    assert not same_extents([n], [four])
    assert not same_extents([n], [n, n])
