"""Convolutions and pools of volumes as those of images: what they become, and that they are the
same as ONNX's reference evaluator has them.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from drawing import count_examples
from float_models import as_main, ask_for, build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from operator_names import list_operators
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.stages.preparation import prepare_module

VOLUME = (1, 4, 5, 6, 7)


def test_conv3d__of_one_slice_is_conv2d(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 2, 3, 4, 5), "float32"), w: R.Tensor((6, 2, 1, 3, 3), "float32")):
        y = R.nn.conv3d(x, w, strides=(1, 2, 1), padding=(0, 1, 0, 0, 1, 0))
        return R.nn.relu(y)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 3, 4, 5), "float32"), w: R.Tensor((6, 2, 1, 3, 3), "float32")):
            with R.dataflow():
                taps = R.permute_dims(w, axes=[0, 3, 4, 2, 1])
                weight = R.reshape(taps, R.shape([6, 3, 3, 2]))
                slices = R.permute_dims(x, axes=[0, 2, 3, 4, 1])
                images = R.reshape(slices, R.shape([3, 4, 5, 2]))
                y = R.nn.conv2d(
                    images, weight, strides=(2, 1), padding=(1, 0, 1, 0),
                    data_layout="NHWC", kernel_layout="OHWI",
                )  # fmt: skip
                r = R.nn.relu(y)
                whole = R.reshape(r, R.shape([1, 3, 2, 3, 6]))
                z = R.permute_dims(whole, axes=[0, 4, 1, 2, 3])
                R.output(z)
            return z

    check_prepared(before, Expected)


def test_conv3d__of_several_slices_reads_them_as_channels(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3, 4, 5, 6), "float32"), w: R.Tensor((2, 2, 3, 6, 6), "float32")):
        return R.nn.conv3d(
            x, w, strides=(2, 1, 1), padding=(1, 1, 1, 0, 1, 1),
            data_layout="NDHWC", kernel_layout="DHWIO",
        )  # fmt: skip

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3, 4, 5, 6), "float32"), w: R.Tensor((2, 2, 3, 6, 6), "float32")):
            with R.dataflow():
                taps = R.permute_dims(w, axes=[4, 1, 2, 0, 3])
                weight = R.reshape(taps, R.shape([6, 2, 3, 12]))
                pad = R.nn.pad(x, (0, 0, 1, 0, 0, 0, 0, 0, 0, 0))
                a = R.strided_slice(pad, axes=[1], begin=[0], end=[3], strides=[2])
                b = R.strided_slice(pad, axes=[1], begin=[1], end=[4], strides=[2])
                joined = R.concat((a, b), axis=-1)
                images = R.reshape(joined, R.shape([4, 4, 5, 12]))
                z = R.nn.conv2d(
                    images, weight, padding=(1, 1, 1, 1), data_layout="NHWC", kernel_layout="OHWI"
                )
                y = R.reshape(z, R.shape([2, 2, 5, 5, 6]))
                R.output(y)
            return y

    check_prepared(before, Expected)


def test_max_pool3d__over_images_then_over_the_depth(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 8, 6, 6, 3), "float32")):
        return R.nn.max_pool3d(x, pool_size=(3, 2, 2), strides=(2, 2, 2),
                            padding=(1, 0, 0, 0, 0, 0), layout="NDHWC")  # fmt: skip

    @as_main
    def expected(x: R.Tensor((1, 8, 6, 6, 3), "float32")):
        images = R.reshape(x, R.shape([8, 6, 6, 3]))
        a = R.nn.max_pool2d(images, pool_size=(2, 2), strides=(2, 2), layout="NHWC")
        rows = R.reshape(a, R.shape([1, 8, 9, 3]))
        b = R.nn.max_pool2d(rows, pool_size=(3, 1), strides=(2, 1), padding=(1, 0, 0, 0),
                            layout="NHWC")  # fmt: skip
        return R.reshape(b, R.shape([1, 4, 3, 3, 3]))

    check_prepared(before, expected)


def block(emit, x, name, channels=4):
    conv = emit(name, op.nn.conv3d(x, emit.constant(channels, channels, 3, 3, 3), padding=1))
    return emit(f"{name}.biased", op.add(conv, emit.constant(1, channels, 1, 1, 1)))


def test_between_convolutions__everything_is_computed_on_images():
    """Residuals, activations, constants and joined channels: one transpose in, one out."""

    def body(emit, x):
        a = emit("a.relu", op.nn.relu(block(emit, x, "a")))
        b = emit("sum", op.add(block(emit, a, "b"), a))
        c = emit("scaled", op.multiply(op.nn.silu(b), relax.const(0.5, "float32")))
        joined = emit("joined", op.concat([b, c], 1))
        return block(emit, joined, "d", 8)

    names = list_operators(prepare_module(build_model(body, VOLUME)))
    assert names.count("permute_dims") == 2
    assert names[0] == names[-1] == "permute_dims"
    assert "nn.conv3d" not in names
    assert names.count("nn.conv2d") == 3


def test_between_convolutions__what_is_no_image_stays_behind_the_transpose():
    """A constant that varies along the depth, a sum with a value of another kind, a join of
    depths.
    """

    def body(emit, x):
        a = block(emit, x, "a")
        b = emit("b", op.add(a, emit.constant(1, 1, 5, 1, 1)))
        c = emit("c", op.add(b, x))
        return emit("d", op.concat([a, c], 2))

    mod = build_model(body, VOLUME)
    names = list_operators(prepare_module(mod))
    assert names[-3:] == ["add", "add", "concat"]
    x = np.random.default_rng(0).normal(size=VOLUME).astype("float32")
    got = rq.Executor(rq.compile(mod)).run("main", [x])[0]
    wanted = rq.reference.run(mod, [x])[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_prepare_module__keeps_what_a_backend_has_rows_for():
    mod = build_model(lambda emit, x: block(emit, x, "a"), VOLUME)
    assert list_operators(prepare_module(mod, keep=["relax.nn.conv3d"])) == ["nn.conv3d", "add"]


@pytest.mark.slow
def test_quantize__volumes_are_integers():
    def body(emit, x):
        a = emit("a.relu", op.nn.relu(block(emit, x, "a")))
        pooled = emit("pool", op.nn.max_pool3d(a, (2, 2, 2), (1, 2, 2)))
        weight = emit.constant(4, 4, 2, 2, 2)
        up = emit("up", op.nn.conv3d_transpose(pooled, weight, strides=(2, 2, 2)))
        up = emit("up.biased", op.add(up, emit.constant(1, 4, 1, 1, 1)))
        return block(emit, emit("up.relu", op.nn.relu(up)), "last")

    mod = build_model(body, VOLUME)
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=VOLUME).astype("float32")} for _ in range(3)]
    qmod = rq.quantize(mod, None, batches, effort="fast", qconfig_mapping=ask_for("reshape"))
    floats = {row.op for row in rq.ledger(qmod).floating}
    assert floats <= {"permute_dims", "nn.pad", "strided_slice", "concat"}  # of the float input
    x = [*batches[0].values()]
    wanted, got = (rq.Executor(rq.compile(each)).run("main", x)[0] for each in (mod, qmod))
    assert ((got - wanted) ** 2).sum() < 0.005 * (wanted**2).sum()
    assert rq.verify(qmod, x).differences == ()


def evaluate(node: onnx.NodeProto, x: np.ndarray, **constants: np.ndarray):
    """(what ONNX's evaluator gives, what we give compiled) of a model of one node and a ReLU."""
    model = make_onnx([node, helper.make_node("Relu", ["y"], ["z"])], {"x": x}, "z", constants)
    wanted = ReferenceEvaluator(model).run(None, {"x": x})[0]
    prepared = prepare_module(*rq.load(model))
    assert not any("3d" in name for name in list_operators(prepared))
    return wanted, rq.Executor(rq.compile(prepared)).run("main", [x])[0]


several, numbers = st.tuples, st.integers


@pytest.mark.slow
@given(
    groups=st.sampled_from([1, 1, 2]),
    kernel=several(*[numbers(1, 3)] * 3),
    strides=several(*[numbers(1, 3)] * 3),
    dilations=several(*[numbers(1, 2)] * 3),
    pads=several(*[numbers(0, 1)] * 6),
    seed=numbers(0, 99),
)
@settings(max_examples=count_examples(12), deadline=None)
def test_conv3d__equals_onnx(groups, kernel, strides, dilations, pads, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 4, 5, 6, 7)).astype("float32")
    w = rng.normal(size=(6, 4 // groups, *kernel)).astype("float32")
    b = rng.normal(size=6).astype("float32")
    node = helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["y"],
        strides=strides,
        dilations=dilations,
        pads=pads,
        group=groups,
    )
    wanted, got = evaluate(node, x, w=w, b=b)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("kernel", [(1, 2, 2), (3, 3, 2), (3, 3, 3)])
def test_max_pool3d__equals_onnx(kernel, ceil_mode):
    x = np.random.default_rng(0).normal(size=(2, 3, 7, 8, 9)).astype("float32")
    pads = [size // 2 for size in kernel] * 2
    node = helper.make_node(
        "MaxPool", ["x"], ["y"], kernel_shape=kernel, strides=(2, 2, 3), pads=pads,
        ceil_mode=ceil_mode,
    )  # fmt: skip
    wanted, got = evaluate(node, x)
    np.testing.assert_array_equal(got, wanted)
