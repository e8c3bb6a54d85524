"""Step between prepare and annotate for partly quantized models: quantized parts -> integer
operators; the rest is planned and calibrated around them.

Operators whose operands and results have parameters become integer operators at once. Two kinds of
values get fixed calibrations: values on the boundary to these operators, and values whose
parameters the user gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tvm

from relayquant.base.qtypes import INTEGER_LIMITS, Granularity, QParams, QSpec, Scheme
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, ModelError, suggest_name, warn_user
from relayquant.ir.dialect.legality import is_integer_operator
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE, QUANTIZE
from relayquant.ir.ledger import find_ledger
from relayquant.ir.plan import Plan, SharedQParams
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import read_sources
from relayquant.stages.conversion import (
    add_ledger,
    adopt_reference,
    expand_affine,
    fold_qnn,
    realize_qnn,
)
from relayquant.stages.conversion.io_dtypes import shift_qparams
from relayquant.stages.conversion.qnn_form import read_dequantize, read_qparams

#: Relax operators, in modules that are not canonical yet
QDQ_OPERATORS = ("relax.quantize", "relax.dequantize")


def has_quantized_values(mod: tvm.IRModule) -> bool:
    """Whether main holds a quantize or dequantize, of the dialect or of Relax. Importers write
    the Relax operators; a canonical module has the dialect's.
    """
    graph = Graph(mod)
    names = (graph.op_name(binding.var) for binding in graph.bindings)
    return any(is_integer_operator(name) or name in QDQ_OPERATORS for name in names)


def realize_quantized(canonical: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """Turn a canonical module's quantize and dequantize operators into integer operators,
    wherever these enclose an operator. The ledger says what became of each.
    """
    adopted = adopt_reference(canonical, backend)
    integer = realize_qnn(adopted, backend)
    folded = fold_qnn(expand_affine(integer, backend))
    return add_ledger(folded, adopted, canonical, backend)


def check_unfinished(canonical: tvm.IRModule) -> None:
    """Raise ModelError on a module that this package made: it is quantized once."""
    if find_ledger(canonical) is not None:
        raise ModelError(
            "The module was quantized by relayquant and cannot be quantized again. Start from "
            "the float model, or from what load gave for a model quantized elsewhere.",
            code="RQ205",
        )


def check_quantized(canonical: tvm.IRModule) -> None:
    """Raise ModelError on a module that nobody quantized: it cannot be lowered."""
    if not has_quantized_values(canonical):
        raise ModelError(
            "The module holds no quantized value, so there is nothing to lower. Quantize it: "
            "relayquant.quantize(mod, params, dataset).",
            code="RQ205",
        )


def find_known(mod: tvm.IRModule) -> dict[str, QParams]:
    """Return per-tensor parameters by name, for real values that are dequantized from integers
    or quantized to integers.
    """
    graph = Graph(mod)
    known: dict[str, QParams] = {}
    for binding in graph.bindings:
        op, call = graph.op_name(binding.var), graph.call_of(binding.var)
        if call is None or op not in (QUANTIZE, DEQUANTIZE):
            continue
        if op == DEQUANTIZE:
            quantized = read_dequantize(graph, binding.var)
            qparams, name = quantized and quantized.qparams, binding.var.name
        else:
            qparams = read_qparams(call, str(call.attrs.out_dtype))
            name = getattr(call.args[0], "name", "")
        if qparams is not None and not qparams.is_per_channel and name:
            known.setdefault(name, qparams)
    return known


def find_constant_groups(sources: Mapping[str, dict[str, Any]], plan: Plan) -> dict[str, str]:
    """Map the name of a weight in the source model ("layer1.0.conv1.weight") to the key of its
    group, if the importer recorded the name.
    """
    found: dict[str, str] = {}
    for group in plan.groups:
        if group.constant is None:
            continue
        values = plan.operator(group.constant[0]).values
        rows = (sources.get(value, {}).get("constants") for value in values)
        # The first value is the product. Its weight is the constant with the highest rank.
        names = next((row for row in rows if row), ())
        for name in names[:1]:
            found.setdefault(name, group.key)
    return found


def fix_parameters(
    mod: tvm.IRModule,
    plan: Plan,
    found: Mapping[str, QParams],
    given: Mapping[str, QParams] | None,
    fix: Callable[[Any, Any], Any],
) -> Plan:
    """Return the plan with fixed calibrations for the groups that already have parameters.

    Args:
        mod: The canonical module.
        plan: The plan from annotate.
        found: Value -> parameters in the model. Names without a group are left out.
        given: Value, weight or group ("conv1:weight") -> parameters from the user. They win over
            `found`. One warning lists values of the model that the plan does not quantize: files of
            other tools also have parameters for values inside an operator that is fused here.
        fix: (scale, zero point) -> the observer that always chooses these, `observers.Fixed`. It is
            passed in, because this stage does not import observers.

    Raises:
        ConfigError: `given` names nothing in the model, or has another width or number of
            parameters than the plan.
    """
    sources = read_sources(mod["main"])
    owners = find_constant_groups(sources, plan)
    owners.update({member: group.key for group in plan.groups for member in group.members})
    owners.update({group.key: group.key for group in plan.groups})
    fixed: dict[str, SharedQParams] = {}
    for name, qparams in found.items():
        group = plan.group(owners[name]) if name in owners else None
        if group is not None and width(group.info.spec.dtype) == width(qparams.dtype):
            fixed[group.key] = fix_group(group, qparams, name, fix)
    known = {var.name for var in Graph(mod).order} | set(sources)
    known.update(name for row in sources.values() for name in row.get("constants", ()))
    unused: list[str] = []
    for name, qparams in (given or {}).items():
        if name not in owners and name in known:
            unused.append(name)
            continue
        if name not in owners:
            raise ConfigError(
                f"parameters has {name!r}, which the plan does not quantize. "
                f"{suggest_name(name, owners)}",
                code="RQ103",
            )
        fixed[owners[name]] = fix_group(plan.group(owners[name]), qparams, name, fix)
    if unused:
        warn_user(
            f"{len(unused)} of the given parameters are not used, since the plan does not quantize "
            f"these values: {', '.join(map(repr, unused))}. They are in float, or inside of an "
            "operator that is computed as a whole.",
            code="RQ103",
        )
    return replace(plan, groups=tuple(fixed.get(group.key, group) for group in plan.groups))


def width(dtype: str) -> int:
    """Return the number of integers of a dtype, minus one."""
    low, high = INTEGER_LIMITS[dtype]
    return high - low


def fix_group(
    group: SharedQParams, qparams: QParams, name: str, fix: Callable[[Any, Any], Any]
) -> SharedQParams:
    """Return the group with these parameters in the group's dtype (uint8 is int8 shifted by 128).

    Raises:
        ConfigError: the width or the number of parameters differs.
    """
    spec, info = group.info.spec, group.info
    if qparams.is_per_channel and not spec.is_per_channel:
        raise ConfigError(
            f"parameters[{name!r}] is per channel, the plan says one scale for {group.key!r}.",
            code="RQ103",
        )
    if spec.is_per_channel and not qparams.is_per_channel:
        spec, info = replace(spec, granularity=Granularity.PER_TENSOR), replace(info, axis=None)
    shifted = shift_qparams(qparams, spec.dtype, f"parameters[{name!r}]")
    is_centred = bool((shifted.zero_point == spec.symmetric_zero_point).all())
    if not (spec.is_symmetric and is_centred):
        spec = QSpec(spec.dtype, Scheme.AFFINE, spec.granularity)
    scale, zero_point = np.float32(shifted.scale), shifted.zero_point
    observer = fix(scale.tolist(), zero_point.tolist())
    info = replace(info, spec=spec)
    return replace(group, info=info, observer=observer, is_fixed=True)
