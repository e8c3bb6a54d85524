"""safetensors files -> the place of each tensor. No tensor is read.

The format: eight bytes with the length of a JSON header, the header, and the bytes of the tensors.
https://github.com/huggingface/safetensors. Files are untrusted, so every length and offset is
checked against the file's size before it is believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from relayquant.base.storage.files import check_file, decode_json, read_text, reading
from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.mapped import map_array, widen

#: Largest header and largest index file in bytes.
MOST_HEADER = 64 << 20
LENGTH = struct.Struct("<Q")
#: Name of a dtype -> numpy dtype. BF16 is stored as its bits.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Bits of dtypes that no network here reads: they may be in a file.
OTHER_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "U16": 16, "I16": 16,
    "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
}  # fmt: skip
#: A model of several files lists them here.
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class SafetensorsPlace:
    """The place of a tensor in a file.

    Attributes:
        dtype: Name in the file: "BF16".
        offset, size: Its first byte, from the start of the file, and its bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def refusal(self) -> str:
        """Why the values cannot be read, behind the tensor's name. "" if they can."""
        if self.dtype in DTYPES:
            return ""
        return (
            f"is {self.dtype}; supported: {', '.join(DTYPES)}. Load the model with transformers "
            "and save it as one of these: from_pretrained(..., dtype='bfloat16')."
        )

    def map_bytes(self) -> np.ndarray:
        """Map the values of a tensor of dtype U8, uint8 of its shape. ModelError as for `read`."""
        with reading(self.path, "safetensors file", ModelError):
            return map_array(self.path, "uint8", self.offset, self.shape)

    def read(self) -> np.ndarray:
        """Read the values as float32.

        Raises:
            ModelError: the file is gone or truncated, or the values are no floats.
        """
        with reading(self.path, "safetensors file", ModelError):
            if self.refusal:
                raise ModelError(f"A tensor {self.refusal}", code="RQ202")
            return widen(map_array(self.path, DTYPES[self.dtype], self.offset, self.shape))


def list_safetensors(folder: Path, max_bytes: int) -> dict[str, SafetensorsPlace]:
    """List the tensors of a model: of one file, or of those that an index names.

    Raises:
        ModelError: there is no such file, it is too large or damaged, or the index names a file
            outside of the folder or a tensor that is not there.
    """
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise ModelError(
                f"{folder} has {format_count(len(found), 'file')} *.safetensors and no {INDEX}; "
                f"needed: {SINGLE}, or an index. A pytorch_model.bin is a pickle, which is not "
                "opened: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) of "
                "transformers writes safetensors.",
                code="RQ201",
            )
        return read_places(found[0], max_bytes)
    with reading(index, "index of safetensors files", ModelError):
        content = decode_json(read_text(index, MOST_HEADER))
        files = content["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("'weight_map' is no table of file names")
        places: dict[str, Mapping[str, SafetensorsPlace]] = {}
        for name in sorted(set(files.values())):
            if Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"it names {name[:60]!r}, which is not a file of its folder")
            if not (folder / name).exists():
                there = sum((folder / other).exists() for other in {*files.values()})
                raise ModelError(
                    f"There is no file {folder / name}. The index names "
                    f"{format_count(len({*files.values()}), 'file')}, and {there} are there. "
                    "Download the others too.",
                    code="RQ201",
                )
            places[name] = read_places(folder / name, max_bytes)
            max_bytes -= (folder / name).stat().st_size
        missing = [tensor for tensor, name in files.items() if tensor not in places[name]]
        if missing:
            raise ValueError(f"tensor {missing[0]!r} is not in {files[missing[0]]}")
        return {tensor: places[name][tensor] for tensor, name in files.items()}


def read_places(path: Path, max_bytes: int) -> dict[str, SafetensorsPlace]:
    """Read the header of one file.

    Raises:
        ModelError: the file does not exist, is too large, or is damaged.
    """
    with reading(path, "safetensors file", ModelError):
        size = check_file(path, max_bytes).stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH.size)
            if len(start) < LENGTH.size:
                raise ValueError("it has less than 8 bytes")
            (length,) = LENGTH.unpack(start)
            if length > min(MOST_HEADER, size - LENGTH.size):
                raise ValueError(
                    f"its header has {format_count(length, 'byte')}, more than the file or "
                    f"{MOST_HEADER}"
                )
            header = decode_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no table")
        begin = LENGTH.size + length
        places = {
            name: find_place(path, name, entry, begin, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        at = begin
        for place in sorted(places.values(), key=lambda place: (place.offset, place.size)):
            if place.offset < at:
                raise ValueError("its tensors overlap")
            at = place.offset + place.size
        return places


def find_place(path: Path, name: str, entry: Any, begin: int, end: int) -> SafetensorsPlace:
    """Return the place of a tensor. ValueError if it is outside of the file."""
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name!r} is no table")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    bits = {kind: 8 * np.dtype(each).itemsize for kind, each in DTYPES.items()} | OTHER_BITS
    if not isinstance(dtype, str) or dtype not in bits:
        raise ValueError(f"tensor {name!r} has dtype {str(dtype)[:20]}; known: {', '.join(bits)}")
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or the offsets of tensor {name!r} are no integers from 0 on")
    size = -(-math.prod(shape) * bits[dtype] // 8)
    if offsets[1] - offsets[0] != size or begin + offsets[1] > end:
        raise ValueError(
            f"tensor {name!r} needs {format_count(size, 'byte')} and has those from "
            f"{begin + offsets[0]} to {begin + offsets[1]} of {end}"
        )
    return SafetensorsPlace(path.absolute(), dtype, tuple(shape), begin + offsets[0], size)


def are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most 8 integers from 0 on."""
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 1 << 48 for value in values)
    )
