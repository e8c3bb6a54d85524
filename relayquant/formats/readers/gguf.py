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
from relayquant.base.storage.files import DEFAULT_MAX_BYTES, PathLike, check_file, reading
from relayquant.errors import MissingDependencyError, ModelError, format_count

#: Largest allowed growth from file to float32, unless the caller allows more: 2 bits grow by 16.
MOST_GROWTH = 16


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
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            "Reading a .gguf file needs the package gguf. Run: pip install 'relayquant[gguf]'",
            code="RQ503",
        ) from None
    with reading(path, "GGUF file", ModelError):
        checked = check_file(path, max_bytes)
        tensors = make_reader(gguf)(checked).tensors
        size = sum(4 * int(tensor.n_elements) for tensor in tensors)
        if size > MOST_GROWTH * checked.stat().st_size:
            raise ModelError(
                f"{path}: its tensors take {format_count(size, 'byte')} as float32, more than "
                f"{MOST_GROWTH} times the file. It is damaged.",
                code="RQ502",
            )
        for tensor in {tensor.tensor_type: tensor for tensor in tensors}.values():
            check_kind(gguf, tensor)
        places = {
            tensor.name: TensorPlace(
                tensor.tensor_type,
                int(tensor.data_offset),
                tensor.data.dtype,
                tensor.data.shape,
                tuple(reversed([int(size) for size in tensor.shape])),
            )
            for tensor in tensors
        }
        return GgufTensors(checked.absolute(), places)


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a file.

    Attributes:
        kind: Kind of its blocks, as named by the package.
        offset: Offset of its first byte.
        dtype, stored: Dtype and shape of the array that the package decodes: bytes of blocks, or
            floats.
        shape: Shape of its values.
    """

    kind: Any
    offset: int
    dtype: np.dtype
    stored: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GgufTensors(Mapping[str, np.ndarray]):
    """Name -> values, read at each access."""

    path: Path
    places: Mapping[str, TensorPlace]

    def __getitem__(self, name: str) -> np.ndarray:
        """Read the values of one tensor. The caller may write to the array.

        Raises:
            ModelError: the file is gone or truncated.
        """
        import gguf

        place = self.places[name]
        with reading(self.path, "GGUF file", ModelError):
            # numpy cannot map 0 bytes.
            data = np.empty(place.stored, place.dtype)
            if data.size:
                data = np.memmap(self.path, place.dtype, "r", place.offset, place.stored)
            values = gguf.quants.dequantize(data, place.kind)
            return np.array(values, "float32").reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"GgufTensors({str(self.path)!r}, {format_count(len(self), 'tensor')})"


def make_reader(gguf: Any) -> Any:
    """Return the package's reader with a check for the end of the file.

    The package's reader silently reads beyond the end, and then loops over whatever count it finds
    there.
    """

    class CheckedReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError(f"it ends before {format_count(int(count), 'value')} at {offset}")
            return found

    return CheckedReader


def check_kind(gguf: Any, tensor: Any) -> None:
    """Check that the package decodes the blocks of a tensor, by decoding one block of zeros.

    Raises:
        ModelError: the package does not decode them.
    """
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    block = np.zeros(size, "uint8").view(tensor.data.dtype)
    try:
        gguf.quants.dequantize(block, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"Tensor {tensor.name!r} has blocks of kind {tensor.tensor_type.name}, which the "
            "package gguf does not decode. Quantize the model to Q8_0, Q4_0 or Q4_K.",
            code="RQ202",
        ) from None
