"""Functions built without TVM's list of open functions: in threads, and after exceptions."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from float_models import MAP, build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.ir.rewrite import rewrite_main
from relayquant.ir.rewrite.function import define_function, make_main

PACKAGE = Path(rq.__file__).parent


def small_model(seed: int) -> tvm.IRModule:
    def body(emit, x):
        first = emit("first", relax.op.nn.relu(emit.conv_bias("first.b", x)))
        return emit.dense("last", first, 5)

    return build_model(body, MAP, seed=seed)


@pytest.fixture
def switch_often():
    """Threads take turns a thousand times as often as they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_make_main__is_what_the_builder_makes():
    def build(emit_output):
        n = tvm.tirx.Var("n", "int64")
        x = relax.Var("x", relax.TensorType((n, 4), "float32"))
        return emit_output(x)

    def with_builder(x):
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                out = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.flatten(x))))
            builder.emit_func_output(out)
        return builder.finalize()

    def without(x):
        return make_main([x], lambda builder: relax.op.nn.relu(builder.emit(relax.op.flatten(x))))

    assert build(with_builder).script() == build(without).script()


@pytest.mark.slow
def test_quantize_and_compile__in_threads(switch_often):
    models = [small_model(seed) for seed in (0, 1)]
    data = draw_batches(models[0], 2)

    def run(mod):
        qmod = rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF)
        rq.compile(qmod)
        return qmod

    before = list(relax.BlockBuilder._stack)
    expected = [run(mod) for mod in models]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, models * 4))
    for qmod, wanted in zip(found, expected * 4, strict=True):
        assert tvm_ffi.structural_equal(qmod, wanted)
        (got,) = rq.reference.run(qmod, data[0])
        np.testing.assert_array_equal(got, rq.reference.run(wanted, data[0])[0])
    assert relax.BlockBuilder._stack == before


def test_rewrite__an_exception_leaves_nothing_behind(capfd):
    def fail(*_):
        raise KeyError("from a rule")

    mod, before = small_model(0), list(relax.BlockBuilder._stack)
    with pytest.raises(KeyError, match="from a rule"):
        rewrite_main(mod, fail)
    assert relax.BlockBuilder._stack == before
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with pytest.raises(KeyError, match="from a rule"):
        define_function(builder, [x], fail)
    func = define_function(builder, [x], lambda: builder.emit_output(relax.op.nn.relu(x)))
    assert str(func.ret_ty) == str(x.ty)
    assert "remaining blocks" not in capfd.readouterr().err


def test_package__opens_no_function_of_the_builder():
    """It would be noted in the list that all threads share."""
    opens = re.compile(r"^\s*with \S+\.function\(", re.MULTILINE)
    assert opens.search("    with bb.function('main', []):\n")
    found = [str(path) for path in PACKAGE.rglob("*.py") if opens.search(path.read_text("utf-8"))]
    assert not found
