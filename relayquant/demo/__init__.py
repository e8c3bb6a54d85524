"""The built-in example: a small float model and digits to try everything on.

Both files are part of the package. `tools/train_digits.py` trains such a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayquant.errors import DataError

MODEL_FILE = "digits.onnx"
DATA_FILE = "digits.npz"


@dataclass(frozen=True, eq=False)
class DemoData:
    """The example: the file of its float model, and digits for calibration and measurement."""

    model_path: Path  #: ONNX, input "image" float32 (N, 1, 8, 8) in 0..1, output "logits" (N, 10)
    #: batches (B, 1, 8, 8) in 0..1, without held-out images
    calibration: list[npt.NDArray[np.float32]]
    images: npt.NDArray[np.float32]  #: held-out images (N, 1, 8, 8) in 0..1
    labels: npt.NDArray[np.int64]  #: (N,), 0..9
    origin: str  #: source and licence of the digits


def load_digits(batch: int = 16) -> DemoData:
    """Load the built-in example from files in the package.

    Args:
        batch: Images in each calibration batch. The last batch may be smaller.

    Raises:
        DataError: batch < 1, or the package was installed without its data files.
    """
    if batch < 1:
        raise DataError(f"load_digits got batch={batch}; allowed: 1 or more.", code="RQ101")
    folder = Path(__file__).parent
    model_path, data_path = folder / MODEL_FILE, folder / DATA_FILE
    for path in (model_path, data_path):
        if not path.is_file():
            raise DataError(
                f"The built-in example is incomplete: {path} is missing. Reinstall relayquant.",
                code="RQ301",
            )
    with np.load(data_path) as data:
        calibration = scale_pixels(data["calibration"])
        return DemoData(
            model_path,
            [calibration[i : i + batch] for i in range(0, len(calibration), batch)],
            scale_pixels(data["images"]),
            data["labels"].astype("int64"),
            str(data["origin"]),
        )


def scale_pixels(images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Scale images (N, 8, 8) of integers in 0..16 to the model's input: (N, 1, 8, 8) in 0..1."""
    return np.divide(images[:, None], np.float32(16), dtype=np.float32)
