"""Modules that TVM 0.19 wrote, with the results it recorded."""

from __future__ import annotations

import numpy as np
import pytest
from relay_testing import WRITTEN_BY_TVM, draw_xavier, value_names

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.relay import decode_params, encode_params, from_json, from_text

#: Dump -> largest difference of a float result.
DUMPS = {
    "mlp.relay": 1e-4,
    "mlp.json": 1e-4,
    "mlp.nometa.relay": 1e-4,
    "qdq_convnet.relay": 0,
    "qdq_convnet.json": 0,
    "qdq_convnet_fq2i.relay": 0,
    "qdq_convnet_fq2i.json": 0,
    "qnn_convnet.relay": 1e-7,
    "qnn_convnet.json": 1e-7,
    "resnet8_cifar.relay": 1e-4,
    "resnet8_cifar.json": 1e-4,
    "resnet8_cifar.bound.relay": 1e-4,
    "resnet8_cifar.bound.json": 1e-4,
    "squeezenet.relay": 1e-4,
    "squeezenet.json": 1e-4,
    "transformer2.relay": 1e-4,
    "transformer2.json": 1e-4,
    "transformer2.bound.relay": 1e-4,
    "transformer2.bound.json": 1e-4,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DUMPS)
def test_dump__recorded_output(name):
    stem = name.split(".")[0]
    params = {}
    if stem == "squeezenet":
        params = {"params": draw_xavier(rq.load(WRITTEN_BY_TVM / name, params={})[0])}
    elif "bound" not in name and stem in ("mlp", "resnet8_cifar", "transformer2"):
        params = {"params": WRITTEN_BY_TVM / f"{stem}.params"}
    mod, unbound = rq.load(WRITTEN_BY_TVM / name, **params)
    assert unbound == {}
    with np.load(WRITTEN_BY_TVM / f"{stem}.io.npz") as data:
        inputs = {key[3:]: data[key] for key in data.files if key.startswith("in_")}
        wanted = [data[f"out{i}"] for i in range(sum(key[3:].isdecimal() for key in data.files))]
    assert [param.name for param in mod["main"].params] == list(inputs)
    got = rq.reference.run(mod, inputs)
    assert len(got) == len(wanted) > 0
    for value, want in zip(got, wanted, strict=True):
        assert value.dtype == want.dtype
        np.testing.assert_allclose(value, want, rtol=0, atol=DUMPS[name])


@pytest.mark.parametrize("name", ["mobilenet", "resnet18"])
def test_dump__without_values(name):
    """Weights that are not given stay parameters."""
    mod, _ = rq.load(WRITTEN_BY_TVM / f"{name}.nometa.relay")
    assert len(mod["main"].params) > 50


@pytest.mark.parametrize("name", ["scalar_literals", "scalars_any", "syntax_zoo"])
def test_dump__syntax(name):
    rq.load(WRITTEN_BY_TVM / f"{name}.relay")


def test_dump__names_with_dots():
    mod, _ = rq.load(WRITTEN_BY_TVM / "transformer2_dotted_names.relay")
    plain, _ = rq.load(WRITTEN_BY_TVM / "transformer2.nometa.relay", params={})
    names = [param.name for param in mod["main"].params]
    assert any("." in name for name in names)
    assert len(names) == len(plain["main"].params)


@pytest.mark.parametrize("name", ["qdq_convnet", "qdq_convnet_fq2i", "qnn_convnet"])
def test_dump__without_metadata(name):
    with pytest.raises(ModelError, match="without its metadata section"):
        rq.load(WRITTEN_BY_TVM / f"{name}.nometa.relay")


@pytest.mark.parametrize(
    "name", [name for name in DUMPS if name.endswith(".json")], ids=lambda name: name[:-5]
)
def test_names__same_from_text_and_json(name):
    """Values of a JSON file get the numbers that TVM's printer gives them."""
    text = (WRITTEN_BY_TVM / name.replace(".json", ".relay")).read_text()
    assert value_names(from_json((WRITTEN_BY_TVM / name).read_text())) == value_names(
        from_text(text)
    )


@pytest.mark.parametrize("name", ["mlp", "resnet8_cifar", "transformer2"])
def test_params__written_as_tvm_writes_them(name):
    data = (WRITTEN_BY_TVM / f"{name}.params").read_bytes()
    assert encode_params(decode_params(data)) == data


def test_params__beside_the_model():
    mod, _ = rq.load(WRITTEN_BY_TVM / "resnet8_cifar.relay")
    assert [param.name for param in mod["main"].params] == ["data"]


# -- FakeQuantizationToInteger ---------------------------------------------------------------------

#: Operators that are not defined for negative numbers; what becomes of NaN is not part of the
#: meaning of qnn.quantize, while the integer form reads a table in which it has a value.
PARTIAL = ("log", "rsqrt", "sqrt")


@pytest.mark.slow
def test_fq2i__before_and_after():
    """110 small modules: fake-quantized within one step, integer exactly."""
    with np.load(WRITTEN_BY_TVM / "fq2i/io.npz") as data:
        arrays = {key: data[key] for key in data.files}
    names = sorted({key.split("/")[0] for key in arrays})
    ran, off = 0, []
    for name in names:
        text = (WRITTEN_BY_TVM / f"fq2i/{name}.txt").read_text()
        before, after = text.split("# after FakeQuantizationToInteger")
        inputs = {
            key.split("/")[1]: value
            for key, value in arrays.items()
            if key.startswith(f"{name}/") and "/out_" not in key
        }
        for body, output in ((before.split("\n", 1)[1], "fake_quant"), (after, "integer")):
            if "meta[" in body or f"{name}/out_{output}" not in arrays:
                continue  # printed without its constants, or not run by TVM
            want = arrays[f"{name}/out_{output}"]
            (got,) = rq.reference.run(from_text(body), inputs)
            assert got.dtype == want.dtype, (name, output)
            wrong = got != want
            if output == "fake_quant" and name.split("__")[0] in PARTIAL:
                wrong &= inputs["x"] >= 3
            ran += 1
            if wrong.any():
                off.append((name, output, wrong.sum(), np.abs(got - want.astype("float64")).max()))
    assert ran >= 176
    # One average lies on a tie, and sums depend on their order.
    assert off == [("avg_pool2d__same_qparams", "fake_quant", 1, 1.0)]
