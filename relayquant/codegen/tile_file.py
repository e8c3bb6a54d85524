"""Tiles that were timed on a machine, in a file between runs; `tuning` reads and writes it.

    {"format": "relayquant.tiles", "version": 1, "made_by": "0.27.0",
     "tiles": {layer: [1, 7, 4, 1]}}

A layer is named with all that its time depends on: CPU, instructions, threads, shapes, dtypes. What
another TVM compiled is timed anew. A tile from a file is only a number of a list that the plan
makes (`list_tiles`): no file can ask for a kernel that the plan would not build.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import tvm

from relayquant.errors import ConfigError
from relayquant.kernels.integer.specs import Tile
from relayquant.storage.files import decode_json, read_text, reading, write_text, writing

FORMAT = "relayquant.tiles"
VERSION = 1
#: larger files hold no tiles: a layer takes some 200 bytes
MAX_BYTES = 2**24
ADVICE = "Delete it, or name another file."


def find_cache_folder() -> Path:
    """Where this system keeps what programs can make again; it need not exist."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "relayquant"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/relayquant"
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (wanted if wanted.is_absolute() else Path.home() / ".cache") / "relayquant"


def read_tiles(path: Path) -> dict[str, Tile]:
    """Layer -> tile; nothing where there is no file, or one of another version.

    Raises:
        ConfigError: it is damaged, or is something else, which must not be overwritten.
    """
    if not path.exists():
        return {}
    with reading(path, "file of timed tiles", ConfigError, ADVICE):
        data = decode_json(read_text(path, MAX_BYTES))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        if (data.get("version"), data.get("made_by")) != (VERSION, tvm.__version__):
            return {}
        return {str(name): read_tile(row) for name, row in data["tiles"].items()}


def read_tile(row: list[int]) -> Tile:
    """[rows, cols, blocks, chains]."""
    is_tile = isinstance(row, list) and len(row) == 4
    if not is_tile or not all(type(n) is int and 0 < n < 2**16 for n in row):
        raise ValueError(f"{row!r:.60} is no tile: four whole numbers from 1 on")
    return Tile(*row)


def add_tiles(path: Path, tiles: Mapping[str, Tile]) -> None:
    """Write the file with these besides what is in it by now, whole or not at all.

    Raises:
        ConfigError: see `read_tiles`.
        FileError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    found = {**read_tiles(path), **tiles}
    rows = {
        name: [tile.rows, tile.cols, tile.blocks, tile.chains]
        for name, tile in sorted(found.items())
    }
    head = {"format": FORMAT, "version": VERSION, "made_by": tvm.__version__}
    lines = ",\n".join(f"{json.dumps(name)}: {row}" for name, row in rows.items())
    text = f'{json.dumps(head)[:-1]},\n"tiles": {{\n{lines}\n}}}}\n'
    write_text(path, text)
