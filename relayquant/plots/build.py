"""Float module, integer module and data -> a report page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayquant.analysis.sensitivity import Metric, check_metric
from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback, CallbackList
from relayquant.base.storage.files import check_writable, write_text
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError
from relayquant.ir.rewrite.bind import Model, bind_model, split_model
from relayquant.plots.collect import collect_report
from relayquant.plots.page import check_installed, describe_report, frame_page, render_report
from relayquant.plots.report_data import ReportData, ReportSettings


@dataclass(frozen=True, eq=False)
class Report:
    """The result of `relayquant.report`: one HTML page.

    Attributes:
        data: The measured values.
        html: The page. It needs no network and no other file.
    """

    data: ReportData = field(repr=False)
    html: str = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page. Returns the path of the file.

        Raises:
            FileError: it cannot be written.
        """
        check_writable(Path(path))
        write_text(Path(path), self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        return frame_page(self.html)

    def __str__(self) -> str:
        """The summary, a line for each number."""
        return "\n".join(f"{what}: {value}" for what, value in describe_report(self.data).items())


@check_arguments
def report(
    mod: Model,
    params: Mapping[str, Any] | None,
    qmod: Model,
    dataset: Any,
    *,
    metric: Metric | None = None,
    latency: bool = False,
    other: Model | None = None,
    samples: int = 32,
    rank: bool = True,
    backend: BackendConfig | str | None = None,
    title: str = "relayquant report",
    callbacks: Iterable[Callback] | Callback = (),
) -> Report:
    """Measure what quantization did to a model: errors, operators left in float, time, suggestions.

    `report.save("report.html")` writes the page.

    Args:
        mod: The float module, as it was given to `quantize`.
        params: Parameters of the float module. None if they are bound.
        qmod: The result of `quantize` for `mod`.
        dataset: As for `quantize`.
        metric: As for `quantize`. Measured on all of the data.
        latency: Compile both modules for this machine and time them and each kernel.
        other: Another quantized module of the same float module, to compare with.
        samples: Everything except the metric is measured on the first batches with at least this
            number of samples.
        rank: Also quantize each operator alone. This ranks operators by the accuracy that they cost
            and suggests operators to keep in float. It calibrates once more, with effort "fast".
        backend: The BackendConfig of `qmod`, if it is not a built-in one.
        title: Heading of the page.
        callbacks: Called with progress.

    Raises:
        MissingDependencyError: Jinja2 or grandalf is not installed.
        ModelError: `qmod` was not made from `mod`.
        ConfigError: `samples` < 1, or the metric returns no number.
        DataError: the data does not fit the model.
    """
    rival = None if other is None else bind_model(other)
    settings = ReportSettings(metric, latency, rival, samples, rank, backend, title)
    return build_report(mod, params, qmod, dataset, settings, callbacks)


def build_report(
    mod: Model,
    params: Mapping[str, Any] | None,
    qmod: Model,
    dataset: Any,
    settings: ReportSettings,
    callbacks: Iterable[Callback] | Callback,
) -> Report:
    """Measure and render. Arguments and errors as for `report`."""
    if settings.samples < 1:
        raise ConfigError(
            f"report: samples is {settings.samples}; allowed: 1 or more.", code="RQ101"
        )
    if settings.metric is not None:
        check_metric(settings.metric)
    check_installed()
    mod, params = split_model(mod, params)
    data = collect_report(
        mod, bind_model(qmod), dataset, params, settings, CallbackList.of(callbacks)
    )
    return Report(data, render_report(data))
