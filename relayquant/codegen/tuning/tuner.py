"""Schedules of layers, chosen by time: the best few of the cost model are timed on this machine.

    spec, instructions  ->  the fastest schedule: register tile, loop order, transforms or none

Convolutions and dense layers of integers and of float32 are timed. A schedule changes how fast a
kernel is, not what it computes. Winograd's transforms in float32 have other rounding errors than
the direct form, so the choice between these two is never timed. Times are kept in a file (see
`schedule_cache`), so a layer is timed once on a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm.target import Target

from relayquant.base.cores import count_threads
from relayquant.base.storage.files import check_writable, writing
from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    count_macs,
    list_conv2d_schedules,
    pack_conv2d,
)
from relayquant.codegen.kernels.floating.gemm import (
    FloatDense,
    list_dense_schedules,
    make_dense,
    pack_dense,
)
from relayquant.codegen.kernels.floating.tile import FloatIsa, FloatSchedule, static
from relayquant.codegen.kernels.integer.conv_plan import list_tiles
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.winograd import WinogradPlan, saves_time
from relayquant.codegen.kernels.integer.product import choose_product
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, KernelSchedule
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.target import (
    find_architecture,
    list_instructions,
    name_cpu,
    resolve_target,
)
from relayquant.codegen.tuning.schedule_cache import (
    add_schedules,
    find_cache_folder,
    read_schedules,
)
from relayquant.errors import ConfigError, format_count

#: Returns the schedule of a layer for these instructions. The last argument is `can_winograd`.
ChooseSchedule = Callable[[Conv2d, Isa, bool], KernelSchedule]
#: A float32 product with constant weights that is computed directly.
FloatProduct = FloatConv2d | FloatDense
#: Returns the schedule of a float product, or None for the estimated best.
ChooseFloatSchedule = Callable[[FloatProduct, FloatIsa], FloatSchedule | None]
S = TypeVar("S", KernelSchedule, FloatSchedule)

#: Number of schedules that are timed for a layer; and of each kind, direct or with transforms, if
#: both are possible.
CANDIDATES, OF_EACH_KIND = 4, 2
#: Seconds of timing for each schedule, and of one turn.
SECONDS, TURN = 0.04, 0.001
#: Bytes of operands that are used between two uses of the same, as in a network: more than a
#: second-level cache and the address tables of a core hold. With near operands small tiles win,
#: which read activations more often, and lose in a network. With twice as many, half of the time of
#: a layer with large weights goes to their addresses, and its tiles seem to be equally fast.
COLD_BYTES = 16 * 1024 * 1024
#: Layers with fewer multiply-adds are not timed: they take a few microseconds.
FEWEST_MACS = 500_000
#: Another schedule must take less than this share of the estimated best schedule's time to replace
#: it. Smaller gains of a layer alone were losses in a network.
GAIN = 0.9


def keep_estimate(spec: Conv2d, isa: Isa, can_winograd: bool) -> KernelSchedule:
    """Return the schedule with the smallest estimated time, without tuning."""
    return KernelSchedule(transforms=can_winograd and saves_time(spec, isa))


def list_schedules(spec: Conv2d, isa: Isa, can_winograd: bool) -> list[KernelSchedule]:
    """List the few schedules with the smallest estimated times, best first.

    Transforms are never faster than products of bytes on a matrix unit.
    """
    plan = choose_plan(spec, isa)
    if not can_winograd or plan.isa.unit is not None:
        return [KernelSchedule(tile) for tile in list_tiles(plan, CANDIDATES)]
    product = WinogradPlan(spec, isa).product
    transformed = [KernelSchedule(tile, True) for tile in list_tiles(product, OF_EACH_KIND)]
    direct = [KernelSchedule(tile) for tile in list_tiles(plan, OF_EACH_KIND)]
    return transformed + direct if saves_time(spec, isa) else direct + transformed


def keep_float_estimate(_spec: FloatProduct, _isa: FloatIsa) -> FloatSchedule | None:
    """Return None, the estimated best schedule of a float product, without tuning."""
    return None


@dataclass(frozen=True)
class Tuner:
    """Chooses schedules of integer layers and of float products by time."""

    choose: ChooseSchedule
    choose_float: ChooseFloatSchedule


@contextmanager
def open_tuner(target: Target, path: Path | None) -> Iterator[Tuner]:
    """Open a tuner that times layers for a target whose code this machine can run.

    At the end it writes new times to `path`, by default a file in the cache folder of the system.

    Raises:
        ConfigError: This machine cannot run code for the target, or the file is damaged.
        FileError: The file cannot be written.
    """
    check_runnable(target)
    path = path or find_cache_folder() / "forms.json"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    known = read_schedules(path)
    new: dict[str, KernelSchedule | FloatSchedule] = {}
    prefix = f"{name_cpu()}, {format_count(count_threads(), 'thread')}"

    def choose(spec: Conv2d, isa: Isa, can_winograd: bool) -> KernelSchedule:
        if spec.is_depthwise or spec.macs < FEWEST_MACS:
            return keep_estimate(spec, isa, can_winograd)
        schedules = list_schedules(spec, isa, can_winograd)
        key = f"{prefix}, {describe_layer(spec, isa, can_winograd)}"
        return remember(key, schedules, lambda: time_schedules(spec, isa, target, schedules))

    def choose_float(spec: FloatProduct, isa: FloatIsa) -> FloatSchedule | None:
        is_dense = isinstance(spec, FloatDense)
        known_rows = static(spec.rows if is_dense else spec.batch)
        if known_rows is None or count_products(spec) < FEWEST_MACS:
            return keep_float_estimate(spec, isa)
        listed = list_dense_schedules(spec, isa) if is_dense else list_conv2d_schedules(spec, isa)
        key = f"{prefix}, {replace(isa, bf16=None)}: {spec}"
        return remember(key, listed, lambda: time_float_schedules(spec, isa, target, listed))

    def remember(key: str, schedules: Sequence[S], measure: Callable[[], S]) -> S:
        found = new.get(key) or known.get(key)
        for schedule in schedules:
            if schedule == found:
                return schedule
        # never timed, or timed by a version with other candidates
        fastest = new[key] = measure()
        return fastest

    try:
        yield Tuner(choose, choose_float)
    finally:
        if new:
            add_schedules(path, new)


def check_runnable(target: Target) -> None:
    """Raise ConfigError unless this machine can run code that is compiled for the target."""
    host = resolve_target(None)
    same = find_architecture(target) is find_architecture(host)
    missing = list_instructions(target) - list_instructions(host) if same else set()
    if not same or missing:
        lacks = f"lacks {', '.join(sorted(missing)[:5])}, which the target needs"
        reason = lacks if missing else "has another architecture than the target"
        raise ConfigError(
            f"tune: kernels are timed on this machine, which {reason}. Allowed: targets that this "
            "machine can run. For other targets, compile without tune.",
            code="RQ107",
        )


def describe_layer(spec: Conv2d, isa: Isa, can_winograd: bool) -> str:
    """Describe everything that the time of a layer depends on.

    The values of its numbers do not matter.
    """
    end, added = spec.epilogue, spec.epilogue.residual
    shape = f"{spec.batch}x{spec.height}x{spec.width}x{spec.in_channels} to {spec.out_channels}"
    window = f"{spec.kernel}/{spec.strides} {spec.padding} {spec.dilation} {spec.groups}"
    stored = f"{spec.in_dtype} {end.output.value} {end.dtype} {added.dtype if added else ''}"
    return f"{isa.name}: {shape}, {window}, {stored} {end.is_small} {can_winograd}"


def time_schedules(
    spec: Conv2d, isa: Isa, target: Target, schedules: Sequence[KernelSchedule]
) -> KernelSchedule:
    """Time schedules of a layer and return the fastest. The first one is the estimated best.

    They take turns, so that other load on the machine affects all of them. The best time of each
    counts.
    """
    if len(schedules) == 1:
        return schedules[0]
    named = {f"form{i}": schedule for i, schedule in enumerate(schedules)}
    kernels = {
        name: choose_product(spec, isa, schedule).build(name) for name, schedule in named.items()
    }
    library = tvm.compile(tvm.IRModule(kernels), target=target)
    runs = [bind_arguments(library[name], spec, isa, schedule) for name, schedule in named.items()]
    return schedules[find_fastest(runs)]


def time_float_schedules(
    spec: FloatProduct, isa: FloatIsa, target: Target, schedules: Sequence[FloatSchedule]
) -> FloatSchedule:
    """Time schedules of a float product like `time_schedules`."""
    if len(schedules) == 1:
        return schedules[0]
    specs = {f"form{i}": replace(spec, schedule=each) for i, each in enumerate(schedules)}
    kernels = {
        name: make_dense(each, isa, name)
        if isinstance(each, FloatDense)
        else make_conv2d(each, isa, name)
        for name, each in specs.items()
    }
    library = tvm.compile(tvm.IRModule(kernels), target=target)
    runs = [bind_float_arguments(library[name], each, isa) for name, each in specs.items()]
    return schedules[find_fastest(runs)]


def find_fastest(runs: Sequence[Callable[[], object]]) -> int:
    """Time runs, which take turns, and return the index of the fastest.

    The first one stays if no other is clearly faster.
    """
    best = [float("inf")] * len(runs)
    deadline = time.perf_counter() + SECONDS * len(runs)
    while best[0] == float("inf") or time.perf_counter() < deadline:
        for i, run in enumerate(runs):
            best[i] = min(best[i], time_run(run))
    fastest = min(range(len(runs)), key=best.__getitem__)
    return fastest if best[fastest] < GAIN * best[0] else 0


def count_products(spec: FloatProduct) -> int:
    """Count the multiply-adds of a float product. Symbolic extents count as 1."""
    if isinstance(spec, FloatDense):
        return spec.least_rows * spec.inner * spec.outputs
    return count_macs(spec)


def bind_float_arguments(
    kernel: Callable[..., object], spec: FloatProduct, isa: FloatIsa
) -> Callable[[], object]:
    """Bind a float kernel to operands like `bind_arguments`."""
    is_dense = isinstance(spec, FloatDense)
    shape = (spec.outputs, spec.inner) if is_dense else spec.weight_shape
    weight = np.zeros(shape, "float32")
    packed = pack_dense(weight, spec, isa) if is_dense else pack_conv2d(weight, spec, isa)
    arrays = [np.zeros(spec.shape if is_dense else spec.in_shape, "float32")]
    if spec.epilogue.bias:
        arrays.append(np.zeros(shape[0], "float32"))
    if spec.epilogue.residual:
        arrays.append(np.zeros(spec.out_shape, "float32"))
    arrays.append(np.zeros(spec.out_shape, "float32"))
    return bind_cold(kernel, packed, arrays)


def bind_arguments(
    kernel: Callable[..., object], spec: Conv2d, isa: Isa, schedule: KernelSchedule
) -> Callable[[], object]:
    """Bind a kernel to operands with arbitrary values: the time does not depend on them.

    Every call takes another copy of all operands, so that they come from the last-level cache. In a
    network the operands of all layers are used between two calls.
    """
    rng = np.random.default_rng(0)
    weight = rng.integers(-8, 9, spec.weight_shape).astype("int8")
    bias = np.zeros(spec.out_channels, "int32")
    factor = 1 / (8 * 64 * max(prod(spec.weight_shape[1:]), 1))
    count = spec.epilogue.multipliers
    shape = (count, spec.out_channels) if count > 1 else ()
    multiplier = np.full(shape, factor, "float32") if spec.epilogue.has_multiplier else None
    packed = choose_product(spec, isa, schedule).pack(Constants(weight, bias, multiplier))
    weights, *constants = packed.arguments()
    arrays = [rng.integers(0, 100, spec.in_shape).astype(spec.in_dtype), *constants]
    if spec.epilogue.residual:
        arrays.append(np.zeros(spec.out_shape, spec.epilogue.residual.dtype))
    arrays.append(np.zeros(spec.out_shape, spec.epilogue.dtype))
    return bind_cold(kernel, weights, arrays)


def bind_cold(
    kernel: Callable[..., object], weights: NDArray, arrays: Sequence[NDArray]
) -> Callable[[], object]:
    """Bind a kernel to arrays, with `weights` as second argument: copies of all take turns."""
    data, *others = arrays
    operands = (data, weights, *others)
    count = ceil_div(COLD_BYTES, sum(array.nbytes for array in operands))
    copies = cycle([[tvm.runtime.tensor(array) for array in operands] for _ in range(count)])
    return lambda: kernel(*next(copies))


def time_run(run: Callable[[], object]) -> float:
    """Return the best time of a run in seconds, measured over one turn."""
    best, start = float("inf"), time.perf_counter()
    deadline = start + TURN
    while start < deadline:
        run()
        end = time.perf_counter()
        best, start = min(best, end - start), end
    return best
