"""What a real Relay prints and saves of every row's cases, read and compiled here, computes what
its graph executor does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from old_relay import OLD_PYTHON, needs_old_relay, run_old_script
from relay_operator_cases import CASES
from relay_testing import compile_and_run, module_text

from relayquant.relay import from_json, from_text

pytestmark = needs_old_relay

#: Cases that TVM 0.10 refuses, or that crash its compiler: newer operators and attributes, or such
#: that the text leaves out and its parser requires.
REFUSED_BY_RELAY = {
    *("nn.matmul", "hardswish", "transpose", "broadcast_to", "slice_like", "image.resize2d"),
    *("argsort", "cumsum", "cumprod", "arange", "scatter_nd", "scatter_elements", "strided_slice"),
    *("qnn.avg_pool2d", "qnn.softmax", "device_copy", "annotation.compiler_begin", "clip"),
    *("annotation.compiler_end", "annotation.bitpack_start", "annotation.bitpack_end"),
    *("nn.conv2d_transpose", "qnn.conv2d_transpose", "fixed_point_multiply", "nn.pad", "reshape"),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("printed") if OLD_PYTHON else Path()
    for index, (_, text, _, inputs) in enumerate(each.values for each in CASES):
        (folder / f"{index}.relay").write_text(module_text(text, **inputs))
        np.savez(folder / f"{index}.npz", **inputs)
    run_old_script("print_and_run.py", str(folder))
    return folder


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(each.id) for each in CASES])
def test_printed__computes_the_same(printed, index):
    name, _, _, inputs = CASES[index].values
    error = printed / f"{index}.error"
    if error.exists():
        assert name in REFUSED_BY_RELAY, error.read_text()
        pytest.skip("TVM 0.10 refuses it")
    with np.load(printed / f"{index}.outputs.npz") as found:
        wanted = [found[key] for key in found.files]
    for read, suffix in ((from_text, "text"), (from_json, "json")):
        mod = read((printed / f"{index}.{suffix}").read_text(), release="0.10")
        for got, want in zip(compile_and_run(mod, inputs), wanted, strict=True):
            assert got.dtype == want.dtype
            if want.dtype.kind == "f":
                np.testing.assert_allclose(got, want, 1e-4, 1e-5)
            else:
                np.testing.assert_array_equal(got, want)
