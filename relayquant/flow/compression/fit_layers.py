"""Layer-by-layer fit: module + formats + data -> compressed weights, in the order in which data
reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import tvm

from relayquant.base.events import ProgressEvent
from relayquant.base.grouping import GroupedWeight, GroupFormat, quantize_groups
from relayquant.base.packing import count_bytes, count_groups
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.config import Effort
from relayquant.data import Batch, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, DataError, ModelError, format_count
from relayquant.flow.compression.find import WeightKey, WeightUse
from relayquant.flow.compression.fit import Gram, GroupFit, RunJobs, fit_groups
from relayquant.flow.compression.sequential import Meet, walk_weights
from relayquant.flow.compression.settings import CompressSettings
from relayquant.flow.compression.sources import WeightSource
from relayquant.flow.compression.workers import open_workers
from relayquant.ir.rewrite.entry import MAIN, find_entry, rename_function
from relayquant.stages.calibration.checkpoint import (
    Workspace,
    digest_batch,
    digest_text,
    open_checkpoint,
)
from relayquant.stages.calibration.store import BEGIN_ANEW

#: how codes are fitted at each level of effort; None: rounded to nearest
FITS: Mapping[Effort, GroupFit | None] = {
    Effort.FAST: None,
    Effort.BALANCED: GroupFit(),
    Effort.BEST: GroupFit(rounds=8, follows_float=True),
}
#: bits of the weights that lose most if there is a bound
MOST_BITS = 8
KIND = "relayquant.grouped_weight.1"


Formats = Mapping[WeightKey, GroupFormat]


@dataclass(frozen=True, eq=False)
class CompressData:
    """A function, its batches, and what is made of it. Without data there are no batches.

    Attributes:
        uses: The operators that data reaches, by the variable of their value.
        params: Values of the parameters that are not inputs.
    """

    mod: tvm.IRModule
    params: Mapping[tvm.relax.Var, WeightSource]
    function: str
    batches: tuple[Batch, ...]
    uses: Mapping[object, WeightUse]
    settings: CompressSettings

    def walk(self, meet: Meet, *, with_float: bool = False) -> None:
        """Run `walk_weights` on all batches."""
        if self.batches:
            walk_weights(
                self.mod,
                self.function,
                self.batches,
                self.params,
                self.uses,
                self.settings.group_size,
                self.settings.activation,
                meet,
                with_float=with_float,
            )


@dataclass(frozen=True, eq=False)
class FoundWeights:
    """Weights by key, the weights that data has reached, and why some keep 8 bits."""

    weights: dict[WeightKey, GroupedWeight] = field(default_factory=dict)
    met: set[WeightKey] = field(default_factory=set)
    kept: dict[WeightKey, str] = field(default_factory=dict)


def open_data(
    mod: tvm.IRModule,
    params: Mapping[tvm.relax.Var, WeightSource],
    uses: Sequence[WeightUse],
    dataset: object,
    settings: CompressSettings,
) -> CompressData:
    """Open the data set as checked batches of the function that it is for.

    Raises:
        ConfigError: there is no such function, or it is not clear which one is meant.
        DataError: the data does not fit it.
    """
    functions = sorted({use.function for use in uses})
    name = settings.function or find_entry(mod) or ""
    if settings.function is not None and dataset is None:
        raise ConfigError(
            "compress_weights: function= says what dataset= is for; pass both.", code="RQ102"
        )
    if dataset is None:
        return CompressData(mod, params, name, (), {}, settings)
    if name not in functions:
        given = f"function={name!r} reads no weight" if name else "the module has no one model"
        raise ConfigError(
            f"compress_weights: {given}; the data is to be for one of {', '.join(functions)}. Pass "
            f"function={functions[0]!r}, for instance.",
            code="RQ103",
        )
    for param in mod[name].params:
        if param not in params and not isinstance(param.ty, tvm.relax.TensorType):
            raise ConfigError(
                f"compress_weights: {param.name!r} of function {name!r} is not a tensor, so no "
                "data can be given for it. Pass data for another function: function=.",
                code="RQ101",
            )
    main = mod if name == MAIN else rename_function(mod, name, MAIN)
    inputs = [
        info
        for info, param in zip(describe_inputs(main), mod[name].params, strict=True)
        if param not in params
    ]
    batches = tuple(open_dataset(dataset, inputs))
    own = {use.var: use for use in uses if use.function == name}
    return CompressData(mod, params, name, batches, own, settings)


def fit_weights(uses: Sequence[WeightUse], forms: Formats, data: CompressData) -> FoundWeights:
    """Fit the weight of each use once, by its key. Weights that data reaches come first, in this
    order.
    """
    found, settings = FoundWeights(), data.settings
    total = len({use.key for use in uses})
    order = {key: i for i, key in enumerate(dict.fromkeys(use.key for use in uses))}

    with (
        open_results(uses, forms, data) as workspace,
        open_workers(settings.workers, workspace) as run,
    ):

        def find(use: WeightUse, gram: Gram | None) -> GroupedWeight:
            form = forms[use.key]
            place = workspace.choices(order[use.key]) if workspace else None
            weight = read_weight(place, form, use) if place and place.exists() else None
            if weight is None:
                weight = fit_weight(use, gram, form, settings, run)
                limit = settings.max_loss if form.bits < MOST_BITS else None
                if limit is not None and measure_loss(use.array, weight, gram) > limit:
                    wide = replace(form, bits=MOST_BITS)
                    weight = fit_weight(use, gram, wide, settings, run)
                if place:
                    write_weight(place, weight)
            if weight.format.bits != form.bits:
                found.kept[use.key] = (
                    f"{MOST_BITS} bits, because {form.bits} lose more than max_loss="
                    f"{settings.max_loss:g}"
                )
            found.weights[use.key] = weight
            settings.events.on_progress(
                ProgressEvent("compress weights", len(found.weights), total, "weight")
            )
            return weight

        def meet(use: WeightUse, gram: Gram | None) -> np.ndarray:
            if use.key not in found.weights:
                find(use, gram)
                if gram is not None:
                    found.met.add(use.key)
            return found.weights[use.key].decode()

        fit = FITS[settings.level]
        data.walk(meet, with_float=fit is not None and fit.follows_float)
        for use in uses:
            if use.key not in found.weights:
                find(use, None)
    return found


def fit_weight(
    use: WeightUse,
    gram: Gram | None,
    form: GroupFormat,
    settings: CompressSettings,
    run: RunJobs,
) -> GroupedWeight:
    """Fit a weight in a format to its data.

    Raises:
        ModelError: its scales do not fit their dtype.
    """
    array, fit = use.array, FITS[settings.level]
    if gram is not None and fit is not None:
        weight = fit_groups(array, form, gram, fit, run)
    else:
        weight = quantize_groups(array, form, None if gram is None else gram.importance)
    if not np.isfinite(weight.scale).all():
        raise ModelError(
            f"{use.place}: weights up to {np.abs(array).max():.3g} have scales beyond "
            f"{np.finfo(weight.scale.dtype).max:.5g}, the largest {weight.scale.dtype}. Use "
            'scale_dtype="float32".',
            code="RQ204",
        )
    return weight


def measure_loss(array: np.ndarray, weight: GroupedWeight, gram: Gram | None) -> float:
    """Return the mean square of the change by rounding over the mean square of the result.
    Without data the weight itself is compared.
    """
    difference = array - weight.decode()
    if gram is None:
        parts = [float(np.square(a, dtype="float64").sum()) for a in (difference, array)]
    else:
        parts = [gram.measure(a) for a in (difference, array)]
    return parts[0] / parts[1] if parts[1] > 0 else 0.0


def describe_fit(uses: Sequence[WeightUse], found: FoundWeights, settings: CompressSettings) -> str:
    """Describe in words how the weights were found."""
    if not found.met:
        return "rounded to nearest, without data"
    fit = FITS[settings.level]
    how = "rounded to nearest, scales weighted" if fit is None else f"fitted, {fit}"
    missed = len({use.key for use in uses} - found.met)
    rest = f"; {format_count(missed, 'weight')} without data" if missed else ""
    return f"{how} by data{rest}"


# --- Checkpoints ------------------------------------------------------------------------------


@contextmanager
def open_results(
    uses: Sequence[WeightUse], forms: Formats, data: CompressData
) -> Iterator[Workspace | None]:
    """Open the folder of finished weights; None without a checkpoint."""
    settings = data.settings
    if settings.checkpoint is None:
        yield None
        return
    described = [f"{use.place} {use.op} {forms[use.key]}" for use in uses]
    digests = {use.key: digest_batch({"": use.array}) for use in uses}
    fitting = f"{FITS[settings.level]} {settings.activation} {settings.max_loss}"
    fingerprint = {
        "model": digest_text(data.mod.script(show_meta=False)),
        "weights": digest_text("\n".join((*described, *(digests[use.key] for use in uses)))),
        "settings": digest_text(fitting),
        "data": digest_text(" ".join(map(digest_batch, data.batches))),
    }
    with open_checkpoint(settings.checkpoint, fingerprint, "compression") as workspace:
        yield workspace


def write_weight(path: Path, weight: GroupedWeight) -> None:
    """Write one finished weight; the file is never incomplete."""
    arrays = {"codes": weight.codes, "scale": weight.scale, "zero_point": weight.zero_point}
    write_archive(path, KIND, Archive({"bits": weight.format.bits}, arrays))


def read_weight(path: Path, form: GroupFormat, use: WeightUse) -> GroupedWeight:
    """Read what `write_weight` wrote, in that format or with 8 bits.

    Raises:
        DataError: the file is damaged.
    """
    archive = read_archive(path, KIND, "part of a checkpoint")
    rows, features = use.shape
    for bits in {form.bits, MOST_BITS}:
        own = replace(form, bits=bits)
        groups = (rows, count_groups(features, own.size(features)))
        expected = {
            "codes": ("uint8", (rows, count_bytes(features, bits))),
            "scale": (form.scale_dtype, groups),
            "zero_point": ("uint8", () if form.is_symmetric else groups),
        }
        arrays = archive.arrays
        if archive.header.get("bits") == bits and expected == {
            name: (str(array.dtype), array.shape) for name, array in arrays.items()
        }:
            return GroupedWeight(**arrays, features=features, format=own)
    raise DataError(f"{path} does not hold the weight of {use.place}. {BEGIN_ANEW}", code="RQ502")
