"""Schedules timed on a machine, kept in a file between runs; `tuner` reads and writes it.

    {"format": "relayquant.forms", "version": 3, "made_by": "0.27.0",
     "forms": {layer: {"tile": {"rows": 1, "cols": 7, "blocks": 4, "chains": 1, "sharing": 1},
                       "transforms": false},
               layer of float32: {"blocks": 2, "rows": 14, "by_panels": true}}}

The key of a layer contains everything its time depends on: CPU, instructions, threads, shapes,
dtypes. Schedules timed with another TVM version are timed again. A schedule from a file is used
only if the cost model lists it too (`list_schedules`). So a file cannot ask for a kernel that would
not be built without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tvm

from relayquant.base.storage.files import decode_json, read_text, reading, write_text
from relayquant.codegen.kernels.floating.tile import FloatSchedule
from relayquant.codegen.kernels.integer.specs import KernelSchedule, Tile
from relayquant.errors import ConfigError

AnySchedule = KernelSchedule | FloatSchedule
FORMAT = "relayquant.forms"
VERSION = 3
#: Larger files are not caches of schedules: a layer takes some 200 bytes.
MAX_BYTES = 2**24
ADVICE = "Delete it, or name another file."


def find_cache_folder() -> Path:
    """Return this system's folder for caches of programs. It need not exist."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "relayquant"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/relayquant"
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (wanted if wanted.is_absolute() else Path.home() / ".cache") / "relayquant"


def read_schedules(path: Path) -> dict[str, AnySchedule]:
    """Read the file: layer -> schedule. Empty if there is no file, or if it has another version.

    Raises:
        ConfigError: The file is damaged, or is another file that must not be overwritten.
    """
    if not path.exists():
        return {}
    with reading(path, "file of timed schedules", ConfigError, ADVICE):
        data = decode_json(read_text(path, MAX_BYTES))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        if (data.get("version"), data.get("made_by")) != (VERSION, tvm.__version__):
            return {}
        return {str(name): read_schedule(entry) for name, entry in data["forms"].items()}


def read_schedule(entry: Any) -> AnySchedule:
    """Read a schedule that `asdict` wrote."""
    if isinstance(entry, dict) and [*entry] == [each.name for each in fields(FloatSchedule)]:
        sizes_fit = all(type(entry[n]) is int and 0 < entry[n] < 2**16 for n in ("blocks", "rows"))
        if not sizes_fit or type(entry["by_panels"]) is not bool:
            raise ValueError(
                f"{entry!r:.80} is no schedule of float32: it needs blocks and rows as whole "
                "numbers from 1 on, and by_panels as true or false"
            )
        return FloatSchedule(**entry)
    if not isinstance(entry, dict) or type(entry.get("transforms")) is not bool:
        raise ValueError(
            f"{entry!r:.60} is no schedule: it needs a tile, and transforms as true or false"
        )
    tile, sizes = entry.get("tile"), [each.name for each in fields(Tile)]
    is_tile = isinstance(tile, dict) and [*tile] == sizes
    if not is_tile or not all(type(n) is int and 0 < n < 2**16 for n in tile.values()):
        raise ValueError(
            f"{tile!r:.80} is no tile: it needs {', '.join(sizes)} as whole numbers from 1 on"
        )
    return KernelSchedule(Tile(**tile), entry["transforms"])


def add_schedules(path: Path, schedules: Mapping[str, AnySchedule]) -> None:
    """Add schedules to the file. It is written completely or not at all.

    Raises:
        ConfigError: see `read_schedules`.
        FileError: The file cannot be written.
    """
    found = {**read_schedules(path), **schedules}
    head = {"format": FORMAT, "version": VERSION, "made_by": tvm.__version__}
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(asdict(schedule))}"
        for name, schedule in sorted(found.items())
    )
    text = f'{json.dumps(head)[:-1]},\n"forms": {{\n{lines}\n}}}}\n'
    write_text(path, text)
