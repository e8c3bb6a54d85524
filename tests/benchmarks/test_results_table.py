"""The table of accuracy in README.md: cells of a row, from answers and labels."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("openvino", reason="openvino is not installed")
pytest.importorskip("nncf", reason="nncf is not installed")
from results_table import answer, measure_row, score

from relayquant.demo import load_digits


def make_case(labels):
    from real_models import Case

    demo = load_digits()
    images = demo.images[:40]
    return Case(demo.model_path, demo.calibration[:1], images, labels)


def test_score__of_known_labels_only():
    answers = np.array([1, 2, 3, 3])
    assert score(answers, make_case(np.array([1, 2, 3, 4]))) == "75.0"
    assert score(answers, make_case(None)) == ""


def test_answer__one_sample_at_a_time():
    def run(sample):
        assert sample["x"].shape == (1, 3)
        return [sample["x"] * -1]

    np.testing.assert_array_equal(answer(run, "x", np.array([[1, 2, 0], [0, 5, 9.0]])), [2, 0])


def test_measure_row__of_the_digits(monkeypatch):
    demo = load_digits()
    monkeypatch.setattr("results_table.COLUMNS", {"relayquant": "fast"})
    # A fork of a process that has run kernels cannot run any.
    monkeypatch.setattr("results_table.run_apart", lambda make, limit: (make(), None))
    count, real, own = measure_row(make_case(demo.labels[:40]))
    assert count == "40"
    assert float(real) >= 95
    assert own == f"{real} (100.0)"
