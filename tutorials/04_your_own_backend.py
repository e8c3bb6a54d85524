"""
Your own backend
================

A backend for hardware that relayquant knows nothing of, in about a hundred lines: what it can run,
its own quantized operators, how a reference model becomes calls of them, and an emulation of its
arithmetic. The hardware multiplies int8 matrices, and can do a softmax behind the product before
anything leaves the chip: both with symmetric int8, as in TVM's RFC 19 on bringing a quantizer of
one's own.
"""

# %%
# What the hardware computes
# --------------------------
# Two functions, emulated in numpy under the names that generated code calls them by. A real
# backend would have its driver here.

import numpy as np
import tvm
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.extend import Kind, Operand, Pattern, Quantized, QuantOp, Skip


def npu_batch_matmul(a, b, scale, softmax):
    """int8 (..., M, K) x int8 (..., K, N) -> int8; scale: of the products and of the result."""
    product_scale, result_scale = scale
    total = a.astype("int32") @ b.astype("int32")
    real = total.astype("float32") * np.float32(product_scale)
    if softmax:
        real = np.exp(real - real.max(-1, keepdims=True))
        real = (real / real.sum(-1, keepdims=True)).astype("float32")
    return np.clip(np.rint(real / np.float32(result_scale)), -127, 127).astype("int8")


def emulate(softmax):
    def call(a, b, scale):
        result = npu_batch_matmul(a.numpy(), b.numpy(), scale.numpy(), softmax)
        return tvm.runtime.tensor(result)

    return call


OPERATORS = {False: "npu.batch_matmul", True: "npu.batch_matmul_softmax"}
for fused, name in OPERATORS.items():
    tvm.register_global_func(name, emulate(fused), override=True)

# %%
# Its patterns
# ------------
# A row says what the operator looks like in the float model, which operands are quantized, and how
# it is lowered: ``realize`` gets the operands in affine space, from the dequantize - float operator
# - quantize of the reference model, and gives back a call of the hardware's operator.


def lower_batch_matmul(context):
    """matmul [+ softmax] of dequantized values -> a call of the hardware, dequantized."""
    lhs, rhs, out = context.operands["lhs"], context.operands["rhs"], context.output
    if out is None:
        return Skip("the hardware returns int8, and nothing wants integers here")
    softmax = context.match.find_call("relax.nn.softmax") is not None
    scale = np.array([lhs.qparams.scale * rhs.qparams.scale, out.scale], "float32")
    shape = context.match.root.ty.shape
    value = relax.call_pure_packed(
        OPERATORS[softmax],
        lhs.value,
        rhs.value,
        relax.const(scale),
        ty_args=relax.TensorType(shape, "int8"),
    )
    return Quantized(context.emit(value, "npu"), out).dequantize()


def npu_pattern(softmax):
    lhs, rhs = wildcard(), wildcard()
    root = is_op("relax.matmul")(lhs, rhs)
    root = is_op("relax.nn.softmax")(root) if softmax else root
    return QuantOp(
        OPERATORS[softmax],
        "relax.matmul",
        Pattern(root, {"lhs": lhs, "rhs": rhs}),
        (Operand("lhs"), Operand("rhs")),
        kind=Kind.ANCHOR,
        realize=lower_batch_matmul,
    )


# %%
# The backend
# -----------
# One table: dtypes with constraints, and the parameters of a softmax, which lies between 0 and 1
# whatever the data. The longer pattern comes first.

BYTE = rq.config.DTypeWithConstraints(
    "int8",
    schemes=(rq.config.Scheme.SYMMETRIC,),
    granularities=(rq.config.Granularity.PER_TENSOR,),
    quant_min_lower_bound=-127,
)
DTYPES = (rq.config.DTypeConfig(input=BYTE, output=BYTE),)
SPEC = rq.TensorConfig(
    rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, quant_min=-127), rq.observers.MinMax()
)
NPU = rq.BackendConfig(
    "npu",
    patterns=(
        rq.config.PatternConfig(
            npu_pattern(softmax=True),
            DTYPES,
            rq.config.ObservationType.OUTPUT_USE_FIXED_QPARAMS,
            (
                rq.config.FixedOutput(
                    "int8", rq.config.Scheme.SYMMETRIC, rq.observers.Fixed(1 / 127, 0)
                ),
            ),
        ),
        rq.config.PatternConfig(npu_pattern(softmax=False), DTYPES),
    ),
    default_qconfig=rq.QConfig(activation=SPEC, weight=SPEC),
)
print(NPU.explain())

# %%
# A model: attention
# ------------------

query, key, value = (
    relax.Var(name, relax.TensorType(shape, "float32"))
    for name, shape in (("q", (2, 8, 16)), ("k", (2, 16, 8)), ("v", (2, 8, 16)))
)
builder = relax.BlockBuilder()
with builder.function("main", [query, key, value]):
    with builder.dataflow():
        scores = builder.emit(relax.op.matmul(query, key), "scores")
        weights = builder.emit(relax.op.nn.softmax(scores), "weights")
        mixed = builder.emit(relax.op.matmul(weights, value), "mixed")
        mixed = builder.emit_output(mixed)
    builder.emit_func_output(mixed)
mod = builder.finalize()

rng = np.random.default_rng(0)
data = [
    {p.name: rng.standard_normal([int(d) for d in p.ty.shape]).astype("float32") for p in
     mod["main"].params}
    for _ in range(8)
]  # fmt: skip

# %%
# From the float model to the hardware
# ------------------------------------

prepared = rq.prepare(mod, None, backend=NPU, strict=True, output_dtypes={"mixed": "int8"})
prepared = rq.calibrate(prepared, data)
reference = rq.convert_to_reference(prepared)
npu_mod = rq.lower(prepared)
print(rq.ledger(npu_mod))
print(npu_mod["main"].script(show_meta=False).split("@R.function")[-1])

# %%
# It runs, and it is the model
# ----------------------------
# The reference model, which knows nothing of the hardware, predicts what it computes.

(have,) = rq.Executor(rq.compile(npu_mod)).run("main", list(data[0].values()))
have = have.astype("float32") * np.float32(rq.ledger(npu_mod).outputs[0].scale[0])
(want,) = rq.reference.run(mod, data[0])
(predicted,) = rq.reference.run(reference, data[0])
print(f"largest error against float     {np.abs(have - want).max():.4f}")
print(f"largest error against reference {np.abs(have - predicted).max():.4f}")
assert np.abs(have - want).max() < 0.05 * np.abs(want).max()

# %%
# A narrower accumulator
# ----------------------
# Other hardware sums products in 32 bits or fewer. ``"int14"`` saturates, ``"int14 wrap"`` wraps
# around; both are emulated exactly, and calibration raises scales until the sums fit.

NARROW = rq.BackendConfig(
    "narrow",
    patterns=tuple(
        rq.config.PatternConfig(
            row.pattern, (rq.config.DTypeConfig(input="int8", output="int8", accumulator="int14"),)
        )
        for row in rq.get_backend_config("arm").patterns
    ),
    default_qconfig=rq.get_backend_config("arm").default_qconfig,
)
narrow = rq.calibrate(rq.prepare(mod, None, backend=NARROW), data)
print(rq.analysis.accumulator_report(narrow, data))
