"""The generic schedule: same integers, same float arithmetic, vectors and threads."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.relax.backend.cpu_generic import get_default_pipeline
from tvm.relax.backend.cpu_generic import pipeline as stages
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.codegen.kernels.emit import LEAST_EXTENT
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.passes import make_pipeline
from relayquant.codegen.schedule.schedule_pass import (
    create_schedule_pass,
    schedule_functions,
    schedule_with_report,
)
from relayquant.codegen.schedule.scheduler import (
    PARALLEL_WORK,
    FunctionScheduler,
    find_bound,
    holds,
)
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main

TARGET = resolve_target()
rng = np.random.default_rng(7)


def build_scheduled(mod: tvm.IRModule) -> tuple[relax.VirtualMachine, list[tuple[str, str]]]:
    """Compile `mod` with the generic schedule; also returns what was left unscheduled."""
    skipped: list[tuple[str, str]] = []

    @tvm.transform.module_pass(opt_level=0)
    def pipeline(mod, _):
        with TARGET:
            mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
            mod, report = schedule_with_report(mod, TARGET)
            skipped.extend(report.skipped)
            tail = stages.dataflow_lower_passes(TARGET) + stages.finalize_passes(TARGET)
            return tvm.transform.Sequential(tail)(mod)

    exe = tvm.compile(mod, TARGET, relax_pipeline=pipeline)
    return relax.VirtualMachine(exe, tvm.cpu()), skipped


def run_both(mod: tvm.IRModule, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of `mod` with the generic schedule and with TVM's naive loops."""
    vm, skipped = build_scheduled(mod)
    assert not skipped, skipped
    naive = relax.VirtualMachine(
        tvm.compile(mod, TARGET, relax_pipeline=get_default_pipeline(TARGET)), tvm.cpu()
    )
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    return vm["main"](*tensors).numpy(), naive["main"](*tensors).numpy()


def make_module(emit, *parameters: tuple[tuple, str]) -> tvm.IRModule:
    """A module whose `main` takes tensors of the given (shape, dtype) and returns `emit(*vars)`."""
    args = [
        relax.Var(f"x{i}", relax.TensorType(shape, dtype))
        for i, (shape, dtype) in enumerate(parameters)
    ]
    return make_main(args, lambda bb: emit(bb, *args))


def random_ints(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(max(info.min, -1000), min(info.max, 1000) + 1, shape).astype(dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", [(1, 3, 5), (4, 16, 31), (2, 64, 48), (1, 1000), (7,), (97, 1)])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_schedule_functions__elementwise_integers_are_the_same(shape, dtype):
    mod = make_module(lambda bb, a, b: relax.op.maximum(a, b), (shape, dtype), (shape, dtype))
    got, expected = run_both(mod, random_ints(shape, dtype), random_ints(shape, dtype))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize("m", [1, 7, 97, 64])
@pytest.mark.parametrize("n", [3, 17, 64, 97, 260])
def test_schedule_functions__integer_matmul_is_the_same(m, n):
    k = 37
    mod = make_module(lambda bb, a, b: relax.op.matmul(a, b), ((m, k), "int32"), ((k, n), "int32"))
    a, b = random_ints((m, k), "int32"), random_ints((k, n), "int32")
    got, _ = run_both(mod, a, b)
    np.testing.assert_array_equal(got, a @ b)


@pytest.mark.sample(4)
@pytest.mark.parametrize("axis", [[0], [1], [2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("shape", [(4, 7, 49), (3, 64, 32), (2, 5, 13)])
def test_schedule_functions__integer_sums_are_the_same(shape, axis):
    mod = make_module(lambda bb, a: relax.op.sum(a, axis), (shape, "int32"))
    a = random_ints(shape, "int32")
    got, _ = run_both(mod, a)
    np.testing.assert_array_equal(got, a.sum(tuple(axis)))


@pytest.mark.parametrize(
    ("size", "stride", "padding", "groups"),
    [(14, 1, 1, 1), (15, 2, 1, 1), (17, 1, 0, 4), (28, 2, 1, 16), (7, 1, 1, 16)],
)
def test_schedule_functions__convolution_follows_numpy(size, stride, padding, groups):
    x_shape, w_shape = (2, 16, size, size), (32, 16 // groups, 3, 3)

    def emit(bb, x, w):
        y = bb.emit(relax.op.nn.conv2d(x, w, strides=stride, padding=padding, groups=groups))
        return relax.op.nn.relu(y)

    mod = make_module(emit, (x_shape, "float32"), (w_shape, "float32"))
    x, w = (rng.standard_normal(s).astype("float32") for s in (x_shape, w_shape))
    got, expected = run_both(mod, x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_schedule_functions__a_product_keeps_its_rounding():
    """x * y + z in two operators is two roundings, whatever the target could contract."""
    shape = (64, 160)

    def emit(bb, x, y, z):
        return relax.op.add(bb.emit(relax.op.multiply(x, y)), z)

    mod = make_module(emit, *[(shape, "float32")] * 3)
    x, y, z = (rng.standard_normal(shape).astype("float32") for _ in range(3))
    got, _ = run_both(mod, x, y, z)
    np.testing.assert_array_equal(got, x * y + z)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_schedule_functions__symbolic_batch(batch):
    n = tirx.Var("n", "int64")

    def emit(bb, x, w, b):
        y = bb.emit(relax.op.nn.conv2d(x, w, padding=1))
        y = bb.emit(relax.op.nn.relu(relax.op.add(y, b)))
        y = bb.emit(relax.op.mean(y, [2, 3]))
        return relax.op.nn.softmax(y, axis=-1)

    mod = make_module(
        emit, ((n, 8, 15, 15), "float32"), ((24, 8, 3, 3), "float32"), ((1, 24, 1, 1), "float32")
    )
    x = rng.standard_normal((batch, 8, 15, 15)).astype("float32")
    w = rng.standard_normal((24, 8, 3, 3)).astype("float32")
    got, expected = run_both(mod, x, w, rng.standard_normal((1, 24, 1, 1)).astype("float32"))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def scheduled_text(mod: tvm.IRModule) -> str:
    """All functions behind the generic schedule."""
    with TARGET:
        mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    return schedule_functions(mod, TARGET).script()


@pytest.mark.parametrize("length", [33, 197, 509])
@pytest.mark.parametrize("op", [relax.op.max, relax.op.sum], ids=["max", "sum"])
def test_schedule_functions__reductions_of_prime_length_are_vectors(op, length):
    mod = make_module(lambda bb, x: op(x, [-1]), ((5, length), "float32"))
    x = rng.standard_normal((5, length)).astype("float32") - 9
    got, expected = run_both(mod, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert "T.vectorized" in scheduled_text(mod)


@pytest.mark.parametrize("axes", [None, [1, 2]], ids=["all", "some"])
@pytest.mark.parametrize(
    "op", [relax.op.max, relax.op.min, relax.op.sum], ids=["max", "min", "sum"]
)
@pytest.mark.parametrize("length", [64, 24, 3])
def test_schedule_functions__reductions_of_free_axes_before_a_known_one(op, axes, length):
    """As the range of data of any batch and length, which is found when the model runs."""
    sizes = tirx.Var("n", "int64"), tirx.Var("m", "int64"), length
    mod = make_module(lambda bb, x: op(x, axes), (sizes, "float32"))
    for shape in ((3, 5, length), (1, 1, length)):
        x = rng.standard_normal(shape).astype("float32") - 9
        got, expected = run_both(mod, x)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert ("T.vectorized" in scheduled_text(mod)) == (length >= 24)


@pytest.mark.parametrize("op", [relax.op.sum, relax.op.nn.softmax], ids=["sum", "softmax"])
def test_schedule_functions__reductions_of_prime_length_with_symbolic_rows(op):
    mod = make_module(lambda bb, x: op(x, -1), ((tirx.Var("n", "int64"), 257), "float32"))
    x = rng.standard_normal((3, 257)).astype("float32")
    got, expected = run_both(mod, x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_schedule_functions__loops_behind_a_reshape_are_vectors():
    def emit(bb, x):
        return relax.op.reshape(bb.emit(relax.op.tanh(x)), (1, 32, 256))

    mod = make_module(emit, ((1, 128, 64), "float32"))
    x = rng.standard_normal((1, 128, 64)).astype("float32")
    got, expected = run_both(mod, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert "T.vectorized" in scheduled_text(mod)


def test_schedule_functions__a_reshape_that_tears_rows_apart_is_exact():
    def emit(bb, x):
        turned = bb.emit(relax.op.permute_dims(x, [1, 0]))
        return relax.op.reshape(bb.emit(relax.op.add(turned, turned)), (40, 24))

    mod = make_module(emit, ((24, 40), "int32"))
    got, expected = run_both(mod, random_ints((24, 40), "int32"))
    np.testing.assert_array_equal(got, expected)


def test_schedule_functions__arithmetic_between_look_ups_is_vectors():
    """A chain of look-ups is one function, of loops that do one thing each."""
    table = rng.permutation(256).astype("uint8")

    def emit(bb, x):
        for _ in range(3):
            x = bb.emit(qnn.lookup(bb.emit(qnn.add(x, x, 0.1, 9, 0.2, 3, 0.2, 128)), table))
        return x

    mod = make_module(emit, ((1, 32), "uint8"))
    got, expected = run_both(mod, random_ints((1, 32), "uint8"))
    np.testing.assert_array_equal(got, expected)
    text = scheduled_text(mod)
    assert text.count("R.call_tir") == 1
    assert text.count("T.vectorized") == 3
    look_ups = [line for line in text.splitlines() if "] = param_" in line]
    assert len(look_ups) == 3
    assert not any("nearbyint" in line for line in look_ups)


def test_schedule_functions__unit_axes_between_parallel_ones():
    n = tirx.Var("n", "int64")
    mod = make_module(
        lambda bb, x: relax.op.permute_dims(x, [0, 1, 3, 2]), ((n, 1, 384, 512), "float32")
    )
    x = rng.standard_normal((2, 1, 384, 512)).astype("float32")
    got, _ = run_both(mod, x)
    np.testing.assert_array_equal(got, x.transpose(0, 1, 3, 2))


def test_schedule_functions__vectors_and_threads_appear():
    mod = make_module(
        lambda bb, a, b: relax.op.matmul(a, b), ((256, 64), "float32"), ((64, 256), "float32")
    )
    with TARGET:
        mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    text = schedule_functions(mod, TARGET)["matmul"].script()
    assert "T.vectorized" in text
    assert "T.parallel" in text


def block_names(statement) -> set[str]:
    names: set[str] = set()
    tvm_ffi.structural_walk(statement, (s_tir.SBlock, lambda block: names.add(block.name_hint)))
    return names


@pytest.mark.parametrize("length", [192, 197])
@pytest.mark.parametrize(
    "emit",
    [
        lambda bb, x: relax.op.nn.softmax(x),
        lambda bb, x: relax.op.sum(x, axis=[-1]),
        lambda bb, x: relax.op.nn.layer_norm(
            x, *[relax.const(np.ones(x.ty.shape.values[-1].value, "float32"))] * 2, axes=[-1]
        ),
    ],
    ids=["softmax", "sum", "layer_norm"],
)
def test_schedule_functions__threads_share_all_of_a_reduction(emit, length):
    """Also what is left of it when the lanes of vectors are to be joined."""
    mod = make_module(emit, ((1, 600, length), "float32"))
    with TARGET:
        mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    (func,) = [f for f in schedule_functions(mod, TARGET).functions.values() if is_kernel(f)]
    shared: set[str] = set()

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            shared.update(block_names(loop))

    tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    alone = block_names(func.body) - shared - {"root"}
    assert all(name.endswith("mean") for name in alone)  # a division for each row
    assert any("rf" in name for name in shared)


def is_kernel(func: tvm.ir.BaseFunc) -> bool:
    return isinstance(func, tirx.PrimFunc)


def list_least_extents(func: tirx.PrimFunc) -> list[int | None]:
    """Of each parallel loop: from which extent on threads share it, None if they always do."""
    found = []

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            least = loop.annotations.get(LEAST_EXTENT)
            found.append(None if least is None else int(least))

    tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    return found


@pytest.mark.parametrize(("size", "is_always"), [(96, False), (512, True)])
def test_schedule_functions__symbolic_batch_counts_as_one_sample(size, is_always):
    """One sample of little work stays on its thread; how many share it, they decide at run time."""
    n = tirx.Var("n", "int64")
    mod = make_module(lambda bb, x: relax.op.nn.softmax(x), ((n, size, size), "float32"))
    with TARGET:
        mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    extents = list_least_extents(schedule_functions(mod, TARGET)["softmax"])
    assert extents
    assert all(least is None if is_always else least and least > 1 for least in extents)


@pytest.mark.parametrize("shape", [("n", 1536), (1, "n", 1536), ("n", 1, 48, 32), (2, "n", 3, 64)])
def test_schedule_functions__threads_share_many_symbolic_rows(shape):
    """The results are the same on both sides of the least extent."""
    n, at = tirx.Var("n", "int64"), shape.index("n")
    before, behind = math.prod(shape[:at]), math.prod(shape[at + 1 :])
    parameters = [((*shape[:at], n, *shape[at + 1 :]), "float32")] * 2
    mod = make_module(lambda bb, x, y: relax.op.add(x, y), *parameters)
    with TARGET:
        lowered = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    (least,) = list_least_extents(schedule_functions(lowered, TARGET)["add"])
    # One iteration of the loop over all extents up to the symbolic one has the elements behind it.
    assert PARALLEL_WORK // 16 < least * behind <= PARALLEL_WORK
    vm = relax.VirtualMachine(
        tvm.compile(mod, TARGET, relax_pipeline=make_pipeline(TARGET)), tvm.cpu()
    )
    for rows in (1, least // before - 1, -(-least // before), 2 * least + 1):
        sizes = (*shape[:at], rows, *shape[at + 1 :])
        x, y = (rng.standard_normal(sizes).astype("float32") for _ in "xy")
        got = vm["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
        np.testing.assert_array_equal(got, x + y)


def test_schedule_with_report__names_what_it_leaves():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def by_hand(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
            with T.sblock("root"):
                T.reads()
                T.writes()
                for i in range(4):
                    y[i] = x[i]

        @R.function
        def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            cls = Module
            with R.dataflow():
                y = R.call_tir(cls.by_hand, (x,), out_ty=R.Tensor((4,), "float32"))
                R.output(y)
            return y

    mod, report = schedule_with_report(Module, TARGET)
    assert report.scheduled == ()
    assert [name for name, _ in report.skipped] == ["by_hand"]
    assert "handwritten" in report.skipped[0][1]
    tvm.ir.assert_structural_equal(mod["by_hand"], Module["by_hand"])


def test_schedule_with_report__a_primitive_that_fails_leaves_the_function(monkeypatch, caplog):
    def refuse(*_):
        raise s_tir.schedule.ScheduleError("ScheduleError: no such loop")

    monkeypatch.setattr(FunctionScheduler, "run", refuse)
    mod = make_module(lambda bb, a: relax.op.exp(a), ((8,), "float32"))
    with TARGET:
        mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    with caplog.at_level("DEBUG", logger="relayquant.codegen"):
        result, report = schedule_with_report(mod, TARGET)
    assert report.skipped == (("tir_exp", "ScheduleError: ScheduleError: no such loop"),)
    assert "no such loop" in caplog.text
    tvm.ir.assert_structural_equal(result, mod)


def test_create_schedule_pass__scheduled_functions_are_left_alone():
    mod = make_module(lambda bb, a: relax.op.exp(a), ((64,), "float32"))
    with TARGET:
        mod = tvm.transform.Sequential(stages.legalize_passes(TARGET))(mod)
    once = create_schedule_pass(TARGET)(mod)
    _, report = schedule_with_report(once, TARGET)
    assert report.scheduled == ()
    assert report.skipped == ()
    tvm.ir.assert_structural_equal(create_schedule_pass(TARGET)(once), once)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize(
    ("shape", "widths", "blocks"),
    [
        ((2, 3, 4, 5, 64), (0, 0, 1, 2, 0, 0, 0, 0, 0, 0), 1),  # a border around whole vectors
        ((1, 6, 7, 64), (0, 0, 1, 1, 2, 1, 0, 0), 1),
        ((1, 6, 7, 20), (0, 0, 1, 1, 2, 1, 0, 0), 1),
        ((1, 6, 7, 48), (0, 0, 0, 0, 0, 0, 8, 8), 2),  # a border within vectors
    ],
)
def test_schedule_functions__a_border_of_whole_vectors_is_written_once(
    shape, widths, blocks, dtype
):
    mod = make_module(lambda bb, x: relax.op.nn.pad(x, list(widths)), (shape, dtype))
    x = random_ints(shape, "int32").astype(dtype)
    got, _ = run_both(mod, x)
    np.testing.assert_array_equal(got, np.pad(x, np.reshape(widths, (-1, 2))))
    assert scheduled_text(mod).count("T.sblock(") == 1 + blocks  # and the root


@pytest.mark.parametrize("name", ["sum", "prod", "mean"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [(("n", 4, "k"), None), (("n", 4, "k"), (0,)), ((4, "n"), (1,)), (("n", "k"), (1,))],
)
def test_schedule_functions__reductions_of_nothing_are_their_start(name, shape, axes):
    """Sizes of 0 that are known at run time only, after a run with others."""
    sizes = {each: tirx.Var(each, "int64") for each in shape if isinstance(each, str)}
    extents = [sizes.get(each, each) for each in shape]
    x = relax.Var("x", relax.TensorType(extents, "float32"))
    mod = make_main([x], lambda _: getattr(relax.op, name)(x, axes and [*axes]))
    machine = rq.Executor(rq.compile(mod))
    for size in (5, 0, 5, 0):
        data = np.full([size if isinstance(e, str) else e for e in shape], 3.0, "float32")
        (got,) = machine.run("main", [data])
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of the mean of nothing
            np.testing.assert_allclose(got, getattr(np, name)(data, axes), rtol=1e-5)


def rotate(bb, x, factors):
    """Rotary embedding: both halves of a row, one of them negated, times factors."""
    width = int(x.ty.shape[-1])
    low, high = (
        bb.emit(relax.op.strided_slice(x, [2], [first], [first + width // 2]))
        for first in (0, width // 2)
    )
    joined = bb.emit(relax.op.concat([bb.emit(relax.op.negative(high)), low], axis=-1))
    return bb.emit(relax.op.add(x, bb.emit(relax.op.multiply(joined, factors))))


@pytest.mark.parametrize(("width", "vectors"), [(128, 2), (96, 2), (14, 0)])
def test_schedule__an_axis_is_split_where_a_concatenation_changes_operands(width, vectors):
    shapes = ((2, 3, width), "float32"), ((3, width), "float32")
    mod = make_module(rotate, *shapes)
    got, expected = run_both(mod, *(rng.standard_normal(s, "float32") for s, _ in shapes))
    np.testing.assert_array_equal(got, expected)
    assert scheduled_text(mod).count("T.vectorized") == vectors


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("widths", "lanes"),
    [
        ((64, *[32] * 9), [16] * 10), ((24, 8, 16), [8] * 3), ((4, 4, 12, 4), [4] * 4),
        ((3, 16, 16), []), ((16,) * 65, [16]),
    ],
)  # fmt: skip
def test_schedule__each_operand_of_a_concatenation_has_a_loop_in_vectors(widths, lanes):
    """What follows the concatenation is in the loops. The last two would have too short vectors, or
    too many loops: what follows is in vectors then, without it.
    """

    def chain(bb, *parts):
        *parts, scale = parts
        joined = bb.emit(relax.op.concat([*parts], axis=-1))
        return bb.emit(relax.op.nn.relu(bb.emit(relax.op.multiply(joined, scale))))

    shapes = [((5, 7, width), "float32") for width in widths] + [((sum(widths),), "float32")]
    mod = make_module(chain, *shapes)
    got, expected = run_both(mod, *(rng.standard_normal(s, "float32") for s, _ in shapes))
    np.testing.assert_array_equal(got, expected)
    text = scheduled_text(mod)
    assert [int(n) for n in re.findall(r"T.vectorized\(T.int64\((\d+)", text)] == lanes
    assert ("if_then_else" in text) == (len(lanes) < len(widths))


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda x: x < 64, 64), (lambda x: x <= 63, 64), (lambda x: x >= 64, 64),
        (lambda x: x > 63, 64), (lambda x: tirx.LE(tirx.IntImm("int64", 64), x), 64),
        (lambda x: tirx.LT(tirx.IntImm("int64", 63), x), 64), (lambda x: x == 3, None),
        (lambda x: x * 2 < 64, None), (lambda x: x < x + 1, None),
    ],
)  # fmt: skip
def test_find_bound__first_value_beyond_a_comparison(make, bound):
    x = tirx.Var("x", "int64")
    assert find_bound(make(x), x) == bound
    assert bound is None or holds(make(x), x, 63) != holds(make(x), x, 64)
    assert bound is None or holds(make(x), x, 0) == holds(make(x), x, 63)
