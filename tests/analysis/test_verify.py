"""verify finds what compiled code computes differently, and names the first value."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.verify import Verifier
from relayquant.ir.rewrite import rewrite_main


@pytest.fixture(scope="module")
def model():
    def body(emit, x):
        a = emit("a", op.nn.relu(emit.conv_bias("a.b", x)))
        return relax.Tuple([emit.conv("out", a), a, x])

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    return rq.quantize(mod, None, data), data[0]


def compile_plainly(mod: tvm.IRModule):
    return tvm.compile(mod, "llvm")


@pytest.mark.slow
def test_verify__equal_for_every_way_to_pass_inputs(model):
    qmod, inputs = model
    for form in (inputs, [inputs["x"]], inputs["x"]):
        report = rq.verify(qmod, form)
        assert report.is_equal
        assert report.first is None
    # all integer values and the three results
    assert report.compared >= 6


@pytest.mark.slow
def test_verify__names_the_first_value_that_differs(model):
    """The compiled module has one requantize off by one: found, named, counted."""
    qmod, inputs = model

    def compile_wrongly(mod: tvm.IRModule):
        def visit(emitter, binding):
            value = emitter.get(binding.value)
            if binding.var.name != "a":
                return value
            one = relax.const(np.array(1, "uint8"))
            right = emitter.emit(value, "right")
            return relax.op.add(right, one)

        return compile_plainly(rewrite_main(mod, visit))

    report = Verifier(qmod, compile_wrongly).compare(inputs)
    assert not report.is_equal
    first = report.first
    assert first is not None
    assert (first.name, first.dtype, first.size) == ("a", "uint8", 4 * 36)
    assert first.mismatches == first.size
    assert first.max_difference >= 1
    head, *_, last = str(report).splitlines()
    assert head.startswith("a (uint8): 144 of 144 elements different, by up to ")
    assert (
        last
        == f"{len(report.differences)} of {report.compared} values different from the reference"
    )
    assert "out" in {difference.name for difference in report.differences}


@pytest.mark.slow
def test_verify__floats_within_the_tolerance(model):
    qmod, inputs = model

    def compile_with_noise(factor: float):
        def compile_module(mod: tvm.IRModule):
            def visit(emitter, binding):
                value = emitter.get(binding.value)
                if binding.var.name != "out":
                    return value
                right = emitter.emit(value, "right")
                return relax.op.multiply(right, relax.const(np.float32(factor)))

            return compile_plainly(rewrite_main(mod, visit))

        return compile_module

    assert Verifier(qmod, compile_with_noise(1 + 1e-6)).compare(inputs).is_equal
    assert not Verifier(qmod, compile_with_noise(1.01)).compare(inputs).is_equal
    assert Verifier(qmod, compile_with_noise(1.01), rtol=0.1).compare(inputs).is_equal


@pytest.mark.parametrize(
    ("others", "error", "is_equal"),
    [
        ([150, -2, 1], 1e-3, True),
        ([150, -2, 1], 1e-2, False),
        ([-1e9, -2, 1], 1e-3, True),
        ([-1e9, -2, 1], 1e-1, False),
        ([np.finfo("float32").min / 2, 0, 1], 1e-1, False),
        ([-np.inf, 0, 0], 1e-1, False),
    ],
)
def test_verify__sums_round_by_their_largest_terms(others, error, is_equal):
    """0 that differs by 1e-3 where others are 300: within float32's precision of their sum; what a
    mask makes large is in no sum with others.
    """
    x, builder = relax.Var("x", relax.TensorType((4,), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(op.add(x, x), "out")
        builder.emit_func_output(y)

    def compile_with_error(mod: tvm.IRModule):
        off = relax.const(np.array([0, error, 0, 0], "float32"))

        def visit(emitter, binding):
            value = emitter.get(binding.value)
            if binding.var.name != "out":
                return value
            return op.add(emitter.emit(value, "right"), off)

        return compile_plainly(rewrite_main(mod, visit))

    data = np.array([others[0], 0, *others[1:]], "float32")
    assert Verifier(builder.finalize(), compile_with_error).compare([data]).is_equal == is_equal


def test_verify__inputs_that_do_not_fit(model):
    qmod, inputs = model
    with pytest.raises(rq.DataError, match="input 'y' is not a parameter"):
        rq.verify(qmod, {"y": inputs["x"]})
    with pytest.raises(rq.DataError, match="got 2 inputs for 1"):
        rq.verify(qmod, [inputs["x"], inputs["x"]])
    with pytest.raises(rq.DataError, match="has shape"):
        rq.verify(qmod, inputs["x"][:, :2])


@pytest.mark.slow
def test_verify__float_modules_and_symbolic_batches():
    mod = build_model(lambda e, x: e.conv("out", x), ("n", 4, 6, 6))
    (inputs,) = draw_batches(mod, 1, n=3)
    assert rq.verify(mod, inputs).is_equal
    qmod = rq.quantize(mod, None, draw_batches(mod, 2))
    assert rq.verify(qmod, inputs).is_equal


@pytest.mark.slow
def test_verify__nested_results_and_constants():
    def body(emit, x):
        a = emit.conv("a", x)
        return relax.Tuple([relax.Tuple([emit.conv("b", a), emit.constant(3)]), a, a])

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data)
    assert rq.verify(qmod, data[0]).is_equal
    assert [array.shape for array in rq.reference.run(qmod, data[0])] == [MAP, (3,), MAP, MAP]


def make_rounded(compute):
    """main(x) of `compute(x)` in steps of 1/2, as integers, and three times these."""
    qnn = rq.extend.qnn
    x, builder = relax.Var("x", relax.TensorType((2, 4), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            floats = builder.emit(compute(x), "floats")
            zero = relax.const(0, "int32")
            units = builder.emit(qnn.quantize(floats, 0.5, zero, out_dtype="uint8"), "units")
            wide = builder.emit(op.astype(units, "int32"), "wide")
            result = builder.emit_output(op.multiply(wide, relax.const(3, "int32")), "result")
        builder.emit_func_output(result)
    return builder.finalize()


def compile_scaled(factor):
    """Compiles modules whose value `floats` is larger by a factor."""

    def compile_module(mod: tvm.IRModule):
        def visit(emitter, binding):
            value = emitter.get(binding.value)
            if binding.var.name != "floats":
                return value
            return op.multiply(emitter.emit(value, "right"), relax.const(np.float32(factor)))

        return rq.compile(rewrite_main(mod, visit))

    return compile_module


EQUAL = np.ones((2, 4), "float32")


def test_verify__floats_at_a_tie_may_be_rounded_either_way():
    """Of sums, which have an order; what follows is that of the compiled code."""
    mod = make_rounded(lambda x: op.divide(x, op.sum(x, -1, True)))  # 1/4: half of a step
    report = Verifier(mod, compile_scaled(1 + 1e-6)).compare(EQUAL)
    assert report.is_equal
    assert report.ties == 8
    assert str(report).endswith(
        "0 of 4 values different from the reference; floats at a tie were rounded to 8 integers "
        "either way"
    )
    report = Verifier(mod, compile_scaled(7)).compare(EQUAL)
    assert [found.name for found in report.differences] == ["units", "wide", "result", "result"]
    assert report.ties == 0


@pytest.mark.parametrize("compute", [lambda x: x, lambda x: op.multiply(x, x)])
def test_verify__floats_that_are_exact_have_no_tolerance(compute):
    mod = make_rounded(lambda x: op.multiply(compute(x), relax.const(np.float32(0.25))))
    report = Verifier(mod, compile_scaled(1 + 1e-6)).compare(EQUAL)
    assert report.first is not None
    assert (report.first.name, report.first.mismatches) == ("units", 8)
    assert Verifier(mod, compile_scaled(1)).compare(EQUAL).is_equal
