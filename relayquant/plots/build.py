"""After the data flow: float module, integer module and data -> a report that people look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from relayquant.analysis.sensitivity import Metric, check_metric
from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback, CallbackList
from relayquant.base.storage.files import check_writable, write_text
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError
from relayquant.plots.collect import ReportData, ReportSettings, collect_report
from relayquant.plots.page import check_installed, describe_report, frame_page, render_report


@dataclass(frozen=True, eq=False)
class Report:
    """What `relayquant.report` measured, as one HTML page.

    Attributes:
        data: The measured values.
        html: The page: nothing else is needed to read it, no network and no other file.
    """

    data: ReportData = field(repr=False)
    html: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the page.

        Raises:
            FileError: it cannot be written.
        """
        check_writable(Path(path))
        write_text(Path(path), self.html)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        return frame_page(self.html)

    def __str__(self) -> str:
        """The summary, a line for each number."""
        return "\n".join(f"{what}: {value}" for what, value in describe_report(self.data).items())


@check_arguments
def report(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    qmod: tvm.IRModule,
    dataset: Any,
    *,
    metric: Metric | None = None,
    latency: bool = False,
    other: tvm.IRModule | None = None,
    samples: int = 32,
    rank: bool = True,
    backend: BackendConfig | str | None = None,
    title: str = "relayquant report",
    callbacks: Iterable[Callback] | Callback = (),
) -> Report:
    """What quantization did to a model: where the error is, what stayed in float, what takes time,
    and what to try. `report.save("report.html")` writes it.

    Args:
        mod: The float module, as it was given to `quantize`.
        params: Parameters of the float module; None if they are bound.
        qmod: What `quantize` made of it.
        dataset: As for `quantize`.
        metric: As for `quantize`; measured on all of the data.
        latency: Compile both modules for this machine, and time them and each kernel.
        other: Another quantized module of the same float module, to be shown beside it.
        samples: Everything but the metric is measured on the first batches that hold so many.
        rank: Also quantize each operator alone, which calibrates once more (with effort "fast"), to
            rank operators by what they cost, and to find what is worth keeping in float.
        backend: The BackendConfig of `qmod`, where it is none of the built-in ones.
        title: Heading of the page.
        callbacks: Told of progress.

    Raises:
        MissingDependencyError: Jinja2, grandalf or matplotlib is not installed.
        ModelError: `qmod` was not made from `mod`.
        ConfigError: `samples` < 1, or the metric returns no number.
        DataError: the data does not fit the model.
    """
    if samples < 1:
        raise ConfigError(f"report: samples is {samples}; allowed: 1 or more.", code="RQ101")
    if metric is not None:
        check_metric(metric)
    check_installed()
    settings = ReportSettings(metric, latency, other, samples, rank, backend, title)
    data = collect_report(mod, qmod, dataset, params, settings, CallbackList.of(callbacks))
    return Report(data, render_report(data))
