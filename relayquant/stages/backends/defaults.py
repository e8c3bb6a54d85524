"""Configurations that several backends share: default QConfigs and the patterns that run on any
CPU.
"""

from __future__ import annotations

import functools

from relayquant.base.qtypes import INTEGER_LIMITS, Granularity, QSpec, Role, Scheme
from relayquant.config import (
    DTypeConfig,
    DTypeWithConstraints,
    FixedOutput,
    ObservationType,
    PatternConfig,
    TensorConfig,
)
from relayquant.config.observers import Fixed, MinMax
from relayquant.ir.ops import BUILTIN_OPS, QuantOp
from relayquant.ir.ops.dense import MATMUL
from relayquant.ir.ops.lut import CHAIN_OPS, TABLE_OPS

#: placeholder where the backend leaves the choice to the level of effort
#: (`relayquant.stages.effort`)
DEFAULT_OBSERVER = MinMax()

#: symmetric, one scale per output channel, -127..127 so that negation never overflows
WEIGHT_INT8 = TensorConfig(
    QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=-127), MinMax()
)

#: the same within -64..64: the sum of two products with bytes then fits int16, and CPUs with AVX2
#: or AVX512 but no VNNI multiply in three instructions instead of four
WEIGHT_7BIT = TensorConfig(
    QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=-64, quant_max=64), MinMax()
)

#: activation dtypes that the kernels take
BYTES = ("uint8", "int8")

#: granularities of dynamic parameters that products take
RUN_TIME = (Granularity.PER_TENSOR, Granularity.PER_ROW)

#: smallest result of operators whose results are below 1 for any data
UNIT_RANGES = {"sigmoid": 0.0, "softmax": 0.0, "tanh": -1.0}


def activation_config(dtype: str) -> TensorConfig:
    """Return an affine activation configuration, with one set of parameters per tensor."""
    return TensorConfig(QSpec(dtype, Scheme.AFFINE), DEFAULT_OBSERVER)


def make_patterns(activations: tuple[str, ...]) -> tuple[PatternConfig, ...]:
    """Return rows for all built-in operators on activations of these dtypes, with int8 weights.

    Input and output dtypes may differ, so one model can mix precisions. The first dtype is
    preferred. A dtype without a kernel (16 bits) runs by the exact default legalization: the same
    integers at lower speed.
    """
    return tuple(make_pattern(op, activations) for op in BUILTIN_OPS)


def make_pattern(op: QuantOp, activations: tuple[str, ...]) -> PatternConfig:
    """Return the row of one operator: every input dtype it takes, with every output dtype."""
    taken = (constrain_data(op, dtype) for dtype in activations)
    dtypes = make_static_dtypes(tuple(one for one in taken if one is not None), activations)
    if op.realize_dynamic is not None:
        dtypes += make_dynamic_dtypes(activations, is_product=op.op == MATMUL)
    if op.realize_grouped is not None:
        dtypes += make_grouped_dtypes()
    if op.name not in UNIT_RANGES:
        return PatternConfig(op, dtypes)
    fixed = tuple(
        make_fixed(UNIT_RANGES[op.name], dtype, scheme)
        for dtype in activations
        for scheme in Scheme
    )
    return PatternConfig(op, dtypes, ObservationType.OUTPUT_USE_FIXED_QPARAMS, fixed)


# Most operators share their dtypes. They are made once, to keep the import fast.
@functools.cache
def make_static_dtypes(
    inputs: tuple[DTypeWithConstraints, ...], activations: tuple[str, ...]
) -> tuple[DTypeConfig, ...]:
    """Combine each input dtype with every activation dtype as output, the same dtype first."""
    return tuple(
        DTypeConfig(input=data, output=result, weight="int8")
        for data in inputs
        for result in (data.dtype, *(other for other in activations if other != data.dtype))
    )


@functools.cache
def make_dynamic_dtypes(
    activations: tuple[str, ...], *, is_product: bool
) -> tuple[DTypeConfig, ...]:
    """Return the dtypes with dynamic parameters, activation dtypes first."""
    return tuple(
        DTypeConfig(
            input=DTypeWithConstraints(data, granularities=RUN_TIME) if is_product else data,
            output="float32",
            weight="int8",
            bias="float32",
            is_dynamic=True,
        )
        for data in sorted(BYTES, key=lambda dtype: dtype not in activations)
    )


@functools.cache
def make_grouped_dtypes() -> tuple[DTypeConfig, ...]:
    """Return the dtypes with weights in groups."""
    return tuple(
        DTypeConfig(input=data, output="float32", weight="int8", bias="float32", is_grouped=True)
        for data in ("float32", "int8")
    )


def constrain_data(op: QuantOp, dtype: str) -> DTypeWithConstraints | None:
    """Return the constraint on an activation dtype for an operator; None if it does not take the
    dtype.

    A table has one entry for each of 256 inputs. Sums of products of two 16-bit activations need 64
    bits. Unless both are symmetric, one product needs 64 bits too. There are no kernels for either.
    """
    is_product = op.op in (MATMUL, "relax.multiply")
    if dtype in BYTES or not (is_product or is_table(op)):
        return DTypeWithConstraints(dtype)
    if any(operand.role is Role.WEIGHT for operand in op.operands):
        return DTypeWithConstraints(dtype)
    if op.op == "relax.multiply":
        return DTypeWithConstraints(dtype, schemes=(Scheme.SYMMETRIC,))
    return None


def is_table(op: QuantOp) -> bool:
    """Whether an operator runs as a lookup table."""
    return op in (*CHAIN_OPS, *TABLE_OPS)


def make_fixed(low: float, dtype: str, scheme: Scheme) -> FixedOutput:
    """Return the parameters of results from `low` to the last step below 1: FX's 1/256 and 0 for
    a uint8 sigmoid, 1/128 and 128 for tanh.
    """
    smallest, largest = INTEGER_LIMITS[dtype]
    step = (1 - low) / (largest - smallest + 1)
    return FixedOutput(dtype, scheme, Fixed(low=low, high=1 - step))
