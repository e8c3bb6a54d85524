"""Norms in modules: which are found, what becomes of the integers behind them, and their values."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from tiny_llama import ROWS, list_calls, make_llama
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.row_norms import lower_row_norms
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import call_name

WIDTH, EPSILON = 48, 1e-5
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(1, 0.2, WIDTH).astype("float32")
BIAS = RNG.normal(0, 0.2, WIDTH).astype("float32")


def number(value, ndim=0):
    return relax.const(np.full((1,) * ndim, value, "float32"))


def root_mean_square(emit, x, keeps=True, axis=-1):
    """The root, in the operators of an ONNX file."""
    mean = emit(op.mean(emit(op.multiply(x, x)), axis, keeps))
    return emit(op.sqrt(emit(op.add(mean, number(EPSILON)))))


def divided(emit, x):
    y = op.divide(x, root_mean_square(emit, x))
    return emit(op.multiply(emit(y), relax.const(WEIGHT.reshape(1, 1, -1))))


def by_reciprocal(emit, x):
    """As torch.export spells it."""
    mean = emit(op.mean(emit(op.power(x, number(2))), 2, True))
    root = emit(op.rsqrt(emit(op.add(number(EPSILON, 1), mean))))
    return emit(op.multiply(relax.const(WEIGHT), emit(op.multiply(root, x))))


def bare(emit, x):
    return emit(op.divide(x, root_mean_square(emit, x)))


def rms_norm(emit, x):
    return emit(op.nn.rms_norm(x, relax.const(WEIGHT), [-1], EPSILON))


def layer_norm(emit, x):
    return emit(op.nn.layer_norm(x, relax.const(WEIGHT), relax.const(BIAS), [2], EPSILON))


NORMS = {f.__name__: f for f in (divided, by_reciprocal, bare, rms_norm, layer_norm)}


def exact(name, x):
    """float64, as the literature has it."""
    x = x.astype("float64")
    c = x - x.mean(-1, keepdims=True) if name == "layer_norm" else x
    y = c / np.sqrt((c * c).mean(-1, keepdims=True) + EPSILON)
    y = y if name == "bare" else y * WEIGHT
    return y + BIAS if name == "layer_norm" else y


def make_module(body, shape=(2, "n", WIDTH)):
    """main(x) of what `body(emit, x)` gives: a list of values."""
    symbols = {}
    extents = [
        symbols.setdefault(e, tvm.tirx.Var(e, "int64")) if isinstance(e, str) else e for e in shape
    ]
    x = relax.Var("x", relax.TensorType(extents, "float32"))
    return make_main([x], lambda builder: relax.Tuple(body(builder.emit, x)))


def list_names(mod):
    """What main calls: operators, and kernels by their names."""
    calls = list_calls(mod["main"])
    return [
        call.args[0].name_hint if call_name(call) == "relax.call_tir" else call_name(call)
        for call in calls
    ]


def lower(mod):
    with hear_declined() as heard:
        lowered = lower_row_norms(mod, resolve_target(None))
    relax.analysis.well_formed(lowered)
    return lowered, [reason for _, _, reason in heard]


def run(mod, x):
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    return [value.numpy() for value in machine["main"](tvm.runtime.tensor(x))]


def quantize(emit, y, keeps, reshapes):
    """[codes, scales] of the rows of a norm [and what else reads it]."""
    qnn = rq.extend.qnn
    rows = emit(op.reshape(y, (-1, WIDTH))) if reshapes else y
    pair = emit(qnn.quantize_rows(rows))
    parts = [emit(relax.TupleGetItem(pair, i)) for i in range(2)]
    return [*parts, y] if keeps else parts


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NORMS)
def test_lower_row_norms__one_kernel_with_the_integers_of_rows(name):
    """The same bits as the reference has of the operators, with a symbolic and a static length."""
    x = np.random.default_rng(1).normal(0.2, 2, (2, 3, WIDTH)).astype("float32")
    for keeps, reshapes in ((False, False), (True, True)):
        results = []
        for extent in ("n", 3):
            mod = make_module(
                lambda emit, x, keeps=keeps, reshapes=reshapes: quantize(
                    emit, NORMS[name](emit, x), keeps, reshapes
                ),
                (2, extent, WIDTH),
            )
            lowered, reasons = lower(mod)
            assert list_names(lowered) == ["row_norm"]
            assert not reasons
            results.append(run(mod, x))
        expected = rq.reference.run(mod, [x])
        for found in results:
            for array, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(array, wanted)
        if keeps:
            np.testing.assert_allclose(expected[2], exact(name, x), rtol=1e-5, atol=1e-6)


def spell_in_onnx(name):
    """A norm as an ONNX file has it; a spelled one of its single operators."""
    names = ("X", "W", "B")[: 3 if name == "layer_norm" else 2]
    if name in ("layer_norm", "rms_norm"):
        kind = "LayerNormalization" if name == "layer_norm" else "RMSNormalization"
        nodes = [helper.make_node(kind, names, ["Y"], axis=-1, epsilon=EPSILON)]
    else:
        nodes = [
            helper.make_node("Mul", ["X", "X"], ["square"]),
            helper.make_node("ReduceMean", ["square", "axes"], ["mean"], keepdims=1),
            helper.make_node("Add", ["mean", "epsilon"], ["sum"]),
            helper.make_node("Sqrt", ["sum"], ["root"]),
            helper.make_node("Div", ["X", "root"], ["bare"]),
            helper.make_node("Mul", ["bare", "W"], ["Y"]),
        ]
    constants = {"axes": np.array([-1]), "epsilon": np.array(EPSILON, "float32")}
    return make_onnx(nodes, dict.fromkeys(names), {"Y": None}, constants, 23)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "divided"])
def test_row_norm__is_that_of_the_evaluator_of_onnx(name):
    x = np.random.default_rng(3).normal(0.2, 2, (2, 3, WIDTH)).astype("float32")
    feeds = {"X": x, "W": WEIGHT, "B": BIAS}
    model = spell_in_onnx(name)
    read = {each.name: feeds[each.name] for each in model.graph.input}
    (expected,) = ReferenceEvaluator(model).run(None, read)
    mod = make_module(lambda emit, x: [NORMS[name](emit, x)])
    assert list_names(lower(mod)[0]) == ["row_norm"]
    np.testing.assert_allclose(run(mod, x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_lower_row_norms__of_a_float_module(name):
    mod = make_module(lambda emit, x: [NORMS[name](emit, x)])
    assert list_names(lower(mod)[0]) == ["row_norm"]
    x = np.random.default_rng(2).normal(0.2, 2, (2, 5, WIDTH)).astype("float32")
    np.testing.assert_allclose(run(mod, x)[0], exact(name, x), rtol=1e-5, atol=1e-6)


def test_lower_row_norms__of_a_single_row():
    """A tensor of one axis."""
    mod = make_module(
        lambda emit, x: quantize(emit, layer_norm_of_row(emit, x), True, False), (WIDTH,)
    )
    assert list_names(lower(mod)[0]) == ["row_norm"]
    x = np.random.default_rng(3).normal(size=WIDTH).astype("float32")
    for array, wanted in zip(run(mod, x), rq.reference.run(mod, [x]), strict=True):
        np.testing.assert_array_equal(array, wanted)


def layer_norm_of_row(emit, x):
    return emit(op.nn.layer_norm(x, relax.const(WEIGHT), relax.const(BIAS), [-1], EPSILON))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("keeps", [True, False])
def test_lower_row_norms__a_sum_is_in_the_kernel(name, keeps):
    """Whether anything else reads the sum or not. The same bits as alone."""
    for parts in (1, 2):

        def body(emit, x, parts=parts):
            total = emit(op.add(emit(op.negative(x)), emit(op.multiply(x, x))))
            y = NORMS[name](emit, total)
            results = [y] if parts == 1 else quantize(emit, y, False, False)
            return [*results, total] if keeps else results

        mod = make_module(body)
        lowered, _ = lower(mod)
        assert list_names(lowered) == ["relax.negative", "relax.multiply", "row_norm"]
        x = np.random.default_rng(2).normal(0.2, 2, (2, 5, WIDTH)).astype("float32")
        found, expected = run(mod, x), rq.reference.run(mod, [x])
        for array, wanted in zip(found[-parts - keeps :], expected, strict=True):
            if array.dtype == np.int8 or parts == 2:
                np.testing.assert_array_equal(array, wanted)
            np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)
        if keeps:
            np.testing.assert_array_equal(found[-1], x * x - x)


def behind_a_product(emit, x):
    weight = relax.const(RNG.normal(size=(WIDTH, WIDTH)).astype("float32"))
    product = emit(op.add(emit(op.matmul(x, weight)), relax.const(BIAS)))
    return [rms_norm(emit, emit(op.add(product, x)))]


def of_more_rows(emit, x):
    return [rms_norm(emit, emit(op.add(x, relax.const(BIAS))))]


def of_late_weights(emit, x):
    """They are computed after the sum, which another value reads."""
    total = emit(op.add(emit(op.negative(x)), x))
    weight = emit(op.multiply(relax.const(WEIGHT), relax.const(BIAS)))
    return [emit(op.nn.rms_norm(total, weight, [-1], EPSILON)), total]


@pytest.mark.parametrize("body", [behind_a_product, of_more_rows, of_late_weights])
def test_lower_row_norms__a_sum_that_stays(body):
    """What the kernel of a float product adds, vectors, and sums that are needed before."""
    mod = make_module(body)
    names = list_names(lower(mod)[0])
    assert "relax.add" in names
    assert names[-1] == "row_norm"
    x = np.random.default_rng(2).normal(0.2, 2, (2, 5, WIDTH)).astype("float32")
    for array, wanted in zip(run(mod, x), rq.reference.run(mod, [x]), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cpu", "is_inside"), [("sapphirerapids", False), ("cascadelake", True), ("znver5", True)]
)
def test_lower_row_norms__sum_behind_a_product_of_grouped_weights(cpu, is_inside):
    """Products in bfloat16 on tiles add it themselves."""
    compressed = rq.compress_weights(*make_llama(), bits=4, group_size=16, activation=ROWS)
    lowered = lower_row_norms(compressed, resolve_target(f"llvm -mcpu={cpu}"))
    before, behind = (
        [call_name(call) for call in list_calls(mod["prefill"])].count("relax.add")
        for mod in (compressed, lowered)
    )
    assert before - behind == (2 if is_inside else 0)  # others turn the positions


def read_twice(emit, x):
    """The root is a result of its own."""
    root = root_mean_square(emit, x)
    return [emit(op.divide(x, root)), root]


def of_another(emit, x):
    """Rows by the root of other rows."""
    return [emit(op.divide(emit(op.negative(x)), root_mean_square(emit, x)))]


def upside_down(emit, x):
    return [emit(op.divide(root_mean_square(emit, x), x))]


def along_columns(emit, x):
    return [emit(op.divide(x, root_mean_square(emit, x, axis=1)))]


def more_axes(emit, x):
    mean = emit(op.mean(emit(op.multiply(x, x)), -1, True))
    root = emit(op.sqrt(emit(op.add(mean, number(EPSILON, 4)))))
    return [emit(op.divide(x, root))]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (read_twice, "the root does not scale the rows"),
        (of_another, "the root does not scale the rows"),
        (upside_down, "the root does not scale the rows"),
        (along_columns, "not along the last axis"),
        (more_axes, "epsilon has more axes than the rows"),
        (lambda emit, x: [emit(op.mean(x, -1))], "not of float32 rows of known length"),
    ],
)
def test_lower_row_norms__what_is_no_norm_stays(body, reason):
    mod = make_module(body)
    lowered, reasons = lower(mod)
    assert reasons == [reason]
    tvm.ir.assert_structural_equal(lowered, mod)


def test_lower_row_norms__of_every_function_of_a_language_model():
    compressed = rq.compress_weights(*make_llama(), bits=4, group_size=16, activation=ROWS)
    lowered, reasons = lower(compressed)
    assert not reasons
    for name in ("prefill", "decode"):
        names = [call_name(call) for call in list_calls(lowered[name])]
        assert "relax.nn.rms_norm" not in names
        # of attention and of what the gate gives: no norm is before them
        assert names.count("relax.qnn.quantize_rows") == 2


def make_inputs_module(shapes, body):
    """main(x0, x1, ...) of what `body(builder, *x)` gives: a list of values."""
    xs = [
        relax.Var(
            f"x{i}",
            relax.TensorType(shape, "float32")
            if shape
            else relax.TensorType(dtype="float32", ndim=1),
        )
        for i, shape in enumerate(shapes)
    ]
    return make_main(xs, lambda builder: relax.Tuple(body(builder, *xs)))


def scaled_by_itself(builder, a, b):
    """The norm's weight is the sum."""
    total = builder.emit(op.add(a, b))
    return [builder.emit(op.nn.rms_norm(total, total, [-1], EPSILON))]


def of_matched_weights(builder, a, b, w):
    """The size of the weights is known after the sum, which is a result."""
    total = builder.emit(op.add(a, b))
    weight = builder.match_cast(w, relax.TensorType((WIDTH,), "float32"))
    return [builder.emit(op.nn.rms_norm(total, weight, [-1], EPSILON)), total]


@pytest.mark.parametrize(
    ("body", "shapes"),
    [(scaled_by_itself, [(WIDTH,)] * 2), (of_matched_weights, [(3, WIDTH)] * 2 + [None])],
)
def test_lower_row_norms__a_sum_that_is_needed_elsewhere_stays(body, shapes):
    mod = make_inputs_module(shapes, body)
    assert "relax.add" in list_names(lower(mod)[0])
    xs = [RNG.normal(0.2, 2, shape or (WIDTH,)).astype("float32") for shape in shapes]
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    found = machine["main"](*map(tvm.runtime.tensor, xs))
    total = xs[0] + xs[1]
    weight = total if len(xs) == 2 else xs[2]
    root = np.sqrt((total.astype("float64") ** 2).mean(-1, keepdims=True) + EPSILON)
    np.testing.assert_allclose(found[0].numpy(), total / root * weight, rtol=1e-5, atol=1e-6)


def test_lower_row_norms__a_sum_behind_a_moved_product_is_in_the_kernel():
    """No kernel of a product computes it."""
    weight = relax.const(RNG.normal(size=(WIDTH, WIDTH)).astype("float32"))

    def body(builder, a, b):
        product = builder.emit(op.permute_dims(builder.emit(op.matmul(a, weight)), (1, 0, 2)))
        return [rms_norm(builder.emit, builder.emit(op.add(product, b)))]

    mod = make_inputs_module([(2, 3, WIDTH), (3, 2, WIDTH)], body)
    names = list_names(lower(mod)[0])
    assert "relax.add" not in names
    assert names[-1] == "row_norm"
