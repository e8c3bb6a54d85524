"""Fused loops over contiguous axes: their positions are not divided, and the values are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.schedule.flat_positions import (
    find_position,
    flatten_positions,
)
from relayquant.codegen.schedule.schedule_pass import schedule_functions
from relayquant.ir.rewrite.function import make_main

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
#: Sizes that no vector of bytes, or of floats, divides but together: windows of a transformer,
#: prime numbers, and what TVM's simplification takes apart.
SIZES = [(3, 49, 32), (7, 9, 20), (2, 49, 49), (5, 12, 24), (6, 2, 49), (64, 3, 36), (4, 3, 7, 10)]


def make_module(body, shape, dtype):
    x = relax.Var("x", relax.TensorType(shape, dtype))
    return make_main([x], lambda _: body(x))


def take_second(x):
    return op.strided_slice(x, [0], [1], [2])


def add_outer(x):
    """A sum with a tensor that has one number for each of the first axis."""
    return op.add(
        x, relax.const(np.arange(3, dtype=str(x.ty.dtype)).reshape(3, *[1] * (x.ty.ndim - 1)))
    )


def double(x):
    return op.add(x, x)


def list_divisions(func):
    """Divisions that are left where TVM has made one position of the indices."""
    flat = tvm.transform.Sequential(
        [
            tvm.s_tir.transform.ConvertBlocksToOpaque(),
            tvm.s_tir.transform.LowerOpaqueBlock(),
            tvm.tirx.transform.FlattenBuffer(),
        ]
    )(tvm.IRModule({"main": func}))["main"]
    found = []
    tvm_ffi.structural_walk(flat.body, ((tirx.FloorDiv, tirx.FloorMod), found.append))
    return found


def schedule(body, shape, dtype):
    mod = relax.transform.LegalizeOps()(make_module(body, shape, dtype))
    mod = schedule_functions(mod, TARGET)
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    return func


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("body", [take_second, double, add_outer])
def test_flatten_positions__values_and_no_division(body, sizes, dtype):
    shape = (3, *sizes)
    func = schedule(body, shape, dtype)
    assert not list_divisions(flatten_positions(func))
    mod = make_module(body, shape, dtype)
    vm = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    x = np.random.default_rng(0).integers(0, 120, shape).astype(dtype)
    expected = {
        take_second: lambda: x[1:2],
        double: lambda: x + x,
        add_outer: lambda: x + np.arange(3, dtype=dtype).reshape(3, *[1] * len(sizes)),
    }[body]()
    got = vm["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(got, expected)


def test_flatten_positions__tvm_alone_divides():
    """What the pass is for. If TVM learns it, the pass can go."""
    assert any(list_divisions(schedule(take_second, (3, *sizes), "uint8")) for sizes in SIZES)


def test_flatten_positions__other_memory_stays():
    """A block that reads an allocation: TVM places it by the accesses that it sees."""
    func = schedule(double, (3, 7, 9, 20), "uint8")
    param = func.params[0]
    local = tirx.decl_buffer(param.shape, param.dtype, "local")
    body = tvm_ffi.structural_map(
        func.body, (tirx.Var, lambda var: local if var.same_as(param) else var)
    )
    moved = func.with_body(body)
    assert flatten_positions(moved) is moved


def test_find_position__only_what_fusing_makes():
    i, n = tirx.Var("i", "int64"), lambda value: tirx.IntImm("int64", value)
    fused = [
        tirx.floordiv(i, n(60)),
        tirx.floordiv(tirx.floormod(i, n(60)), n(20)),
        tirx.floormod(i, n(20)),
    ]
    assert find_position(fused, [4, 3, 20]).same_as(i)
    assert find_position(fused, [4, 5, 20]) is None
    assert find_position([*fused[:2], i], [4, 3, 20]) is None
    assert find_position([fused[0], i, fused[2]], [4, 3, 20]) is None
