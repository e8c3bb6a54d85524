"""Shapes that fit for some sizes only: numpy's result, or an error."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.shape_checks import find_shape_checks


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


CASES = {
    "one": (("n", 2, 2), (1, 4), [(1, 2, 2)], [(3, 2, 2), (0, 2, 2)]),
    "two": (("n", "m"), (1, 4), [(2, 2), (1, 4)], [(3, 4), (1, 2)]),
    "computed": (("n", 4), (lambda n, m: n // 2, 8), [(4, 4)], [(3, 4)]),
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
    assert find_shape_checks(mod) == {"main": ()}


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


def broadcast_to_sizes(builder, params, names):
    return relax.op.broadcast_to(params[0], [names["a"], names["b"]])


def broadcast_to_number(builder, params, names):
    return relax.op.broadcast_to(params[0], [3, 4])


def multiply(builder, params, names):
    return relax.op.matmul(*params)


#: Shapes of the parameters, what is computed, numpy's form, inputs that fit, inputs that do not.
#: An input is a shape, or the values.
MATCHED = {
    "reshape to sizes": (
        [("n", "m"), "sizes"],
        reshape_as_sizes,
        lambda x, sizes: np.exp(x).reshape(sizes),
        [((2, 3), [3, 2]), ((2, 3), [1, 6]), ((0, 3), [0, 7])],
        [((2, 3), [2, 2]), ((2, 3), [20, 2]), ((2, 3), [0, 6])],
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
        [((3,), [2, 2]), ((3,), [2, 9]), ((1,), [2, 9])],
    ),
    "broadcast to a number": (
        [("n",)],
        broadcast_to_number,
        lambda x: np.broadcast_to(x, (3, 4)),
        [((4,),)],
        [((3,),), ((5,),)],
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
