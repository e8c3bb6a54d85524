"""Time and memory of `compress_weights` on a Llama of a billion random weights, as they stand in
docs/how_to/compress_weights.md.

    python tests/benchmarks/compression_table.py FOLDER [--layers 20] [--efforts fast balanced]
        [--tokens 128] [--texts 64]

The Llama is 2048 wide, hidden 5632, 16 heads, a vocabulary of 8192; a layer has 51 million weights,
which are files in FOLDER, written when they are missing, and loaded one at a time. Each effort runs
in a process of its own, "fast" without data, the others with TEXTS texts of TOKENS tokens. Prints
seconds for each 100 million weights, and what the process had in memory at most (VmHWM), also over
the bytes of the files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from llama_program import LlamaSizes, compute_angles, export_llama, make_mask

from relayquant.flow.compression import compress_weights

VOCABULARY = 8192


class FolderParams(Mapping[str, np.ndarray]):
    """Arrays of a folder by name, each loaded when it is asked for."""

    def __init__(self, folder: Path, sizes: LlamaSizes) -> None:
        self.folder, self.shapes = folder, sizes.shapes()

    def write(self) -> None:
        """Write what is missing: what fits a Llama, at random."""
        self.folder.mkdir(exist_ok=True)
        for i, (name, shape) in enumerate(self.shapes.items()):
            path = self.folder / f"{name}.npy"
            if not path.exists():
                rng = np.random.default_rng(i)
                values = rng.standard_normal(shape, "float32") * shape[-1] ** -0.5
                np.save(path, values if len(shape) == 2 else np.ones(shape, "float32"))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy")

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def compress(options: argparse.Namespace, effort: str) -> str:
    """One line of the table."""
    sizes = LlamaSizes(2048, 5632, options.layers, 16, 16, VOCABULARY, options.tokens)
    params = FolderParams(options.folder, sizes)
    params.write()
    rng = np.random.default_rng(0)
    rest = *compute_angles(sizes, 0, options.tokens), make_mask(options.tokens)
    texts = [
        (rng.integers(0, VOCABULARY, (1, options.tokens), "int32"), *rest)
        for _ in range(options.texts)
    ]
    given = {} if effort == "fast" else {"dataset": texts, "function": "prefill", "effort": effort}
    mod = export_llama(sizes)
    count = sum(int(np.prod(shape)) for shape in params.shapes.values())
    before = time.perf_counter(), time.process_time()
    compress_weights(mod, params, **given)
    wall, own = time.perf_counter() - before[0], time.process_time() - before[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    each = count / 1e8
    return (
        f"{effort}: {count / 1e9:.3f}e9 weights, {wall:.0f} s, {wall / each:.1f} s and "
        f"{own / each:.1f} s of the CPU for 1e8, peak {peak / 1e9:.2f} GB, "
        f"{peak / (4 * count):.2f} of the files"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--efforts", nargs="+", default=["fast", "balanced"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, default=64)
    options = parser.parse_args()
    for effort in options.efforts:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            print(pool.submit(compress, options, effort).result(), flush=True)


if __name__ == "__main__":
    main()
