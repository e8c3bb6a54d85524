"""Files of the command line: what is read is checked with a message, what is written is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.base.storage.files import write_text, write_whole
from relayquant.cli.files import load_mapping, load_model, load_module
from relayquant.errors import ConfigError, FileError, ModelError


@I.ir_module
class Scale:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4,), "float32")) -> R.Tensor(
        ("n", 4), "float32"
    ):
        with R.dataflow():
            y = R.multiply(x, w)
            R.output(y)
        return y


def test_load_module__reads_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(Scale))
    tvm.ir.assert_structural_equal(load_module(path), Scale)


@pytest.mark.parametrize("text", ["", "hello", "{}", "[1]", "1", '{"root_index": 0, "nodes": []}'])
def test_load_module__not_a_module(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"model\.json is no module"):
        load_module(path)


def test_load_module__binary_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ModelError, match=r"model\.json is no module"):
        load_module(path)


def test_load_module__binary_file_is_said_in_words(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(b"\x7fELF\x88\xff")
    with pytest.raises(ModelError, match=r"or is damaged: it is no text\. \[RQ502\]"):
        load_module(path)


@pytest.mark.parametrize("load", [load_module, load_model])
def test_load_module__a_library(tmp_path: Path, load: Callable[[Path], object]) -> None:
    path = tmp_path / "kws.so"
    path.write_bytes(b"\x7fELF\x88\xff")
    message = r"kws\.so is a compiled library.* -o \S*kws\.rqm.*\[RQ201\]"
    with pytest.raises(ModelError, match=message):
        load(path)


def test_load_module__a_float_model(tmp_path: Path) -> None:
    """Also what the two models in the wrong order give."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x07\x88")
    message = r"model file \(ONNX\).* float model goes first.* -o \S*model\.int8\.rqm.*\[RQ201\]"
    with pytest.raises(ModelError, match=message):
        load_module(path)


@pytest.mark.parametrize("name", ["whole.pt", "sd.pth", "last.CKPT"])
def test_load_model__a_pickle_of_torch(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    message = r"not opened: .*torch\.export\.save\(torch\.export\.export\(.*'\w+\.pt2'\)\. \[RQ2"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / name)


def test_load_module__another_object(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(tvm.tirx.IntImm("int32", 1)))
    with pytest.raises(ModelError, match="holds a IntImm"):
        load_module(path)


def test_load_module__no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no module file .*missing\.json"):
        load_module(tmp_path / "missing.json")


def test_write_whole__replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    write_whole(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_whole__a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(FileError, match=r"Cannot write .*out\.json: disk full"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_whole__rights_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "out.json", lambda temporary: temporary.write_text(""))
    rights = [(tmp_path / name).stat().st_mode for name in ("plain", "out.json")]
    assert rights[0] == rights[1]


def test_write_whole__no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"there is no folder .*Make it, or name"):
        write_whole(tmp_path / "missing" / "out.json", lambda temporary: None)


def test_write_whole__error_names_the_file_and_not_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".x-1234.json"))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    expected = r"Cannot write .*/x\.json: Permission denied\. Name a place that can be written\. \["
    with pytest.raises(FileError, match=expected):
        write_whole(tmp_path / "x.json", lambda path: path.write_text("new"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no configuration"),
        ("[" * 100_000, "is no configuration"),
        ("[]", r"config\.json"),
        ('{"globl": "float"}', "globl"),
    ],
)
def test_load_mapping__not_a_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_mapping(path)


def test_load_mapping__no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*missing\.json"):
        load_mapping(tmp_path / "missing.json")


def test_write_text__a_name_that_is_no_unicode(tmp_path):
    """Reports and tables name the user's files."""
    path = tmp_path / "report.html"
    write_text(path, "größe " + os.fsdecode(b"\xe4.onnx"))
    assert path.read_bytes() == "größe \\udce4.onnx".encode()
