"""safetensors files: what the format's package writes is read; damaged files are errors."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from llama_files import write_safetensors

from relayquant.errors import ModelError
from relayquant.formats.readers.safetensors_file import list_safetensors, read_places

ARRAYS = {
    "a": np.arange(12, dtype="float32").reshape(3, 4),
    "b": np.linspace(0, 1, 5).astype("float16"),
    "empty": np.zeros((0, 4), "float32"),
    "numbers": np.arange(3),
}


@pytest.fixture
def path(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", ARRAYS)
    return tmp_path / "m.safetensors"


def write_header(path, header, body=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_read__a_file_of_the_package(tmp_path):
    save = pytest.importorskip("safetensors.numpy").save_file
    save(ARRAYS, tmp_path / "m.safetensors")
    places = list_safetensors(tmp_path, 1 << 20)
    assert places.keys() == ARRAYS.keys()
    for name in ("a", "b", "empty"):
        np.testing.assert_array_equal(places[name].read(), ARRAYS[name].astype("float32"))
        assert places[name].shape == ARRAYS[name].shape


def test_read__integers_are_refused_when_they_are_read(path):
    places = read_places(path, 1 << 20)
    with pytest.raises(ModelError, match=r"I64; supported: F64, F32, F16, BF16"):
        places["numbers"].read()


def test_damaged__every_cut_and_many_changes(path, tmp_path):
    raw, bad = path.read_bytes(), tmp_path / "bad.safetensors"
    for stop in range(len(raw)):
        bad.write_bytes(raw[:stop])
        with pytest.raises(ModelError):
            read_places(bad, 1 << 20)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(raw) - 100, 300):
        bad.write_bytes(raw[:place] + rng.bytes(1) + raw[place + 1 :])
        with suppress(ModelError):
            for each in read_places(bad, 1 << 20).values():
                with suppress(ModelError):
                    each.read()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, "needs 16 bytes"),
        ({"a": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}, "of 1"),
        ({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}}, "integers"),
        ({"a": {"dtype": "F32", "shape": [1 << 47] * 8, "data_offsets": [0, 4]}}, "needs"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "integers from 0"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "integers from 0"),
        ({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}, "dtype Q4; known"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "offsets"),
        ({"a": 3}, "no table"),
        ([1], "no table"),
        (b"[" * 100000, "nested too deeply"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            "overlap",
        ),
    ],
)
def test_damaged__header(tmp_path, header, message):
    path = tmp_path / "m.safetensors"
    write_header(path, header)
    with pytest.raises(ModelError, match=message):
        read_places(path, 1 << 20)


def test_damaged__length_of_the_header(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="more than the file"):
        read_places(path, 1 << 20)


def test_index__names_files_of_the_folder_only(path, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../m.safetensors", "/etc/passwd", "", ".."):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="not a file of its folder"):
            list_safetensors(tmp_path, 1 << 20)
    index.write_text(json.dumps({"weight_map": {"z": "m.safetensors"}}))
    with pytest.raises(ModelError, match="'z' is not in"):
        list_safetensors(tmp_path, 1 << 20)
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    with pytest.raises(ModelError, match="The index names 1 file, and 0 are there"):
        list_safetensors(tmp_path, 1 << 20)
    index.write_text(json.dumps({"weight_map": {"a": "m.safetensors"}}))
    with pytest.raises(ModelError, match="more than the limit of 100"):
        list_safetensors(tmp_path, 100)
    assert [*list_safetensors(tmp_path, 1 << 20)] == ["a"]


def test_folder__without_tensors(tmp_path):
    with pytest.raises(ModelError, match="0 files"):
        list_safetensors(tmp_path, 1 << 20)
