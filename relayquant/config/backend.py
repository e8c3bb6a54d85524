"""A backend's capabilities: a table of patterns with their dtypes and the source of output
parameters.

All objects are frozen. `with_` methods return new objects. annotate and all later stages read them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from relayquant.base.arguments import check_arguments, check_fields
from relayquant.base.plain_data import (
    NamedSettings,
    PlainSettings,
    check_keys,
    check_list,
    read_fields,
    to_plain,
)
from relayquant.base.qtypes import QSpec, Role, Scheme
from relayquant.config.dtypes import DTypeConfig
from relayquant.config.mapping import MappingRule, QConfigMapping, Selector, is_type
from relayquant.config.qconfig import QConfig
from relayquant.errors import ConfigError, format_count, suggest_name

CodeT = TypeVar("CodeT")

#: names of the built-in backends, which messages name
BUILTIN_NAMES = ("x86", "x86-7bit", "arm", "generic", "accelerator")


class ObservationType(enum.Enum):
    """The source of the parameters of a pattern's result. The names are from FX."""

    #: a separate observer
    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = "output_use_different_observer_as_input"
    #: the input: the result has the same parameters
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = "output_share_observer_with_input"
    #: no parameters: the backend runs it in float, on purpose
    INPUT_OUTPUT_NOT_OBSERVED = "input_output_not_observed"
    #: a table by dtype, independent of the data: softmax and sigmoid lie between 0 and 1
    OUTPUT_USE_FIXED_QPARAMS = "output_use_fixed_qparams"


@check_fields
@dataclass(frozen=True)
class FixedOutput(PlainSettings):
    """Fixed parameters of a pattern's result, for one dtype and scheme."""

    dtype: str
    scheme: Scheme
    #: an observer that reads no data, e.g. `Fixed(scale, zero_point)`
    observer: NamedSettings


@runtime_checkable
class QuantPattern(Protocol):
    """The part of an operator row (`relayquant.ir.ops.QuantOp`) that configuration uses."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...


@runtime_checkable
class AnyAffineRule(Protocol):
    """The part of an allow-list rule (`relayquant.extend.AffineRule`) that configuration uses."""

    @property
    def op(self) -> str: ...

    @property
    def pattern(self) -> QuantPattern: ...


@runtime_checkable
class AnyFuser(Protocol):
    """The part of a float rewrite (`relayquant.extend.Rule`) that configuration uses."""

    @property
    def name(self) -> str: ...

    @property
    def rewrite(self) -> Callable[..., Any]: ...


@check_fields
@dataclass(frozen=True)
class PatternConfig:
    """One row of a backend: a pattern, and how the backend can run it.

    Attributes:
        pattern: The operator row.
        dtypes: Supported combinations. A QConfig must match one of them.
        observation: Source of the result's parameters. None takes the source from the operator row.
        fixed: For OUTPUT_USE_FIXED_QPARAMS, the parameters by dtype and scheme.
        match_first: Whether it takes its operators, anywhere in the graph, before rows without
            this take any; so `BackendConfig.with_pattern` adds a row.
        default_qconfig: QConfig of its operators if the user gives no QConfigMapping. None takes
            the backend's.
        check: A limit of the hardware: `check(match)` returns `relayquant.extend.Skip(reason,
            advice)` for an operator that stays in float, or else None. It is asked after the
            operator row's own check. With `lower`, operands are dequantized values.
    """

    pattern: QuantPattern
    dtypes: tuple[DTypeConfig, ...]
    observation: ObservationType | None = None
    fixed: tuple[FixedOutput, ...] = ()
    match_first: bool = False
    default_qconfig: QConfig | None = None
    check: Callable[[Any], Any] | None = None

    def find_fixed(self, spec: QSpec) -> Any:
        """Return the observer of fixed parameters for a result with this spec, or None."""
        if self.observation is not ObservationType.OUTPUT_USE_FIXED_QPARAMS:
            return None
        for row in self.fixed:
            if (row.dtype, row.scheme) == (spec.dtype, spec.scheme):
                return row.observer
        return None

    def find_dtypes(
        self, qconfig: QConfig, *, has_weight: bool = True, has_bias: bool = True
    ) -> DTypeConfig | None:
        """Return the first combination of dtypes that fits `qconfig`, or None."""
        for row in self.dtypes:
            if row.find_conflict(qconfig, has_weight=has_weight, has_bias=has_bias) is None:
                return row
        return None

    def find_conflict(
        self, qconfig: QConfig, *, has_weight: bool = True, has_bias: bool = True
    ) -> str | None:
        """Return why the backend cannot run the pattern with `qconfig`, or None if it can.

        The reason is from the most similar combination of dtypes.
        """
        if not self.dtypes:
            return "the backend lists no dtypes for it"
        if self.find_dtypes(qconfig, has_weight=has_weight, has_bias=has_bias) is None:
            # A combination of another kind would only report the other kind.
            kind = (qconfig.is_dynamic and not qconfig.is_grouped, qconfig.is_grouped)
            alike = [row for row in self.dtypes if (row.is_dynamic, row.is_grouped) == kind]
            rows, data = alike or self.dtypes, qconfig.activation
            near = [row for row in rows if data and row.constraints("input").holds(data.spec)]
            nearest = (near or rows)[0]
            return nearest.find_conflict(qconfig, has_weight=has_weight, has_bias=has_bias)
        if qconfig.is_grouped:
            return None
        output = qconfig.tensor(Role.OUTPUT).spec
        is_fixed = self.observation is ObservationType.OUTPUT_USE_FIXED_QPARAMS
        if is_fixed and self.find_fixed(output) is None:
            known = ", ".join(f"{row.dtype} {row.scheme.value}" for row in self.fixed)
            return (
                f"its output parameters are fixed, for {known}; not for {output.dtype} "
                f"{output.scheme.value}"
            )
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with pattern and check by name."""
        rest = {f.name: to_plain(getattr(self, f.name)) for f in fields(self)[2:]}
        rest["check"] = self.check and name_check(self.check)
        data = {"pattern": self.pattern.name, "dtypes": to_plain(self.dtypes)}
        return data | {key: value for key, value in rest.items() if value}

    @staticmethod
    def from_dict(
        data: object,
        patterns: Mapping[str, QuantPattern],
        where: str = "PatternConfig",
        checks: Iterable[Callable[[Any], Any]] = (),
    ) -> PatternConfig:
        """Read the data of `to_dict`. `patterns` holds the operator rows by name."""
        names = [f.name for f in fields(PatternConfig)]
        found = check_keys(data, names, where, ("pattern", "dtypes"))
        name = found["pattern"]
        if name not in patterns:
            raise ConfigError(
                f"{where}.pattern is {name!r}. {suggest_name(str(name), patterns)}", code="RQ101"
            )
        read = {**found, "pattern": patterns[name]}
        if "check" in found:
            by_name = {name_check(check): check for check in checks}
            read["check"] = find_code(found["check"], by_name, f"{where}.check", "checks")
        return read_fields(PatternConfig, read, where)


def list_specs(mapping: QConfigMapping) -> list[Any]:
    """List what the lines of a mapping say, without the observers, which the effort chooses."""

    def read(qconfig: object) -> object:
        if not isinstance(qconfig, QConfig):
            return qconfig
        tensors = (qconfig.activation, qconfig.weight, qconfig.output, qconfig.bias)
        return [None if tensor is None else tensor.spec for tensor in tensors]

    return [
        (rule.kind, rule.key, read(rule.qconfig), [(name, read(own)) for name, own in rule.rows])
        for rule in mapping.rules
    ]


def name_check(check: Callable[..., Any]) -> str:
    """Return the name of a check in plain data."""
    return getattr(check, "__name__", type(check).__name__)


def find_code(name: object, known: Mapping[str, CodeT], where: str, argument: str) -> CodeT:
    """Return the code that plain data names.

    Raises:
        ConfigError: It was not passed as this argument.
    """
    if name not in known:
        raise ConfigError(
            f"{where} names {name!r}, which was not passed as {argument}=[...]. "
            f"{suggest_name(str(name), known)}",
            code="RQ102",
        )
    return known[str(name)]


@check_fields
@dataclass(frozen=True)
class BackendConfig:
    """The capabilities of a backend.

    The order of `patterns` is the priority: the first pattern that matches a value wins. A pattern
    without an anchor never takes an operator that a pattern with an anchor needs.

    Attributes:
        name: Name in messages and in the ledger.
        patterns: Rows, the longest patterns first.
        affine_rules: Rules of the allow-list (`relayquant.extend.AffineRule`), tried before the
            built-in ones.
        fusers: Rewrites of the float model (`relayquant.extend.Rule`) before it is planned.
        default_qconfig: QConfig of all operators if the user gives no QConfigMapping. None keeps
            operators in float whose row has no own QConfig.
        float_dtypes: Narrow float dtypes that the backend supports for all operators
            (`FloatConfig`).
        reduce_range: Whether activations use one bit less than their dtype has, unless a QSpec says
            otherwise.
    """

    name: str
    patterns: tuple[PatternConfig, ...] = ()
    affine_rules: tuple[AnyAffineRule, ...] = ()
    default_qconfig: QConfig | None = None
    reduce_range: bool = False
    float_dtypes: tuple[str, ...] = ()
    fusers: tuple[AnyFuser, ...] = ()

    def __repr__(self) -> str:
        """Return one line. `explain` lists the rows."""
        rows = format_count(len(self.patterns), "pattern")
        return f"BackendConfig({self.name!r}: {rows})"

    def __post_init__(self) -> None:
        for row in self.patterns:
            self._check_row(row)
        if self.default_qconfig is None or not self.patterns:
            return
        qconfig = self.adapt_qconfig(self.default_qconfig)
        conflicts = [
            row.find_conflict(qconfig, has_weight=False, has_bias=False) for row in self.patterns
        ]
        if all(conflicts):
            raise ConfigError(
                f"BackendConfig {self.name!r}: none of its patterns can run its default_qconfig: "
                f"{conflicts[0]}. Change default_qconfig, or the DTypeConfigs of the patterns.",
                code="RQ102",
            )

    def _check_row(self, row: PatternConfig) -> None:
        """Raise ConfigError if a row cannot run its own QConfig."""
        if row.default_qconfig is None:
            return
        qconfig = self.adapt_qconfig(row.default_qconfig)
        conflict = row.find_conflict(qconfig, has_weight=False, has_bias=False)
        if conflict is not None:
            raise ConfigError(
                f"BackendConfig {self.name!r}: row {row.pattern.name!r} cannot run its "
                f"default_qconfig: {conflict}. Change the row's default_qconfig or dtypes.",
                code="RQ102",
            )

    def find_default(self, pattern: str) -> QConfig | None:
        """Return the QConfig of a pattern's operators if the user gives no QConfigMapping."""
        rows = (row.default_qconfig for row in self.patterns if row.pattern.name == pattern)
        return next(rows, None) or self.default_qconfig

    @check_arguments
    def find_qconfig(self, pattern: str, dtype: str | None = None) -> QConfig:
        """Return a static QConfig that a pattern's row runs: its default, or one of its dtypes.

        Args:
            pattern: The pattern by name.
            dtype: dtype of computed operands; None takes any.

        Raises:
            ConfigError: The backend has no such pattern, or the pattern does not run this dtype.
        """
        for qconfig in self.list_qconfigs(pattern):
            if dtype in (None, qconfig.data.spec.dtype):
                return qconfig
        row = self.find_pattern(pattern)
        allowed = "; ".join(each.description for each in row.dtypes)
        raise ConfigError(
            f"Pattern {pattern!r} of backend {self.name!r} runs no static QConfig"
            f"{'' if dtype is None else f' of {dtype}'}; allowed: {allowed}.",
            code="RQ101",
        )

    def list_qconfigs(self, pattern: str) -> Iterator[QConfig]:
        """List static QConfigs that the row of a pattern runs, its default first."""
        row, default = self.find_pattern(pattern), self.find_default(pattern)
        for qconfig in (default, *(each.make_qconfig(default) for each in row.dtypes)):
            if qconfig is None or qconfig.activation is None or qconfig.is_dynamic:
                continue
            if row.find_conflict(self.adapt_qconfig(qconfig)) is None:
                yield qconfig

    @property
    def code(self) -> str:
        """Code for messages that gives the backend. The user's own is called `backend`."""
        is_known = self.name in BUILTIN_NAMES
        return f"relayquant.get_backend_config({self.name!r})" if is_known else "backend"

    def name_mapping(self, mapping: QConfigMapping) -> str:
        """Return code for messages that gives a mapping. The user's own is called `mapping`."""
        is_default = list_specs(mapping) == list_specs(self.default_mapping)
        return f"{self.code}.default_mapping" if is_default else "mapping"

    @property
    def activation_dtype(self) -> str:
        """The dtype of computed values: by `default_qconfig`, by the first row that has an own
        QConfig, or the first dtype of a row.
        """
        qconfigs = (self.default_qconfig, *(row.default_qconfig for row in self.patterns))
        by_default = (each.activation.spec.dtype for each in qconfigs if each and each.activation)
        dtypes = (each for row in self.patterns for each in row.dtypes if not each.is_grouped)
        listed = (each.constraints("input").dtype for each in dtypes)
        return next(by_default, None) or next(listed, "int8")

    @property
    def default_mapping(self) -> QConfigMapping:
        """What counts if a user passes no QConfigMapping: the QConfig of each row that has one,
        and `default_qconfig` for all other rows. Without any, the mapping is empty.

        It has one line, as of `set_global`. Any line that a user adds comes before it.
        """
        rows = ((row.pattern.name, row.default_qconfig) for row in self.patterns)
        own = tuple((name, qconfig) for name, qconfig in rows if qconfig is not None)
        if self.default_qconfig is None and not own:
            return QConfigMapping()
        nothing = f"backend {self.name!r}, whose row has no QConfig"
        origin = "" if self.default_qconfig else nothing
        line = MappingRule(Selector.GLOBAL, "", self.default_qconfig, origin=origin, rows=own)
        return QConfigMapping((line,))

    @check_arguments
    def with_pattern(
        self,
        pattern: QuantPattern,
        dtypes: Iterable[DTypeConfig] | None = None,
        *,
        observation: ObservationType | None = None,
        fixed: Iterable[FixedOutput] = (),
    ) -> BackendConfig:
        """Return a backend that tries `pattern` before all others.

        An existing pattern with this name is replaced.

        The pattern is tried at all values of the graph before the backend's table. No pattern of
        the table can therefore take a part of it. Among several added patterns, patterns with
        anchors come first, then the pattern that was added last. `dtypes` defaults to the dtypes of
        the backend's first pattern.
        """
        if dtypes is None:
            if not self.patterns:
                raise ConfigError(
                    f"Backend {self.name!r} has no pattern to take dtypes from; pass dtypes="
                    "[DTypeConfig(input=..., output=...)].",
                    code="RQ102",
                )
            dtypes = self.patterns[0].dtypes
        # A pattern of the table that gets other dtypes keeps its place. In front of longer
        # patterns, it would take operators that these patterns fuse.
        is_own = any(row.pattern is pattern and not row.match_first for row in self.patterns)
        row = PatternConfig(pattern, tuple(dtypes), observation, tuple(fixed), not is_own)
        others = (other for other in self.patterns if other.pattern.name != pattern.name)
        return replace(self, patterns=(row, *others))

    @check_arguments
    def with_settings(
        self,
        operator: str,
        *,
        dtypes: Iterable[DTypeConfig] | None = None,
        default_qconfig: QConfig | None = None,
        check: Callable[[Any], Any] | None = None,
    ) -> BackendConfig:
        """Return a backend with other settings of the rows of an operator. Their order stays.

        Args:
            operator: A pattern by name, or an operator such as "nn.conv2d" for all of its rows.
            dtypes, default_qconfig, check: See `PatternConfig`. None leaves the setting as it is.

        Raises:
            ConfigError: The backend has no such row, or a row cannot run `default_qconfig`.
        """
        settings: dict[str, Any] = {"default_qconfig": default_qconfig, "check": check}
        settings["dtypes"] = None if dtypes is None else tuple(dtypes)
        given = {name: value for name, value in settings.items() if value is not None}
        chosen = self._find_rows(operator)
        rows = (replace(row, **given) if row in chosen else row for row in self.patterns)
        return replace(self, patterns=tuple(rows))

    def _find_rows(self, operator: str) -> tuple[PatternConfig, ...]:
        """Return the rows of a pattern by name, or of an operator.

        Raises:
            ConfigError: The backend has no such row.
        """
        rows = [row for row in self.patterns if is_type(row.pattern.op, row.pattern.name, operator)]
        if not rows:
            known = [n for row in self.patterns for n in (row.pattern.name, row.pattern.op)]
            raise ConfigError(
                f"Backend {self.name!r} cannot run {operator!r}: it stays in float. "
                f"{suggest_name(operator, known)}",
                code="RQ101",
            )
        return tuple(rows)

    @check_arguments
    def without_pattern(self, name: str) -> BackendConfig:
        """Return a backend without the pattern.

        Raises:
            ConfigError: the backend has no such pattern.
        """
        removed = self.find_pattern(name)
        return replace(self, patterns=tuple(row for row in self.patterns if row is not removed))

    @check_arguments
    def with_affine_rule(self, rule: AnyAffineRule) -> BackendConfig:
        """Return a backend with an allow-list that tries `rule` first.

        If the backend has no pattern for the rule's operator, `rule.pattern` is added with the
        lowest priority and all dtypes of the backend. Plans then quantize the operator.
        """
        backend = replace(self, affine_rules=(rule, *self.affine_rules))
        if any(row.pattern.op == rule.op for row in self.patterns):
            return backend
        dtypes = dict.fromkeys(dtypes for row in self.patterns for dtypes in row.dtypes)
        return replace(
            backend, patterns=(*self.patterns, PatternConfig(rule.pattern, tuple(dtypes)))
        )

    @check_arguments
    def with_fuser(self, fuser: AnyFuser) -> BackendConfig:
        """Return a backend that rewrites the float model by `fuser` before the plan is made.

        FX calls this `additional_fuser_method_mapping`. An existing fuser with this name is
        replaced.

        The rule is a `relayquant.extend.Rule(name, pattern, rewrite)`: `rewrite(emitter, match)`
        returns the float expression that replaces `match.root`, or Skip. Fusers are tried at every
        value, the last added first, until none fires. Computations on constants are then folded.
        """
        others = (other for other in self.fusers if other.name != fuser.name)
        return replace(self, fusers=(fuser, *others))

    @check_arguments
    def find_pattern(self, name: str) -> PatternConfig:
        """Return the row of a pattern by name.

        Raises:
            ConfigError: the backend has no such pattern.
        """
        for row in self.patterns:
            if row.pattern.name == name:
                return row
        known = [row.pattern.name for row in self.patterns]
        raise ConfigError(
            f"Backend {self.name!r} has no pattern {name!r}. If it is a row of yours, pass the "
            f"backend that has it as backend=. {suggest_name(name, known)}",
            code="RQ101",
        )

    @check_arguments
    def adapt_qconfig(self, qconfig: QConfig) -> QConfig:
        """Adapt a user's QConfig to this backend: activations use one bit less with
        `reduce_range`.
        """
        return qconfig.with_reduced_range() if self.reduce_range else qconfig

    @check_arguments
    def explain(self, pattern: str | QuantPattern | None = None) -> str:
        """Describe the backend in text, with a line for each pattern and combination of dtypes.

        Args:
            pattern: A pattern, its name, or an operator ("nn.conv2d", "conv2d"). None is
                everything.

        Raises:
            ConfigError: The backend has no pattern or operator with this name.
        """
        rows = self.patterns
        if pattern is not None:
            rows = self._find_rows(pattern if isinstance(pattern, str) else pattern.name)
        head = f"backend {self.name}"
        if self.reduce_range:
            head += ", activations use one bit less"
        if self.float_dtypes:
            head += f", any operator also in {', '.join(self.float_dtypes)}"
        lines = [head]
        for row in rows:
            lines.append(f"{row.pattern.name} ({row.pattern.op})")
            lines += [f"  {dtypes.description}" for dtypes in row.dtypes]
            if row.observation is not None:
                lines.append(f"  {row.observation.value}")
            if row.default_qconfig is not None:
                data, weight = row.default_qconfig.activation, row.default_qconfig.weight
                dtype = data.spec.dtype if data else "float32"
                lines.append(f"  by default {dtype} x {weight.spec.dtype}")
            if row.check is not None:
                lines.append(f"  where {name_check(row.check)} does not decline")
            for fixed in row.fixed:
                lines.append(f"  fixed {fixed.dtype} {fixed.scheme.value}: {fixed.observer}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and TOML.

        Patterns, checks, affine rules and fusers are code and are stored by name.
        """
        data: dict[str, Any] = {"name": self.name, "reduce_range": self.reduce_range}
        if self.default_qconfig is not None:
            data["default_qconfig"] = self.default_qconfig.to_dict()
        if self.float_dtypes:
            data["float_dtypes"] = list(self.float_dtypes)
        data["affine_rules"] = [rule.op for rule in self.affine_rules]
        if self.fusers:
            data["fusers"] = [fuser.name for fuser in self.fusers]
        data["patterns"] = [row.to_dict() for row in self.patterns]
        return data

    @staticmethod
    @check_arguments
    def from_dict(
        data: object,
        patterns: Iterable[QuantPattern],
        affine_rules: Iterable[AnyAffineRule] = (),
        where: str = "BackendConfig",
        *,
        fusers: Iterable[AnyFuser] = (),
        checks: Iterable[Callable[[Any], Any]] = (),
    ) -> BackendConfig:
        """Read the data of `to_dict`.

        `patterns` are the operator rows that the data may name (`relayquant.extend.BUILTIN_OPS` and
        your rows).

        Raises:
            ConfigError: A key or pattern is unknown (the message names the nearest), a key is
                missing, or a value is not allowed.
        """
        names = [f.name for f in fields(BackendConfig)]
        found = check_keys(data, names, where, ("name", "patterns"))
        rules = {rule.op: rule for rule in affine_rules}
        by_fuser = {fuser.name: fuser for fuser in fusers}
        known = {rule.pattern.name: rule.pattern for rule in rules.values()}
        known.update({pattern.name: pattern for pattern in patterns})

        def read_code(key: str, code: Mapping[str, CodeT]) -> tuple[CodeT, ...]:
            path = f"{where}.{key}"
            names = check_list(found.get(key, ()), path)
            return tuple(find_code(name, code, path, key) for name in names)

        rows = check_list(found["patterns"], f"{where}.patterns")
        by_name = {
            "patterns": tuple(
                PatternConfig.from_dict(row, known, f"{where}.patterns[{i}]", checks)
                for i, row in enumerate(rows)
            ),
            "affine_rules": read_code("affine_rules", rules),
            "fusers": read_code("fusers", by_fuser),
        }
        return read_fields(BackendConfig, {**found, **by_name}, where)
