"""Data sets of pictures: a folder -> batches for a model's input, read one at a time.

Pictures need Pillow: `pip install relayquant[images]`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.base.optional import needed
from relayquant.base.storage.files import read_text, reading
from relayquant.data.item import Batch, InputInfo
from relayquant.errors import (
    ConfigError,
    DataError,
    format_count,
    suggest_name,
)

#: file name endings that are read as pictures
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
#: Largest file of labels, some ten million lines.
MAX_LABELS_BYTES = 1 << 28


class ChannelOrder(enum.Enum):
    """Order of the color channels that a model takes."""

    RGB = "rgb"
    BGR = "bgr"
    GREY = "grey"


class ImageLayout(enum.Enum):
    """Position of the channel axis that a model takes."""

    NCHW = "nchw"
    NHWC = "nhwc"


@dataclass(frozen=True)
class Preprocessing:
    """How a picture is prepared for a model: (x / scale - mean) / std for each channel.

    Attributes:
        size: The picture is resized (bilinear) until its shorter side has this length. None: it is
            resized to the size of the crop.
        crop: Side of the square that is cut from the middle. None: the size of the model's input.
        scale: Divisor of the pixels 0 to 255.
        mean, std: One number, or one per channel in the order of `order`.
        order: None: RGB, or grey if the model's input has one channel.
        layout: None: derived from the shape of the model's input.
    """

    size: int | None = None
    crop: int | None = None
    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    order: ChannelOrder | None = None
    layout: ImageLayout | None = None

    def __post_init__(self) -> None:
        sides = [side for side in (self.size, self.crop) if side is not None]
        if any(side < 1 for side in sides) or not self.scale > 0 or not all(self.std):
            raise ConfigError(
                f"Preprocessing has size={self.size}, crop={self.crop}, scale={self.scale:g} and "
                f"std={self.std}; allowed: sides of 1 or more, scale > 0, std other than 0.",
                code="RQ301",
            )
        if self.size is not None and self.crop is not None and self.crop > self.size:
            raise ConfigError(
                f"Preprocessing has crop={self.crop}, more than size={self.size}; allowed: a crop "
                "up to the size.",
                code="RQ301",
            )

    @staticmethod
    def parse(text: str) -> Preprocessing:
        """Parse "imagenet", "size=256,mean=0.5:0.5:0.5,order=bgr", or a preset followed by changes.

        Raises:
            ConfigError: a preset, a key or a value is unknown.
        """
        result = Preprocessing()
        for number, part in enumerate(filter(None, (part.strip() for part in text.split(",")))):
            key, mark, value = part.partition("=")
            if not mark and number == 0:
                if key not in PRESETS:
                    raise ConfigError(
                        f"There is no preprocessing {key!r}. {suggest_name(key, PRESETS)}",
                        code="RQ301",
                    )
                result = PRESETS[key]
                continue
            if key not in READERS or not mark:
                raise ConfigError(
                    f"Preprocessing has no {part!r}; allowed: a preset first "
                    f"({', '.join(PRESETS)}), then {', '.join(f'{key}=' for key in READERS)}.",
                    code="RQ301",
                )
            try:
                result = replace(result, **{key: READERS[key](value)})
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(
                    f"Preprocessing: {part!r} is not a value for {key}.", code="RQ301"
                ) from error
        return result

    def apply(self, image: Any, info: InputInfo) -> np.ndarray:
        """Convert a PIL image to (1, C, H, W) or (1, H, W, C) in the dtype of a model's input."""
        layout, channels, height, width = self.read_shape(info)
        order = self.order or (ChannelOrder.GREY if channels == 1 else ChannelOrder.RGB)
        image = image.convert("L" if order is ChannelOrder.GREY else "RGB")
        bilinear = 2  # PIL.Image.Resampling.BILINEAR
        if self.size is not None:
            ratio = self.size / min(image.size)
            image = image.resize([max(round(side * ratio), 1) for side in image.size], bilinear)
        crop = (self.crop, self.crop) if self.crop else (width, height)
        if self.size is None:
            image = image.resize(crop, bilinear)
        left, top = ((side - cut) // 2 for side, cut in zip(image.size, crop, strict=True))
        image = image.crop((left, top, left + crop[0], top + crop[1]))
        pixels = np.asarray(image, "float32").reshape(crop[1], crop[0], -1)
        if order is ChannelOrder.BGR:
            pixels = pixels[:, :, ::-1]
        values = (pixels / self.scale - np.float32(self.mean)) / np.float32(self.std)
        if layout is ImageLayout.NCHW:
            values = values.transpose(2, 0, 1)
        return np.ascontiguousarray(values[None]).astype(info.dtype)

    def read_shape(self, info: InputInfo) -> tuple[ImageLayout, int, int, int]:
        """Return (layout, channels, height, width) of an input.

        Raises:
            DataError: the input does not take pictures.
        """
        shape = info.shape
        layouts = [self.layout] if self.layout else list(ImageLayout)
        for layout in layouts if len(shape) == 4 else ():
            axes = (1, 2, 3) if layout is ImageLayout.NCHW else (3, 1, 2)
            channels, height, width = (shape[axis] for axis in axes)
            if channels not in (1, 3):
                continue
            sides = [self.crop if isinstance(side, str) else side for side in (height, width)]
            if None in sides:
                raise DataError(
                    f"Input {info.name!r} {info.shape_text} takes pictures of any size: say which, "
                    "with crop= in the preprocessing.",
                    code="RQ301",
                )
            return layout, int(channels), *map(int, sides)  # pyright: ignore[reportReturnType]
        raise DataError(
            f"Input {info.name!r} {info.shape_text} takes no pictures: allowed are 4 dimensions, "
            "of which the second (NCHW) or the last (NHWC) counts 1 or 3 channels. Write its data "
            "as .npz.",
            code="RQ301",
        )


def read_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers: "0.5" or "0.485:0.456:0.406"."""
    return tuple(map(float, text.split(":")))


READERS: Mapping[str, Callable[[str], Any]] = {
    "size": int,
    "crop": int,
    "scale": float,
    "mean": read_numbers,
    "std": read_numbers,
    "order": lambda text: ChannelOrder(text.lower()),
    "layout": lambda text: ImageLayout(text.lower()),
}

#: The preprocessing of the frameworks that trained these networks.
PRESETS: Mapping[str, Preprocessing] = {
    "imagenet": Preprocessing(
        256, 224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),  # torchvision
    "caffe": Preprocessing(
        256, 224, scale=1.0, mean=(103.939, 116.779, 123.68), order=ChannelOrder.BGR
    ),
    "tflite": Preprocessing(mean=(0.5,), std=(0.5,)),  # -1 to 1
    "cifar": Preprocessing(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),  # CIFAR-10
    "unit": Preprocessing(),  # 0 to 1
}


def list_images(folder: Path) -> list[Path]:
    """List the pictures in a folder and its subfolders, sorted by name.

    Raises:
        DataError: there is no picture.
    """
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(
            f"The folder {folder} holds no picture ({', '.join(sorted(SUFFIXES))}).", code="RQ301"
        )
    return found


@dataclass(frozen=True)
class PictureFolder:
    """A data set of the pictures in a folder, one for each batch. Items are read when asked for."""

    paths: tuple[Path, ...]
    preprocessing: Preprocessing
    info: InputInfo

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Batch:
        """Read one picture.

        Raises:
            DataError: the file is too large or not a readable picture.
        """
        from PIL import Image

        path = self.paths[index]
        try:
            with Image.open(path) as image:
                return {self.info.name: self.preprocessing.apply(image, self.info)}
        except (OSError, Image.DecompressionBombError, SyntaxError) as error:
            raise DataError(
                f"{path} is not a readable picture: {error}. Remove it, or convert it.",
                code="RQ301",
            ) from error


def open_images(
    folder: Path, preprocessing: Preprocessing, inputs: tuple[InputInfo, ...]
) -> PictureFolder:
    """Open the pictures in a folder as a data set, sorted by name.

    Raises:
        MissingDependencyError: Pillow is not installed.
        DataError: there is no picture, or the model does not take one.
    """
    with needed("Pictures need Pillow, which is not installed", "relayquant[images]"):
        import_module("PIL.Image")
    if len(inputs) != 1:
        raise DataError(
            f"The model has {format_count(len(inputs), 'input')}; a folder of pictures is "
            "for one. Write the data as .npz, with an array for each input.",
            code="RQ301",
        )
    (info,) = inputs
    preprocessing.read_shape(info)
    if isinstance(info.shape[0], int) and info.shape[0] != 1:
        raise DataError(
            f"Input {info.name!r} {info.shape_text} takes "
            f"{format_count(info.shape[0], 'picture')} at once. "
            "Make its first size 1 or open (--shape), or write the data as .npz.",
            code="RQ301",
        )
    return PictureFolder(tuple(list_images(folder)), preprocessing, info)


def split_label(line: str) -> tuple[str, str]:
    """Split a line of labels: "NAME CLASS" -> (name, class), "CLASS" -> ("", class).

    An empty line has neither. A name may hold blanks and commas, and both may be in double
    quotes, as in CSV.
    """
    *before, label = line.replace(",", " ").rsplit(maxsplit=1) or [""]
    name = ""
    for rest in before:
        name = line[len(rest) - len(rest.lstrip()) : len(rest)]
    return unquote(name), unquote(label)


def unquote(word: str) -> str:
    """Return a word of a table in CSV without its quotes."""
    is_quoted = len(word) > 1 and word[0] == word[-1] == '"'
    return word[1:-1].replace('""', '"') if is_quoted else word


def is_integer(word: str) -> bool:
    """Whether `int` takes a word."""
    try:
        int(word)
    except ValueError:
        return False
    return True


def read_labels(
    path: Path, images: Sequence[Path] | None = None, folder: Path = Path()
) -> np.ndarray:
    """Read the class of each sample from a text file, int64.

    The file has one line "CLASS" per sample, in order. For pictures it may instead have one line
    "NAME CLASS" (or "NAME,CLASS") per picture, in any order. A name may be in double quotes.

    Args:
        path: The file.
        images: Pictures, sorted by name. None: the samples are not pictures, and their number is
            not checked.
        folder: Folder that the names of pictures are relative to.

    Raises:
        DataError: a line has another form, or a picture has no line.
    """
    with reading(path, "file of labels"):
        text = read_text(path, MAX_LABELS_BYTES)
    words = text.replace(",", " ").split()
    rows = [row for line in text.splitlines() if (row := split_label(line))[1]]
    is_bare = [not name for name, _ in rows]
    try:
        if words and (images is None or (all(is_bare) and len(rows) == len(images))):
            return np.array([int(word) for word in words])
        named = {} if any(is_bare) else {name: int(label) for name, label in rows}
    except ValueError as error:
        read = [*(label for _, label in rows), *words]  # names too, where there are no pictures
        wrong = next(word for word in read if not is_integer(word))
        raise DataError(
            f"{path}: the class {wrong!r} is no integer; allowed: the index of the class among the "
            "model's scores, from 0 on. Replace names of classes by their indices, and remove a "
            "line of headings.",
            code="RQ301",
        ) from error
    if named and images is not None:
        names = [str(image.relative_to(folder)) for image in images]
        missing = [name for name in names if name not in named]
        if not missing:
            return np.array([named[name] for name in names])
        others = sorted(named.keys() - {*names})
        unknown = f", and one for {others[0]!r}, which is no picture" if others else ""
        raise DataError(
            f"{path} has no line for {format_count(len(missing), 'picture')}, the first is "
            f"{missing[0]!r}{unknown}. Add a line 'NAME CLASS' for each.",
            code="RQ301",
        )
    allowed = "a line 'CLASS' for each sample"
    if images is not None:
        allowed = (
            "a line 'NAME CLASS' for each picture, or a line 'CLASS' for each of "
            f"{len(images)} in the order of their names"
        )
    raise DataError(f"{path} has no labels; allowed: {allowed}.", code="RQ301")
