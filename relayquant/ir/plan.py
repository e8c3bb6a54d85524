"""The plan: plain data that says which value is quantized, how, and why each other operator stays
in float.

Made by `annotate`, read by every later stage. Values and operators are named by their stable value
names.
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
from relayquant.config.qconfig import check_calibration
from relayquant.errors import ConfigError, suggest_name

#: what plain data of a group says behind the fields of its `info`
GROUP_KEYS = ("members", "points", "clamped", "constant", "base", "is_fixed", "calibration")


@dataclass(frozen=True)
class SharedQParams(PlainFields):
    """One set of quantization parameters, and the values that carry it.

    Attributes:
        info: Name (the key of the group), role, specification, shape and channel axis.
        members: Values with these parameters, in topological order; empty for a constant operand.
        points: Members that are observed and rounded; the other members are on the grid already.
        clamped: Members that are rounded again, but not observed: the result of a clip, whose
            bounds need not be on the grid, or of a mean that the backend lets share its input's
            parameters.
        constant: (operator, operand) of a constant operand (weight), else None.
        calibration: Observer or callable that picks the parameters.
        is_fixed: The backend fixes the parameters: `calibration` stands whatever the user passes
            for all values.
        base: Key of the group whose quantized values this one converts, when a value has two
            groups.
    """

    info: ValueInfo
    members: tuple[str, ...]
    points: tuple[str, ...]
    calibration: Any
    constant: tuple[str, str] | None = None
    base: str | None = None
    clamped: tuple[str, ...] = ()
    is_fixed: bool = False

    @property
    def key(self) -> str:
        return self.info.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the fields of `info` among the others; a callable that picks parameters is
        left out, an observer is not.
        """
        is_plain = isinstance(self.calibration, NamedSettings)
        data = super().to_dict()
        data["calibration"] = self.calibration.to_dict() if is_plain else None
        return {**data.pop("info"), **{key: data[key] for key in GROUP_KEYS}}

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> SharedQParams:
        """What `to_dict` wrote; `calibration` is None where it was a callable.

        Raises:
            ConfigError: a key is wrong or missing, or a value is not allowed.
        """
        where = where or cls.__name__
        info_keys = [f.name for f in dataclasses.fields(ValueInfo)]
        names = (*info_keys, *GROUP_KEYS)
        found = dict(check_keys(data, names, where, names))
        info = read_fields(ValueInfo, {key: found.pop(key) for key in info_keys}, where)
        if found["calibration"] is not None:
            seen = NamedSettings.from_dict(found["calibration"], f"{where}.calibration")
            found["calibration"] = seen
        return read_fields(SharedQParams, {**found, "info": info}, where)


@dataclass(frozen=True)
class PassedOver(PlainFields):
    """A row of the user's own that matches an operator and did not take it.

    Attributes:
        pattern: Name of the row's pattern.
        reason, advice: Why it did not, and what to do; "" for nothing to do.
    """

    pattern: str
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        """A part of a line."""
        advice = f" ({self.advice})" if self.advice else ""
        return f"your row {self.pattern!r} passed over: {self.reason}{advice}"


@dataclass(frozen=True)
class OperatorPlan(PlainFields):
    """What happens to one operator (or fused pattern) of the prepared float graph.

    Attributes:
        name: Value it computes.
        op: Main operator, e.g. "relax.nn.conv2d".
        values: All values bound by the match, the last is `name`.
        pattern: Name of the pattern, "" when none matched.
        quantized: Whether it runs on integers.
        operands: (operand name, group key) of every quantized operand.
        output: Group key of its result, None when it stays an accumulator or is float.
        reason, advice: Why it stays in float and what to do; "" when quantized.
        sources: Names of the source model's nodes that it came from.
        support: What became of its QConfig.
        rule: The line of the QConfigMapping that decided, "" if none did.
        is_explicit: Whether that line speaks of this operator, not of all.
        accumulator: What its sums of products are held in; None for that of the kernels.
        compute: Narrow float dtype that it is computed in, "" where it is quantized or float32.
        dynamic: Specification of its data where that gets parameters of the run time, else None.
            Such data is in no group: before conversion it is float.
        grouped: Specification of its weight where that is in groups, else None. Such a weight has
            no quantization parameters in the plan.
        passed_over: Rows of the user's own that match it and did not take it.
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
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def has_float_data(self) -> bool:
        """Whether it is quantized and yet takes and gives float values."""
        return self.dynamic is not None or self.grouped is not None

    @property
    def is_unserved(self) -> bool:
        """Whether its QConfig asks for what the backend cannot run: by its dtypes, or by name for
        this operator.
        """
        return self.support is Support.DTYPE_UNSUPPORTED or (
            self.is_explicit and self.is_left_in_float
        )

    @property
    def is_left_in_float(self) -> bool:
        """Whether it has a QConfig, also that for all operators, which is not served."""
        return self.support not in (Support.SERVED, Support.NOT_ASKED)


@dataclass(frozen=True)
class Plan(PlainFields):
    """All operators and all groups, both in topological order."""

    operators: tuple[OperatorPlan, ...]
    groups: tuple[SharedQParams, ...]
    #: value name -> keys of its groups, the first is what its consumers see
    value_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @check_arguments
    def replace(self, key: str, *, spec: QSpec | None = None, calibration: Any = None) -> Plan:
        """A plan in which one set of parameters has another spec, or is picked by another observer
        or callable.

        Args:
            key: Of the group: `plan.groups` lists them; a value with parameters, or
                "<operator>:weight".

        Raises:
            ConfigError: the plan has no such group, or a spec per channel where it has no channel
                axis.
        """
        group = self.group(key)
        if spec is not None:
            if spec.is_dynamic:
                raise ConfigError(
                    f"Plan.replace({key!r}): a group's parameters are calibrated; for parameters "
                    "of the run time set a QConfig with a dynamic activation before prepare.",
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
        if calibration is not None:
            check_calibration(calibration, f"Plan.replace({key!r}): calibration")
            group = dataclasses.replace(group, calibration=calibration)
        groups = tuple(group if other.key == key else other for other in self.groups)
        return dataclasses.replace(self, groups=groups)

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Plan:
        """What `to_dict` wrote.

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
        """Group by key.

        Raises:
            ConfigError: the plan has no such group.
        """
        if key not in self._groups:
            raise ConfigError(
                f"The plan has no quantized value {key!r}. {suggest_name(key, self._groups)}",
                code="RQ103",
            )
        return self._groups[key]

    @check_arguments
    def operator(self, name: str) -> OperatorPlan:
        """Operator by the value it computes.

        Raises:
            ConfigError: the plan has no such operator.
        """
        if name not in self._operators:
            raise ConfigError(
                f"The plan has no operator {name!r}. {suggest_name(name, self._operators)}",
                code="RQ103",
            )
        return self._operators[name]

    def has_operator(self, name: str) -> bool:
        """Whether an operator computes this value."""
        return name in self._operators

    @property
    def activations(self) -> tuple[SharedQParams, ...]:
        """Groups whose parameters depend on data."""
        return tuple(group for group in self.groups if group.constant is None)

    @property
    def weights(self) -> tuple[SharedQParams, ...]:
        """Groups of constant operands: weights, and biases with a grid of their own."""
        return tuple(group for group in self.groups if group.constant is not None)
