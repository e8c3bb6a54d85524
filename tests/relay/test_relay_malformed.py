"""Damaged files: cut short, or with bytes flipped at random. Each gives a clear error or a module,
within the process and in short time.
"""

from __future__ import annotations

import numpy as np
import pytest
from legacy_json import conv_module

import relayquant as rq
from relayquant.errors import RelayQuantError
from relayquant.relay import encode_params

TEXT = """#[version = "0.0.5"]
def @main(%x: Tensor[(1, 2, 8, 8), float32] /* ty=t */, %w: Tensor[(4, 2, 3, 3), int8],
          %b: Tensor[(4), int32], %s: Tensor[(4), float32]) -> Tensor[(1, 3), float32] {
  %0 = qnn.quantize(%x, 0.05f, 3, out_dtype="int8");
  %1 = qnn.conv2d(%0, %w, 3, 0, 0.05f, %s, padding=[1, 1, 1, 1], channels=4, kernel_size=[3, 3],
                  out_dtype="int32");
  %2 = nn.bias_add(%1, %b);
  %3 = qnn.requantize(%2, %s, 0, 0.1f, -5, axis=1, rounding="UPWARD", compute_dtype="int64",
                      out_dtype="int8");
  let %pooled: Tensor[(1, 4, 4, 4), int8] = nn.max_pool2d(%3, pool_size=[2, 2], strides=[2, 2]);
  %4 = split(%pooled, indices_or_sections=2, axis=1);
  %5 = (%4.0, %4.1);
  %6 = concatenate(%5, axis=1);
  %7 = qnn.dequantize(%6, 0.1f, -5);
  %8 = fn (%y: Tensor[(1, 4, 4, 4), float32]) { mean(%y, axis=[2, 3]) };
  %9 = %8(%7);
  %10 = strided_slice(%9, begin=[0, 1], end=[1, 4], strides=[1], axes=[0, 1]);
  %11 = reshape(%10, newshape=[-1, 3]);
  nn.softmax(clip(%11, a_min=-6f, a_max=6f))
}
"""
PARAMS = {
    "w": np.arange(72, dtype="int8").reshape(4, 2, 3, 3),
    "b": np.arange(4, dtype="int32"),
    "s": np.array([0.1, 0.2, 0.3, 0.4], "float32"),
}

#: Kind of damaged file -> (files by name, the one that is damaged, the one that is loaded).
FILES = {
    "text": ({"m.relay": TEXT.encode(), "m.params": encode_params(PARAMS)}, "m.relay", "m.relay"),
    "json": ({"m.json": conv_module().encode()}, "m.json", "m.json"),
    "params": (
        {"m.relay": TEXT.encode(), "m.params": encode_params(PARAMS)},
        "m.params",
        "m.relay",
    ),
}
#: Of each format; 1,000 were run once.
FLIPS = 150


def load_damaged(folder, kind: str, data: bytes) -> bool:
    """Whether the damaged file still is a model; anything but a RelayQuantError is a failure."""
    files, damaged, loaded = FILES[kind]
    for name, content in files.items():
        (folder / name).write_bytes(data if name == damaged else content)
    message = load_message(folder / loaded)
    assert message is None or 10 < len(message) < 3000
    return message is None


def load_message(path) -> str | None:
    """What loading complains of."""
    try:
        rq.load(path)
    except RelayQuantError as error:
        return str(error)
    return None


def flip_bytes(data: bytes, seed: int) -> bytes:
    """One to four bytes changed: to anything, to a printable character, or a digit to another
    digit, which leaves a text one that can be parsed.
    """
    rng = np.random.default_rng(seed)
    changed = bytearray(data)
    digits = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    way = seed % 3
    for _ in range(rng.integers(1, 5)):
        if way == 0:
            changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
        elif way == 1:
            changed[int(rng.integers(len(changed)))] = int(rng.integers(32, 127))
        else:
            changed[int(rng.choice(digits))] = int(rng.integers(48, 58))
    return bytes(changed)


@pytest.mark.parametrize("kind", FILES)
def test_file__is_whole(kind, tmp_path):
    files, damaged, _ = FILES[kind]
    assert load_damaged(tmp_path, kind, files[damaged])


@pytest.mark.parametrize("kind", FILES)
def test_file__cut_short(kind, tmp_path):
    files, damaged, _ = FILES[kind]
    data = files[damaged].rstrip()
    for length in np.linspace(0, len(data) - 1, 25).astype(int):
        assert not load_damaged(tmp_path, kind, data[:length])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_file__bytes_flipped(kind, tmp_path):
    files, damaged, _ = FILES[kind]
    whole = sum(
        load_damaged(tmp_path, kind, flip_bytes(files[damaged], seed)) for seed in range(FLIPS)
    )
    assert whole < FLIPS


@pytest.mark.parametrize(
    "text",
    [
        "def @main() { zeros(shape=[4000000000, 4000000000, 4000000000]) }",
        "def @main(%x: Tensor[(99999999999999999999), float32]) { %x }",
        "def @main(%x: Tensor[(2147483647, 2147483647, 2147483647), int8]) { tile(%x, reps=[9]) }",
        "def @main(%x: Tensor[(4), float32]) { nn.pad(%x, pad_width=[[0, 9223372036854775807]]) }",
        "def @main(%x: Tensor[(4), float32]) { repeat(%x, repeats=9223372036854775807, axis=0) }",
        "def @main() { arange(0f, 1e30f, 1f) }",
        "def @main(%x: Tensor[(2147483647), int8]) { split(%x, indices_or_sections=2147483647) }",
        "def @main(%x: Tensor[(2147483647), int8]) { nn.mirror_pad(%x, pad_width=[[9, 9]]) }",
        "def @main(%x: float32) { " + "(" * 5000 + "%x" + ")" * 5000 + " }",
        "def @main(%x: float32) { %x" + " + %x" * 5000 + " }",
        "def @main(%x: float32) { %x" + ".0" * 5000 + " }",
        '"' * 10_001,
        "/*" * 10_001,
        "#[metadata]" * 1000,
    ],
    ids=range(14),
)
def test_text__absurd(text, tmp_path):
    (tmp_path / "m.relay").write_text(text)
    message = load_message(tmp_path / "m.relay")
    assert message is None or len(message) < 3000
