"""ONNX models made here, imported and compared with ONNX Runtime."""

from __future__ import annotations

import itertools
import json

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from tvm import relax
from tvm.ir import Call

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.load import load
from relayquant.formats.readers import import_onnx
from relayquant.formats.readers.onnx.operators.convolutions import resolve_auto_pad
from relayquant.ir.rewrite.graph import call_name, tensor_shape

OPSETS = [11, 13, 17, 21]
RNG = np.random.default_rng(11)


def make_model(nodes, inputs, outputs=("y",), weights=None, opset=13):
    """inputs: name -> shape; weights: name -> array."""
    return make_onnx(nodes, inputs, dict.fromkeys(outputs), weights or {}, opset)


def bindings_of(mod):
    (block,) = mod["main"].body.blocks
    return list(block.bindings)


def operators_of(mod):
    return [
        call_name(b.value) if isinstance(b.value, Call) else type(b.value).__name__
        for b in bindings_of(mod)
    ]


def run_imported(mod, feeds):
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    args = [tvm.runtime.tensor(feeds[param.name]) for param in mod["main"].params]
    result = machine["main"](*args)
    return [out.numpy() for out in ([result] if hasattr(result, "numpy") else result)]


def check_against_onnxruntime(model, feeds, **options):
    """Import, compare with ONNX Runtime to 1e-4, return the module."""
    before = model.SerializeToString()
    mod, params = import_onnx(model, **options)
    assert params == {}
    assert model.SerializeToString() == before
    expected = run_onnxruntime(model, feeds)
    for want, have in zip(expected, run_imported(mod, feeds), strict=True):
        assert want.dtype == have.dtype
        assert want.shape == have.shape
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    return mod


def draw(*shape):
    return RNG.standard_normal(shape).astype("float32")


# -- recovered operators ---------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 6.0), (-0.5, None), (None, 0.5), (None, None), (np.nan, 1.0), (-1.0, np.nan)],
)
def test_clip(opset, low, high):
    weights = {"low": low, "high": high}
    weights = {k: np.array(v, "float32") for k, v in weights.items() if v is not None}
    names = ["x", *(k if k in weights else "" for k in ("low", "high"))]
    node = helper.make_node("Clip", names, ["y"], "clip_node")
    model = make_model([node], {"x": ["N", 4]}, weights=weights, opset=opset)
    mod = check_against_onnxruntime(model, {"x": draw(3, 4) * 5})
    assert operators_of(mod) == ["relax.clip"]


def test_clip__of_opset_7():
    node = helper.make_node("Clip", ["x"], ["y"], min=-1.0)
    mod = check_against_onnxruntime(make_model([node], {"x": [2, 4]}, opset=7), {"x": draw(2, 4)})
    assert operators_of(mod) == ["relax.clip"]


def test_clip__computed_bound_left_to_tvm():
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
        helper.make_node("Clip", ["x", "mean"], ["y"]),
    ]
    mod = check_against_onnxruntime(make_model(nodes, {"x": [2, 4]}), {"x": draw(2, 4)})
    assert "relax.clip" not in operators_of(mod)


@pytest.mark.sample(3)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("pads", [[0, 0, 1, 2, 0, 0, 3, 4], [0, 1, -1, 0, 0, 0, 2, -2]])
def test_pad(opset, pads):
    weights = {"pads": np.array(pads, "int64"), "value": np.array(1.5, "float32")}
    node = helper.make_node("Pad", ["x", "pads", "value"], ["y"])
    model = make_model([node], {"x": ["N", 2, 5, 6]}, weights=weights, opset=opset)
    mod = check_against_onnxruntime(model, {"x": draw(2, 2, 5, 6)})
    assert operators_of(mod)[-1] == "relax.nn.pad"
    assert "relax.call_tir" not in operators_of(mod)


@pytest.mark.parametrize("opset", [18, 21])
def test_pad__with_axes(opset):
    weights = {"pads": np.array([1, 2], "int64"), "axes": np.array([-1], "int64")}
    node = helper.make_node("Pad", ["x", "pads", "", "axes"], ["y"])
    model = make_model([node], {"x": [1, 2, 5]}, weights=weights, opset=opset)
    mod = check_against_onnxruntime(model, {"x": draw(1, 2, 5)})
    assert operators_of(mod) == ["relax.nn.pad"]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_pad__modes_that_copy(mode):
    weights = {"pads": np.array([1, 2], "int64")}
    node = helper.make_node("Pad", ["x", "pads"], ["y"], mode=mode)
    model = make_model([node], {"x": [5]}, weights=weights, opset=19)
    mod = check_against_onnxruntime(model, {"x": draw(5)})
    assert operators_of(mod) == ["relax.nn.pad"]


def test_tile__one_operator():
    node = helper.make_node("Tile", ["x", "n"], ["y"])
    model = make_model([node], {"x": [2, 3]}, weights={"n": np.array([1, 2], "int64")})
    assert operators_of(check_against_onnxruntime(model, {"x": draw(2, 3)})) == ["relax.tile"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(
    ("opset", "stride"), [(11, 1), (11, 2), (13, 2), (17, 2), (21, 2), (21, 3)]
)
def test_conv_auto_pad(opset, stride, mode):
    node = helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["y"],
        auto_pad=mode,
        strides=[stride] * 2,
    )
    weights = {"w": draw(4, 3, 3, 2), "b": draw(4)}
    model = make_model([node], {"x": ["N", 3, 8, 9]}, weights=weights, opset=opset)
    mod = check_against_onnxruntime(model, {"x": draw(2, 3, 8, 9)})
    assert operators_of(mod) == ["relax.nn.conv2d", "relax.add"]


def test_auto_pad__dilated():
    # A window of 5 elements; ceil(8 / 2) = 4 outputs need (4 - 1) * 2 + 5 = 11 of them.
    attributes = {"auto_pad": b"SAME_UPPER", "strides": [2], "dilations": [2]}
    assert resolve_auto_pad(attributes, [8], [3]) == [1, 2]
    assert resolve_auto_pad({**attributes, "auto_pad": b"SAME_LOWER"}, [8], [3]) == [2, 1]
    with pytest.raises(ValueError, match="auto_pad is 'SAME'"):
        resolve_auto_pad({"auto_pad": b"SAME"}, [8], [3])


def test_conv1d_auto_pad():
    node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_LOWER", strides=[2])
    model = make_model([node], {"x": [1, 3, 8]}, weights={"w": draw(4, 3, 4)})
    assert operators_of(check_against_onnxruntime(model, {"x": draw(1, 3, 8)})) == [
        "relax.nn.conv1d"
    ]


def test_auto_pad__symbolic_size():
    node = helper.make_node("Conv", ["x", "w"], ["y"], "c", auto_pad="SAME_UPPER")
    model = make_model([node], {"x": ["N", 3, "H", 9]}, weights={"w": draw(4, 3, 3, 2)})
    check_against_onnxruntime(model, {"x": draw(2, 3, 7, 9)})
    node.attribute.append(helper.make_attribute("strides", [2, 2]))
    model = make_model([node], {"x": ["N", 3, "H", 9]}, weights={"w": draw(4, 3, 3, 2)})
    with pytest.raises(ModelError, match=r"Node 'c'.*Conv.*symbolic dimension 'H'.*shapes="):
        import_onnx(model)
    mod, _ = import_onnx(model, shapes={"x": ("N", 3, 8, 9)})
    assert tensor_shape(mod["main"].params[0]) == ("N", 3, 8, 9)


@pytest.mark.sample(5)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_pool_auto_pad(opset, operator, mode):
    node = helper.make_node(
        operator, ["x"], ["y"], auto_pad=mode, kernel_shape=[3, 4], strides=[2, 3]
    )
    model = make_model([node], {"x": ["N", 3, 8, 9]}, opset=opset)
    mod = check_against_onnxruntime(model, {"x": draw(2, 3, 8, 9)})
    assert len(operators_of(mod)) == 1


SMALL = list(itertools.product((3, 4, 5, 6), (1, 2), (2, 3, 4), ("SAME_UPPER", "SAME_LOWER")))


@pytest.mark.parametrize("opset", [7, 11, 19, 22])
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_pool_auto_pad__kernel_smaller_than_stride(operator, opset):
    """As ONNX Runtime, or refused: where it crops the data, which the standard does not say."""
    messages = []
    for size, kernel, stride, mode in SMALL:
        attributes = {"auto_pad": mode, "kernel_shape": [kernel], "strides": [stride]}
        node = helper.make_node(operator, ["x"], ["y"], **attributes)
        model = make_model([node], {"x": [1, 2, size]}, opset=opset)
        x = draw(1, 2, size)
        try:
            (expected,) = run_onnxruntime(model, {"x": x})
        except Exception:  # ONNX Runtime has no padding below 0 for this operator
            expected = None
        try:
            mod, _ = import_onnx(model)
        except ModelError as error:
            messages.append(str(error))
            continue
        if expected is not None:
            (got,) = rq.reference.run(mod, {"x": x})
            np.testing.assert_allclose(got, expected, 1e-5, err_msg=str(attributes))
    assert len(messages) == 6
    assert all("pads=[0, 0] in place of auto_pad" in message for message in messages)


@pytest.mark.parametrize("opset", [7, 11, 22])
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_convolution_auto_pad__kernel_smaller_than_stride(operator, opset):
    """As onnx's evaluator for Conv, which never crops; its ConvTranspose is not the standard's, so
    that is as ONNX Runtime.
    """
    for size, kernel, stride, mode in SMALL:
        node = helper.make_node(operator, ["x", "w"], ["y"], auto_pad=mode, strides=[stride])
        weights = {"w": draw(2, 2, kernel)}
        model = make_model([node], {"x": [1, 2, size]}, weights=weights, opset=opset)
        feeds = {"x": draw(1, 2, size)}
        if operator == "Conv":
            (expected,) = ReferenceEvaluator(model).run(None, feeds)
        else:
            (expected,) = run_onnxruntime(model, feeds)
        (got,) = rq.reference.run(import_onnx(model)[0], feeds)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, 1e-4, 1e-5)


@pytest.mark.parametrize(
    "attributes",
    [
        {"output_shape": [12, 14], "strides": [2, 2]},
        {"output_shape": [10, 11], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "pads": [1, 0, 1, 1], "output_padding": [1, 0]},
        {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
        {"group": 2},
    ],
)
def test_conv_transpose(attributes):
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes)
    out = 2 if "group" in attributes else 4
    weights = {"w": draw(4, out, 3, 3), "b": draw(4)}
    model = make_model([node], {"x": [2, 4, 5, 6]}, weights=weights)
    mod = check_against_onnxruntime(model, {"x": draw(2, 4, 5, 6)})
    assert operators_of(mod) == ["relax.nn.conv2d_transpose", "relax.add"]


@pytest.mark.parametrize("operator", ["Max", "Min", "Sum"])
def test_variadic(operator):
    node = helper.make_node(operator, ["a", "b", "c"], ["y"])
    model = make_model([node], {"a": ["N", 3], "b": [3]}, weights={"c": draw(1)})
    mod = check_against_onnxruntime(model, {"a": draw(2, 3), "b": draw(3)})
    assert len(operators_of(mod)) == 2
    assert [b.var.name for b in bindings_of(mod)] == ["y.1", "y"]


@pytest.mark.parametrize("index", [[0, 2], [-1], -2])
def test_gather(index):
    node = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    weights = {"i": np.array(index, "int64")}
    mod = check_against_onnxruntime(
        make_model([node], {"x": ["N", 3, 2]}, weights=weights), {"x": draw(2, 3, 2)}
    )
    assert operators_of(mod) == ["relax.take"]


def test_celu__without_overflow():
    data = np.concatenate([draw(50), np.array([-1e4, -200, 0, 200, 1e4], "float32")])[None]
    node = helper.make_node("Celu", ["x"], ["y"], alpha=0.7)
    check_against_onnxruntime(make_model([node], {"x": list(data.shape)}), {"x": data})


# -- names -----------------------------------------------------------------------------------------


def test_names__exact_and_unique():
    nodes = [
        helper.make_node("Conv", ["in/put:0", "w", "b"], ["block.0/conv"], "the conv"),
        helper.make_node("Relu", ["block.0/conv"], ["lv"], "first"),
        helper.make_node("Split", ["lv"], ["a", "b.1"], axis=1),
        helper.make_node("Identity", ["a"], ["same"]),
        helper.make_node("Add", ["same", "b.1"], ["gv"]),
        helper.make_node("Dropout", ["gv"], ["out put"]),
    ]
    weights = {"w": draw(4, 3, 3, 3), "b": draw(4)}
    model = make_model(nodes, {"in/put:0": ["N", 3, 8, 8]}, ["out put", "lv"], weights)
    mod = check_against_onnxruntime(model, {"in/put:0": draw(1, 3, 8, 8)})
    assert [param.name for param in mod["main"].params] == ["in/put:0"]
    names = [b.var.name for b in bindings_of(mod)]
    assert len(set(names)) == len(names)
    assert names[:3] == ["block.0/conv.1", "block.0/conv", "lv"]
    assert {"a", "b.1", "same", "gv", "out put"} <= set(names)
    assert [out.name for out in mod["main"].body.body.fields] == ["out put", "lv"]
    sources = json.loads(mod["main"].attrs["relayquant.sources"])
    conv = {"node": "the conv", "op": "Conv", "constants": ["w", "b"]}
    assert sources["block.0/conv.1"] == conv
    assert sources["lv"] == {"node": "first", "op": "Relu"}
    assert sources["b.1"] == {"node": "", "op": "Split"}
    assert set(names) == set(sources)


def test_batch_norm__named_although_a_tuple():
    node = helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["bn"], "norm")
    weights = {k: draw(3) for k in ("g", "b", "m")} | {"v": np.ones(3, "float32")}
    model = make_model([node], {"x": [1, 3, 4, 4]}, ["bn"], weights)
    mod = check_against_onnxruntime(model, {"x": draw(1, 3, 4, 4)})
    assert [b.var.name for b in bindings_of(mod)] == ["bn.1", "bn"]


def test_input_returned():
    node = helper.make_node("Identity", ["x"], ["y"])
    mod = check_against_onnxruntime(make_model([node], {"x": [2]}), {"x": draw(2)})
    assert [b.var.name for b in bindings_of(mod)] == ["y"]


def test_shapes__fix_and_name_dimensions():
    node = helper.make_node("Relu", ["x"], ["y"])
    model = make_model([node], {"x": ["N", None, 3]})
    mod, _ = import_onnx(model)
    assert tensor_shape(mod["main"].params[0]) == ("N", "x_dim1", 3)
    mod, _ = import_onnx(model, shapes={"x": (1, "T", 3)})
    assert tensor_shape(mod["main"].params[0]) == (1, "T", 3)


@pytest.mark.parametrize(
    ("name", "shown", "size"),
    [
        ("batch-size", "batch_size", 4),
        ("N/2", "N_2", 4),
        ("unk*1//b", "unk_1_b", 4),
        ("-1", "_1", 4),
        ("1", "size_1", 4),
        ("past+2*seq", "past_2_seq.1", 8),
        ("past_2_seq + 2", "past_2_seq + 2", 7),
        ("seq*past + 1", "seq * past + 1", 7),
    ],
)
def test_names_of_sizes__are_computed_if_all_sizes_are_inputs(name, shown, size):
    """ONNX gives a name no meaning, so any size is right but where inputs have all of its parts."""
    nodes = [helper.make_node("Relu", [each], [f"{each}_out"]) for each in "xyzw"]
    data = {"x": draw(size, 3), "y": draw(2), "z": draw(3), "w": draw(5)}
    shapes = {"x": [name, 3], "y": ["past"], "z": ["seq"], "w": ["past_2_seq"]}
    model = make_model(nodes, shapes, [f"{each}_out" for each in "xyzw"])
    mod = check_against_onnxruntime(model, data)
    assert str(tensor_shape(mod["main"].params[0])[0]) == shown


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"X": (1, 2, 3)}, "'X', which is not an input.*(Did you mean|Known:) 'x'"),
        ({"x": (1, 2)}, "allowed: 3 sizes"),
        ({"x": (1, 2, 4)}, "the size 4, but the model fixes it to 3"),
        ({"x": (1, 2, "C")}, "the name 'C', but the model fixes it to 3"),
        ({"x": (1, -1, 3)}, "positive"),
    ],
)
def test_shapes__wrong_ones_named(shapes, message):
    node = helper.make_node("Relu", ["x"], ["y"])
    with pytest.raises(ModelError, match=message):
        import_onnx(make_model([node], {"x": ["N", None, 3]}), shapes=shapes)


# -- rejected models -------------------------------------------------------------------------------


def test_unsupported__all_named_and_nothing_printed(capfd, recwarn):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "fine"),
        helper.make_node("NhwcMaxPool", ["a"], ["b"], "first", domain="com.microsoft"),
        helper.make_node("Mine", ["b"], ["c"], "second", domain="my.domain"),
        helper.make_node("Mine", ["c"], ["y"], domain="my.domain"),
    ]
    model = make_model(nodes, {"x": [2]})
    model.opset_import.append(helper.make_opsetid("my.domain", 1))
    with pytest.raises(ModelError) as caught:
        import_onnx(model)
    text = str(caught.value)
    for part in ("2 operators", "NhwcMaxPool", "'first'", "my.domain.Mine", "'second'", "'y'"):
        assert part in text
    assert capfd.readouterr() == ("", "")
    assert len(recwarn) == 0


def test_conversion_error__names_node_and_operator(capfd, recwarn):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "fine"),
        helper.make_node("CumSum", ["a", "axis"], ["y"], "which axis"),
    ]
    model = make_model(nodes, {"x": [2, 3]})
    model.graph.input.append(helper.make_tensor_value_info("axis", TensorProto.INT64, []))
    with pytest.raises(ModelError, match=r"'which axis'.*operator CumSum.*axis is computed at run"):
        import_onnx(model)
    assert capfd.readouterr() == ("", "")
    assert len(recwarn) == 0


#: activation of FusedConv -> its parameters
FUSED = {
    "": [],
    "Relu": [],
    "Tanh": [],
    "Sigmoid": [],
    "LeakyRelu": [0.2],
    "Clip": [-0.5, 0.75],
    "HardSigmoid": [0.3, 0.6],
}


@pytest.mark.slow
def test_fused_conv__all_activations():
    """What ONNX Runtime writes into models that it has optimized, with a residual too."""
    weights = {"w": draw(4, 3, 3, 3), "b": draw(4)}
    nodes = [
        helper.make_node(
            "FusedConv",
            ["x", "w", "b", "z"] if name in ("Relu", "Clip") else ["x", "w", "b"],
            [f"y{name}"],
            domain="com.microsoft",
            pads=[1, 1, 1, 1],
            **({"activation": name} if name else {}),
            **({"activation_params": values} if values else {}),
        )
        for name, values in FUSED.items()
    ]
    shapes = {"x": [1, 3, 5, 6], "z": [1, 4, 5, 6]}
    model = make_model(nodes, shapes, [f"y{name}" for name in FUSED], weights)
    check_against_onnxruntime(model, {name: draw(*shape) for name, shape in shapes.items()})


def test_fused_conv__of_an_activation_that_is_not_known():
    node = helper.make_node(
        "FusedConv", ["x", "w"], ["y"], "conv", domain="com.microsoft", activation="Swish"
    )
    with pytest.raises(ModelError, match=r"'conv'.*'Swish' is not known; allowed: Relu"):
        import_onnx(make_model([node], {"x": [1, 3, 5, 6]}, weights={"w": draw(4, 3, 1, 1)}))


def test_control_flow__branches_of_two_shapes_are_refused():
    """Where only the run time knows which of them is taken."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Constant", [], ["k"], value_floats=values)],
            name,
            [],
            [helper.make_tensor_value_info("k", TensorProto.FLOAT, [len(values)])],
        )
        for name, values in (("then", [1.0]), ("else", [1.0, 2.0]))
    }
    node = helper.make_node("If", ["c"], ["y"], "choose", **branches)
    model = make_onnx([node], {"c": ("bool", [])}, {"y": None})
    with pytest.raises(ModelError, match=r"'choose' \(operator If.*inputs={'c': value}"):
        import_onnx(model)


def test_invalid_graph__refused():
    node = helper.make_node("Relu", ["nowhere"], ["y"], "lost")
    with pytest.raises(ModelError, match=r"'lost'.*Relu.*'nowhere' is used before.*not valid ONNX"):
        import_onnx(make_model([node], {"x": [2]}))


def test_tensor_computed_twice__refused():
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Tanh", ["x"], ["y"])]
    with pytest.raises(ModelError, match="two nodes compute tensor 'y'"):
        import_onnx(make_model(nodes, {"x": [2]}))


def test_old_opset__refused():
    node = helper.make_node("Relu", ["x"], ["y"])
    with pytest.raises(ModelError, match=r"opset 6.*convert_version"):
        import_onnx(make_model([node], {"x": [2]}, opset=6))


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path):
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = make_model([node], {"x": ["N", 64]}, weights={"w": draw(64, 64)})
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return path


def test_file__loaded(model_file):
    mod, params = load(model_file)
    assert params == {}
    assert operators_of(mod) == ["relax.matmul"]
    load(str(model_file), shapes={"x": (1, 64)})


def test_file__missing(tmp_path):
    with pytest.raises(ModelError, match=r"no model file .*none.onnx"):
        load(tmp_path / "none.onnx")


def test_file__unknown_suffix(tmp_path):
    with pytest.raises(ModelError, match=r"\.onnx.*\.tflite.*\.pt2.*\.relay.*\.json"):
        load(tmp_path / "model.bin")


def test_file__folder(tmp_path):
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ModelError, match="not a file"):
        load(tmp_path / "model.onnx")


@pytest.mark.parametrize("keep", [0, 3, 500, 16000])
def test_file__truncated(model_file, keep):
    model_file.write_bytes(model_file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"empty|no ONNX model|not valid ONNX"):
        load(model_file)


def test_file__random_bytes(tmp_path):
    path = tmp_path / "model.onnx"
    for seed in range(20):
        path.write_bytes(np.random.default_rng(seed).bytes(200))
        with pytest.raises(ModelError):
            load(path)


def test_file__too_large(model_file):
    with pytest.raises(ModelError, match="limit of 1000"):
        load(model_file, max_bytes=1000)


def save_external(tmp_path, location):
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = make_model([node], {"x": ["N", 64]}, weights={"w": draw(64, 64)})
    path = tmp_path / "inner" / "model.onnx"
    path.parent.mkdir()
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data__read_and_counted(tmp_path):
    path = save_external(tmp_path, "w.bin")
    mod, _ = load(path)
    assert bindings_of(mod)[0].value.args[1].value.numpy().shape == (64, 64)
    with pytest.raises(ModelError, match="limit of 5000"):
        load(path, max_bytes=5000)
    with pytest.raises(ModelError, match="data in another file"):
        import_onnx(onnx.load(path, load_external_data=False))


def test_external_data__missing(tmp_path):
    with pytest.raises(ModelError, match=r"'w'.*v\.bin.*missing"):
        load(save_external(tmp_path, "v.bin"))


@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_external_data__must_stay_in_the_folder(tmp_path, kind):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(64 * 64 * 4))
    location = {"parent": "../outside.bin", "absolute": str(outside), "link": "link.bin"}[kind]
    path = save_external(tmp_path, location)
    if kind == "link":
        (path.parent / "link.bin").symlink_to(outside)
    with pytest.raises(ModelError, match=r"'w'.*outside of the model's folder"):
        load(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "-5"}, "does not say where its data is: .*non-negative"),
        ({"length": "many"}, "does not say where its data is: .*'many'"),
        ({"location": "w.bin\0"}, "does not say where its data is: .*embedded null"),
        ({"location": "w" * 5000}, "does not say where its data is: .*too long"),
        ({"offset": str(10**12)}, "'w' .* bytes 1000000000000 to .* of 'w.bin', which has 16384"),
        ({"length": str(10**15)}, "'w' .* bytes 0 to 1000000000000000 of 'w.bin'"),
    ],
)
def test_external_data__absurd(tmp_path, entries, message):
    path = save_external(tmp_path, "w.bin")
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    known = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in known.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load(path)


def test_external_data__of_a_function_must_stay_in_the_folder(tmp_path, monkeypatch):
    """ONNX looks for it in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.bin").write_bytes(bytes(16))
    weight = onnx.TensorProto(name="w", data_type=1, dims=[4])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../w.bin")
    opset = helper.make_opsetid("", 17)
    nodes = [
        helper.make_node("Constant", [], ["c"], "the constant", value=weight),
        helper.make_node("Add", ["a", "c"], ["b"]),
    ]
    model = make_model([helper.make_node("F", ["x"], ["y"], domain="mine")], {"x": [4]})
    model.functions.append(helper.make_function("mine", "F", ["a"], ["b"], nodes, [opset]))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    path = tmp_path / "inner" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"'the constant.value'.*outside of the model's folder"):
        load(path)


def test_load__what_is_no_model_is_told_where_to_go():
    with pytest.raises(
        ModelError, match=r"takes the path .*was given a IRModule.*needs no loading"
    ):
        load(tvm.IRModule())
