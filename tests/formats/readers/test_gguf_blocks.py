"""Blocks of GGUF as grouped weights, against the package's own dequantization, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from relayquant.errors import ModelError
from relayquant.formats.readers.gguf import blocks
from relayquant.formats.readers.gguf.blocks import BLOCK_KINDS, read_blocks
from relayquant.formats.readers.gguf.header import KINDS

gguf = pytest.importorskip("gguf")
#: Where the float16 numbers of a block begin.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip


def draw_blocks(stored, rows, features, seed=0):
    """Any bytes are blocks, with float16 numbers that are finite."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * features // stored.values, stored.size)).astype("uint8")
    for at in HALVES.get(stored.name, (0,)):
        raw[:, at : at + 2] = rng.normal(size=(len(raw), 1)).astype("float16").view("uint8")
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: KINDS[kind].name)
def test_read_blocks__values_are_those_of_the_package(kind, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 1024)  # several chunks of rows
    stored, form, shape = KINDS[kind], BLOCK_KINDS[kind], (5, 512)
    own = gguf.GGMLQuantizationType[stored.name]
    assert (int(own), gguf.GGML_QUANT_SIZES[own]) == (kind, (stored.values, stored.size))
    raw = draw_blocks(stored, *shape)
    if stored.name == "MXFP4":
        raw[0, :: stored.size] %= 2  # scales that are subnormal
    weight = read_blocks(raw.reshape(-1), kind, shape)
    np.testing.assert_array_equal(weight.decode(), gguf.quants.dequantize(raw, own))
    assert weight.group_size == form.group_size
    assert weight.format.bits == form.bits


def test_read_blocks__refuses_other_kinds_and_sizes():
    raw = np.zeros(36, "uint8")
    with pytest.raises(ModelError, match=r"type 16; allowed: Q4_0 \(2\), .*Q6_K \(14\)"):
        read_blocks(raw, 16, (1, 64))
    for shape in ((1, 32), (3, 32), (2, 33)):
        with pytest.raises(ModelError, match="36 bytes; allowed: rows of whole blocks, 18 bytes"):
            read_blocks(raw, 2, shape)
