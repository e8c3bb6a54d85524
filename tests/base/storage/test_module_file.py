"""Modules on disk: bytes of weights as they are, read back the same, damage told."""

from __future__ import annotations

import base64
import ctypes
import json
import struct
import zipfile
import zlib

import numpy as np
import pytest
import tvm
import tvm_ffi
from float_models import MAP, build_model, draw_batches
from module_constants import list_constants
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax import op

import relayquant as rq
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.module_file import (
    GRAPH,
    KIND,
    PLACEHOLDER,
    WHAT,
    make_placeholder,
    parse_module,
)
from relayquant.base.storage.tensor_bytes import (
    check_tensor,
    encode_tensor,
    pack_tensor,
    unpack_tensor,
)
from relayquant.cli.files import load_model, load_module, write_module
from relayquant.errors import ModelError


def compress(bits: int, group_size: int | None = 32, units: int = 512, **settings):
    """Two products by weights of so many units."""

    def body(emit, x):
        return emit("y", op.nn.relu(emit.dense("b", emit.dense("a", x, units), units)))

    mod = build_model(body, ("n", units))
    return rq.compress_weights(mod, bits=bits, group_size=group_size, **settings)


@pytest.mark.parametrize(
    ("bits", "group_size", "settings"),
    [
        (4, 32, {}),
        (4, 32, {"scale_dtype": "float16"}),
        (3, 64, {"is_symmetric": False}),
        (2, 32, {}),
        (8, None, {}),
    ],
    ids=str,
)
def test_save_module__has_the_bytes_of_codes_and_scales(tmp_path, bits, group_size, settings):
    """Within 3 % of bits x weights + scales (+ zero points), counted here."""
    qmod = compress(bits, group_size, **settings)
    path = rq.save_module(qmod, tmp_path / "m.rqm")
    count = 2 * 512 * 512
    groups = count // (group_size or 512)
    scales = groups * (2 if settings.get("scale_dtype") == "float16" else 4)
    zeros = 0 if settings.get("is_symmetric", True) else groups
    exact = count * bits // 8 + scales + zeros
    assert exact < path.stat().st_size < 1.03 * exact
    again, params = rq.load(path)
    assert params == {}
    tvm.ir.assert_structural_equal(again, qmod, map_free_vars=True)
    assert rq.ledger(again) == rq.ledger(qmod)
    assert path.read_bytes() == rq.save_module(qmod, tmp_path / "again.rqm").read_bytes()


def test_save_module__of_an_integer_model(tmp_path):
    mod = build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), MAP)
    batches = draw_batches(mod, 3)
    qmod = rq.quantize(mod, None, batches, effort="fast", guard=rq.config.Guard.OFF)
    (path,) = write_module(qmod, tmp_path / "m.rqm")  # -o of the command line
    for again in (load_module(path), load_model(path)[0]):
        one, two = (rq.reference.run(each, batches[0])[0] for each in (qmod, again))
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ModelError, match="leave out --shape and --input, which are for"):
        load_model(path, shape=[("x", (1,))])


def test_save_module__another_ending(tmp_path):
    with pytest.raises(ModelError, match=r"does not end in \.rqm.* Name it m\.rqm"):
        rq.save_module(compress(8, units=16), tmp_path / "m.json")


def test_load__what_tvm_wrote_is_read_as_before(tmp_path):
    qmod = compress(4, units=64)
    path = tmp_path / "m.json"
    path.write_text(tvm.ir.save_json(qmod))
    tvm.ir.assert_structural_equal(load_module(path), qmod, map_free_vars=True)


def rewrite(path, change):
    """Another archive, of what `change` makes of its header and arrays."""
    found = read_archive(path, KIND, WHAT)
    header, arrays = dict(found.header), dict(found.arrays)
    change(header, arrays)
    for key in ("format", "arrays", "texts"):
        header.pop(key, None)
    write_archive(path, KIND, Archive(header, arrays))


def cut(header, arrays):
    arrays["0"] = arrays["0"][:-1]


def widen(header, arrays):
    arrays["0"] = arrays["0"].astype("uint16")


def lose(header, arrays):
    del arrays["0"]


def inflate(header, arrays):
    header["graph_bytes"] = 100


def deflate(header, arrays):
    header["graph_bytes"] = 1 << 40


def shorten(header, arrays):
    arrays[GRAPH] = arrays[GRAPH][:-5]


DAMAGE = {
    "shape .* of 8 bits needs 131072 bytes, it has 131071": cut,
    "a tensor is entry 0, which it does not have": widen,
    "a tensor is entry 0, which it does not have ": lose,
    "its graph is not what its header says: 100 bytes": inflate,
    "its graph has 1099511627776 bytes; allowed": deflate,
    "its graph is not what its header says": shorten,
}


@pytest.mark.parametrize("message", DAMAGE)
def test_load__damage_is_told(tmp_path, message):
    path = rq.save_module(compress(4), tmp_path / "m.rqm")
    rewrite(path, DAMAGE[message])
    with pytest.raises(ModelError, match=f"m.rqm is no module .*{message.strip()}"):
        rq.load(path)


OTHER_TENSORS = {
    "fewer rows": np.ones((4, 500), "float32"),
    "turned": np.ones((500, 8), "float32"),
    "flat": np.ones(4000, "float32"),
    "integers": np.ones((8, 500), "int32"),
}


@pytest.mark.parametrize("kind", OTHER_TENSORS)
@pytest.mark.parametrize("suffix", ["rqm", "json"])
def test_load__a_constant_has_a_tensor_of_its_type(tmp_path, suffix, kind):
    """Compiled code reads the memory of a constant as its type declares it."""
    mod = add_constants(relax.const(np.ones((8, 500), "float32")))
    path = rq.save_module(mod, tmp_path / "m.rqm")
    tensor = tvm.runtime.tensor(OTHER_TENSORS[kind])
    rewrite(path, lambda header, arrays: arrays.update({"0": pack_tensor(tensor)}))
    if suffix == "json":
        document = json.loads(tvm.ir.save_json(mod))
        (node,) = [node for node in document["nodes"] if node["type"] == "ffi.Tensor"]
        node["data"] = encode_tensor(tensor)
        path = tmp_path / "m.json"
        path.write_text(json.dumps(document))
    message = r"a constant of type R.Tensor\(\(8, 500\), dtype=.float32.\) has a tensor of "
    with pytest.raises(ModelError, match=message):
        load_module(path)


def test_load__a_variable_that_nothing_defines(tmp_path):
    document = json.loads(tvm.ir.save_json(add_constants(*map(relax.const, np.ones(3)))))
    (block,) = [node for node in document["nodes"] if node["type"] == "relax.expr.DataflowBlock"]
    del document["nodes"][block["data"]["bindings"]]["data"][0]
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"m\.json is no module .* is not defined"):
        load_module(path)


def test_load__another_archive_is_no_module(tmp_path):
    path = tmp_path / "m.rqm"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "{}" * 1000)
    with pytest.raises(ModelError, match="its entries are not as relayquant writes them"):
        rq.load(path)


TENSORS = {
    "4 bytes": lambda data: data[:4],
    "does not begin as tensors do": lambda data: b"\0" + data[1:],
    r"shape \(2, 600\)": lambda data: data[:40] + struct.pack("<q", 600) + data[48:],
    r"shape \(-2, 3\)": lambda data: data[:32] + struct.pack("<q", -2) + data[40:],
    "it has 20": lambda data: data[:-4],
}


@pytest.mark.parametrize("message", TENSORS)
def test_tensors__in_json_have_the_bytes_of_their_sizes(message):
    """TVM takes as much memory as the sizes say."""
    mod = build_model(
        lambda emit, x: emit("y", op.add(x, relax.const(np.ones((2, 3), "float32")))), (2, 3)
    )
    document = json.loads(tvm.ir.save_json(mod))
    (node,) = [node for node in document["nodes"] if node["type"] == "ffi.Tensor"]
    check_tensor(node["data"])
    node["data"] = base64.b64encode(TENSORS[message](base64.b64decode(node["data"]))).decode()
    with pytest.raises(ValueError, match=message):
        parse_module(json.dumps(document))


@pytest.mark.parametrize("dtype", ["bool", "float16", "int64", "uint8"])
def test_tensors__of_every_width_are_accepted(dtype):
    tensor = tvm.runtime.empty((3, 5), dtype)
    text = json.loads(tvm.ir.save_json(tensor))["nodes"][-1]["data"]
    check_tensor(text)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float16", "bfloat16", "float8_e4m3fn"])
def test_tensors__have_the_bytes_of_tvm(dtype):
    tensor = tvm.runtime.empty((3, 2), dtype)
    known = base64.b64decode(json.loads(tvm.ir.save_json(tensor))["nodes"][-1]["data"])
    data = pack_tensor(tensor)
    assert data.tobytes() == known
    again = unpack_tensor(data)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert pack_tensor(again).tobytes() == known


def test_save_module__tvm_turns_no_weight_into_text(tmp_path, monkeypatch):
    """It does so with 45 MB/s, and the text takes several times the memory."""
    texts = []
    save = tvm.ir.save_json
    monkeypatch.setattr(tvm.ir, "save_json", lambda mod: texts.append(save(mod)) or texts[-1])
    qmod = compress(8, None)
    rq.save_module(qmod, tmp_path / "m.rqm")
    (text,) = texts
    assert len(text) < 100_000 < 512 * 512


def add_constants(*arrays, attributes=None):
    """A module that adds constants, (n,) each, to its input."""

    def body(emit, x):
        for i, array in enumerate(arrays):
            x = emit(f"y{i}", op.add(x, op.sum(op.astype(array, "float32"))))
        return x

    mod = build_model(body, (4,))
    for name, value in (attributes or {}).items():
        mod["main"] = mod["main"].with_attr(name, value)
    return mod


def test_save_module__a_shared_weight_is_one_entry(tmp_path):
    array = relax.const(np.arange(1000, dtype="float32"))
    mod = add_constants(array, array, relax.const(array.value))
    path = rq.save_module(mod, tmp_path / "m.rqm")
    assert set(read_archive(path, KIND, WHAT).arrays) == {"0", GRAPH}
    again = rq.load(path)[0]
    tvm.ir.assert_structural_equal(again, mod, map_free_vars=True)


def test_save_module__a_constant_that_looks_like_a_placeholder(tmp_path):
    mod = add_constants(
        relax.const(make_placeholder(7)),
        relax.const(np.full(PLACEHOLDER, 0, "int64")),
        relax.const(np.ones(500, "int32")),
    )
    again = rq.load(rq.save_module(mod, tmp_path / "m.rqm"))[0]
    tvm.ir.assert_structural_equal(again, mod, map_free_vars=True)


def test_save_module__tensors_that_are_no_constants(tmp_path):
    """They stay in the graph."""
    tensor = tvm.runtime.tensor(np.arange(1000, dtype="int16"))
    mod = add_constants(relax.const(tensor), attributes={"mine": tensor})
    again = rq.load(rq.save_module(mod, tmp_path / "m.rqm"))[0]
    np.testing.assert_array_equal(again["main"].attrs["mine"].numpy(), tensor.numpy())
    tvm.ir.assert_structural_equal(again, mod, map_free_vars=True)


def write_all_as_entries(path, mod):
    """Write each tensor of TVM's graph as an entry, whatever holds it."""
    document, arrays = json.loads(tvm.ir.save_json(mod)), {}
    for node in document["nodes"]:
        if node["type"] == "ffi.Tensor":
            arrays[str(len(arrays))] = np.frombuffer(base64.b64decode(node["data"]), "uint8")
            node["data"] = len(arrays) - 1
    graph = json.dumps(document).encode()
    arrays[GRAPH] = np.frombuffer(zlib.compress(graph), "uint8")
    write_archive(path, KIND, Archive({"graph_bytes": len(graph)}, arrays))


def test_load__any_tensor_may_be_an_entry(tmp_path):
    """A tensor of an attribute, of a constant, and of both."""
    tensors = [tvm.runtime.empty((1000,), "int16") for _ in range(3)]
    mod = add_constants(
        *map(relax.const, tensors[:2]), attributes={"a": tensors[1], "b": tensors[2]}
    )
    path = tmp_path / "m.rqm"
    write_all_as_entries(path, mod)
    tvm.ir.assert_structural_equal(rq.load(path)[0], mod, map_free_vars=True)


def pack_half_bytes(count):
    """An int4 tensor, and its bytes in memory, two elements each."""
    data = np.arange(count // 2, dtype="uint8")
    head = bytearray(pack_tensor(tvm.runtime.empty((count,), "int4"))[: -len(data)])
    return unpack_tensor(np.frombuffer(bytes(head) + data.tobytes(), "uint8")), data.tobytes()


@pytest.mark.parametrize("count", [6, 3000])
def test_tensors__elements_that_share_bytes(tmp_path, count):
    """TVM's JSON would take twice the bytes that they have, from behind their end."""
    tensor, data = pack_half_bytes(count)
    mod = add_constants(relax.const(tensor))
    path = rq.save_module(mod, tmp_path / "m.rqm")
    assert read_archive(path, KIND, WHAT).arrays["0"].tobytes().endswith(data)
    (constant,) = read_vectors(path)
    assert pack_tensor(constant).tobytes() == pack_tensor(tensor).tobytes()
    write_all_as_entries(path, mod)  # of TVM's bytes, twice as many
    (constant,) = read_vectors(path)
    assert pack_tensor(constant).tobytes() == pack_tensor(tensor).tobytes()


def test_tensors__elements_of_several_lanes(tmp_path):
    """TVM's JSON would keep one lane of each element."""
    tensor = tvm.runtime.empty((5,), "float32x4")
    ctypes.memset(tensor.data_ptr(), 7, 5 * 16)
    mod = add_constants(relax.const(np.ones(3, "float32")))
    constant = GenericConst(tensor, relax.TensorType((5,), "float32x4"))
    mod = tvm_ffi.structural_map(mod, (GenericConst, lambda each: constant))
    (found,) = read_vectors(rq.save_module(mod, tmp_path / "m.rqm"))
    assert pack_tensor(found).tobytes() == pack_tensor(tensor).tobytes()


def read_vectors(path):
    constants = list_constants(rq.load(path)[0]["main"])
    return [constant.value for constant in constants if constant.value.ndim == 1]


def test_tensors__elements_that_share_bytes_are_in_constants_only(tmp_path):
    tensor, _ = pack_half_bytes(6)
    text = tvm.ir.save_json(add_constants(relax.const(tensor)))
    with pytest.raises(ValueError, match="its elements have 4 bits x 1, for which TVM's JSON"):
        parse_module(text)
    mod = add_constants(attributes={"mine": tensor})
    with pytest.raises(
        ModelError, match=r"no constant \(in an attribute\) cannot be written.*4 bits"
    ):
        rq.save_module(mod, tmp_path / "m.rqm")


def test_load__a_placeholder_of_no_entry(tmp_path):
    mod = add_constants(relax.const(np.ones(3, "float32")))
    path = tmp_path / "m.rqm"
    write_all_as_entries(path, mod)
    found = read_archive(path, KIND, WHAT)
    text = zlib.decompress(found.arrays[GRAPH].tobytes())
    document = json.loads(text)
    (node,) = [node for node in document["nodes"] if node["type"] == "ffi.Tensor"]
    node["data"] = encode_tensor(make_placeholder(5))
    graph = json.dumps(document).encode()
    arrays = {GRAPH: np.frombuffer(zlib.compress(graph), "uint8")}
    write_archive(path, KIND, Archive({"graph_bytes": len(graph)}, arrays))
    with pytest.raises(ModelError, match="a tensor is entry 5, which it does not have"):
        rq.load(path)
