"""Modules on disk: bytes of weights as they are, read back the same, damage told."""

from __future__ import annotations

import base64
import json
import struct
import zipfile

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.module_file import GRAPH, KIND, WHAT, check_tensor, parse_module
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


@pytest.mark.parametrize("dtype", ["bool", "int4", "float16", "int64", "uint8"])
def test_tensors__of_every_width_are_accepted(dtype):
    tensor = tvm.runtime.empty((3, 5), dtype)
    text = json.loads(tvm.ir.save_json(tensor))["nodes"][-1]["data"]
    check_tensor(text)
