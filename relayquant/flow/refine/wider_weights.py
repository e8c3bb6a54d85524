"""Prepared model -> the QConfigs with which weights of few bits get as many as the backend gives by
default.

A step between few bits and float: the operator still runs on integers, and its weight takes 8 bits
instead of 32. The guard and the search try this before they put operators back into float.
"""

from __future__ import annotations

from dataclasses import replace

from relayquant.base.qtypes import QSpec, Role
from relayquant.config import QConfig
from relayquant.ir.plan import OperatorPlan
from relayquant.stages.annotation.match import find_sites
from relayquant.stages.prepared import PreparedModel


def find_wider_weights(prepared: PreparedModel) -> dict[str, QConfig]:
    """Return a QConfig for each operator on integers whose weight has fewer bits than its default
    of the backend, in order: its own, with a weight of all bits.
    """
    mapping = prepared.mapping
    if mapping is None:
        return {}
    sites, found = find_sites(prepared.source, prepared.plan), {}
    for operator in prepared.plan.operators:
        specs = list_weights(prepared, operator)
        default = prepared.backend.find_default(operator.pattern)
        if default is None or default.is_grouped:
            continue
        rule = mapping.find_rule(sites[operator.name]) if operator.quantized and specs else None
        if rule is None or not isinstance(rule.qconfig, QConfig):
            continue
        weight = rule.qconfig.weight
        if all(has_fewer_bits(spec, default.weight.spec) for spec in specs):
            wide = default.weight.spec
            spec = replace(weight.spec, quant_min=wide.quant_min, quant_max=wide.quant_max)
            found[operator.name] = replace(rule.qconfig, weight=replace(weight, spec=spec))
    return found


def has_wider_weight(prepared: PreparedModel, name: str, qconfig: QConfig) -> bool:
    """Whether a QConfig gives the weight of an operator more bits than the plan does."""
    specs = list_weights(prepared, prepared.plan.operator(name))
    return any(has_fewer_bits(spec, qconfig.weight.spec) for spec in specs)


def list_weights(prepared: PreparedModel, operator: OperatorPlan) -> list[QSpec]:
    """How the plan quantizes an operator's weights."""
    groups = [prepared.plan.group(key) for _, key in operator.operands]
    return [group.info.spec for group in groups if group.info.role is Role.WEIGHT]


def has_fewer_bits(spec: QSpec, default: QSpec) -> bool:
    """Whether a weight uses only some of the default's integers."""
    return spec.dtype == default.dtype and spec.code_bits < default.code_bits
