"""Settings and data for the training loop of `finetune`.

Nothing here needs PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.analysis.sensitivity import Metric, check_metric
from relayquant.base.arguments import check_fields
from relayquant.config import BackendConfig, Effort, QConfigMapping, Ranges
from relayquant.data import Dataset, InputInfo, open_dataset
from relayquant.data.item import is_array
from relayquant.data.iterable import open_iterable
from relayquant.errors import ConfigError
from relayquant.flow.settings import RunSettings
from relayquant.stages.effort import resolve_effort

#: (outputs, outputs of the float model) -> loss; a third parameter gets the item of the data set
Loss = Callable[..., Any]
#: Each HELD_BACK-th item is held back. Of fewer items the last one is, if there are FEWEST_ITEMS.
HELD_BACK, FEWEST_ITEMS = 10, 4


@check_fields
@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(RunSettings):
    """Settings of `relayquant.torch.finetune`, except model, data and loss.

    Raises:
        ConfigError: one of them is out of range.
    """

    steps: int = 400
    lr: float = 3e-3
    scale_lr: float = 1.0
    hidden_weight: float = 0.0
    reconstruction: int = 0
    backend: BackendConfig | str | None = None
    qconfig_mapping: QConfigMapping | None = None
    effort: Effort | str = Effort.BEST
    ranges: Ranges = Ranges.LEARNED
    weight_ranges: Ranges | None = None
    calibration_dataset: Any = None
    validation_dataset: Any = None
    hold_back: bool = True
    metric: Metric | None = None
    evaluate_every: int | None = None
    patience: int | None = None
    checkpoint: str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_effort(self.effort)
        only_fits = self.steps == 0 and self.reconstruction > 0
        wrong = [
            f"{name}={value!r}"
            for name, value in (
                ("steps", None if only_fits else self.steps),
                ("lr", self.lr),
                ("scale_lr", self.scale_lr),
                ("evaluate_every", self.evaluate_every),
                ("patience", self.patience),
            )
            if value is not None and not value > 0
        ]
        if wrong:
            raise ConfigError(
                f"finetune got {', '.join(wrong)}; allowed: numbers above 0, and steps=0 with a "
                "reconstruction.",
                code="RQ101",
            )
        for name, value in (
            ("hidden_weight", self.hidden_weight),
            ("reconstruction", self.reconstruction),
        ):
            if not value >= 0:
                raise ConfigError(
                    f"finetune got {name}={value!r}; allowed: 0 or more.", code="RQ101"
                )
        if self.metric is not None:
            check_metric(self.metric)

    @property
    def interval(self) -> int:
        """Steps between two evaluations. By default a tenth of all steps."""
        return self.evaluate_every or max(1, self.steps // 10)

    @property
    def most_items(self) -> int:
        """Number of items that one pass of the training reads at most."""
        return max(self.steps, self.reconstruction)

    def check_validation(self, held: Sequence[Any]) -> None:
        """Check that there is validation data for what needs it. `held`: items held back.

        Raises:
            ConfigError: there is none.
        """
        needed = self.metric is not None or self.patience is not None
        if needed and self.validation_dataset is None and not held:
            raise ConfigError(
                "finetune got a metric or patience but no validation data to measure on. Pass "
                "validation_dataset=, a data set that is not used for training; or at least "
                f"{FEWEST_ITEMS} items, and as many steps that read them, with hold_back=True.",
                code="RQ102",
            )


class TrainingData:
    """A data set to train on: checked inputs, and separately the other contents of its items.

    Attributes:
        dataset: The inputs only, without what is held back.
        held: Inputs of the items that are held back from training, to choose the best state.
    """

    def __init__(self, batches: Any, inputs: Sequence[InputInfo], most: int | None = None) -> None:
        """Open the data.

        Args:
            batches, inputs: As for `open_dataset`.
            most: Of so many first items some are held back. None: no item is.
        """
        self.names = {info.name for info in inputs}
        self.extras: dict[str, Any] = {}
        is_plain = isinstance(batches, str | Path | Mapping | Dataset) or is_array(batches)
        plain = open_dataset(batches, inputs) if is_plain else None
        self.open = open_iterable(batches) if plain is None else plain.__iter__
        self.places: frozenset[int] = frozenset()
        self.dataset = plain or open_dataset(self.split, inputs)
        self.held: list[dict[str, np.ndarray]] = []
        if most is None:
            return
        found = choose_held(itertools.islice(self.dataset, most))
        self.places, self.held = frozenset(found), list(found.values())
        if found:
            self.dataset = open_dataset(self.split, inputs)

    def split(self) -> Iterator[Any]:
        """Yield the items reduced to inputs. The rest is kept in `extras`."""
        for place, item in enumerate(self.open()):
            if place in self.places:
                continue
            self.extras = {}
            if isinstance(item, Mapping):
                self.extras = {k: v for k, v in item.items() if k not in self.names}
                item = {k: v for k, v in item.items() if k in self.names}
            yield item

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Yield (inputs, complete item). Starts again when the data ends."""
        while True:
            for batch in self.dataset:
                yield batch, {**batch, **self.extras}


def choose_held(items: Iterable[dict[str, np.ndarray]]) -> dict[int, dict[str, np.ndarray]]:
    """Return every tenth item, by place; of 4 to 9 items the last one, of fewer none.

    Spread over the data, because it may be sorted. Copied, because a loader may fill the same
    arrays again.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
    place, last = -1, {}
    for place, item in enumerate(items):
        is_chosen = place % HELD_BACK == HELD_BACK - 1
        if is_chosen or not found:
            last = {name: array.copy() for name, array in item.items()}
        if is_chosen:
            found[place] = last
    return {place: last} if not found and place + 1 >= FEWEST_ITEMS else found
