"""The numbers of what few bits cost: texts and tensors are read as they should be, a small Llama
passes all of it.
"""

from __future__ import annotations

import json

import accuracy_table as table
import numpy as np
import pytest
from llama_program import LlamaSizes, draw_weights

SIZES = LlamaSizes(width=32, hidden=48, layers=1, heads=2, groups=1, vocabulary=40, length=32)


def write_llama(path):
    """Random weights in the format of llama2.c."""
    weights, keys = draw_weights(SIZES), SIZES.head * SIZES.groups
    q, k, v = np.split(weights["layers.0.qkv.weight"], [SIZES.width, SIZES.width + keys])
    names = ("first", q, k, v, "out", "second", "gate", "down", "up")
    parts = [weights[f"layers.0.{n}.weight"] if isinstance(n, str) else n for n in names]
    parts = [weights["embedding.weight"], *parts, weights["norm.weight"]]
    head = np.array([getattr(SIZES, name) for name in SIZES.__dataclass_fields__], "<i4")
    path.write_bytes(head.tobytes() + b"".join(part.tobytes() for part in parts))
    return path


@pytest.fixture
def stories(tmp_path, monkeypatch):
    for name, value in (("FIT", 4), ("LENGTH", 16), ("POSITIONS", 24), ("GREEDY", 12)):
        monkeypatch.setattr(table, name, value)
    return table.Stories(write_llama(tmp_path / "stories.bin"))


@pytest.mark.slow
def test_stories__float_is_itself(stories):
    """It writes texts of the wanted size, and diverges nowhere from itself."""
    assert stories.fit.shape == (4, 16)
    assert stories.test.shape == (2, 16)
    writer = table.Writer(stories, stories.mod)
    assert stories.measure(writer.score, writer.count_same) == (
        "KL 0.00000, likeliest token 1.0000, 12 of 12 tokens"
    )


@pytest.mark.slow
def test_stories__compressed_diverges(stories):
    """By numpy's own sum of p log(p / q); a text ends with the first other token."""
    coarse = table.Writer(stories, table.rq.compress_weights(stories.mod, bits=2, group_size=16))
    found = np.concatenate([coarse.score(text) for text in stories.test])[:24]
    loss = np.mean(
        [(np.exp(p) * (p - q)).sum() for p, q in zip(stories.expected, found, strict=True)]
    )
    text = stories.measure(coarse.score, coarse.count_same)
    assert text.startswith(f"KL {loss:.5f}, ")
    assert loss > 0.01
    own = coarse.draw(13, None)
    same = int(np.argmin([*(a == b for a, b in zip(own, stories.greedy, strict=True)), False])) - 1
    assert text.endswith(f"{same} of 12 tokens")


def test_read_tensors__floats_of_a_file(tmp_path):
    minilm = pytest.importorskip("minilm", reason="pip install torch")
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    entries = {
        "__metadata__": {"format": "pt"},
        "ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
    }
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8) + values.tobytes())
    (name, tensor), *others = minilm.read_tensors(path).items()
    assert (name, others) == ("weight", [])
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_cut_words__the_longest_known_part_first():
    minilm = pytest.importorskip("minilm", reason="pip install torch")
    known = ["[UNK]", "un", "##want", "##wanted", "run", ",", "##n"]
    vocabulary = {word: i for i, word in enumerate(known)}
    assert [*minilm.cut_words("Unwanted, runn xyz", vocabulary)] == [1, 3, 5, 4, 6, 0]


def test_main__says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["x", "--stories", f"{tmp_path}/a", "--minilm", f"{tmp_path}/b"]
    )
    table.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["skipped:"] * 3
    assert all(str(tmp_path) in line for line in lines)
