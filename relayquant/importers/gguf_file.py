"""Parameters of a GGUF file, which has weights and no model: what its blocks stand for, float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.arguments import check_arguments
from relayquant.errors import MissingDependencyError, ModelError, format_count
from relayquant.importers.files import DEFAULT_MAX_BYTES, PathLike, check_file
from relayquant.storage.files import reading

#: Bytes of float32 for each byte of a file at most, unless the caller allows more: 2 bits are 16.
MOST_GROWTH = 16


@check_arguments
def load_gguf(path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES) -> dict[str, np.ndarray]:
    """Tensors of a GGUF file by name, float32, outputs first: the weight (N, K) of a product x w^T.

    Blocks of any kind that the package gguf decodes (Q4_0, Q8_0, Q4_K and others) become the values
    they stand for; float16 and bfloat16 are widened. For a module with parameters of these names,
    `compress_weights(mod, load_gguf(path), bits=4, group_size=32)` finds the codes of Q4_0 again.

    Args:
        path: The file.
        max_bytes: Refuse larger files.

    Raises:
        ModelError: there is no such file, it is too large or damaged, or holds blocks that the
            package does not decode.
        MissingDependencyError: package gguf is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            "Reading a .gguf file needs the package gguf. Run: pip install 'relayquant[gguf]'"
        ) from None
    with reading(path, "GGUF file", ModelError):
        checked = check_file(path, max_bytes)
        tensors = make_reader(gguf)(checked).tensors
        size = sum(4 * int(tensor.n_elements) for tensor in tensors)
        if size > MOST_GROWTH * checked.stat().st_size:
            raise ModelError(
                f"{path}: its tensors take {format_count(size, 'byte')} as float32, more than "
                f"{MOST_GROWTH} times the file. It is damaged."
            )
        return {tensor.name: decode_tensor(gguf, tensor) for tensor in tensors}


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


def decode_tensor(gguf: Any, tensor: Any) -> np.ndarray:
    """The values of one tensor, its own.

    Raises:
        ModelError: the package does not decode its blocks.
    """
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"Tensor {tensor.name!r} has blocks of kind {tensor.tensor_type.name}, which the "
            "package gguf does not decode. Quantize the model to Q8_0, Q4_0 or Q4_K."
        ) from None
    shape = tuple(reversed([int(size) for size in tensor.shape]))
    return np.array(values, "float32").reshape(shape)
