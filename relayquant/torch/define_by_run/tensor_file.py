"""Define-by-run, calibration: tensors -> a temporary file -> the same tensors."""

from __future__ import annotations

import tempfile
import threading
import weakref
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from relayquant.base.storage.files import TEMPORARY, writing
from relayquant.stages.calibration.store import write_all


class TensorFile:
    """Tensors on disk, in a temporary file that is deleted with this object. Several threads
    may use it.
    """

    def __init__(self) -> None:
        with writing("temporary files", TEMPORARY):
            self._file = tempfile.TemporaryFile(prefix="relayquant-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        #: for each tensor: its position, shape and dtype; or the tensor itself if numpy lacks its
        #: dtype
        self._rows: list[tuple[int, tuple[int, ...], np.dtype[Any]] | torch.Tensor] = []
        self._end = 0
        self._moving = threading.Lock()  # the file has one position

    def append(self, tensor: torch.Tensor) -> int:
        """Store the present value of a tensor and return its number.

        Raises:
            FileError: there is no space for it.
        """
        value = tensor.detach()
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):
            array = None
        with self._moving:
            if array is None:
                self._rows.append(value.clone())
            else:
                flat = np.ascontiguousarray(array).reshape(-1)
                with writing("temporary files", TEMPORARY):
                    self._file.seek(self._end)
                    write_all(self._file.fileno(), [flat.view(np.uint8).data])
                self._rows.append((self._end, array.shape, array.dtype))
                self._end += flat.nbytes
            return len(self._rows) - 1

    def read(self, number: int) -> torch.Tensor:
        """Read the tensor with a number, a new one each time."""
        row = self._rows[number]
        if isinstance(row, torch.Tensor):
            return row.clone()
        start, shape, dtype = row
        array = np.empty(shape, dtype)
        rest = array.reshape(-1).view(np.uint8).data
        with self._moving:
            self._file.seek(start)
            while rest:
                rest = rest[self._file.readinto(rest) :]
        return torch.from_numpy(array)
