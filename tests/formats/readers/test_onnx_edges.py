"""Edges of ONNX operators: types that differ, regions and windows of no size. What is right says
ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_node_cases import TARGET
from onnx_runtime import run_onnxruntime
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError


def draw(shape, dtype):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def make_model(op, inputs, attributes, *, constants=(), domain="", opset=18, out=None):
    """A model of one node. `constants` are the places of operands that are no inputs."""
    arrays = {f"i{at}": array for at, array in enumerate(inputs)}
    node = helper.make_node(op, [*arrays], ["y"], "edge", domain=domain, **attributes)
    known = {f"i{at}": inputs[at] for at in constants}
    given = {name: array for name, array in arrays.items() if name not in known}
    result = {"y": (out or str(inputs[0].dtype), None)}
    return make_onnx([node], given, result, known, opset)


def check_as_runtime(model, inputs, constants=(), tolerance=1e-5):
    """Compare the reference and compiled code with ONNX Runtime, types too."""
    data = {f"i{at}": array for at, array in enumerate(inputs) if at not in constants}
    (want,) = run_onnxruntime(model, data, rewrites=False)
    mod, _ = rq.load(model)
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, data.values())).numpy()
    for found in (compiled, rq.reference.run(mod, data)[0]):
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


FLOAT, HALF = "float32", "float16"
PAIRS = [(HALF, FLOAT), (FLOAT, HALF), (HALF, HALF)]


@pytest.mark.parametrize(("data", "scale"), PAIRS)
@pytest.mark.parametrize("axis", [-1, 0])
def test_simplified_layer_norm__with_a_scale_of_another_type(data, scale, axis):
    inputs = [draw((2, 8), data), draw((8,) if axis else (2, 8), scale)]
    out = helper.np_dtype_to_tensor_dtype(np.dtype(scale))
    model = make_model(
        "SimplifiedLayerNormalization", inputs, {"axis": axis}, constants=(1,), out=out
    )
    check_as_runtime(model, inputs, (1,), 2e-3)


def test_skip_simplified_layer_norm__without_epsilon():
    inputs = [draw((1, 2, 8), FLOAT) * 1e-4, draw((1, 2, 8), FLOAT) * 1e-4, draw((8,), FLOAT)]
    domain = "com.microsoft"
    model = make_model(
        "SkipSimplifiedLayerNormalization", inputs, {}, constants=(2,), domain=domain
    )
    check_as_runtime(model, inputs, (2,))


MIXED = {
    "FusedMatMul": ((2, 3), (3, 4)),
    "FusedConv": ((1, 1, 4, 4), (1, 1, 3, 3)),
    "SkipSimplifiedLayerNormalization": ((1, 2, 8), (1, 2, 8), (8,)),
    "BiasGelu": ((2, 8), (8,)),
}


@pytest.mark.parametrize("op", MIXED)
def test_mixed_floats__of_operators_of_one_type_refused(op):
    *shapes, last = MIXED[op]
    inputs = [*(draw(shape, HALF) for shape in shapes), draw(last, FLOAT)]
    model = make_model(op, inputs, {}, domain="com.microsoft")
    with pytest.raises(Exception, match="bound to different types"):
        run_onnxruntime(model, {})
    with pytest.raises(ModelError, match=r"edge.*are float16 and float32; allowed: one float type"):
        rq.load(model)


@pytest.mark.parametrize("constants", [(), (1, 2, 3, 4)])
@pytest.mark.parametrize("types", [(HALF, FLOAT, FLOAT), (FLOAT, HALF, HALF), (HALF, HALF, HALF)])
def test_batch_norm__with_statistics_of_another_type(types, constants):
    data, scale, statistics = types
    inputs = [
        draw((2, 3, 4), data),
        draw((3,), scale),
        draw((3,), scale),
        draw((3,), statistics),
        np.abs(draw((3,), statistics)),
    ]
    model = make_model("BatchNormalization", inputs, {}, constants=constants, opset=15)
    mod, _ = rq.load(model)
    wide = [array.astype(FLOAT) for array in inputs]
    named = {f"i{at}": array for at, array in enumerate(wide)}
    (want,) = run_onnxruntime(make_model("BatchNormalization", wide, {}), named)
    given = [array for at, array in enumerate(inputs) if at not in constants]
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, given)).numpy()
    for found in (compiled, rq.reference.run(mod, given)[0]):
        assert found.dtype == data
        np.testing.assert_allclose(found, want, rtol=2e-3, atol=2e-3)


#: Regions of no or negative size, beside real ones.
REGIONS = np.float32(
    [[0, 0, 3, 3], [2, 2, 1, 1], [1, 1, 1, 3], [0.5, 1, 2.5, 2], [-3, -3, 9, 9], [3, 0, 1, 2]]
)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"sampling_ratio": 2},
        {"coordinate_transformation_mode": "output_half_pixel"},
        {"spatial_scale": 0.5},
    ],
)
def test_roi_align__of_regions_without_size(attributes):
    form = {"output_height": 2, "output_width": 3, **attributes}
    inputs = [draw((1, 2, 4, 4), FLOAT), REGIONS, np.zeros(len(REGIONS), "int64")]
    check_as_runtime(make_model("RoiAlign", inputs, form, opset=16), inputs)


@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align__of_halves(ratio):
    """The evaluator computes it in float32, ONNX Runtime has it in no narrower type."""
    arrays = [draw((1, 2, 8, 8), HALF), np.array([[1, 1, 6, 7]], HALF), np.zeros(1, "int64")]
    attributes = {"output_height": 2, "output_width": 2, "sampling_ratio": ratio}
    mod, _ = rq.load(make_model("RoiAlign", arrays, attributes))
    wide = [array.astype("float32") if array.dtype == HALF else array for array in arrays]
    data = {f"i{at}": array for at, array in enumerate(wide)}
    (want,) = run_onnxruntime(make_model("RoiAlign", wide, attributes), data, rewrites=False)
    (found,) = rq.Executor(rq.compile(mod, TARGET)).run("main", arrays)
    assert found.dtype == HALF
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


def test_batch_norm__running_statistics_keep_their_type():
    arrays = [draw((2, 3, 4), FLOAT), *(np.abs(draw((3,), HALF)) for _ in range(4))]
    model = make_model("BatchNormalization", arrays, {"training_mode": 1})
    model.graph.node[0].output.extend(["mean", "variance"])
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, [3])
        for name in ("mean", "variance")
    )
    found = rq.reference.run(rq.load(model)[0], arrays)
    data = {f"i{at}": array for at, array in enumerate(arrays)}
    want = ReferenceEvaluator(model).run(None, data)
    assert [array.dtype for array in found] == [FLOAT, HALF, HALF]
    for have, right in zip(found, want, strict=True):
        np.testing.assert_allclose(have, right, rtol=1e-3, atol=1e-3)


def test_conv_integer__wider_than_its_data_refused():
    inputs = [np.ones((1, 1, 2, 2), "uint8"), np.ones((1, 1, 3, 3), "uint8")]
    model = make_model("ConvInteger", inputs, {}, constants=(1,), out=TensorProto.INT32)
    with pytest.raises(ModelError, match=r"edge.*kernel_shape \[3, 3\] is wider than data"):
        rq.load(model)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv_transpose__with_pads_wider_than_its_result_refused(rank):
    inputs = [np.ones((1, 1, *[1] * rank), FLOAT)] * 2
    model = make_model("ConvTranspose", inputs, {"pads": [1] * 2 * rank}, constants=(1,))
    with pytest.raises(ModelError, match=r"edge.*are wider than its result"):
        rq.load(model)


def test_reshape__with_allowzero_of_data_that_is_not_empty_refused():
    inputs = [np.ones((2, 3), FLOAT), np.array([3, 0])]
    model = make_model("Reshape", inputs, {"allowzero": 1}, constants=(1,))
    with pytest.raises(ModelError, match=r"edge.*allowzero=1 makes data of the shape \(2, 3\)"):
        rq.load(model)


def test_reshape__with_allowzero_of_nothing():
    nodes = [
        helper.make_node("Slice", ["x", "zero", "zero"], ["nothing"]),
        helper.make_node("Reshape", ["nothing", "sizes"], ["y"], allowzero=1),
    ]
    constants = {"zero": np.array([0]), "sizes": np.array([3, 0])}
    model = make_onnx(nodes, {"x": (2, 3)}, "y", constants, 18)
    mod, _ = rq.load(model)
    (found,) = rq.reference.run(mod, [np.ones((2, 3), FLOAT)])
    assert found.shape == (3, 0)


EMPTY = np.ones((0, 3), FLOAT)


@pytest.mark.parametrize(
    ("op", "attributes", "others"),
    [
        ("ReduceSum", {}, [np.array([0])]),
        ("MatMul", {}, [np.ones((3, 4), FLOAT)]),
        ("Concat", {"axis": 0}, [np.ones((2, 3), FLOAT)]),
        ("Pad", {}, [np.array([1, 0, 1, 0])]),
        ("Shape", {}, []),
        ("Reshape", {"allowzero": 1}, [np.array([3, 0])]),
        ("Reshape", {}, [np.array([0, 1, 3])]),
        ("Flatten", {"axis": 1}, []),
        ("Flatten", {"axis": 0}, []),
        ("Flatten", {"axis": -1}, []),
        ("Trilu", {}, []),
        ("Trilu", {"upper": 0}, [np.array(1)]),
    ],
)
def test_size_0__of_an_input_stays_0(op, attributes, others):
    """A size declared 0 is no free size: results are those of data without elements."""
    out, places = TensorProto.INT64 if op == "Shape" else None, range(1, 1 + len(others))
    model = make_model(op, [EMPTY, *others], attributes, constants=places, out=out)
    mod, _ = rq.load(model)
    (param,) = mod["main"].params
    assert [int(size) for size in param.ty.shape] == [0, 3]
    (want,) = run_onnxruntime(model, {param.name: EMPTY})
    found = [
        rq.reference.run(mod, [EMPTY])[0],
        rq.Executor(rq.compile(mod)).run("main", [EMPTY])[0],
    ]
    for each in found:
        assert (each.dtype, each.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(each, want)


def test_size_0__is_replaced_by_shapes():
    """Some exporters write 0 for a size that they do not know."""
    model = make_model("Relu", [EMPTY], {})
    name = model.graph.input[0].name
    for shape in ((2, 3), ("N", 3)):
        mod, _ = rq.load(model, shapes={name: shape})
        np.testing.assert_array_equal(rq.reference.run(mod, [np.ones((2, 3), FLOAT)])[0], 1)


@pytest.mark.parametrize("count", [0, 2])
def test_reshape__with_allowzero_of_a_free_size(count):
    """A 0 is a size, which data of another size does not fit; the run says so."""
    node = helper.make_node("Reshape", ["x", "sizes"], ["y"], allowzero=1)
    mod, _ = rq.load(make_onnx([node], {"x": ("N", 3)}, "y", {"sizes": np.array([3, 0])}))
    data, executor = np.ones((count, 3), FLOAT), rq.Executor(rq.compile(mod))
    for run in (lambda: rq.reference.run(mod, [data]), lambda: executor.run("main", [data])):
        if count:
            with pytest.raises(Exception, match=r"reshape|do not fit"):
                run()
        else:
            assert run()[0].shape == (3, 0)
