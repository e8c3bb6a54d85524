"""Rules for `layout`: quantize and dequantize change places with operators that only move values.

    quantize(permute_dims(x))       ->  permute_dims(quantize(x))
    quantize(pad(x))                ->  pad(quantize(x))
    dequantize(permute_dims(sums))  ->  permute_dims(dequantize(sums))
    dequantize(reshape(sums))       ->  reshape(dequantize(sums))

All are exact. Integers of 8 bits are a quarter of the bytes to move, and the kernel of the sums can
dequantize them. Volumes need this most: they become images and volumes again.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.qtypes import Rounding
from relayquant.ir.dialect import qnn
from relayquant.ir.reference.qnn import quantize as quantize_array
from relayquant.ir.rewrite import Emitter, Match, Pattern, Rule, Skip
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation


def _quantize_of_moved() -> Rule:
    moved = wildcard()
    pattern = Pattern(is_op("relax.qnn.quantize")(moved, wildcard(), wildcard()), {"moved": moved})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        quantize, call = match.graph.values[match.root], match.graph.call_of(match.parts["moved"])
        scale, zero = (constant_value(each) for each in quantize.args[1:3])
        if call is None or op_name(call) not in ("relax.permute_dims", "relax.nn.pad"):
            return Skip("the operand is not moved")
        if scale is None or zero is None or scale.size != 1 or zero.size != 1:
            return Skip("not one constant scale and zero point")
        form = {"out_dtype": tensor_dtype(match.root), "rounding": str(quantize.attrs.rounding)}
        value = qnn.quantize(emitter.get(call.args[0]), *quantize.args[1:3], **form)
        codes = emitter.emit(value, f"{match.name}.before")
        if op_name(call) == "relax.permute_dims":
            return relax.op.permute_dims(codes, list_permutation(call))
        padding = np.array(call.attrs.pad_value, "float32")
        rounding = Rounding(form["rounding"])
        code = quantize_array(padding, scale, zero, out_dtype=form["out_dtype"], rounding=rounding)
        widths = [int(width) for width in call.attrs.pad_width]
        return relax.op.nn.pad(codes, widths, str(call.attrs.pad_mode), int(code))

    return Rule("quantize of a moved value", pattern, rewrite)


def _dequantize_of_moved() -> Rule:
    moved = wildcard()
    pattern = Pattern(
        is_op("relax.qnn.dequantize")(moved, wildcard(), wildcard()), {"moved": moved}
    )

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        dequantize, call = match.graph.values[match.root], match.graph.call_of(match.parts["moved"])
        if call is None or tensor_dtype(match.parts["moved"]) != "int32":
            return Skip("the operand is not a bound int32")
        if op_name(call) not in ("relax.permute_dims", "relax.reshape"):
            return Skip("the operand is not moved")
        data, rank = call.args[0], match.root.ty.ndim
        if rank == 0:
            return Skip("a scalar")
        axis = int(dequantize.attrs.axis) % rank
        if op_name(call) == "relax.permute_dims":
            axis = list_permutation(call)[axis]
        elif axis == rank - 1 and keeps_last_axis(call):
            axis = data.ty.ndim - 1
        else:
            return Skip("the channels are not the last axis before and after")
        value = qnn.dequantize(
            emitter.get(data), *dequantize.args[1:3], axis, tensor_dtype(match.root)
        )
        real = emitter.emit(value, f"{match.name}.before")
        if op_name(call) == "relax.permute_dims":
            return relax.op.permute_dims(real, list_permutation(call))
        return relax.op.reshape(real, match.root.ty.shape)

    return Rule("dequantize of moved sums", pattern, rewrite)


def keeps_last_axis(reshape: Call) -> bool:
    """Whether a reshape leaves the last axis as it is."""
    before, after = tensor_shape(reshape.args[0]), tensor_shape(reshape)
    return before is not None and after is not None and before[-1:] == after[-1:] != ()


MOVED_QUANTIZATION: tuple[Rule, ...] = (_quantize_of_moved(), _dequantize_of_moved())
