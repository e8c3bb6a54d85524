"""The table of generation: its cells, perplexity, and the float Llama that it compares with."""

from __future__ import annotations

import math

import generation_table
import numpy as np
import pytest
from generation_engines import time_tokens
from llama_files import LENGTH, VOCABULARY, compute_scores, write_gguf
from speed_table import replace_table

RATES = dict.fromkeys(generation_table.RATES, 12.0) | {"load": 0.25}


def test_format_tables__rates_and_perplexity():
    entry = {
        "versions": ["engine 1"],
        "rates": {"1": {"relayquant": RATES}},
        "text": "a book",
        "perplexity": {"relayquant": 20.2, "float": 20.0},
    }
    lines = generation_table.format_tables({"a CPU": {"a model": entry}}).splitlines()
    assert "**a model on a CPU** (engine 1):" in lines
    assert "| relayquant | 1 | 0.25 | 12 | 12 | 12 | 12 | 12 |" in lines
    assert lines[-2:] == ["| relayquant | 20.200 | 1.00 |", "| float | 20.000 | 0.00 |"]


def test_pick_best__rates_high_times_low():
    other = {key: value + 1 for key, value in RATES.items()}
    best = generation_table.pick_best([RATES, other])
    assert best["prefill"] == 13
    assert best["memory"] == 12
    assert best["load"] == 0.25


def test_page__has_the_tables():
    text = generation_table.PAGE.read_text(encoding="utf-8")
    results = generation_table.read_results(generation_table.RESULTS)
    table = generation_table.format_tables(results)
    assert replace_table(text, table, "generation") == text


def test_time_tokens__seconds_since_the_start():
    class Engine:
        def iterate(self, prompt):
            yield from prompt

    times = time_tokens(Engine(), [*range(100)])
    assert len(times) == 33
    assert times == sorted(times)
    assert times[0] >= 0


def test_perplexity__of_a_model_that_knows_nothing():
    tokens = np.random.default_rng(0).integers(0, 50, 2000).tolist()
    found = generation_table.compute_perplexity(lambda window: np.zeros((len(window), 50)), tokens)
    assert math.isclose(found, 50)


def test_float_llama__scores_are_those_of_its_definition(tmp_path):
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "m.gguf")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, LENGTH)
    found = generation_table.FloatLlama(file.path).score(tokens.tolist())
    np.testing.assert_allclose(found, compute_scores(file.weights, tokens), rtol=1e-3, atol=1e-4)
