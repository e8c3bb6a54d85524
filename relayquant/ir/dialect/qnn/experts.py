"""Dialect: matrix products whose weights each row of the data chooses, for mixtures of experts.

The weights of E experts with N outputs each are one weight of E * N rows, the first expert first:
of floats, or grouped as in `grouped`. Data has a row for each choice, (..., S, K), or one row that
all S choices share, (..., 1, K).

    y[..., s, n] = sum over k of x[..., s, k] * w[chosen[..., s] * N + n, k]

A choice is taken modulo E, as in `take` with mode="wrap": nothing outside the weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder
from tvm_ffi import Array
from tvm_ffi.dataclasses import field

from relayquant.errors import QnnError, format_count
from relayquant.ir.dialect.construct import Operand, Parameter, make_call
from relayquant.ir.dialect.loops import OPAQUE, make_loops, name_hint
from relayquant.ir.dialect.operands import (
    Argument,
    CheckedOperand,
    get_operands,
    is_known_different,
    scale_argument,
    show_dimension,
    show_shape,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, compute_tensor
from relayquant.ir.dialect.qnn.grouped import (
    GROUPED_WEIGHT,
    check_grouped_weight,
    check_rows,
    sum_groups,
)
from relayquant.ir.rewrite.graph import static_size

__all__ = ["expert_dense", "grouped_expert_dense"]

EXPERT_OPERANDS = (Argument("data"), Argument("chosen"), Argument("weight"))
GROUPED_EXPERT_OPERANDS = (
    Argument("data"),
    scale_argument("data_scale"),
    Argument("chosen"),
    *GROUPED_WEIGHT,
)


@define_attrs("relayquant.attrs.QExpertAttrs")
class QExpertAttrs(Attrs):
    """Attributes of qnn.expert_dense."""

    experts: int


@define_attrs("relayquant.attrs.QGroupedExpertAttrs")
class QGroupedExpertAttrs(Attrs):
    """Attributes of qnn.grouped_expert_dense."""

    bits: int
    group_size: int
    features: int
    experts: int
    levels: Array = field(default_factory=lambda: Array([]))


# ---------------------------------------------------------------- constructors


def expert_dense(data: Operand, chosen: Operand, weight: Operand, experts: int = 1) -> Call:
    """Multiply each row by the weight of its expert, float32.

    data (..., S or 1, K), chosen int32 or int64 (..., S), weight (E * N, K) -> (..., S, N).
    `experts` is E.
    """
    attrs = QExpertAttrs(int(experts))
    return make_call("expert_dense", EXPERT_OPERANDS, (data, chosen, weight), attrs)


def grouped_expert_dense(
    data: Operand,
    data_scale: Parameter,
    chosen: Operand,
    weight: Operand,
    weight_scale: Operand,
    weight_zero_point: Operand,
    bits: int = 4,
    group_size: int = 32,
    features: int = 0,
    experts: int = 1,
    levels: Sequence[int] = (),
) -> Call:
    """Multiply each row by the grouped weight of its expert -> float32.

    data (..., S or 1, K), chosen int32 or int64 (..., S), a grouped weight of E * N rows
    -> (..., S, N). The rows of data and their scales, and the arithmetic, are those of
    `grouped_dense`. `experts` is E.
    """
    values = (data, data_scale, chosen, weight, weight_scale, weight_zero_point)
    form = int(bits), int(group_size), int(features), int(experts)
    attrs = QGroupedExpertAttrs(*form, Array(list(levels)))
    return make_call("grouped_expert_dense", GROUPED_EXPERT_OPERANDS, values, attrs)


# ---------------------------------------------------------------- types


def infer_expert_dense(call: Call, _builder: Any) -> Any:
    """Infer float32 (..., S or 1, K) -> float32 (..., S, N)."""
    data, chosen, weight = get_operands(call, EXPERT_OPERANDS)
    data.check_dtype(("float32",), "Cast it first.")
    weight.check_dtype(("float32",), "Cast it first.")
    weight.check_rank(2)
    data.check_min_rank(2)
    units = check_experts(call, weight)
    if (
        data.shape is not None
        and weight.shape is not None
        and is_known_different(data.shape[-1], weight.dimension(1))
    ):
        raise data.fail(
            f"has shape {show_shape(data.shape)}",
            f"allowed: (..., {show_dimension(weight.dimension(1))}), as the weight",
        )
    return infer_chosen(data, chosen, units)


def infer_grouped_expert_dense(call: Call, _builder: Any) -> Any:
    """Infer float32 or int8 (..., S or 1, K) -> float32 (..., S, N)."""
    data, data_scale, chosen, *weight = get_operands(call, GROUPED_EXPERT_OPERANDS)
    data.check_min_rank(2)
    check_grouped_weight(call, weight)
    check_rows(call, data, data_scale)
    return infer_chosen(data, chosen, check_experts(call, weight[0]))


def check_experts(call: Call, weight: CheckedOperand) -> int | None:
    """Return the outputs of an expert. None if the rows of the weight are not known.

    Raises:
        QnnError: the weight does not have as many rows for each expert.
    """
    experts = int(call.attrs.experts)
    if experts < 1:
        raise QnnError(
            f"{weight.operator}: experts={experts}; allowed: an integer from 1 on.", code="RQ601"
        )
    rows = static_size(weight.dimension(0))
    if rows is not None and rows % experts:
        raise weight.fail(
            f"has {format_count(rows, 'row')}",
            f"allowed: a multiple of the number of experts, {experts}",
        )
    return None if rows is None else rows // experts


def infer_chosen(data: CheckedOperand, chosen: CheckedOperand, units: int | None) -> Any:
    """Infer the result of data and choices."""
    chosen.check_dtype(("int32", "int64"))
    if chosen.ndim >= 0 and data.ndim >= 0 and chosen.ndim != data.ndim - 1:
        raise chosen.fail(
            f"has rank {chosen.ndim}", f"allowed: {data.ndim - 1}, one choice for each row"
        )
    if data.shape is None or chosen.shape is None or units is None:
        return relax.TensorType(None, "float32", data.ty.vdevice, data.ndim)
    *lead, slots, _ = data.shape
    is_shared = static_size(slots) == 1
    pairs = [*zip(lead, chosen.shape[:-1], strict=True)]
    if not is_shared:
        pairs.append((slots, chosen.shape[-1]))
    if any(is_known_different(*pair) for pair in pairs):
        raise chosen.fail(
            f"has shape {show_shape(chosen.shape)}",
            f"allowed: {show_shape(data.shape[:-1])}, as the rows of the data, or any number of "
            "choices for a last size of 1",
        )
    return relax.TensorType(
        [*chosen.shape, tirx.IntImm("int64", units)], "float32", data.ty.vdevice
    )


# ---------------------------------------------------------------- loop nests


def find_rows(
    call: Call, data: te.Tensor, chosen: te.Tensor
) -> tuple[Callable[..., list[PrimExpr]], Callable[..., PrimExpr]]:
    """Return functions of an element's place: its row of the data, and its row of the weight."""
    experts, units = int(call.attrs.experts), call.ty.shape.values[-1]
    is_shared = static_size(data.shape[len(data.shape) - 2]) == 1

    def find_data(*lead: PrimExpr) -> list[PrimExpr]:
        return [*lead[:-1], tirx.IntImm("int64", 0) if is_shared else lead[-1]]

    def find_weight(*at: PrimExpr) -> PrimExpr:
        number = tirx.floormod(chosen(*at[:-1]).astype("int64"), experts)
        return number * units + at[-1]

    return find_data, find_weight


def legalize_expert_dense(builder: BlockBuilder, call: Call) -> Any:
    """Sum along a row of the data and a row of the chosen weight."""

    def te_dense(data: te.Tensor, chosen: te.Tensor, weight: te.Tensor) -> te.Tensor:
        find_data, find_weight = find_rows(call, data, chosen)
        k = te.reduce_axis((0, weight.shape[1]), name="k")

        def element(*i: PrimExpr) -> PrimExpr:
            return te.sum(data(*find_data(*i[:-1]), k) * weight(find_weight(*i), k), axis=k)

        return compute_tensor(list(call.ty.shape), element, name=name_hint(call))

    return make_loops(builder, call, te_dense, call.args, pattern=OPAQUE)


def legalize_grouped_expert_dense(builder: BlockBuilder, call: Call) -> Any:
    """Sum over each group, then over the groups with their scales, as `grouped_dense`."""

    def te_dense(
        data: te.Tensor, data_scale: te.Tensor, chosen: te.Tensor, *weight: te.Tensor
    ) -> te.Tensor:
        return sum_groups(call, data, data_scale, *weight, *find_rows(call, data, chosen))

    return make_loops(builder, call, te_dense, call.args, pattern=OPAQUE)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "expert_dense", QExpertAttrs, EXPERT_OPERANDS, infer_expert_dense, legalize_expert_dense
    ),
    Operator(
        "grouped_expert_dense", QGroupedExpertAttrs, GROUPED_EXPERT_OPERANDS,
        infer_grouped_expert_dense, legalize_grouped_expert_dense,
    ),
)  # fmt: skip
