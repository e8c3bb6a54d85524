"""Register tiles by the clock: the few best of the cost model are timed on this machine.

    spec, instructions  ->  spec with the tile that was fastest

Only how fast a kernel is depends on its tile; what it computes does not. Times are remembered (see
`tile_file`), so that a layer is timed once on a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
import tvm
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features

from relayquant.codegen.tile_file import add_tiles, find_cache_folder, read_tiles
from relayquant.errors import ConfigError, format_count
from relayquant.kernels.integer.conv import build_conv2d, pack_conv2d
from relayquant.kernels.integer.conv_plan import choose_plan, list_tiles
from relayquant.kernels.integer.specs import Conv2d, Dense, Tile
from relayquant.kernels.isa.architecture import find_architecture
from relayquant.kernels.isa.base import Isa
from relayquant.kernels.isa.target import host_config, name_cpu, resolve_target
from relayquant.runtime import count_threads
from relayquant.storage.files import check_writable

SpecT = TypeVar("SpecT", Conv2d, Dense)

#: gives the spec of a layer with the tile to take, for these instructions
ChooseTile = Callable[[Conv2d, Isa], Tile | None]

#: Tiles of a layer that are timed.
CANDIDATES = 4
#: Seconds for which they take turns, and of one turn.
SECONDS, TURN = 0.04, 0.001
#: Layers of less multiply-adds are not: they take a few microseconds.
FEWEST_MACS = 500_000
#: The tile of least estimated time stays, unless another takes less than so much of its time.
GAIN = 0.98


def keep_estimate(_spec: Conv2d, _isa: Isa) -> Tile | None:
    """No tuning: the tile of least estimated time."""
    return None


def choose_tile(spec: SpecT, isa: Isa, choose: ChooseTile) -> SpecT:
    """The layer with the tile of `choose`."""
    conv = spec.as_conv2d() if isinstance(spec, Dense) else spec
    return replace(spec, tile=choose(conv, isa))


@contextmanager
def open_tuner(target: Target, path: Path | None = None) -> Iterator[ChooseTile]:
    """What times layers for a target whose code this machine can run; in the end it writes what is
    new to `path`, by default a file in the cache folder of the system.

    Raises:
        ConfigError: this machine cannot run code for the target, or the file is damaged.
        FileError: the file cannot be written.
    """
    check_runnable(target)
    path = path or find_cache_folder() / "tiles.json"
    if path.parent.is_dir():
        check_writable(path)
    known = read_tiles(path)
    new: dict[str, Tile] = {}
    prefix = f"{name_cpu()}, {format_count(count_threads(), 'thread')}"

    def choose(spec: Conv2d, isa: Isa) -> Tile | None:
        if spec.is_depthwise or spec.macs < FEWEST_MACS:
            return None
        tiles = list_tiles(choose_plan(spec, isa), CANDIDATES)
        key = f"{prefix}, {describe_layer(spec, isa)}"
        found = new.get(key) or known.get(key)
        if found not in tiles:  # never timed, or by a plan that listed others
            found = new[key] = time_tiles(spec, isa, target, tiles)
        return found

    try:
        yield choose
    finally:
        if new:
            add_tiles(path, new)


def check_runnable(target: Target) -> None:
    """Raise ConfigError unless this machine can run what is compiled for the target."""
    host = resolve_target(host_config())
    same = find_architecture(target) is find_architecture(host)
    missing = {*map(str, llvm_get_cpu_features(target))} if same else set()
    missing -= {*map(str, llvm_get_cpu_features(host))}
    if not same or missing:
        lacks = f"lacks {', '.join(sorted(missing)[:5])} that the target asks for"
        reason = lacks if missing else "is of another kind than the target"
        raise ConfigError(
            f"tune: kernels are timed on this machine, which {reason}. Allowed: targets that this "
            "machine can run; compile for others without tune."
        )


def describe_layer(spec: Conv2d, isa: Isa) -> str:
    """All of a layer that its time depends on: not the numbers, but what is done with them."""
    end, added = spec.epilogue, spec.epilogue.residual
    shape = f"{spec.batch}x{spec.height}x{spec.width}x{spec.in_channels} to {spec.out_channels}"
    window = f"{spec.kernel}/{spec.strides} {spec.padding} {spec.dilation} {spec.groups}"
    stored = f"{spec.in_dtype} {end.output.value} {end.dtype} {added.dtype if added else ''}"
    return f"{isa.name}: {shape}, {window}, {stored} {end.is_small}"


def time_tiles(spec: Conv2d, isa: Isa, target: Target, tiles: Sequence[Tile]) -> Tile:
    """The fastest of some tiles of a layer, the first of them being that of least estimated time.

    They take turns, so that a busy moment meets all; of each the best time counts.
    """
    if len(tiles) == 1:
        return tiles[0]
    specs = {f"tile{i}": replace(spec, tile=tile) for i, tile in enumerate(tiles)}
    kernels = {name: build_conv2d(each, isa, name) for name, each in specs.items()}
    library = tvm.compile(tvm.IRModule(kernels), target=target)
    runs = [bind_arguments(library[name], each, isa) for name, each in specs.items()]
    best = [float("inf")] * len(runs)
    deadline = time.perf_counter() + SECONDS * len(runs)
    while best[0] == float("inf") or time.perf_counter() < deadline:
        for i, run in enumerate(runs):
            best[i] = min(best[i], time_run(run))
    fastest = min(range(len(runs)), key=best.__getitem__)
    return tiles[fastest if best[fastest] < GAIN * best[0] else 0]


def bind_arguments(kernel: Callable[..., object], spec: Conv2d, isa: Isa) -> Callable[[], object]:
    """One run of a kernel on operands of any values: no time depends on them."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-64, 65, spec.weight_shape).astype("int8")
    bias = np.zeros(spec.out_channels, "int32")
    factor = 1 / (64 * 64 * max(prod(spec.weight_shape[1:]), 1))
    multiplier = np.float32(factor) if spec.epilogue.has_multiplier else None
    packed = pack_conv2d(spec, isa, weight, bias, multiplier)
    arrays = [rng.integers(0, 100, spec.in_shape).astype(spec.in_dtype), *packed.arguments()]
    if spec.epilogue.residual:
        arrays.append(np.zeros(spec.out_shape, spec.epilogue.residual.dtype))
    arrays.append(np.zeros(spec.out_shape, spec.epilogue.dtype))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    return lambda: kernel(*tensors)


def time_run(run: Callable[[], object]) -> float:
    """Best seconds of one run, over a turn."""
    best, start = float("inf"), time.perf_counter()
    deadline = start + TURN
    while start < deadline:
        run()
        end = time.perf_counter()
        best, start = min(best, end - start), end
    return best
