"""float_precision: what quantization leaves in float is compiled with products of bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.codegen.kernels.isa.bf16 import VECTORS_BF16
from relayquant.codegen.kernels.isa.select import has_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.config import Precision
from relayquant.demo import load_digits
from relayquant.ir.float_precision import find_float_precision

HASWELL = "llvm -mtriple=x86_64-linux-gnu -mcpu=haswell"


@pytest.fixture(scope="module")
def mixed():
    """The digits' network with one convolution in float, and images."""
    demo = load_digits()
    default = rq.get_backend_config("x86").default_qconfig
    data = [np.concatenate(demo.calibration)[:32]]
    qmod = rq.quantize(
        *rq.load(str(demo.model_path)),
        data,
        backend="x86",
        qconfig_mapping=rq.QConfigMapping().set_global(default).set_module_name("conv2", None),
        effort="fast",
        guard="off",
        float_precision="bf16",
    )
    assert not all(row.quantized for row in rq.ledger(qmod).rows)
    return qmod, data[0]


def test_quantize__float_precision_stays_in_files(mixed, tmp_path):
    qmod, _ = mixed
    rq.save_module(qmod, tmp_path / "mixed.rqm")
    for mod in (qmod, rq.load(tmp_path / "mixed.rqm")[0]):
        assert find_float_precision(mod) is Precision.BF16
    assert find_float_precision(rq.load(str(load_digits().model_path))[0]) is Precision.FLOAT32


def test_compile__float_precision_needs_its_instructions(mixed):
    with pytest.raises(rq.ConfigError, match="Sapphire Rapids"):
        rq.compile(mixed[0], HASWELL)
    rq.compile(mixed[0], HASWELL, precision="float32")


@pytest.mark.slow
def test_compile__float_precision_is_that_of_the_module(mixed):
    if not has_isa(VECTORS_BF16, resolve_target()):
        pytest.skip("this machine has no products of bfloat16")
    qmod, images = mixed
    outputs = [
        rq.Executor(rq.compile(qmod, precision=precision)).run("main", [images])[0]
        for precision in (None, "bf16", "float32")
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])
