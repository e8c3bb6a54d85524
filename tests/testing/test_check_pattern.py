"""Every built-in pattern means the same at every stage; and check_pattern notices one that does
not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.dialect import qnn
from relayquant.ops import BUILTIN_OPS, Kind, Operand, Output, Quantized, QuantOp
from relayquant.rewrite import Pattern
from relayquant.testing import DRAWN, PatternMismatch, check_pattern

#: drawn values are negative too, of which these have no finite result; their tables are tested in
#: reference/
UNDEFINED = {"sqrt", "rsqrt", "log"}
#: what prepare turns into another operator, or into another order of operands
CANONICAL = {"flatten"} | {
    f"{name}{suffix}_constant_lhs" for name in ("add", "mul") for suffix in ("", "_relu", "_clip")
}
DRAWABLE = [row for row in BUILTIN_OPS if row.name not in UNDEFINED | CANONICAL]
#: one row of each operator is compiled as well
COMPILED = {row.op: row.name for row in reversed(DRAWABLE)}


@pytest.mark.parametrize("row", DRAWABLE, ids=lambda row: row.name)
def test_builtin_row__same_at_every_stage(row):
    compiled = COMPILED[row.op] == row.name
    report = check_pattern(row, examples=2 if compiled else 1, compiled=compiled)
    assert report.examples >= 1


def test_builtin_rows__all_but_the_named_are_drawn():
    ops = {row.op for row in BUILTIN_OPS} - {"relax.elementwise_chain"}
    assert ops - set(DRAWN) == {f"relax.{name}" for name in UNDEFINED}


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


def test_own_pattern__right():
    report = check_pattern(doubled_op(2.0), build_doubled)
    assert report.examples == 3
    assert report.compared > 0


def test_own_pattern__wrong_realize_is_noticed():
    with pytest.raises(PatternMismatch, match=r"'doubled'.* differ between the stages"):
        check_pattern(doubled_op(1.9), build_doubled, compiled=False)


def test_own_pattern__never_used():
    with pytest.raises(PatternMismatch, match="quantized none of 3 drawn models"):
        check_pattern(doubled_op(2.0), lambda b: relax.op.tanh(b.activation(2, 4)), compiled=False)


def test_own_pattern__declined():
    from relayquant.rewrite import Skip

    row = replace(doubled_op(2.0), check=lambda match: Skip("not on Sundays"))
    with pytest.raises(PatternMismatch, match="quantized none"):
        check_pattern(row, build_doubled, compiled=False)


def test_own_pattern__needs_a_build_function():
    row = replace(
        doubled_op(2.0), pattern=Pattern(is_op("relax.flip")(wildcard()), {"data": wildcard()})
    )
    with pytest.raises(rq.ConfigError, match=r"build=\.\.\. for 'doubled'.*relax\.flip"):
        check_pattern(row)
