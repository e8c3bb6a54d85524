"""Every kernel, cross-compiled and run on emulated CPUs, against numpy bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from emulator import CPUS, MATRIX_CPU, Emulator, target_of
from kernel_cases import (
    BYTES_CASES,
    CASES,
    CONVOLUTIONS,
    MATRICES,
    MATRIX_CASES,
    PAIRS_CASES,
    TRANSPOSED,
    Case,
)

from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.transposed import choose_transpose_plan
from relayquant.codegen.kernels.isa.arm import NEON, NEON_BYTES, NEON_PAIRS, SDOT, SMMLA
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.library.host_functions import name_kernel_pipeline

MakeCase = Callable[[], Case]


def make_eager(isa: Isa) -> Isa:
    """Taken wherever it can be, whether it pays or not."""
    return replace(isa, word_cost=-1e9)


def choose_isa(cases: Mapping[str, MakeCase], isa: Isa) -> dict[str, MakeCase]:
    """The same cases for these instructions, whatever the CPU has that is better or worse."""

    def choose(make: MakeCase) -> MakeCase:
        def make_chosen() -> Case:
            case = make()
            return replace(case, build=lambda _: case.build(isa))

        return make_chosen

    return {f"{name}, {isa.name}": choose(make) for name, make in cases.items()}


EAGER = make_eager(SMMLA)
BYTES_RUNS = choose_isa(BYTES_CASES, make_eager(NEON_BYTES))
PAIRS_RUNS = choose_isa(PAIRS_CASES, make_eager(NEON_PAIRS))
#: emulated CPU -> its instructions and cases
MACHINES: dict[str, tuple[Isa, dict[str, MakeCase]]] = {
    "cortex-a53": (NEON, {**CASES, **BYTES_RUNS, **PAIRS_RUNS}),
    "cortex-a76": (SDOT, CASES),
    MATRIX_CPU: (EAGER, MATRIX_CASES),
}
RUNS = [(cpu, case) for cpu, (_, cases) in MACHINES.items() for case in cases]
#: what runs on every CPU each time; `1x1` shows that a lesser CPU stops at it
CORE = {"3x3", "1x1", "depthwise", "int16, residual", "batch_matmul of int8"}
CORE |= {next(iter(runs)) for runs in (BYTES_RUNS, PAIRS_RUNS)}
NAMES = {case: f"kernel{i}" for i, case in enumerate({case: None for _, case in RUNS})}


@functools.cache
def make_case(cpu: str, name: str) -> Case:
    return MACHINES[cpu][1][name]()


@pytest.fixture(scope="session")
def chosen(request: pytest.FixtureRequest):
    """Function cpu -> the cases that this session runs on it, and `1x1`."""
    runs = {
        (item.callspec.params["cpu"], item.callspec.params["case"])
        for item in request.session.items
        if item.name.startswith("test_kernel__equals_numpy")
    }
    return lambda cpu: [c for c in MACHINES[cpu][1] if (cpu, c) in runs or c == "1x1"]


@pytest.fixture(scope="session")
def libraries(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory, chosen):
    """Function cpu -> (library of the chosen kernels, {function: arguments})."""

    @functools.cache
    def compile_kernels(cpu: str) -> tuple[Path, dict[str, list[np.ndarray]]]:
        functions, calls = {}, {}
        isa = MACHINES[cpu][0]
        names = {case: NAMES[case] for case in chosen(cpu)}
        for case, name in names.items():
            func, inputs = make_case(cpu, case).build(isa)
            functions[name] = func.with_attr("global_symbol", name)
            outputs = make_case(cpu, case).outputs
            garbage = [np.full(output.shape, 77, output.dtype) for output in outputs]
            calls[name] = [*map(np.ascontiguousarray, inputs), *garbage]
        library = Path(tmp_path_factory.mktemp(cpu)) / "kernels.so"
        mod, pipeline = tvm.IRModule(functions), name_kernel_pipeline()
        compiled = tvm.compile(mod, target=target_of(cpu), tir_pipeline=pipeline)
        return emulator.export(compiled, library), calls

    return compile_kernels


@pytest.fixture(scope="session")
def results(emulator: Emulator, libraries, chosen):
    """Function cpu -> {case: outputs}: all kernels in one library, called in one process."""

    @functools.cache
    def run(cpu: str) -> dict[str, list[np.ndarray]]:
        library, calls = libraries(cpu)
        called = emulator.run_kernels(cpu, library, calls)
        return {
            case: called[NAMES[case]][-len(make_case(cpu, case).outputs) :] for case in chosen(cpu)
        }

    return run


def test_eager__takes_matrix_products():
    convolutions = [
        spec for spec in CONVOLUTIONS.values() if not spec.is_depthwise and spec.in_dtype != "int16"
    ]
    for spec in [*convolutions, *(spec.as_conv2d() for spec in MATRICES.values())]:
        assert (choose_plan(spec, EAGER).isa is EAGER) == (spec.out_size != (1, 1)), spec
    for spec in TRANSPOSED.values():
        assert choose_transpose_plan(spec, EAGER).isa is EAGER, spec


@pytest.mark.parametrize("isa", [NEON_BYTES, NEON_PAIRS], ids=lambda isa: isa.name)
def test_eager__takes_bytes_together(isa):
    eager = make_eager(isa)
    for spec in CONVOLUTIONS.values():
        if not spec.is_depthwise and spec.in_dtype != "int16":
            assert choose_plan(spec, eager).isa is eager, spec


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("cpu", "case"),
    [run if run[1] in CORE else pytest.param(*run, marks=pytest.mark.slow) for run in RUNS],
)
def test_kernel__equals_numpy(results, cpu, case):
    for found, expected in zip(results(cpu)[case], make_case(cpu, case).outputs, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_emulated_cpus__need_different_kernels():
    assert [select_isa(target_of(cpu)) for cpu in CPUS] == [NEON, SDOT, SMMLA]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "lesser"), [("cortex-a76", "cortex-a53"), (MATRIX_CPU, "cortex-a76")]
)
def test_emulated_cpu__stops_at_an_instruction_it_lacks(emulator, libraries, results, cpu, lesser):
    """So a run on it proves that its code has none."""
    library, calls = libraries(cpu)
    name = NAMES["1x1"]
    assert results(cpu)["1x1"], "the CPU that has it runs it"
    with pytest.raises(AssertionError, match=f"{lesser}: -4"):  # SIGILL
        emulator.run_kernels(lesser, library, {name: calls[name]})
