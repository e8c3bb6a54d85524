"""Every built-in pattern means the same at every stage; and check_pattern notices one that does
not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.flow.testing.check import PatternMismatch, check_pattern
from relayquant.flow.testing.draw import ModelBuilder
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import BUILTIN_OPS, Kind, Operand, Output, Quantized, QuantOp
from relayquant.ir.ops.recurrent import RECURRENT_OPS
from relayquant.ir.rewrite import Pattern

#: one row of each operator is compiled as well
COMPILED = {row.op: row.name for row in reversed(BUILTIN_OPS)}


@pytest.mark.sample(20)
@pytest.mark.parametrize("row", BUILTIN_OPS, ids=lambda row: row.name)
def test_builtin_row__same_at_every_stage(row):
    compiled = COMPILED[row.op] == row.name
    # Recurrent layers round the hidden state at run time, which calibration does not simulate.
    share = 0.2 if row in RECURRENT_OPS else 0.02
    report = check_pattern(row, examples=2 if compiled else 1, compiled=compiled, share=share)
    assert report.examples >= 1


def doubled_op(factor: float) -> QuantOp:
    """add(x, x) as a change of scale alone; wrong unless `factor` is 2."""
    data = wildcard()

    def realize(context):
        operand = context.operands["data"]
        qparams = rq.QParams(
            operand.qparams.scale * factor, operand.qparams.zero_point, operand.qparams.dtype
        )
        out = Quantized(operand.value, context.output)
        value = qnn.requantize(
            operand.value, Quantized(operand.value, qparams).scale, operand.zero_point, out.scale,
            out.zero_point, out_dtype=context.output.dtype,
        )  # fmt: skip
        return Quantized(context.emit(value, "int"), context.output).dequantize()

    return QuantOp(
        "doubled", "relax.add", Pattern(is_op("relax.add")(data, data), {"data": data}),
        (Operand("data"),), Kind.FOLLOWER, Output.OWN, realize,
    )  # fmt: skip


def build_doubled(b):
    x = b.activation(2, b.draw(5, 8))
    return relax.op.add(x, x)


@pytest.mark.slow
def test_own_pattern__right():
    report = check_pattern(doubled_op(2.0), build_doubled)
    assert report.examples == 3
    assert report.compared > 0


def test_own_pattern__wrong_realize_is_noticed():
    with pytest.raises(PatternMismatch, match=r"'doubled'.* differ between the stages"):
        check_pattern(doubled_op(1.9), build_doubled, compiled=False)


def test_own_pattern__calls_inside_of_calls():
    def build(b):
        x = b.activation(2, 4)
        return relax.op.concat([relax.op.add(relax.op.tanh(x), x), x])

    builder = ModelBuilder(0)
    mod = builder.finish(build(builder))
    ops = [binding.value.op.name for binding in mod["main"].body.blocks[0].bindings]
    assert ops[1:] == ["relax.tanh", "relax.add", "relax.concat", "relax.matmul"]


@pytest.mark.parametrize("name", ["conv2d_bias", "dense", "add", "gelu", "max_pool2d", "mean"])
def test_own_pattern__simulate_that_clamps_is_noticed(name):
    """Its parameters leave no room for what it clamps away, so that all later stages agree."""
    row = next(row for row in BUILTIN_OPS if row.name == name)

    def simulate(context):
        return relax.op.nn.relu(context.emit(row.simulate(context), "linear"))

    with pytest.raises(PatternMismatch, match="simulate callback gives another value"):
        check_pattern(replace(row, simulate=simulate), compiled=False)


def test_own_pattern__never_used():
    with pytest.raises(PatternMismatch, match="quantized none of 3 drawn models"):
        check_pattern(doubled_op(2.0), lambda b: relax.op.tanh(b.activation(2, 4)), compiled=False)


def test_own_pattern__declined():
    from relayquant.ir.rewrite import Skip

    row = replace(doubled_op(2.0), check=lambda match: Skip("not on Sundays"))
    with pytest.raises(PatternMismatch, match="quantized none"):
        check_pattern(row, build_doubled, compiled=False)


def test_own_pattern__needs_a_build_function():
    flip = Pattern(is_op("relax.flip")(wildcard()), {"data": wildcard()})
    row = replace(doubled_op(2.0), op="relax.flip", pattern=flip)
    with pytest.raises(rq.ConfigError, match=r"build=\.\.\. for 'doubled'.*relax\.flip"):
        check_pattern(row)
