"""The folder that a calibration works in: values, states of shards, and what each step chose.

Temporary, or named by the user: then it is a checkpoint. Whatever is in it is whole, because every
file is written beside its place and renamed, so a calibration that was stopped anywhere goes on
with the first shard whose states are missing. It is bound to the model, the plan and the settings
by their digests, and to the data by one digest per batch.

    checkpoint.json                 what it is bound to
    module-<digest>.json            the segments (for workers)
    data.json                       batches: digests, symbolic dimensions, places in the files
    part.json                       the same of the batches that weights are fitted with
    values/<value>[.<shard>]        see store.py
    part/<value>[.<shard>]          the values of those batches
    shards/<step>.<shard>           states of observers
    steps/<step>                    parameters, constants and statistics that were chosen
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.target.codegen import llvm_get_system_cpu

from relayquant.base.storage.files import (
    decode_json,
    open_temporary_folder,
    read_text,
    reading,
    write_text,
    writing,
)
from relayquant.errors import ConfigError, DataError, format_count
from relayquant.stages.calibration.parameters import CallableCalibration, resolve_calibration
from relayquant.stages.calibration.store import BEGIN_ANEW, Shard, ValueStore
from relayquant.stages.prepared import PreparedModel

FORMAT = "relayquant.checkpoint.2"
HEADER = "checkpoint.json"
DATA, PART = "data.json", "part.json"
LOCK = "lock"
FOLDERS = ("values", "part", "shards", "steps")
#: what `write_text` calls those files before they are whole
HALF_WRITTEN = tuple(f".{Path(name).stem}-*.json" for name in (HEADER, DATA, PART, "module"))
#: what to do about one that cannot be written
REMEDY = "checkpoint= is to be a folder that can be written, or a new name in one."
#: no JSON file of a checkpoint is larger
MAX_JSON_BYTES = 1 << 28


@dataclass(frozen=True)
class DataRecord:
    """What is known of the data once it has been read.

    Attributes:
        batches: How many there are.
        starts: See `ValueStore`.
        symbols: Of each batch: what its symbolic dimensions are; empty when there are none.
        digests: Of each batch; empty when nothing is to be compared later.
    """

    batches: int
    starts: Mapping[str, tuple[int, ...]]
    symbols: tuple[Mapping[str, int], ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workspace:
    """The folder of one calibration; `is_kept` when it is a checkpoint."""

    path: Path
    is_kept: bool = False
    folders: tuple[str, ...] = field(default=FOLDERS)

    @property
    def values(self) -> ValueStore:
        """Where values go."""
        return ValueStore(self.path / "values")

    @property
    def part(self) -> ValueStore:
        """Where those of a part of the batches go."""
        return ValueStore(self.path / "part")

    def states(self, step: int, shard: Shard) -> Path:
        """The states of one shard."""
        return self.path / "shards" / f"{step}.{shard.index}"

    def arguments(self, step: int) -> Path:
        """What workers pass to a step beside values."""
        return self.path / "shards" / f"{step}.arguments"

    def choices(self, step: int) -> Path:
        """What was chosen after a step."""
        return self.path / "steps" / str(step)

    def make_folders(self) -> None:
        """Make the folders, and remove what a killed process left half written."""
        with writing(self.path):
            for name in self.folders:
                folder = self.path / name
                folder.mkdir(exist_ok=True)
                for left in folder.glob(".*"):
                    left.unlink()
            for left in find_half_written(self.path):
                left.unlink()

    def write_module(self, text: str) -> Path:
        """The segments as a file whose name depends on its contents."""
        path = self.path / f"module-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        if not path.exists():
            write_text(path, text)
        return path

    def read_data(self, name: str = DATA) -> DataRecord | None:
        """What `write_data` wrote under that name, None before that."""
        path = self.path / name
        if not path.exists():
            return None
        with reading(path, "part of a checkpoint", advice=BEGIN_ANEW):
            found = read_json(path)
            return DataRecord(
                int(found["batches"]),
                {name: tuple(map(int, starts)) for name, starts in found["starts"].items()},
                tuple(found["symbols"]),
                tuple(found["digests"]),
            )

    def write_data(self, record: DataRecord, name: str = DATA) -> None:
        """Keep what is known of the data, or of a part of it."""
        write_json(
            self.path / name,
            {
                "batches": record.batches,
                "starts": {name: list(starts) for name, starts in record.starts.items()},
                "symbols": list(record.symbols),
                "digests": list(record.digests),
            },
        )

    def remove(self) -> None:
        """Delete the checkpoint, and its folder unless somebody else's files are in it."""
        # First what says that values are there: it may be killed anywhere, and is to go on.
        for name in (DATA, PART):
            (self.path / name).unlink(missing_ok=True)
        for name in self.folders:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for path in self.path.glob("module-*.json"):
            path.unlink(missing_ok=True)
        for name in (HEADER, LOCK):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            # A mount point, or a folder in one that is not ours to change, stays, empty.
            with suppress(OSError):
                self.path.rmdir()


@contextmanager
def open_temporary() -> Iterator[Workspace]:
    """A folder that is gone when the `with` block ends."""
    with open_temporary_folder() as path:
        workspace = Workspace(path)
        workspace.make_folders()
        yield workspace


@contextmanager
def open_checkpoint(
    path: str | Path, binding: Mapping[str, str], work: str = "calibration"
) -> Iterator[Workspace]:
    """A checkpoint to begin or to go on with; deleted when the `with` block ends without an error.

    Args:
        path: A folder; made if there is none. Its parent must exist.
        binding: What the checkpoint belongs to: aspect -> digest or text.
        work: What it keeps, for messages.

    Raises:
        ConfigError: the folder is something else, or belongs to other work (the message says what
            differs), or another process is at work in it.
        DataError: it is damaged.
        FileError: it cannot be written.
    """
    path = Path(path).absolute()  # workers may have another working folder
    with ExitStack() as stack:
        with writing(path, REMEDY):
            if path.exists() and not path.is_dir():
                raise ConfigError(
                    f"checkpoint={str(path)!r} is a file; allowed: a folder, or a new name.",
                    code="RQ101",
                )
            if not path.parent.is_dir():
                raise ConfigError(
                    f"checkpoint={str(path)!r}: there is no folder {path.parent}. {REMEDY}",
                    code="RQ101",
                )
            path.mkdir(exist_ok=True)
            header = path / HEADER
            ours = {path / LOCK, *find_half_written(path)}
            if not header.exists() and {*path.iterdir()} - ours:
                raise ConfigError(
                    f"checkpoint={str(path)!r} holds files but no checkpoint; allowed: an empty "
                    "folder, a new name, or a checkpoint.",
                    code="RQ101",
                )
            lock = stack.enter_context(open(path / LOCK, "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"checkpoint={str(path)!r} is in use by another process; give each {work} "
                    "a folder of its own.",
                    code="RQ101",
                ) from None
            if header.exists():
                check_binding(path, read_json(header), binding, work)
            else:
                write_json(header, {"format": FORMAT, "binding": dict(binding)})
            workspace = Workspace(path, is_kept=True)
            workspace.make_folders()
        yield workspace
        with writing(path, REMEDY):
            workspace.remove()


def find_half_written(path: Path) -> Iterator[Path]:
    """Files in the folder itself that a killed process left half written: ours, nobody else's."""
    return chain.from_iterable(map(path.glob, HALF_WRITTEN))


def check_binding(
    path: Path, header: Mapping[str, Any], binding: Mapping[str, str], work: str
) -> None:
    """ConfigError if the checkpoint belongs to other work; DataError if it is damaged."""
    bound = header.get("binding")
    if header.get("format") != FORMAT or not isinstance(bound, dict):
        raise DataError(f"{path / HEADER} is not of format {FORMAT!r}.", code="RQ502")
    different = []
    for aspect in sorted({*bound, *binding}):
        before, now = bound.get(aspect), binding.get(aspect)
        if before != now:
            is_digest = str(before).startswith("sha256:")
            different.append(aspect if is_digest else f"{aspect} (was {before}, is {now})")
    if different:
        raise ConfigError(
            f"checkpoint={str(path)!r} belongs to another {work}; what differs: "
            f"{', '.join(different)}. Pass the same arguments to go on, another folder, or delete "
            "it to begin anew.",
            code="RQ502",
        )


def digest_text(text: str) -> str:
    """A digest for `binding`."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def digest_batch(batch: Mapping[str, np.ndarray]) -> str:
    """A digest of names, shapes, dtypes and values of one batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in batch.items():
        digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view("uint8").data)
    return digest.hexdigest()


def check_same_data(record: DataRecord, digests: list[str], path: Path) -> None:
    """DataError if the data set is not the one that the checkpoint was begun with."""
    for i, (before, now) in enumerate(zip(record.digests, digests, strict=False)):
        if before != now:
            raise DataError(
                f"checkpoint={str(path)!r} was begun with other data: batch {i} differs. Data that "
                "is drawn or augmented at random needs a fixed seed. Delete the folder to begin "
                "anew.",
                code="RQ303",
            )
    if len(digests) != record.batches:
        raise DataError(
            f"checkpoint={str(path)!r} was begun with "
            f"{format_count(record.batches, 'batch')}, the data set now "
            f"has {len(digests)}. Delete the folder to begin anew.",
            code="RQ303",
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; DataError if the file holds something else."""
    with reading(path, "part of a checkpoint", advice=BEGIN_ANEW):
        found = decode_json(read_text(path, MAX_JSON_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_text(path, json.dumps(data))


def describe_binding(
    prepared: PreparedModel, order: str, override: Any, fit: Any
) -> dict[str, str]:
    """Aspect -> digest or text, of all that the result of a calibration depends on, but the data.

    Of a callable that picks parameters only the name is known; versions and the processor count
    because float results differ between them.
    """
    callables = {
        group.key: describe_picker(group.calibration)
        for group in prepared.plan.groups
        if isinstance(resolve_calibration(group.calibration), CallableCalibration)
    }
    plan = {
        "plan": prepared.plan.to_dict(),
        "callables": callables,
        "graph": tvm.ir.save_json(prepared.graph.mod),
    }
    return {
        "model": digest_text(tvm.ir.save_json(prepared.mod)),
        "plan": digest_text(json.dumps(plan)),
        "backend": prepared.backend.name,
        "calibration": "that of the plan" if override is None else describe_picker(override),
        "order": order,
        "fit": repr(fit),
        "relayquant": metadata.version("relayquant"),
        "tvm": tvm.__version__,
        "numpy": np.__version__,
        "processor": llvm_get_system_cpu(),
    }


def describe_picker(picker: Any) -> str:
    """An observer with its settings; a callable by module and name."""
    if isinstance(picker, CallableCalibration):
        picker = picker.function
    if callable(picker):
        module = getattr(picker, "__module__", "")
        return f"{module}.{getattr(picker, '__qualname__', type(picker).__qualname__)}"
    return repr(picker)
