"""The table and the pictures of a comparison: every value is there, bad ones are named."""

from __future__ import annotations

import builtins
import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import relayquant as rq
from relayquant import cli
from relayquant.analysis.compare import CompareReport, CompareRow
from relayquant.analysis.sensitivity import SensitivityReport, SensitivityRow
from relayquant.analysis.speed.latency import Latency
from relayquant.demo import load_digits
from relayquant.plots.pictures import (
    collect_ranges,
    plot_error_by_depth,
    plot_latency,
    plot_ranges,
    plot_sensitivity,
)
from relayquant.plots.text import compare_table, make_console

PNG = b"\x89PNG\r\n"


def make_report() -> CompareReport:
    return CompareReport(
        (
            CompareRow("conv[0]", "nn.conv2d", True, 40.0, 40.0, 0.99999, 0.1, 0.01, 0.0),
            CompareRow("conv[1]", "nn.conv2d", True, 12.0, 12.5, 0.97, 3.0, 0.5, 0.25),
            CompareRow("softmax", "nn.softmax", False, float("inf"), None, 1.0, 0.0, 0.0, None),
        ),
        samples=8,
    )


def print_plain(table) -> list[list[str]]:
    file = io.StringIO()
    make_console(file).print(table)
    return [line.split() for line in file.getvalue().splitlines()]


@pytest.fixture(scope="module")
def prepared():
    demo = load_digits()
    mod, params = rq.load(str(demo.model_path))
    data = [np.concatenate(demo.calibration)[:32]]
    return rq.calibrate(rq.prepare(mod, params, effort="fast"), data), data


def test_compare_table__one_line_for_each_value():
    lines = print_plain(compare_table(make_report()))
    assert ["conv[1]", "conv2d", "12.0", "12.5", "0.97000", "3", "0.5", "25.00%"] in lines
    assert ["softmax", "softmax", "inf", "1.00000", "0", "0"] in lines
    assert ["first", "below", "15", "dB:", "conv[1]"] in lines
    assert ["3", "values,", "8", "samples"] in lines


@pytest.mark.parametrize("width", [80, 120])
def test_compare_table__on_a_terminal(width):
    row = make_report().rows[1]
    name = "backbone/stage4/unit_2/conv3"
    file = io.StringIO()
    Console(file=file, width=width).print(compare_table(CompareReport((replace(row, name=name),))))
    _, first, worst, head, _, line = file.getvalue().splitlines()
    assert name in first
    assert name in worst
    assert line.split()[0] == name, "not folded"
    assert line.split()[-1] == "25.00%"
    assert head.split()[-1] == "saturated"
    assert "SQNR [dB]" in head
    assert ("cosine" in head, "conv2d" in line) == (width > 80, width > 80)


@pytest.mark.slow
def test_plot_error_by_depth__writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot_error_by_depth(make_report(), tmp_path / "sqnr.png")
    assert (tmp_path / "sqnr.png").read_bytes().startswith(PNG)
    plot_error_by_depth(make_report(), tmp_path / "sqnr.svg")
    assert "<svg" in (tmp_path / "sqnr.svg").read_text()


def test_plot_error_by_depth__unknown_ending_and_empty_report_are_errors(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(rq.ConfigError, match=r"allowed: .*png"):
        plot_error_by_depth(make_report(), tmp_path / "sqnr.doc")
    with pytest.raises(rq.ConfigError, match="nothing to draw"):
        plot_error_by_depth(CompareReport(()), tmp_path / "sqnr.png")


def test_plot_error_by_depth__without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(rq.errors.MissingDependencyError, match=r"relayquant\[plot\]"):
        plot_error_by_depth(make_report(), tmp_path / "sqnr.png")


def test_collect_ranges__what_calibration_chose(prepared):
    model, data = prepared
    drawn = {found.name: found for found in collect_ranges(model, data)}
    assert set(drawn) == {group.key for group in model.plan.groups}
    image = drawn["image"]
    assert image.chosen == pytest.approx((0.0, 1.0), abs=0.01)
    assert image.counts.sum() == data[0].size
    assert image.outside == 0.0
    weights = [drawn[group.key] for group in model.plan.weights]
    assert all(found.unit == "steps" and found.chosen == (-127.0, 127.0) for found in weights)
    assert all(found.edges[0] >= -127.5 and found.edges[-1] <= 127.5 for found in weights)


def test_collect_ranges__counts_what_is_cut_off(prepared):
    model, data = prepared
    good = model.parameters["image"]
    small = rq.QParams(good.scale / 4, good.zero_point, good.dtype)
    broken = rq.PreparedModel(
        model.mod, model.plan, model.graph, model.backend, {**model.parameters, "image": small}
    )
    (found,) = collect_ranges(broken, data, names=["image"])
    assert found.outside == pytest.approx(np.mean(data[0] > 0.2505), abs=0.01)


@pytest.mark.slow
def test_plot_ranges__writes_a_picture(prepared, tmp_path):
    pytest.importorskip("matplotlib")
    model, data = prepared
    plot_ranges(model, data, tmp_path / "ranges.png", names=["image", "conv2/relu"])
    assert (tmp_path / "ranges.png").read_bytes().startswith(PNG)
    with pytest.raises(rq.ConfigError, match="no quantized value 'imagge'"):
        plot_ranges(model, data, tmp_path / "ranges.png", names=["imagge"])


@pytest.mark.slow
def test_command_compare__values_csv_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    demo = load_digits()
    np.savez(tmp_path / "data.npz", image=np.concatenate(demo.calibration)[:32])
    model, module = str(demo.model_path), str(tmp_path / "digits.json")
    data = ["--data", str(tmp_path / "data.npz")]
    assert cli.main(["quantize", model, *data, "-o", module]) == 0
    capsys.readouterr()
    outputs = ["--csv", str(tmp_path / "v.csv"), "--plot", str(tmp_path / "v.png")]
    assert cli.main(["compare", model, module, *data, "--values", "--all", *outputs]) == 0
    text = capsys.readouterr().out
    assert "conv2/relu" in text
    assert "largest error of one operator by itself" in text
    assert "conv2/relu" in (tmp_path / "v.csv").read_text()
    assert (tmp_path / "v.png").read_bytes().startswith(PNG)
    assert cli.main(["compare", model, module, *data, "--plot", str(tmp_path / "v.doc")]) == 2
    assert not (tmp_path / "v.doc").exists()


def test_plots__names_are_no_mathematics(tmp_path):
    """What is between dollar signs is a formula to matplotlib, which fails where it is none."""
    pytest.importorskip("matplotlib")
    name = "$\\frac{1}$"
    rows = (replace(make_report().rows[0], name=name), make_report().rows[1])
    plot_error_by_depth(CompareReport(rows), tmp_path / "depth.svg")
    ranking = SensitivityReport((SensitivityRow(name, "nn.conv2d", 3.0),), 2.0, "dB", 4, None)
    plot_sensitivity(ranking, tmp_path / "rank.svg")
    plot_latency({name: Latency(1e-3, 2e-3, 1e-3, 4)}, tmp_path / "time.svg")
    for path in tmp_path.iterdir():
        assert name in path.read_text()
    with pytest.raises(rq.ConfigError, match="rows is 0"):
        plot_sensitivity(ranking, rows=0)
