"""What a report measures and shows, as plain values. `collect` makes them, `page` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.accumulators import AccumulatorReport, AccumulatorRow
from relayquant.analysis.compare import CompareReport, CompareRow
from relayquant.analysis.linting.finding import Finding
from relayquant.analysis.sensitivity import Metric, SensitivityReport
from relayquant.analysis.speed.latency import Latency
from relayquant.config import BackendConfig
from relayquant.ir.ledger import Ledger, LedgerRow


@dataclass(frozen=True, eq=False)
class DrawnHistogram:
    """Histogram of one value in the float and in the integer model.

    Attributes:
        low, high: Ends of the range, which is divided into equal bins.
        floating, integer: Counts of some elements, (bins,) int64.
        chosen: The range that calibration chose. None for a float value.
    """

    low: float
    high: float
    floating: np.ndarray
    integer: np.ndarray
    chosen: tuple[float, float] | None


@dataclass(frozen=True, eq=False)
class WeightRanges:
    """Lowest and highest weight by output channel, (n,) float32.

    If there are more `channels` than are shown, neighbours are merged.
    """

    channels: int
    lowest: np.ndarray
    highest: np.ndarray


@dataclass(frozen=True)
class OperatorView:
    """All measurements of one operator.

    Attributes:
        row: Its row of the ledger.
        inputs: Positions of the operators whose results it reads, or names of model inputs.
        macs: Multiply-adds for one sample.
        error, histogram, weights, sums: None if there is nothing of this kind.
        score: dB at the outputs when only this operator is quantized. None if not measured.
        seconds: Time of its kernel. None if not measured, or if it is part of another operator's
            kernel.
        peak: Share of the integer peak that its kernel reaches. None if not measured, or if it sums
            no products of integers.
    """

    row: LedgerRow
    inputs: tuple[int | str, ...] = ()
    macs: int = 0
    error: CompareRow | None = None
    histogram: DrawnHistogram | None = None
    weights: WeightRanges | None = None
    sums: AccumulatorRow | None = None
    score: float | None = None
    seconds: float | None = None
    peak: float | None = None


@dataclass(frozen=True, eq=False)
class SampleView:
    """One sample: its position in the data, dB at the worst output, and its image inputs, (H,
    W, 3) uint8.
    """

    index: int
    sqnr: float
    images: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, eq=False)
class Suggestion:
    """Operators to keep in float, and dB at the outputs before and after."""

    names: tuple[str, ...]
    before: float
    after: float
    mapping: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Score:
    """The user's metric of both models, on all `samples` of the data."""

    name: str
    floating: float
    integer: float
    samples: int


@dataclass(frozen=True, eq=False)
class OtherView:
    """Another integer module of the same float model, on the same samples."""

    ledger: Ledger
    compare: CompareReport
    size: int
    score: Score | None = None


@dataclass(frozen=True)
class CommandWords:
    """The words of a command line that make a report's commands ready to be pasted.

    Attributes:
        model, qmodel: The files.
        data: The data, with `--preprocess` for pictures.
        library: The file that is proposed for the compiled model.
        is_written: Whether the quantized module's file exists.
    """

    model: str = "MODEL"
    qmodel: str = "QMODEL"
    data: str = "DATA"
    library: str = "model.so"
    is_written: bool = True


@dataclass(frozen=True, eq=False)
class ReportData:
    """What a report shows.

    Attributes:
        operators: In the order of the ledger.
        sizes: Bytes of the constants of the float and the integer module.
        latencies: Times of "float", "int8" and "other", if measured.
        no_ranking: Why there is no `ranking`.
        other: None if there is no other module to compare with.
        words: Of the commands on the page.
    """

    title: str
    ledger: Ledger
    operators: tuple[OperatorView, ...]
    compare: CompareReport
    sizes: tuple[int, int]
    samples: tuple[SampleView, ...]
    findings: tuple[Finding, ...] = ()
    score: Score | None = None
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    sums: AccumulatorReport | None = None
    ranking: SensitivityReport | None = None
    no_ranking: str = ""
    suggestion: Suggestion | None = None
    other: OtherView | None = None
    words: CommandWords = CommandWords()

    @property
    def shares(self) -> dict[str, float]:
        """The shares of operators and of multiply-adds on integers."""
        quantized = [view for view in self.operators if view.row.quantized]
        macs = sum(view.macs for view in self.operators)
        shares = {"operators": len(quantized) / max(len(self.operators), 1)}
        if macs:
            shares["multiply-adds"] = sum(view.macs for view in quantized) / macs
        return shares


@dataclass(frozen=True)
class ReportSettings:
    """What is measured in addition to the errors. See `relayquant.report`."""

    metric: Metric | None = None
    latency: bool = False
    other: tvm.IRModule | None = None
    samples: int = 32
    rank: bool = True
    backend: BackendConfig | str | None = None
    title: str = ""
    words: CommandWords = CommandWords()
