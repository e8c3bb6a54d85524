"""Times of products with int4 weights and of transformers in all engines, as the second table of
docs/speed.md.

    python tests/benchmarks/language_table.py [--rows "GEMV 4096x4096" ...] [--threads 1 2]
        [--folder DIR] [--without-amx]

Weights are random, 4 bits in groups of 32 or 128 with scales of 16 bits (of 32 in ONNX Runtime,
which has no others here); rows are quantized to int8 while the model runs (W4A8). ONNX Runtime has
`MatMulNBits` with accuracy_level 4, OpenVINO what `nncf.compress_weights` writes, and dynamic
quantization in such groups. A model is several products, each with an input and a weight of its
own, so that a GEMV has them come from memory; times are of one product. "bandwidth" reads as many
bytes as our kernel does and adds them up. The Llama is one ONNX file of float weights, and the same
with MatMulNBits: 4 layers, 2048 wide, hidden 5632, 16 heads, a vocabulary of 8192, static shapes;
decode takes one token behind a cache of 127. Encoders are in int8 (`encoders`).

Needs onnxruntime, openvino and nncf. Models are prepared in FOLDER (default: a temporary one), and
found there the next time. docs/language.json holds the times of each CPU. A measurement replaces
the measured rows of this CPU, or all rows of this CPU if the versions have changed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from encoders import (
    ENCODERS,
    Encoder,
    build_encoder,
    save_encoder_onnx,
    save_encoder_openvino,
)
from llama_onnx import Llama, llama_inputs, save_llama
from onnx import TensorProto, helper, numpy_helper
from speed_table import (
    Machine,
    Results,
    Times,
    add_machine_option,
    choose_machine,
    format_threads,
    head_table,
    list_threads,
    open_entry,
    read_results,
    read_times,
    write_results,
    write_table,
)
from tvm import relax
from tvm.script.ir_builder import tirx as T

from relayquant.analysis.speed.engines import Candidate, Engine, measure_engines
from relayquant.base.packing import count_bytes, count_groups
from relayquant.base.qtypes import Granularity, QSpec, Scheme
from relayquant.base.storage.files import open_temporary_folder, write_text
from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    build_kernel,
    ceil_div,
    constant,
    load_vector,
    store_vector,
)
from relayquant.flow.compression import compress_weights
from relayquant.formats.load import load
from relayquant.ir.dialect import qnn
from relayquant.stages.compilation import compile as compile_module

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/language.json", ROOT / "docs/speed.md"
GROUP, WIDE_GROUP, BITS = 32, 128, 4
#: What limits OpenVINO without AMX: to all other instructions. With a limit to VNNI it fails here.
WITHOUT_TILES = "AVX512_CORE_FP16"
ROWS_OF_INTEGERS = QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_ROW, is_dynamic=True)
#: Bytes that one thread of "bandwidth" reads at once, and vectors that it adds side by side
BLOCK, SUMS, LANES = 64 * 1024, 8, 16


@dataclass(frozen=True)
class Products:
    """`copies` products of rows (rows, features) with weights (units, features) of their own."""

    rows: int
    features: int
    units: int
    copies: int
    group: int = GROUP

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(f"x{i}" for i in range(self.copies))

    @property
    def weight_bytes(self) -> int:
        """Codes of 4 bits and scales of 16 of one product."""
        groups = count_groups(self.features, self.group)
        return self.units * (count_bytes(self.features, BITS) + 2 * groups)

    @property
    def operations(self) -> int:
        """Of one product; a multiply-add is two."""
        return 2 * self.rows * self.features * self.units


# ---------------------------------------------------------------- models


def build_own(products: Products, _: Path) -> tvm.IRModule:
    """quantize_rows and grouped_dense."""
    rng, units, features = np.random.default_rng(0), products.units, products.features
    group = products.group
    builder = relax.BlockBuilder()
    shape = (products.rows, features)
    inputs = [relax.Var(name, relax.TensorType(shape, "float32")) for name in products.inputs]
    with builder.function("main", inputs):
        with builder.dataflow():
            results = []
            for x in inputs:
                codes = rng.integers(0, 256, (units, count_bytes(features, BITS)), "uint8")
                scale = rng.uniform(0.01, 0.02, (units, count_groups(features, group)))
                pair = builder.emit(qnn.quantize_rows(x))
                rows = [builder.emit(relax.TupleGetItem(pair, i)) for i in range(2)]
                weight = [codes, scale.astype("float16"), np.uint8(1 << (BITS - 1))]
                call = qnn.grouped_dense(*rows, *map(relax.const, weight), BITS, group, features)
                results.append(builder.emit(call))
            result = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(result)
    return builder.finalize()


def build_reading(products: Products, _: Path) -> tvm.IRModule:
    """Sums over as many bytes, in blocks that threads share."""
    blocks = ceil_div(products.weight_bytes, BLOCK)
    words = BLOCK // 4

    def body() -> None:
        # Not read: without it results would be constants of the module.
        T.arg("x", T.Buffer((products.rows, products.features), "float32"))
        data = T.arg("data", T.Buffer((blocks * words,), "int32"))
        out = T.arg("out", T.Buffer((blocks * LANES,), "int32"))
        with T.parallel(blocks) as block:
            totals = alloc_vectors(SUMS, LANES)
            for total in totals:
                store_vector(total, constant("int32", 0, LANES), 0, LANES)
            with T.serial(words // (SUMS * LANES)) as step:
                for i, total in enumerate(totals):
                    at = block * words + (step * SUMS + i) * LANES
                    value = load_vector(total, 0, LANES) + load_vector(data, at, LANES)
                    store_vector(total, value, 0, LANES)
            value = load_vector(totals[0], 0, LANES)
            for total in totals[1:]:
                value = value + load_vector(total, 0, LANES)
            store_vector(out, value, block * LANES, LANES)

    func = build_kernel("read", body).without_attr("global_symbol")
    builder = relax.BlockBuilder()
    kernel = builder.add_func(func.with_attr("tirx.is_scheduled", True), "read")
    shape = (products.rows, products.features)
    inputs = [relax.Var(name, relax.TensorType(shape, "float32")) for name in products.inputs]
    with builder.function("main", inputs):
        with builder.dataflow():
            out = relax.TensorType((blocks * LANES,), "int32")
            results = []
            for i, x in enumerate(inputs):
                data = relax.const(np.full(blocks * words, i, "int32"))
                results.append(builder.emit(relax.call_tir(kernel, (x, data), out)))
            result = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(result)
    return builder.finalize()


def save_onnx(products: Products, folder: Path) -> Path:
    """One MatMulNBits for each product, random codes."""
    rng, group = np.random.default_rng(0), products.group
    groups = count_groups(products.features, group)
    nodes, constants = [], []
    for i, x in enumerate(products.inputs):
        codes = rng.integers(0, 256, (products.units, groups, group * BITS // 8), "uint8")
        scale = rng.uniform(0.01, 0.02, products.units * groups).astype("float32")
        constants += [
            numpy_helper.from_array(codes, f"b{i}"),
            numpy_helper.from_array(scale, f"s{i}"),
        ]
        form = {"K": products.features, "N": products.units, "bits": BITS, "block_size": group}
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                [x, f"b{i}", f"s{i}"],
                [f"y{i}"],
                domain="com.microsoft",
                accuracy_level=4,
                **form,
            )
        )

    def declare(names: Sequence[str], width: int) -> list[onnx.ValueInfoProto]:
        shape = (products.rows, width)
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in names]

    outputs = [f"y{i}" for i in range(products.copies)]
    graph = helper.make_graph(
        nodes,
        "products",
        declare(products.inputs, products.features),
        declare(outputs, products.units),
        constants,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    return folder / "model.onnx"


def save_openvino(products: Products, folder: Path) -> Path:
    """Float products, compressed by NNCF."""
    import openvino as ov
    from openvino import opset13

    rng, inputs, results = np.random.default_rng(0), [], []
    for name in products.inputs:
        x = opset13.parameter([products.rows, products.features], np.float32, name)
        x.output(0).get_tensor().set_names({name})
        weight = rng.standard_normal((products.units, products.features), "float32")
        inputs.append(x)
        results.append(opset13.matmul(x, opset13.constant(weight), False, True))
    model = ov.Model(results, inputs, "products")
    return compress_with_nncf(model, products.group, folder)


def compress_with_nncf(model: Any, group: int, folder: Path) -> Path:
    """Path of a model of OpenVINO with weights of 4 bits in groups."""
    import nncf
    import openvino as ov

    model = nncf.compress_weights(
        model, mode=nncf.CompressWeightsMode.INT4_SYM, ratio=1.0, group_size=group, all_layers=True
    )
    model.set_rt_info(str(group), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    ov.save_model(model, folder / "nncf.xml")
    return folder / "nncf.xml"


def build_llama(llama: Llama, folder: Path) -> tvm.IRModule:
    """The float ONNX file, compressed."""
    mod, params = load(write_float(llama, folder))
    return compress_weights(
        mod,
        params,
        bits=BITS,
        group_size=llama.group,
        scale_dtype="float16",
        activation=ROWS_OF_INTEGERS,
    )


def save_llama_onnx(llama: Llama, folder: Path) -> Path:
    save_llama(llama, llama.group, folder / "model.onnx")
    return folder / "model.onnx"


def save_llama_openvino(llama: Llama, folder: Path) -> Path:
    """The float ONNX file, compressed by NNCF."""
    import openvino as ov

    model = ov.Core().read_model(write_float(llama, folder))
    return compress_with_nncf(model, llama.group, folder)


def write_float(llama: Llama, folder: Path) -> Path:
    path = folder / "float.onnx"
    if not path.exists():
        save_llama(llama, None, path)
    return path


Spec = Products | Llama | Encoder


def draw_inputs(spec: Spec, folder: Path) -> dict[str, np.ndarray]:
    """What a run of a row takes, whose models lie in the folder."""
    if isinstance(spec, Encoder):
        return spec.draw_batches(folder, 1)[0]
    if isinstance(spec, Llama):
        return llama_inputs(spec)
    rng, shape = np.random.default_rng(0), (spec.rows, spec.features)
    return {name: rng.standard_normal(shape, "float32") for name in spec.inputs}


#: What makes the file of a rival, or our module, from a row and its folder
SaveRival = Callable[[Any, Path], Path]
BuildOwn = Callable[[Any, Path], tvm.IRModule]


@dataclass(frozen=True)
class Makers:
    """What makes the models of a row: modules of ours, and files of the rivals, by their names."""

    own: Mapping[str, BuildOwn]
    rivals: Mapping[Engine, SaveRival]


RIVALS: Mapping[Engine, SaveRival] = {
    Engine.ONNXRUNTIME: save_onnx,
    Engine.OPENVINO: save_openvino,
}
GEMM_MAKERS = Makers({"relayquant": build_own}, RIVALS)
GEMV_MAKERS = Makers({"relayquant": build_own, "bandwidth": build_reading}, RIVALS)
LLAMA_MAKERS = Makers(
    {"relayquant": build_llama},
    {Engine.ONNXRUNTIME: save_llama_onnx, Engine.OPENVINO: save_llama_openvino},
)
ENCODER_MAKERS = Makers(
    {"relayquant": build_encoder},
    {Engine.ONNXRUNTIME: save_encoder_onnx, Engine.OPENVINO: save_encoder_openvino},
)
#: weights of a GEMV together are larger than the last cache
ROWS: dict[str, tuple[Spec, Makers]] = {
    "GEMV 4096x4096": (Products(1, 4096, 4096, 12), GEMV_MAKERS),
    "GEMV 4096x11008": (Products(1, 4096, 11008, 5), GEMV_MAKERS),
    "GEMM 128x4096x4096": (Products(128, 4096, 4096, 2), GEMM_MAKERS),
    "GEMM 128x4096x11008": (Products(128, 4096, 11008, 1), GEMM_MAKERS),
    "GEMM 128x4096x4096, groups of 128": (Products(128, 4096, 4096, 2, WIDE_GROUP), GEMM_MAKERS),
    "GEMM 512x2048x5632, groups of 128": (Products(512, 2048, 5632, 1, WIDE_GROUP), GEMM_MAKERS),
    "Llama, decode": (Llama(rows=1, seen=127), LLAMA_MAKERS),
    "Llama, prefill of 128": (Llama(rows=128, seen=0), LLAMA_MAKERS),
    "Llama, prefill of 128, groups of 128": (Llama(128, 0, group=WIDE_GROUP), LLAMA_MAKERS),
    "Llama, prefill of 512, groups of 128": (Llama(512, 0, group=WIDE_GROUP), LLAMA_MAKERS),
    **{name: (encoder, ENCODER_MAKERS) for name, encoder in ENCODERS.items()},
}


def prepare_row(
    row: str, folder: Path, machine: Machine
) -> tuple[dict[str, Candidate], dict[str, np.ndarray]]:
    """(candidates, inputs) of a row; from the folder if they are there.

    The machines share the models of the rivals. Each has libraries of ours.
    """
    (spec, makers), ours = ROWS[row], folder / machine.folder
    ours.mkdir(parents=True, exist_ok=True)
    candidates = {}
    for name, build in makers.own.items():
        path = ours / f"{name}.so"
        if not path.exists():
            compile_module(build(spec, folder), machine.target).export_library(str(path))
        candidates[name] = Candidate(Engine.RELAYQUANT, path)
    index = folder / "contenders.json"
    entries = json.loads(index.read_text()) if index.exists() else {}
    for engine, save in makers.rivals.items():
        if engine.value not in entries:
            entries[engine.value] = save(spec, folder).name
            write_text(index, json.dumps(entries))
        candidates[engine.value] = Candidate(engine, folder / entries[engine.value])
    return candidates, draw_inputs(spec, folder)


# ---------------------------------------------------------------- the table


def format_times(spec: Spec, times: Times) -> str:
    """Our best time of one product or run in ms; in brackets how many times as long the rivals
    take, best and median, and how long it takes to read as many bytes.
    """
    own = times["relayquant"]
    count = spec.copies if isinstance(spec, Products) else 1
    cells = [f"{own.best / count * 1e3:.2f}"]
    for engine in ("openvino", "onnxruntime", "bandwidth"):
        if (rival := times.get(engine)) is not None:
            cells.append(f"({rival.best / own.best:.2f}, {rival.median / own.median:.2f})")
    return " ".join(cells)


def format_memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    """Most that our process had in memory, in MB; in brackets OpenVINO's, then ONNX Runtime's."""
    engines = ("relayquant", "openvino", "onnxruntime")
    own, *rivals = (
        f"{memory[engine]['peak'] / 1e6:.0f}" if engine in memory else "-" for engine in engines
    )
    return f"{own} ({', '.join(rivals)})"


def format_tables(results: Results) -> str:
    """A table for each CPU in Markdown, below sentences that say what the cells mean."""
    lines = [
        "A cell has our best time in ms. The parentheses say how many times as long OpenVINO, then",
        "ONNX Runtime, and for a GEMV reading as many bytes takes: first by the best times, then",
        "by the median times. Each engine has a process of its own. The last column is the most",
        "memory in MB that a process with one thread had (VmHWM), with its engine: ours (OpenVINO,",
        "ONNX Runtime).",
    ]
    for cpu, entry in results.items():
        threads = list_threads({cpu: entry})
        lines += ["", f"**{cpu}** ({', '.join(entry['versions'])}):", ""]
        lines += head_table(["4-bit weights, or as it says", *map(format_threads, threads), "MB"])
        for row, (spec, _) in ROWS.items():
            if (measured := entry["times"].get(row)) is not None:
                found = [read_times(measured.get(str(count), {})) for count in threads]
                cells = [format_times(spec, times) if times else "" for times in found]
                memory = entry.get("memory", {}).get(row)
                cells.append(format_memory(memory) if memory else "")
                lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--prepare", action="store_true", help="measure nothing")
    add_machine_option(parser)
    options = parser.parse_args()
    machine = choose_machine(parser, options, WITHOUT_TILES)
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(open_temporary_folder())
        results = read_results(RESULTS)
        entry = open_entry(results, machine.cpu)
        for row in options.rows:
            candidates, inputs = prepare_row(row, folder / row.replace(" ", "_"), machine)
            for threads in [] if options.prepare else options.threads:
                found = measure_engines(
                    candidates,
                    inputs,
                    threads=threads,
                    rounds=options.rounds,
                    environment=machine.environment,
                )
                times = {name: asdict(latency) for name, latency in found.latencies.items()}
                entry["times"].setdefault(row, {})[str(threads)] = times
                if threads == 1:
                    memory = {name: asdict(each) for name, each in found.memory.items()}
                    entry.setdefault("memory", {})[row] = memory
                cells = format_times(ROWS[row][0], found.latencies)
                print(row, threads, cells, *found.failures.values(), flush=True)
                write_results(results, RESULTS)
    if not options.prepare:
        write_table(PAGE, format_tables(results), "language")


if __name__ == "__main__":
    main()
