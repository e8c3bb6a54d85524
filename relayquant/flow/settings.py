"""Settings of the pipeline: arguments of a public function -> one checked value, before anything
takes time.

Every field is a keyword argument of a public function. Its meaning is documented there, mostly at
`relayquant.quantize`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent import futures
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from relayquant.analysis.sensitivity import Metric, check_metric
from relayquant.base.events import Callback, CallbackList, SummaryLine
from relayquant.base.qtypes import QParams
from relayquant.config import (
    BackendConfig,
    Effort,
    FitSettings,
    Guard,
    GuardSettings,
    ModelType,
    Order,
    Precision,
    QConfigMapping,
)
from relayquant.config.observers import read_observer
from relayquant.errors import ConfigError
from relayquant.stages.calibration.dispatch import WORKER_TIMEOUT
from relayquant.stages.effort import resolve_effort

SettingsT = TypeVar("SettingsT", bound="RunSettings")
#: default for how far a metric may fall: one percentage point of accuracy
MAX_DROP = 0.01
#: what `quantize` calls if the user names nothing: one line at the end
DEFAULT_CALLBACKS: tuple[Callback, ...] = (SummaryLine(),)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that every run of stages has.

    Attributes:
        callbacks: Called with progress and choices.
    """

    callbacks: Iterable[Callback] | Callback = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "callbacks", CallbackList.of(self.callbacks))  # read once

    @classmethod
    def read_call(cls: type[SettingsT], arguments: Mapping[str, Any]) -> SettingsT:
        """Return the settings among the arguments of a public function, its `locals()` at the
        start. The function has an argument for each field.
        """
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def events(self) -> CallbackList:
        """`callbacks` as one object."""
        return CallbackList.of(self.callbacks)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(RunSettings):
    """The arguments of `relayquant.prepare` except model, data, mapping and backend.

    Raises:
        ConfigError: there is no such level of effort.
    """

    effort: Effort | str = Effort.BALANCED
    model_type: ModelType | None = None
    input_dtypes: Mapping[str | int, str] | None = None
    output_dtypes: Mapping[str | int, str] | None = None
    qparams: Mapping[str, QParams] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_effort(self.effort)

    @property
    def level(self) -> Effort:
        """`effort` as a member, whatever form was passed."""
        return resolve_effort(self.effort)

    @property
    def promises_integers(self) -> bool:
        """Whether no operator may be reverted to float after calibration."""
        return bool(self.input_dtypes or self.output_dtypes or self.strict)


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(RunSettings):
    """The arguments of `relayquant.calibrate` except prepared model and data."""

    observer: Any = None
    order: Order | None = None
    fit: FitSettings | None = None
    checkpoint: str | Path | None = None
    workers: futures.Executor | None = None
    worker_timeout: float | None = WORKER_TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "observer", read_observer(self.observer, "observer"))


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings(PrepareSettings):
    """The arguments of `relayquant.quantize` except model and data.

    Raises:
        ConfigError: one of them is out of range, or two of them contradict each other.
    """

    backend: BackendConfig | str | None = None
    qconfig_mapping: QConfigMapping | None = None
    observer: Any = None
    checkpoint: str | Path | None = None
    workers: futures.Executor | None = None
    guard: Guard | GuardSettings | None = None
    metric: Metric | None = None
    max_drop: float = MAX_DROP
    budget: float | None = None
    validation_dataset: Any = None
    search_state: str | Path | None = None
    only_if_faster: bool = False
    float_precision: Precision = Precision.FLOAT32
    callbacks: Iterable[Callback] | Callback = DEFAULT_CALLBACKS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "observer", read_observer(self.observer, "observer"))
        if self.only_if_faster and self.promises_integers:
            raise ConfigError(
                "quantize(only_if_faster=True) puts operators back to float: strict, input_dtypes "
                "and output_dtypes do not go with it.",
                code="RQ102",
            )
        if not self.max_drop >= 0 or not (self.budget is None or self.budget > 0):
            raise ConfigError(
                f"The search got max_drop={self.max_drop!r} and budget={self.budget!r}; allowed "
                "are max_drop >= 0 and budget > 0 seconds, or None.",
                code="RQ101",
            )
        given = {
            "max_drop": self.max_drop != MAX_DROP,
            "budget": self.budget is not None,
            "validation_dataset": self.validation_dataset is not None
            and self.guarding.action is Guard.OFF,
            "search_state": self.search_state is not None,
        }
        if self.metric is None and any(given.values()):
            raise ConfigError(
                f"quantize got {', '.join(name for name in given if given[name])} but no metric: "
                "without one nothing is searched. Pass metric=, a function (float outputs, "
                "quantized outputs) -> number.",
                code="RQ102",
            )
        if self.metric is not None:
            check_metric(self.metric)
            if self.promises_integers or self.qparams or self.checkpoint or self.workers:
                raise ConfigError(
                    "quantize(metric=) quantizes several times and may put any operator back to "
                    "float: strict, input_dtypes, output_dtypes, qparams, checkpoint and "
                    "workers do not apply. Search without them, then quantize with "
                    "qconfig_mapping=QConfigMapping.from_dict(ledger(qmod).search.mapping) and "
                    "them.",
                    code="RQ102",
                )

    @property
    def guarding(self) -> GuardSettings:
        """`guard` as settings, whatever form was passed."""
        return self.guard if isinstance(self.guard, GuardSettings) else GuardSettings(self.guard)

    @property
    def calibrating(self) -> CalibrateSettings:
        """The settings of calibration among these."""
        return CalibrateSettings(
            observer=self.observer,
            callbacks=self.callbacks,
            checkpoint=self.checkpoint,
            workers=self.workers,
        )
