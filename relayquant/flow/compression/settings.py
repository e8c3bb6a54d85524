"""Settings of compression, checked before work begins: all arguments except model, parameters
and data.
"""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

from relayquant.base.arguments import check_fields
from relayquant.base.packing import CODE_BITS
from relayquant.base.qtypes import GROUP_SIZES, SCALE_DTYPES, Granularity, QSpec, Scheme
from relayquant.config import Effort
from relayquant.errors import ConfigError
from relayquant.flow.settings import RunSettings
from relayquant.stages.calibration.dispatch import check_executor
from relayquant.stages.effort import resolve_effort

#: Data of products as integers: a scale for each group of a row, as the weights have.
GROUPS_OF_ROWS = QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_GROUP, is_dynamic=True)


def find_data_group(activation: QSpec, group_size: int, features: int) -> int | None:
    """Return the elements of a row of data that share a scale. None: all of the row."""
    if activation.granularity is not Granularity.PER_GROUP or features % group_size:
        return None
    return group_size if group_size < features else None


@check_fields
@dataclass(frozen=True, kw_only=True)
class CompressSettings(RunSettings):
    """The arguments of `relayquant.compress_weights` except model, parameters and data.

    Raises:
        ConfigError: one of them is out of range, or two of them contradict each other.
    """

    bits: int = 4
    group_size: int | None = 32
    is_symmetric: bool = True
    scale_dtype: str = "float32"
    activation: QSpec | None = GROUPS_OF_ROWS
    embedding_bits: int | None = 8
    effort: Effort | str = Effort.BALANCED
    function: str | None = None
    max_loss: float | None = None
    max_size: int | None = None
    max_bits: float | None = None
    checkpoint: str | Path | None = None
    workers: futures.Executor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_effort(self.effort)
        if self.workers is not None:
            check_executor(self.workers)
        for name, bits in (("bits", self.bits), ("embedding_bits", self.embedding_bits)):
            if bits not in (CODE_BITS if name == "bits" else (None, *CODE_BITS)):
                raise ConfigError(
                    f"compress_weights: {name}={bits}; allowed: 2, 3, 4 or 8.", code="RQ101"
                )
        low, high = GROUP_SIZES
        if self.group_size is not None and not low <= self.group_size <= high:
            raise ConfigError(
                f"compress_weights: group_size={self.group_size}; allowed: {low} to {high}, or "
                "None for one scale for each output.",
                code="RQ101",
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise ConfigError(
                f"compress_weights: scale_dtype={self.scale_dtype!r}; allowed: "
                f"{', '.join(SCALE_DTYPES)}.",
                code="RQ101",
            )
        activation = self.activation
        if activation is not None and (
            not activation.is_dynamic
            or activation.dtype != "int8"
            or activation.granularity not in (Granularity.PER_ROW, Granularity.PER_GROUP)
        ):
            raise ConfigError(
                f"compress_weights: activation={activation!r}; allowed: None, or QSpec('int8', "
                "Scheme.SYMMETRIC, Granularity.PER_GROUP, is_dynamic=True), a scale for each group "
                "of a row of data, or with Granularity.PER_ROW, one for each row.",
                code="RQ101",
            )
        bounds = {
            name: bound
            for name in ("max_loss", "max_size", "max_bits")
            if (bound := getattr(self, name)) is not None
        }
        if len(bounds) > 1 or not all(bound > 0 for bound in bounds.values()):
            found = ", ".join(f"{name}={bound!r}" for name, bound in bounds.items())
            raise ConfigError(
                f"compress_weights: {found}; allowed: one of them, above 0.", code="RQ102"
            )

    @property
    def level(self) -> Effort:
        """`effort` as a member, whatever form was passed."""
        return resolve_effort(self.effort)
