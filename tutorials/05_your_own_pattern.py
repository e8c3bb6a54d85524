"""
Your own pattern
================

An operator that no built-in row takes, ``x * x + x``, as one integer operator: a pattern, one
callback, and a check that all stages agree. Nothing has to be registered.
"""

# %%
# The pattern
# -----------
# A pattern of TVM's pattern language with names for its operands. ``realize`` replaces the float
# operators when all operands are integers. Here every result depends on one of 256 integers: a
# table holds them all. An operator with attributes that ``realize`` honours needs their names in
# ``attributes=``: a match with any other attribute away from its default is left in float.

import numpy as np
import tvm
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.extend import (
    Operand,
    Pattern,
    PatternMismatch,
    Quantized,
    QuantOp,
    Skip,
    build_table,
    check_pattern,
    qnn,
)

data = wildcard()
swell = is_op("relax.add")(is_op("relax.multiply")(data, data), data)


def make_row(function):
    def realize(context):
        """swell(dequantize(x)) -> dequantize(lookup(x, table))."""
        if context.output is None:
            return Skip("no quantized operator reads the result")
        operand = context.operands["data"]
        table = build_table(function, operand.qparams, context.output)
        value = qnn.lookup(operand.value, relax.const(table, str(table.dtype)))
        return Quantized(context.emit(value, "int"), context.output).dequantize()

    return QuantOp(
        name="swell",
        op="relax.add",
        pattern=Pattern(swell, {"data": data}),
        operands=(Operand("data"),),
        realize=realize,
    )


ROW = make_row(lambda x: x * x + x)

# %%
# Is it right?
# ------------
# ``check_pattern`` draws models around the pattern and compares simulation, reference, numpy and
# compiled code.


def build(b):
    x = b.activation(2, b.draw(4, 8))
    return relax.op.add(b.emit(relax.op.multiply(x, x)), x)


print(check_pattern(ROW, build))
try:
    check_pattern(make_row(lambda x: x * x), build, compiled=False)
except PatternMismatch as error:
    print(error)

# %%
# Use it
# ------

x = relax.Var("x", relax.TensorType((1, 3, 8, 8), "float32"))
rng = np.random.default_rng(0)
kernels = [relax.const(rng.standard_normal((3, 3, 3, 3)).astype("float32")) for _ in range(2)]
builder = relax.BlockBuilder()
with builder.function("main", [x]):
    with builder.dataflow():
        first = builder.emit(relax.op.nn.conv2d(x, kernels[0], padding=1), "first")
        square = builder.emit(relax.op.multiply(first, first), "square")
        swollen = builder.emit(relax.op.add(square, first), "swollen")
        out = builder.emit_output(relax.op.nn.conv2d(swollen, kernels[1]), "out")
    builder.emit_func_output(out)
mod: tvm.IRModule = builder.finalize()

batches = [rng.standard_normal((1, 3, 8, 8)).astype("float32") for _ in range(8)]
qmod = rq.quantize(mod, None, batches, backend=rq.get_backend_config("x86").with_pattern(ROW))
print(rq.ledger(qmod))
print(f"compiled code equals numpy: {rq.verify(qmod, batches[0]).is_equal}")
