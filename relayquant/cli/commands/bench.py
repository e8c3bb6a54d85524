"""`relayquant bench`: latency of a float model and its int8 model, or of an int8 model alone, and
the time of each kernel.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tvm

import relayquant as rq
from relayquant.analysis.speed.engines import Candidate, Engine, measure_engines
from relayquant.analysis.speed.latency import Latency, measure_latency
from relayquant.analysis.speed.other_engines import (
    OTHER_ENGINES,
    OtherEngine,
    list_versions,
    prepare_candidates,
)
from relayquant.analysis.speed.peak import measure_peak
from relayquant.analysis.speed.profile import (
    KernelSite,
    Profile,
    compile_with_sites,
    profile_executable,
)
from relayquant.base.cores import count_threads
from relayquant.base.runtime import Machine
from relayquant.base.storage.files import open_temporary_folder
from relayquant.cli.data import open_data
from relayquant.cli.files import load_module, load_options
from relayquant.cli.measure import bind_run
from relayquant.cli.options import check_options, read_backend
from relayquant.cli.output import CommandOutput, ExitCode, make_plain
from relayquant.cli.threads import use_threads
from relayquant.codegen.kernels.isa.select import describe_products
from relayquant.codegen.kernels.isa.target import name_cpu, resolve_target
from relayquant.config import BackendConfig, BiasCorrection, FitSettings, Precision, WeightRounding
from relayquant.data import InputInfo, count_samples, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, ModelError, format_count
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.entry import name_main
from relayquant.plots.bench import kernel_table, latency_table, operator_table
from relayquant.plots.pictures import check_picture, plot_latency
from relayquant.stages.streams import open_streams

Batch = Mapping[str, np.ndarray]

#: what is timed
INT8, FLOAT = "relayquant int8", "relayquant float"
#: samples to calibrate on if no number is given
BATCHES = 4
#: The rounding of weights does not change their speed.
QUICK_FIT = FitSettings(rounding=WeightRounding.NEAREST, bias=BiasCorrection.NONE)


@dataclass(frozen=True, eq=False)
class Built:
    """A module, compiled for this machine, with where its kernels stand."""

    mod: tvm.IRModule
    executable: Any
    sites: Sequence[KernelSite]


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    threads = count_threads() if options.threads is None else options.threads
    counts = {"--threads": threads, "--batch": options.batch}
    counts |= {"--repeat": options.repeat, "--samples": options.samples}
    check_options(options, counts=counts, outputs=(options.plot,))
    if options.plot is not None:
        check_picture(options.plot)
    if options.operators < 0:
        raise ConfigError(f"--operators is {options.operators}; allowed: 0 or more.", code="RQ102")
    others = choose_engines(options)
    with use_threads(threads):
        mod = name_main(bind_model(output.run("read model", load_options, options)))
        is_quantized = find_ledger(mod) is not None
        if is_quantized and options.qmodel is not None:
            raise ConfigError(
                f"{options.model} is quantized already, so it is timed alone. To compare it with "
                "its float model, say: relayquant bench MODEL QMODEL.",
                code="RQ102",
            )
        batches = output.run("read data", read_batches, options, mod)
        inputs = [*batches[0].values()]
        if options.data is None:
            output.print("inputs: random numbers; give --data for real ones")
        if is_quantized:
            modules = {INT8: mod}
        elif options.qmodel is not None:
            modules = {INT8: name_main(load_module(options.qmodel)), FLOAT: mod}
        else:
            start = time.perf_counter()
            backend = read_backend(options.backend)
            qmod = output.run("quantize", quantize_quickly, mod, batches, backend)
            output.print(f"quantized in {time.perf_counter() - start:.1f} s")
            modules = {INT8: qmod, FLOAT: mod}
        built = {name: build(options, output, name, mod) for name, mod in modules.items()}
        if others:
            latencies = time_engines(options, output, others, built, batches, threads)
        else:
            runs = {
                name: bind_run(Machine(each.executable), inputs) for name, each in built.items()
            }
            latencies = output.run("time", measure_latency, runs, options.repeat)
        output.print(f"{name_cpu()}; {', '.join(list_versions(others))}")
        output.print(describe_products(resolve_target(None)))
        shapes = ", ".join(f"{name} {array.shape}" for name, array in batches[0].items())
        title = f"{options.model.name}: {shapes}, {format_count(threads, 'thread')}"
        output.add_values(cpu=name_cpu(), versions=list_versions(others), threads=threads)
        shown = [{"name": name, **make_plain(row)} for name, row in latencies.items()]
        output.add_table("latencies", shown)
        output.print(latency_table(latencies, INT8, title))
        if options.plot is not None:
            plot_latency(latencies, options.plot)
            output.add_file(options.plot)
        if options.operators:
            show_kernels(options, output, built, inputs, threads)
    return ExitCode.OK


def choose_engines(options: argparse.Namespace) -> list[OtherEngine]:
    """Return the engines of --against.

    Raises:
        ConfigError: they cannot run the model as it is given.
        MissingDependencyError: one is not installed.
    """
    others = [OTHER_ENGINES[name] for name in dict.fromkeys(options.against)]
    names = " and ".join(other.engine.value for other in others)
    if others and options.model.suffix != ".onnx":
        raise ConfigError(
            f"--against {names}: .onnx files are compared, but MODEL is {options.model}.",
            code="RQ102",
        )
    if others and options.input:
        raise ConfigError(
            f"--input: {names} would run the file with all of its inputs.", code="RQ102"
        )
    for other in others:
        other.check()  # fails before anything takes time
    return others


def build(
    options: argparse.Namespace, output: CommandOutput, name: str, mod: tvm.IRModule
) -> Built:
    """Compile a module with --tune and --precision, and say how long it took."""
    precision = Precision(options.precision) if options.precision else None
    compile_module = partial(rq.compile, tune=options.tune, precision=precision)
    start = time.perf_counter()
    executable, sites = output.run(f"compile {name}", compile_with_sites, mod, compile_module)
    output.print(f"{name}: compiled in {time.perf_counter() - start:.1f} s")
    return Built(mod, executable, sites)


def time_engines(
    options: argparse.Namespace,
    output: CommandOutput,
    others: Sequence[OtherEngine],
    built: Mapping[str, Built],
    batches: Sequence[Batch],
    threads: int,
) -> Mapping[str, Latency]:
    """Time our modules beside other engines' float and int8 models, each in its own process.

    Raises:
        ModelError: our int8 module does not run.
    """
    executables = {name: each.executable for name, each in built.items()}
    with open_temporary_folder() as folder:
        models = output.run(
            "quantize with other engines",
            prepare_candidates,
            others,
            options.model,
            built[INT8].mod,
            batches,
            folder,
            Precision(options.precision or Precision.FLOAT32),
        )
        comparison = output.run(
            "time engines",
            measure_engines,
            {**export_own(executables, folder), **models.candidates},
            batches[0],
            threads=threads,
            rounds=options.repeat,
        )
    for name, reason in {**models.failures, **comparison.failures}.items():
        output.print(f"{name} is left out: {reason}")
    if INT8 not in comparison.latencies:
        raise ModelError(f"{INT8}: {comparison.failures[INT8]}", code="RQ504")
    return comparison.latencies


def show_kernels(
    options: argparse.Namespace,
    output: CommandOutput,
    built: Mapping[str, Built],
    inputs: Sequence[np.ndarray],
    threads: int,
) -> None:
    """Measure the kernels of each module and show them beside the peak of `threads` cores."""
    peak = measure_peak(resolve_target(None)) * threads
    output.print(f"integer peak of {format_count(threads, 'core')}: {peak:.0f} GOP/s")
    output.add_values(peak_gops=peak)
    calls: list[dict[str, Any]] = []
    for name, each in built.items():
        profile = output.run(
            f"profile {name}", profile_executable, each.executable, each.sites, each.mod, inputs
        )
        output.print(kernel_table(profile, peak, f"{name}: kinds of kernels"))
        calls += [{"module": name, **make_plain(row)} for row in profile.operators]
        rows = None if output.show_all else options.operators
        output.print(operator_table(profile, peak, rows, f"{name}: slowest calls"))
        output.print(describe_outside(profile))
    output.add_table("kernels", calls)


def describe_outside(profile: Profile) -> str:
    """Say which part of a run is outside kernels. Kernels are timed in other runs than the whole,
    and with a timer around each, so they may sum up to more.
    """
    calls = format_count(profile.machine_calls, "call")
    if profile.outside < 0:
        return (
            f"outside kernels: too little to measure, {calls}. Timed one by one, the kernels took "
            f"{-profile.outside * 1e6:.0f} us more than the whole run, {profile.total * 1e6:.0f} us"
        )
    return (
        f"outside kernels: {profile.outside * 1e6:.0f} us of {profile.total * 1e6:.0f} us, {calls}"
    )


def export_own(executables: Mapping[str, Any], folder: Path) -> dict[str, Candidate]:
    """Write executables as libraries into `folder`, so that other processes can load them."""
    candidates = {}
    for number, (name, executable) in enumerate(executables.items()):
        path = folder / f"own{number}.so"
        executable.export_library(str(path))
        candidates[name] = Candidate(Engine.RELAYQUANT, path)
    return candidates


def read_batches(options: argparse.Namespace, mod: tvm.IRModule) -> list[Batch]:
    """Read calibration batches from --data, or draw random ones. The first batch is timed.

    Raises:
        DataError: the data does not fit the model.
        ConfigError: the shape of a random input cannot be known.
    """
    inputs, found = describe_inputs(mod), []
    for batch in open_batches(options, mod, inputs):
        found.append(batch)
        samples = sum(count_samples(batch) for batch in found)
        if len(found) == BATCHES if options.samples is None else samples >= options.samples:
            break
    return found


def open_batches(
    options: argparse.Namespace, mod: tvm.IRModule, inputs: Sequence[InputInfo]
) -> Iterator[Batch]:
    """Open batches of --batch samples, if the model leaves the batch size open. Random batches
    never end.
    """
    if options.data is None:
        rng = np.random.default_rng(0)
        while True:
            yield {info.name: draw_input(rng, info, options.batch) for info in inputs}
    is_open = bool(inputs[0].shape) and isinstance(inputs[0].shape[0], str)
    size = options.batch if is_open else None
    data = open_streams(mod, None, open_data(options, mod, None))
    if options.data.is_file():
        yield from open_dataset(data, inputs, batch_size=size)
        return
    pictures = iter(open_dataset(data, inputs))
    while taken := list(islice(pictures, size or 1)):
        yield {name: np.concatenate([each[name] for each in taken]) for name in taken[0]}


def draw_input(rng: np.random.Generator, info: InputInfo, batch: int) -> np.ndarray:
    """Draw a random array for an input: normal floats, or integers 0 and 1, which every embedding
    has.

    Raises:
        ConfigError: a dimension other than the first is symbolic.
    """
    if any(isinstance(dim, str) for dim in info.shape[1:]):
        raise ConfigError(
            f"Input {info.name!r} has the shape {info.shape_text}: only the first dimension may be "
            "open. Give inputs of the wanted size with --data.",
            code="RQ102",
        )
    shape = tuple(batch if isinstance(dim, str) else dim for dim in info.shape)
    if info.dtype.startswith("float"):
        return rng.normal(size=shape).astype(info.dtype)
    return rng.integers(0, 2, shape).astype(info.dtype)


def quantize_quickly(
    mod: tvm.IRModule, batches: Sequence[Batch], backend: BackendConfig | None
) -> tvm.IRModule:
    """Return the quantized module, with weights rounded to nearest."""
    prepared = rq.prepare(mod, None, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rq.DataWarning)  # only time is measured
        prepared = rq.calibrate(prepared, [dict(batch) for batch in batches], fit=QUICK_FIT)
    return rq.lower(rq.convert_to_reference(prepared), prepared.backend)
