"""Constants that are equal are one object, whichever rule made them, through all stages."""

import numpy as np
import pytest
import tvm
from module_constants import list_constants
from tvm import relax

import relayquant as rq
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run as run_numpy
from relayquant.ir.rewrite.constants import share_constants
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.conversion import fold
from relayquant.stages.preparation import canonical

RNG = np.random.default_rng(3)


def make_tied_matmuls():
    weight = relax.const(RNG.normal(size=(32, 32)).astype("float32") / 6)
    x = relax.Var("x", relax.TensorType((8, 32), "float32"))

    def emit(builder):
        hidden = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(weight))))
        hidden = builder.emit(relax.op.nn.relu(hidden))
        return relax.op.matmul(hidden, builder.emit(relax.op.permute_dims(weight)))

    def compute(x):
        real = weight.value.numpy().astype("float64").T
        return np.maximum(x @ real, 0) @ real

    return make_main([x], emit), compute


def make_conv_used_twice():
    weight = relax.const(RNG.normal(size=(8, 8, 3, 3)).astype("float32") / 6)
    x = relax.Var("x", relax.TensorType((1, 8, 6, 6), "float32"))

    def emit(builder):
        hidden = builder.emit(relax.op.nn.conv2d(x, weight, padding=1))
        return relax.op.nn.conv2d(builder.emit(relax.op.nn.relu(hidden)), weight, padding=1)

    def conv(x):
        padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        return np.einsum("nchwij,ocij->nohw", windows, weight.value.numpy())

    return make_main([x], emit), lambda x: conv(np.maximum(conv(x), 0))


@pytest.mark.parametrize("make", [make_tied_matmuls, make_conv_used_twice])
def test_shared_weight__stays_one_constant_through_all_stages(make, monkeypatch):
    mod, compute = make()
    shape = [int(size) for size in mod["main"].params[0].ty.shape]
    data = [{"x": RNG.normal(size=shape).astype("float32")} for _ in range(4)]
    prepared = rq.prepare(mod).mod
    (float_weight,) = list_constants(prepared["main"], 64)
    expected = compute(data[0]["x"])
    np.testing.assert_allclose(run_numpy(prepared, data[0])[0], expected, rtol=1e-4, atol=1e-5)

    shared = rq.quantize(mod, None, data, effort="fast")
    (weight,) = list_constants(shared["main"], 64)
    assert str(weight.ty.dtype) == "int8"
    assert weight.value.numpy().size == float_weight.value.numpy().size
    saved = tvm.ir.save_json(shared)
    loaded = tvm.ir.load_json(saved)
    assert len(list_constants(loaded["main"], 64)) == 1
    (got,) = run_numpy(loaded, data[0])
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()

    # Without sharing: the same bits, and a second copy of the weight in memory and in the file.
    for stage in (canonical, fold):
        monkeypatch.setattr(stage, "share_constants", lambda mod: mod)
    apart = rq.quantize(mod, None, data, effort="fast")
    assert len(list_constants(apart["main"], 64)) == 2
    np.testing.assert_array_equal(run_numpy(apart, data[0])[0], got)
    assert len(tvm.ir.save_json(apart)) - len(saved) > weight.value.numpy().nbytes


def test_weights_fitted_for_each_use__are_two():
    mod, _ = make_tied_matmuls()
    data = [{"x": RNG.normal(size=(8, 32)).astype("float32")} for _ in range(4)]
    weights = list_constants(rq.quantize(mod, None, data, effort="balanced")["main"], 64)
    assert len(weights) == 2
    first, second = (weight.value.numpy() for weight in weights)
    assert (first != second).any()  # equal ones would have been one


#: arrays, whether they are one constant afterwards
PAIRS = [
    (np.float32(1.0), np.float32(1.0), True),
    (np.float32([0.0]), np.float32([-0.0]), False),
    (np.float32([np.nan]), np.float32([np.nan]), True),
    (np.float32([0.0]), np.int32([0]), False),
    (np.float32([1.0, 2.0]), np.float32([[1.0, 2.0]]), False),
    (np.int8([1, 2]), np.uint8([1, 2]), False),
    (np.zeros((0, 2), "float32"), np.zeros((0, 2), "float32"), True),
    (np.float16([3]), np.float16([3]), True),
    (np.array([True]), np.array([True]), True),
]


@pytest.mark.parametrize(("left", "right", "are_one"), PAIRS)
def test_share_constants__type_and_bits(left, right, are_one):
    consts = [relax.const(array, str(array.dtype)) for array in (left, right)]
    before = make_main([], lambda builder: relax.Tuple(consts))
    after = share_constants(before)
    assert len(list_constants(before["main"], 0)) == 2
    assert len(list_constants(after["main"], 0)) == (1 if are_one else 2)
    (results, expected) = (run_numpy(mod, {}) for mod in (after, before))
    for result, wanted in zip(results, expected, strict=True):
        assert result.tobytes() == wanted.tobytes()
        assert result.dtype == wanted.dtype
        assert result.shape == wanted.shape


def test_share_constants__functions_of_a_module_without_main():
    """A language model has prefill and decode."""
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    add = lambda _: relax.op.add(x, relax.const(np.float32([1, 2])))  # noqa: E731
    functions = {name: make_main([x], add)["main"] for name in ("prefill", "decode")}
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    before = tvm.IRModule(named)
    after = share_constants(before)
    tvm.ir.assert_structural_equal(after, before)
    (left,), (right,) = (list_constants(after[name]) for name in named)
    assert left.same_as(right)


def test_share_constants__keeps_names_attributes_and_other_functions():
    x = relax.Var("x", relax.TensorType((2,), "float32"))

    def emit(builder):
        y = builder.emit(relax.op.add(x, relax.const(np.float32([1, 2]))), "first")
        return builder.emit(relax.op.add(y, relax.const(np.float32([1, 2]))), "second")

    before = make_main([x], emit).with_attr("kept", "yes")
    z = relax.Var("z", x.ty)
    other = make_main([z], lambda builder: relax.op.nn.relu(z))["main"]
    before["other"] = other.with_attr("global_symbol", "other")
    after = share_constants(before)
    assert len(list_constants(before["main"])) == 2
    assert len(list_constants(after["main"])) == 1
    tvm.ir.assert_structural_equal(after, before)
    assert after.attrs["kept"] == "yes"
    assert share_constants(after) is after
    relax.analysis.well_formed(after)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_compile__weight_of_several_products_is_packed_once(dtype, tmp_path):
    """The steps of an unrolled recurrent layer all multiply by one weight."""
    size, steps = 256, 16
    weight = RNG.integers(-99, 99, (size, size)).astype(dtype)
    x = relax.Var("x", relax.TensorType((4, size), "float32"))

    def emit(builder):
        value = x
        for _ in range(steps):
            if dtype == "float32":
                value = builder.emit(relax.op.matmul(value, relax.const(weight.T.copy(), dtype)))
            else:
                rounded = builder.emit(qnn.quantize(value, 0.05, 0, out_dtype="int8"))
                total = qnn.dense(rounded, relax.const(weight, dtype), 0, 0, 0.05, 0.001)
                value = builder.emit(relax.op.astype(builder.emit(total), "float32"))
            value = builder.emit(relax.op.multiply(value, relax.const(np.float32(1e-3))))
        return value

    path = tmp_path / "model.so"
    rq.compile(make_main([x], emit)).export_library(str(path))
    assert path.stat().st_size < 4 * weight.nbytes + 200_000
