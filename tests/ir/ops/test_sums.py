"""Sums of products against Python integers, where int32 does not hold them: every row that sums
products, every pair of dtypes, on data that makes the largest sum there is.

A register has a bound: a new row makes its sums by `RealizeContext.accumulate`, or fails here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from drawing import count_examples
from float_models import Chain, build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.rewrites.split_int64_accumulation import split_int64_sums
from relayquant.flow.testing.check import observe_parameters
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.accumulator_range import bound_sums, choose_accumulator_dtype
from relayquant.ir.ops import BUILTIN_OPS, QuantOp
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import make_main

SUMMING = {row.name: row for row in BUILTIN_OPS if row.accumulator_axis is not None}
#: one row of each operator, on which all pairs of dtypes are tried
PLAIN = ("conv1d", "conv2d", "conv2d_transpose", "dense", "batch_matmul")
DTYPES = ("uint8", "int8", "int16")
#: a float32, so that no bound of a clip is rounded
BIAS, FAR = 1000, 2.0**40
LIMIT = 2**31


def make_backend(accumulator: rq.config.Accumulator | str = "int64") -> rq.BackendConfig:
    """All summing rows on all pairs of dtypes."""
    dtypes = tuple(
        rq.config.DTypeConfig(input=data, output=out, weight=weight, accumulator=accumulator)
        for data in DTYPES
        for weight in DTYPES
        for out in DTYPES
    )
    rows = tuple(rq.config.PatternConfig(row, dtypes) for row in SUMMING.values())
    return replace(rq.get_backend_config("generic"), name="wide", patterns=rows)


def span(dtype: str) -> int:
    """Largest q - zero point, with the zero point at the lowest integer."""
    low, high = INTEGER_LIMITS[dtype]
    return high - low


def fixed_config(data: str, weight: str) -> rq.QConfig:
    """Real values are integers less the lowest one of their dtype; weights those of int8."""
    lowest = rq.observers.Fixed(scale=1.0, zero_point=INTEGER_LIMITS[data][0])
    zero = 0 if weight != "uint8" else 128
    return rq.QConfig(
        rq.TensorConfig(rq.QSpec(data), lowest),
        rq.TensorConfig(rq.QSpec(weight), rq.observers.Fixed(scale=1.0, zero_point=zero)),
    )


def largest_weight(dtype: str) -> int:
    return INTEGER_LIMITS[dtype][1] - (128 if dtype == "uint8" else 0)


def count_needed(row: QuantOp, data: str, weight: str) -> int:
    """Products of the largest integers whose sum passes int32."""
    factor = span(data) if row.name == "batch_matmul" else largest_weight(weight)
    return LIMIT // (span(data) * factor) + 2


def make_row_model(row: QuantOp, count: int, factor: float, inputs: dict[str, np.ndarray]):
    """(float model of a row whose two output channels sum `count` times x * factor and its
    negative, exact results for the `inputs`, all of one value), by Python integers.
    """
    sizes = {"conv1d": 1, "conv2d": 2}.get(row.op.split(".")[-1].removesuffix("_transpose"), 0)
    ones = (1,) * sizes
    signs = np.array([1.0, -1.0], "float32")

    def body(emit: Chain, *values: relax.Expr) -> relax.Expr:
        x = values[0]
        if row.name == "batch_matmul":
            return emit("out", op.matmul(x, values[1]))
        weight = np.repeat(signs[None, :] * np.float32(factor), count, 0)
        if not sizes:
            value = emit("product", op.matmul(x, relax.const(weight)))
        elif "transpose" in row.op:
            weight = weight.reshape(count, 2, *ones)
            value = emit("product", op.nn.conv2d_transpose(x, relax.const(weight)))
        else:
            weight = relax.const(np.ascontiguousarray(weight.T).reshape(2, count, *ones))
            value = emit("product", (op.nn.conv1d, op.nn.conv2d)[sizes - 1](x, weight))
        if "bias" in row.pattern.parts:
            bias = relax.const(np.full((1, 2, *ones) if sizes else (2,), BIAS, "float32"))
            value = emit("biased", op.add(value, bias))
        if "residual" in row.pattern.parts:
            operands = (values[1], value) if row.name.endswith("_swapped") else (value, values[1])
            value = emit("sum", op.add(*operands))
        if "_relu" in row.name:
            value = emit("relu", op.nn.relu(value))
        if "_clip" in row.name:
            value = emit("clip", op.clip(value, -FAR, FAR))
        return value

    shapes = [(1, count, *ones) if sizes else (1, 1, count)]
    if row.name == "batch_matmul":
        shapes.append((1, count, 1))
    if "residual" in row.pattern.parts:
        shapes.append((1, 2, *ones))
    mod = build_model(body, *shapes)
    at = int(inputs["x"])
    arrays = {
        name: np.full(shape, inputs.get(name, 0), "float32")
        for name, shape in zip(("x", "y"), shapes, strict=False)
    }
    if row.name == "batch_matmul":
        return mod, arrays, [count * at * int(inputs["y"])]
    bias = BIAS if "bias" in row.pattern.parts else 0
    results = [count * at * int(sign * factor) + bias for sign in signs]
    return mod, arrays, [max(v, 0) if "_relu" in row.name else v for v in results]


def quantize_fixed(mod: tvm.IRModule, config: rq.QConfig, backend: rq.BackendConfig, inputs):
    """The integer module by parameters that are given."""
    mapping = rq.QConfigMapping().set_global(config)
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend, strict=True)
    prepared = observe_parameters(prepared, [inputs])
    return rq.lower(rq.convert_to_reference(prepared), backend)


def check_row(row: QuantOp, data: str, weight: str) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """The integer module in numpy against Python integers."""
    count = count_needed(row, data, weight)
    values = {"x": span(data), "y": span(data) if row.name == "batch_matmul" else 0}
    mod, inputs, exact = make_row_model(row, count, largest_weight(weight), values)
    assert max(map(abs, exact)) >= LIMIT
    integer = quantize_fixed(mod, fixed_config(data, weight), make_backend(), inputs)
    (have,) = rq.reference.run(integer, inputs)
    want = np.array(exact, "float64")
    if "residual" in row.pattern.parts:  # stored in `data`, which they pass at either end
        want = np.clip(want, 0, span(data))
    np.testing.assert_array_equal(have.reshape(-1), want.astype("float32"))
    (entry,) = rq.ledger(integer).quantized
    assert entry.accumulator == "int64"
    return integer, inputs


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SUMMING)
def test_every_row__sums_that_int32_does_not_hold(name):
    check_row(SUMMING[name], "int16", "int8")


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("data", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_every_pair_of_dtypes__sums_that_int32_does_not_hold(name, data, weight):
    check_row(SUMMING[name], data, weight)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "data", "weight"),
    [*((name, "int16", "int8") for name in PLAIN), ("conv2d", "uint8", "int8")],
)
def test_compiled__equals_numpy(name, data, weight):
    integer, inputs = check_row(SUMMING[name], data, weight)
    assert rq.verify(integer, inputs).is_equal


def test_small_sums__keep_int32():
    row = SUMMING["dense_bias"]
    count = count_needed(row, "int16", "int8") - 2
    mod, inputs, exact = make_row_model(row, count, 127, {"x": span("int16")})
    assert max(map(abs, exact)) < LIMIT
    integer = quantize_fixed(mod, fixed_config("int16", "int8"), make_backend(), inputs)
    assert rq.ledger(integer).row("biased").accumulator == ""
    assert "int64" not in integer["main"].script()
    np.testing.assert_array_equal(
        rq.reference.run(integer, inputs)[0].reshape(-1), np.array(exact, "float32")
    )


@settings(max_examples=count_examples(60), deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(["dense", "conv1d", "transpose"]),
)
def test_bound__is_the_largest_sum_there_is(seed, data, weight, kind):
    rng = np.random.default_rng(seed)
    low, high = INTEGER_LIMITS[data]
    zero = int(rng.integers(low, high + 1))
    outputs, inputs, groups = 4, 3, int(rng.choice([1, 2])) if kind != "dense" else 1
    x = relax.Var("x", relax.TensorType((1, inputs * groups, 6), data))
    limits = INTEGER_LIMITS[weight]
    shape = (outputs, inputs) if kind == "dense" else (outputs, inputs, 3)
    if kind == "transpose":
        x = relax.Var("x", relax.TensorType((1, inputs * groups, 6, 6), data))
        shape = (inputs * groups, outputs // groups, 3, 1)
    array = rng.integers(*limits, shape, endpoint=True).astype(weight)
    zeros = rng.integers(*limits, outputs, endpoint=True).astype("int32")
    make = {"dense": qnn.dense, "conv1d": qnn.conv1d, "transpose": qnn.conv2d_transpose}[kind]
    attrs = {} if kind == "dense" else {"groups": groups}
    call = make(x, relax.const(array, weight), zero, zeros, 1.0, 1.0, **attrs)
    wants = []
    for channel in range(outputs):
        if kind == "transpose":
            group, at = divmod(channel, outputs // groups)
            taps = array[group * inputs : (group + 1) * inputs, at]
        else:
            taps = array[channel]
        products = [
            [(q - zero) * (int(w) - int(zeros[channel])) for q in (low, high, zero)]
            for w in taps.reshape(-1)
        ]
        wants.append((sum(map(min, products)), sum(map(max, products))))
    have = bound_sums(call)
    assert list(zip(*(bound.tolist() for bound in have), strict=True)) == wants


@pytest.mark.slow
def test_parts__of_a_convolution_run_on_kernels():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1, 400, 5, 5)).astype("float32")
    weight = rng.uniform(-1, 1, (6, 400, 3, 3)).astype("float32")

    def body(emit: Chain, a: relax.Expr) -> relax.Expr:
        conv = emit("conv", op.nn.conv2d(a, relax.const(weight), padding=1, strides=2))
        return emit("out", op.nn.relu(emit("sum", op.add(conv, emit.constant(1, 6, 1, 1)))))

    mod = build_model(body, x.shape)
    config = rq.QConfig(
        rq.TensorConfig(rq.QSpec("int16"), rq.observers.MinMax()),
        rq.get_backend_config("x86").default_qconfig.weight,
    )
    integer = quantize_fixed(mod, config, rq.get_backend_config("x86"), {"x": x})
    parted = Graph(split_int64_sums(integer))
    convs = [b.var for b in parted.bindings if parted.op_name(b.var) == "relax.qnn.conv2d"]
    assert len(convs) > 1
    assert all(str(var.ty.dtype) == "int32" for var in convs)
    assert all(choose_accumulator_dtype(parted.call_of(var)) == "int32" for var in convs)
    assert rq.verify(integer, {"x": x}).is_equal
    wide, want = rq.reference.run(integer, {"x": x})[0], rq.reference.run(mod, {"x": x})[0]
    assert np.abs(wide - want).max() < 0.01 * np.abs(want).max()


def test_groups__keep_the_loop_nest_of_64_bits():
    count = count_needed(SUMMING["conv2d"], "int16", "int8")
    weight = np.full((2, count, 1, 1), 127, "float32")
    x = np.full((1, 2 * count, 1, 1), span("int16"), "float32")
    mod = build_model(
        lambda e, a: e("out", op.nn.conv2d(a, relax.const(weight), groups=2)), x.shape
    )
    integer = quantize_fixed(mod, fixed_config("int16", "int8"), make_backend(), {"x": x})
    exact = count * 127 * span("int16")
    np.testing.assert_array_equal(rq.reference.run(integer, {"x": x})[0], np.float32(exact))
    assert rq.verify(integer, {"x": x}).is_equal


@pytest.mark.slow
def test_dynamic__sums_that_int32_does_not_hold():
    count = 140_000
    weight = rq.TensorConfig(
        rq.QSpec("int8", rq.config.Scheme.SYMMETRIC), rq.observers.Fixed(1 / 127, 0)
    )
    config = rq.QConfig(rq.TensorConfig(rq.QSpec("uint8", is_dynamic=True)), weight)
    x = np.ones((2, count), "float32")
    mod = build_model(
        lambda e, a: e("out", op.matmul(a, relax.const(np.ones((count, 2), "float32")))), x.shape
    )
    mapping = rq.QConfigMapping().set_global(config)
    integer = rq.lower(rq.convert_to_reference(rq.calibrate(
        rq.prepare(mod, None, qconfig_mapping=mapping, backend="generic"), [{"x": x}]
    )))  # fmt: skip
    assert rq.ledger(integer).row("out").accumulator == "int64"
    have = rq.reference.run(integer, {"x": x})[0]
    np.testing.assert_allclose(have, x.astype("float64") @ np.ones((count, 2)), rtol=1e-6)
    assert rq.verify(integer, {"x": x}).is_equal
    (row,) = rq.analysis.accumulator_report(integer, [{"x": x}]).rows
    assert row.worst == count * 255 * 127
    assert (row.highest, row.channels) == (row.bound_high, ())


@pytest.mark.parametrize(
    ("bits", "overflow"), [(32, rq.config.Overflow.SATURATE), (14, rq.config.Overflow.WRAP)]
)
def test_narrow_register__gets_the_exact_sum(bits, overflow):
    accumulator = rq.config.Accumulator(bits, overflow, rq.config.OverflowBound.NONE)
    row = SUMMING["dense"]
    count = count_needed(row, "int16", "int8")
    mod, inputs, exact = make_row_model(row, count, 127, {"x": span("int16")})
    backend = make_backend(accumulator)
    integer = quantize_fixed(mod, fixed_config("int16", "int8"), backend, inputs)
    want = accumulator.narrow(np.array(exact))
    have = rq.reference.run(integer, inputs)[0].reshape(-1)
    np.testing.assert_array_equal(have, want.astype("float32"))
    assert rq.verify(integer, inputs).is_equal
    report = rq.analysis.accumulator_report(integer, [inputs])
    (entry,) = report.rows
    assert (entry.highest[0], entry.lowest[1]) == tuple(exact)
    assert entry.overflows == (1, 1)
    assert report.overflowing == (entry,)


def test_report__counts_registers_of_the_kernels():
    row = SUMMING["dense"]
    count = count_needed(row, "int16", "int8")
    mod, inputs, exact = make_row_model(row, count, 127, {"x": span("int16")})
    integer = quantize_fixed(mod, fixed_config("int16", "int8"), make_backend(), inputs)
    (entry,) = rq.analysis.accumulator_report(integer, [inputs]).rows
    assert entry.accumulator == rq.config.Accumulator(64)
    assert (entry.lowest, entry.highest) == (tuple(exact),) * 2
    assert (entry.bound_high[0], entry.bound_low[1]) == tuple(exact)
    assert not entry.channels


# --- sums and products without weights ------------------------------------------------------------


def run_both(expr: relax.Expr, inputs: dict[str, relax.Var], values: dict[str, np.ndarray]):
    """One operator in numpy, compiled code having been found equal."""
    mod = make_main(list(inputs.values()), lambda builder: builder.emit(expr))
    assert rq.verify(mod, values).is_equal
    return rq.reference.run(mod, values)[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["mean", "symbolic", "avg_pool2d"])
def test_mean__of_more_values_than_int32_has_room_for(kind):
    length = LIMIT // span("int16") + 200
    size = tvm.tirx.Var("n", "int64") if kind == "symbolic" else length
    shape = (1, 2, size, 1) if kind == "avg_pool2d" else (2, size)
    x = relax.Var("x", relax.TensorType(shape, "int16"))
    data = np.full([1, 2, length, 1] if len(shape) == 4 else [2, length], 32767, "int16")
    data.reshape(2, -1)[1] = -32768
    if kind == "avg_pool2d":
        attrs = {"pool_size": (length, 1)}
        expr = qnn.avg_pool2d(x, 1.0, -32768, 1024.0, 0, **attrs)
    else:
        expr = qnn.mean(x, 1.0, -32768, 1024.0, 0, axes=[1])
    have = run_both(expr, {"x": x}, {"x": data}).reshape(-1)
    assert have.tolist() == [round(65535 / 1024), 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1, 600])
def test_mul__of_values_whose_product_passes_int32(size):
    x, y = (relax.Var(name, relax.TensorType((size,), "int16")) for name in "xy")
    expr = qnn.mul(x, y, 1.0, -32768, 1.0, -32768, 2.0**20, 0, out_dtype="int16")
    data = {"x": np.full(size, 32767, "int16"), "y": np.full(size, 30000, "int16")}
    have = run_both(expr, {"x": x, "y": y}, data)
    assert set(have.tolist()) == {round(65535 * 62768 / 2**20)}


def test_int32_sums_by_hand__warn_in_the_reference():
    x = relax.Var("x", relax.TensorType((1, 300), "int16"))
    weight = relax.const(np.full((1, 300), 127, "int8"), "int8")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(qnn.dense(x, weight, -32768, 0, 1.0, 1.0)))
    with pytest.warns(RuntimeWarning, match=r"qnn\.dense: int32 cannot hold 1 of 1 sum,"):
        (have,) = rq.reference.run(builder.finalize(), {"x": np.full((1, 300), 32767, "int16")})
    assert have.item() == 300 * 127 * 65535 - 2**32


# --- other formats --------------------------------------------------------------------------------


def test_onnx__written_and_read_again(tmp_path):
    row = SUMMING["dense_bias"]
    count = count_needed(row, "int16", "int8")
    mod, inputs, exact = make_row_model(row, count, 127, {"x": span("int16")})
    integer = quantize_fixed(mod, fixed_config("int16", "int8"), make_backend(), inputs)
    path = tmp_path / "wide.onnx"
    rq.export_onnx(integer, path)
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator(str(path))
    (want,) = evaluator.run(None, inputs)
    np.testing.assert_allclose(want.reshape(-1), exact, rtol=1e-6)  # sums in float
    adopted = rq.lower(rq.load(path)[0], rq.get_backend_config("generic"))
    assert [entry.accumulator for entry in rq.ledger(adopted).quantized] == ["int64"]
    (have,) = rq.reference.run(adopted, inputs)
    np.testing.assert_array_equal(have.reshape(-1), np.array(exact, "float32"))


def test_relay__has_no_sums_of_64_bits():
    row = SUMMING["conv2d"]
    count = count_needed(row, "int16", "int8")
    mod, inputs, _ = make_row_model(row, count, 127, {"x": span("int16")})
    integer = quantize_fixed(mod, fixed_config("int16", "int8"), make_backend(), inputs)
    with pytest.raises(rq.ModelError, match=r"do not fit int32.*keep it in float"):
        rq.relay.to_text(integer)
