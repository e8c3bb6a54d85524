"""What a run of the pipeline is told besides the model and the data, checked before anything takes
time.

Each setting is declared once, here: `takes_settings` shows it in the signatures of the public
functions, as an argument by name. What it means is said where users look: at
`relayquant.quantize`.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, get_type_hints, overload

import tvm

from relayquant.analysis.confidence import bound_share
from relayquant.analysis.outputs import OutputGap
from relayquant.analysis.sensitivity import Metric, check_metric
from relayquant.base.arguments import check_arguments, check_fields
from relayquant.base.events import Callback, CallbackList
from relayquant.base.qtypes import QParams
from relayquant.config import BackendConfig, ModelType, QConfigMapping
from relayquant.errors import ConfigError
from relayquant.stages.calibration.dispatch import WORKER_TIMEOUT
from relayquant.stages.calibration.passes import Order
from relayquant.stages.calibration.weights.fit import FitSettings
from relayquant.stages.effort import Effort, resolve_effort
from relayquant.stages.prepared import PreparedModel

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

#: how far a metric may fall by default: a point of an accuracy
MAX_DROP = 0.01


class Guard(enum.Enum):
    """What happens when the outputs of float and integer model part."""

    REVERT = "revert"  #: operators that cause it go back to float, with a warning
    WARN = "warn"  #: a warning names the first operator that is off
    OFF = "off"  #: nothing is run


@check_fields
@dataclass(frozen=True)
class GuardSettings:
    """When the guard says that outputs part, and what it does.

    Outputs part when the SQNR of one of them is below `min_sqnr`, or when more than `disagreement`
    of the samples get clearly another answer (`relayquant.analysis.outputs.count_differing`). What
    8 bits can give is 25 to 45 dB at the outputs of networks that quantize well; the worst one that
    still keeps most answers (MobileNet, ranges from the extremes, 97 % equal) has 15 dB. At 15 dB
    the error holds a thirtieth of the output's energy, at 10 dB a tenth. Both bounds are far from
    what is normal: the guard is for models that broke, not for the last points of accuracy; for
    those there is `quantize(..., metric=)`.

    The guard looks at a few samples, spread over the data, and then at twice as many, until it is
    settled whether outputs part: what they are not likely to fall below
    (`relayquant.analysis.outputs.OutputGap.least`) is above `min_sqnr`, or what they are not likely
    to exceed is below. Models that are cheap to run are looked at on so many samples, too, that
    damage to more than `doubtful_disagreement` of all samples is seen at a confidence of 95 %.

    Where outputs do not part, there is a warning of more than `doubtful_disagreement` other
    answers, or, of an output that holds no answers (boxes, a mask, a signal), of one that may be
    below `doubtful_sqnr` by what the samples tell, or is below `sample_sqnr` on one sample.

    Attributes:
        action: See `Guard`; None: WARN with effort "fast", else REVERT.
        samples: Samples that are compared, at most.
        work: Multiply-adds of the float model for all samples together that are spent in any case;
            at least 4 samples are compared. Up to 4 times as many are spent where it is not
            settled whether outputs part.
        min_sqnr: dB at an output, below which it parts.
        disagreement: Share of samples with another answer, above which an output parts.
        target_sqnr: dB that operators are put back to float for, once outputs parted.
        doubtful_sqnr, doubtful_disagreement, sample_sqnr: See above.
        search_work: Multiply-adds of the float model that finding these operators may take, about;
            it looks at fewer samples for that, the worst ones, one at least.
    """

    action: Guard | None = None
    samples: int = 128
    work: float = 1.5e9
    min_sqnr: float = 15.0
    disagreement: float = 0.5
    target_sqnr: float = 20.0
    doubtful_sqnr: float = 15.0
    doubtful_disagreement: float = 0.1
    search_work: float = 2e10
    sample_sqnr: float = 10.0

    def __post_init__(self) -> None:
        if self.action is not None and not isinstance(self.action, Guard):
            raise ConfigError(
                f"GuardSettings.action is {self.action!r}; allowed: a member of Guard, or None.",
                code="RQ101",
            )
        if self.samples < 1 or not self.work > 0 or not 0 < self.disagreement <= 1:
            raise ConfigError(
                f"GuardSettings: samples is {self.samples}, work {self.work} and disagreement "
                f"{self.disagreement}; allowed: samples >= 1, work > 0, 0 < disagreement <= 1.",
                code="RQ101",
            )
        if not self.search_work > 0 or not 0 <= self.doubtful_disagreement <= 1:
            raise ConfigError(
                f"GuardSettings: search_work is {self.search_work} and doubtful_disagreement "
                f"{self.doubtful_disagreement}; allowed: search_work > 0, 0 <= "
                "doubtful_disagreement <= 1.",
                code="RQ101",
            )
        if not self.min_sqnr <= self.target_sqnr:
            raise ConfigError(
                f"GuardSettings: min_sqnr is {self.min_sqnr} and target_sqnr {self.target_sqnr}; "
                "allowed: min_sqnr <= target_sqnr.",
                code="RQ102",
            )

    def find_action(self, effort: str) -> Guard:
        """What to do at a level of effort."""
        if self.action is not None:
            return self.action
        return Guard.WARN if effort == Effort.FAST.value else Guard.REVERT

    def is_parted(self, gaps: Sequence[OutputGap]) -> bool:
        """Whether one of the outputs is too far from the float model's."""
        return any(gap.sqnr < self.min_sqnr or gap.disagreement > self.disagreement for gap in gaps)

    def is_doubtful(self, gaps: Sequence[OutputGap]) -> bool:
        """Whether one of the outputs is so far from the float model's that users should know."""
        return any(
            gap.disagreement > self.doubtful_disagreement
            if gap.samples
            else gap.least < self.doubtful_sqnr or gap.worst < self.sample_sqnr
            for gap in gaps
        )

    def is_settled(self, gaps: Sequence[OutputGap]) -> bool:
        """Whether further samples are not likely to change whether outputs part."""
        answers = [bound_share(gap.differing, gap.samples) for gap in gaps if gap.samples]
        if any(gap.most < self.min_sqnr for gap in gaps):
            return True
        if any(least > self.disagreement for least, _ in answers):
            return True
        if any(gap.least < self.min_sqnr for gap in gaps):
            return False
        return all(most <= self.disagreement for _, most in answers)

    def is_covered(self, samples: int) -> bool:
        """Whether damage to many samples would show in so many, if it is in none of them."""
        return bound_share(0, samples)[1] <= self.doubtful_disagreement


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every run of stages is told.

    Attributes:
        callbacks: Who hears of it.
    """

    callbacks: Iterable[Callback] | Callback = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "callbacks", CallbackList.of(self.callbacks))  # read once

    @property
    def events(self) -> CallbackList:
        """`callbacks` as one."""
        return CallbackList.of(self.callbacks)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(RunSettings):
    """What `relayquant.prepare` is told besides model, data, mapping and backend.

    Raises:
        ConfigError: there is no such level of effort.
    """

    effort: Effort | str = Effort.BALANCED
    model_type: ModelType | None = None
    input_dtypes: Mapping[str | int, str] | None = None
    output_dtypes: Mapping[str | int, str] | None = None
    parameters: Mapping[str, QParams] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_effort(self.effort)

    @property
    def level(self) -> Effort:
        """`effort`, in whatever form it was given."""
        return resolve_effort(self.effort)

    @property
    def promises_integers(self) -> bool:
        """Whether no operator may go back to float after calibration."""
        return bool(self.input_dtypes or self.output_dtypes or self.strict)


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(RunSettings):
    """What `relayquant.calibrate` is told besides prepared model and data."""

    calibration: Any = None
    order: Order | None = None
    fit: FitSettings | None = None
    checkpoint: str | Path | None = None
    executor: futures.Executor | None = None
    worker_timeout: float | None = WORKER_TIMEOUT


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings(PrepareSettings):
    """What `relayquant.quantize` is told besides model and data.

    Raises:
        ConfigError: one of them is out of range, or two do not go together.
    """

    backend: BackendConfig | str | None = None
    qconfig_mapping: QConfigMapping | None = None
    calibration: Any = None
    checkpoint: str | Path | None = None
    executor: futures.Executor | None = None
    guard: Guard | GuardSettings | None = None
    metric: Metric | None = None
    max_drop: float = MAX_DROP
    budget: float | None = None
    validation: Any = None
    search_state: str | Path | None = None
    keep_faster: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_faster and self.promises_integers:
            raise ConfigError(
                "quantize(keep_faster=True) puts operators back to float: strict, input_dtypes and "
                "output_dtypes do not go with it.",
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
            "validation": self.validation is not None and self.guarding.action is Guard.OFF,
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
            if self.promises_integers or self.parameters or self.checkpoint or self.executor:
                raise ConfigError(
                    "quantize(metric=) quantizes several times and may put any operator back to "
                    "float: strict, input_dtypes, output_dtypes, parameters, checkpoint and "
                    "executor do not apply. Search without them, then quantize with "
                    "qconfig_mapping=QConfigMapping.from_dict(ledger(qmod).search.mapping) and "
                    "them.",
                    code="RQ102",
                )

    @property
    def guarding(self) -> GuardSettings:
        """`guard`, in whatever form it was given."""
        return self.guard if isinstance(self.guard, GuardSettings) else GuardSettings(self.guard)

    @property
    def calibrating(self) -> CalibrateSettings:
        """Those that are calibration's."""
        return CalibrateSettings(
            calibration=self.calibration,
            callbacks=self.callbacks,
            checkpoint=self.checkpoint,
            executor=self.executor,
        )


# --- Signatures -------------------------------------------------------------------------------


class OfModelAndData(Protocol[P, R_co]):
    """What `quantize` is to a type checker: its own arguments, then the settings."""

    def __call__(
        self,
        mod: tvm.IRModule,
        params: Mapping[str, Any] | None,
        dataset: Any,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R_co: ...


class OfModelAndMapping(Protocol[P, R_co]):
    """What `prepare` is to a type checker."""

    def __call__(
        self,
        mod: tvm.IRModule,
        params: Mapping[str, Any] | None = None,
        qconfig_mapping: QConfigMapping | None = None,
        backend_config: BackendConfig | str | None = None,
        dataset: Any = None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R_co: ...


class OfPreparedAndData(Protocol[P, R_co]):
    """What `calibrate` is to a type checker."""

    def __call__(
        self, prepared: PreparedModel, dataset: Any, *args: P.args, **kwargs: P.kwargs
    ) -> R_co: ...


@overload
def takes_settings(  # pyright: ignore[reportOverlappingOverload]
    kind: Callable[P, QuantizeSettings],
) -> Callable[[Callable[..., R_co]], OfModelAndData[P, R_co]]: ...


@overload
def takes_settings(
    kind: Callable[P, PrepareSettings],
) -> Callable[[Callable[..., R_co]], OfModelAndMapping[P, R_co]]: ...


@overload
def takes_settings(
    kind: Callable[P, CalibrateSettings],
) -> Callable[[Callable[..., R_co]], OfPreparedAndData[P, R_co]]: ...


def takes_settings(kind: Any) -> Any:
    """A function whose last argument is settings -> one that takes them by name, each checked
    against its annotation: `f(mod, settings)` -> `f(mod, *, effort=..., strict=...)`.

    `help`, completion, `inspect.signature` and type checkers see every one of them.
    """
    rows = {row.name: row for row in fields(kind)}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        *own, last = signature.parameters.values()
        named = [
            inspect.Parameter(name, last.KEYWORD_ONLY, default=row.default, annotation=row.type)
            for name, row in rows.items()
        ]

        @functools.wraps(function)
        def taking(*args: Any, **given: Any) -> Any:
            settings = kind(**{name: given.pop(name) for name in [*given] if name in rows})
            return function(*args, **given, **{last.name: settings})

        taking.__signature__ = signature.replace(parameters=[*own, *named])  # pyright: ignore[reportFunctionMemberAccess]
        # The settings' types are known in this module, the function's own in that of the function.
        taking.__annotations__ = {**get_type_hints(kind), **function.__annotations__}
        return check_arguments(taking)

    return decorate
