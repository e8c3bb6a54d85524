"""Operators on constants become constants, also those whose result is a tuple."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main, build_model
from operator_names import list_operators
from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

import relayquant as rq
from relayquant.codegen.rewrites.known_values import fold_known_values
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.ir.reference.folding import MAX_GROWTH

NUMBERS = np.arange(8, dtype="float32").reshape(2, 4)


def make(*numbers: float) -> relax.Expr:
    return relax.const(np.array(numbers, "float32").reshape(2, -1))


def list_left(mod: tvm.IRModule) -> list[str]:
    """The operators of main after its constants are folded."""
    folded = fold_known_values(mod)
    relax.analysis.check_well_formed(folded)
    return list_operators(folded)


def test_split__of_a_constant_in_compilation():
    constant, left, right = relax.const(NUMBERS), make(0, 1, 4, 5), make(2, 3, 6, 7)

    @as_main
    def before(x: R.Tensor((2, 2), "float32")):
        parts = R.split(constant, 2, 1)
        return R.multiply(R.add(x, parts[0]), parts[1])

    @as_main
    def expected(x: R.Tensor((2, 2), "float32")):
        return R.multiply(R.add(x, left), right)

    tvm.ir.assert_structural_equal(convert_layout(before), expected, map_free_vars=True)
    (found,) = rq.Executor(rq.compile(before)).run("main", [np.ones((2, 2), "float32")])
    np.testing.assert_array_equal(found, (1 + NUMBERS[:, :2]) * NUMBERS[:, 2:])


def test_batch_norm__of_a_constant_in_compilation():
    data, wanted = relax.const(NUMBERS), relax.const(3 * (NUMBERS - 1) + 2)
    three, two, one = (relax.const(np.full(4, value, "float32")) for value in (3, 2, 1))

    @as_main
    def before(x: R.Tensor((2, 4), "float32")):
        return R.add(x, R.nn.batch_norm(data, three, two, one, one, 1, 0.0, training=False)[0])

    @as_main
    def expected(x: R.Tensor((2, 4), "float32")):
        return R.add(x, wanted)

    tvm.ir.assert_structural_equal(convert_layout(before), expected, map_free_vars=True)


def test_tuple__of_a_tuple_and_one_that_main_returns():
    """A name of the tuple, its fields in a tuple of others, and an operator on all fields."""
    constant = relax.const(NUMBERS)

    def body(emit, x):
        parts = emit("parts", op.split(constant, 2, 1))
        again = emit("again", parts)
        both = emit("both", op.concat(again, 1))
        pair = emit("pair", relax.Tuple([x, emit("first", relax.TupleGetItem(again, 0))]))
        last = emit("last", relax.TupleGetItem(pair, 1))
        return emit("sum", op.add(op.add(x, both), op.concat([last, last], 1)))

    mod = build_model(body, (2, 4))
    assert list_left(mod) == ["add", "add"]
    x = np.ones((2, 4), "float32")
    (found,) = rq.Executor(rq.compile(mod)).run("main", [x])
    np.testing.assert_array_equal(found, x + NUMBERS + np.tile(NUMBERS[:, :2], 2))


@pytest.mark.parametrize(
    "dtype", ["int1", "int2", "int4", "uint1", "uint2", "float6_e2m3fn", "int128"]
)
@pytest.mark.parametrize("name", ["astype", "zeros"])
def test_constant__of_elements_that_numpy_stores_otherwise_stays(name, dtype):
    """Less than a byte (but for float4), or more than numpy has."""

    def body(emit, _x):
        if name == "zeros":
            return emit("y", op.zeros((4,), dtype))
        return emit("y", op.astype(relax.const(np.float32([1, 0, 1, 0])), dtype))

    assert list_left(build_model(body, (1,))) == [name]


@pytest.mark.parametrize(
    "dtype", ["bool", "bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn", "uint64"]
)
def test_constant__of_whole_bytes_or_float4_is_folded(dtype):
    numbers = relax.const(np.float32([1, 0, 1, 0]))
    mod = build_model(lambda e, _: e("y", op.astype(numbers, dtype)), (1,))
    assert list_left(mod) == []
    (found,) = rq.reference.run(fold_known_values(mod), [np.zeros(1, "float32")])
    assert found.dtype.name == dtype
    np.testing.assert_array_equal(found.astype("float32"), [1, 0, 1, 0])


def test_float4__of_an_odd_number_of_constants_compiles():
    """TVM compiles no cast to float4, so only a constant has this type."""
    numbers, rounded = np.float32([1.3, -0.2, 2.4, 9, 5]), np.float32([1.5, 0, 2, 6, 4])

    def body(emit, x):
        narrow = emit("narrow", op.astype(relax.const(numbers), "float4_e2m1fn"))
        return emit("y", op.add(x, emit("wide", op.astype(narrow, "float32"))))

    mod = build_model(body, (5,))
    (found,) = rq.Executor(rq.compile(mod)).run("main", [np.zeros(5, "float32")])
    np.testing.assert_array_equal(found, rounded)


def test_constant__of_many_elements_is_folded_if_its_operands_have_as_many():
    large = relax.const(np.zeros((2, MAX_GROWTH), "int8"))
    assert list_left(build_model(lambda e, _: e("y", op.permute_dims(large)), (1,))) == []


#: Operators that are more than their result.
EFFECTS = {
    "memory without values": lambda: op.builtin.alloc_tensor(relax.ShapeExpr([8]), "float32", 0),
    "bits as another dtype": lambda: op.memory.view(relax.const(NUMBERS), (8,), "int32"),
    "an assertion": lambda: op.assert_op(relax.const(np.array(True)), format="never"),
    "a function": lambda: op.call_pure_packed(
        "vm.builtin.copy", relax.const(NUMBERS), ty_args=relax.TensorType((2, 4), "float32")
    ),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_operator__with_effects_stays(effect):
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        value = builder.emit(EFFECTS[effect]())
        builder.emit_func_output(value)
    mod = builder.finalize()
    mod["main"] = mod["main"].with_attr("relax.force_pure", True)
    assert len(list_left(mod)) == 1


@pytest.mark.parametrize(("size", "stays"), [(MAX_GROWTH // 2, False), (MAX_GROWTH // 2 + 1, True)])
def test_tuple__whose_fields_are_large_together_stays(size, stays):
    def body(emit, _x):
        pair = emit("pair", op.nn.dropout(relax.const(np.zeros(size, "int8")), 0.0))
        return emit("y", relax.TupleGetItem(pair, 0))

    assert list_left(build_model(body, (1,))) == (["nn.dropout"] if stays else [])
