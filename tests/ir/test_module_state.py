"""State: described, compiled, and held between calls by all that run compiled modules."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.errors import ConfigError, DataError, ModelError
from relayquant.ir.rewrite.entry import attach_attrs
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.state import STATE_ATTR
from relayquant_runtime import Library


@I.ir_module
class Sums:
    """Running sums and the number of calls; `last` only reads the sums."""

    @R.function
    def main(
        x: R.Tensor((1, 3), "float32"),
        sums: R.Tensor((1, 3), "float32"),
        count: R.Tensor((), "int32"),
    ):
        with R.dataflow():
            new = R.add(x, sums)
            more = R.add(count, R.const(1, "int32"))
            result = (R.multiply(new, R.const(2.0)), (new, more))
            end = (result[0], new, more)
            R.output(end)
        return end

    @R.function
    def last(sums: R.Tensor((1, 3), "float32")):
        with R.dataflow():
            result = (R.negative(sums), sums)
            R.output(result)
        return result


def make_inverse() -> relax.Function:
    """main(h) -> (1 / h, h)"""
    h = relax.Var("h", R.Tensor((2,), "float32"))
    mod = make_main([h], lambda builder: (builder.emit(R.divide(R.const(1.0), h)), h))
    return mod["main"]


START = np.array([[1, 2, 3]], "float32")
VALUES = (
    rq.StateValue("sums", (1, 3), "float32", START),
    rq.StateValue("count", (), "int32"),
)
STEPS = np.random.default_rng(0).standard_normal((5, 1, 3), "float32")
TOTALS = np.cumsum(np.concatenate([START[None], STEPS]), axis=0, dtype="float32")[1:]


@pytest.fixture(scope="module")
def executable():
    return rq.compile(rq.with_state(Sums, VALUES))


@pytest.fixture(scope="module")
def path(executable, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("state") / "sums.so"
    executable.export_library(str(path))
    return path


@pytest.fixture(params=["executor", "library in an executor", "runtime alone"])
def runner(request, executable, path):
    if request.param == "executor":
        return rq.Executor(executable)
    if request.param == "runtime alone":
        return Library(path)
    return rq.Executor(tvm.runtime.load_module(str(path)))


def test_run__holds_state_from_call_to_call(runner):
    for x, total in zip(STEPS, TOTALS, strict=True):
        (double,) = runner.run("main", [x])
        np.testing.assert_array_equal(double, total * 2)
        np.testing.assert_array_equal(runner.run("last", [])[0], -total)
    state = runner.state
    np.testing.assert_array_equal(state["sums"], TOTALS[-1])
    assert state["count"] == 5
    assert state["count"].dtype == np.int32


def test_reset__begins_again(runner):
    for _ in range(3):  # the initial values are new each time
        runner.reset()
        np.testing.assert_array_equal(runner.state["sums"], START)
        np.testing.assert_array_equal(runner.run("main", [STEPS[0]])[0], TOTALS[0] * 2)
        assert runner.state["count"] == 1


def test_state__is_a_copy_and_can_be_set(runner):
    runner.run("main", [STEPS[0]])
    saved = runner.state
    runner.run("main", [STEPS[1]])
    runner.state = saved
    for array in saved.values():
        array[...] = 0
    np.testing.assert_array_equal(runner.run("main", [STEPS[1]])[0], TOTALS[1] * 2)


def test_state__of_another_shape_or_name_is_refused(runner):
    count = np.array(0, "int32")
    with pytest.raises(ValueError, match=r"state has sums;.* count"):
        runner.state = {"sums": START}
    with pytest.raises(ValueError, match=r"tate 'sums' is float32 of shape \(3,\).*\(1, 3\)"):
        runner.state = {"sums": START[0], "count": count}
    with pytest.raises(ValueError, match=r"tate 'sums' is float64 of shape \(1, 3\).*float32"):
        runner.state = {"sums": START.astype("float64"), "count": count}
    with pytest.raises(ValueError, match=r"state has 1;.* count"):
        runner.state = {1: START}
    with pytest.raises((ValueError, TypeError), match=r"state is of type list; allowed: a dict"):
        runner.state = [START, count]
    np.testing.assert_array_equal(runner.state["sums"], START)


@pytest.mark.parametrize("args", [(START,), ([START],), (START, [START])])
def test_run__without_a_name(runner, args):
    with pytest.raises(
        (ValueError, TypeError),
        match=rf"given as a {type(args[0]).__name__}; allowed: its name.*run\('main', \[array\]\)",
    ):
        runner.run(*args)


@pytest.mark.parametrize("args", [START, None, 5, b"x", {"x": START}], ids=type)
def test_run__without_a_list(runner, args):
    with pytest.raises(
        (ValueError, TypeError),
        match=rf"of type {type(args).__name__}; allowed: a list .*run\('main', \[array\]\)",
    ):
        runner.run("main", args)


def test_run__state_is_no_input(executable):
    executor = rq.Executor(executable)
    with pytest.raises(DataError, match=r"'main' takes 1 input besides its state \(sums, count\)"):
        executor.run("main", [STEPS[0], START, np.array(0, "int32")])


def test_run__two_threads_take_turns(executable):
    executor = rq.Executor(executable)

    def step() -> None:
        for _ in range(200):
            executor.run("main", [np.ones((1, 3), "float32")])

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(executor.state["sums"], START + 800)


@I.ir_module
class Shared:
    """Results and states that are one tensor, the input's among them."""

    @R.function
    def main(
        x: R.Tensor((2,), "float32"), a: R.Tensor((2,), "float32"), b: R.Tensor((2,), "float32")
    ):
        with R.dataflow():
            y = R.add(a, b)
            z = (y, x, y)
            R.output(z)
        return z


@pytest.mark.parametrize("kind", ["executor", "runtime alone"])
def test_run__what_the_caller_writes_into_is_no_state(kind, tmp_path):
    values = [rq.StateValue(name, (2,), "float32") for name in "ab"]
    executable = rq.compile(rq.with_state(Shared, values))
    executable.export_library(str(tmp_path / "shared.so"))
    runner = rq.Executor(executable) if kind == "executor" else Library(tmp_path / "shared.so")
    given = np.zeros(1024, "float32")
    start = -given.ctypes.data % 64 // 4
    x = given[start : start + 2]
    tensor = tvm.runtime.from_dlpack(x) if kind == "executor" else x
    (y,) = runner.run("main", [tensor])
    x += 1
    y += 1
    for array in runner.state.values():
        np.testing.assert_array_equal(array, 0)


def test_get_state__as_it_was_attached():
    mod = rq.with_state(Sums, VALUES)
    again = tvm.ir.load_json(tvm.ir.save_json(mod))
    for state, wanted in zip(rq.get_state(again), VALUES, strict=True):
        assert (state.name, state.shape, state.dtype) == (wanted.name, wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(state.value, wanted.value)
    assert rq.get_state(rq.with_state(mod, [])) == ()
    assert rq.get_state(Sums) == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([VALUES[0], VALUES[0]], "'sums' is given twice"),
        ([*VALUES, rq.StateValue("h", (1,), "float32")], "'h' is no parameter of last, main"),
        ([VALUES[1], VALUES[0]], "neighbours in this order"),
        ([rq.StateValue("sums", (1, 4), "float32")], r"\(1, 4\).*its parameter in 'last'"),
        ([rq.StateValue("sums", (1, 3), "float16")], "float16.*its parameter in 'last'"),
        (
            [rq.StateValue("count", (), "int32"), rq.StateValue("x", (1, 3), "float32")],
            "neighbours",
        ),
        ([rq.StateValue("x", (1, 3), "float32")], "its new value in 'main' is R.Tensor"),
    ],
)
def test_with_state__says_what_does_not_fit(values, message):
    with pytest.raises(ModelError, match=message):
        rq.with_state(Sums, values)


def test_with_state__too_few_results():
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    y = relax.Var("y", relax.TensorType((2,), "float32"))
    main = relax.Function([x, y], x)
    values = [rq.StateValue(name, (2,), "float32") for name in "xy"]
    with pytest.raises(ModelError, match="'main' has 1 result and takes 2 states"):
        rq.with_state(tvm.IRModule({"main": main}), values)


def test_state_value__negative_zero_is_kept():
    value = rq.StateValue("h", (2,), "float32", np.float32([-0.0, -0.0]))
    mod = rq.with_state(tvm.IRModule({"main": make_inverse()}), [value])
    (first,) = rq.Executor(rq.compile(mod)).run("main", [])
    np.testing.assert_array_equal(first, [-np.inf, -np.inf])


def test_state_value__initial_value_has_its_type():
    with pytest.raises(ModelError, match=r"'h': its initial value is float32 of shape \(1, 3\)"):
        rq.StateValue("h", (3,), "float32", START)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": 2}, "StateValue.shape is 2"),
        ({"shape": "ab"}, "StateValue.shape is 'ab'"),
        ({"name": None}, "StateValue.name is None"),
        ({"initial": [0.0, 1.0]}, "StateValue.initial is"),
    ],
)
def test_state_value__of_wrong_types(given, message):
    with pytest.raises(ConfigError, match=message):
        rq.StateValue(**{"name": "h", "shape": (2,), "dtype": "float32", **given})


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32")])
def test_state_value__dtypes_of_numpy(dtype):
    value = rq.StateValue("h", [1, 3], dtype, START)  # pyright: ignore[reportArgumentType]
    assert (value.shape, value.dtype) == ((1, 3), "float32")


def test_get_state__damaged():
    mod = rq.with_state(Sums, VALUES)
    text = str(mod["main"].attrs[STATE_ATTR]).replace("[1, 3]", "[1, 4]", 1)
    with pytest.raises(ModelError, match="description of its state is damaged: 12 bytes"):
        rq.get_state(attach_attrs(mod, {STATE_ATTR: text}))
