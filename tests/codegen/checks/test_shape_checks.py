"""Shapes that fit for some sizes only: numpy's result, or an error."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.codegen.checks.shapes import find_shape_checks
from relayquant.ir.dialect import qnn

op = relax.op


def make_reshape(shape, target, *, has_kernel: bool):
    """main(x): y = reshape(exp(x) or x); sizes are numbers and names."""
    sizes = {name: tirx.Var(name, "int64") for name in "nm"}

    def read(values):
        return [value(**sizes) if callable(value) else sizes.get(value, value) for value in values]

    x = relax.Var("x", relax.TensorType(read(shape), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            data = builder.emit(relax.op.exp(x)) if has_kernel else x
            y = builder.emit_output(relax.op.reshape(data, read(target)), "y")
        builder.emit_func_output(y)
    return builder.get()


def test_largest_size__that_a_function_declares_is_kept():
    """TVM plans memory for this size. With more rows, the run would end in an error of TVM."""
    mod = make_reshape(("n", "m"), ("n", "m"), has_kernel=True)
    mod = tvm.IRModule({"main": mod["main"].with_attr("tir_var_upper_bound", {"n": 16})})
    executor = rq.Executor(rq.compile(mod))
    for sizes in ((0, 3), (1, 40), (16, 40)):
        x = np.ones(sizes, "float32")
        np.testing.assert_allclose(executor.run("main", [x])[0], np.exp(x), 1e-6)
    for rows in (17, 4000):
        with pytest.raises(ValueError, match=r"inputs of 'main': .*'x', which has at most 16"):
            executor.run("main", [np.ones((rows, 2), "float32")])


CASES = {
    "one": (("n", 2, 2), (1, 4), [(1, 2, 2)], [(3, 2, 2), (0, 2, 2)]),
    "two": (("n", "m"), (1, 4), [(2, 2), (1, 4)], [(3, 4), (1, 2)]),
    "computed": (("n", 4), (lambda n, m: n // 2, 8), [(4, 4)], [(3, 4)]),
    # no element, whatever the other size is
    "empty batch": (("n", "m"), ("n", 4), [(3, 4), (0, 4)], [(3, 5), (0, 5)]),
    "batch of blocks": (
        ("n", "m"),
        ("n", lambda n, m: m // 2, 2),
        [(3, 4), (0, 4)],
        [(3, 5), (0, 5)],
    ),
    "scalar": (("n",), (), [(1,)], [(2,)]),
}


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_reshape__drops_no_element(case, has_kernel):
    shape, target, right, wrong = CASES[case]
    exe = rq.Executor(rq.compile(make_reshape(shape, target, has_kernel=has_kernel)))
    for sizes in right:
        x = np.random.default_rng(0).standard_normal(sizes).astype("float32")
        (got,) = exe.run("main", [x])
        np.testing.assert_allclose(
            got.ravel(), np.exp(x).ravel() if has_kernel else x.ravel(), 1e-5
        )
    for sizes in wrong:
        with pytest.raises(ValueError, match=r"sizes do not fit 'y', which makes \("):
            exe.run("main", [np.ones(sizes, "float32")])


def test_shape_checks__of_sizes_that_always_fit_are_none():
    mod = make_reshape(("n", 2, 2), ("n", 4), has_kernel=False)
    assert find_shape_checks(mod) == {}


def make_module(arguments, compute):
    """main(*arguments) of float32; "sizes" are two int64, which are read as sizes a and b."""
    names = {name: tirx.Var(name, "int64") for name in "nmabk"}
    params = [
        relax.Var(f"x{at}", relax.TensorType((2,), "int64"))
        if shape == "sizes"
        else relax.Var(
            f"x{at}", relax.TensorType([names.get(size, size) for size in shape], "float32")
        )
        for at, shape in enumerate(arguments)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            if arguments[-1] == "sizes":
                shape = builder.emit(relax.op.tensor_to_shape(params[-1]))
                builder.match_cast(shape, relax.ShapeType([names["a"], names["b"]]))
            y = builder.emit_output(compute(builder, params, names), "y")
        builder.emit_func_output(y)
    return builder.get()


def reshape_as_sizes(builder, params, names):
    return relax.op.reshape(builder.emit(relax.op.exp(params[0])), [names["a"], names["b"]])


def reshape_unique(builder, params, names):
    found = builder.emit(relax.op.unique(relax.op.reshape(params[0], (4,))))
    return relax.op.reshape(
        builder.match_cast(found, relax.TensorType([names["k"]], "float32")), (2, 1)
    )


def slice_by_sizes(builder, params, names):
    data = builder.emit(relax.op.exp(params[0]))
    return relax.op.strided_slice(data, [0], [names["a"]], [names["b"]], assume_inbound=True)


def broadcast_to_sizes(builder, params, names):
    return relax.op.broadcast_to(params[0], [names["a"], names["b"]])


def broadcast_to_number(builder, params, names):
    return relax.op.broadcast_to(params[0], [3, 4])


def multiply(builder, params, names):
    return relax.op.matmul(*params)


def match(shape):
    """The last parameter must have this shape; the first one is added."""

    def compute(builder, params, names):
        ty = relax.TensorType([names.get(size, size) for size in shape], "float32")
        data = builder.match_cast(params[-1], ty, "y_cast")
        return relax.op.add(params[0], data) if len(params) > 1 else relax.op.exp(data)

    return compute


def match_unread(builder, params, names):
    """As `match`, but nothing reads the second parameter."""
    shape = builder.emit(relax.op.shape_of(params[1]))
    builder.match_cast(shape, relax.ShapeType([names["n"], 4]), "y_cast")
    return relax.op.exp(params[0])


def reshape_renamed(builder, params, names):
    """Size k is another name of n, which passes take away."""
    data = builder.match_cast(params[0], relax.TensorType([names["k"], 4], "float32"))
    return relax.op.reshape(builder.emit(relax.op.exp(data)), (2, 8))


#: Shapes of the parameters, what is computed, numpy's form, inputs that fit, inputs that do not.
#: An input is a shape, or the values.
MATCHED = {
    "reshape to sizes": (
        [("n", "m"), "sizes"],
        reshape_as_sizes,
        lambda x, sizes: np.exp(x).reshape(sizes),
        [((2, 3), [3, 2]), ((2, 3), [1, 6]), ((0, 3), [0, 7])],
        [((2, 3), [2, 2]), ((2, 3), [20, 2]), ((2, 3), [0, 6]), ((2, 3), [-2, -3])],
    ),
    "reshape of a count": (
        [("n", "m")],
        reshape_unique,
        lambda x: np.unique(x).reshape(2, 1),
        [([[1, 2], [2, 1]],)],
        [([[1, 2], [3, 1]],), ([[1, 1], [1, 1]],)],
    ),
    "broadcast to sizes": (
        [("n",), "sizes"],
        broadcast_to_sizes,
        np.broadcast_to,
        [((3,), [2, 3]), ((1,), [2, 1])],
        [((3,), [2, 2]), ((3,), [2, 9]), ((1,), [2, 9]), ((3,), [-2, 3])],
    ),
    "slice between sizes": (
        [(5, "n"), "sizes"],
        slice_by_sizes,
        lambda x, sizes: np.exp(x)[sizes[0] : sizes[1]],
        [((5, 2), [1, 4]), ((5, 2), [0, 5]), ((5, 2), [3, 3])],
        [((5, 2), [4, 3]), ((5, 2), [5, 0])],
    ),
    "broadcast to a number": (
        [("n",)],
        broadcast_to_number,
        lambda x: np.broadcast_to(x, (3, 4)),
        [((4,),)],
        [((3,),), ((5,),)],
    ),
    "sizes of two inputs": (
        [("n", 4), ("m", 4)],
        match(("n", 4)),
        np.add,
        [((3, 4), (3, 4)), ((0, 4), (0, 4))],
        [((3, 4), (2, 4)), ((2, 4), (3, 4)), ((3, 4), (1, 4))],
    ),
    "sizes of an input that nothing reads": (
        [("n", 4), ("m", 4)],
        match_unread,
        lambda x, y: np.exp(x),
        [((3, 4), (3, 4))],
        [((3, 4), (2, 4)), ((2, 4), (3, 4))],
    ),
    "a square of a known size": (
        [("n", "m")],
        match(("n", "n")),
        np.exp,
        [((3, 3),)],
        [((3, 4),), ((4, 3),)],
    ),
    "a square of a new size": ([("n", "m")], match("kk"), np.exp, [((3, 3),)], [((3, 4),)]),
    "reshape of a size with two names": (
        [("n", 4)],
        reshape_renamed,
        lambda x: np.exp(x).reshape(2, 8),
        [((4, 4),)],
        [((3, 4),), ((5, 4),)],
    ),
    "product": (
        [(3, "n"), ("m", 2)],
        multiply,
        np.matmul,
        [((3, 4), (4, 2))],
        [((3, 4), (3, 2)), ((3, 3), (9, 2))],
    ),
    "product of a vector": (
        [("n",), (5, "m", 2)],
        multiply,
        np.matmul,
        [((4,), (5, 4, 2))],
        [((4,), (5, 3, 2))],
    ),
}


WEIGHT = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype("float32")
SLOPES = np.float32([0.1, 0.5, 0.2])
ONE, ZERO = relax.const(1.0, "float32"), relax.const(0, "int32")
INTEGERS = WEIGHT[:, 0, 0].astype("int8")
#: As MATCHED. What right inputs give is tested elsewhere.
OPERATORS = {
    "conv2d": (
        [(1, "n", 5, 5)],
        lambda x: op.nn.conv2d(x, relax.const(WEIGHT)),
        [(1, 3, 5, 5)],
        [[(1, 2, 5, 5)], [(1, 6, 5, 5)]],
    ),
    "conv2d of two inputs": (
        [(1, "n", 5, 5), (4, "m", 3, 3)],
        op.nn.conv2d,
        [(1, 2, 5, 5), (4, 2, 3, 3)],
        [[(1, 2, 5, 5), (4, 3, 3, 3)], [(1, 3, 5, 5), (4, 2, 3, 3)]],
    ),
    "conv2d in groups, channels last": (
        [(1, 5, 5, "n")],
        lambda x: op.nn.conv2d(x, relax.const(WEIGHT), groups=2, data_layout="NHWC"),
        [(1, 5, 5, 6)],
        [[(1, 5, 5, 3)], [(1, 5, 5, 8)]],
    ),
    "conv1d_transpose": (
        [(1, "n", 5)],
        lambda x: op.nn.conv1d_transpose(x, relax.const(WEIGHT[..., 0])),
        [(1, 4, 5)],
        [[(1, 3, 5)], [(1, 8, 5)]],
    ),
    "einsum": (
        [("n", "k"), ("m", 2)],
        lambda x, y: op.einsum((x, y), "...j,jk->...k"),
        [(4, 3), (3, 2)],
        [[(4, 5), (3, 2)], [(4, 3), (5, 2)]],
    ),
    "attention": (
        [(1, "n", 2, 8), (1, "m", 2, 8), (1, "k", 2, 8)],
        op.nn.attention,
        [(1, 3, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)],
        [[(1, 3, 2, 8), (1, 9, 2, 8), (1, 5, 2, 8)]],
    ),
    "attention with a bias": (
        [(1, "n", 2, 8), (1, "m", 2, 8), (1, "m", 2, 8), (1, 1, "a", "b")],
        op.nn.attention,
        [(1, 3, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), (1, 1, 3, 5)],
        [
            [(1, 3, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), (1, 1, 9, 2)],
            [(1, 3, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), (1, 1, 3, 4)],
        ],
    ),
    "group_norm": (
        [(1, "n", 4)],
        lambda x: op.nn.group_norm(x, *[relax.const(SLOPES)] * 2, 1, 1, [2]),
        [(1, 3, 4)],
        [[(1, 6, 4)], [(1, 2, 4)]],
    ),
    "squeeze": (
        [("n", 4)],
        lambda x: op.squeeze(x, [0]),
        [(1, 4)],
        [[(3, 4)], [(0, 4)]],
    ),
    "gather_elements": (
        [("n", 3), ("m", 3)],
        lambda x, y: op.gather_elements(x, op.astype(y, "int64"), 1),
        [(5, 3), (2, 3)],
        [[(2, 3), (5, 3)]],
    ),
    "scatter_elements": (
        [("n", 3), ("m", 3), ("k", 3)],
        lambda x, y, z: op.scatter_elements(x, op.astype(y, "int64"), z, 1),
        [(5, 3), (2, 3), (2, 3)],
        [[(5, 3), (2, 3), (1, 3)], [(1, 3), (2, 3), (2, 3)]],
    ),
    "conv2d of less than its kernel": (
        [(1, 3, "n", "m")],
        lambda x: op.nn.conv2d(x, relax.const(WEIGHT)),
        [(1, 3, 3, 3)],
        [[(1, 3, 0, 0)], [(1, 3, 1, 5)], [(1, 3, 2, 5)], [(1, 3, 5, 2)]],
    ),
    "max_pool2d of less than its window": (
        [(1, 3, "n", "m")],
        lambda x: op.nn.max_pool2d(x, (3, 3)),
        [(1, 3, 3, 3)],
        [[(1, 3, 0, 0)], [(1, 3, 1, 5)], [(1, 3, 2, 5)], [(1, 3, 5, 2)]],
    ),
    "crop": (
        [(2, "n")],
        lambda x: op.nn.pad(x, [0, 0, -1, -1]),
        [(2, 2)],
        [[(2, 1)]],
    ),
    **{
        f"pad, {mode}": (
            [(2, "n")],
            lambda x, mode=mode: op.nn.pad(x, [0, 0, 1, 0], mode),
            [(2, 1)],
            [[(2, 0)]],
        )
        for mode in ("edge", "reflect", "circular")
    },
    "resize2d": (
        [("m", 2, "n", 3)],
        lambda x: op.image.resize2d(x, (4, 6), layout="NCHW", method="linear"),
        [(0, 2, 1, 3)],
        [[(1, 2, 0, 3)]],
    ),
    "take": (
        [("n", 2), ("m",)],
        lambda x, y: op.take(x, op.astype(y, "int64"), 0, mode="fast"),
        [(1, 2), (3,)],
        [[(0, 2), (3,)]],
    ),
    "take without indices": (
        [("n", 2), ("m",)],
        lambda x, y: op.take(x, op.astype(y, "int64"), 0, mode="fast"),
        [(0, 2), (0,)],
        [],
    ),
    "take of one": (
        [(2, "n")],
        lambda x: op.take(x, relax.const(-1, "int64"), 1, mode="wrap"),
        [(2, 1)],
        [[(2, 0)]],
    ),
    "gather_elements of an empty axis": (
        [("n", 3), ("m", 3)],
        lambda x, y: op.gather_elements(x, op.astype(y, "int64"), 0),
        [(1, 3), (2, 3)],
        [[(0, 3), (2, 3)]],
    ),
    "scatter_elements to an empty axis": (
        [("n", 3), ("m", 3), ("m", 3)],
        lambda x, y, z: op.scatter_elements(x, op.astype(y, "int64"), z, 0),
        [(1, 3), (2, 3), (2, 3)],
        [[(0, 3), (2, 3), (2, 3)]],
    ),
    "gather_nd": (
        [("n", "m"), ("k", 2)],
        lambda x, y: op.gather_nd(x, op.astype(y, "int64")),
        [(1, 1), (2, 2)],
        [[(0, 1), (2, 2)], [(1, 0), (2, 2)]],
    ),
    "gather_nd in batches": (
        [("n", 3), ("k", 2, 1)],
        lambda x, y: op.gather_nd(x, op.astype(y, "int64"), batch_dims=1),
        [(2, 3), (2, 2, 1)],
        [[(2, 3), (1, 2, 1)], [(2, 3), (3, 2, 1)]],
    ),
    "scatter_nd": (
        [("n", 3), ("k", 1), ("k", 3)],
        lambda x, y, z: op.scatter_nd(x, op.astype(y, "int64"), z),
        [(2, 3), (2, 1), (2, 3)],
        [[(0, 3), (2, 1), (2, 3)]],
    ),
    "index_tensor": (
        [("n", "m"), ("k",)],
        lambda x, y: op.index_tensor(x, [op.astype(y, "int64"), op.astype(y, "int64")]),
        [(1, 1), (2,)],
        [[(0, 1), (2,)], [(1, 0), (2,)]],
    ),
    "index_put": (
        [("n",), (2,)],
        lambda x, y: op.index_put(x, (relax.const(np.int64([0, 1])),), y),
        [(2,), (2,)],
        [[(0,), (2,)]],
    ),
    "split into sections": (
        [(2, "n")],
        lambda x: op.split(x, 3, 1),
        [(2, 5)],
        [[(2, 1)]],
    ),
    "split at indices": (
        [("n", 2)],
        lambda x: op.split(x, [2, 5], 0),
        [(5, 2)],
        [[(4, 2)], [(1, 2)]],
    ),
    "topk": (
        [("n", 3)],
        lambda x: op.topk(x, 4, 0, "values"),
        [(4, 3)],
        [[(3, 3)]],
    ),
    "argmax": (
        [(2, "n")],
        lambda x: op.argmax(x, -1),
        [(2, 1)],
        [[(2, 0)]],
    ),
    "quantize": (
        [(2, "n"), ("m",)],
        lambda x, scale: qnn.quantize(x, scale, ZERO),
        [(2, 3), (3,)],
        [[(2, 3), (1,)], [(2, 3), (4,)]],
    ),
    "dequantize": (
        [("n", 2), ("m",)],
        lambda x, scale: qnn.dequantize(op.astype(x, "int8"), scale, ZERO, axis=0),
        [(3, 2), (3,)],
        [[(3, 2), (1,)], [(3, 2), (4,)]],
    ),
    "requantize": (
        [(2, 3), ("m",)],
        lambda x, scale: qnn.requantize(op.astype(x, "int32"), scale, ZERO, ONE, ZERO),
        [(2, 3), (3,)],
        [[(2, 3), (2,)]],
    ),
    "sum of integers": (
        [(2, "n"), ("m", 1), ("a",), ("b",)],
        lambda x, y, first, second: qnn.add(
            op.astype(x, "int8"), op.astype(y, "int8"), first, ZERO, second, ZERO, ONE, ZERO, 1, 0
        ),
        [(2, 3), (2, 1), (3,), (2,)],
        [[(2, 3), (2, 1), (2,), (2,)], [(2, 3), (2, 1), (3,), (3,)]],
    ),
    "slopes of integers": (
        [(2, 3, 2), ("m",)],
        lambda x, slopes: qnn.prelu(op.astype(x, "int8"), ONE, ZERO, ONE, ZERO, slopes, axis=1),
        [(2, 3, 2), (3,)],
        [[(2, 3, 2), (2,)]],
    ),
    "dense of integers": (
        [(2, 3), ("m",)],
        lambda x, zero: qnn.dense(
            op.astype(x, "int8"), relax.const(INTEGERS), ZERO, op.astype(zero, "int32"), ONE, ONE
        ),
        [(2, 3), (4,)],
        [[(2, 3), (3,)]],
    ),
    "argmin of all": (
        [("m", "n", 2)],
        lambda x: op.argmin(x),
        [(1, 3, 2)],
        [[(0, 3, 2)], [(1, 0, 2)]],
    ),
}
#: Those that have an integer form, which has its own sizes.
QUANTIZED = {
    **{name: OPERATORS[name] for name in ("conv2d", "conv2d in groups, channels last")},
    "avg_pool2d of less than its window": (
        [(1, 3, "n", "m")],
        lambda x: op.nn.avg_pool2d(op.nn.conv2d(x, relax.const(WEIGHT)), (3, 3)),
        [(1, 3, 5, 5)],
        [[(1, 3, 4, 5)], [(1, 3, 5, 3)]],
    ),
    "dense": (
        [(2, "n")],
        lambda x: op.matmul(x, relax.const(WEIGHT[0, 0])),
        [(2, 3)],
        [[(2, 2)], [(2, 8)]],
    ),
    "product": (
        [("a", 3, "n"), ("b", "m", 5)],
        op.matmul,
        [(2, 3, 4), (2, 4, 5)],
        [[(2, 3, 4), (2, 8, 5)], [(2, 3, 8), (2, 4, 5)], [(2, 3, 4), (4, 4, 5)]],
    ),
}


def check_sizes(exe, right, wrong):
    exe.run("main", [np.zeros(shape, "float32") for shape in right])
    for shapes in wrong:
        with pytest.raises(ValueError, match=r"sizes do not fit '.*', which "):
            exe.run("main", [np.zeros(shape, "float32") for shape in shapes])


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", OPERATORS)
def test_operators__fit_or_are_refused(case):
    """Before, they read memory of others, or left elements out."""
    arguments, compute, right, wrong = OPERATORS[case]
    mod = make_module(arguments, lambda _builder, params, _names: compute(*params))
    check_sizes(rq.Executor(rq.compile(mod)), right, wrong)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("split into sections", "splits (2, n) into 3 sections along axis 1"),
        ("split at indices", "splits (n, 2) at 2, 5 along axis 0"),
        ("topk", "takes 4 values of (n, 3) along axis 0"),
        ("argmax", "reads 1 value or more of (2, n) along axis 1"),
        ("argmin of all", "reads 1 value or more of (m, n, 2) along all axes"),
    ],
)
def test_shape_checks__say_what_the_sizes_do_not_fit(case, text):
    """Also the numbers that are attributes."""
    arguments, compute, *_ = OPERATORS[case]
    mod = make_module(arguments, lambda _builder, params, _names: compute(*params))
    (check,) = find_shape_checks(mod)["main",]
    assert check.text == f"{check.name!r}, which {text}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized__fit_or_are_refused(case):
    arguments, compute, right, wrong = QUANTIZED[case]
    mod = make_module(arguments, lambda _builder, params, _names: compute(*params))
    rng = np.random.default_rng(0)
    data = [[rng.standard_normal(shape).astype("float32") for shape in right] for _ in range(2)]
    samples = [{f"x{at}": x for at, x in enumerate(arrays)} for arrays in data]
    check_sizes(rq.Executor(rq.compile(rq.quantize(mod, None, samples, guard="off"))), right, wrong)


def test_shape_checks__a_batch_of_one_fits_all():
    """TVM compares numbers itself: only symbolic sizes are left."""
    mod = make_module([(1, 3, "n"), (2, "n", 5)], multiply)
    assert find_shape_checks(mod) == {}


def test_shape_checks__of_packed_layouts_are_none():
    def convolve(builder, params, names):
        return op.nn.conv2d(*params, data_layout="NCHW4c", kernel_layout="OIHW4o")

    mod = make_module([(1, "n", 5, 5, 4), (1, "m", 3, 3, 4)], convolve)
    assert find_shape_checks(mod) == {}


def draw_inputs(given):
    rng = np.random.default_rng(0)
    for each in given:
        if isinstance(each, tuple):
            yield rng.standard_normal(each).astype("float32")
        else:
            yield np.array(each, "float32" if np.ndim(each) > 1 else "int64")


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", MATCHED)
def test_shapes__fit_or_are_refused(case):
    arguments, compute, expect, right, wrong = MATCHED[case]
    exe = rq.Executor(rq.compile(make_module(arguments, compute)))
    for given in right:
        inputs = list(draw_inputs(given))
        (got,) = exe.run("main", inputs)
        np.testing.assert_allclose(got, expect(*inputs), 1e-5, 1e-6)
    for given in wrong:
        with pytest.raises(ValueError, match=r"sizes do not fit 'y.*', which "):
            exe.run("main", list(draw_inputs(given)))


@I.ir_module
class Branches:
    @R.function
    def main(
        first: R.Tensor((), "bool"),
        second: R.Tensor((), "bool"),
        x: R.Tensor(("n", "m"), "float32"),
        w: R.Tensor(("k", 2), "float32"),
    ) -> R.Tensor(ndim=2, dtype="float32"):
        if first:
            grown = R.exp(x)
            y = R.reshape(grown, R.shape([2, 2]))
        else:
            if second:
                product = R.matmul(x, w)
                z = R.reshape(product, R.shape([2, 2]))
            else:
                z = R.reshape(w, R.shape([2, 2]))
            y = R.negative(z)
        return y


@pytest.mark.parametrize(
    ("taken", "shapes", "wrong"),
    [
        ((True, True), ((1, 4), (7, 2)), None),
        ((True, False), ((3, 2), (2, 2)), r"'y_then', which makes \(n, m\)"),
        ((False, True), ((2, 5), (5, 2)), None),
        ((False, True), ((2, 2), (5, 2)), r"'product', which multiplies \(n, m\) by \(k, 2\)"),
        ((False, True), ((3, 5), (5, 2)), r"'z_then', which makes \(n, 2\)"),
        ((False, False), ((7, 9), (2, 2)), None),
        ((False, False), ((2, 2), (3, 2)), r"'z_else', which makes \(k, 2\)"),
    ],
)
def test_branches__are_checked_when_taken(taken, shapes, wrong):
    """Before, a branch read memory of others. The one that is not taken is not checked."""
    exe = rq.Executor(rq.compile(Branches))
    x, w = draw_inputs(shapes)
    inputs = [*map(np.array, taken), x, w]
    if wrong:
        with pytest.raises(ValueError, match=f"sizes do not fit {wrong}"):
            exe.run("main", inputs)
    else:
        (got,) = exe.run("main", inputs)
        chosen = np.exp(x) if taken[0] else -(x @ w) if taken[1] else -w
        np.testing.assert_allclose(got, chosen.reshape(2, 2), 1e-5)


@I.ir_module
class SameNames:
    @R.function
    def main(
        c: R.Tensor((), "bool"), x: R.Tensor(("n", 2), "float32"), w: R.Tensor(("k", 2), "float32")
    ) -> R.Tensor(ndim=2, dtype="float32"):
        if c:
            a = R.exp(x)
            y = R.reshape(a, R.shape([2, 2]))
        else:
            y = R.ones(R.shape([2, 2]), "float32")
        if R.logical_not(c):
            b = R.exp(w)
            y = R.reshape(b, R.shape([2, 2]))
        else:
            y = R.negative(y)
        return y


def test_branches__of_choices_with_one_name_are_told_apart():
    """Before, the sizes of a branch of the second were compared in a branch of the first."""
    exe = rq.Executor(rq.compile(SameNames))
    right, wrong = np.ones((2, 2), "float32"), np.ones((3, 2), "float32")
    np.testing.assert_allclose(exe.run("main", [np.array(True), right, wrong])[0], -np.exp(right))
    np.testing.assert_allclose(exe.run("main", [np.array(False), wrong, right])[0], np.exp(right))
    for given in ([np.array(True), wrong, right], [np.array(False), right, wrong]):
        with pytest.raises(ValueError, match="sizes do not fit 'y_"):
            exe.run("main", given)
