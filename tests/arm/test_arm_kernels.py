"""Every kernel, cross-compiled and run on emulated CPUs, against numpy bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import tvm
from emulator import CPUS, Emulator, target_of
from kernel_cases import CASES, Case

from relayquant.lower.kernels.arm import NEON, SDOT
from relayquant.lower.kernels.select import select_isa

NAMES = {case: f"kernel{i}" for i, case in enumerate(CASES)}


@functools.cache
def make_case(name: str) -> Case:
    return CASES[name]()


@pytest.fixture(scope="session")
def results(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory):
    """Function cpu -> {case: output}: all kernels in one library, called in one process."""

    @functools.cache
    def run(cpu: str) -> dict[str, np.ndarray]:
        functions, calls = {}, {}
        isa = select_isa(target_of(cpu))
        for case, name in NAMES.items():
            func, inputs = make_case(case).build(isa)
            functions[name] = func.with_attr("global_symbol", name)
            expected = make_case(case).expected
            garbage = np.full(expected.shape, 77, expected.dtype)
            calls[name] = [*map(np.ascontiguousarray, inputs), garbage]
        library = Path(tmp_path_factory.mktemp(cpu)) / "kernels.so"
        compiled = tvm.compile(tvm.IRModule(functions), target=target_of(cpu))
        emulator.export(compiled, library)
        outputs = emulator.run_kernels(cpu, library, calls)
        return {case: outputs[name] for case, name in NAMES.items()}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("case", CASES)
def test_kernel__equals_numpy(results, cpu, case):
    np.testing.assert_array_equal(results(cpu)[case], make_case(case).expected)


def test_emulated_cpus__need_different_kernels():
    assert [select_isa(target_of(cpu)) for cpu in CPUS] == [NEON, SDOT]


@pytest.mark.slow
def test_emulated_cpu__stops_at_an_instruction_it_lacks(emulator, tmp_path):
    """So a run on it proves that its code has none."""
    func, inputs = make_case("dense 5x33x17").build(SDOT)
    module = tvm.IRModule({"dense": func})
    compiled = tvm.compile(module, target=target_of("cortex-a76"))
    library = emulator.export(compiled, tmp_path / "dense.so")
    calls = {"dense": [*inputs, np.zeros((5, 17), "int8")]}
    emulator.run_kernels("cortex-a76", library, calls)
    with pytest.raises(AssertionError, match="cortex-a53: -4"):  # SIGILL
        emulator.run_kernels("cortex-a53", library, calls)
