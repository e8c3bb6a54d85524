"""The table of perplexity: its cells, and the file that all rows begin with."""

from __future__ import annotations

import numpy as np
import perplexity_table
import pytest
from llama_files import write_gguf
from speed_table import replace_table

import relayquant as rq


def test_page__has_the_table():
    text = perplexity_table.PAGE.read_text(encoding="utf-8")
    results = perplexity_table.read_results(perplexity_table.RESULTS)
    table = perplexity_table.format_table(results)
    assert replace_table(text, table, "perplexity") == text


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


def test_format_table__texts_are_paragraphs_of_their_own():
    entry = {"text": "a book", "rows": {"float": {"size": 270.9, "perplexity": 20.0}}}
    lines = perplexity_table.format_table({"one": entry, "two": entry}).splitlines()
    assert lines[lines.index("**two**, a book:") - 1] == ""


def test_format_table__greedy_texts():
    rows = {
        "float": {"size": 270.9, "perplexity": 20.0},
        "relayquant, 8 bits": {
            "size": 81.2, "perplexity": 20.5, "greedy": [[200, None], [31, 0.004], [7, 0.25]]
        },
    }  # fmt: skip
    table = perplexity_table.format_table({"a model": {"text": "a book", "rows": rows}})
    assert "| relayquant, 8 bits | 1 | 31, 7 | 0.004, 0.250 |" in table


def test_compare_greedy__first_difference():
    exact = np.array([[0, 1, 3], [2, 1, 0], [0, 5, 4.5], [1, 0, 0]])
    texts = [([0, 2, 0, 1], 1), ([0, 2, 0, 2, 1], 1), ([1, 0, 2, 2], 2)]
    found = perplexity_table.compare_greedy(texts, lambda tokens: exact[: len(tokens)])
    assert found == [(3, None), (2, 0.5), (0, 2.0)]


def test_write_float__same_network_in_float16(tmp_path):
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "m.gguf")
    perplexity_table.write_float(file.path, path := tmp_path / "float.gguf")
    tokens = [1, 5, 9, 2, 40]
    found, given = (perplexity_table.FloatLlama(each) for each in (path, file.path))
    np.testing.assert_allclose(found.score(tokens), given.score(tokens), atol=0.02)
    for name, array in given.weights.items():
        assert not np.array_equal(array, found.weights[name])
        exact = array.astype("float16" if array.ndim == 2 else "float32").astype("float32")
        np.testing.assert_array_equal(np.sort(exact, None), np.sort(found.weights[name], None))
    exact = sum(each.size * (2 if each.ndim == 2 else 4) for each in given.weights.values())
    assert perplexity_table.count_stored(path) == exact
    rq.load(path, causal_lm=rq.CausalLMOptions())
