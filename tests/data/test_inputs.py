"""Inputs of a model as data sets are checked against them."""

from __future__ import annotations

import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import relax as R

from relayquant.data.item import describe_inputs
from relayquant.errors import ModelError
from relayquant.ir.rewrite.function import make_main


@as_main
def two_inputs(left: R.Tensor((2, 3), "float32"), right: R.Tensor(("n", 4), "int32")):
    return R.add(left, left)


def build_identity(ty: relax.Type) -> tvm.IRModule:
    """main(x) = x for an x of this type."""
    x = relax.Var("x", ty)
    return make_main([x], lambda _: x)


def test_describe_inputs__names_shapes_dtypes():
    left, right = describe_inputs(two_inputs)
    assert (left.name, left.shape, left.dtype) == ("left", (2, 3), "float32")
    assert (right.name, right.shape, right.dtype) == ("right", ("n", 4), "int32")


def test_describe_inputs__unknown_sizes_get_names():
    (x,) = describe_inputs(build_identity(relax.TensorType(dtype="float32", ndim=2)))
    assert x.shape == ("x.0", "x.1")


def test_describe_inputs__unknown_rank_is_an_error():
    with pytest.raises(ModelError, match=r"'x'.*number of dimensions"):
        describe_inputs(build_identity(relax.TensorType(dtype="float32", ndim=-1)))
