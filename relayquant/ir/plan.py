"""The plan: plain data that lists the quantized values with their settings, and why other operators
stay in float.

`annotate` makes the plan. All later stages read it. Operators are named by the value that they
compute.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from relayquant.base.arguments import check_arguments
from relayquant.base.plain_data import NamedSettings, PlainFields, check_keys, read_fields
from relayquant.base.qtypes import QSpec, ValueInfo
from relayquant.config import Accumulator, Support
from relayquant.config.observers import read_observer
from relayquant.config.qconfig import check_observer
from relayquant.errors import ConfigError, suggest_name

#: keys of a group in plain data, after the fields of its `info`
GROUP_KEYS = ("members", "points", "clamped", "constant", "base", "is_fixed", "observer")


@dataclass(frozen=True)
class SharedQParams(PlainFields):
    """One set of quantization parameters, and the values that share it.

    Attributes:
        info: Name (the key of the group), role, specification, shape and channel axis.
        members: Values with these parameters, in topological order; empty for a constant operand.
        points: Members that are observed and rounded. The other members are representable already.
        clamped: Members that are rounded again, but not observed: the result of a clip with bounds
            that are not representable, or of a mean that shares its input's parameters.
        constant: (operator, operand) for a constant operand such as a weight, else None.
        observer: Observer or callable that chooses the parameters.
        is_fixed: Whether the backend fixes the parameters. A user setting for all values then does
            not replace `observer`.
        base: Key of the group that this group converts from, for a value with two groups.
    """

    info: ValueInfo
    members: tuple[str, ...]
    points: tuple[str, ...]
    observer: Any
    constant: tuple[str, str] | None = None
    base: str | None = None
    clamped: tuple[str, ...] = ()
    is_fixed: bool = False

    @property
    def key(self) -> str:
        return self.info.name

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the fields of `info` at the top level.

        An observer is included. A callable is left out.
        """
        is_plain = isinstance(self.observer, NamedSettings)
        data = super().to_dict()
        data["observer"] = self.observer.to_dict() if is_plain else None
        return {**data.pop("info"), **{key: data[key] for key in GROUP_KEYS}}

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> SharedQParams:
        """Read the data of `to_dict`. `observer` is None if it was a callable.

        Raises:
            ConfigError: a key is wrong or missing, or a value is not allowed.
        """
        where = where or cls.__name__
        info_keys = [f.name for f in dataclasses.fields(ValueInfo)]
        names = (*info_keys, *GROUP_KEYS)
        found = dict(check_keys(data, names, where, names))
        info = read_fields(ValueInfo, {key: found.pop(key) for key in info_keys}, where)
        if found["observer"] is not None:
            seen = NamedSettings.from_dict(found["observer"], f"{where}.observer")
            found["observer"] = seen
        return read_fields(SharedQParams, {**found, "info": info}, where)


@dataclass(frozen=True)
class PassedOver(PlainFields):
    """A user row that matches an operator but did not take it.

    Attributes:
        pattern: Name of the row's pattern.
        reason, advice: Why it did not take the operator, and what to do. Advice "" is nothing to
            do.
    """

    pattern: str
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        """Return part of a line."""
        advice = f" ({self.advice})" if self.advice else ""
        return f"your row {self.pattern!r} passed over: {self.reason}{advice}"


@dataclass(frozen=True)
class OperatorPlan(PlainFields):
    """What happens to one operator (or fused pattern) of the prepared float graph.

    Attributes:
        name: Value it computes.
        op: Main operator, e.g. "relax.nn.conv2d".
        values: All values bound by the match. The last is `name`.
        pattern: Name of the pattern, "" if none matched.
        quantized: Whether it runs on integers.
        operands: (operand name, group key) for every quantized operand.
        output: Group key of its result. None for a result that stays an accumulator or is float.
        reason, advice: Why it stays in float and what to do. "" if it is quantized.
        sources: Names of its nodes in the source model.
        support: How the backend answered its QConfig.
        rule: The deciding line of the QConfigMapping, "" if there is none.
        is_explicit: Whether the line selects this operator, not all operators.
        accumulator: Accumulator of its sums of products. None for the accumulator of the kernels.
        compute: Narrow float dtype of the computation. "" if it is quantized or float32.
        dynamic: Specification of data with run-time parameters, else None. The data is in no group.
            Before conversion it is float.
        grouped: Specification of a grouped weight, else None. A grouped weight has no quantization
            parameters in the plan.
        passed_over: User rows that match it but did not take it.
    """

    name: str
    op: str
    values: tuple[str, ...]
    pattern: str = ""
    quantized: bool = False
    operands: tuple[tuple[str, str], ...] = ()
    output: str | None = None
    reason: str = ""
    advice: str = ""
    sources: tuple[str, ...] = ()
    support: Support = Support.SERVED
    rule: str = ""
    is_explicit: bool = False
    accumulator: Accumulator | None = None
    compute: str = ""
    dynamic: QSpec | None = None
    grouped: QSpec | None = None
    has_constants_only: bool = False  #: only constants are quantized, not the data
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def has_float_data(self) -> bool:
        """Whether it is quantized but has float data and a float result."""
        is_chosen = self.dynamic is not None or self.grouped is not None
        return is_chosen or self.has_constants_only

    @property
    def is_unsupported(self) -> bool:
        """Whether the backend cannot run what its QConfig asks for.

        Either the dtypes are unsupported, or a rule for this operator alone is not fulfilled.
        """
        return self.support is Support.DTYPE_UNSUPPORTED or (
            self.is_explicit and self.is_left_in_float
        )

    @property
    def is_left_in_float(self) -> bool:
        """Whether it has a QConfig that the backend does not support, also the QConfig for all
        operators.
        """
        return self.support not in (Support.SERVED, Support.NOT_ASKED)


@dataclass(frozen=True)
class Plan(PlainFields):
    """All operators and all sets of shared parameters (groups), both in topological order."""

    operators: tuple[OperatorPlan, ...]
    groups: tuple[SharedQParams, ...]
    #: value name -> keys of its groups; consumers see the first
    value_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @check_arguments
    def replace(self, key: str, *, spec: QSpec | None = None, observer: Any = None) -> Plan:
        """Return a plan with another spec or another observer for one set of parameters.

        Args:
            key: Key of the group, as listed in `plan.groups`: a value name, or "<operator>:weight".
            spec: The new specification.
            observer: An observer, or a callable that chooses the parameters.

        Raises:
            ConfigError: The plan does not have the group, or `spec` is per-channel and the value
                has no channel axis.
        """
        group = self.group(key)
        if spec is not None:
            if spec.is_dynamic:
                raise ConfigError(
                    f"Plan.replace({key!r}): the parameters in a plan are calibrated. For run-time "
                    "parameters, set a QConfig with a dynamic activation before prepare.",
                    code="RQ101",
                )
            spec = spec.stored
            if spec.is_per_channel and group.info.axis is None:
                raise ConfigError(
                    f"Plan.replace({key!r}): the value has no channel axis; allowed: "
                    "Granularity.PER_TENSOR.",
                    code="RQ101",
                )
            axis = group.info.axis if spec.is_per_channel else None
            group = dataclasses.replace(
                group, info=dataclasses.replace(group.info, spec=spec, axis=axis)
            )
        if observer is not None:
            observer = read_observer(observer, f"Plan.replace({key!r}): observer")
            check_observer(observer, f"Plan.replace({key!r}): observer")
            group = dataclasses.replace(group, observer=observer)
        groups = tuple(group if other.key == key else other for other in self.groups)
        return dataclasses.replace(self, groups=groups)

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Plan:
        """Read the data of `to_dict`.

        Raises:
            ConfigError: a key is wrong or missing, or a value is not allowed.
        """
        return read_fields(cls, data, where or cls.__name__, ("value_groups",))

    @cached_property
    def _groups(self) -> dict[str, SharedQParams]:
        return {group.key: group for group in self.groups}

    @cached_property
    def _operators(self) -> dict[str, OperatorPlan]:
        return {operator.name: operator for operator in self.operators}

    @check_arguments
    def group(self, key: str) -> SharedQParams:
        """Return a group by key.

        Raises:
            ConfigError: The plan does not have the group.
        """
        if key not in self._groups:
            raise ConfigError(
                f"The plan has no quantized value {key!r}. {suggest_name(key, self._groups)}",
                code="RQ103",
            )
        return self._groups[key]

    @check_arguments
    def operator(self, name: str) -> OperatorPlan:
        """Return an operator by the value that it computes.

        Raises:
            ConfigError: The plan does not have the operator.
        """
        if name not in self._operators:
            raise ConfigError(
                f"The plan has no operator {name!r}. {suggest_name(name, self._operators)}",
                code="RQ103",
            )
        return self._operators[name]

    def has_operator(self, name: str) -> bool:
        """Whether an operator of the plan computes this value."""
        return name in self._operators

    @property
    def activations(self) -> tuple[SharedQParams, ...]:
        """Groups with parameters that depend on data."""
        return tuple(group for group in self.groups if group.constant is None)

    @property
    def weights(self) -> tuple[SharedQParams, ...]:
        """Groups of constant operands: weights, and biases with separate parameters."""
        return tuple(group for group in self.groups if group.constant is not None)
