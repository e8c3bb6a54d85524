"""Agreement of two models: the same words wherever it is shown, and numbers that numpy confirms."""

from __future__ import annotations

import numpy as np
import pytest

from relayquant.analysis.outputs import GapSums, find_agreement
from relayquant.ir.agreement import Agreement
from relayquant.ir.ledger import GuardResult


@pytest.mark.parametrize(
    ("agreement", "text"),
    [
        (
            Agreement(25.46, 40, 40, 39),
            "25.5 dB SQNR, 39 of 40 answers equal (97.5%), on 40 samples",
        ),
        (
            Agreement(25.5, 4, total=40, held_back=3),
            "25.5 dB SQNR, on 4 of 40 samples (3 held back, 1 calibrated with)",
        ),
        (
            Agreement(15.0, 8, total=8, held_back=0, is_validation=True),
            "15.0 dB SQNR, on 8 validation samples",
        ),
        (Agreement(15.0, 1, is_simulated=True), "15.0 dB SQNR, simulated, on 1 sample"),
        (Agreement(float("inf"), 2), "no difference, on 2 samples"),
        (Agreement(float("-inf"), 2), "NaN or infinity, on 2 samples"),
    ],
)
def test_agreement__words(agreement: Agreement, text: str) -> None:
    assert str(agreement) == text


def test_find_agreement__worst_output_over_all_batches() -> None:
    rng = np.random.default_rng(0)
    scores, signal = rng.normal(size=(2, 6, 5)), rng.normal(size=(2, 6, 3, 4))
    others = scores + 0.3 * rng.normal(size=scores.shape), signal + 0.1
    sums = GapSums([0, 0])
    for i in range(2):
        sums.update([scores[i], signal[i]], [others[0][i], others[1][i]], 6)
    found = find_agreement(sums.gaps, 12)
    sqnr = [
        10 * np.log10(np.square(a).sum() / np.square(a - b).sum())
        for a, b in zip((scores, signal), others, strict=True)
    ]
    assert found.sqnr == pytest.approx(min(sqnr))
    assert (found.answers, found.samples) == (12, 12)
    assert found.equal == np.count_nonzero(scores.argmax(-1) == others[0].argmax(-1))
    assert sums.gaps[1].largest == pytest.approx(0.1)


def test_guard_result__says_what_agreement_says() -> None:
    seen = GuardResult(8, 20.0, 0.25, total=32, held_back=8, tuned=0, answers=8, equal=6)
    assert str(seen.agreement) == (
        "20.0 dB SQNR, 6 of 8 answers equal (75.0%), on 8 of 32 samples (8 held back)"
    )
    assert str(seen) == f"guard: {seen.agreement}; 25.0% of the answers clearly different"
