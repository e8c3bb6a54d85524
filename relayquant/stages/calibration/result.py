"""Result of calibration: parameters, fitted constants and mergeable statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from relayquant.base.qtypes import QParams
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.files import reading
from relayquant.stages.calibration.shard import GroupObservation
from relayquant.stages.calibration.store import BEGIN_ANEW
from relayquant.stages.prepared import GroupStatistics, PreparedModel, TunedBatches

FORMAT = "relayquant.choices.1"


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """What calibration found: see `PreparedModel.parameters`, `.constants`, `.statistics`,
    `.observers` and `.tuned`.
    """

    parameters: dict[str, QParams]
    constants: dict[str, np.ndarray]
    statistics: dict[str, GroupStatistics] = field(default_factory=dict)
    observers: dict[str, str] = field(default_factory=dict)
    tuned: TunedBatches = field(default_factory=TunedBatches)

    def put_into(self, prepared: PreparedModel) -> PreparedModel:
        """The prepared model with what was found."""
        return replace(
            prepared,
            parameters=self.parameters,
            constants=self.constants,
            statistics=self.statistics,
            observers=self.observers,
            tuned=self.tuned,
        )

    def save(self, path: Path) -> None:
        """Write to a file that `load` reads. The file is never incomplete."""
        arrays = {f"constants/{key}": array for key, array in self.constants.items()}
        for key, seen in self.statistics.items():
            state = seen.state.to_arrays()
            arrays.update({f"statistics/{key}/{name}": array for name, array in state.items()})
        header = {
            "parameters": {key: value.to_dict() for key, value in self.parameters.items()},
            "constants": list(self.constants),
            "statistics": list(self.statistics),
            "observers": self.observers,
        }
        write_archive(path, FORMAT, Archive(header, arrays))

    @staticmethod
    def load(path: Path, observations: Mapping[str, GroupObservation]) -> CalibrationResult:
        """Read what `save` wrote. `observations` holds the observers, which are not in the file.

        Raises:
            DataError: the file is damaged.
        """
        statistics = {}
        with reading(path, "part of a calibration", advice=BEGIN_ANEW):
            found = read_archive(path, FORMAT, "part of a calibration")
            header, arrays = found.header, found.arrays
            for key in header["statistics"]:
                seen, prefix = observations[key], f"statistics/{key}/"
                own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
                statistics[key] = GroupStatistics(
                    seen.observer, seen.observer.restore(seen.info, own)
                )
            return CalibrationResult(
                {key: QParams.from_dict(value) for key, value in header["parameters"].items()},
                {key: arrays[f"constants/{key}"] for key in header["constants"]},
                statistics,
                dict(header["observers"]),
            )
