"""Last integer step of conversion: quantize(dequantize(q)) -> requantize or q, integer constants
computed, clamps merged, values named.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.qtypes import INTEGER_LIMITS, Rounding
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import make_parameters
from relayquant.ir.reference import run as run_numpy
from relayquant.ir.rewrite import Emitter, Match, Pattern, Rule, Skip, apply_rules
from relayquant.ir.rewrite.constants import share_constants
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype
from relayquant.ir.rewrite.moves import MOVES
from relayquant.ir.rewrite.walker import tidy_module
from relayquant.stages.conversion.names import name_integers
from relayquant.stages.conversion.qnn_form import read_dequantize, read_qparams


def fold_qnn(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with dequantize/quantize pairs folded, integer constants computed, equal
    constants merged, and values named as in the ledger.
    """
    return name_integers(share_constants(tidy_module(apply_rules(mod, FOLD_RULES))))


def _quantize_of_dequantize() -> Rule:
    """quantize(dequantize(q, s1, z1), s2, z2) -> q for equal parameters, else requantize."""
    data, scale, zero_point = wildcard(), wildcard(), wildcard()
    pattern = Pattern(
        is_op("relax.qnn.quantize")(data, scale, zero_point),
        {"data": data, "scale": scale, "zero_point": zero_point},
    )

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        inner = read_dequantize(match.graph, match.parts["data"])
        if inner is None:
            return Skip("the operand is not dequantized by constant parameters")
        call = match.graph.values[match.root]
        outer = read_qparams(call, str(call.attrs.out_dtype))
        if outer is None:
            return Skip("the parameters are variables")
        value = emitter.get(inner.value)
        if inner.qparams == outer:
            return value
        if outer.is_per_channel:
            return Skip("requantize has one set of output parameters, these are per channel")
        axis = -1 if inner.qparams.axis is None else inner.qparams.axis
        return qnn.requantize(
            value,
            *make_parameters(inner.qparams),
            *make_parameters(outer),
            axis=axis,
            out_dtype=outer.dtype,
            rounding=Rounding(str(call.attrs.rounding)),
        )

    return Rule("quantize of dequantize", pattern, rewrite)


#: operators computed at once if all their operands are integer constants
FOLDED_CONSTANTS = (*MOVES, "relax.qnn.quantize", "relax.qnn.requantize")


def _constant(op: str) -> Rule:
    """op(constants) -> constant, computed by the numpy reference."""
    data = wildcard()
    pattern = Pattern(is_op(op)(data, varg_default_wildcard=True), {"data": data})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        if constant_value(match.parts["data"]) is None:
            return Skip("the operand is not a constant")
        call = match.graph.values[match.root]
        if not tensor_dtype(match.root).startswith(("int", "uint")):
            return Skip("the result is not integer")
        (value,) = run_numpy(make_main([], lambda _: call), {})
        return relax.const(value, tensor_dtype(match.root))

    return Rule(f"constant {op}", pattern, rewrite)


def _clip_of_clip() -> Rule:
    """clip(clip(q, a, b), c, d) -> clip(q, max(a, c), min(b, d)); a clip to q's limits -> q."""
    data = wildcard()
    pattern = Pattern(is_op("relax.clip")(data, varg_default_wildcard=True), {"data": data})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        dtype = tensor_dtype(match.root)
        if dtype not in INTEGER_LIMITS:
            return Skip("a float clip")
        value = match.parts["data"]
        low, high = (int(arg.value) for arg in match.graph.values[match.root].args[1:3])
        if low <= INTEGER_LIMITS[dtype][0] and high >= INTEGER_LIMITS[dtype][1]:
            return emitter.get(value)
        inner = match.graph.call_of(value)
        if inner is None or match.graph.op_name(inner) != "relax.clip":
            return Skip("nothing to merge")
        inner_low, inner_high = (int(arg.value) for arg in inner.args[1:3])
        # The intersection may be empty. Then the result is the outer bound next to the inner
        # interval.
        low, high = (
            min(max(low, inner_low), high),
            max(min(high, inner_high), low),
        )
        bounds = (tvm.tirx.IntImm(dtype, bound) for bound in (low, high))
        return relax.op.clip(emitter.get(inner.args[0]), *bounds)

    return Rule("clip of clip", pattern, rewrite)


FOLD_RULES: tuple[Rule, ...] = (
    _quantize_of_dequantize(),
    *(_constant(op) for op in FOLDED_CONSTANTS),
    _clip_of_clip(),
)
