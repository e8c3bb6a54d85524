"""The report: every number of the measurements is on the page, and nothing else is needed."""

from __future__ import annotations

import base64
import builtins
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import tvm
from float_models import build_model, draw_batches
from hostile_names import HOSTILE
from tvm.relax import op

import relayquant as rq
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.ir.rewrite import Graph
from relayquant.plots import collect, times
from relayquant.plots.collect import suggest_float
from relayquant.plots.operator_views import find_sources
from relayquant.plots.page import encode_image
from relayquant.plots.terminal_table import shorten_middle
from relayquant.plots.worst_samples import draw_image


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts, as Python's own reader sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def elements(report):
    return Elements(report.html)


@pytest.mark.slow
def test_report__names_are_text_only(elements, report):
    assert len(elements.scripts) == 2, "the data and our own"
    handlers = [a for _, attributes in elements.tags for a in attributes if a.startswith("on")]
    assert not handlers
    rows = json.loads(elements.scripts[0])
    assert [row["name"] for row in rows] == [row.name for row in report.data.ledger.rows]
    assert {name for row in rows for name in [row["name"]]} >= set(HOSTILE[:2])
    assert "<b>hostile" not in report.html


@pytest.mark.slow
def test_report__needs_nothing_else(elements, report):
    addresses = [
        value
        for _, attributes in elements.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action")
    ]
    assert addresses
    assert all(value.startswith(("#", "data:")) for value in addresses)
    assert not re.search(r"@import|url\((?!#)", report.html)


@pytest.mark.slow
def test_report__ids_are_unique_and_labels_lead_somewhere(elements):
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    inner = [name for name in ids if ids.count(name) > 1]
    assert not inner
    for _, attributes in elements.tags:
        assert attributes.get("aria-labelledby", ids[0]) in ids
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids


@pytest.mark.slow
def test_report__values_are_those_of_the_analysis(elements, report, hostile):
    mod, batches = hostile
    rows = {row["name"]: row for row in json.loads(elements.scripts[0])}
    for row in report.data.compare.rows:
        shown = rows[row.name]["sqnr"]
        if np.isfinite(row.sqnr):
            assert shown == pytest.approx(row.sqnr, rel=1e-3)
        else:
            assert shown == "exact"
    conv = rows[HOSTILE[0]]
    assert conv["macs"] == 4 * 8 * 8 * 3 * 9
    # The float model, as TVM itself runs it.
    main = tvm.relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"]
    expected = [main(tvm.runtime.tensor(batch["x"])).numpy() for batch in batches]
    last = rows[HOSTILE[2]]["histogram"]
    counts = np.histogram(np.concatenate(expected), 48, (last["low"], last["high"]))[0]
    assert sum(last["floating"]) == sum(array.size for array in expected)
    assert np.abs(np.array(last["floating"]) - counts).sum() <= 4, "a value on an edge may move"
    assert len(conv["weights"]["lowest"]) == conv["weights"]["channels"] == 4


def test_report__shares_scores_and_samples(report):
    data = report.data
    assert 0 < sum(view.row.quantized for view in data.operators) < len(data.operators)
    assert data.score.floating == 0.0
    assert data.score.integer < 0
    assert data.score.name == "closeness"
    assert [s.sqnr for s in data.samples] == sorted(s.sqnr for s in data.samples)
    assert all(image.shape == (8, 8, 3) for s in data.samples for image in s.images)
    assert {view.seconds is not None for view in data.operators} >= {True}
    assert "multiply-adds on integers: 100.0%" in str(report)
    assert {*data.latencies} == {"float", "int8", "other"}
    assert "time of a run, ms" in report.html
    assert "closeness: 0 in float" in str(report)


def test_encode_image__is_read_by_others():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype("uint8")
    file = io.BytesIO(base64.b64decode(encode_image(pixels).partition(",")[2]))
    np.testing.assert_array_equal(np.asarray(image.open(file)), pixels)


def test_report__edges_are_those_of_the_network(report):
    names = [view.row.name for view in report.data.operators]
    read = {
        view.row.name: {names[i] if isinstance(i, int) else f"input {i}" for i in view.inputs}
        for view in report.data.operators
    }
    assert read[HOSTILE[0]] == {"input x"}
    assert read["sum"] == {HOSTILE[0], HOSTILE[1]}
    assert read[HOSTILE[2]] == {"sum"}


def test_report__save_and_notebook(report, tmp_path):
    written = report.save(str(tmp_path / "report.html"))
    assert written == tmp_path / "report.html"
    assert written.read_text("utf-8") == report.html
    frame = Elements(report._repr_html_())
    ((tag, attributes),) = frame.tags
    assert tag == "iframe"
    assert attributes["srcdoc"] == report.html
    assert attributes["sandbox"] == "allow-scripts"
    with pytest.raises(rq.errors.FileError, match="no folder"):
        report.save(tmp_path / "no" / "report.html")


def test_make_report__says_what_is_wrong(hostile, monkeypatch):
    mod, batches = hostile
    with pytest.raises(rq.ModelError, match="carries no ledger"):
        rq.report(mod, None, mod, batches)
    with pytest.raises(rq.ConfigError, match="samples is 0"):
        rq.report(mod, None, mod, batches, samples=0)
    real = builtins.__import__

    for module, package in {"jinja2": "Jinja2", "grandalf": "grandalf"}.items():

        def refuse(name, missing=module):
            if name.startswith(missing):
                raise ImportError(name)
            return real(name)

        monkeypatch.setattr("relayquant.plots.page.import_module", refuse)
        message = rf"needs {package}.*pip install 'relayquant\[report\]'"
        with pytest.raises(rq.errors.MissingDependencyError, match=message):
            rq.report(mod, None, mod, batches)


def test_suggest_float__brings_what_it_says():
    """One bad value among good ones: it is found, and its mapping leaves only it in float."""

    def body(emit, x):
        y = x
        for i in range(8):
            y = emit(f"r{i}", op.nn.relu(emit.conv_bias(f"c{i}", y)))
        return y

    mod = build_model(body, (1, 4, 6, 6))
    batches = draw_batches(mod, 4)
    prepared = rq.prepare(mod, effort="fast")

    def pick(info, samples):
        low = min(float(array.min()) for array in samples)
        high = max(float(array.max()) for array in samples)
        return rq.choose_qparams(low, high * (30 if info.name == "r3" else 1), info.spec)

    prepared = rq.calibrate(prepared, batches, observer=pick)
    ranking = rq.sensitivity(prepared, batches)
    found = suggest_float(ranking, open_dataset(batches, describe_inputs(mod)))
    assert found is not None
    assert found.names == tuple(row.name for row in ranking.rows[: len(found.names)])
    assert found.after >= found.before + 3
    again = rq.prepare(
        mod, None, qconfig_mapping=rq.QConfigMapping.from_dict(found.mapping), effort="fast"
    )
    assert {op.name for op in again.plan.operators if not op.quantized} == set(found.names)


@pytest.mark.parametrize(
    ("shape", "drawn"),
    [
        ((3, 8, 9), (8, 9, 3)),
        ((8, 9, 1), (8, 9, 3)),
        ((1, 300, 200), (75, 50, 3)),
        ((4, 8, 8), None),
        ((3, 4, 4), None),
    ],
)
def test_draw_image__what_is_an_image(shape, drawn):
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    array.reshape(-1)[5] = np.nan
    image = draw_image(array)
    assert (None if image is None else image.shape) == drawn
    if image is not None:
        assert (image.min(), image.max()) == (0, 255)


def test_shorten_middle__keeps_both_ends():
    name = "backbone/stage4/block2/conv3/kernel"
    short = shorten_middle(name, 20)
    assert len(short) == 20
    first, last = short.split("…")
    assert name.startswith(first)
    assert name.endswith(last)
    assert shorten_middle("conv", 4) == "conv"


def test_repr_html__names_are_escaped(report, hostile):
    data = report.data
    for value in (data.ledger, data.compare, data.ranking):
        table = value._repr_html_()
        assert HOSTILE[0] not in table
        assert "&lt;/script&gt;" in table
        tags = {tag for tag, _ in Elements(table).tags}
        assert tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}


def test_find_sources__what_only_the_integer_module_has_stands_behind_its_input():
    """Channels of an input that differ much in range are scaled by an operator of ours."""
    mod = build_model(lambda emit, x: emit.dense("out", emit.dense("first", x, 8), 4), (4, 16))
    spread = np.geomspace(1e-2, 1e2, 16).astype("float32")
    batches = [{"x": batch["x"] * spread} for batch in draw_batches(mod, 4)]
    qmod = rq.quantize(mod, None, batches, effort="fast", guard=rq.config.Guard.OFF)
    ledger = rq.ledger(qmod)
    names = [row.name for row in ledger.rows]
    (added,) = [i for i, name in enumerate(names) if name.endswith("equalized")]
    graphs = Graph(rq.prepare(mod, effort="fast").mod), Graph(qmod)
    sources = find_sources(*graphs, ledger.rows)
    assert sources[added] == ("x",)
    assert sources[names.index("first")] == (added,)
    assert sources[names.index("out")] == (names.index("first"),)


@pytest.mark.slow
def test_make_report__compiles_for_this_machine_once(hostile, monkeypatch):
    """What is timed, looked into and scored is one executable of each model."""
    mod, batches = hostile
    qmod = rq.quantize(mod, None, batches, effort="fast", guard=rq.config.Guard.OFF)
    built = []
    real = times.compile

    def count(module, *args):
        built.append(len(module.functions))
        return real(module, *args)

    monkeypatch.setattr(times, "compile", count)
    monkeypatch.setattr(collect, "compile_draft", lambda module: pytest.fail("compiled again"))
    found = rq.report(
        mod, None, qmod, batches, metric=lambda a, b: 0.0, latency=True, rank=False
    ).data
    assert len(built) == 2
    assert {*found.latencies} == {"float", "int8"}
    assert found.score is not None
