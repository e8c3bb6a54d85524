"""Tiles that are timed, and the file that remembers them. No test depends on what a clock says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from float_models import build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.codegen import tile_file, tuning
from relayquant.codegen.tile_file import add_tiles, find_cache_folder, read_tiles
from relayquant.codegen.tuning import describe_layer, open_tuner
from relayquant.errors import ConfigError, FileError
from relayquant.kernels.integer.conv_plan import choose_plan, list_tiles
from relayquant.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.kernels.integer.specs import Conv2d, Tile
from relayquant.kernels.isa.select import select_isa
from relayquant.kernels.isa.target import resolve_target

TARGET = resolve_target(None)
ISA = select_isa(TARGET)
LAYER = Conv2d(1, 28, 28, 32, 64, (3, 3), padding=(1, 1, 1, 1), epilogue=Epilogue(is_small=True))


@pytest.fixture
def last_is_fastest(monkeypatch):
    """A clock by which every kernel is faster than the one before."""
    ticks = count()
    monkeypatch.setattr(tuning, "time_run", lambda _run: 0.5 ** next(ticks))
    monkeypatch.setattr(tuning, "SECONDS", 1e-9)


def model():
    """Two convolutions, of which the first has enough products to be timed."""

    def body(emit, x):
        y = emit("relu", relax.op.nn.relu(emit.conv("first", x, 32)))
        return emit("second", relax.op.nn.conv2d(y, emit.constant(24, 32, 1, 1)))

    return build_model(body, (1, 16, 20, 20))


def test_compile__tuned_is_bit_equal(tmp_path, last_is_fastest):
    mod = model()
    batches = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, batches, effort="fast")
    inputs = [*batches[0].values()]
    wanted = rq.Executor(rq.compile(qmod)).run("main", inputs)
    path = tmp_path / "tiles.json"
    got = rq.Executor(rq.compile(qmod, tune=path)).run("main", inputs)
    np.testing.assert_array_equal(got[0], wanted[0])
    tiles = read_tiles(path)
    assert len(tiles) == 1  # the other layer has too few products to matter
    (layer,) = tiles
    assert "1x20x20x16 to 32" in layer


def test_open_tuner__takes_the_fastest_and_remembers_it(tmp_path, last_is_fastest, monkeypatch):
    path = tmp_path / "new folder" / "tiles.json"
    listed = list_tiles(choose_plan(LAYER, ISA), tuning.CANDIDATES)
    assert len(listed) > 2
    with open_tuner(TARGET, path) as choose:
        fastest = choose(LAYER, ISA)
    assert fastest == listed[-1]
    assert choose_plan(replace(LAYER, tile=fastest), ISA).tile == fastest
    monkeypatch.setattr(tuning, "time_tiles", None)  # would fail if it were called
    with open_tuner(TARGET, path) as choose:
        assert choose(LAYER, ISA) == fastest


def test_open_tuner__the_estimate_stays_where_nothing_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "time_run", lambda _run: 1.0)
    monkeypatch.setattr(tuning, "SECONDS", 1e-9)
    with open_tuner(TARGET, tmp_path / "tiles.json") as choose:
        assert choose(LAYER, ISA) == choose_plan(LAYER, ISA).tile


def test_open_tuner__a_tile_that_is_not_listed_is_not_built(tmp_path, last_is_fastest):
    """A file is untrusted: 60,000 accumulators would take LLVM hours."""
    path = tmp_path / "tiles.json"
    with open_tuner(TARGET, path) as choose:
        fastest = choose(LAYER, ISA)
    (layer,) = read_tiles(path)
    add_tiles(path, {layer: Tile(1, 60_000, 1)})
    with open_tuner(TARGET, path) as choose:
        assert choose(LAYER, ISA) == fastest
    assert read_tiles(path) == {layer: fastest}


def test_open_tuner__times_for_real(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 0.002)
    spec = replace(LAYER, epilogue=Epilogue(residual=Residual("int8", 3, 0.5), is_small=True))
    with open_tuner(TARGET, tmp_path / "tiles.json") as choose:
        assert choose(spec, ISA) in list_tiles(choose_plan(spec, ISA), tuning.CANDIDATES)


def test_list_tiles__differ_and_begin_with_the_estimate():
    tiles = list_tiles(choose_plan(LAYER, ISA), 4)
    assert tiles[0] == choose_plan(LAYER, ISA).tile
    assert len({(tile.blocks, tile.pixels) for tile in tiles}) == len(tiles)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"height": 27},
        {"width": 27},
        {"in_channels": 36},
        {"out_channels": 80},
        {"kernel": (1, 3)},
        {"strides": (2, 1)},
        {"padding": (1, 0, 1, 0)},
        {"dilation": (2, 1)},
        {"groups": 2},
        {"in_dtype": "int8"},
        {"epilogue": Epilogue()},
        {"epilogue": Epilogue(Store.DEQUANTIZE, "float32", is_small=True)},
        {"epilogue": Epilogue(dtype="int8", is_small=True)},
        {"epilogue": Epilogue(residual=Residual("uint8", 3, 0.5), is_small=True)},
    ],
    ids=str,
)
def test_describe_layer__tells_layers_apart(change):
    assert describe_layer(replace(LAYER, **change), ISA) != describe_layer(LAYER, ISA)


def test_describe_layer__is_the_same_for_other_numbers():
    other = replace(LAYER, in_zero_point=9, epilogue=replace(LAYER.epilogue, zero_point=5, low=3))
    assert describe_layer(other, ISA) == describe_layer(LAYER, ISA)


GOOD = '{"format": "relayquant.tiles", "version": 1, "made_by": "%s", "tiles": {"a": [1, 2, 3, 1]}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no file of timed tiles, or is damaged"),
        (GOOD[:-9], "is no file of timed tiles, or is damaged"),
        ("[]", "its format is not 'relayquant.tiles'"),
        ('{"format": "relayquant.qparams"}', "its format is not 'relayquant.tiles'"),
        (GOOD.replace("[1, 2, 3, 1]", "[1, 2, 3]"), "is no tile"),
        (GOOD.replace("[1, 2, 3, 1]", "[1, 2, 3, 0]"), "is no tile"),
        (GOOD.replace("[1, 2, 3, 1]", "[1, 2, 3, true]"), "is no tile"),
        (GOOD.replace("[1, 2, 3, 1]", "[1, 2, 3, 1e9]"), "is no tile"),
        (GOOD.replace('{"a": [1, 2, 3, 1]}', "7"), "is no file of timed tiles, or is damaged"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_compile__a_damaged_file_is_refused_and_stays(tmp_path, text, message):
    path = tmp_path / "tiles.json"
    text = text.replace("%s", tile_file.tvm.__version__)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tiles\.json.*Delete it, or name another file") as error:
        rq.compile(model(), tune=path)
    assert message in str(error.value)
    assert path.read_text() == text


@pytest.mark.parametrize("change", [{"version": 0}, {"made_by": "0.1"}])
def test_read_tiles__of_another_version_are_timed_anew(tmp_path, change):
    path = tmp_path / "tiles.json"
    good = json.loads(GOOD % tile_file.tvm.__version__)
    path.write_text(json.dumps(good))
    assert read_tiles(path) == {"a": Tile(1, 2, 3, 1)}
    path.write_text(json.dumps(good | change))
    assert read_tiles(path) == {}


def test_add_tiles__keeps_what_another_process_wrote(tmp_path):
    path = tmp_path / "tiles.json"
    add_tiles(path, {"a": Tile(1, 2, 3), "b": Tile(4, 5, 1)})
    add_tiles(path, {"b": Tile(1, 5, 2), "c": Tile(1, 1, 4, 3)})
    wanted = {"a": Tile(1, 2, 3), "b": Tile(1, 5, 2), "c": Tile(1, 1, 4, 3)}
    assert read_tiles(path) == wanted
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.json"]  # nothing temporary stays


def test_add_tiles__an_interrupted_writer_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    add_tiles(path, {"a": Tile(1, 2, 3)})

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        add_tiles(path, {"b": Tile(1, 2, 3)})
    assert read_tiles(path) == {"a": Tile(1, 2, 3)}
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.json"]


def test_compile__a_file_that_cannot_be_written_is_said_before_anything_is_timed(tmp_path):
    with pytest.raises(FileError, match="it is a folder"):
        rq.compile(model(), tune=tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76", "is of another kind"),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=diamondrapids", "lacks amx"),
    ],
)
def test_compile__tuning_is_for_what_this_machine_runs(tmp_path, target, message):
    with pytest.raises(ConfigError, match=message):
        rq.compile(model(), target, tune=tmp_path / "tiles.json")


def test_find_cache_folder__is_that_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(tile_file.sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert find_cache_folder() == tmp_path / ".cache/relayquant"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, the specification says
    assert find_cache_folder() == tmp_path / ".cache/relayquant"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert find_cache_folder() == tmp_path / "elsewhere/relayquant"
    monkeypatch.setattr(tile_file.sys, "platform", "darwin")
    assert find_cache_folder() == tmp_path / "Library/Caches/relayquant"
    monkeypatch.setattr(tile_file.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert find_cache_folder() == tmp_path / "Local/relayquant"
