"""The table of training: its samples are drawn the same way each time, its page has a place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import training_table as table
from speed_table import find_marks

MEASURED = {"ResNet-20, 4/4": {"best": 90.0, "trained": 97.5}}


def test_format_table__share_of_the_gap():
    assert table.format_table(MEASURED, [*table.ROWS]).splitlines()[2:] == [
        "| ResNet-20, 4/4 | 90.0 | 97.5 | 75% |"
    ]


def test_page__has_a_place_for_the_table():
    text = table.PAGE.read_text(encoding="utf-8")
    assert [text.count(mark) for mark in find_marks("training")] == [1, 1]


def test_drawn__the_same_batches_in_each_pass():
    images = np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype("float32")

    def augment(images, rng):
        return table.mix(table.jitter(table.shift(images, 2, rng), 0.1, rng), 0.5, rng)

    samples = table.Samples(Path(), images, [], [], [], augment, batch=4)
    drawn = table.Drawn(samples, 3)
    first, second = [*drawn], [*drawn]
    assert [batch.shape for batch in first] == [(4, 3, 8, 8)] * 3
    assert first[0].dtype == np.float32
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first[0], first[1])


def test_crop__size_of_the_model():
    pytest.importorskip("torch", reason="pip install torch")
    images = np.random.default_rng(0).standard_normal((5, 3, 12, 12)).astype("float32")
    parts = table.crop(images, 8, 0.25, np.random.default_rng(0))
    assert parts.shape == (5, 3, 8, 8)


def test_rows__trained_and_tested_on_different_samples(shared_data):
    pytest.importorskip("PIL.Image", reason="Pillow decodes the JPEG images")
    for load in (table.load_resnet20, table.load_dscnn):
        samples = load(shared_data("kws_1000.npz").parent)
        known = {row.tobytes() for row in samples.train}
        validation, test = (np.concatenate(part) for part in (samples.validation, samples.test))
        assert not known & {row.tobytes() for row in validation}
        calibration = {row.tobytes() for row in np.concatenate(samples.calibration)}
        assert not calibration & {row.tobytes() for row in validation}
        # Of the keywords one recording is there twice.
        assert len(known & {row.tobytes() for row in test}) <= 1


def test_score_answers__higher_for_nearer_ones():
    pytest.importorskip("torch", reason="pip install torch")
    rng = np.random.default_rng(0)
    expected, noise = (rng.standard_normal((6, 10)).astype("float32") for _ in range(2))
    scores = [table.score_answers([expected], [expected + s * noise]) for s in (0, 0.1, 1)]
    assert scores[0] == pytest.approx(0, abs=1e-6)
    assert scores == sorted(scores, reverse=True)
