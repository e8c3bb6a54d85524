"""Numpy form of `relax.qnn.dft`: numpy's transforms, computed in float64 and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["dft"]

Array = np.ndarray[Any, Any]


def dft(x: Array, *, length: int, inverse: bool = False, onesided: bool = False) -> Array:
    """Transform (..., n, p) -> (..., results, q), numbers of p and q parts."""
    numbers = x[..., 0].astype("float64")
    if x.shape[-1] == 2:
        numbers = numbers + 1j * x[..., 1]
    if inverse and onesided:
        return np.fft.irfft(numbers, length, axis=-1)[..., None].astype(x.dtype)
    found = (np.fft.ifft if inverse else np.fft.fft)(numbers, length, axis=-1)
    if onesided:
        found = found[..., : length // 2 + 1]
    return np.stack([found.real, found.imag], axis=-1).astype(x.dtype)
