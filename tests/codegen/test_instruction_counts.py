"""Instructions that whole models execute, counted by Valgrind: what no look at single loops sees,
as copies, calls and work that two kernels both do, and the same on every machine.

Valgrind knows no AVX512. Of two counts, of 1 run and of 3, the difference is two runs without all
that happens once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model, draw_batches
from native_program import compile_program
from tvm import relax

import relayquant as rq
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite.expressions import list_bindings, op_name

pytestmark = pytest.mark.optimized

SHAPE = (1, 3, 64, 64)


def build_residual() -> tvm.IRModule:
    """A first layer with a stride and a pool, two residual blocks of 3x3, a mean, a dense layer."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        op = relax.op
        x = emit("stem", op.nn.relu(emit.conv_bias("stem.b", x, 32)))
        x = emit("pool", op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)))
        for i in range(2):
            y = emit(f"{i}.a", op.nn.relu(emit.conv_bias(f"{i}.a.b", x, 32)))
            y = emit(f"{i}.sum", op.add(emit.conv_bias(f"{i}.b", y, 32), x))
            x = emit(f"{i}", op.nn.relu(y))
        return emit.dense("out", emit("mean", op.mean(x, [2, 3])), 10)

    return build_model(body, SHAPE)


def build_inverted() -> tvm.IRModule:
    """Blocks of 1x1, depthwise 3x3 and 1x1 with a sum, a mean, a dense layer."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        op = relax.op
        x = emit("stem", op.clip(emit("stem.c", op.nn.conv2d(
            x, emit.constant(16, 3, 3, 3), strides=2, padding=1)), 0, 6))  # fmt: skip
        for i in range(2):
            wide = emit(f"{i}.wide.c", op.nn.conv2d(x, emit.constant(96, 16, 1, 1)))
            wide = emit(f"{i}.wide", op.clip(wide, 0, 6))
            deep = emit(f"{i}.deep", op.clip(emit.conv(f"{i}.deep.c", wide, 96, groups=96), 0, 6))
            narrow = emit(f"{i}.narrow", op.nn.conv2d(deep, emit.constant(16, 96, 1, 1)))
            x = emit(f"{i}", op.add(narrow, x))
        return emit.dense("out", emit("mean", op.mean(x, [2, 3])), 10)

    return build_model(body, SHAPE)


MODELS = {"residual": build_residual, "inverted": build_inverted}
#: (model, CPU) -> most instructions for 1,000 multiply-adds, a tenth above what it takes
BOUNDS = {
    ("residual", "haswell"): 98,
    ("residual", "x86-64-v2"): 253,
    ("inverted", "haswell"): 315,
    ("inverted", "x86-64-v2"): 785,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    if shutil.which("valgrind") is None:
        pytest.skip("no valgrind is here")
    return compile_program(tmp_path_factory.mktemp("program"))


def count_instructions(program: Path, library: Path, runs: int) -> int:
    """Of a process that runs a library so often, with one thread."""
    command = [
        *("valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}"),
        *(str(program), str(library), f"{library}.input", os.devnull, str(runs)),
        *map(str, SHAPE),
    ]
    result = subprocess.run(
        command,
        env={**os.environ, "TVM_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = re.search(r"Collected : (\d+)", result.stderr)
    assert found is not None, result.stderr
    return int(found[1])


@pytest.fixture(scope="module", params=MODELS)
def quantized(request) -> tuple[str, tvm.IRModule, int]:
    """(name, integer module, multiply-adds of a run)."""
    mod = MODELS[request.param]()
    calls = [b.value for b in list_bindings(mod["main"]) if op_name(b.value).startswith("relax.")]
    qmod = rq.quantize(mod, None, draw_batches(mod, 2), effort="fast")
    return request.param, qmod, sum(map(count_macs, calls))


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize("cpu", ["haswell", "x86-64-v2"])
def test_models__execute_no_more_instructions(quantized, cpu, program, tmp_path):
    name, qmod, macs = quantized
    library = tmp_path / "model.so"
    rq.compile(qmod, {"kind": "llvm", "mcpu": cpu}).export_library(str(library))
    np.random.default_rng(0).standard_normal(SHAPE, "float32").tofile(f"{library}.input")
    once, thrice = (count_instructions(program, library, runs) for runs in (1, 3))
    taken = (thrice - once) / 2 / macs * 1000
    assert taken <= BOUNDS[name, cpu], f"{taken:.0f} instructions for 1,000 multiply-adds"
    assert taken >= 0.8 * BOUNDS[name, cpu], f"the bound may come down to {1.1 * taken:.0f}"
