"""exp, tanh, erf and sigmoid as polynomials, against double precision."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from float_models import build_model
from tvm import relax, tirx
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as TB

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.schedule.block_analysis import REPEATING_CALLS
from relayquant.codegen.schedule.vector_math import (
    EXPANSIONS,
    VECTOR_FORMS,
    create_math_pass,
    expand_math,
)
from relayquant.ir.rewrite.function import make_main

OPERATORS = {"exp": R.exp, "tanh": R.tanh, "erf": R.erf, "sigmoid": R.sigmoid}


def run_operator(name: str, x: np.ndarray) -> np.ndarray:
    """The operator compiled for this machine with the functions written out."""
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType(x.shape, "float32"))
    with builder.function("main", [data]):
        builder.emit_func_output(builder.emit(OPERATORS[name](data)))
    target = resolve_target(None)
    with target:
        mod = tvm.transform.Sequential([relax.transform.LegalizeOps(), create_math_pass(target)])(
            builder.get()
        )
    assert f"T.{name}(" not in mod.script()
    return Executor(tvm.compile(mod, target)).run("main", [x])[0]


def grid() -> np.ndarray:
    """Every exponent of float32 with both signs, and a fine grid where the functions change."""
    fine = np.linspace(-100, 100, 200_001)
    powers = np.ldexp(np.linspace(1, 2, 9), np.arange(-126, 127)[:, None]).reshape(-1)
    return np.concatenate([fine, fine / 50, powers, -powers]).astype("float32")


def test_expand_math__exp() -> None:
    x = grid()
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype("float64"))
    got = run_operator("exp", x).astype("float64")
    largest = float(np.finfo("float32").max)
    normal = (exact > 1.18e-38) & (exact <= largest)
    assert np.abs(got[normal] / exact[normal] - 1).max() <= 2e-7
    assert np.isinf(got[exact > largest * 1.0000001]).all()
    assert (got[exact < 1.17e-38] == 0).all()


@pytest.mark.parametrize(("name", "most"), [("tanh", 5e-7), ("erf", 3e-7)])
def test_expand_math__bounded_functions(name: str, most: float) -> None:
    x = grid()
    exact = np.array([getattr(math, name)(float(value)) for value in x])
    got = run_operator(name, x).astype("float64")
    assert np.abs(got - exact).max() <= most
    assert np.abs(got).max() <= 1
    small = (np.abs(x) < 1e-3) & (np.abs(x) > 1e-30)
    assert np.abs(got[small] / exact[small] - 1).max() <= 5e-7


def test_expand_math__sigmoid() -> None:
    x = grid()
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-x.astype("float64")))
    got = run_operator("sigmoid", x).astype("float64")
    assert np.abs(got - exact).max() <= 2e-7


@pytest.mark.parametrize(
    ("name", "limits"),
    [("exp", (0, np.inf)), ("tanh", (-1, 1)), ("erf", (-1, 1)), ("sigmoid", (0, 1))],
)
def test_expand_math__not_a_number_and_infinity(name: str, limits: tuple[float, float]) -> None:
    x = np.array([-np.inf, np.inf, np.nan] * 6, "float32")
    got = run_operator(name, x)[:3]
    np.testing.assert_allclose(got[:2], limits, atol=5e-7)
    assert np.isnan(got[2])


def test_expand_math__masked_softmax_is_exactly_zero() -> None:
    got = run_operator("exp", np.full(16, -np.inf, "float32"))
    assert (got == 0).all()


def chain_model(names: tuple[str, ...]) -> tvm.IRModule:
    def body(emit, x):
        for i, name in enumerate(names):
            x = emit(f"v{i}", getattr(relax.op, name)(x))
        return x

    return build_model(body, (2, 33))


def count_nodes(expr: tirx.Expr, values: dict[tirx.Var, int]) -> int:
    """Nodes of `expr` with variables replaced by their values, as TVM's simplifier does that the
    LLVM code generation calls; computed from the sizes of the values, without replacing any.
    """
    if isinstance(expr, tirx.Var):
        return values.get(expr, 1)
    if isinstance(expr, tirx.Let):
        values[expr.var] = count_nodes(expr.value, values)
        return count_nodes(expr.body, values)
    fields = ("a", "b", "condition", "true_value", "false_value", "value")
    parts = [getattr(expr, field, None) for field in fields]
    parts += [*getattr(expr, "args", ()), *getattr(expr, "indices", ())]
    return 1 + sum(count_nodes(part, values) for part in parts if isinstance(part, tirx.Expr))


def count_lowered(mod: tvm.IRModule) -> int:
    """Nodes of all stores of a module as the LLVM code generation gets them."""
    target = resolve_target(None)
    passes = [
        rq.get_pipeline(target),
        tirx.transform.BindTarget(target),
        tirx.transform.LowerIntrin(),
    ]
    stores: list[tirx.BufferStore] = []
    for func in tvm.transform.Sequential(passes)(mod).functions.values():
        if isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func.body, (tirx.BufferStore, stores.append))
    return sum(count_nodes(store.value, {}) for store in stores)


def list_chains() -> list[tuple[str, ...]]:
    """Chains of four: each function with itself, and each pair in turns."""
    names = sorted(name.removeprefix("tirx.") for name in REPEATING_CALLS)
    return [(a, b, a, b) for a, b in itertools.product(names, names) if a <= b]


@pytest.mark.sample(4)
@pytest.mark.parametrize("names", list_chains(), ids="-".join)
def test_expand_math__chains_grow_by_sums(names: tuple[str, ...]) -> None:
    """Each function of a chain adds what it takes alone. All functions that repeat their argument
    are here, those of TVM's own rules among them: a new one is found in `REPEATING_CALLS`.
    """
    alone = {name: count_lowered(chain_model((name,))) for name in set(names)}
    for length in range(1, 5):
        chain = names[:length]
        assert count_lowered(chain_model(chain)) <= sum(alone[name] for name in chain)


@pytest.mark.parametrize("names", list_chains()[::5], ids="-".join)
def test_expand_math__chains_compute_what_numpy_computes(names: tuple[str, ...]) -> None:
    mod = chain_model(names)
    x = np.linspace(-0.3, 0.1, 66, dtype="float32").reshape(2, 33)
    functions = {
        "atanh": np.arctanh,
        "erf": np.vectorize(math.erf),
        "sigmoid": lambda value: 1 / (1 + np.exp(-value)),
    }
    want = x.astype("float64")
    for name in names:
        want = functions.get(name, getattr(np, name, None))(want)
    got = Executor(rq.compile(mod)).run("main", [x])[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_expand_math__call_within_a_call_is_left() -> None:
    """What is nested in one expression of the user's own cannot be parted by the schedule. TVM's
    own tanh has no digits near 0, so it is C's.
    """

    @T.prim_func
    def nested(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            y[i] = T.tanh(T.exp(T.erf(x[i])))

    script = expand_math(nested).script()
    assert 'T.call_pure_extern("float32", "tanhf", T.exp(T.Let(' in script
    assert "T.erf(" not in script


@pytest.mark.parametrize(("divisor", "divides"), [(2**0.5, False), (1e38, True), (1e-39, True)])
def test_erf__takes_no_division(divisor: float, divides: bool) -> None:
    """Neither does it of a quotient by a number whose reciprocal is a normal number."""
    number = np.float32(divisor).item()

    @T.prim_func
    def quotient(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            y[i] = T.erf(x[i] / T.float32(number))

    assert (" / " in expand_math(quotient).script()) == divides


def test_gelu__agrees_with_double_precision() -> None:
    x = np.linspace(-8, 8, 4096, dtype="float32")

    def body(emit, x):
        erf = emit("erf", R.erf(emit("part", R.divide(x, R.const(2**0.5, "float32")))))
        return emit("y", R.multiply(x, emit("sum", R.add(erf, R.const(1.0, "float32")))))

    exe = rq.compile(build_model(body, x.shape))
    exact = x.astype("float64") * (1 + np.array([math.erf(value / 2**0.5) for value in x.tolist()]))
    (found,) = Executor(exe).run("main", [x])
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=8 * 3e-7)


def build_vector_loop(name: str, dtype: str = "float32", lanes: int = 16) -> tirx.PrimFunc:
    """y[i] = f(x[i]), of vectors."""
    with IRBuilder() as builder, TB.prim_func():
        TB.func_name("main")
        x, y = (TB.arg(each, TB.Buffer((lanes,), dtype)) for each in "xy")
        with TB.vectorized(lanes) as i:
            TB.buffer_store(y, getattr(tirx, name.removeprefix("tirx."))(x[i]), [i])
    return builder.get()


def has_loop(func: tirx.PrimFunc) -> bool:
    loops: list[tirx.For] = []
    func = tirx.transform.VectorizeLoop()(tvm.IRModule({"main": func}))["main"]
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    return bool(loops)


@pytest.mark.parametrize("name", [*EXPANSIONS, *VECTOR_FORMS])
def test_expand_math__vectors_stay_vectors(name: str) -> None:
    """TVM takes a loop apart whose calls it knows no vectors of; LLVM does not always mend it."""
    assert not has_loop(expand_math(build_vector_loop(name)))


@pytest.mark.parametrize("name", VECTOR_FORMS)
def test_vector_forms__are_needed(name: str) -> None:
    assert has_loop(build_vector_loop(name))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "exact"), [("nearbyint", np.rint), ("rsqrt", lambda x: 1 / np.sqrt(x))]
)
def test_vector_forms__give_the_bits_of_numpy(name: str, exact, dtype: str) -> None:
    x = np.concatenate([grid()[::200], np.arange(-500, 500) / 2, [np.inf, -np.inf, np.nan]]).astype(
        dtype
    )
    x = np.resize(x, (x.size + 15) // 16 * 16)
    func = expand_math(build_vector_loop(name, dtype)).with_attr("global_symbol", "main")
    run = tvm.compile(tvm.IRModule({"main": func}), resolve_target(None))["main"]
    got = np.empty_like(x)
    for first in range(0, x.size, 16):
        y = tvm.runtime.empty((16,), dtype)
        run(tvm.runtime.tensor(x[first : first + 16]), y)
        got[first : first + 16] = y.numpy()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, exact(x))


@pytest.mark.parametrize("name", OPERATORS)
def test_functions__of_a_bfloat16_that_is_read_twice(name):
    """Each result in bfloat16 is rounded once, as the reference does, and no variable stands for
    bfloat16.
    """

    def body(emit, x):
        wide = emit("wide", R.astype(emit("narrow", R.astype(x, "bfloat16")), "float32"))
        product = emit("product", R.multiply(wide, emit("f", OPERATORS[name](wide))))
        return emit("back", R.astype(emit("end", R.astype(product, "bfloat16")), "float32"))

    mod = build_model(body, (4, 24))
    x = np.linspace(-3, 3, 96, dtype="float32").reshape(4, 24)
    (found,), (expected,) = Executor(rq.compile(mod)).run("main", [x]), rq.reference.run(mod, x)
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=0)
    assert (found == expected).mean() > 0.95
    assert not (found.view("uint32") & 0xFFFF).any()


@pytest.mark.optimized
@pytest.mark.parametrize("name", EXPANSIONS)
def test_expand_math__of_what_is_the_same_in_all_lanes(name):
    """Products of numbers that do not depend on the position, alone and beside one that does.

    LLVM makes vectors of numbers that the C library computed.
    """
    function = getattr(relax.op, name.removeprefix("tirx."))
    x = relax.Var("x", relax.TensorType((1,), "float32"))
    at = relax.Var("at", relax.TensorType((8,), "int64"))

    def emit_body(builder):
        taken = builder.emit(relax.op.take(x, at, axis=0))
        curve = builder.emit(function(taken))
        lifted = builder.emit(relax.op.add(curve, relax.const(1.0, "float32")))
        product = builder.emit(relax.op.multiply(lifted, relax.const(3.0, "float32")))
        moving = builder.emit(relax.op.astype(at, "float32"))
        return relax.Tuple([product, builder.emit(relax.op.add(product, moving))])

    number, places = np.array([0.7], "float32"), np.zeros(8, "int64")
    machine = Executor(rq.compile(make_main([x, at], emit_body)))
    value = float(run_operator(name.removeprefix("tirx."), number)[0])
    for found in machine.run("main", [number, places]):
        np.testing.assert_allclose(found, np.full(8, (value + 1) * 3), rtol=1e-6)
