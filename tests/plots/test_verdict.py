"""The verdict of a report: the worst observation decides, and its commands can be pasted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relayquant.analysis.compare import CompareReport
from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.outputs import OutputGap
from relayquant.analysis.speed.latency import Latency
from relayquant.cli.parsers import parse_words
from relayquant.ir.ledger import Ledger, LedgerRow
from relayquant.plots.report_data import CommandWords, OperatorView, ReportData, Score, Suggestion
from relayquant.plots.verdict import Grade, Verdict

WORDS = CommandWords("m.onnx", "m.rqm", "photos --preprocess tflite", "m.so")
FOLLOWS = OutputGap(25.0, 0, 64, equal=63)
VIEW = OperatorView(LedgerRow("conv", "nn.conv2d", True, "conv2d", "int8"), macs=100)
DATA = ReportData(
    "m", Ledger((VIEW.row,)), (VIEW,), CompareReport((), 64, (FOLLOWS,)), (4, 1), (), words=WORDS
)
LINT = Finding(Severity.WARNING, "scale", "x", "they look too large.", "Divide by 255.")


def make_latency(best: float) -> Latency:
    return Latency(best, best, best, 1)


@pytest.mark.parametrize(
    ("changes", "grade", "text", "command"),
    [
        ({}, Grade.GOOD, "25.0 dB SQNR, 63 of 64 answers equal", "bench m.onnx m.rqm"),
        (
            {"compare": CompareReport((), 64, (replace(FOLLOWS, sqnr=9.0),))},
            Grade.STOP,
            "does not follow the float model: 9.0 dB SQNR",
            "--metric agreement",
        ),
        (
            {"compare": CompareReport((), 64, (replace(FOLLOWS, differing=32, equal=20),))},
            Grade.STOP,
            "20 of 64 answers equal",
            "--metric agreement",
        ),
        (
            {"compare": CompareReport((), 64, (OutputGap(18.0, margins=(5.0, 5.0)),))},
            Grade.LOOK,
            "only loosely: 18.0 dB SQNR",
            "--effort best",
        ),
        (
            {"compare": CompareReport((), 64, (FOLLOWS,), parts={"scores": OutputGap(9.0)})},
            Grade.LOOK,
            "only loosely: 25.0 dB SQNR, 63 of 64 answers equal (98.4%), on 64 samples; the part "
            "'scores' has 9.0 dB SQNR",
            "--metric agreement",
        ),
        ({"score": Score("top1", 0.8, 0.79, 100)}, Grade.GOOD, "top1 is 0.79", "export m.rqm"),
        ({"score": Score("top1", 0.8, 0.77, 100)}, Grade.LOOK, "a drop of 0.03", "agreement"),
        ({"score": Score("top1", 0.8, 0.5, 100)}, Grade.STOP, "a drop of 0.3", "agreement"),
        ({"findings": (LINT,)}, Grade.LOOK, "The data looks wrong (scale", "lint m.onnx --data"),
        (
            {"latencies": {"float": make_latency(1e-3), "int8": make_latency(2e-3)}},
            Grade.LOOK,
            "(0.50x)",
            "--only-if-faster",
        ),
        (
            {
                "score": Score("top1", 0.8, 0.5, 100),
                "suggestion": Suggestion(("a", "b"), 9.0, 20.0, {}),
            },
            Grade.STOP,
            "a drop",
            "--keep 2 -o kept.json",
        ),
    ],
)
def test_verdict__worst_observation_decides(changes, grade, text, command):
    verdict = Verdict.of(replace(DATA, **changes))
    assert verdict.grade is grade
    assert text in " ".join(seen.text for seen in verdict.observations)
    assert verdict.observations[0].grade is grade
    assert any(command in each for each in verdict.commands)
    for each in verdict.commands:
        first, *words = each.split()
        assert first == "relayquant"
        assert parse_words(words).command == words[0]


def test_verdict__a_module_that_is_in_no_file_is_written_first():
    verdict = Verdict.of(replace(DATA, words=replace(WORDS, is_written=False)))
    assert verdict.commands == (
        "relayquant quantize m.onnx --data photos --preprocess tflite -o m.rqm",
        "relayquant bench m.onnx m.rqm",
        "relayquant export m.rqm -o m.so",
    )
