"""Accuracy of int8 models on real data: the table of README.md.

    python tests/benchmarks/results_table.py FOLDER [--rows ROW ...]

FOLDER has the models and data that `tests/models/real_models.py` names. All columns of a row are
measured on the same samples, which nothing was calibrated with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from network_table import METHODS, Run, run_apart, run_float
from speed_table import head_table, write_table

import relayquant as rq
from relayquant.base.storage.files import open_temporary_folder

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/models"))

import real_models  # noqa: E402
from real_models import Case  # noqa: E402

PAGE = ROOT / "README.md"
#: What each tool does by default.
COLUMNS = {"relayquant": "balanced", "ONNX Runtime": "ONNX Runtime", "NNCF": "NNCF"}
ROWS: dict[str, Callable[[real_models.Find], Case]] = {
    "MobileNet 0.75 (ImageNet)": real_models.read_mobilenet,
    "ResNet-20 (CIFAR-10)": real_models.read_resnet20,
    "ResNet-8 (CIFAR-10, TFLite)": real_models.read_resnet8,
    "DS-CNN (keywords)": real_models.read_dscnn,
    "KWT-1 (keywords, transformer)": real_models.read_kwt1,
    "Magika (file types)": real_models.read_magika,
}
#: CPU seconds for each method.
LIMIT = 900


def answer(run: Run, name: str, samples: np.ndarray) -> np.ndarray:
    """The likeliest class of each sample."""
    return np.array([np.argmax(run({name: sample[None]})[0]) for sample in samples])


def find_input(path: Path) -> str:
    """Name of the only input of a model."""
    mod, _ = rq.load(path)
    return mod["main"].params[0].name


def measure_row(case: Case) -> list[str]:
    """Cells: how many samples, float, and each method."""
    name = find_input(case.model)
    calibration = [{name: sample[None]} for batch in case.calibration for sample in batch]

    def measure_float() -> np.ndarray:
        return answer(run_float(case.model), name, case.samples)

    expected, failure = run_apart(measure_float, LIMIT)
    if failure:
        raise SystemExit(failure)
    cells = [str(len(expected)), score(expected, case) or "no labels"]
    with open_temporary_folder() as folder:

        def measure(method: str) -> np.ndarray:
            load, _ = METHODS[method](case.model, calibration, folder)
            return answer(load(), name, case.samples)

        for method in COLUMNS.values():
            got, failure = run_apart(partial(measure, method), LIMIT)
            if failure:
                print(method, "|", failure, file=sys.stderr)
                cells.append("fails")
                continue
            same = 100 * np.mean(got == expected)
            cells.append(f"{score(got, case)} ({same:.1f})".strip())
    return cells


def score(answers: np.ndarray, case: Case) -> str:
    """Share of right answers in points; nothing if no labels are known."""
    return "" if case.labels is None else f"{100 * np.mean(answers == case.labels):.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    options = parser.parse_args(arguments)
    lines = head_table(["model", "samples", "float", *COLUMNS])
    for row in options.rows:
        lines.append(f"| {' | '.join([row, *measure_row(ROWS[row](options.folder.joinpath))])} |")
        print(lines[-1], flush=True)
    if options.rows == [*ROWS]:
        write_table(PAGE, "\n".join(lines), "accuracy")


if __name__ == "__main__":
    main()
