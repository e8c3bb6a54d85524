"""TensorFlow Lite files: names, layout, numbers of one layer, unreadable files."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import tvm
from tflite_models import Tensor, write_model
from tvm import relax
from tvm.ir import Call

from relayquant.errors import MissingDependencyError, ModelError
from relayquant.formats.load import load
from relayquant.formats.readers import import_tflite
from relayquant.ir import reference

MODEL = "ic_resnet8_fp32.tflite"


def test_resnet8__names_and_layout(shared_data):
    pytest.importorskip("tflite")
    mod, params = load(shared_data(MODEL))
    assert params == {}
    main = mod["main"]
    assert [param.name for param in main.params] == ["input_1"]
    assert [int(size) for size in main.params[0].ty.shape.values] == [1, 32, 32, 3]
    assert main.body.body.name == "Identity"
    bindings = main.body.blocks[0].bindings
    convs = [
        b.value
        for b in bindings
        if isinstance(b.value, Call) and b.value.op.name == "relax.nn.conv2d"
    ]
    assert len(convs) == 9
    assert {conv.attrs.data_layout for conv in convs} == {"NHWC"}
    sources = json.loads(main.attrs["relayquant.sources"])
    names = [b.var.name for b in bindings]
    assert len(set(names)) == len(names)
    assert set(names) == set(sources)
    assert sources["Identity"] == {"node": "Identity", "op": "SOFTMAX"}


def test_resnet8__first_layer_as_numpy_computes_it(shared_data):
    """Convolution 3x3, padding SAME, read from the file's own weights and done by hand."""
    pytest.importorskip("tflite")
    mod, _ = import_tflite(shared_data(MODEL))
    main = mod["main"]
    conv, add, relu = main.body.blocks[0].bindings[:3]
    weight = conv.value.args[1].value.numpy()
    layout = conv.value.attrs.kernel_layout
    weight = weight.transpose([layout.index(letter) for letter in "HWIO"])
    bias = add.value.args[1].value.numpy().ravel()
    x = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3)).astype("float32")
    padded = np.pad(x[0], ((1, 1), (1, 1), (0, 0)))
    expected = np.zeros((32, 32, weight.shape[-1]))
    for i in range(3):
        for j in range(3):
            expected += padded[i : i + 32, j : j + 32] @ weight[i, j].astype("float64")
    expected = np.maximum(expected + bias, 0)
    builder = relax.BlockBuilder()
    with builder.function("main", list(main.params)):
        with builder.dataflow():
            for binding in (conv, add, relu):
                builder.emit_normalized(binding)
            out = builder.emit_output(relu.var)
        builder.emit_func_output(out)
    machine = relax.VirtualMachine(tvm.compile(builder.finalize(), "llvm"), tvm.cpu())
    actual = machine["main"](tvm.runtime.tensor(x)).numpy()[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def test_other_file__refused(tmp_path):
    pytest.importorskip("tflite")
    path = tmp_path / "model.tflite"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="no identifier TFL3"):
        load(path)


@pytest.mark.parametrize("keep", [0.001, 0.05, 0.5, 0.99])
def test_truncated_file__refused(shared_data, tmp_path, keep):
    pytest.importorskip("tflite")
    data = shared_data(MODEL).read_bytes()
    path = tmp_path / "model.tflite"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match=r"model\.tflite"):
        load(path)


def test_tflite_missing__extra_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tflite", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'relayquant\[tflite\]'"):
        load(tmp_path / "model.tflite")


def test_custom_operators__are_named(tmp_path):
    """A flatbuffer with one operator, called twice, that only its converter knows."""
    tflite = pytest.importorskip("tflite")
    flatbuffers = pytest.importorskip("flatbuffers")
    builder = flatbuffers.Builder(0)
    name = builder.CreateString("MyAttention")
    tflite.OperatorCodeStart(builder)
    tflite.OperatorCodeAddCustomCode(builder, name)
    tflite.OperatorCodeAddBuiltinCode(builder, tflite.BuiltinOperator.CUSTOM)
    code = tflite.OperatorCodeEnd(builder)
    calls = []
    for _ in range(2):
        tflite.OperatorStart(builder)
        tflite.OperatorAddOpcodeIndex(builder, 0)
        calls.append(tflite.OperatorEnd(builder))

    def make_vector(start, items):
        start(builder, len(items))
        for item in reversed(items):
            builder.PrependUOffsetTRelative(item)
        return builder.EndVector()

    operators = make_vector(tflite.SubGraphStartOperatorsVector, calls)
    tflite.SubGraphStart(builder)
    tflite.SubGraphAddOperators(builder, operators)
    graphs = make_vector(tflite.ModelStartSubgraphsVector, [tflite.SubGraphEnd(builder)])
    codes = make_vector(tflite.ModelStartOperatorCodesVector, [code])
    tflite.ModelStart(builder)
    tflite.ModelAddOperatorCodes(builder, codes)
    tflite.ModelAddSubgraphs(builder, graphs)
    builder.Finish(tflite.ModelEnd(builder), b"TFL3")
    path = tmp_path / "model.tflite"
    path.write_bytes(bytes(builder.Output()))
    with pytest.raises(ModelError, match=r"1 custom operator of .*'MyAttention' \(2 calls"):
        load(path)


# -- operators that TVM's frontend does not convert, or not so that they can be quantized ----------

X = np.linspace(-2, 2, 24, dtype="float32").reshape(1, 2, 4, 3)


def import_operators(tmp_path, tensors, operators, outputs):
    tensors = [Tensor("x", X.shape), *tensors]
    mod, _ = import_tflite(
        write_model(tmp_path / "model.tflite", tensors, operators, ["x"], outputs)
    )
    names = [
        binding.value.op.name
        for binding in mod["main"].body.blocks[0].bindings
        if isinstance(binding.value, Call)
    ]
    return names, reference.run(mod, {"x": X})


def test_expand_dims_and_fill(tmp_path):
    tensors = [
        Tensor("axis", [1], "int32", np.array([-1])),
        Tensor("sizes", [4], "int32", np.array([1, 2, 4, 3])),
        Tensor("value", [], "float32", np.array(0.25)),
        *(Tensor(name, X.shape) for name in ("filled", "larger")),
        Tensor("y", [*X.shape, 1]),
    ]
    operators = [
        ("FILL", ["sizes", "value"], "filled"),
        ("MAXIMUM", ["x", "filled"], "larger"),
        ("EXPAND_DIMS", ["larger", "axis"], "y"),
    ]
    names, (y,) = import_operators(tmp_path, tensors, operators, ["y"])
    assert names == ["relax.maximum", "relax.expand_dims"]
    np.testing.assert_array_equal(y, np.maximum(X, np.float32(0.25))[..., None])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_weights__sparse_and_of_half_precision(tmp_path, half, is_sparse):
    """[[0, 1.5, 0], [0.25, 0, 0], ...], as float16, without its zeros, or both."""
    dense = np.zeros((4, 3))
    dense[[0, 1, 3], [1, 0, 2]] = [1.5, 0.25, -2]
    dtype = "float16" if half else "float32"
    values, csr = (dense[dense != 0], ([0, 1, 2, 2, 3], [1, 0, 2])) if is_sparse else (dense, None)
    tensors = [
        Tensor("stored", dense.shape, dtype, values, csr),
        Tensor("dense", dense.shape, dtype),
        Tensor("weight", dense.shape),
        Tensor("y", X.shape),
    ]
    operators = [("DENSIFY", ["stored"], "dense")] if is_sparse else []
    weight = "dense" if is_sparse else "stored"
    if half:
        operators.append(("DEQUANTIZE", [weight], "weight"))
        weight = "weight"
    operators.append(("MAXIMUM", ["x", weight], "y"))
    names, (y,) = import_operators(tmp_path, tensors, operators, ["y"])
    assert names == ["relax.maximum"]
    np.testing.assert_array_equal(y, np.maximum(X, dense.astype("float32")))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1, 3), ["relax.nn.prelu"]),
        ((1, 4, 1), ["relax.nn.prelu"]),
        ((1, 1, 1), ["relax.nn.leakyrelu"]),
        ((2, 4, 3), ["relax.minimum", "relax.multiply", "relax.nn.relu", "relax.add"]),
    ],
)
def test_prelu__keeps_its_shape(tmp_path, shape, expected):
    slopes = np.linspace(-0.5, 1.5, int(np.prod(shape)), dtype="float32").reshape(shape)
    tensors = [Tensor("a", shape, values=slopes), Tensor("y", X.shape)]
    names, (y,) = import_operators(tmp_path, tensors, [("PRELU", ["x", "a"], "y")], ["y"])
    assert names == expected
    np.testing.assert_allclose(y, np.where(X < 0, X * slopes, X), rtol=1e-6)
