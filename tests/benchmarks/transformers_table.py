"""Encoders of `transformers` with random weights -> CPU seconds to quantize, and SQNR, beside NNCF.

    python tests/benchmarks/transformers_table.py bert vit

prints rows for the table in docs/coming_from/pytorch.md. Each tool runs in a process of its own,
and its imports are not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SAMPLES, CALIBRATED, LENGTH, IMAGE = 64, 48, 64, 64
TEXT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
VISION = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
TILES = {"image_size": IMAGE, "patch_size": 8}

Batch = tuple[torch.Tensor, ...]


class Encoder(torch.nn.Module):
    """A network of `transformers` that returns its last hidden state alone."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.inner(*values).last_hidden_state


def make_inner(name: str) -> torch.nn.Module:
    """Make a network with random weights."""
    import transformers as t  # pyright: ignore[reportMissingImports]
    from transformers.models.whisper import (  # pyright: ignore[reportMissingImports]
        modeling_whisper,
    )

    torch.manual_seed(0)
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "bert": lambda: t.BertModel(t.BertConfig(**TEXT, intermediate_size=1536, vocab_size=1000)),
        "distilbert": lambda: t.DistilBertModel(
            t.DistilBertConfig(dim=384, n_layers=6, n_heads=12, hidden_dim=1536, vocab_size=1000)
        ),
        "vit": lambda: t.ViTModel(
            t.ViTConfig(**VISION, **TILES, num_hidden_layers=12), add_pooling_layer=False
        ),
        "clip": lambda: t.CLIPVisionModel(
            t.CLIPVisionConfig(**VISION, **TILES, num_hidden_layers=6)
        ),
        "clip_text": lambda: t.CLIPTextModel(
            t.CLIPTextConfig(
                hidden_size=192,
                num_attention_heads=3,
                intermediate_size=768,
                num_hidden_layers=6,
                vocab_size=1000,
                **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
            )
        ),
        "whisper": lambda: modeling_whisper.WhisperEncoder(
            t.WhisperConfig(
                d_model=192,
                encoder_layers=4,
                encoder_attention_heads=3,
                encoder_ffn_dim=768,
                max_source_positions=100,
                num_mel_bins=40,
            )
        ),
    }
    return makers[name]()


def draw(name: str) -> list[Batch]:
    """Draw tokens with a mask, or noise."""
    rng = np.random.default_rng(1)
    if "bert" in name or "text" in name:
        mask = torch.ones(1, LENGTH, dtype=torch.int64)
        return [(torch.tensor(rng.integers(0, 1000, (1, LENGTH))), mask) for _ in range(SAMPLES)]
    shape = (1, 40, 200) if name == "whisper" else (1, 3, IMAGE, IMAGE)
    noise = (rng.standard_normal(shape).astype("float32") for _ in range(SAMPLES))
    return [(torch.from_numpy(each),) for each in noise]


def quantize_own(module: torch.nn.Module, data: list[Batch]) -> tuple[float, Callable[..., Any]]:
    """CPU seconds, and the function."""
    import tvm  # noqa: F401

    import relayquant as rq
    import relayquant.torch.exported

    start = time.process_time()
    qmod = rq.torch.quantize(module, data[0], data, callbacks=())
    seconds = time.process_time() - start
    exe = rq.Executor(rq.compile(qmod))
    return seconds, lambda *values: exe.run("main", list(values))[0]


def quantize_with_nncf(
    module: torch.nn.Module, data: list[Batch]
) -> tuple[float, Callable[..., Any]]:
    """CPU seconds, and the function."""
    import nncf
    import openvino as ov

    start = time.process_time()
    model = ov.convert_model(module, example_input=data[0])
    items = nncf.Dataset(data, lambda batch: [each.numpy() for each in batch])
    kind = nncf.ModelType.TRANSFORMER
    found = nncf.quantize(model, items, model_type=kind, subset_size=len(data))
    seconds = time.process_time() - start
    compiled = ov.compile_model(found, "CPU")
    return seconds, lambda *values: next(iter(compiled(list(values)).values()))


TOOLS = {"relayquant": quantize_own, "NNCF": quantize_with_nncf}


def measure(name: str, tool: str) -> str:
    """One cell: SQNR on the other samples, and CPU seconds."""
    torch.set_num_threads(1)
    module, data = Encoder(make_inner(name)).eval(), draw(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds, run = TOOLS[tool](module, data[:CALIBRATED])
    signal = noise = 0.0
    for batch in data[CALIBRATED:]:
        with torch.no_grad():
            want = module(*batch).numpy().astype("float64")
        got = np.asarray(run(*(each.numpy() for each in batch))).reshape(want.shape)
        signal, noise = signal + (want**2).sum(), noise + ((want - got) ** 2).sum()
    return f"{10 * np.log10(signal / noise):.1f} dB ({seconds:.1f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--tool", choices=TOOLS, help="measure one tool in this process")
    options = parser.parse_args()
    for name in options.networks:
        if options.tool:
            print(measure(name, options.tool))
            continue
        own = [sys.executable, str(Path(__file__)), name, "--tool"]
        runs = (subprocess.run([*own, tool], stdout=subprocess.PIPE, text=True) for tool in TOOLS)
        cells = [run.stdout.strip().splitlines()[-1] for run in runs]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
