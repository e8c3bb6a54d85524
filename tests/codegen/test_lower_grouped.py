"""Modules with grouped weights through `rq.compile`: kernels in every function, constants once."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.codegen.grouped import KINDS, lower_grouped
from relayquant.demo.llama import (
    LlamaSizes,
    compute_angles,
    draw_weights,
    export_llama,
    make_mask,
)
from relayquant.dialect.legality import iterate_bindings
from relayquant.kernels.isa.target import resolve_target
from relayquant.rewrite.graph import call_name

SIZES = LlamaSizes(width=32, hidden=44, layers=1, heads=4, groups=2, vocabulary=64)
ROWS = rq.QSpec("int8", is_dynamic=True, granularity=rq.Granularity.PER_ROW)
TOKENS = [1, 5, 9, 2]


@pytest.fixture(scope="module")
def compressed():
    return rq.compress_weights(
        export_llama(SIZES), draw_weights(SIZES), bits=4, group_size=16, activation=ROWS
    )


def list_calls(func):
    return [b.value for b in iterate_bindings(func) if isinstance(b.value, tvm.ir.Call)]


def test_lower_grouped__every_operator_of_every_function(compressed):
    lowered = lower_grouped(compressed, resolve_target(None))
    functions = [f for f in lowered.functions.values() if isinstance(f, relax.Function)]
    assert len(functions) == 2
    assert not {call_name(call) for f in functions for call in list_calls(f)} & KINDS
    constants = {}
    for func in functions:
        for call in list_calls(func):
            for operand in call.args[1].fields if call_name(call) == "relax.call_tir" else ():
                if isinstance(operand, tvm.ir.GenericConst) and str(operand.value.dtype) == "uint8":
                    constants.setdefault(int(operand.value.data_ptr()), []).append(call)
    # five of the layer in both functions, the table in products and gathers of both
    assert sorted(map(len, constants.values())) == [2, 2, 2, 2, 2, 4]


def test_compile__prefill_and_decode_as_the_reference(compressed):
    machine = relax.VirtualMachine(rq.compile(compressed), tvm.cpu())

    def tensors(arrays):
        return [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]

    def run_prefill(tokens):
        arrays = (*compute_angles(SIZES, 0, len(tokens)), make_mask(len(tokens)))
        out = machine["prefill"](*tensors([np.array([tokens], "int32"), *arrays]))
        return out[0].numpy(), list(out[1])

    main = tvm.IRModule({"main": compressed["prefill"].with_attr("global_symbol", "main")})
    inputs = (np.array([TOKENS], "int32"), *compute_angles(SIZES, 0, 4), make_mask(4))
    expected = rq.reference.run(main, inputs)[0]
    found, _ = run_prefill(TOKENS)
    # float differences may move a row by one step of its integers
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    _, cache = run_prefill(TOKENS[:3])
    token = [np.array([[TOKENS[3]]], "int32"), *compute_angles(SIZES, 3, 1)]
    last = machine["decode"](*tensors(token), tuple(cache))[0].numpy()
    assert np.abs(last[0, 0] - found[0, 3]).max() < 0.03 * np.abs(expected).max()


def test_lower_grouped__what_no_kernel_takes_stays(compressed):
    """A weight that is an input: the reason is told, and it compiles all the same."""
    builder = relax.BlockBuilder()
    shapes = [((2, 32), "float32"), ((3, 16), "uint8"), ((3, 1), "float32")]
    x, codes, scale = (
        relax.Var(n, relax.TensorType(*s)) for n, s in zip("xcs", shapes, strict=True)
    )
    with builder.function("main", [x, codes, scale]):
        with builder.dataflow():
            zero = relax.const(np.uint8(8), "uint8")
            call = rq.extend.qnn.grouped_dense(x, 1.0, codes, scale, zero, 4, 32, 32)
            y = builder.emit_output(builder.emit(call))
        builder.emit_func_output(y)
    mod, reasons = builder.finalize(), []
    lowered = lower_grouped(mod, resolve_target(None), lambda *told: reasons.append(told[2].reason))
    assert reasons == ["the weight is no constant"]
    assert "grouped_dense" in lowered.script()
