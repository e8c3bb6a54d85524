"""Weights and biases that are no usable numbers: refused before calibration, by their names in the
source model.
"""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from tvm import relax

import relayquant as rq

OPS = {"W": "conv2d", "B": "add", "scale": "batch_norm", "shift": "batch_norm"}
OPS |= {"mean": "batch_norm", "var": "batch_norm", "M": "matmul", "C": "add"}


def make_model(tmp_path, nodes, constants, input_shape, output_shape):
    """What `load` gives for an ONNX model with input x and output y."""
    path = tmp_path / "model.onnx"
    onnx.save(make_onnx(nodes, {"x": input_shape}, {"y": output_shape}, constants), path)
    return rq.load(path)


def draw_constants() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"W": (4, 3, 3, 3), "B": (4,), "shift": (4,), "mean": (4,), "M": (144, 5), "C": (5,)}
    found = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    return found | {name: rng.uniform(0.5, 2, 4).astype("float32") for name in ("scale", "var")}


def make_network(tmp_path, constants):
    """Convolution, batch norm, relu and a fully connected layer."""
    norm = ["c", "scale", "shift", "mean", "var"]
    nodes = [
        helper.make_node("Conv", ["x", "W", "B"], ["c"], "conv1"),
        helper.make_node("BatchNormalization", norm, ["n"], "bn1"),
        helper.make_node("Relu", ["n"], ["r"], "relu1"),
        helper.make_node("Flatten", ["r"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "M", "C"], ["y"], "fc"),
    ]
    return make_model(tmp_path, nodes, constants, [1, 3, 8, 8], [1, 5])


def draw_data(*shape: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=shape).astype("float32")} for _ in range(4)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", OPS)
def test_constant__named_with_its_reader_and_count(tmp_path, name, bad):
    """Every constant of every kind of layer; no data is read. An infinite bias is refused by what
    is quantized, under the name of the operator.
    """
    constants = draw_constants()
    constants[name].flat[1:3] = bad
    mod, params = make_network(tmp_path, constants)
    with pytest.raises(rq.ModelError) as caught:
        rq.prepare(mod, params)
    size, nan = constants[name].size, 2 * np.isnan(bad)
    found = f"holds {nan} NaN and {2 - nan} infinite of {size} elements"
    message = str(caught.value)
    assert found in message
    assert f"'{name}'" in message
    if name in ("B", "C") and not nan:
        assert message.startswith("The bias of ")
        assert "set_module_name(" in message
    else:
        assert message.startswith(f"The constant {name!r}, which ")
        assert f"({OPS[name]}) reads" in message
        assert "check the file of the model" in message


def test_constant__negative_variance(tmp_path):
    constants = draw_constants()
    constants["var"][2] = -5
    mod, params = make_network(tmp_path, constants)
    with pytest.raises(rq.ModelError, match=r"'var', .* holds 1 of 4 elements \(variances\) below"):
        rq.quantize(mod, params, draw_data(1, 3, 8, 8))


def test_constants__several_named_at_once(tmp_path):
    constants = draw_constants()
    for name in ("W", "scale", "M", "C"):
        constants[name].flat[0] = np.nan
    mod, params = make_network(tmp_path, constants)
    with pytest.raises(rq.ModelError, match=r"'W'.*'scale'.*'M'.* So do 1 more\."):
        rq.prepare(mod, params)


@pytest.mark.parametrize("value", [1e30, -1e20])
@pytest.mark.parametrize("name", sorted(OPS.keys() - {"var"}))
def test_constant__huge_is_a_warning(tmp_path, name, value):
    constants = draw_constants()
    constants[name].flat[1] = value
    mod, params = make_network(tmp_path, constants)
    size = constants[name].size
    with pytest.warns(UserWarning, match=rf"'{name}', .* holds 1 of {size} elements beyond 1.8e"):
        rq.prepare(mod, params)


def test_constant__usable_ones_say_nothing(tmp_path):
    constants = draw_constants()
    constants["C"][1] = -1e19
    mod, params = make_network(tmp_path, constants)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rq.prepare(mod, params)


def test_constant__of_params_by_their_name():
    """Names come from the parameters where there is no file."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    weight = relax.Var("block.fc.weight", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x, weight], {"num_input": 1}):
        with builder.dataflow():
            turned = builder.emit(relax.op.permute_dims(weight))
            out = builder.emit_output(relax.op.matmul(x, turned))
        builder.emit_func_output(out)
    params = {"block.fc.weight": np.full((4, 8), np.inf, "float32")}
    with pytest.raises(rq.ModelError, match=r"'block\.fc\.weight', .* 32 infinite of 32 elements"):
        rq.prepare(builder.finalize(), params)


def make_attention(tmp_path, mask, where=False):
    rng = np.random.default_rng(2)
    constants = {name: rng.normal(size=(8, 8)).astype("float32") for name in ("Q", "K")}
    nodes = [
        helper.make_node("MatMul", ["x", "Q"], ["q"]),
        helper.make_node("MatMul", ["x", "K"], ["k"]),
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["s"]),
    ]
    if where:
        constants |= {"keep": np.isfinite(mask), "low": np.array(-np.inf, "float32")}
        nodes.append(helper.make_node("Where", ["keep", "s", "low"], ["a"]))
    else:
        constants["mask"] = mask
        nodes.append(helper.make_node("Add", ["s", "mask"], ["a"]))
    nodes.append(helper.make_node("Softmax", ["a"], ["y"], axis=-1))
    return make_model(tmp_path, nodes, constants, [1, 6, 8], [1, 6, 6])


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo("float32").min])
@pytest.mark.parametrize("form", ["causal", "row", "where"])
def test_mask__is_no_bias(tmp_path, form, lowest):
    """A product of two activations may be masked; compared with ONNX Runtime."""
    mask = np.triu(np.full((6, 6), lowest, "float32"), 1)
    if form == "row":
        mask = np.array([0, 0, 0, 0, lowest, lowest], "float32")
    elif form == "where":
        mask = np.where(mask < 0, -np.inf, mask)
    mod, params = make_attention(tmp_path, mask, where=form == "where")
    data = draw_data(1, 6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qmod = rq.quantize(mod, params, data)
    (got,) = rq.reference.run(qmod, data[0])
    (expected,) = run_onnxruntime(tmp_path / "model.onnx", data[0])
    assert (got[np.asarray(expected) == 0] == 0).all()
    assert np.abs(got - expected).max() < 0.1


def test_infinite_bias__of_an_operator_in_float_is_legal(tmp_path):
    """Tokens that a language model must not say: the advice of the message works."""
    constants = draw_constants()
    constants["C"][3] = -np.inf
    mod, params = make_network(tmp_path, constants)
    every = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)
    mapping = every.set_module_name("y", None)
    data = draw_data(1, 3, 8, 8)
    qmod = rq.quantize(mod, params, data, qconfig_mapping=mapping, backend="x86")
    assert [row.name for row in rq.ledger(qmod).rows if row.quantized][:1] == ["r"]
    (got,) = rq.reference.run(qmod, data[0])
    (expected,) = run_onnxruntime(tmp_path / "model.onnx", data[0])
    assert got[0, 3] == expected[0, 3] == -np.inf
    rest = [0, 1, 2, 4]
    np.testing.assert_allclose(got[0, rest], expected[0, rest], atol=2)  # of 80


def make_torch(name: str):
    torch = pytest.importorskip("torch")
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
    module = torch.nn.Sequential(*layers, torch.nn.Linear(144, 5)).eval()
    module.state_dict()[name].view(-1)[1] = float("nan")
    return module, (torch.ones(2, 3, 8, 8),)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.running_var", "3.weight"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_torch__named_by_the_path_of_the_module(name, is_trained):
    module, example = make_torch(name)
    data = [{"input": example[0].numpy()}]
    settings = {} if is_trained else {"dataset": data}
    door = rq.torch.prepare_qat if is_trained else rq.torch.quantize
    with pytest.raises(rq.ModelError, match=f"^The constant '{name}', which .* holds 1 NaN"):
        door(module, example, **settings)


def test_finetune__names_the_constant(tmp_path):
    pytest.importorskip("torch")
    constants = draw_constants()
    constants["M"][0, 1] = np.nan
    mod, params = make_network(tmp_path, constants)
    with pytest.raises(rq.ModelError, match=r"^The constant 'M', which 'y\.1' \(matmul\) reads"):
        rq.torch.finetune(mod, params, draw_data(1, 3, 8, 8))
