"""Check after annotation: plan + configuration -> warnings about requests that have no effect.

Each kind of problem is one warning that lists every instance. With `strict` it is one error.
"""

from __future__ import annotations

import tvm

from relayquant.config import BackendConfig, QConfigMapping, Support
from relayquant.errors import ConfigError, format_count, warn_user
from relayquant.ir.plan import OperatorPlan, Plan
from relayquant.stages.annotation.match import find_sites

#: number of reasons named if nothing at all is quantized
MOST_REASONS = 5


def review_plan(
    mod: tvm.IRModule,
    plan: Plan,
    mapping: QConfigMapping,
    backend: BackendConfig,
    *,
    strict: bool,
    is_partial: bool,
) -> None:
    """Warn of unsupported QConfigs, of mapping lines without effect, and of a plan that quantizes
    nothing.

    Args:
        is_partial: Whether a part of the module was quantized before.

    Raises:
        ConfigError: with `strict`, if there is one of these problems.
    """
    texts = [
        describe_unsupported(plan, backend.name_mapping(mapping), strict=strict),
        describe_idle(mod, plan, mapping),
        "" if is_partial else describe_nothing(plan, mapping, backend),
    ]
    unsupported, _, nothing = texts
    if unsupported and nothing:
        texts.remove(nothing)  # the warning above gave the reasons of all operators
    for text in filter(None, texts):
        if strict:
            raise ConfigError(text, code="RQ104")
        warn_user(text, code="RQ104")


def describe_unsupported(plan: Plan, mapping: str, *, strict: bool) -> str:
    """List the operators whose QConfig the backend does not support; "" if there are none.

    A warning names requests that had no effect: dtypes that the backend does not run, and operators
    that a line of the mapping selects by type or name. In strict mode every operator that has a
    QConfig must be quantized. To keep an operator in float on purpose, map it to None. `mapping` is
    code for the mapping.
    """
    rows = [op for op in plan.operators if (op.is_left_in_float if strict else op.is_unsupported)]
    if not rows:
        return ""
    lines = "\n  ".join(map(describe_row, rows))
    if strict:
        kept = "".join(f".set_module_name({op.name!r}, None)" for op in rows)
        return (
            f"{format_count(len(rows), 'operator')} cannot be quantized as the QConfigMapping "
            f"says:\n  {lines}\n"
            f"To keep them in float, pass qconfig_mapping={mapping}{kept}; or pass strict=False."
        )
    verb = "stays" if len(rows) == 1 else "stay"
    return (
        f"{format_count(len(rows), 'operator')} {verb} in float although the QConfigMapping or the "
        f"backend's default_qconfig asks for integers:\n  {lines}"
    )


def describe_row(op: OperatorPlan) -> str:
    """Describe one operator in float, in one line."""
    advice = f"; {op.advice}" if op.advice else ""
    return f"{op.name} ({op.op.removeprefix('relax.')}, {op.support.value}): {op.reason}{advice}"


def describe_idle(mod: tvm.IRModule, plan: Plan, mapping: QConfigMapping) -> str:
    """List the lines whose operators are all decided by other lines; "" if there are none."""
    sites = find_sites(mod, plan).values()
    rows = []
    for rule in mapping.find_idle(sites):
        found = [mapping.find_rule(site) for site in sites if rule.selects(site)]
        others = dict.fromkeys(other.description for other in found if other is not None)
        rows.append(f"{rule.description}: {', '.join(others)} decides")
    if not rows:
        return ""
    verb = "decides" if len(rows) == 1 else "decide"
    return (
        f"{format_count(len(rows), 'line')} of the QConfigMapping {verb} for no operator, since "
        "other lines do:"
        "\n  " + "\n  ".join(rows) + "\nOf several regular expressions the first that was set and "
        "matches decides, of several names the longest, and names before regular expressions "
        "before types. Set them in another order, or leave these lines out."
    )


def describe_nothing(plan: Plan, mapping: QConfigMapping, backend: BackendConfig) -> str:
    """Return why no operator is quantized. "" if one is quantized or computed in a narrow float
    dtype, or if the mapping keeps all operators in float.
    """
    rows = [op for op in plan.operators if op.support is not Support.NOT_ASKED or not op.rule]
    if not rows or any(op.quantized or op.compute for op in plan.operators):
        return ""
    code = backend.code
    found = (row.pattern.name for row in backend.patterns)
    usable = next((name for name in found if any(backend.list_qconfigs(name))), "")
    default = f"{code}.find_qconfig({usable!r})" if usable else "relayquant.QConfig(...)"
    if backend.default_qconfig is not None:
        default = f"{code}.default_qconfig"
    if not mapping.rules and backend.default_mapping.rules:
        return (
            "Nothing is quantized: the QConfigMapping has no line. Pass "
            f"qconfig_mapping={code}.default_mapping, or leave it out."
        )
    if not mapping.rules:
        return (
            f"Nothing is quantized: backend {backend.name!r} has no default_qconfig, and there is "
            "no QConfigMapping. "
            f"Pass backend=dataclasses.replace({code}, default_qconfig={default})."
        )
    if all(rule.qconfig is None and not rule.rows for rule in mapping.rules):
        return (
            "Nothing is quantized: the QConfigMapping says what stays in float, and no line says "
            "how the other operators are quantized. Pass "
            f"qconfig_mapping=mapping.set_global({default})."
        )
    reasons = list(dict.fromkeys(describe_row(op) for op in rows))
    more = f"\n  and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
    return (
        f"Nothing is quantized; of {format_count(len(rows), 'operator')} none can be:\n  "
        + "\n  ".join(reasons[:MOST_REASONS])
        + more
    )
