"""Quantized models out: ONNX's checker accepts them, ONNX Runtime computes what we compute, and we
read them back.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import tvm
from float_models import MAP, build_model, draw_batches, residual_model
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from tvm import relax, tirx

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.file import WRITERS
from relayquant.ir.dialect.legality import LEGAL_STAGES, Stage
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype

pytest.importorskip("onnxruntime")


def quantize_steps(mod: tvm.IRModule, backend="x86", **settings):
    """(reference form, integer module, one batch)."""
    batches = draw_batches(mod, 4, n=2)
    prepared = rq.prepare(mod, None, backend=backend, effort="fast", **settings)
    prepared = rq.calibrate(prepared, batches)
    reference = rq.convert_to_reference(prepared)
    return reference, rq.lower(reference, prepared.backend), batches[0]


def output_step(qmod: tvm.IRModule) -> float:
    """The largest scale of the model: one step of one value is at most that."""
    scales = [1e-4]
    for binding in Graph(qmod).bindings:
        value = getattr(binding.value, "args", ())
        if value and getattr(binding.value.op, "name", "") == "relax.qnn.dequantize":
            scales.append(float(constant_value(value[1]).max()))
    return max(scales)


def check(mod: tvm.IRModule, path, *, backend="x86", steps: float = 2.0):
    reference, qmod, batch = quantize_steps(mod, backend)
    expected = rq.reference.run(qmod, batch)
    for written in (reference, qmod):
        model = onnx.load(str(rq.export_onnx(written, path)))
        got = run_onnxruntime(path, batch)
        assert len(got) == len(expected)
        for one, two in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, two, atol=steps * output_step(qmod), rtol=1e-4)
    return model


def test_operators__each_has_a_writer():
    """All that a quantized module may hold, but what reads and writes the state of a language
    model. Transforms are written as products.
    """
    integer = {name for name, stages in LEGAL_STAGES.items() if Stage.QNN in stages}
    cache = {
        f"relax.qnn.{name}"
        for name in ("rotate", "update_cache", "cached_attention", "gated_delta")
    }
    others = {*cache, "relax.qnn.dft"}
    assert others <= integer
    assert integer - others <= set(WRITERS)


def test_residual__every_kind_of_operator(tmp_path):
    model = check(residual_model(), tmp_path / "model.onnx")
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["Conv"] == 4
    assert kinds["Gemm"] == 1
    assert {info.name for info in model.graph.input} == {"x"}
    assert [info.name for info in model.graph.output] == ["out"]


@pytest.mark.parametrize("backend", ["x86", "arm"])
def test_weights__integers_per_channel_and_int32_biases(tmp_path, backend):
    mod = build_model(lambda emit, x: emit.conv_bias("c", x, 8), MAP)
    reference, _, _ = quantize_steps(mod, backend)
    model = onnx.load(str(rq.export_onnx(reference, tmp_path / "m.onnx")))
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    (conv,) = [node for node in model.graph.node if node.op_type == "Conv"]
    makers = {node.output[0]: node for node in model.graph.node}
    weight, bias = (makers[name] for name in conv.input[1:])
    assert tensors[weight.input[0]].dtype == np.int8
    assert tensors[weight.input[1]].shape == tensors[weight.input[2]].shape == (8,)
    assert next(a.i for a in weight.attribute if a.name == "axis") == 0
    assert tensors[bias.input[0]].dtype == np.int32
    data_scale = tensors[makers[conv.input[0]].input[1]]
    np.testing.assert_array_equal(tensors[bias.input[1]], data_scale * tensors[weight.input[1]])


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "write",
    [
        lambda op, x: op.tanh(x),
        lambda op, x: op.nn.gelu(x),
        lambda op, x: op.nn.gelu_tanh(x),
        lambda op, x: op.nn.silu(x),
        lambda op, x: op.nn.leakyrelu(x, 0.1),
        lambda op, x: op.nn.prelu(x, relax.const(np.linspace(-1, 2, 4, dtype="float32")), 1),
        lambda op, x: op.multiply(x, x),
        lambda op, x: op.nn.pad(x, [0, 0, 0, 0, 1, 1, 2, 2], "constant", 0.0),
        lambda op, x: op.strided_slice(x, [2, 3], [1, 0], [5, 6], [1, 2]),
        lambda op, x: op.permute_dims(x, [0, 2, 3, 1]),
        lambda op, x: op.mean(x, [2, 3]),
        lambda op, x: op.max(x, [2], keepdims=True),
        lambda op, x: op.nn.softmax(x, 1),
        lambda op, x: op.nn.max_pool2d(x, (3, 3), (2, 2), padding=(1, 1)),
        lambda op, x: op.nn.avg_pool2d(x, (3, 3), (2, 2), padding=(1, 1)),
        lambda op, x: op.matmul(x, op.permute_dims(x, [0, 1, 3, 2])),
        lambda op, x: op.rsqrt(op.add(op.square(x), relax.const(1.0, "float32"))),
    ],
)
def test_operator__between_convolutions(tmp_path, write):
    def body(emit, x):
        value = emit("middle", write(relax.op, emit.conv_bias("first", x)))
        if len(value.ty.shape) == 4 and int(value.ty.shape[1]) == 4:
            value = emit.conv_bias("last", value)
        return value

    check(build_model(body, MAP), tmp_path / "model.onnx", steps=3)


def test_layout__nhwc_is_transposed(tmp_path):
    def body(emit, x):
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
        conv = relax.op.nn.conv2d(x, emit.constant(3, 3, 4, 8), **layouts)
        return emit("r", relax.op.nn.relu(emit("b", emit("c", conv) + emit.constant(8))))

    check(build_model(body, (1, 6, 6, 4)), tmp_path / "model.onnx")


def test_int16__has_opset_21(tmp_path):
    mod = build_model(lambda emit, x: emit.conv_bias("two", emit.conv_bias("one", x)), MAP)
    spec = rq.TensorConfig(rq.QSpec("int16", rq.config.Scheme.SYMMETRIC), rq.observers.MinMax())
    mapping = rq.QConfigMapping().set_global(
        rq.QConfig(activation=spec, weight=rq.get_backend_config("generic").default_qconfig.weight)
    )
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend="generic")
    prepared = rq.calibrate(prepared, draw_batches(mod, 4))
    reference = rq.convert_to_reference(prepared)
    path = rq.export_onnx(reference, tmp_path / "m.onnx")
    assert onnx.load(str(path)).opset_import[0].version == 21
    batch = draw_batches(mod, 1)[0]
    (expected,) = rq.reference.run(reference, batch)
    np.testing.assert_allclose(run_onnxruntime(path, batch)[0], expected, atol=1e-3)


def test_symbolic_batch__stays(tmp_path):
    def body(emit, x):
        flat = emit("f", relax.op.reshape(emit.conv_bias("c", x), (x.ty.shape[0], 144)))
        return emit("o", relax.op.add(emit.dense("m", flat, 3), emit.constant(3)))

    mod = build_model(body, ("n", 4, 6, 6))
    model = check(mod, tmp_path / "model.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param


def slices_a_table(emit, x):
    rows = emit(
        "rows",
        relax.op.strided_slice(
            emit.constant(40, 6), [0], [0], [x.ty.shape[0]], assume_inbound=True
        ),
    )
    return emit("y", relax.op.add(x, rows))


def slices_half(emit, x):
    n = x.ty.shape[0]
    return emit("y", relax.op.strided_slice(x, [0, 1], [n // 2, 0], [n, 6 - n % 3]))


def reshapes_by_products(emit, x):
    n = x.ty.shape[0]
    both = emit("both", relax.op.matmul(x, emit("t", relax.op.permute_dims(x, [1, 0]))))
    return emit("y", relax.op.reshape(both, (1, n, 1, n)))


def spreads(emit, x):
    row = emit("row", relax.op.sum(x, 0, keepdims=True))
    return emit("y", relax.op.broadcast_to(row, (2, x.ty.shape[0], 6)))


def clips_indices(emit, x):
    index = relax.const(np.array([0, 3, -2, 9]), "int64")
    return emit("y", relax.op.take(x, index, 0, mode="clip"))


BY_SIZES = [slices_a_table, slices_half, reshapes_by_products, spreads, clips_indices]


@pytest.mark.parametrize("body", BY_SIZES, ids=lambda body: body.__name__)
def test_symbolic_sizes__are_computed_from_shapes(tmp_path, body):
    """Of lengths that make every quotient and remainder; as onnx's reference evaluator has it."""
    mod = build_model(body, ("n", 6))
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    for n in (1, 2, 3, 7):
        x = np.random.default_rng(n).normal(size=(n, 6)).astype("float32")
        (expected,) = rq.reference.run(mod, [x])
        (theirs,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
        np.testing.assert_allclose(theirs, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            run_onnxruntime(path, {"x": x})[0], expected, rtol=1e-5, atol=1e-5
        )


def test_symbolic_sizes__that_do_not_fit_are_refused(tmp_path):
    """A reshape to half as many pairs, of an odd number. With -1 it would take any number."""

    def body(emit, x):
        n = x.ty.shape[0]
        return emit("y", relax.op.reshape(x, (n // 2 + n // 2, 6)))

    path = rq.export_onnx(build_model(body, ("n", 6)), tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    np.testing.assert_array_equal(run_onnxruntime(path, {"x": x[:4]})[0], x[:4])
    with pytest.raises(Exception, match="cannot be reshaped"):
        run_onnxruntime(path, {"x": x})


def test_symbolic_sizes__of_parts_below_zero_are_refused(tmp_path):
    """As ONNX Runtime does it with the Split that was read."""
    nodes = [
        onnx.helper.make_node("Split", ["x", "parts"], ["a", "b"], axis=0),
        onnx.helper.make_node("Concat", ["b", "a"], ["y"], axis=0),
    ]
    model = make_onnx(nodes, {"x": ["n", 3], "parts": ("int64", [2])}, "y", (), 13)
    path = rq.export_onnx(rq.load(model)[0], tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    for parts in ([1, 4], [0, 5], [5, 0]):
        feeds = {"x": x, "parts": np.array(parts)}
        (want,) = run_onnxruntime(model, feeds)
        np.testing.assert_array_equal(run_onnxruntime(path, feeds)[0], want)
    for parts in ([1, 3], [2, 4], [-1, 6], [7, -2]):
        for each in (model, path):
            with pytest.raises(Exception, match=r"Split|cannot be reshaped"):
                run_onnxruntime(each, {"x": x, "parts": np.array(parts)})


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumulative_sum__is_written_as_it_was_read(reverse, exclusive, tmp_path):
    node = onnx.helper.make_node("CumSum", ["x", "at"], ["y"], reverse=reverse, exclusive=exclusive)
    model = make_onnx([node], {"x": ["n", 4]}, "y", {"at": -1}, 14)
    mod, _ = rq.load(model)
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    (want,) = run_onnxruntime(model, {"x": x})
    for found in (rq.reference.run(mod, [x]), run_onnxruntime(path, {"x": x})):
        np.testing.assert_allclose(found[0], want, rtol=1e-6, atol=1e-6)


def test_symbolic_sizes__computed_otherwise_are_refused(tmp_path):
    def body(emit, x):
        n = x.ty.shape[0]
        end = tvm.tirx.Select(n > 3, n, n - 1)
        return emit("y", relax.op.strided_slice(x, [0], [0], [end]))

    with pytest.raises(ModelError, match=r"'y\.slice' needs the size .* computed by Select"):
        rq.export_onnx(build_model(body, ("n", 6)), tmp_path / "m.onnx")


@pytest.mark.slow
def test_round_trip__reads_back_to_the_same_integers(tmp_path):
    reference, qmod, batch = quantize_steps(residual_model())
    mod, _ = rq.load(rq.export_onnx(reference, tmp_path / "m.onnx"))
    again = rq.lower(mod)
    np.testing.assert_array_equal(
        rq.reference.run(again, batch)[0], rq.reference.run(qmod, batch)[0]
    )
    assert not rq.ledger(again).floating


@pytest.mark.parametrize("name", ["relu", "max", "min_of_relu", "argmax"])
def test_sums_of_64_bits__are_real_values_behind_other_operators(tmp_path, name):
    """A product of unknown inner size is exact in int64. A place in it is a number itself."""
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    bb = relax.BlockBuilder()
    a, b = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("a", (n, 4, k)), ("b", (n, k, 6)))
    )
    with bb.function("main", [a, b]):
        with bb.dataflow():
            value = bb.emit(relax.op.matmul(a, b))
            if name in ("relu", "min_of_relu"):
                value = bb.emit(relax.op.nn.relu(value))
            if name != "relu":
                reduced = {"max": relax.op.max, "argmax": relax.op.argmax}.get(name, relax.op.min)
                value = bb.emit(reduced(value, -1))
            result = bb.emit_output(value)
        bb.emit_func_output(result)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype("float32") for size in ((3, 4, 9), (3, 9, 6))]
    batch = dict(zip("ab", arrays, strict=True))
    qmod = rq.quantize(bb.get(), None, [batch], effort="fast")
    assert 'dtype="int64"' in qmod["main"].script()
    (got,) = run_onnxruntime(rq.export_onnx(qmod, tmp_path / "m.onnx"), batch)
    (wanted,) = rq.reference.run(qmod, arrays)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_unsupported__all_listed_and_no_file_left(tmp_path):
    def body(emit, x):
        value = emit.conv_bias("c", x)
        value = emit("angle", relax.op.atan2(value, value))
        return emit("sum", relax.op.log_add_exp(value, value))

    reference, _, _ = quantize_steps(build_model(body, MAP))
    with pytest.raises(
        ModelError, match=r"2 operators.*relax\.atan2 \('angle'\).*relax\.log_add_exp"
    ):
        rq.export_onnx(reference, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_float_operators__with_their_attributes(tmp_path):
    """Slopes along an axis that is not the last, and an epsilon that is not the default."""

    def body(emit, x):
        slopes = relax.const(np.array([-1.5, 0.1, 0.5, 3.0], "float32"))
        y = emit("p", relax.op.nn.prelu(x, slopes, axis=1))
        ones = relax.const(np.linspace(0.5, 2, 6, dtype="float32"))
        return emit("n", relax.op.nn.layer_norm(y, ones, ones, axes=[-1], epsilon=0.75))

    mod = build_model(body, MAP)
    x = draw_batches(mod, 1)[0]["x"]
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    slopes = np.array([-1.5, 0.1, 0.5, 3.0]).reshape(4, 1, 1)
    y = np.where(x > 0, x, x * slopes)
    scale = np.linspace(0.5, 2, 6)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 0.75) * scale + scale
    np.testing.assert_allclose(run_onnxruntime(path, {"x": x})[0], y, rtol=1e-4, atol=1e-5)


def test_sums__without_bias_are_squeezed_and_clipped(tmp_path):
    """The int32 sums of a matrix times a vector are read by operators that are no bias."""

    def body(emit, x):
        product = emit("product", relax.op.matmul(x, emit.constant(6)))
        return emit("y", relax.op.clip(product, -0.5, 0.75))

    mod = build_model(body, (8, 6))
    check(mod, tmp_path / "m.onnx")
    graph = Graph(quantize_steps(mod)[1])
    sums = [graph.op_name(var) for var in graph.order if tensor_dtype(var) == "int32"]
    assert sums == ["relax.qnn.dense", "relax.squeeze", "relax.clip"]
