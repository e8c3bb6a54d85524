"""What training gives back of a few bits: the table of docs/how_to/train.md.

    python tests/benchmarks/training_table.py [--rows "ResNet-20, 4/4" ...] [--data DIR]

Each row is one call of `relayquant.torch.finetune` on real data without labels: the first part of
the samples calibrates and trains, the next chooses the best state, the last is measured on, once.
What counts is agreement: the share of samples where the likeliest answer is float's. Numbers go to
docs/training.json, where those of other rows stay as they were, and the table is written from it.
Needs torch, the models and the data; what is missing is named.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from speed_table import read_results, write_results, write_table

import relayquant as rq
from relayquant.config import Effort
from relayquant.stages.effort import apply_effort

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
RESULTS, PAGE = ROOT / "docs/training.json", ROOT / "docs/how_to/train.md"
SEED = 0

Array = np.ndarray
#: (samples, generator) -> as many others
Augment = Callable[[Array, np.random.Generator], Array]


@dataclass(frozen=True, eq=False)
class Samples:
    """A model and its data: `train` may be larger than what the model takes, `augment` crops."""

    model: Path
    train: Array
    calibration: list[Array]
    validation: list[Array]
    test: list[Array]
    augment: Augment
    batch: int
    #: of the test samples, where they are known
    labels: Array | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """A network, the bits of weights and activations, and what `finetune` is told."""

    load: Callable[[Path], Samples]
    weight_bits: int
    activation_bits: int
    granularity: rq.config.Granularity = rq.config.Granularity.PER_CHANNEL
    options: Mapping[str, Any] = field(default_factory=dict)


def split(array: Array, size: int) -> list[Array]:
    """Consecutive batches."""
    return [array[i : i + size] for i in range(0, len(array), size)]


# ---- augmentation: other samples of the same kind, for the float model to answer ----


def crop(images: Array, size: int, scale: float, rng: np.random.Generator) -> Array:
    """Square parts of images (N, C, H, W), half of them mirrored, as (N, C, size, size).

    Half of them are cut to a share of at least 1 - `scale` of the side and stretched.
    """
    import torch

    results = []
    for image in images:
        side = image.shape[-1]
        if rng.random() < 0.5:
            side = int(rng.integers(int(side * (1 - scale)), side + 1))
        y, x = rng.integers(0, image.shape[-1] - side + 1, 2)
        part = torch.from_numpy(image[None, :, y : y + side, x : x + side].copy())
        part = torch.nn.functional.interpolate(part, (size, size), mode="bilinear")[0].numpy()
        results.append(part[:, :, ::-1] if rng.random() < 0.5 else part)
    return np.stack(results)


def shift(images: Array, by: int, rng: np.random.Generator) -> Array:
    """Images (N, C, H, W) moved by up to so many pixels, what is beyond the edge mirrored."""
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (by, by), (by, by)), mode="reflect")
    places = rng.integers(0, 2 * by + 1, (len(images), 2))
    return np.stack(
        [p[:, y : y + height, x : x + width] for p, (y, x) in zip(padded, places, strict=True)]
    )


def jitter(samples: Array, size: float, rng: np.random.Generator) -> Array:
    """Each channel of (N, C, H, W) a little brighter or darker, with more or less contrast."""
    shape = (*samples.shape[:2], 1, 1)
    factor, offset = (rng.uniform(-size, size, shape) for _ in range(2))
    return samples * (1 + factor) + offset


def mix(samples: Array, share: float, rng: np.random.Generator) -> Array:
    """A share of the samples blended with another (mixup, https://arxiv.org/abs/1710.09412)."""
    shape = (len(samples), *(1,) * (samples.ndim - 1))
    part = np.where(rng.random(shape) < share, rng.uniform(0.5, 1, shape), 1)
    return part * samples + (1 - part) * samples[rng.permutation(len(samples))]


def view(images: Array) -> Array:
    """Images (N, C, H, W), mirrored, moved, and both: (4 N, C, H, W). What the float model says of
    them is known as well, and the best of several states is less so by chance.

    Views of an image are N apart: where the 20 folds of `finetune` divide N they are in one, so
    that views do not count as samples of their own when it asks what is chance.
    """
    moved = shift(images, 2, np.random.default_rng(SEED))
    return np.concatenate([v for one in (images, moved) for v in (one, one[:, :, :, ::-1])])


@dataclass(frozen=True, eq=False)
class Drawn:
    """`steps` batches drawn from samples and changed at random: the same ones in each pass."""

    samples: Samples
    steps: int

    def __iter__(self) -> Iterator[Array]:
        rng, samples = np.random.default_rng(SEED), self.samples
        for _ in range(self.steps):
            chosen = samples.train[rng.permutation(len(samples.train))[: samples.batch]]
            yield np.ascontiguousarray(samples.augment(chosen, rng), dtype="float32")


# ---- networks ----


def load_resnet20(folder: Path) -> Samples:
    images = np.load(folder / "cifar10_unlabelled_1000.npz")["x"]
    if images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    mean = np.array([0.485, 0.456, 0.406], "float32").reshape(1, 3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], "float32").reshape(1, 3, 1, 1)
    x = ((images / np.float32(255) - mean) / std).astype("float32")

    def augment(images: Array, rng: np.random.Generator) -> Array:
        return mix(jitter(shift(crop(images, 32, 0.1, rng), 3, rng), 0.05, rng), 0.25, rng)

    model = folder / "resnet20_cifar10.onnx"
    calibration, test = split(x[:400], 10), split(x[500:], 50)
    validation = split(view(x[400:500]), 20)
    return Samples(model, x[:400], calibration, validation, test, augment, batch=40)


def load_dscnn(folder: Path) -> Samples:
    with np.load(folder / "kws_1000.npz") as data:
        x, part = data["x"], data["split"]
    x = ((x.astype("float32") - 83) * np.float32(0.58470291)).reshape(-1, 1, 49, 10)
    known, test = x[part == 0], x[part == 1]
    count = len(known) * 4 // 5

    def augment(sounds: Array, rng: np.random.Generator) -> Array:
        moved = [np.roll(sound, rng.integers(-3, 4), axis=1) for sound in sounds]
        return mix(np.stack(moved), 0.3, rng)

    model = folder / "kws_dscnn.onnx"
    moved = [np.roll(known[count:], by, axis=2) for by in (0, -2, -1, 1, 2)]
    validation = split(np.concatenate(moved), 20)
    return Samples(
        model,
        known[:count],
        split(known[:count], 10),
        validation,
        split(test, 50),
        augment,
        batch=40,
    )


def load_mobilenet(folder: Path, batch: int = 12) -> Samples:
    from PIL import Image

    with np.load(folder / "imagenet_200.npz") as data:
        jpeg, offsets, labels = data["jpeg"].tobytes(), data["offset"], data["y"]
    pictures = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(jpeg[a:b])).convert("RGB"))
            for a, b in itertools.pairwise(offsets)
        ]
    ).transpose(0, 3, 1, 2)
    full = pictures.astype("float32") / np.float32(127.5) - 1
    x = np.ascontiguousarray(full[:, :, 1:225, 1:225])

    def augment(images: Array, rng: np.random.Generator) -> Array:
        return np.clip(mix(crop(images, 224, 0.25, rng), 0.2, rng), -1, 1)

    model = folder / "mobilenet_v1_0.75_224.onnx"
    seen = np.concatenate([x[84:100], x[84:100, :, :, ::-1]])
    test, wanted = split(view(x[100:]), 4), np.tile(labels[100:], 4)
    return Samples(model, full[:84], split(x[:84], 2), split(seen, 8), test, augment, batch, wanted)


def match_answers(outputs: Sequence[Any], expected: Sequence[Any]) -> Any:
    """A loss for classifiers that give logits: the divergence of the answers' probabilities, which
    is about those that are near the first, and the relative distance, which is about all.
    """
    from torch.nn.functional import kl_div, log_softmax

    (got,), (want,) = outputs, expected
    distance = (got - want).square().mean() / (want - want.mean()).square().mean()
    logs = log_softmax(got, 1), log_softmax(want, 1)
    return distance + kl_div(*logs, reduction="batchmean", log_target=True)


def score_answers(expected: Sequence[Array], got: Sequence[Array]) -> float:
    """`match_answers` as a metric, which is taken at its word: 16 images cannot tell a gain."""
    import torch

    outputs, wanted = ([torch.from_numpy(array) for array in each] for each in (got, expected))
    return -float(match_answers(outputs, wanted))


#: of a network whose weights of a few bits have to move to other levels, and of one that may not
FAR: dict[str, Any] = {"steps": 800, "lr": 1e-2, "scale_lr": 1.5, "hidden_weight": 0.3}
SMALL: dict[str, Any] = {"steps": 500, "lr": 3e-3, "scale_lr": 2.0}
NEAR: dict[str, Any] = {
    "steps": 250, "lr": 2e-3, "scale_lr": 0.5, "hidden_weight": 1.0, "loss": match_answers,
}  # fmt: skip
ROWS: dict[str, Row] = {
    "ResNet-20, 4/4": Row(load_resnet20, 4, 4, options=FAR),
    "ResNet-20, 3/4": Row(load_resnet20, 3, 4, options={**FAR, "steps": 250, "reconstruction": 10}),
    "ResNet-20, 2/4": Row(load_resnet20, 2, 4, options={**FAR, "steps": 250, "reconstruction": 10}),
    "DS-CNN, 4/4": Row(load_dscnn, 4, 4, options=SMALL),
    "MobileNet 0.75, 4/8": Row(
        load_mobilenet,
        4,
        8,
        options={
            **NEAR,
            "steps": 60,
            "lr": 2e-4,
            "reconstruction": 28,
            "metric": score_answers,
        },
    ),
    "MobileNet 0.75, 8/8, one scale per weight": Row(
        partial(load_mobilenet, batch=6),
        8,
        8,
        rq.config.Granularity.PER_TENSOR,
        {**NEAR, "steps": 50, "lr": 1e-3},
    ),
}


def make_mapping(row: Row) -> rq.QConfigMapping:
    """Weights of few bits with all codes, activations 0..2^bits - 1, in bytes."""
    base, half = rq.get_backend_config("x86").default_qconfig, 2 ** (row.weight_bits - 1)
    low, high = (1 if row.weight_bits == 8 else 0) - half, half - 1
    weight = rq.QSpec(
        "int8", rq.config.Scheme.SYMMETRIC, row.granularity, quant_min=low, quant_max=high
    )
    spec = rq.QSpec("uint8", quant_max=2**row.activation_bits - 1)
    config = rq.QConfig(
        replace(base.activation, spec=spec), rq.TensorConfig(weight, rq.observers.MinMax())
    )
    return rq.QConfigMapping().set_global(apply_effort(config, Effort.BEST))


# ---- measuring ----


def measure_row(row: Row, folder: Path) -> dict[str, Any]:
    """Agreement with float on the test samples, in percent, before and after training."""
    samples = row.load(folder)
    prepared = calibrate_row(row, samples)
    begun = time.process_time()
    drawn = Drawn(samples, row.options["steps"])
    trained = rq.torch.finetune(
        prepared,
        None,
        drawn,
        validation_dataset=samples.validation,
        callbacks=Report(),
        **row.options,
    )
    seconds = time.process_time() - begun
    expected = answer(rq.load(samples.model)[0], samples)
    shares, top1 = {}, {}
    for name, module in (("best", rq.lower(prepared)), ("trained", trained)):
        got = answer(module, samples)
        shares[name] = 100 * float(np.mean(got == expected))
        if samples.labels is not None:
            top1["float"] = 100 * float(np.mean(expected == samples.labels))
            top1[name] = 100 * float(np.mean(got == samples.labels))
    return {
        **shares,
        **({"top1": top1} if top1 else {}),
        "samples": len(expected),
        "options": {k: getattr(v, "__name__", str(v)) for k, v in row.options.items()},
        "cpu_seconds": round(seconds),
        "training": rq.ledger(trained).choices["training"],
    }


def calibrate_row(row: Row, samples: Samples) -> rq.PreparedModel:
    """What `effort="best"` makes of it without training."""
    mod, params = rq.load(samples.model)
    calibration = samples.calibration
    prepared = rq.prepare(
        mod, params, calibration, qconfig_mapping=make_mapping(row), backend="x86", effort="best"
    )
    return rq.calibrate(prepared, calibration)


def answer(module: Any, samples: Samples) -> Array:
    """The likeliest answer to each test sample."""
    executor = rq.Executor(rq.compile(module))
    found = [np.asarray(executor.run("main", [batch])[0]) for batch in samples.test]
    return np.concatenate([got.reshape(len(got), -1).argmax(1) for got in found])


class Report(rq.Callback):
    """Prints how a training goes."""

    def on_training(self, event: Any) -> None:
        print(
            f"  step {event.step}: loss {event.loss:.4f}, validation {event.score:.4f}", flush=True
        )


# ---- the table ----


def format_table(results: Mapping[str, Mapping[str, Any]], rows: Sequence[str]) -> str:
    """A table in Markdown of the rows that were measured."""
    lines = ['| network, bits of weights/activations | `effort="best"` | trained | gap closed |']
    lines.append("|---|---|---|---|")
    for row in rows:
        if row not in results:
            continue
        found = results[row]
        before, after = found["best"], found["trained"]
        gap = 100 - before
        share = f"{(after - before) / gap:.0%}" if gap else "-"
        lines.append(f"| {row} | {before:.1f} | {after:.1f} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of models and data")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("This needs PyTorch. Run: pip install 'relayquant[torch]'")
    if not options.data.is_dir():
        sys.exit(f"There is no folder {options.data} of models and data; name one by --data.")
    torch.set_num_threads(options.threads)
    results = read_results(RESULTS)
    for row in options.rows:
        print(row, flush=True)
        try:
            results[row] = measure_row(ROWS[row], options.data)
        except FileNotFoundError as error:
            print(f"  left out: {error.filename} is not here", flush=True)
            continue
        print(f"  {results[row]}", flush=True)
        write_results(results, RESULTS)
    write_table(PAGE, format_table(results, [*ROWS]), "training")


if __name__ == "__main__":
    main()
