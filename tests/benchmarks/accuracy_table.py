"""What few bits cost two trained transformers: numbers of docs/how_to/compress_weights.md and
docs/accuracy.md.

    python tests/benchmarks/accuracy_table.py [--stories FILE] [--minilm FOLDER] [--peers]

FILE is `stories260K.bin` of llama2.c; FOLDER has `model.safetensors` and `vocab.txt` of
all-MiniLM-L6-v2. What is missing is skipped, with a message.

stories260K, on texts that it wrote itself, 64 of 128 tokens to fit to and others to measure on: the
mean of KL(float || compressed) over 2,000 positions, the share of them with the likeliest token of
float, and how many of the 200 likeliest tokens behind token 1 are those of float. MiniLM-L6, on 500
texts, 128 others to fit to: the mean cosine to float's embeddings, and the rank correlation of
all similarities. With `--peers` also what NNCF and ONNX Runtime make of the same ONNX files and
data, where they are installed; needs torch for these and for MiniLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from llama_program import compute_angles, export_llama, make_mask, read_weights
from scipy.special import log_softmax
from scipy.stats import spearmanr
from tvm import relax

import relayquant as rq
from relayquant.flow.compression.sources import bind_params, open_params

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
#: Texts that are fitted to and tokens of each; positions that are measured on; tokens of the text.
FIT, LENGTH, POSITIONS, GREEDY = 64, 128, 2000, 200
#: Texts of MiniLM.
SENTENCES, FIT_SENTENCES = 500, 128
#: Columns of a weight for NNCF are a multiple of its groups.
GROUP = 32
ROWS = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)
AFFINE_ROWS = rq.QSpec("int8", is_dynamic=True, granularity=rq.config.Granularity.PER_ROW)

Array = np.ndarray
#: tokens (n,) -> logarithms of probabilities of the next token (n, vocabulary), float64
Score = Callable[[Array], Array]
#: ids (64,) -> embedding (384,)
Embed = Callable[[Array], Array]


# ---- stories260K ----


class Stories:
    """The float Llama, texts that it wrote, and what it says of them."""

    def __init__(self, path: Path) -> None:
        self.sizes, self.params = read_weights(path)
        mod = export_llama(self.sizes)
        self.mod = bind_params(mod, open_params(mod, self.params))
        write = Writer(self, self.mod)
        rng, others = np.random.default_rng(0), -(-POSITIONS // LENGTH)
        texts = [write.draw(LENGTH, rng) for _ in range(FIT + others)]
        self.fit, self.test = np.array(texts[:FIT]), np.array(texts[FIT:])
        self.expected = np.concatenate([write.score(text) for text in self.test])[:POSITIONS]
        self.greedy = write.draw(GREEDY + 1, None)

    def prepare(self, tokens: Array | list[int]) -> tuple[Array, ...]:
        """Arguments of prefill."""
        rest = *compute_angles(self.sizes, 0, len(tokens)), make_mask(len(tokens))
        return np.array([tokens], "int32"), *rest

    def measure(self, score: Score, count_same: Callable[[], int]) -> str:
        """A row of the table."""
        found = np.concatenate([score(text) for text in self.test])[:POSITIONS]
        share, expected = np.exp(self.expected), self.expected
        loss = (share * (expected - found)).sum(axis=-1).mean()
        same = (found.argmax(axis=-1) == expected.argmax(axis=-1)).mean()
        return f"KL {loss:.5f}, likeliest token {same:.4f}, {count_same()} of {GREEDY} tokens"

    def rows(self) -> Iterator[tuple[str, str]]:
        """(what was done, how it came out) for modules of ours."""
        # Likeliest tokens tell little of a model that is not sure: a file whose matrices are out of
        # order gives text of many bits for each token.
        entropy = -(np.exp(self.expected) * self.expected).sum(axis=-1).mean() / np.log(2)
        yield "float", f"{entropy:.2f} bits of surprise in each of its tokens"
        data, function = [self.prepare(text) for text in self.fit], "prefill"
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("8 bits, groups of 32", {"bits": 8}),
            ("8 bits, groups of 16", {"bits": 8, "group_size": 16}),
            ("8 bits, a scale and zero point for each output",
             {"bits": 8, "group_size": None, "is_symmetric": False}),
            ("8 bits, groups of 32, rows of integers", {"bits": 8, "activation": ROWS}),
        ]  # fmt: skip
        for bits in (4, 3):
            for scheme, affine in (("", {}), (", zero points", {"is_symmetric": False})):
                name, form = f"{bits} bits, groups of 32{scheme}", {"bits": bits, **affine}
                kinds.append((f"{name}, no data", form))
                kinds += [
                    (f"{name}, {effort}",
                     {**form, "dataset": data, "function": function, "effort": effort})
                    for effort in ("balanced", "best")
                ]  # fmt: skip
        for name, options in kinds:
            found = Writer(
                self, rq.compress_weights(self.mod, None, **{"activation": None, **options})
            )
            yield name, self.measure(found.score, found.count_same)

    def peers(self, path: Path, folder: Path) -> Iterator[tuple[str, str]]:
        """The same of NNCF, run by OpenVINO; all matrices of products in groups of 32."""
        import nncf
        import openvino as ov

        source = folder / "stories.onnx"
        export_stories(path, source)

        def load() -> Any:
            return transpose_weights(ov.Core().read_model(source))

        def measure(model: Any) -> str:
            config = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
            compiled = ov.Core().compile_model(model, "CPU", config)

            def score(tokens: Array) -> Array:
                scores = compiled(np.asarray(tokens, "int64")[None])[0][0]
                return log_softmax(scores.astype("float64"), axis=-1)

            def count_same() -> int:
                for i in range(1, GREEDY + 1):
                    if score(self.greedy[:i])[-1].argmax() != self.greedy[i]:
                        return i - 1
                return GREEDY

            return self.measure(score, count_same)

        yield "NNCF: float", measure(load())
        modes = nncf.CompressWeightsMode
        for mode in (modes.INT8_SYM, modes.INT8_ASYM):
            yield f"NNCF: {mode.name}", measure(nncf.compress_weights(load(), mode=mode))
        texts = [text[None].astype("int64") for text in self.fit]
        for mode in (modes.INT4_SYM, modes.INT4_ASYM, modes.INT3_SYM):
            for options in ({}, {"awq": True, "scale_estimation": True},
                            {"gptq": True, "scale_estimation": True}):  # fmt: skip
                given = {"dataset": nncf.Dataset(texts), "subset_size": FIT} if options else {}
                model = nncf.compress_weights(
                    load(), mode=mode, ratio=1.0, group_size=GROUP, **given, **options
                )
                how = " and ".join(options) or "no data"
                yield f"NNCF: {mode.name}, {how}", measure(model)


class Writer:
    """A compiled Llama that scores and writes texts."""

    def __init__(self, stories: Stories, mod: tvm.IRModule) -> None:
        self.stories = stories
        self.machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())

    def run(self, name: str, inputs: tuple[Array, ...], *past: Any) -> tuple[Array, Any]:
        """(scores, cache)"""
        scores, cache = self.machine[name](*map(tvm.runtime.tensor, inputs), *past)
        return scores.numpy()[0].astype("float64"), tuple(cache)

    def score(self, tokens: Array) -> Array:
        return log_softmax(self.run("prefill", self.stories.prepare(tokens))[0], axis=-1)

    def write(self, choose: Callable[[Array], int]) -> Iterator[int]:
        """Tokens behind token 1, without end."""
        scores, cache = self.run("prefill", self.stories.prepare([1]))
        for i in range(1, self.stories.sizes.length):
            token = choose(scores[-1])
            yield token
            angles = compute_angles(self.stories.sizes, i, 1)
            scores, cache = self.run("decode", (np.array([[token]], "int32"), *angles), cache)

    def draw(self, length: int, rng: np.random.Generator | None) -> list[int]:
        """A text of so many tokens, the first of them 1; the likeliest without a generator."""

        def choose(scores: Array) -> int:
            if rng is None:
                return int(scores.argmax())
            return int(rng.choice(len(scores), p=np.exp(log_softmax(scores))))

        return [1, *itertools.islice(self.write(choose), length - 1)]

    def count_same(self) -> int:
        """Of the likeliest tokens, those of float before the first other one."""
        for i, token in enumerate(self.write(lambda scores: int(scores.argmax()))):
            if i == GREEDY or token != self.stories.greedy[i + 1]:
                return i
        return GREEDY


def export_stories(path: Path, target: Path) -> None:
    """The same Llama as ONNX, by PyTorch, its hidden width up to whole groups with zeros."""
    import torch

    sys.path.insert(0, str(ROOT / "tests/models"))
    from llama import Llama

    model = Llama.read(path).eval()
    for block in model.blocks:
        extra = -block.gate.out_features % GROUP
        pads = (
            (block.gate, (0, 0, 0, extra)),
            (block.up, (0, 0, 0, extra)),
            (block.down, (0, extra)),
        )
        for linear, pad in pads:
            linear.weight = torch.nn.Parameter(torch.nn.functional.pad(linear.weight, pad))
    tokens = torch.ones((1, LENGTH), dtype=torch.int64)
    torch.onnx.export(
        model,
        (tokens,),
        str(target),
        input_names=["tokens"],
        output_names=["scores"],
        opset_version=17,
        dynamo=False,
        dynamic_axes={"tokens": {1: "n"}, "scores": {1: "n"}},
    )


def transpose_weights(model: Any) -> Any:
    """x by (K, N) -> x by the transpose of (N, K): what NNCF groups along K without fallback."""
    from openvino import opset13 as op

    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_b"]:
            continue
        weight = node.input_value(1).get_node()
        if weight.get_type_name() == "Constant" and len(weight.shape) == 2:
            turned = op.constant(np.ascontiguousarray(weight.data.T))
            product = op.matmul(node.input_value(0), turned, False, True)
            product.set_friendly_name(node.get_friendly_name())
            node.output(0).replace(product.output(0))
    model.validate_nodes_and_infer_types()
    return model


# ---- MiniLM-L6 ----


@dataclass(frozen=True, eq=False)
class Sentences:
    """An encoder as ONNX, texts, and float's embeddings of the first `SENTENCES`."""

    path: Path
    ids: Array
    expected: Array

    @property
    def fit(self) -> list[Array]:
        """Texts to fit to, (1, 64) each."""
        return [row[None] for row in self.ids[SENTENCES:]]

    def measure(self, embed: Embed) -> str:
        """A row of the table."""
        found = np.stack([embed(row) for row in self.ids[:SENTENCES]]).astype("float64")
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        pairs = np.triu_indices(SENTENCES, 1)
        rank = spearmanr((found @ found.T)[pairs], (self.expected @ self.expected.T)[pairs])[0]
        return f"cosine {(found * self.expected).sum(axis=1).mean():.5f}, ranks {rank:.5f}"

    def rows(self) -> Iterator[tuple[str, str]]:
        """(what was done, how it came out) for modules of ours."""
        mod, params = rq.load(self.path)
        data = [{"ids": row} for row in self.fit]
        spec = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL)
        config = rq.QConfig(
            rq.TensorConfig(AFFINE_ROWS), rq.TensorConfig(spec, rq.observers.MinMax())
        )
        rows = rq.QConfigMapping().set_object_type("relax.matmul", config, optional=True)
        transformer = rq.config.ModelType.TRANSFORMER
        kinds: list[tuple[str, Callable[[], tvm.IRModule]]] = [
            ("int8, transformer", partial(rq.quantize, mod, params, data, model_type=transformer)),
            ("int8", partial(rq.quantize, mod, params, data)),
            ("int8, rows", partial(rq.quantize, mod, params, None, qconfig_mapping=rows)),
            ("8 bits, rows of integers",
             partial(rq.compress_weights, mod, params, bits=8, activation=AFFINE_ROWS)),
        ]  # fmt: skip
        for scheme, affine in (("", {}), (", zero points", {"is_symmetric": False})):
            kinds += [
                (f"4 bits{scheme}, {how}",
                 partial(rq.compress_weights, mod, params, given, activation=None, **affine))
                for how, given in (("no data", None), ("balanced", data))
            ]  # fmt: skip
        for name, make in kinds:
            executor = rq.Executor(rq.compile(make()))
            yield name, self.measure(lambda row, run=executor.run: run("main", [row[None]])[0][0])

    def peers(self, folder: Path) -> Iterator[tuple[str, str]]:
        """The same of ONNX Runtime and NNCF."""
        if find_missing("onnxruntime"):
            return
        from onnxruntime import quantization as ort
        from onnxruntime.quantization.shape_inference import quant_pre_process

        texts = self.fit

        class Reader(ort.CalibrationDataReader):
            def __init__(self) -> None:
                self.rest = iter(texts)

            def get_next(self) -> Any:
                return next(({"ids": row} for row in self.rest), None)

        source, target = (str(folder / name) for name in ("prepared.onnx", "quantized.onnx"))
        quant_pre_process(str(self.path), source, skip_symbolic_shape=True)
        for each in (False, True):
            kind = {"per_channel": each, "weight_type": ort.QuantType.QInt8}
            name = "per channel" if each else "per tensor"
            ort.quantize_dynamic(source, target, **kind)
            yield f"ONNX Runtime: dynamic, {name}", self.measure(open_session(target))
            for what, types in (("all operators", None), ("products", ["MatMul"])):
                ort.quantize_static(
                    source, target, Reader(), quant_format=ort.QuantFormat.QDQ,
                    activation_type=ort.QuantType.QUInt8, op_types_to_quantize=types, **kind,
                )  # fmt: skip
                yield f"ONNX Runtime: QDQ, {what}, {name}", self.measure(open_session(target))
        if find_missing("nncf", "openvino"):
            return
        import nncf
        import openvino as ov

        model = ov.Core().read_model(self.path)
        model.reshape({"ids": [1, self.ids.shape[1]]})
        kind = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": FIT_SENTENCES}
        quantized = nncf.quantize(model, nncf.Dataset(texts), **kind)
        config = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = ov.Core().compile_model(quantized, "CPU", config)
        yield "NNCF: transformer", self.measure(lambda row: compiled(row[None])[0][0])


def open_session(path: str) -> Embed:
    """ONNX Runtime on one text."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda row: session.run(None, {"ids": row[None]})[0][0]


def read_sentences(folder: Path, scratch: Path) -> Sentences:
    """The encoder of a folder, and what PyTorch's own evaluation of it gives."""
    import minilm
    import torch

    minilm.export(folder, scratch / "minilm.onnx")
    ids = minilm.draw_texts(folder, SENTENCES + FIT_SENTENCES)
    model = minilm.MiniLm(minilm.read_tensors(folder / "model.safetensors")).eval()
    with torch.no_grad():
        expected = model(torch.tensor(ids[:SENTENCES])).double().numpy()
    return Sentences(scratch / "minilm.onnx", ids, expected)


def find_missing(*packages: str) -> bool:
    """Whether one of some packages is not installed, which is said."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    for name in missing:
        print(f"skipped: {name} is not installed", flush=True)
    return bool(missing)


def is_there(path: Path, *names: str) -> bool:
    """Whether a file, or files of a folder, are there; what is not is said."""
    missing = [each for each in (path / name for name in names) if not each.exists()]
    for each in missing:
        print(f"skipped: there is no {each}", flush=True)
    return not missing


def print_rows(title: str, rows: Iterator[tuple[str, str]]) -> None:
    """Each row as soon as it is known."""
    for name, text in rows:
        print(f"{title} | {name} | {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", type=Path, default=DATA / "more/stories260K.bin")
    parser.add_argument("--minilm", type=Path, default=DATA / "more/all-MiniLM-L6-v2")
    parser.add_argument("--peers", action="store_true", help="NNCF and ONNX Runtime as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if is_there(options.stories, ""):
            stories = Stories(options.stories)
            print_rows("stories260K", stories.rows())
            if options.peers and not find_missing("torch", "nncf", "openvino"):
                print_rows("stories260K", stories.peers(options.stories, Path(scratch)))
        if is_there(options.minilm, "model.safetensors", "vocab.txt") and not find_missing("torch"):
            sentences = read_sentences(options.minilm, Path(scratch))
            print_rows("MiniLM-L6", sentences.rows())
            if options.peers:
                print_rows("MiniLM-L6", sentences.peers(Path(scratch)))


if __name__ == "__main__":
    main()
