"""Modules with grouped weights through `rq.compile`: kernels in every function, constants once."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from llama_program import compute_angles
from tiny_llama import (
    ROWS,
    SIZES,
    TOKENS,
    list_calls,
    make_llama,
    make_prefill,
    take_function,
)
from tvm import relax

import relayquant as rq
from relayquant.base.grouping import GroupFormat, quantize_groups
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.grouped import lower_grouped
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.graph import call_name


@pytest.fixture(scope="module")
def compressed():
    return rq.compress_weights(*make_llama(), bits=4, group_size=16, activation=ROWS)


def test_lower_grouped__every_operator_of_every_function(compressed):
    lowered = lower_grouped(compressed, resolve_target(None))
    functions = [f for f in lowered.functions.values() if isinstance(f, relax.Function)]
    assert len(functions) == 2
    names = {call_name(call) for func in functions for call in list_calls(func)}
    assert not [name for name in names if name.startswith("relax.qnn.")]
    constants = {}
    for func in functions:
        for call in list_calls(func):
            for operand in call.args[1].fields if call_name(call) == "relax.call_tir" else ():
                if isinstance(operand, tvm.ir.GenericConst) and str(operand.value.dtype) == "uint8":
                    constants.setdefault(int(operand.value.data_ptr()), []).append(call)
    # five of the layer in both functions, the table in products and gathers of both
    assert sorted(map(len, constants.values())) == [2, 2, 2, 2, 2, 4]


def make_experts(n, choices):
    """A product with the weights of 3 experts, 4 bits in groups of 16."""
    rng = np.random.default_rng(0)
    weight = quantize_groups(rng.normal(size=(3 * 16, 32)).astype("float32"), GroupFormat(4, 16))
    rows = relax.Var("rows", relax.TensorType((n, 2, 32), "int8"))
    scales = relax.Var("scales", relax.TensorType((n, 2, 1), "float32"))
    chosen = relax.Var("chosen", relax.TensorType((n, choices), "int32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [rows, scales, chosen]):
        with builder.dataflow():
            parts = map(relax.const, (weight.codes, weight.scale, weight.zero_point))
            product = qnn.grouped_expert_dense(rows, scales, chosen, *parts, 4, 16, 32, 3)
            result = builder.emit_output(product)
        builder.emit_func_output(result)
    return builder.get()


def test_lower_grouped__experts_have_a_kernel():
    n = tvm.tirx.Var("n", "int64")
    lowered = lower_grouped(make_experts(n, 2), resolve_target(None))
    (call,) = list_calls(lowered["main"])
    assert call.args[0].name_hint == "grouped_experts"
    assert [operand.name for operand in call.args[1].fields[:3]] == ["rows", "scales", "chosen"]


def test_lower_grouped__experts_of_an_unknown_number_of_choices_have_none():
    n, k = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("k", "int64")
    with hear_declined() as heard:
        lowered = lower_grouped(make_experts(n, k), resolve_target(None))
    assert call_name(next(iter(list_calls(lowered["main"])))) == "relax.qnn.grouped_expert_dense"
    assert [reason for _, _, reason in heard] == ["the number of choices is not known"]


@pytest.mark.slow
def test_compile__prefill_and_decode_as_the_reference(compressed):
    machine = relax.VirtualMachine(rq.compile(compressed), tvm.cpu())

    def tensors(arrays):
        return [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]

    def run_prefill(tokens):
        out = machine["prefill"](*tensors(make_prefill(tokens)))
        return out[0].numpy(), list(out[1])

    prefill = take_function(compressed, "prefill")
    expected = rq.reference.run(prefill, make_prefill(TOKENS))[0]
    found, _ = run_prefill(TOKENS)
    # float differences may move a row by one step of its integers
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    _, cache = run_prefill(TOKENS[:3])
    token = [np.array([[TOKENS[3]]], "int32"), *compute_angles(SIZES, 3, 1)]
    last = machine["decode"](*tensors(token), tuple(cache))[0].numpy()
    assert np.abs(last[0, 0] - found[0, 3]).max() < 0.03 * np.abs(expected).max()


def test_lower_grouped__what_no_kernel_takes_stays():
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
    with hear_declined() as heard:
        lowered = lower_grouped(builder.finalize(), resolve_target(None))
    assert [reason for _, _, reason in heard] == ["the weight is not a constant"]
    assert "grouped_dense" in lowered.script()
