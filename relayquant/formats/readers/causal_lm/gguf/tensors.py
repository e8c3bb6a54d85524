"""The tensors of a GGUF file, which are read when they are used."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np

from relayquant.base.storage.files import PathLike, reading
from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.tensors import FLOATS, StoredTensor, Weight
from relayquant.formats.readers.gguf.blocks import BLOCK_KINDS, read_blocks
from relayquant.formats.readers.gguf.header import KINDS, GgufHeader, GgufPlace

#: Name of a kind of floats -> dtype of its bytes.
FLOAT_KINDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def list_gguf_tensors(path: PathLike, header: GgufHeader) -> dict[str, StoredTensor]:
    """Return the tensors of a file, which are read when they are used."""
    return {
        name: store_tensor(Path(path).absolute(), place) for name, place in header.tensors.items()
    }


def store_tensor(path: Path, place: GgufPlace) -> StoredTensor:
    """Return one tensor of a file."""
    kind = KINDS[place.kind].name
    if kind in FLOAT_KINDS:
        return StoredTensor(place.shape, FLOATS, partial(read_floats, path, place))
    refusal = ""
    if place.kind not in BLOCK_KINDS or len(place.shape) not in (2, 3):
        known = [*FLOAT_KINDS, *(KINDS[number].name for number in BLOCK_KINDS)]
        refusal = (
            f"has blocks of kind {kind} and shape {place.shape}; supported: matrices of "
            f"{', '.join(known)}. Quantize the model to one of these."
        )
    return StoredTensor(place.shape, kind, partial(read_grouped, path, place), refusal)


def map_bytes(path: Path, place: GgufPlace) -> np.ndarray:
    """Map the bytes of a tensor. numpy cannot map 0 bytes."""
    if not place.size:
        return np.empty(0, "uint8")
    return np.memmap(path, "uint8", "r", place.offset, place.size)


def read_floats(path: Path, place: GgufPlace) -> Weight:
    """Read a tensor of floats as float32."""
    with reading(path, "GGUF file", ModelError):
        dtype = FLOAT_KINDS[KINDS[place.kind].name]
        return widen(map_bytes(path, place).view(dtype).reshape(place.shape))


def read_grouped(path: Path, place: GgufPlace) -> Weight:
    """Read a tensor of blocks."""
    with reading(path, "GGUF file", ModelError):
        *outer, features = place.shape
        return read_blocks(map_bytes(path, place), place.kind, (math.prod(outer), features))


def widen(array: np.ndarray) -> np.ndarray:
    """Convert floats to float32. uint16 are the bits of bfloat16."""
    if array.dtype.kind == "u":
        return (array.astype("uint32") << 16).view("float32")
    return array.astype("float32")
