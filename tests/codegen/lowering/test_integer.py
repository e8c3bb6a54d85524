"""Integer lowering: operators on kernels, bit-equal to numpy, static and symbolic batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from operator_names import list_operators
from tvm import relax
from tvm.target import Target

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.integer import product
from relayquant.codegen.kernels.integer.convolution.winograd import build_winograd
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.integer.lower import call_kernels, lower_integer, time_module
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.backends.x86 import X86

RNG = np.random.default_rng(7)


def constant(*shape: int) -> relax.Expr:
    return relax.const((RNG.standard_normal(shape) * 0.3).astype("float32"))


def build_model(body, shape: tuple, symbolic: bool, axis: int = 0) -> tvm.IRModule:
    """main(x) = body(x), with one dimension, the first, symbolic on request."""
    sizes = list(shape)
    if symbolic:
        sizes[axis] = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType(sizes, "float32"))
    return make_main([x], lambda builder: body(builder, x))


def conv(builder, x, out, in_, kernel=3, **attrs):
    return builder.emit(relax.op.nn.conv2d(x, constant(out, in_, kernel, kernel), **attrs))


def conv_bias_relu(builder, x):
    y = conv(builder, x, 5, 3, padding=1)
    y = builder.emit(relax.op.add(y, constant(1, 5, 1, 1)))
    return builder.emit(relax.op.nn.relu(y))


def residual(builder, x):
    first = builder.emit(relax.op.nn.relu(conv(builder, x, 17, 3, padding=1)))
    second = conv(builder, first, 17, 17, padding=1)
    total = builder.emit(relax.op.add(second, first))
    return conv(builder, builder.emit(relax.op.clip(total, 0.0, 6.0)), 4, 17, 1)


def depthwise(builder, x):
    y = conv(builder, x, 16, 3, 1)
    return conv(builder, y, 16, 1, padding=[0, 1, 2, 1], strides=2, groups=16)


def grouped_dilated(builder, x):
    y = conv(builder, x, 12, 3, 1)
    return conv(builder, y, 8, 3, dilation=2, groups=4)


def pools(builder, x):
    y = builder.emit(relax.op.nn.max_pool2d(conv(builder, x, 6, 3), 2, 2, padding=1))
    y = builder.emit(relax.op.nn.avg_pool2d(y, 2, 1, count_include_pad=False))
    y = conv(builder, y, 6, 6, 1)
    y = builder.emit(relax.op.mean(y, [2, 3], keepdims=True))
    y = builder.emit(relax.op.squeeze(y, [2, 3]))
    return builder.emit(relax.op.matmul(y, constant(6, 10)))


def stem(builder, x):
    y = builder.emit(relax.op.nn.relu(conv(builder, x, 8, 3, padding=1)))
    return conv(builder, builder.emit(relax.op.nn.max_pool2d(y, 3, 2, padding=1)), 4, 8, 1)


def joined(builder, x):
    a, b = conv(builder, x, 5, 3, 1), conv(builder, x, 3, 3, 1)
    both = builder.emit(relax.op.concat([a, b, a], axis=1))
    return conv(builder, both, 4, 13, 1)


def branches(builder, x):
    stem = builder.emit(relax.op.nn.relu(conv(builder, x, 16, 3, 1)))
    parts = [
        conv(builder, stem, 5, 16, 1),
        builder.emit(relax.op.nn.max_pool2d(conv(builder, stem, 7, 16, 1), 3, 1, padding=1)),
        conv(builder, stem, 32, 16, padding=1),
    ]
    both = builder.emit(relax.op.concat(parts, axis=1))
    return conv(builder, builder.emit(relax.op.nn.relu(both)), 4, 44, 1)


def elementwise(builder, x):
    a, b = conv(builder, x, 5, 3, 1), conv(builder, x, 5, 3, 1)
    y = builder.emit(relax.op.multiply(a, builder.emit(relax.op.sigmoid(b))))
    y = builder.emit(relax.op.subtract(y, b))
    return conv(builder, y, 4, 5, 1)


def transposed(builder, x):
    y = builder.emit(relax.op.nn.conv2d_transpose(x, constant(3, 5, 3, 3), strides=2, padding=1))
    return conv(builder, y, 4, 5, 1)


def transposed_dilated(builder, x):
    attrs = {"strides": 2, "padding": 1, "dilation": [2, 3]}
    y = builder.emit(relax.op.nn.conv2d_transpose(x, constant(3, 5, 3, 3), **attrs))
    return conv(builder, y, 4, 5, 1)


def channel_mean(builder, x):
    y = conv(builder, x, 16, 3, 1)
    return builder.emit(relax.op.multiply(y, builder.emit(relax.op.mean(y, [1], keepdims=True))))


def padded(builder, x):
    y = conv(builder, x, 4, 3, 1)
    y = builder.emit(relax.op.nn.pad(y, [0, 0, 2, 2, 0, 0, 0, 0], "constant", 0.0))
    return conv(builder, y, 4, 8, 1)


NCHW = (2, 3, 9, 7)
IMAGE_MODELS = [
    conv_bias_relu, residual, depthwise, grouped_dilated, pools, joined, branches, elementwise,
    transposed, transposed_dilated, channel_mean, padded,
]  # fmt: skip


def attention(builder, x):
    q = builder.emit(relax.op.matmul(x, constant(12, 8)))
    k = builder.emit(relax.op.matmul(x, constant(12, 8)))
    scores = builder.emit(relax.op.matmul(q, builder.emit(relax.op.permute_dims(k, [0, 2, 1]))))
    return builder.emit(relax.op.matmul(scores, builder.emit(relax.op.matmul(x, constant(12, 5)))))


#: int16 activations, weights as they are by default
INT16 = rq.QConfigMapping().set_global(
    replace(
        X86.default_qconfig,
        activation=rq.TensorConfig(
            rq.QSpec("int16", rq.config.Scheme.SYMMETRIC), rq.observers.MinMax()
        ),
    )
)


def quantize_random(
    mod: tvm.IRModule, shape: tuple, mapping: rq.QConfigMapping | None = None
) -> tuple[tvm.IRModule, np.ndarray]:
    data = RNG.standard_normal((4, *shape)).astype("float32")
    return rq.quantize(mod, None, list(data), qconfig_mapping=mapping), data[0]


@pytest.mark.slow
@pytest.mark.sample(20)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("body", IMAGE_MODELS, ids=lambda f: f.__name__)
def test_lower_integer__images_equal_numpy(body, symbolic):
    qmod, x = quantize_random(build_model(body, NCHW, symbolic), NCHW)
    got = Executor(rq.compile(qmod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


def wide_residual(builder, x):
    first = builder.emit(relax.op.nn.relu(conv(builder, x, 64, 3, 1)))
    second = conv(builder, first, 64, 64, padding=1)
    total = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(second, first))))
    return conv(builder, total, 32, 64, padding=1)


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_lower_integer__transforms_for_whole_vectors_of_channels(symbolic, monkeypatch):
    """Those of Winograd: the instruction set prefers them, and gets what numpy gets."""
    shape, built = (3, 3, 12, 13), []
    qmod, x = quantize_random(build_model(wide_residual, shape, symbolic), shape)

    def build(*args):
        built.append(args)
        return build_winograd(*args)

    monkeypatch.setattr(product, "build_winograd", build)
    haswell = "llvm -mcpu=haswell"
    module = rq.compile(qmod, haswell)
    assert len(built) == 2
    monkeypatch.undo()
    if runs_here(haswell):
        got = Executor(module).run("main", [x])[0]
        np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_lower_integer__attention_equals_numpy(symbolic):
    shape = (2, 7, 12)
    qmod, x = quantize_random(build_model(attention, shape, symbolic), shape)
    got = Executor(rq.compile(qmod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


@pytest.mark.slow
def test_lower_integer__attention_of_any_length():
    qmod, x = quantize_random(build_model(attention, (1, 7, 12), True, axis=1), (1, 7, 12))
    executor, lowered = Executor(rq.compile(qmod)), lower_integer(qmod, resolve_target(None))
    assert "R.qnn.batch_matmul" not in lowered.script()
    for length in (7, 1, 131):
        x = np.random.default_rng(length).standard_normal((1, length, 12), "float32")
        got = executor.run("main", [x])[0]
        np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


def test_lower_integer__product_whose_sizes_are_written_in_two_orders():
    """DeBERTa's positions: one operand has n * 4 matrices, the other one 4 * n."""
    n, four = tvm.tirx.Var("n", "int64"), tvm.tirx.IntImm("int64", 4)
    x = relax.Var("x", relax.TensorType([n, 4, 5, 8], "uint8"))
    y = relax.Var("y", relax.TensorType([n, 4, 6, 8], "uint8"))
    zeros, scales = relax.const(3, "int32"), relax.const(0.5, "float32")

    def emit(builder):
        left, right = (
            builder.emit(relax.op.reshape(data, relax.ShapeExpr([count, rows, 8])))
            for data, count, rows in ((x, tvm.tirx.Mul(n, four), 5), (y, tvm.tirx.Mul(four, n), 6))
        )
        return qnn.batch_matmul(left, right, zeros, zeros, scales, scales)

    mod = make_main([x, y], emit)
    lowered = lower_integer(mod, resolve_target(None))
    assert "R.qnn.batch_matmul" not in lowered.script()
    arrays = [RNG.integers(0, 256, (3, 4, rows, 8)).astype("uint8") for rows in (5, 6)]
    left, right = (array.reshape(12, -1, 8).astype("int32") - 3 for array in arrays)
    got = Executor(rq.compile(mod)).run("main", arrays)[0]
    np.testing.assert_array_equal(got, left @ right.transpose(0, 2, 1))


def attention_of_heads(builder, x):
    """Of 3 heads; all operands are rows of dense layers."""

    def heads(axes):
        rows = builder.emit(relax.op.matmul(x, constant(12, 12)))
        split = builder.emit(relax.op.reshape(rows, (x.ty.shape[0], 7, 3, 4)))
        return builder.emit(relax.op.permute_dims(split, axes))

    scores = builder.emit(relax.op.matmul(heads([0, 2, 1, 3]), heads([0, 2, 3, 1])))
    return builder.emit(relax.op.matmul(scores, heads([0, 2, 1, 3])))


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_lower_integer__values_of_heads_are_not_transposed(symbolic):
    shape = (2, 7, 12)
    qmod, x = quantize_random(build_model(attention_of_heads, shape, symbolic), shape)
    graph = Graph(lower_integer(convert_layout(qmod), resolve_target("llvm -mcpu=cascadelake")))
    axes = [
        [int(axis) for axis in graph.call_of(binding.var).attrs.axes]
        for binding in graph.bindings
        if graph.op_name(binding.var) == "relax.permute_dims"
    ]
    assert axes == [[0, 2, 1, 3]] * 2  # the first operand, and the second one of the scores
    got = Executor(rq.compile(qmod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


@pytest.mark.slow
def test_lower_integer__dense_of_any_batch_and_length():
    batch, length = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("length", "int64")
    x = relax.Var("x", relax.TensorType((batch, length, 12), "float32"))

    def emit(builder):
        y = builder.emit(relax.op.matmul(x, constant(12, 24)))
        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, constant(24)))))
        return relax.op.matmul(y, constant(24, 12))

    mod = make_main([x], emit)
    qmod, _ = quantize_random(mod, (2, 9, 12))
    lowered = lower_integer(qmod, resolve_target("llvm -mcpu=cascadelake"))
    assert "qnn.dense" not in list_operators(lowered)
    executor = Executor(rq.compile(qmod))
    for shape in [(1, 1, 12), (3, 17, 12), (40, 2, 12)]:
        data = RNG.standard_normal(shape).astype("float32")
        got = executor.run("main", [data])[0]
        np.testing.assert_array_equal(got, rq.reference.run(qmod, [data])[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("body", IMAGE_MODELS, ids=lambda f: f.__name__)
def test_lower_integer__leaves_no_integer_operator(body):
    qmod, _ = quantize_random(build_model(body, NCHW, False), NCHW)
    lowered = lower_integer(convert_layout(qmod), resolve_target("llvm -mcpu=cascadelake"))
    assert not [name for name in list_operators(lowered) if name.startswith("qnn.")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "copies"), [(branches, 1), (joined, 1)], ids=["one is pooled", "one is read twice"]
)
def test_lower_integer__results_are_written_into_a_concatenation(body, copies):
    qmod, _ = quantize_random(build_model(body, NCHW, False), NCHW)
    graph = Graph(lower_integer(convert_layout(qmod), resolve_target("llvm -mcpu=cascadelake")))
    calls = [graph.call_of(binding.var) for binding in graph.bindings]
    names = [call.args[0].name_hint for call in calls if op_name(call).startswith("relax.call_tir")]
    assert sum(name.startswith("qnn_copy_columns") for name in names) == copies
    assert not any(name.startswith("qnn_concatenate") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("body", [residual, depthwise, transposed, pools], ids=lambda f: f.__name__)
def test_lower_integer__int16_images_equal_numpy(body):
    qmod, x = quantize_random(build_model(body, NCHW, True), NCHW, INT16)
    assert "int16" in qmod.script()
    lowered = lower_integer(convert_layout(qmod), resolve_target("llvm -mcpu=cascadelake"))
    assert not [name for name in list_operators(lowered) if name.startswith("qnn.")]
    got = Executor(rq.compile(qmod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["llvm", "llvm -mcpu=haswell", "llvm -mcpu=skylake-avx512", None]
)
def test_lower_integer__every_instruction_set_equals_numpy(target):
    if target is not None and not runs_here(target):
        pytest.skip(f"this machine cannot run code for {target}")
    qmod, x = quantize_random(build_model(residual, NCHW, True), NCHW)
    got = Executor(rq.compile(qmod, target)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


def runs_here(target: str) -> bool:
    """Whether this machine has the instruction set that kernels for `target` use."""
    from tvm.target.codegen import llvm_cpu_has_features

    isa = select_isa(resolve_target(target))
    return all(llvm_cpu_has_features(f, resolve_target(None)) for f in isa.features)


def cell(units: int):
    """A recurrent cell: two gates of `units`, cut out of one product, and a residual."""

    def body(builder, x):
        gates = builder.emit(relax.op.matmul(x, constant(12, 2 * units)))
        left = builder.emit(relax.op.strided_slice(gates, [1], [0], [units]))
        right = builder.emit(relax.op.strided_slice(gates, [1], [units], [2 * units]))
        y = builder.emit(relax.op.tanh(left))
        y = builder.emit(relax.op.multiply(builder.emit(relax.op.sigmoid(right)), y))
        y = builder.emit(relax.op.subtract(y, right))
        return builder.emit(relax.op.matmul(y, constant(units, 3)))

    return body


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("units", "symbolic", "is_fused"),
    [(32, False, True), (19, False, True), (400, False, False), (32, True, False)],
)
def test_lower_integer__fuses_operators_on_few_values(units, symbolic, is_fused):
    qmod, x = quantize_random(build_model(cell(units), (1, 12), symbolic), (1, 12))
    target = resolve_target(None)
    left = {*list_operators(lower_integer(convert_layout(qmod), target))}
    fused = {f"qnn.{name}" for name in ("lookup", "mul", "subtract")}
    assert left & fused == (fused if is_fused else set())
    # The look at the inputs, quantize, two products, and all between them.
    functions = [f for f in rq.get_pipeline(target)(qmod).functions.values() if is_kernel(f)]
    assert (len(functions) == 5) == is_fused
    got = Executor(rq.compile(qmod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


def test_lower_integer__an_operator_between_products_is_a_kernel():
    """However few its values are: the requantize before it is part of a product."""

    def body(builder, x):
        y = builder.emit(relax.op.sigmoid(builder.emit(relax.op.matmul(x, constant(12, 24)))))
        return builder.emit(relax.op.matmul(y, constant(24, 3)))

    qmod, _ = quantize_random(build_model(body, (1, 12), False), (1, 12))
    left = list_operators(lower_integer(qmod, resolve_target(None)))
    assert not [name for name in left if name.startswith("qnn.")]


def is_kernel(func: object) -> bool:
    """Whether a function of a lowered module is TIR that main calls to compute something."""
    name = str(func.attrs["global_symbol"]) if isinstance(func, tvm.tirx.PrimFunc) else ""
    return bool(name) and not name.startswith("shape_func")


def list_kernels(body, shape=NCHW, options="llvm -mcpu=cascadelake"):
    """Names of the kernels of an integer model."""
    qmod, _ = quantize_random(build_model(body, shape, False), shape)
    graph = Graph(lower_integer(convert_layout(qmod), resolve_target(options)))
    return [
        str(call.args[0].name_hint)
        for call in map(graph.call_of, (b.var for b in graph.bindings))
        if call is not None and graph.op_name(call) == "relax.call_tir"
    ]


def test_call_kernels__fuses_bias_residual_and_clamp():
    kernels = list_kernels(residual)
    assert sum("conv2d" in name for name in kernels) == 3
    assert not any("add" in name or "clip" in name for name in kernels)


@pytest.mark.slow
def test_call_kernels__a_maximum_pool_is_part_of_the_convolution():
    """Where kernels can count the threads."""
    shape = (1, 3, 24, 32)
    kernels = list_kernels(stem, shape)
    assert {name for name in kernels if "pool" in name} == {"qnn_conv2d_max_pool2d"}
    bare = "llvm -mcpu=cascadelake -mtriple=x86_64-unknown-none"
    assert "qnn_max_pool2d" in list_kernels(stem, shape, bare)
    assert "qnn_max_pool2d" in list_kernels(branches, shape)  # its step is 1


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_lower_integer__a_pooled_convolution_equals_numpy(symbolic):
    shape = (2, 3, 24, 32)
    qmod, x = quantize_random(build_model(stem, shape, symbolic), shape)
    got = Executor(rq.compile(qmod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [x])[0])


def test_call_kernels__no_rules_changes_nothing():
    qmod, _ = quantize_random(build_model(conv_bias_relu, NCHW, False), NCHW)
    target = Target({"kind": "llvm"})
    tvm.ir.assert_structural_equal(call_kernels(qmod, select_isa(target), rules=()), qmod)


def test_call_kernels__says_why_there_is_no_kernel():
    qmod, _ = quantize_random(build_model(conv_bias_relu, NCHW, False), NCHW)
    with hear_declined() as heard:  # in the layout of the model still
        call_kernels(qmod, select_isa(resolve_target("llvm -mcpu=cascadelake")))
    assert "layout NCHW/OIHW" in [reason for rule, _, reason in heard if rule == "lower_conv2d"]


def test_call_kernels__says_where_a_kernel_ends():
    qmod, _ = quantize_random(build_model(conv_bias_relu, NCHW, False), NCHW)
    with hear_declined() as heard:
        call_kernels(convert_layout(qmod), select_isa(resolve_target("llvm -mcpu=cascadelake")))
    reasons = {reason for rule, _, reason in heard if rule == "follow_epilogue"}
    ends = {f"a kernel cannot include relax.{op}" for op in ("qnn.dequantize", "permute_dims")}
    assert reasons & ends, heard


def test_convert_layout__transposes_only_at_the_borders():
    qmod, _ = quantize_random(build_model(residual, NCHW, False), NCHW)
    graph = Graph(convert_layout(qmod))
    names = [graph.op_name(binding.var) for binding in graph.bindings]
    assert names.count("relax.permute_dims") == 2
    layouts = {
        str(graph.call_of(b.var).attrs.data_layout)
        for b in graph.bindings
        if graph.op_name(b.var) == "relax.qnn.conv2d"
    }
    assert layouts == {"NHWC"}


def test_convert_layout__channel_pad_needs_no_transpose():
    qmod, _ = quantize_random(build_model(padded, NCHW, False), NCHW)
    graph = Graph(convert_layout(qmod))
    names = [graph.op_name(binding.var) for binding in graph.bindings]
    assert names.count("relax.permute_dims") == 2


@pytest.mark.parametrize(("cpu", "megabytes", "expected"), [
    ("znver5", 8, False), ("znver5", 17, True), ("znver4", 17, False),
])  # fmt: skip
def test_time_module__knows_weights_that_no_cache_keeps(cpu, megabytes, expected):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 1024), "int8"))
    weight = relax.const(np.zeros((1024, megabytes << 10), "int8"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.matmul(x, weight)))
    target = resolve_target(f"llvm -mcpu={cpu}")
    assert time_module(target, builder.get()).timing.winograd.is_beyond == expected
