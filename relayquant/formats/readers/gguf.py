"""Parameters of a GGUF file, which has weights and no model: what its blocks stand for, float32.

A tensor is read from the file when it is asked for, every time, and not kept.
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

#: Bytes of float32 for each byte of a file at most, unless the caller allows more: 2 bits are 16.
MOST_GROWTH = 16


@check_arguments
def load_gguf(path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Mapping[str, np.ndarray]:
    """Tensors of a GGUF file by name, float32, outputs first: the weight (N, K) of a product x w^T.

    Blocks of any kind that the package gguf decodes (Q4_0, Q8_0, Q4_K and others) become the values
    they stand for; float16 and bfloat16 are widened. For a module with parameters of these names,
    `compress_weights(mod, load_gguf(path), bits=4, group_size=32)` finds the codes of Q4_0 again.

    Args:
        path: The file. It has to stay as it is while the mapping is used.
        max_bytes: Refuse larger files.

    Returns:
        A mapping that reads a tensor whenever it is asked for it, so that a file may be larger than
        memory; `dict` of it holds all values. Asking raises ModelError where the file is gone or
        has become shorter.

    Raises:
        ModelError: there is no such file, it is too large or damaged, or holds blocks that the
            package does not decode.
        MissingDependencyError: package gguf is not installed.
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
    """Where a tensor lies in a file.

    Attributes:
        kind: Of its blocks, as the package has it.
        offset: Of its first byte.
        dtype, stored: Of the array that the package decodes: bytes of blocks, or floats.
        shape: Of its values.
    """

    kind: Any
    offset: int
    dtype: np.dtype
    stored: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GgufTensors(Mapping[str, np.ndarray]):
    """Name -> values, read when asked for."""

    path: Path
    places: Mapping[str, TensorPlace]

    def __getitem__(self, name: str) -> np.ndarray:
        """The values of one tensor, the caller's own.

        Raises:
            ModelError: the file is gone, or ends before.
        """
        import gguf

        place = self.places[name]
        with reading(self.path, "GGUF file", ModelError):
            # numpy maps no range of no bytes
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
    """The package's reader, which looks beyond the end of a file without a word, and so would count
    to whatever number stands there: here that is an error.
    """

    class CheckedReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError(f"it ends before {format_count(int(count), 'value')} at {offset}")
            return found

    return CheckedReader


def check_kind(gguf: Any, tensor: Any) -> None:
    """Whether the package decodes blocks as those of a tensor; it is asked with one of zeros.

    Raises:
        ModelError: it does not.
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
