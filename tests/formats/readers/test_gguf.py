"""GGUF files: what the package's own writer writes and its own dequantize says; damaged ones."""

from __future__ import annotations

import pickle
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers.gguf.header import KINDS as HEADER_KINDS
from relayquant.formats.readers.gguf.header import read_header

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType


def draw_weight(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def draw_blocks(kind, shape, seed=0):
    """Bytes of blocks; the package writes none of Q4_K: any bytes are some, but for scales."""
    weight = draw_weight(shape, seed)
    if kind is not KINDS.Q4_K:
        return gguf.quants.quantize(weight, kind)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // count, size)).astype("uint8")
    blocks[:, :4] = rng.uniform(0.001, 0.01, (len(blocks), 2)).astype("float16").view("uint8")
    return blocks.reshape(shape[0], -1)


def write_file(path, tensors):
    """tensors: name -> (kind, array or bytes of blocks)."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("some.count", 3)
    writer.add_array("some.words", ["a", "bc"])
    for name, (kind, array) in tensors.items():
        raw = None if kind in (KINDS.F32, KINDS.F16) else kind
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTIZED = (KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0, KINDS.Q4_K)


@pytest.fixture(scope="module")
def tensors():
    found = {kind.name: (kind, draw_blocks(kind, (6, 512))) for kind in QUANTIZED}
    found["plain"] = KINDS.F32, draw_weight((3, 4))
    found["half"] = KINDS.F16, draw_weight((5,)).astype("float16")
    return found


@pytest.fixture(scope="module")
def path(tensors, tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("gguf") / "m.gguf", tensors)


def test_load__values_are_those_of_the_package(path, tensors):
    found = rq.load_gguf(path)
    assert found.keys() == tensors.keys()
    for name, (kind, array) in tensors.items():
        want = array if kind not in QUANTIZED else gguf.quants.dequantize(array, kind)
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], want.astype("float32"))


def test_load__a_tensor_is_read_when_it_is_asked_for(tmp_path):
    """Neither the mapping nor a walk over it holds the values of the file."""
    weight = draw_weight((256, 1024))
    tensors = {f"w{i}": (KINDS.F32, weight + i) for i in range(16)}
    path = write_file(tmp_path / "m.gguf", tensors)
    tracemalloc.start()
    try:
        params = rq.load_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < weight.nbytes / 2
        for i, name in enumerate(params):
            np.testing.assert_array_equal(params[name][0], weight[0] + i)
        assert tracemalloc.get_traced_memory()[1] < 4 * weight.nbytes
    finally:
        tracemalloc.stop()
    assert len(params) == 16
    assert "w3" in params
    assert "w16" not in params
    params["w3"][:] = 0  # the caller's own
    np.testing.assert_array_equal(params["w3"], weight + 3)
    assert "16 tensors" in repr(params)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(params))["w5"], weight + 5)


def test_load__of_a_file_that_changes_afterwards(tmp_path):
    path = write_file(tmp_path / "m.gguf", {"w": (KINDS.F32, draw_weight((64, 64)))})
    params = rq.load_gguf(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        params["w"]
    path.unlink()
    with pytest.raises(ModelError, match=r"m\.gguf"):
        params["w"]


def test_load__kinds_that_are_not_decoded_are_refused_at_once(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("numbers", np.arange(8, dtype="int32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="kind I32, which the package gguf does not decode"):
        rq.load_gguf(path)


def test_compress__codes_of_q4_0_are_found_again(tmp_path):
    """Groups of 32 by a scale that makes the weight of the largest magnitude -8: the same grid."""
    from tvm import relax

    weight = draw_blocks(KINDS.Q4_0, (8, 64))
    path = write_file(tmp_path / "m.gguf", {"w": (KINDS.Q4_0, weight)})
    builder = relax.BlockBuilder()
    x, w = (
        relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", [2, 64]), ("w", [8, 64]))
    )
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        transposed = builder.emit(relax.op.permute_dims(w))
        builder.emit_func_output(builder.emit(relax.op.matmul(x, transposed)))
    params = rq.load_gguf(path)
    q = rq.compress_weights(builder.finalize(), params, bits=4, group_size=32, activation=None)
    data = draw_weight((2, 64), 1)
    found = rq.reference.run(q, {"x": data})[0]
    np.testing.assert_allclose(found, data @ params["w"].T, rtol=1e-5, atol=1e-5)


def test_damaged__every_cut_and_many_changes_end_in_an_error_or_values(path, tmp_path):
    """And in time: a count is believed only as far as the file goes."""
    raw = path.read_bytes()
    start = min(raw.index(name) for name in (b"plain", b"Q4_0"))
    bad = tmp_path / "bad.gguf"
    for stop in (*range(1, start + 40, 7), len(raw) - 1000):
        bad.write_bytes(raw[:stop])
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            rq.load_gguf(bad)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, start + 200, 60):
        bad.write_bytes(raw[:place] + bytes([255]) * 4 + raw[place + 4 :])
        with suppress(ModelError):  # where it changed a number, there are values
            assert dict(rq.load_gguf(bad))


def test_load__refuses_what_is_too_large_missing_or_another_file(path, tmp_path):
    with pytest.raises(ModelError, match="more than the limit of 100"):
        rq.load_gguf(path, max_bytes=100)
    with pytest.raises(ModelError, match="no model file"):
        rq.load_gguf(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is no such file")
    with pytest.raises(ModelError, match=r"text\.gguf"):
        rq.load_gguf(tmp_path / "text.gguf")


def test_header__is_what_the_package_reads(path):
    """Places of tensors, and metadata of every type that the package writes."""
    header = read_header(path)
    for tensor in gguf.GGUFReader(path).tensors:
        place = header.tensors[tensor.name]
        assert place.kind == tensor.tensor_type
        assert (place.offset, place.size) == (tensor.data_offset, tensor.n_bytes)
        assert place.shape == tuple(reversed(tensor.shape.tolist()))
    assert header.metadata["some.count"] == 3
    assert header.metadata["some.words"] == ["a", "bc"]
    assert header.metadata["general.architecture"] == "llama"


def test_header__knows_every_kind_of_block():
    known = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert known.items() <= HEADER_KINDS.items()


@pytest.mark.parametrize("kind", [n for n in gguf.GGUFValueType if n < 8 or n > 9])
def test_header__numbers_of_every_type(kind, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_key_value("one", 1, kind)
    writer.add_key_value("more", [0, 1, 1], gguf.GGUFValueType.ARRAY, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_header(path).metadata
    assert found["one"] == 1
    assert found["more"].tolist() == [0, 1, 1]


def change_header(path, folder, old, new):
    """A copy of a file with some bytes replaced once."""
    raw = path.read_bytes()
    assert len(old) == len(new)
    assert old in raw
    changed = folder / "changed.gguf"
    changed.write_bytes(raw.replace(old, new, 1))
    return changed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "version is 0x3000000; readable: 2 and 3"),
        (b"some.count", b"some.words", "'some.words' twice"),
        (b"Q4_1", b"Q4_0", "the tensor 'Q4_0' twice"),
        (b"plain\2", b"plain\x63", "'plain' has 99 axes; allowed: 1 to 4"),
        (b"some.count\4", b"some.count\x0d", "value of type 13; readable: numbers, texts"),
        (b"half\1\0\0\0\5", b"half\1\0\0\0\xff", r"'half' has 510 bytes at \d+, not aligned to 32"),
        (b"Q8_0\2\0\0\0\0\2", b"Q8_0\2\0\0\0\1\2", "'Q8_0' has rows of 513 values; Q8_0 stores 32"),
    ],
)  # fmt: skip
def test_header__says_what_is_damaged(old, new, message, path, tmp_path):
    with pytest.raises(ModelError, match=message):
        read_header(change_header(path, tmp_path, old, new))


def test_header__tensors_may_not_overlap(tmp_path):
    """Or a small file would be large in memory."""
    tensors = {f"w{i}": (KINDS.F32, draw_weight((64, 64))) for i in range(4)}
    raw = write_file(tmp_path / "m.gguf", tensors).read_bytes()
    for i in range(1, 4):
        at = raw.index(b"w%d" % i) + 2 + 4 + 16 + 4
        raw = raw[:at] + bytes(8) + raw[at + 8 :]
    (tmp_path / "m.gguf").write_bytes(raw[: -2 * 64 * 64 * 4])
    with pytest.raises(ModelError, match="its tensors overlap"):
        read_header(tmp_path / "m.gguf")
