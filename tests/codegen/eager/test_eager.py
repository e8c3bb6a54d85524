"""Functions run step by step: the numbers of the reference, kernels shared, nothing transposed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from drawing import count_examples
from float_models import MAP, build_model, draw_batches, residual_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.runtime import empty_aligned, find_memory_axes, freeze_array
from relayquant.codegen.eager import EagerModule, kernel_cache
from relayquant.codegen.eager.kernel_cache import KernelCache, host_kernels
from relayquant.codegen.eager.operand import FEW_ELEMENTS, LastMade, Variable, is_unchanged
from relayquant.codegen.eager.plan import Planner
from relayquant.codegen.eager.steps.product import IntegerProductStep, ProductStep
from relayquant.codegen.eager.steps.rounding import RoundingStep
from relayquant.ir.dialect import qnn as ir
from relayquant.ir.reference import qnn, run, single_call
from relayquant.ir.reference.frame import Frame

RNG = np.random.default_rng(0)


def steps_of(module: EagerModule, kind: type) -> list:
    """What runs on kernels in main: the `kind` of each step that is one."""
    owners = [getattr(step.run, "__self__", None) for step in module.programs["main"].steps]
    return [owner for owner in owners if isinstance(owner, kind)]


def check(mod: tvm.IRModule, *arrays: np.ndarray) -> EagerModule:
    """Compare with the reference; returns the module."""
    module = EagerModule(mod)
    for _ in range(2):
        for have, want in zip(module.run("main", arrays), run(mod, arrays), strict=True):
            assert have.shape == want.shape
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    return module


def draw(mod: tvm.IRModule, n: int = 1) -> list[np.ndarray]:
    return list(draw_batches(mod, 1, n=n)[0].values())


def conv2d_model(shape, weight, **attrs):
    return build_model(lambda e, x: e("y", op.nn.conv2d(x, e.constant(*weight), **attrs)), shape)


CHANNELS_LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


@pytest.mark.parametrize(
    ("shape", "weight", "attrs"),
    [
        (("n", 5, 9, 8), (17, 5, 3, 3), {"padding": (1, 0, 2, 1), "strides": (2, 1)}),
        (("n", 6, 7, 7), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
        (("n", 6, 7, 7), (12, 1, 3, 3), {"groups": 6, "dilation": 2}),
        (("n", 24, 5, 5), (40, 24, 1, 1), {}),
        (("n", 24, 6, 5), (40, 24, 1, 1), {"strides": 2}),
        (("n", 7, 7, 6), (6, 3, 3, 2), {"groups": 3, **CHANNELS_LAST}),
        ((2, 3, 8, 8), (1, 3, 3, 3), {}),
        (("n", 6, 8, 8), (2, 3, 3, 3), {"groups": 2, "padding": 1}),
        (("n", 1, 1, 99), (1, 1, 1, 32), {"strides": (1, 2)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("n", [1, 3])
def test_conv2d__equals_the_reference(shape, weight, attrs, n):
    mod = conv2d_model(shape, weight, **attrs)
    check(mod, *draw(mod, n))


@pytest.mark.parametrize("layout", ["NCW", "NWC"])
@pytest.mark.parametrize("attrs", [{}, {"strides": 2, "padding": (1, 2)}, {"dilation": 2}])
def test_conv1d__is_a_conv2d_of_one_row(layout, attrs):
    shape, kernel = (("n", 4, 11), "OIW") if layout == "NCW" else (("n", 11, 4), "OWI")
    weight = (6, 4, 3) if layout == "NCW" else (6, 3, 4)
    mod = build_model(
        lambda e, x: e(
            "y",
            op.nn.conv1d(x, e.constant(*weight), data_layout=layout, kernel_layout=kernel, **attrs),
        ),
        shape,
    )
    assert len(steps_of(check(mod, *draw(mod, 2)), ProductStep)) == 1


@pytest.mark.parametrize("shape", [("n", 8), ("n", 5, 8), (3, 8)])
def test_dense__equals_the_reference(shape):
    mod = build_model(
        lambda e, x: e("y", op.nn.relu(e("s", op.add(e.dense("m", x, 5), e.constant(5))))), shape
    )
    (product,) = steps_of(check(mod, *draw(mod, 4)), ProductStep)
    assert [var.name for var in product.chain.vars] == ["m", "s", "y"]


def test_product_of_two_values__is_left_to_numpy():
    mod = build_model(
        lambda e, x, y: e("y", op.matmul(e("a", op.nn.relu(x)), y)), (2, 3, 4), (2, 4, 5)
    )
    assert steps_of(check(mod, *draw(mod)), ProductStep) == []


def heard_of(mod: tvm.IRModule) -> dict[str, set[str]]:
    """Rule -> why it declined, over the values of main."""
    main, reasons = mod["main"], {}
    with hear_declined() as heard:
        list(Planner(list(main.params), main, host_kernels()).plan())
    for rule, _, reason in heard:
        reasons.setdefault(rule, set()).add(reason)
    return reasons


@pytest.mark.parametrize(
    ("build", "rule", "reason"),
    [
        (
            lambda e, x: e("y", op.nn.conv2d(x, e.constant(8, 6, 3, 3), padding=(-1, 0, 0, 0))),
            "plan_convolution",
            "the padding is negative",
        ),
        (
            lambda e, x: e("y", op.nn.conv2d(x, e("w", op.exp(e.constant(8, 6, 3, 3))))),
            "plan_convolution",
            None,
        ),
        (
            lambda e, x: e("y", op.matmul(x, e("w", op.exp(e.constant(6, 8))))),
            "plan_matmul",
            "the weight is computed: numpy is faster",
        ),
        (
            lambda e, x: e("z", op.exp(e("y", op.matmul(x, e.constant(6, 32))))),
            "follow_epilogue",
            "a kernel cannot include relax.exp",
        ),
        (
            lambda e, x: e("y", ir.simulated_quantize(x, 1, 0.1, 3)),
            "plan_rounding",
            "an operand is not a variable",
        ),
    ],
)  # fmt: skip
def test_plan__says_why_numpy_computes_it(build, rule, reason):
    heard = heard_of(build_model(build, (2, 6, 6, 6)))
    assert heard.get(rule) == ({reason} if reason else None)


def test_chain__takes_bias_residual_and_clip():
    def body(emit, x):
        stem = emit.conv("stem", x)
        both = emit("sum", op.add(emit.conv_bias("b", stem), stem))
        return emit("clip", op.clip(both, -0.5, 0.75))

    mod = build_model(body, ("n", 4, 6, 6))
    products = steps_of(check(mod, *draw(mod, 2)), ProductStep)
    assert [[v.name for v in p.chain.vars] for p in products] == [
        ["stem"], ["b.conv", "b", "sum", "clip"],
    ]  # fmt: skip


def test_chain__stops_at_values_that_others_read():
    def body(emit, x):
        a = emit.conv_bias("a", x)
        b = emit("b", op.nn.relu(a))
        return relax.Tuple([b, a])

    mod = build_model(body, MAP)
    (product,) = steps_of(check(mod, *draw(mod)), ProductStep)
    assert [var.name for var in product.chain.vars] == ["a.conv", "a"]


def test_chain__a_sum_of_two_products_belongs_to_one():
    mod = build_model(lambda e, x: e("s", op.add(e.conv("a", x), e.conv("b", x))), MAP)
    products = steps_of(check(mod, *draw(mod)), ProductStep)
    assert sorted(len(p.chain.vars) for p in products) == [1, 2]


def test_whole_model__equals_the_reference():
    check(residual_model(), *draw(residual_model()))


def test_values__lie_channels_last_and_are_not_copied():
    def body(emit, x):
        a = emit("a", op.nn.relu(emit.conv("c", x, 8)))
        return emit("b", op.add(a, a))

    mod = build_model(body, ("n", 4, 6, 6))
    (result,) = check(mod, *draw(mod, 2)).run("main", draw(mod, 2))
    assert result.shape == (2, 8, 6, 6)
    assert find_memory_axes(result) == (0, 2, 3, 1)


def test_weight__the_same_array_is_packed_once():
    mod = build_model(lambda e, x, w: e("y", op.nn.conv2d(x, w)), (1, 4, 5, 5), (8, 4, 3, 3))
    module, (x, w) = EagerModule(mod), draw(mod)
    (product,) = steps_of(module, ProductStep)
    packed = []
    for weight in (w, w, w * 2):
        (y,) = module.run("main", [x, weight])
        np.testing.assert_allclose(y, run(mod, [x, weight])[0], rtol=1e-4, atol=1e-5)
        packed.append(product.packed.kept)
    assert packed[0] is packed[1]
    assert packed[1] is not packed[2]


def reverse(array):
    array[:] = array[::-1].copy()


CHANGES = {
    "one number": lambda array: np.put(array, 5, 9.0),
    "all signs": lambda array: np.negative(array, out=array),
    "order of channels": reverse,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("channels", [8, 64])
def test_weight_and_bias__changed_in_place(change, channels):
    sizes = (1, 16, 5, 5), (channels, 16, 3, 3), (1, channels, 1, 1)
    mod = build_model(lambda e, x, w, b: e("y", op.add(e("c", op.nn.conv2d(x, w)), b)), *sizes)
    module, (x, w, b) = EagerModule(mod), draw(mod)
    assert steps_of(module, ProductStep)
    for changed in (w, b):
        module.run("main", [x, w, b])
        CHANGES[change](changed)
        (found,) = module.run("main", [x, w, b])
        np.testing.assert_allclose(found, run(mod, [x, w, b])[0], rtol=1e-4, atol=1e-4)


def swap_far(array):
    array[:, [0, 502]] = array[:, [502, 0]]


def trade_exponents(array):
    array[0, 0] *= 2
    array[0, 502] /= 2


def negate_every_second(array):
    array[:, 1::2] *= -1


@pytest.mark.parametrize("change", [swap_far, trade_exponents, negate_every_second])
def test_weight__changed_in_place_so_that_sums_of_its_words_stay(change):
    mod = build_model(lambda e, x, w: e("y", op.matmul(x, w)), (4, 16), (16, 1004))
    module, (x, w) = EagerModule(mod), draw(mod)
    w[0, [0, 502]] = 1
    assert steps_of(module, ProductStep)
    module.run("main", [x, w])
    change(w)
    (found,) = module.run("main", [x, w])
    np.testing.assert_allclose(found, x @ w, rtol=1e-4, atol=1e-4)


#: how a weight comes to a convolution
NAMES = {
    "parameter": lambda emit, w: w,
    "another name": lambda emit, w: emit("same", w),
    "cast": lambda emit, w: emit("same", op.astype(w, "float32")),
    "field of a tuple": lambda emit, w: emit(
        "same", relax.TupleGetItem(emit("t", relax.Tuple([w])), 0)
    ),
}
#: what a caller gives that shows an array, and changes with it
VIEWS = {
    "array": lambda array: array,
    "read-only view": lambda array: np.broadcast_to(array, array.shape),
    "tensor": tvm.runtime.from_dlpack,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_weight__changed_in_place_under_another_name(name, view):
    def body(emit, x, w):
        return emit("y", op.nn.conv2d(x, NAMES[name](emit, w)))

    mod = build_model(body, (1, 16, 5, 5), (32, 16, 3, 3))
    module, (x, drawn) = EagerModule(mod), draw(mod)
    weight = empty_aligned(drawn.shape, "float32")
    weight[:] = drawn
    given = VIEWS[view](weight)
    assert steps_of(module, ProductStep)
    module.run("main", [x, given])
    weight[3] *= 2
    (found,) = module.run("main", [x, given])
    np.testing.assert_allclose(found, run(mod, [x, weight])[0], rtol=1e-4, atol=1e-4)


def test_weight__read_only_that_its_owner_changes():
    """Through a view that was made before, and by allowing writes for a while."""
    mod = build_model(lambda e, x, w: e("y", op.matmul(x, w)), (4, 16), (16, 32))
    module, (x, weight) = EagerModule(mod), draw(mod)
    assert steps_of(module, ProductStep)
    weight = weight.copy()
    view = weight[:]
    weight.flags.writeable = False
    module.run("main", [x, weight])
    view *= 2
    np.testing.assert_allclose(module.run("main", [x, weight])[0], x @ weight, 1e-4, 1e-4)
    weight.flags.writeable = True
    weight *= 2
    weight.flags.writeable = False
    np.testing.assert_allclose(module.run("main", [x, weight])[0], x @ weight, 1e-4, 1e-4)


@pytest.mark.parametrize("rows", [4, "n"])
def test_arguments__of_a_subclass_are_read_as_arrays(rows):
    mod = build_model(lambda e, x: e("y", op.sum(e("s", op.multiply(x, x)), axis=[1])), (rows, 4))
    module, x = EagerModule(mod), RNG.standard_normal((4, 4), "float32")
    for args in (np.ma.masked_array(x), x.view(np.matrix), x.view(np.recarray)):
        for _ in range(2):
            (found,) = module.run("main", [args])
            assert type(found) is np.ndarray
            np.testing.assert_allclose(found, np.square(x).sum(1), rtol=1e-6)
    with pytest.raises(rq.DataError, match="masked"):
        module.run("main", [np.ma.masked_array(x, mask=x > 0)])


def test_arguments__of_foreign_bytes_and_tensors_are_converted_in_each_call():
    mod = build_model(lambda e, x, w: e("y", op.nn.conv2d(x, w)), (1, 4, 5, 5), (8, 4, 3, 3))
    module, (x, w) = EagerModule(mod), draw(mod)
    (want,) = run(mod, [x, w])
    mixed = [tvm.runtime.tensor(x), w.astype(">f4")]
    for args in ([x.astype(">f4"), w], [x, w.astype(">f4")], mixed, [x, w]):
        for _ in range(2):
            (found,) = module.run("main", args)
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_weight__that_is_kept_is_no_view_of_what_the_caller_changes():
    kept, frame, var = LastMade(), Frame(tvm.IRModule()), relax.Var("b", relax.TensorType((4,)))
    array = frame.values[var] = np.ones(4, "float32")
    made = kept.get(frame, [Variable(var)], lambda given: given)
    array[:] = 2
    np.testing.assert_array_equal(made, np.ones(4))
    assert kept.get(frame, [Variable(var)], lambda given: given) is not made


@pytest.mark.parametrize("size", [FEW_ELEMENTS, FEW_ELEMENTS + 1])
def test_weight__is_compared_by_bits(size):
    zeros, nan = np.zeros(size, "float32"), np.full(size, np.nan, "float32")
    assert is_unchanged(nan, nan, nan.copy())
    assert not is_unchanged(zeros, zeros, -zeros)
    assert not is_unchanged(zeros, zeros.copy(), zeros)


def test_weight__that_is_frozen_is_neither_compared_nor_copied():
    kept, frame, var = LastMade(), Frame(tvm.IRModule()), relax.Var("w", relax.TensorType((4,)))
    frozen = frame.values[var] = freeze_array(np.full(4, np.nan, "float32"))
    made = [kept.get(frame, [Variable(var)], lambda given: [given]) for _ in range(2)]
    assert made[0] is made[1]
    assert made[0][0] is frozen is freeze_array(frozen)


@pytest.mark.parametrize("n", [1, 2])
def test_large_images__run_on_a_kernel_for_their_shape(monkeypatch, n):
    """With every operand of the epilogue; other kernels, strides and few multiply-adds do not."""
    monkeypatch.setattr("relayquant.codegen.eager.steps.product.SHAPED_MACS", 12 * 18 * 32 * 32 * 9)

    def body(emit, x):
        y = emit("sum", op.add(emit.conv_bias("a", x, 32), x))
        y = emit("clipped", op.clip(y, 0, 6))
        y = emit("small", op.nn.conv2d(y, emit.constant(32, 32, 1, 1)))
        y = emit("half", op.nn.conv2d(y, emit.constant(32, 32, 3, 3), strides=2))
        return emit("last", op.nn.conv2d(y, emit.constant(32, 32, 3, 3)))

    mod = build_model(body, (n, 32, 12, 18))
    module, (x,) = EagerModule(mod), draw(mod, n)
    for _ in range(2):
        (have,), (want,) = module.run("main", [x]), run(mod, [x])
        assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()
    products = [step.product for step in steps_of(module, ProductStep)]
    assert [product.is_winograd for product in products] == [True, False, False, False]


def test_large_images__of_many_in_a_batch_have_the_bits_of_each_alone(monkeypatch):
    """Their number does not choose the kernel, nor is one compiled for each number."""
    monkeypatch.setattr("relayquant.codegen.eager.steps.product.SHAPED_MACS", 13 * 18 * 32 * 64 * 9)
    for height, is_winograd in ((12, False), (13, True)):
        conv = relax.const(RNG.standard_normal((64, 32, 3, 3), "float32"))
        mod = build_model(
            lambda e, x, conv=conv: e("y", op.nn.conv2d(x, conv, padding=1)), ("n", 32, height, 18)
        )
        module, (x,) = EagerModule(mod), draw(mod, 3)
        (step,) = steps_of(module, ProductStep)
        assert step.product.is_winograd is is_winograd
        (have,) = module.run("main", [x])
        for i in range(3):
            np.testing.assert_array_equal(module.run("main", [x[i : i + 1]])[0][0], have[i])
        want = run(mod, [x])[0]
        assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("images", "is_winograd"), [(3, False), (4, True)])
def test_large_images__the_slices_of_a_volume_count_together(monkeypatch, images, is_winograd):
    monkeypatch.setattr(
        "relayquant.codegen.eager.steps.product.SHAPED_MACS", 4 * 13 * 18 * 32 * 64 * 9
    )
    mod = conv2d_model((images, 32, 13, 18), (64, 32, 3, 3), padding=1)
    module, (x,) = EagerModule(mod), draw(mod, images)
    (step,) = steps_of(module, ProductStep)
    assert step.product.is_winograd is is_winograd
    (have,), (want,) = module.run("main", [x]), run(mod, [x])
    assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("sizes", [("h", 18), (13, "w")])
def test_large_images__of_a_size_that_the_model_does_not_say_need_no_kernel_each(
    monkeypatch, sizes
):
    monkeypatch.setattr("relayquant.codegen.eager.steps.product.SHAPED_MACS", 0)
    mod = conv2d_model((1, 32, *sizes), (64, 32, 3, 3), padding=1)
    (step,) = steps_of(EagerModule(mod), ProductStep)
    assert not step.product.is_winograd


def test_large_images__of_integers_stay_exact(monkeypatch):
    monkeypatch.setattr("relayquant.codegen.eager.steps.product.SHAPED_MACS", 0)
    rng = np.random.default_rng(0)
    x, weight = (
        rng.integers(-128, 128, s).astype("int8") for s in ((1, 32, 20, 18), (32, 32, 3, 3))
    )

    def body(emit, x):
        return emit("y", ir.conv2d(x, relax.const(weight), 0, 0, 1.0, 1.0))

    mod = build_model(body, x.shape, dtype="int8")
    module = EagerModule(mod)
    np.testing.assert_array_equal(module.run("main", [x])[0], run(mod, [x])[0])
    assert len(steps_of(module, IntegerProductStep)) == 1


def test_errors__are_those_of_the_reference():
    module = EagerModule(conv2d_model((1, 4, 5, 5), (8, 4, 3, 3)))
    with pytest.raises(rq.DataError, match="has shape"):
        module.run("main", [np.zeros((1, 4, 5, 6), "float32")])


@pytest.mark.parametrize("height", [2, "h"], ids=["known", "symbolic"])
@pytest.mark.parametrize("attrs", [{}, {"dilation": 2}, {"strides": 2}])
def test_errors__of_data_that_a_convolution_leaves_nothing_of(height, attrs):
    mod = conv2d_model((1, 4, height, 5), (8, 4, 3, 3), **attrs)
    arrays = [np.zeros((1, 4, 2, 5), "float32")]
    with pytest.raises(rq.ModelError, match="leaves nothing"):
        EagerModule(mod).run("main", arrays)
    with pytest.raises(rq.ModelError, match="leaves nothing"):
        run(mod, arrays)


def test_errors__also_behind_calls_that_were_fine():
    mod = build_model(lambda e, x, y: e("s", op.add(e.conv("a", x), e.conv("b", y))), MAP, MAP)
    module, (x, y) = EagerModule(mod), draw(mod, 2)
    for n in (2, 1, 2):
        want = run(mod, [x[:n], y[:n]])[0]
        np.testing.assert_allclose(module.run("main", [x[:n], y[:n]])[0], want, atol=1e-4)
    for wrong in ([x[:, :-1], y[:, :-1]], [x.astype("float64"), y]):
        with pytest.raises(rq.DataError, match=r"has shape|has dtype"):
            module.run("main", wrong)
    with pytest.raises(ValueError, match="zip"):
        module.run("main", [x])


def test_bias_and_scales__other_arrays_count():
    mod = build_model(
        lambda e, x, b: e("y", op.add(e.conv("c", x, 4), b)), ("n", 3, 5, 5), (1, 4, 1, 1)
    )
    module, (x, b) = EagerModule(mod), draw(mod, 1)
    for bias in (b, b, b * 2, b):
        want = run(mod, [x, bias])[0]
        np.testing.assert_allclose(module.run("main", [x, bias])[0], want, atol=1e-5)
    rounded, x = EagerModule(rounding_model(1)), np.linspace(-3, 3, 70, dtype="float32")
    code, zero_point = np.array(1, "int32"), np.array([0], "int32")
    for scale in (0.5, 0.5, 0.25):
        s = np.array([scale], "float32")
        (have,) = rounded.run("main", [x, code, s, zero_point])
        np.testing.assert_array_equal(have, np.rint(x / s) * s)
    (have,) = rounded.run("main", [x, np.array(0, "int32"), s, zero_point])
    np.testing.assert_array_equal(have, x)


# --- Simulated quantization ---------------------------------------------------------------------


def rounding_model(rank: int) -> tvm.IRModule:
    """simulated_quantize and simulated_dequantize of x (n, 3, ...)."""
    x = relax.Var("x", relax.TensorType([tvm.tirx.Var("n", "int64"), *[3] * (rank - 1)], "float32"))
    code = relax.Var("code", relax.TensorType((), "int32"))
    scale = relax.Var("s", relax.TensorType((1,), "float32"))
    zero_point = relax.Var("z", relax.TensorType((1,), "int32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, code, scale, zero_point]):
        with builder.dataflow():
            q = builder.emit(ir.simulated_quantize(x, code, scale, zero_point))
            d = builder.emit_output(ir.simulated_dequantize(q, code, scale, zero_point))
        builder.emit_func_output(d)
    return builder.get()


@pytest.fixture(scope="module")
def rounded() -> EagerModule:
    module = EagerModule(rounding_model(1))
    assert len(steps_of(module, RoundingStep)) == 1
    return module


@settings(deadline=None, max_examples=count_examples(150))
@given(
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=70),
    scale=st.floats(2.0**-20, 2.0**20, width=32),
    zero_point=st.integers(-200, 300),
    code=st.integers(0, 8),
)
def test_rounding__equals_the_reference_bit_for_bit(rounded, values, scale, zero_point, code):
    x, s, z = np.array(values, "float32"), np.float32([scale]), np.int32([zero_point])
    (have,) = rounded.run("main", [x, np.int32(code), s, z])
    q = qnn.simulated_quantize(x, code, s, z)
    np.testing.assert_array_equal(have, qnn.simulated_dequantize(q, code, s, z))


def test_rounding__halves_go_to_even_and_strided_arrays_keep_their_memory():
    module = EagerModule(rounding_model(3))
    x = (np.arange(7 * 9, dtype="float32").reshape(7, 3, 3) / 2 - 15).transpose(0, 2, 1)
    (have,) = module.run("main", [x, np.int32(1), np.float32([1]), np.int32([0])])
    np.testing.assert_array_equal(have, np.rint(x))
    assert have.strides == x.strides


def test_rounding__of_channels_is_left_to_numpy():
    prepared = rq.prepare(residual_model())
    module = EagerModule(prepared.graph.mod)
    rounded = [rounding.data.name for rounding in steps_of(module, RoundingStep)]
    assert {name for group in prepared.plan.activations for name in group.points} <= set(rounded)
    assert not any(":weight" in name for name in rounded)
    args = prepared.graph.arguments()
    x = draw(residual_model())
    for have, want in zip(
        module.run("main", [*x, *args.values()]), run(prepared.mod, x), strict=True
    ):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


# --- Kernels ------------------------------------------------------------------------------------


def test_kernels__are_compiled_once_for_all_batches_and_modules(monkeypatch):
    made = []
    compile_kernel = kernel_cache.compile_kernel

    def counted(key, isa, target):
        made.append(key)
        return compile_kernel(key, isa, target)

    monkeypatch.setattr(kernel_cache, "compile_kernel", counted)
    kernels = KernelCache(host_kernels().target)
    small, large = (conv2d_model(("n", 6, size, 4), (8, 6, 1, 1)) for size in (4, 9))
    for mod in (small, large):
        module = EagerModule(mod, kernels)
        for n in (1, 2):
            module.run("main", draw(mod, n))
    assert len(made) == 1


def test_kernels__one_that_fails_is_tried_again(monkeypatch):
    kernels = KernelCache(host_kernels().target)
    mod = conv2d_model((1, 6, 4, 4), (8, 6, 1, 1))

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "compile_kernel", fail)
        module = EagerModule(mod, kernels)
        with pytest.raises(RuntimeError, match="no memory"):
            module.run("main", draw(mod))
    module.run("main", draw(mod))


def resize_model():
    """An operator that numpy has no form for: it is compiled alone."""
    return build_model(
        lambda e, x: e("y", op.image.resize2d(e.conv("c", x), (9, 9), method="linear")), MAP
    )


def test_operator_that_reads_a_dtype__is_left_to_the_interpreter():
    mod = build_model(lambda e, x: e("y", op.memory.view(x, dtype="int32")), (2, 3))
    x = RNG.normal(size=(2, 3)).astype("float32")
    (made,) = EagerModule(mod).run("main", [x])
    np.testing.assert_array_equal(made, x.view("int32"))


def test_operator_without_numpy_form__is_built_once_for_its_shapes(monkeypatch):
    mod = resize_model()
    module, x = EagerModule(mod), draw(mod)
    expected = module.run("main", x)

    def fail(*_):
        raise AssertionError("built")

    monkeypatch.setattr(single_call, "make_main", fail)
    for got, wanted in zip(module.run("main", x), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("model", [residual_model, resize_model])
def test_kernels__several_threads_give_the_same_bits(model):
    mod = model()
    module, x = EagerModule(mod, KernelCache(host_kernels().target)), draw(mod)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(module.run("main", x)[0].tobytes()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 1
