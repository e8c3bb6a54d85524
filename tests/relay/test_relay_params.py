"""The `.params` format: what is written is read, by us and by TVM; anything else is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import tvm

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.relay import decode_params, encode_params, from_text, save_params
from relayquant.relay.tensors import DTYPE_CODES, decode_tensor, encode_tensor

PARAMS = {
    "fc.weight": np.arange(6, dtype="float32").reshape(2, 3),
    "ä": np.array(7, "int8"),
    "empty": np.zeros((0, 4), "int64"),
    "flags": np.array([True, False]),
}


def test_params__round_trip():
    again = decode_params(encode_params(PARAMS))
    assert list(again) == list(PARAMS)
    for name, array in PARAMS.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)


def test_params__read_by_tvm():
    numbers = {name: array for name, array in PARAMS.items() if array.dtype != bool}
    again = tvm.runtime.load_param_dict(encode_params(numbers))
    assert set(again) == set(numbers)
    for name, array in numbers.items():
        np.testing.assert_array_equal(again[name].numpy(), array)


def test_params__written_by_tvm():
    array = np.arange(4, dtype="float16")
    data = tvm.runtime.save_param_dict({"a": tvm.runtime.tensor(array)})
    np.testing.assert_array_equal(decode_params(bytes(data))["a"], array)


@pytest.mark.parametrize("dtype", sorted(DTYPE_CODES))
def test_tensor__every_dtype(dtype):
    array = np.array([[0, 1], [1, 0]]).astype(dtype)
    again = decode_tensor(encode_tensor(array), "it")
    assert again.dtype == dtype
    np.testing.assert_array_equal(again, array)


def test_tensor__dtype_without_a_form():
    with pytest.raises(ModelError, match="complex64 cannot be saved"):
        encode_tensor(np.zeros(2, "complex64"))


def test_params__every_truncation_is_refused():
    data = encode_params(PARAMS)
    for length in range(len(data)):
        with pytest.raises(ModelError, match="truncated or corrupt"):
            decode_params(data[:length])


def patched(offset: int, layout: str, value: int) -> bytes:
    data = bytearray(encode_params({"w": np.zeros((2, 3), "float32")}))
    struct.pack_into("<" + layout, data, offset, value)
    return bytes(data)


#: name of the field -> (offset, layout, value, part of the message)
FIELDS = {
    "magic": (0, "Q", 1, "instead of 0xf7e58d4f05049cb7"),
    "number of names": (16, "Q", 2**60, "truncated or corrupt: name 2"),
    "length of a name": (24, "Q", 2**63, "name 0 at byte 32 needs"),
    "number of tensors": (33, "Q", 2, "and 2 tensors"),
    "magic of a tensor": (41, "Q", 1, "instead of 0xdd5e40f096b4a13f"),
    "rank": (65, "i", 10**6, "has 1000000 axes"),
    "negative rank": (65, "i", -1, "has -1 axes"),
    "type code": (69, "B", 4, "type code 4, 32 bits"),
    "lanes": (71, "H", 2, "2 lanes"),
    "dimension": (73, "q", 2**40, "24 bytes of data instead of"),
    "negative dimension": (73, "q", -2, "instead of"),
    "size": (89, "q", 2**50, "has 1125899906842624 bytes"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_params__wrong_field_is_named(field):
    offset, layout, value, message = FIELDS[field]
    with pytest.raises(ModelError) as raised:
        decode_params(patched(offset, layout, value))
    assert message in str(raised.value)


def test_params__bytes_left_over():
    with pytest.raises(ModelError, match="3 bytes after its last tensor"):
        decode_params(encode_params(PARAMS) + b"abc")


def test_params__file(tmp_path):
    text = "def @main(%x: Tensor[(2), float32], %w: Tensor[(2), float32]) { add(%x, %w) }"
    (tmp_path / "model.relay").write_text(text)
    mod, _ = rq.load(tmp_path / "model.relay")
    assert len(mod["main"].params) == 2
    save_params({"w": np.ones(2, "float32")}, tmp_path / "model.params")
    mod, _ = rq.load(tmp_path / "model.relay")
    assert len(mod["main"].params) == 1
    (tmp_path / "model.params").rename(tmp_path / "other.params")
    mod, _ = rq.load(tmp_path / "model.relay", params=tmp_path / "other.params")
    np.testing.assert_array_equal(rq.reference.run(mod, [np.zeros(2, "float32")])[0], [1, 1])
    with pytest.raises(ModelError, match=r"no model file .*none.params"):
        rq.load(tmp_path / "model.relay", params=tmp_path / "none.params")


# -- weights that are handed over twice ------------------------------------------------------------

TWO_LAYERS = """def @main(%x: Tensor[(2, 4), float32], %w0: Tensor[(8, 4), float32],
                         %b0: Tensor[(8), float32], %w1: Tensor[(3, 8), float32]) {
  let %first = nn.relu(add(nn.dense(%x, %w0, units=8), %b0));
  nn.dense(%first, %w1, units=3) }"""


def two_layers():
    rng = np.random.default_rng(0)
    shapes = {"w0": (8, 4), "b0": (8,), "w1": (3, 8)}
    weights = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    samples = [rng.normal(size=(2, 4)).astype("float32") for _ in range(4)]
    return from_text(TWO_LAYERS, weights), weights, samples


#: What takes a module and its weights.
TAKERS = {
    "quantize": lambda mod, params, data: rq.quantize(mod, params, data, effort="fast"),
    "prepare": lambda mod, params, data: rq.prepare(mod, params),
    "compress_weights": lambda mod, params, data: rq.compress_weights(
        mod, params, bits=8, group_size=None
    ),
    "relay.quantize": lambda mod, params, data: rq.relay.quantize(mod, params),
    "equalize_layers": lambda mod, params, data: rq.equalize_layers(mod, params),
    "lint": lambda mod, params, data: rq.lint(mod, params, data),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.filterwarnings("ignore")
def test_weights__that_are_bound_already(name):
    """An old script hands them to the importer and to the quantizer: the same are taken, of others
    the name is told.
    """
    take = TAKERS[name]
    mod, weights, data = two_layers()
    take(mod, weights, data)
    take(mod, {"b0": weights["b0"]}, data)
    with pytest.raises(
        ModelError, match=r"params has 'b0'.*No constant of the module has its value"
    ):
        take(mod, {**weights, "b0": weights["b0"] + 1}, data)
    with pytest.raises(ModelError, match=r"params has 'w_0'.*Did you mean 'w0'"):
        take(from_text(TWO_LAYERS), {**weights, "w_0": weights["w0"] + 1}, data)
