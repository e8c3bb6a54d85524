"""Arrays in a file: mapped into memory, and floats in the form in which they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def map_array(path: Path, dtype: str, offset: int, shape: Sequence[int]) -> np.ndarray:
    """Map an array of a file. Its bytes are read when they are used."""
    if 0 in shape:  # numpy cannot map 0 bytes
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, tuple(shape))


def widen(array: np.ndarray) -> np.ndarray:
    """Convert floats to float32. uint16 are the bits of bfloat16."""
    if array.dtype.kind == "u":
        return (array.astype("uint32") << 16).view("float32")
    return array.astype("float32")
