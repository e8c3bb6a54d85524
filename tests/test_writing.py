"""Everything that writes: where nothing can be written it says so, names the place and a remedy,
and leaves nothing behind.
"""

from __future__ import annotations

import ast
import errno
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from float_models import MAP, build_model, draw_batches
from package_sources import PACKAGE, SOURCES, read_tree
from tvm.relax import op

import relayquant as rq
from relayquant import cli
from relayquant.base.storage.files import check_folder, check_writable, write_whole
from relayquant.flow.refine.search_state import SearchState
from relayquant.plots.pictures import plot_error_by_depth, plot_ranges


def model():
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), MAP)


@pytest.fixture(scope="module")
def prepared():
    return rq.calibrate(rq.prepare(model(), effort="fast"), draw_batches(model(), 2))


@pytest.fixture(scope="module")
def qmod(prepared):
    return rq.lower(rq.convert_to_reference(prepared))


def write_plot(prepared, qmod, path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_error_by_depth(rq.compare(model(), None, qmod, draw_batches(model(), 1)), path)


def write_histograms(prepared, qmod, path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_ranges(prepared, draw_batches(model(), 1), path)


def begin_checkpoint(prepared, qmod, path: Path) -> None:
    def items():
        raise AssertionError("the data was read")

    rq.calibrate(rq.prepare(model(), effort="fast"), items, checkpoint=path)


#: Ending of the name -> what writes such a file: every function of ours that takes a path for it.
WRITERS: dict[str, Callable] = {
    ".prepared": lambda prepared, qmod, path: rq.save_prepared(prepared, path),
    ".json": lambda prepared, qmod, path: rq.save_qparams(prepared.parameters, path),
    ".search": lambda prepared, qmod, path: SearchState.open(path, "this"),
    ".onnx": lambda prepared, qmod, path: rq.export_onnx(qmod, path),
    ".params": lambda prepared, qmod, path: rq.relay.save_params({}, path),
    ".png": write_plot,
    ".svg": write_histograms,
    ".checkpoint": begin_checkpoint,
}

#: Where nobody can write, root neither.
PLACES = ["below a file", "in no folder", "/proc"]


def find_place(place: str, folder: Path) -> Path:
    (folder / "file").write_text("x")
    return {"below a file": folder / "file", "in no folder": folder / "no", "/proc": Path("/proc")}[
        place
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("suffix", WRITERS)
def test_write__where_nothing_can_be_written(prepared, qmod, tmp_path, suffix, place):
    path = find_place(place, tmp_path) / f"x{suffix}"
    with pytest.raises(rq.RelayQuantError) as caught:
        WRITERS[suffix](prepared, qmod, path)
    what, remedy = str(caught.value).split(". ", 1)
    assert str(path) in what
    # A checkpoint is a folder, which is made with those that lack.
    below = "there is no folder" if suffix == ".checkpoint" else f"{path.parent} is no folder"
    texts = {"below a file": below, "in no folder": "there is no folder"}
    assert texts.get(place, "No such file or directory") in what
    assert "folder" in remedy or "place" in remedy
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("suffix", [s for s in WRITERS if s != ".checkpoint"])
def test_write__a_folder_of_that_name(prepared, qmod, tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.mkdir()
    with pytest.raises(rq.RelayQuantError, match="it is a folder"):
        WRITERS[suffix](prepared, qmod, path)
    assert list(path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="rights do not bind root")
@pytest.mark.parametrize("suffix", WRITERS)
def test_write__a_folder_that_is_read_only(prepared, qmod, tmp_path, suffix):
    folder = tmp_path / "locked"
    folder.mkdir(0o500)
    with pytest.raises(rq.errors.FileError, match="Permission denied") as error:
        WRITERS[suffix](prepared, qmod, folder / f"x{suffix}")
    assert error.value.errno == errno.EACCES


def test_write__a_device_takes_what_it_takes(prepared):
    """And stays a device: nothing is renamed into its place."""
    with pytest.raises(
        rq.errors.FileError, match=r"Cannot write /dev/full: No space.*Free space"
    ) as full:
        rq.save_qparams(prepared.parameters, "/dev/full")
    assert full.value.errno == errno.ENOSPC
    rq.save_qparams(prepared.parameters, "/dev/null")
    assert not Path("/dev/full").is_file()
    assert not Path("/dev/null").is_file()
    check_writable(Path("/dev/null"))


def test_write__through_a_link(tmp_path):
    """A link stays, and what it leads to is written: of a link to a link, and of one to nothing."""
    (tmp_path / "there").mkdir()
    target, link, other = (tmp_path / name for name in ("there/a.json", "b.json", "c.json"))
    link.symlink_to("there/a.json")
    other.symlink_to(link)
    for text in ("first", "second"):
        check_writable(other)
        write_whole(other, lambda temporary, text=text: temporary.write_text(text))
        assert link.is_symlink()
        assert other.is_symlink()
        assert not target.is_symlink()
        assert target.read_text() == text
        assert sorted(path.name for path in tmp_path.rglob("*")) == [
            *("a.json", "b.json", "c.json", "there")
        ]
    target.unlink()
    target.parent.rmdir()
    for act in (check_writable, lambda path: write_whole(path, Path.touch)):
        with pytest.raises(
            rq.errors.FileError, match=rf"a\.json: there is no folder {target.parent}\."
        ):
            act(link)


def test_write__the_file_that_is_missing_is_named(tmp_path):
    """What a library needs for it: a compiler, a folder for its temporary files."""

    def write(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "", "g++-none")

    with pytest.raises(
        rq.errors.FileError, match=r"Cannot write .*/x\.so: g\+\+-none: No such file"
    ):
        write_whole(tmp_path / "x.so", write)


def test_checkpoint__a_folder_that_cannot_be_removed_stays_empty(tmp_path, monkeypatch):
    """A mount point: its contents are ours, itself is not."""
    prepared, path = rq.prepare(model(), effort="fast"), tmp_path / "mounted"
    path.mkdir()

    def refuse(self: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))

    monkeypatch.setattr(Path, "rmdir", refuse)
    rq.calibrate(prepared, draw_batches(model(), 2), checkpoint=path)
    assert list(path.iterdir()) == []


def test_check_folder__only_an_attempt_shows_that_nothing_can_be_written():
    with pytest.raises(rq.errors.FileError, match=r"Cannot write /proc/deploy: "):
        check_folder(Path("/proc/deploy"), "bundle.json")


def test_calibrate__no_place_for_temporary_files(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(
        rq.errors.FileError, match=r"Cannot write temporary files: .* Set TMPDIR to"
    ):
        rq.calibrate(rq.prepare(model(), effort="fast"), draw_batches(model(), 2))


COMMANDS = {
    "quantize": ["quantize", "a.onnx", "--data", "data.npz", "-o", "x.json"],
    "export": ["export", "a.onnx", "-o", "x.so"],
    "compare csv": ["compare", "a.onnx", "b.json", "--data", "data.npz", "--csv", "x.csv"],
    "compare plot": ["compare", "a.onnx", "b.json", "--data", "data.npz", "--plot", "x.png"],
    "sensitivity": [
        "sensitivity",
        "a.onnx",
        "--data",
        "data.npz",
        "--keep",
        "1",
        "-o",
        "x.json",
    ],
    "sensitivity csv": ["sensitivity", "a.onnx", "--data", "data.npz", "--csv", "x.csv"],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_command__says_so_before_the_work(command, place, tmp_path, monkeypatch, capsys):
    """Before it finds that these are no models."""
    monkeypatch.chdir(tmp_path)
    for file in ("data.npz", "a.onnx", "b.json"):
        Path(file).touch()
    *arguments, name = COMMANDS[command]
    if name.endswith(".png"):
        pytest.importorskip("matplotlib")
    path = find_place(place, tmp_path) / name
    assert cli.main([*arguments, str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"relayquant: error: Cannot write {path}: ")


def test_file_error__is_an_os_error_and_travels():
    error = pickle.loads(pickle.dumps(rq.errors.FileError("Cannot write x.", errno.ENOSPC)))
    assert isinstance(error, OSError)
    assert (str(error), error.errno) == ("Cannot write x.", errno.ENOSPC)


# --- What keeps the class closed ------------------------------------------------------------------

#: What makes or changes something on disk.
ACTS = {
    *("NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "export_library", "makedirs"),
    *("mkdir", "mkstemp", "rename", "savefig", "savez", "savez_compressed", "write_bytes"),
    "write_text",
}
#: The one that may, and one that draws in memory.
FREE = {"base/storage/files.py", "plots/page.py"}


def find_bare_writes(tree: ast.AST, is_guarded: bool = False) -> list[int]:
    """Lines of calls that are neither in a `with writing(...)` nor in what `write_whole` calls."""

    def name_of(node: ast.expr) -> str:
        return getattr(node, "attr", getattr(node, "id", ""))

    passed = {
        name_of(arg)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of(node.func) == "write_whole"
        for arg in node.args[1:]
    }
    found: list[int] = []
    for node in ast.iter_child_nodes(tree):
        inside = is_guarded or (isinstance(node, ast.FunctionDef) and node.name in passed)
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            inside |= any(isinstance(c, ast.Call) and name_of(c.func) == "writing" for c in calls)
        if isinstance(node, ast.Call):
            inside |= name_of(node.func) == "write_whole"
            # `write_text(path, text)` is that of storage/files.py, `path.write_text` a method.
            # `executable.export_library` is that of `rq.compile`, which calls `write_whole`.
            called = ast.unparse(node.func)
            ours = called in ("write_text", "executable.export_library")
            if name_of(node.func) in ACTS and not inside and not ours:
                found.append(node.lineno)
        found += find_bare_writes(node, inside)
    return found


def test_sources__write_through_one_place():
    """`write_whole` and `writing` name the path and what to do; a bare call would not."""
    bare = {}
    for module, path in SOURCES.items():
        name, text = str(path.relative_to(PACKAGE)), path.read_text("utf-8")
        if name not in FREE and any(act in text for act in ACTS):
            bare[name] = find_bare_writes(read_tree(module))
    assert len(bare) > 5
    assert {name: lines for name, lines in bare.items() if lines} == {}
    assert find_bare_writes(ast.parse("path.mkdir()")) == [1]
