"""The table of perplexity: its cells, and the file that all rows begin with."""

from __future__ import annotations

import numpy as np
import perplexity_table
import pytest
from llama_files import write_gguf

import relayquant as rq


def test_page__has_the_table():
    text = perplexity_table.PAGE.read_text(encoding="utf-8")
    results = perplexity_table.read_results(perplexity_table.RESULTS)
    table = perplexity_table.format_table(results)
    assert perplexity_table.replace_table(text, table, "perplexity") == text


def test_format_table__size_and_distance_from_float():
    rows = {
        "float": {"size": 270.9, "perplexity": 20.0},
        "relayquant, 4 bits": {"size": 81.2, "perplexity": 20.5},
    }
    lines = perplexity_table.format_table({"a model": {"text": "a book", "rows": rows}})
    assert lines.splitlines()[0] == "**a model**, a book:"
    assert lines.splitlines()[4:7] == [
        "| float | 271 | 20.000 | 0.00 |",
        "| relayquant, 4 bits | 81 | 20.500 | 2.50 |",
        "",
    ]
    assert lines.splitlines()[7].startswith("Not measured yet: relayquant, 8 bits; relayquant, 8")


def test_write_float__matrices_become_float16(tmp_path):
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "m.gguf")
    perplexity_table.write_float(file.path, tmp_path / "float.gguf")
    found, given = rq.load_gguf(tmp_path / "float.gguf"), rq.load_gguf(file.path)
    assert set(found) == set(given)
    for name in given:
        exact = np.asarray(given[name])
        expected = exact.astype("float16").astype("float32") if exact.ndim == 2 else exact
        np.testing.assert_array_equal(found[name], expected)
    rq.load(tmp_path / "float.gguf", causal_lm=rq.CausalLMOptions())
