"""The table of networks that packages ship: its cells, its tasks, and processes that fail."""

from __future__ import annotations

import os
import signal
from importlib.metadata import PackageNotFoundError

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_onnx
from speed_table import replace_table

pytest.importorskip("openvino", reason="openvino is not installed")
pytest.importorskip("nncf", reason="nncf is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
import network_rows
import network_table


def test_format_entry__all_parts():
    entry = {"decibels": [31.84, 7.0], "task": 0.9921, "seconds": 12.4}
    assert network_table.format_entry(entry) == "31.8, 7.0; 99.2 % (12 s)"
    assert network_table.format_entry({"failure": "over 600 s"}) == "over 600 s"
    assert network_table.format_entry({"failure": f"Fail: {'of many words ' * 9}"}) == "fails"
    assert network_table.format_entry({}) == "-"


def test_format_table__rows_that_were_measured():
    entry = {"decibels": [20.0], "task": 1.0, "seconds": 3.0}
    table = network_table.format_table(
        {"versions": ["nncf 3"], "rows": {"MTCNN P": {"NNCF": entry}, "PLCMOS": {"NNCF": entry}}}
    )
    assert table.splitlines()[-4:] == [
        "| network | task | samples | fast | balanced | best | ONNX Runtime | NNCF |",
        "|---|---|---|---|---|---|---|---|",
        "| MTCNN P | same answers | 64 | - | - | - | - | 20.0; 100.0 % (3 s) |",
        "| PLCMOS |  | 16, 64 | - | - | - | - | 20.0; 100.0 % (3 s) |",
    ]


def test_list_versions__what_is_not_installed_stays(monkeypatch):
    def version(name: str) -> str:
        if name == "mediapipe":
            raise PackageNotFoundError(name)
        return "2"

    monkeypatch.setattr(network_table, "version", version)
    found = network_table.list_versions(["relayquant 1", "mediapipe 1", "no-such-package 1"])
    assert found[:4] == ["relayquant 2", "onnxruntime 2", "openvino 2", "nncf 2"]
    assert "mediapipe 1" in found
    assert "no-such-package 1" not in found


def test_page__is_written():
    """The page holds what docs/accuracy.json says."""
    results = network_table.read_results(network_table.RESULTS)
    text = network_table.PAGE.read_text(encoding="utf-8")
    table = network_table.format_table(results)
    assert replace_table(text, table, "networks") == text


def test_run_apart__result_error_and_end():
    assert network_table.run_apart(lambda: [1, 2], 60) == ([1, 2], None)
    assert network_table.run_apart(lambda: 1 / 0, 60) == (
        None,
        "ZeroDivisionError: division by zero",
    )
    ended = network_table.run_apart(lambda: os.kill(os.getpid(), signal.SIGXCPU), 60)
    assert ended == (None, "over 60 s")
    assert network_table.run_apart(lambda: os._exit(3), 60) == (None, "ended with code 3")


def test_measure_decibels__over_all_samples():
    real = [[np.full(4, 3.0)], [np.full(4, 1.0)]]
    got = [[np.full(4, 3.0)], [np.full(4, 2.0)]]
    assert network_table.measure_decibels(real, got) == [10.0]


def test_fix_shapes__of_a_sample():
    node = helper.make_node("Relu", ["x"], ["y"])
    made = make_onnx([node], {"x": ["N", 3, "H"]}, {"y": ["N", 3, "W"]})
    model = network_table.fix_shapes(made, {"x": np.zeros((1, 3, 8))})
    for value in (*model.graph.input, *model.graph.output):
        assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [1, 3, 8]
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(
    ("a", "b", "edits"), [([], [1], 1), ([1, 2, 3], [1, 3], 1), ([1, 2], [2, 1], 2), ([5], [5], 0)]
)
def test_count_edits__small_cases(a, b, edits):
    assert network_rows.count_edits(a, b) == edits


def test_tasks__compare_what_they_say():
    scores = np.eye(4)[[0, 1, 1, 0, 2, 3]]
    assert network_rows.read_text(scores) == [1, 2, 3]
    _, same_text = network_rows.same_text()
    assert same_text([scores], [scores[:4]]) == pytest.approx(1 / 3)
    _, same_places = network_rows.same_places(0.5)
    assert same_places([np.array([1, 1, 0.0])], [np.array([1, 0, 1.0])]) == pytest.approx(1 / 3)
    assert same_places([np.zeros(3)], [np.zeros(3)]) == 1
    _, same_answers = network_rows.same_answers(-1)
    assert same_answers([scores], [scores[[0, 1, 2, 3, 5, 4]]]) == pytest.approx(4 / 6)
