"""Networks from outside, each of another kind, with what it takes to load them, samples to
calibrate with and others to compare on.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: input -> value
Sample = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Network:
    """A model, the further arguments of `load`, and its samples."""

    model: Any
    calibration: list[Sample]
    samples: list[Sample]
    options: dict[str, Any] = field(default_factory=dict)


def read_images(path: Path, prefix: str, count: int) -> list[Any]:
    """Pictures of an archive of JPEG files."""
    image = pytest.importorskip("PIL.Image", reason="Pillow decodes the JPEG images")
    with np.load(path) as data:
        jpeg, offsets = data[f"{prefix}jpeg"].tobytes(), data[f"{prefix}offset"]
    found = itertools.islice(itertools.pairwise(offsets), count)
    return [image.open(io.BytesIO(jpeg[a:b])).convert("RGB") for a, b in found]


def read_planes(picture: Any, width: int, height: int) -> np.ndarray:
    """RGB from 0 to 255, (1, 3, height, width)."""
    array = np.asarray(picture.resize((width, height), 2), "float32")
    return np.ascontiguousarray(array.transpose(2, 0, 1)[None])


def load_ultraface(shared_data) -> Network:
    faces = shared_data("more/faces_192.npz")

    def read(prefix: str) -> list[Sample]:
        pictures = read_images(faces, prefix, 16)
        return [{"input": (read_planes(p, 320, 240) - 127) / np.float32(128)} for p in pictures]

    return Network(shared_data("more/ultraface_rfb320.onnx"), read("calib_"), read("eval_"))


def load_fastestdet(shared_data) -> Network:
    pictures = read_images(shared_data("imagenet_200.npz"), "", 40)
    rows = [
        {"input.1": np.ascontiguousarray(read_planes(p, 352, 352)[:, ::-1]) / np.float32(255)}
        for p in pictures
    ]
    return Network(shared_data("more/fastestdet.onnx"), rows[:30], rows[30:])


def load_dtln(part: int, suffix: str) -> Callable[[Any], Network]:
    def load(shared_data) -> Network:
        with np.load(shared_data(f"more/dtln_{part}_frames.npz")) as data:
            arrays = dict(data)

        def read(prefix: str) -> list[Sample]:
            names = [name for name in arrays if name.startswith(prefix)]
            return [
                {name.removeprefix(prefix): arrays[name][at] for name in names}
                for at in range(len(arrays[names[0]]))
            ]

        model = shared_data(f"more/dtln_model_{part}.{suffix}")
        return Network(model, read("calib__"), read("eval__"))

    return load


def load_face_landmark(shared_data) -> Network:
    faces = shared_data("more/faces_192.npz")

    def read(prefix: str) -> list[Sample]:
        pictures = read_images(faces, prefix, 16)
        return [{"input_1": np.asarray(p, "float32")[None] / np.float32(255)} for p in pictures]

    return Network(shared_data("more/face_landmark.tflite"), read("calib_"), read("eval_"))


def load_keypoints(shared_data) -> Network:
    with np.load(shared_data("more/keypoints_1000.npz")) as data:
        x = data["x"]
    rows = [{"input": x[at : at + 10]} for at in range(0, len(x), 10)]
    return Network(shared_data("more/keypoint_classifier.onnx"), rows[:20], rows[20:])


def load_silero(shared_data) -> Network:
    """A made-up voice: harmonics that come and go, and noise. The state follows the float model."""
    from onnx.reference import ReferenceEvaluator  # has If, and no LSTM of its own kernels to trust

    path = shared_data("more/silero_vad_16k.onnx")
    rng, count = np.random.default_rng(0), 60
    time = np.arange(576 + 512 * count) / 16000
    pitch = np.cumsum(120 + 30 * np.sin(4 * np.pi * time)) / 16000
    voice = sum(np.sin(2 * np.pi * k * pitch) / k for k in range(1, 12))
    voice *= (np.sin(8 * np.pi * time) > 0) * np.abs(np.sin(16 * np.pi * time))
    wave = (0.1 * voice + 0.01 * rng.standard_normal(len(time))).astype("float32")
    model, state, rows = ReferenceEvaluator(str(path)), np.zeros((2, 1, 128), "float32"), []
    for at in range(count):
        rows.append({"input": wave[None, 512 * at : 512 * at + 576], "state": state})
        _, state = model.run(None, {**rows[-1], "sr": np.array(16000)})
    options = {
        "inputs": {"sr": 16000},
        "shapes": {"input": (1, 576), "state": (2, 1, 128)},
    }
    return Network(path, rows[::2], rows[1::2], options)


def load_stories(shared_data) -> Network:
    """A Llama, written in PyTorch and exported; tokens that it draws itself."""
    torch = pytest.importorskip("torch")
    from llama import Llama, draw_text

    model = Llama.read(shared_data("more/stories260K.bin")).eval()
    length = 32
    rows = [{"tokens": draw_text(model, length, seed)} for seed in range(32)]
    program = torch.export.export(model, (torch.tensor(rows[0]["tokens"]),))
    return Network(program, rows[:16], rows[16:])


NETWORKS: dict[str, Callable[[Any], Network]] = {
    "ultraface": load_ultraface,
    "fastestdet": load_fastestdet,
    "dtln_1": load_dtln(1, "onnx"),
    "dtln_1_tflite": load_dtln(1, "tflite"),
    "dtln_2": load_dtln(2, "onnx"),
    "face_landmark": load_face_landmark,
    "keypoints": load_keypoints,
    "silero": load_silero,
    "stories": load_stories,
}
