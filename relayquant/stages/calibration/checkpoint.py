"""The working folder of a calibration: values, shard states, and the choices of each step.

The folder is temporary, or the user names it and it is a checkpoint. Every file is written under
another name and then renamed, so a file is never incomplete. A calibration that was stopped
continues with the first shard whose states are missing. Digests tie the folder to the model, the
plan and the settings. One digest per batch ties it to the data.

    checkpoint.json                 the fingerprint of the work
    module-<digest>.json            the subgraphs (for workers)
    data.json                       batches: digests, symbolic dimensions, offsets in the files
    part.json                       the same for the batches that weights are fitted with
    values/<value>[.<shard>]        see store.py
    part/<value>[.<shard>]          the values of those batches
    shards/<step>.<shard>           states of observers
    steps/<step>                    parameters, constants and statistics that were chosen
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.base.storage.files import (
    decode_json,
    open_temporary_folder,
    read_text,
    reading,
    write_text,
    writing,
)
from relayquant.base.storage.lock import hold_lock
from relayquant.base.version import __version__
from relayquant.codegen.kernels.isa.target import name_host
from relayquant.errors import ConfigError, DataError, format_count
from relayquant.stages.calibration.parameters import CallableCalibration, resolve_observer
from relayquant.stages.calibration.store import BEGIN_ANEW, Shard, ValueMemory, ValueStore
from relayquant.stages.prepared import PreparedModel

FORMAT = "relayquant.checkpoint.2"
HEADER = "checkpoint.json"
DATA, PART = "data.json", "part.json"
LOCK = "lock"
FOLDERS = ("values", "part", "shards", "steps")
#: temporary names that `write_text` uses for those files
HALF_WRITTEN = tuple(f".{Path(name).stem}-*.json" for name in (HEADER, DATA, PART, "module"))
#: advice for a checkpoint that cannot be written
REMEDY = "checkpoint= is to be a folder that can be written, or a new name in one."
#: size limit of the JSON files of a checkpoint
MAX_JSON_BYTES = 1 << 28


@dataclass(frozen=True)
class DataRecord:
    """What is known of the data once it has been read.

    Attributes:
        batches: Number of batches.
        starts: See `ValueStore`.
        symbols: Values of the symbolic dimensions, for each batch; empty if there are none.
        digests: One digest per batch; empty if nothing is compared later.
    """

    batches: int
    starts: Mapping[str, tuple[int, ...]]
    symbols: tuple[Mapping[str, int], ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workspace:
    """The folder of one calibration. `is_kept` is true for a checkpoint. `memory` holds values that
    need no file.
    """

    path: Path
    is_kept: bool = False
    folders: tuple[str, ...] = field(default=FOLDERS)
    memory: ValueMemory | None = None

    @property
    def values(self) -> ValueStore:
        """The folder for values."""
        return ValueStore(self.path / "values", memory=self.memory)

    @property
    def part(self) -> ValueStore:
        """The folder for values of a part of the batches."""
        return ValueStore(self.path / "part", memory=self.memory)

    def states(self, step: int, shard: Shard) -> Path:
        """Return the file for the states of one shard."""
        return self.path / "shards" / f"{step}.{shard.index}"

    def arguments(self, step: int) -> Path:
        """Return the file with which workers get the arguments of a step that are not values."""
        return self.path / "shards" / f"{step}.arguments"

    def choices(self, step: int) -> Path:
        """Return the file for the choices of a step."""
        return self.path / "steps" / str(step)

    def make_folders(self) -> None:
        """Make the folders, and remove incomplete files of a killed process."""
        with writing(self.path):
            for name in self.folders:
                folder = self.path / name
                folder.mkdir(exist_ok=True)
                for left in folder.glob(".*"):
                    left.unlink()
            for left in find_half_written(self.path):
                left.unlink()

    def write_module(self, text: str) -> Path:
        """Write the subgraphs to a file whose name depends on its contents."""
        path = self.path / f"module-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        if not path.exists():
            write_text(path, text)
        return path

    def read_data(self, name: str = DATA) -> DataRecord | None:
        """Read what `write_data` wrote under that name; None before that."""
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
        """Store what is known of the data, or of a part of it."""
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
        # Remove first the file that says which values exist: the process may be killed at any
        # point, and the next run must be able to continue.
        for name in (DATA, PART):
            (self.path / name).unlink(missing_ok=True)
        for name in self.folders:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for path in self.path.glob("module-*.json"):
            path.unlink(missing_ok=True)
        for name in (HEADER, LOCK):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            # An empty folder stays if it is a mount point or if its parent is not writable.
            with suppress(OSError):
                self.path.rmdir()


@contextmanager
def open_temporary(memory: ValueMemory | None = None) -> Iterator[Workspace]:
    """Open a folder that is deleted at the end of the `with` block. A `memory` is for one process
    alone: others see the files.
    """
    with open_temporary_folder() as path:
        workspace = Workspace(path, memory=memory)
        workspace.make_folders()
        yield workspace


@contextmanager
def open_checkpoint(
    path: str | Path, fingerprint: Mapping[str, str], work: str = "calibration"
) -> Iterator[Workspace]:
    """Start or continue a checkpoint. It is deleted when the `with` block ends without an error.

    Args:
        path: A folder; made if there is none. Its parent must exist.
        fingerprint: Identifies the work: aspect -> digest or text.
        work: The kind of work, for messages.

    Raises:
        ConfigError: the folder is not a checkpoint, belongs to other work (the message says what
            differs), or is in use by another process.
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
            if not stack.enter_context(hold_lock(path / LOCK)):
                raise ConfigError(
                    f"checkpoint={str(path)!r} is in use by another process; use a "
                    f"separate folder for each {work}.",
                    code="RQ101",
                )
            if header.exists():
                check_fingerprint(path, read_json(header), fingerprint, work)
            else:
                write_json(header, {"format": FORMAT, "binding": dict(fingerprint)})
            workspace = Workspace(path, is_kept=True)
            workspace.make_folders()
        yield workspace
        with writing(path, REMEDY):
            workspace.remove()


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, unless another process works in it."""
    with hold_lock(path / LOCK) as is_free:
        if is_free:
            Workspace(path).remove()


def find_half_written(path: Path) -> Iterator[Path]:
    """Find incomplete files of a killed process in the folder itself. Files of others are not
    included.
    """
    return chain.from_iterable(map(path.glob, HALF_WRITTEN))


def check_fingerprint(
    path: Path, header: Mapping[str, Any], fingerprint: Mapping[str, str], work: str
) -> None:
    """Raise ConfigError if the checkpoint belongs to other work, and DataError if it is damaged."""
    bound = header.get("binding")
    if header.get("format") != FORMAT or not isinstance(bound, dict):
        raise DataError(f"{path / HEADER} is not of format {FORMAT!r}.", code="RQ502")
    check_binding(path, bound, fingerprint, work)


def check_binding(
    path: Path, bound: Mapping[str, Any], binding: Mapping[str, str], work: str
) -> None:
    """Check that a checkpoint of what `bound` says belongs to the work that `binding` describes.

    Raises:
        ConfigError: it does not; names what differs.
    """
    different = []
    for aspect in sorted({*bound, *binding}):
        before, now = bound.get(aspect), binding.get(aspect)
        if before != now:
            is_digest = str(before).startswith("sha256:")
            different.append(aspect if is_digest else f"{aspect} (was {before}, is {now})")
    if different:
        raise ConfigError(
            f"checkpoint={str(path)!r} belongs to another {work}; what differs: "
            f"{', '.join(different)}. Pass the same arguments to continue, choose another path, "
            "or delete it to start again.",
            code="RQ502",
        )


def digest_text(text: str) -> str:
    """Return a digest for a fingerprint."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def digest_batch(batch: Mapping[str, np.ndarray]) -> str:
    """Return a digest of the names, shapes, dtypes and values of one batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in batch.items():
        digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view("uint8").data)
    return digest.hexdigest()


def check_same_data(record: DataRecord, digests: list[str], path: Path) -> None:
    """Raise DataError if the data set is not the one that the checkpoint was started with."""
    for i, (before, now) in enumerate(zip(record.digests, digests, strict=False)):
        if before != now:
            raise DataError(
                f"checkpoint={str(path)!r} was begun with other data: batch {i} differs. Data that "
                "is drawn or augmented at random needs a fixed seed. Delete the folder to start "
                "again.",
                code="RQ303",
            )
    if len(digests) != record.batches:
        raise DataError(
            f"checkpoint={str(path)!r} was begun with "
            f"{format_count(record.batches, 'batch')}, the data set now "
            f"has {len(digests)}. Delete the folder to start again.",
            code="RQ303",
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raise DataError if the file holds something else."""
    with reading(path, "part of a checkpoint", advice=BEGIN_ANEW):
        found = decode_json(read_text(path, MAX_JSON_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object; the file is never incomplete."""
    write_text(path, json.dumps(data))


def describe_fingerprint(
    prepared: PreparedModel, order: str, override: Any, fit: Any
) -> dict[str, str]:
    """Map aspects to a digest or text: everything except the data that a calibration's result
    depends on.

    A callable that chooses parameters is identified by its name. Versions and the processor are
    included, because float results differ between them.
    """
    callables = {
        group.key: describe_observer(group.observer)
        for group in prepared.plan.groups
        if isinstance(resolve_observer(group.observer), CallableCalibration)
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
        "observer": "that of the plan" if override is None else describe_observer(override),
        "order": order,
        "fit": repr(fit),
        "relayquant": __version__,
        "tvm": tvm.__version__,
        "numpy": np.__version__,
        "processor": name_host(),
    }


def describe_observer(observer: Any) -> str:
    """Describe an observer by its settings, and a callable by module and name."""
    if isinstance(observer, CallableCalibration):
        observer = observer.function
    if callable(observer):
        module = getattr(observer, "__module__", "")
        return f"{module}.{getattr(observer, '__qualname__', type(observer).__qualname__)}"
    return repr(observer)
