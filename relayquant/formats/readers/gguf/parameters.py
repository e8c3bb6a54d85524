"""GGUF file -> dequantized float32 parameters. A GGUF file has weights and no model.

A tensor is read from the file at each access and not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.base.arguments import check_arguments
from relayquant.base.optional import needed
from relayquant.base.storage.files import DEFAULT_MAX_BYTES, PathLike, reading
from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.gguf.header import KINDS, GgufPlace, read_header
from relayquant.formats.readers.mapped import map_array


@check_arguments
def load_gguf(path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Mapping[str, np.ndarray]:
    """Read the tensors of a GGUF file by name, float32, as weights (N, K) of a product x w^T:
    outputs first.

    Blocks of every kind that the package gguf decodes (Q4_0, Q8_0, Q4_K and others) are
    dequantized. float16 and bfloat16 are widened. For a module with parameters of these names,
    `compress_weights(mod, load_gguf(path), bits=4, group_size=32)` finds the codes of Q4_0 again.

    Args:
        path: The file. It must not change while the mapping is used.
        max_bytes: Refuse larger files.

    Returns:
        A mapping that reads a tensor at each access, so a file may be larger than memory. `dict` of
        it holds all values. An access raises ModelError if the file is gone or was truncated.

    Raises:
        ModelError: the file does not exist, is too large or damaged, or has blocks that the package
            does not decode.
        MissingDependencyError: the package gguf is not installed.
    """
    with needed("Reading a .gguf file needs the package gguf", "relayquant[gguf]"):
        import gguf
    header = read_header(path, max_bytes=max_bytes)
    for kind, name in {place.kind: name for name, place in header.tensors.items()}.items():
        check_kind(gguf, name, kind)
    return GgufTensors(Path(path).absolute(), header.tensors)


@dataclass(frozen=True, eq=False)
class GgufTensors(Mapping[str, np.ndarray]):
    """Name -> values, read at each access."""

    path: Path
    places: Mapping[str, GgufPlace]

    def __getitem__(self, name: str) -> np.ndarray:
        """Read the values of one tensor. The caller may write to the array.

        Raises:
            ModelError: the file is gone or truncated.
        """
        import gguf

        place = self.places[name]
        with reading(self.path, "GGUF file", ModelError):
            data = map_array(self.path, "uint8", place.offset, (place.size,))
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(place.kind))
            return np.array(values, "float32").reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"GgufTensors({str(self.path)!r}, {format_count(len(self), 'tensor')})"


def check_kind(gguf: Any, name: str, kind: int) -> None:
    """Check that the package decodes the blocks of a tensor, by decoding one block of zeros.

    Raises:
        ModelError: the package does not decode them.
    """
    block = np.zeros(KINDS[kind].size, "uint8")
    try:
        gguf.quants.dequantize(block, gguf.GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError):
        raise ModelError(
            f"Tensor {name!r} has blocks of kind {KINDS[kind].name}, which the package gguf does "
            "not decode. Quantize the model to Q8_0, Q4_0 or Q4_K.",
            code="RQ202",
        ) from None
