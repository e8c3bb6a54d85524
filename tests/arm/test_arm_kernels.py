"""Every kernel, cross-compiled and run on emulated CPUs, against numpy bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from emulator import CPUS, MATRIX_CPU, PLAIN_CPUS, Emulator, target_of
from kernel_cases import CASES, CONVOLUTIONS, MATRICES, MATRIX_CASES, TRANSPOSED, Case

from relayquant.kernels.integer.conv_plan import choose_plan
from relayquant.kernels.integer.conv_transpose import choose_transpose_plan
from relayquant.kernels.isa.arm import NEON, SDOT, SMMLA
from relayquant.kernels.isa.select import select_isa

NAMES = {case: f"kernel{i}" for i, case in enumerate([*CASES, *MATRIX_CASES])}
RUNS = [(cpu, case) for cpu in PLAIN_CPUS for case in CASES]
RUNS += [(MATRIX_CPU, case) for case in MATRIX_CASES]
#: Takes matrix products wherever there are two pixels, whether they pay or not.
EAGER = replace(SMMLA, word_cost=-1e9)


@functools.cache
def make_case(name: str) -> Case:
    return {**CASES, **MATRIX_CASES}[name]()


@pytest.fixture(scope="session")
def results(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory):
    """Function cpu -> {case: output}: all kernels in one library, called in one process."""

    @functools.cache
    def run(cpu: str) -> dict[str, np.ndarray]:
        functions, calls = {}, {}
        isa = EAGER if cpu == MATRIX_CPU else select_isa(target_of(cpu))
        names = {case: NAMES[case] for run_on, case in RUNS if run_on == cpu}
        for case, name in names.items():
            func, inputs = make_case(case).build(isa)
            functions[name] = func.with_attr("global_symbol", name)
            expected = make_case(case).expected
            garbage = np.full(expected.shape, 77, expected.dtype)
            calls[name] = [*map(np.ascontiguousarray, inputs), garbage]
        library = Path(tmp_path_factory.mktemp(cpu)) / "kernels.so"
        compiled = tvm.compile(tvm.IRModule(functions), target=target_of(cpu))
        emulator.export(compiled, library)
        outputs = emulator.run_kernels(cpu, library, calls)
        return {case: outputs[name] for case, name in names.items()}

    return run


def test_eager__takes_matrix_products():
    convolutions = [
        spec for spec in CONVOLUTIONS.values() if not spec.is_depthwise and spec.in_dtype != "int16"
    ]
    for spec in [*convolutions, *(spec.as_conv2d() for spec in MATRICES.values())]:
        assert (choose_plan(spec, EAGER).isa is EAGER) == (spec.out_size != (1, 1)), spec
    for spec in TRANSPOSED.values():
        assert choose_transpose_plan(spec, EAGER).isa is EAGER, spec


@pytest.mark.parametrize(("cpu", "case"), RUNS)
def test_kernel__equals_numpy(results, cpu, case):
    np.testing.assert_array_equal(results(cpu)[case], make_case(case).expected)


def test_emulated_cpus__need_different_kernels():
    assert [select_isa(target_of(cpu)) for cpu in CPUS] == [NEON, SDOT, SMMLA]


@pytest.mark.parametrize(
    ("isa", "cpu", "lesser"),
    [(SDOT, "cortex-a76", "cortex-a53"), (EAGER, MATRIX_CPU, "cortex-a76")],
)
def test_emulated_cpu__stops_at_an_instruction_it_lacks(emulator, tmp_path, isa, cpu, lesser):
    """So a run on it proves that its code has none."""
    func, inputs = make_case("dense 5x33x17").build(isa)
    module = tvm.IRModule({"dense": func})
    compiled = tvm.compile(module, target=target_of(cpu))
    library = emulator.export(compiled, tmp_path / "dense.so")
    calls = {"dense": [*inputs, np.zeros((5, 17), "int8")]}
    emulator.run_kernels(cpu, library, calls)
    with pytest.raises(AssertionError, match=f"{lesser}: -4"):  # SIGILL
        emulator.run_kernels(lesser, library, calls)
