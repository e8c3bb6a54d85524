"""The tensors of a GGUF file, which are read when they are used."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from relayquant.base.storage.files import PathLike, reading
from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm.tensors import FLOATS, StoredTensor, Weight
from relayquant.formats.readers.gguf.blocks import BLOCK_KINDS, read_blocks
from relayquant.formats.readers.gguf.header import KINDS, GgufHeader, GgufPlace
from relayquant.formats.readers.mapped import map_array, widen

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


def read_floats(path: Path, place: GgufPlace) -> Weight:
    """Read a tensor of floats as float32."""
    with reading(path, "GGUF file", ModelError):
        dtype = FLOAT_KINDS[KINDS[place.kind].name]
        return widen(map_array(path, dtype, place.offset, place.shape))


def read_grouped(path: Path, place: GgufPlace) -> Weight:
    """Read a tensor of blocks."""
    with reading(path, "GGUF file", ModelError):
        *outer, features = place.shape
        data = map_array(path, "uint8", place.offset, (place.size,))
        return read_blocks(data, place.kind, (math.prod(outer), features))
