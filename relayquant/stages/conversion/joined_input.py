"""Propagation rule for joined slices: quantize the value once before it is cut, instead of
quantizing the joined slices. A convolution of volumes reads an input in this form.

quantize(concat((cut(x), cut(x), ...))) -> concatenate((cut(quantize(x)), ...)). This is exact,
because a slice only moves values.
"""

from __future__ import annotations

from math import prod

from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.qtypes import Rounding
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import make_parameters
from relayquant.ir.rewrite import Emitter, Graph, Match, Pattern, Rule, Skip
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.stages.conversion.qnn_form import read_qparams

#: operators that may lie between a value and the concat
CUTS = ("relax.strided_slice", "relax.reshape")


def quantize_before_joining() -> Rule:
    """The rule described at the top of this module."""
    parts, scale, zero_point = wildcard(), wildcard(), wildcard()
    pattern = Pattern(
        is_op("relax.qnn.quantize")(is_op("relax.concat")(parts), scale, zero_point),
        {"parts": parts, "scale": scale, "zero_point": zero_point},
    )

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        graph, quantize = match.graph, match.graph.values[match.root]
        qparams = read_qparams(quantize, str(quantize.attrs.out_dtype))
        if qparams is None or qparams.is_per_channel:
            return Skip("the parameters are variables, or per channel")
        chains = [trace_cuts(graph, field) for field in getattr(match.parts["parts"], "fields", ())]
        sources = {source for source, _ in chains}
        if len(chains) < 2 or len(sources) > 1 or not all(calls for _, calls in chains):
            return Skip("what is joined is not cut out of one value")
        (source,) = sources
        if count_known(quantize.args[0]) < count_known(source):
            return Skip("less is joined than what it is cut out of")
        pair = make_parameters(qparams)
        rounding = Rounding(str(quantize.attrs.rounding))
        value = qnn.quantize(emitter.get(source), *pair, out_dtype=qparams.dtype, rounding=rounding)
        whole = emitter.emit(value, f"{match.name}.whole")
        fields = []
        for at, (_, calls) in enumerate(chains):
            field = whole
            for call in calls:
                moved = with_operands(call, [field, *call.args[1:]])
                field = emitter.emit(moved, f"{match.name}.part{at}")
            fields.append(field)
        axis = int(match.call("relax.concat").attrs.axis)
        scales, zeros = (relax.Tuple([each] * len(fields)) for each in pair)
        return qnn.concatenate(relax.Tuple(fields), scales, zeros, *pair, axis=axis)

    return Rule("quantize before joining", pattern, rewrite)


def count_known(expr: relax.Expr) -> int:
    """Return the product of the known sizes."""
    return prod(size for size in tensor_shape(expr) or () if isinstance(size, int))


def trace_cuts(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, list[Call]]:
    """Return (the value that a part is cut out of, the calls on the way)."""
    calls: list[Call] = []
    call = graph.call_of(expr)
    while call is not None and graph.op_name(expr) in CUTS:
        calls.insert(0, call)
        expr = call.args[0]
        call = graph.call_of(expr)
    return expr, calls
