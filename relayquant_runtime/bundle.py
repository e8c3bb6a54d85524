"""A folder that `rq.export_bundle` wrote -> its library and its libraries of TVM, checked.

The folder is not trusted: its JSON is small, names nothing outside the folder, and each file that
is loaded has the size and the digest that the JSON says. That finds damage and mixed-up files. It
is no signature: a library is code, so take bundles only from where you would take programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from relayquant_runtime.errors import LibraryError

FORMAT = "relayquant.bundle.1"
MANIFEST = "bundle.json"
#: Bytes. A model with 10,000 inputs has a tenth of this.
MAX_MANIFEST_BYTES = 1 << 24
#: Folder of a bundle with TVM's libraries.
RUNTIME_FOLDER = "lib"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files are as its JSON says.

    Attributes:
        library: The compiled model.
        runtime: Name -> file of each of TVM's libraries that the bundle has.
        manifest: The JSON.
    """

    library: Path
    runtime: Mapping[str, Path]
    manifest: Mapping[str, Any]


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and check the files that will be loaded.

    Raises:
        LibraryError: the folder holds no bundle, or a file is missing, outside the folder or
            different from what the JSON says.
    """
    manifest = read_manifest(folder / MANIFEST)
    files, library = manifest.get("files"), manifest.get("library")
    if not isinstance(files, dict) or not isinstance(library, str) or library not in files:
        raise LibraryError(f"{folder / MANIFEST} names no library. Export the model again.")
    names = [name for name in files if PurePosixPath(name).parent.as_posix() == RUNTIME_FOLDER]
    checked = {name: check_file(folder, name, files[name]) for name in (library, *names)}
    runtime = {PurePosixPath(name).name: checked[name] for name in names}
    return Bundle(checked[library], runtime, manifest)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the JSON of a bundle. LibraryError if it is not one."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise LibraryError(
            f"{path.parent} is no bundle: {path.name} cannot be read ({error.strerror}). Name a "
            "folder that relayquant.export_bundle wrote, or a library."
        ) from error
    try:
        manifest = json.loads(data.decode()) if len(data) <= MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise LibraryError(
            f"{path} is damaged, or of another version than {FORMAT!r}. Export the model again."
        )
    return manifest


def check_file(folder: Path, name: str, row: Any) -> Path:
    """Return the path of a file of a bundle. LibraryError unless it lies in the folder and has the
    size and the digest of its row.
    """
    place, root = (folder / name).resolve(), folder.resolve()
    if PurePosixPath(name).is_absolute() or not place.is_relative_to(root):
        raise LibraryError(f"{folder / MANIFEST} names {name!r}, which lies outside the folder.")
    if not place.is_file():
        raise LibraryError(f"{folder} has no file {name}. Copy the whole folder.")
    wanted = (row.get("bytes"), row.get("sha256")) if isinstance(row, dict) else (None, None)
    if place.stat().st_size != wanted[0] or digest_file(place) != wanted[1]:
        raise LibraryError(
            f"{place} is not the file that {MANIFEST} describes: its size or its sha256 differs. "
            "Copy the folder again, or export the model again."
        )
    return place


def digest_file(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()
