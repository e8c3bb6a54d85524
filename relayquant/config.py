"""What the user chooses: which operators are quantized, how (QConfig), and what a backend can run
(BackendConfig).

Frozen values; `with_` and `set_` methods return new objects. Names follow PyTorch's FX Graph Mode
Quantization.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

from relayquant.errors import ConfigError, suggest_name
from relayquant.qtypes import INTEGER_LIMITS, Granularity, QSpec, Role, Scheme
from relayquant.settings import (
    NamedSettings,
    check_keys,
    check_list,
    read_enum,
    to_plain,
)

#: what plain data says for None: the operator stays in float
KEPT_IN_FLOAT = "float"


# --- How one operator is quantized --------------------------------------------------------------


@dataclass(frozen=True)
class TensorConfig:
    """How one kind of tensor is quantized: `spec`, and the observer (or callable) that picks
    parameters.

    `calibration` is an `Observer` or a callable `(ValueInfo, samples) -> QParams`.
    """

    spec: QSpec
    calibration: Any

    def __post_init__(self) -> None:
        if not isinstance(self.spec, QSpec):
            raise ConfigError(f"TensorConfig.spec is {self.spec!r}; allowed: a QSpec.")

    def to_dict(self) -> dict[str, Any]:
        """{"spec": ..., "observer": {"name": class, setting: value, ...}}.

        Raises:
            ConfigError: `calibration` is a callable, which has no plain form.
        """
        if not isinstance(self.calibration, NamedSettings):
            name = getattr(self.calibration, "__qualname__", type(self.calibration).__name__)
            raise ConfigError(
                f"TensorConfig.calibration is {name}, which cannot be written as plain data; use "
                "an observer, "
                "for instance MinMax(), or pass the callable as quantize(..., calibration=...)."
            )
        return {"spec": self.spec.to_dict(), "observer": self.calibration.to_dict()}

    @staticmethod
    def from_dict(data: object, where: str = "TensorConfig") -> TensorConfig:
        """What `to_dict` wrote.

        Raises:
            ConfigError: an unknown key, observer or setting (names the nearest), or a value not
                allowed.
        """
        found = check_keys(data, ("spec", "observer"), where, ("spec", "observer"))
        return TensorConfig(
            QSpec.from_dict(found["spec"], f"{where}.spec"),
            NamedSettings.from_dict(found["observer"], f"{where}.observer"),
        )


@dataclass(frozen=True)
class QConfig:
    """How one operator is quantized.

    Attributes:
        activation: Operands that are computed.
        weight: Constant operands.
        output: The result; None: as `activation`.
        bias: None: int32 in units of data scale x weight scale, which is exact to half such a unit.
            A TensorConfig of fewer bits rounds the bias to a grid of its own first, as hardware
            with narrow biases does.
    """

    activation: TensorConfig
    weight: TensorConfig
    output: TensorConfig | None = None
    bias: TensorConfig | None = None

    def __post_init__(self) -> None:
        for name in ("activation", "weight", "output", "bias"):
            value = getattr(self, name)
            optional = name in ("output", "bias")
            if not isinstance(value, TensorConfig) and not (optional and value is None):
                raise ConfigError(
                    f"QConfig.{name} is {value!r}; allowed: a TensorConfig(spec, observer)"
                    f"{' or None' if optional else ''}."
                )

    def tensor(self, role: Role) -> TensorConfig:
        """Configuration of a tensor in this role.

        Raises:
            ConfigError: role is BIAS and there is no `bias`: its parameters follow from data and
                weight.
        """
        if role is Role.BIAS:
            if self.bias is None:
                raise ConfigError(
                    "This QConfig has no bias configuration: a bias is int32, its scale is input "
                    "scale x "
                    "weight scale. Set QConfig(bias=...) to round it to a grid of its own."
                )
            return self.bias
        if role is Role.WEIGHT:
            return self.weight
        if role is Role.OUTPUT and self.output is not None:
            return self.output
        return self.activation

    @property
    def has_own_bias(self) -> bool:
        """Whether biases are rounded to a grid of their own before they are added."""
        return self.bias is not None and self.bias.spec.dtype != "int32"

    def with_reduced_range(self) -> QConfig:
        """Activations of one bit less; see `QSpec.with_reduced_range`."""

        def reduce(config: TensorConfig) -> TensorConfig:
            return replace(config, spec=config.spec.with_reduced_range())

        output = reduce(self.output) if self.output is not None else None
        return replace(self, activation=reduce(self.activation), output=output)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and TOML; what is None is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: value.to_dict() for key, value in values.items() if value is not None}

    @staticmethod
    def from_dict(data: object, where: str = "QConfig") -> QConfig:
        """What `to_dict` wrote.

        Raises:
            ConfigError: an unknown key (names the nearest), a missing one, or a value not allowed.
        """
        names = [f.name for f in fields(QConfig)]
        found = check_keys(data, names, where, ("activation", "weight"))
        return QConfig(
            **{key: TensorConfig.from_dict(value, f"{where}.{key}") for key, value in found.items()}
        )


# --- Which operators get which QConfig ----------------------------------------------------------


class Selector(enum.Enum):
    """What a line of a QConfigMapping selects by. Later members win over earlier ones, as in FX."""

    GLOBAL = "global"
    OBJECT_TYPE = "object_type"
    MODULE_NAME_REGEX = "module_name_regex"
    MODULE_NAME = "module_name"
    MODULE_NAME_OBJECT_TYPE_ORDER = "module_name_object_type_order"


@dataclass(frozen=True)
class OperatorSite:
    """An operator as the lines of a mapping see it.

    Attributes:
        names: Names of its values, and of the nodes of the source model it came from.
        op: Its main operator, e.g. "relax.nn.conv2d".
        pattern: Its pattern, "" if none.
        place: Position of its main operator in `peers`.
        peers: Names (of the value and its source node) of every operator of the same type, in
            topological order.
    """

    names: tuple[str, ...]
    op: str
    pattern: str = ""
    place: int = 0
    peers: tuple[tuple[str, ...], ...] = ()

    def find_order(self, module: str) -> int | None:
        """How many operators of this type come before it below `module`; None when it is not below
        `module`.
        """
        if not any(is_below(name, module) for name in self.names):
            return None
        earlier = self.peers[: self.place]
        return sum(any(is_below(name, module) for name in names) for names in earlier)


def is_below(name: str, module: str) -> bool:
    """Whether a value is `module` or belongs to it ("module.x", "module/x"); every value belongs to
    "".
    """
    module = module.rstrip("./")
    return not module or name == module or name.startswith((module + ".", module + "/"))


def is_type(op: str, pattern: str, wanted: str) -> bool:
    """Whether `wanted` names this operator ("relax.nn.conv2d", "nn.conv2d", "conv2d") or this
    pattern.
    """
    return (
        wanted in (op, op.removeprefix("relax."), op.rsplit(".", 1)[-1]) or wanted == pattern != ""
    )


@dataclass(frozen=True)
class MappingRule:
    """One line of a QConfigMapping: operators it selects and their QConfig (None keeps them in
    float).

    Attributes:
        kind: What it selects by.
        key: Operator type or pattern, regular expression, or name.
        qconfig: How the selected operators are quantized.
        object_type, index: For MODULE_NAME_OBJECT_TYPE_ORDER, beside the name in `key`: the
            operator, and which of those below the name, counted from 0 in topological order.
    """

    kind: Selector
    key: str
    qconfig: QConfig | None
    object_type: str = ""
    index: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Selector):
            raise ConfigError(f"MappingRule.kind is {self.kind!r}; allowed: a Selector.")
        where = f"QConfigMapping.set_{self.kind.value}"
        if self.qconfig is not None and not isinstance(self.qconfig, QConfig):
            raise ConfigError(
                f"{where}: expected a QConfig or None (keep in float), got "
                f"{type(self.qconfig).__name__}."
            )
        if not isinstance(self.key, str) or not isinstance(self.object_type, str):
            raise ConfigError(f"{where}: {self.key!r} is no text; names are given as text.")
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ConfigError(f"{where}: index is {self.index!r}; allowed: an integer >= 0.")
        if self.kind is Selector.MODULE_NAME_REGEX:
            try:
                re.compile(self.key)
            except re.error as error:
                raise ConfigError(
                    f"{where}: {self.key!r} is no regular expression: {error}."
                ) from error

    @property
    def description(self) -> str:
        """For the ledger and messages: "object_type 'conv2d'"."""
        if self.kind is Selector.GLOBAL:
            return "global"
        more = ""
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            more = f", {self.object_type!r}, {self.index}"
        return f"{self.kind.value} {self.key!r}{more}"

    def selects(self, site: OperatorSite) -> bool:
        """Whether the rule speaks of an operator."""
        if self.kind is Selector.OBJECT_TYPE:
            return is_type(site.op, site.pattern, self.key)
        if self.kind is Selector.MODULE_NAME_REGEX:
            return any(re.fullmatch(self.key, name) for name in site.names)
        if self.kind is Selector.MODULE_NAME:
            return any(is_below(name, self.key) for name in site.names)
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            is_wanted = is_type(site.op, "", self.object_type)
            return is_wanted and site.find_order(self.key) == self.index
        return True

    def to_dict(self) -> dict[str, Any]:
        """{"key": ..., "qconfig": ...}, and "object_type" and "index" where they count."""
        qconfig = KEPT_IN_FLOAT if self.qconfig is None else self.qconfig.to_dict()
        data: dict[str, Any] = {"key": self.key, "qconfig": qconfig}
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            data |= {"object_type": self.object_type, "index": self.index}
        return data

    @staticmethod
    def from_dict(kind: Selector, data: object, where: str) -> MappingRule:
        """What `to_dict` wrote."""
        allowed = ["key", "qconfig"]
        if kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            allowed += ["object_type", "index"]
        found = dict(check_keys(data, allowed, where, allowed))
        qconfig = read_qconfig(found.pop("qconfig"), f"{where}.qconfig")
        return MappingRule(kind, found.pop("key"), qconfig, **found)


def read_qconfig(data: object, where: str) -> QConfig | None:
    """A QConfig from plain data; None from "float" or None."""
    if data is None or data == KEPT_IN_FLOAT:
        return None
    return QConfig.from_dict(data, where)


@dataclass(frozen=True)
class QConfigMapping:
    """Which operators get which QConfig; None keeps an operator in float.

    Precedence as in torch.ao.quantization.QConfigMapping: global < object type < name regex < name
    < name, type and order. Within a kind the line set last wins. Names are those of the values in
    the prepared model and of the nodes in the source model; `rq.prepare(mod,
    params).plan.operators` lists them. A line that selects no operator is an error when the model
    is prepared.
    """

    rules: tuple[MappingRule, ...] = ()

    def set_global(self, qconfig: QConfig | None) -> QConfigMapping:
        """For every operator that no other line selects."""
        return self._add(MappingRule(Selector.GLOBAL, "", qconfig))

    def set_object_type(self, op: str, qconfig: QConfig | None) -> QConfigMapping:
        """For an operator ("relax.nn.conv2d", "nn.conv2d", "conv2d") or a pattern by name."""
        return self._add(MappingRule(Selector.OBJECT_TYPE, op, qconfig))

    def set_module_name_regex(self, regex: str, qconfig: QConfig | None) -> QConfigMapping:
        """For operators of which a name matches the whole regular expression."""
        return self._add(MappingRule(Selector.MODULE_NAME_REGEX, regex, qconfig))

    def set_module_name(self, name: str, qconfig: QConfig | None) -> QConfigMapping:
        """For the operator that computes value `name`, and those below it ("name.x", "name/x")."""
        return self._add(MappingRule(Selector.MODULE_NAME, name, qconfig))

    def set_module_name_object_type_order(
        self, name: str, op: str, index: int, qconfig: QConfig | None
    ) -> QConfigMapping:
        """For the operator of type `op` that is number `index`, from 0, of those below `name` ("":
        of all).
        """
        kind = Selector.MODULE_NAME_OBJECT_TYPE_ORDER
        return self._add(MappingRule(kind, name, qconfig, op, index))

    def _add(self, rule: MappingRule) -> QConfigMapping:
        def is_replaced(other: MappingRule) -> bool:
            return replace(other, qconfig=None) == replace(rule, qconfig=None)

        # By kind, as they win: two mappings that say the same are equal.
        order = list(Selector)
        rules = [*(r for r in self.rules if not is_replaced(r)), rule]
        return replace(self, rules=tuple(sorted(rules, key=lambda r: order.index(r.kind))))

    def find_rule(self, site: OperatorSite) -> MappingRule | None:
        """The line that decides for an operator."""
        for kind in reversed(Selector):
            for rule in reversed(self.rules):
                if rule.kind is kind and rule.selects(site):
                    return rule
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and TOML: {"global": qconfig, "object_type": [{"key": ..., "qconfig":
        ...}], ...}.

        A qconfig is a dict, or "float" for None.
        """
        data: dict[str, Any] = {}
        for rule in self.rules:
            row = rule.to_dict()
            if rule.kind is Selector.GLOBAL:
                data[rule.kind.value] = row["qconfig"]
            else:
                data.setdefault(rule.kind.value, []).append(row)
        return data

    @staticmethod
    def from_dict(data: object, where: str = "QConfigMapping") -> QConfigMapping:
        """What `to_dict` wrote.

        Raises:
            ConfigError: an unknown key (names the nearest), a missing one, or a value not allowed.
        """
        found = check_keys(data, [kind.value for kind in Selector], where)
        mapping = QConfigMapping()
        for kind in Selector:
            value = found.get(kind.value, ())
            if kind is Selector.GLOBAL:
                if kind.value in found:
                    mapping = mapping.set_global(read_qconfig(value, f"{where}.{kind.value}"))
                continue
            for i, row in enumerate(check_list(value, f"{where}.{kind.value}")):
                rule = MappingRule.from_dict(kind, row, f"{where}.{kind.value}[{i}]")
                mapping = mapping._add(rule)
        return mapping


# --- What a backend can run ---------------------------------------------------------------------


@dataclass(frozen=True)
class DTypeWithConstraints:
    """What a backend accepts of one tensor. A QSpec fits when it stays within every bound.

    Attributes:
        dtype: The only dtype.
        schemes, granularities: Those that run.
        quant_min_lower_bound, quant_max_upper_bound: Integers that it can hold; None: the limits of
            `dtype`.
        scale_min_lower_bound, scale_max_upper_bound: Bounds that `QSpec.scale_min` and `scale_max`
            must keep.
        power_of_two: Scales must be powers of two.
    """

    dtype: str
    schemes: tuple[Scheme, ...] = (Scheme.AFFINE, Scheme.SYMMETRIC)
    granularities: tuple[Granularity, ...] = (Granularity.PER_TENSOR, Granularity.PER_CHANNEL)
    quant_min_lower_bound: int | None = None
    quant_max_upper_bound: int | None = None
    scale_min_lower_bound: float | None = None
    scale_max_upper_bound: float | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        allowed = (*INTEGER_LIMITS, "float32", "float16")
        if self.dtype not in allowed:
            raise ConfigError(
                f"DTypeWithConstraints.dtype is {self.dtype!r}. "
                f"{suggest_name(str(self.dtype), allowed)}"
            )

    def find_conflict(self, spec: QSpec, what: str) -> str | None:
        """Why `spec` is refused, or None; `what` names the tensor for the message."""
        if spec.dtype != self.dtype:
            return f"{what} dtype {spec.dtype} is asked for, the backend runs {self.dtype}"
        if spec.scheme not in self.schemes:
            return f"{what} scheme {spec.scheme.value} is not supported"
        if spec.granularity not in self.granularities:
            return f"{what} granularity {spec.granularity.value} is not supported"
        low, high = spec.limits
        if self.quant_min_lower_bound is not None and low < self.quant_min_lower_bound:
            return f"{what} quant_min {low} is below {self.quant_min_lower_bound}"
        if self.quant_max_upper_bound is not None and high > self.quant_max_upper_bound:
            return f"{what} quant_max {high} is above {self.quant_max_upper_bound}"
        lowest, largest = spec.scale_bounds
        if self.scale_min_lower_bound is not None and lowest < self.scale_min_lower_bound:
            return f"{what} scale_min {spec.scale_min} is below {self.scale_min_lower_bound}"
        if self.scale_max_upper_bound is not None and largest > self.scale_max_upper_bound:
            return f"{what} scale_max {spec.scale_max} is above {self.scale_max_upper_bound}"
        if self.power_of_two and not spec.power_of_two:
            return f"{what} scales must be powers of two: QSpec(power_of_two=True)"
        return None

    @property
    def description(self) -> str:
        """One phrase: "int8 symmetric per_tensor power_of_two -127..127"; what is not restricted is
        left out.
        """
        words = [self.dtype]
        if len(self.schemes) == 1:
            words.append(self.schemes[0].value)
        if len(self.granularities) == 1:
            words.append(self.granularities[0].value)
        if self.power_of_two:
            words.append("power_of_two")
        bounds = (self.quant_min_lower_bound, self.quant_max_upper_bound)
        if bounds != (None, None):
            words.append("..".join("" if bound is None else str(bound) for bound in bounds))
        scales = (self.scale_min_lower_bound, self.scale_max_upper_bound)
        if scales != (None, None):
            words.append("scale " + "..".join("" if s is None else f"{s:g}" for s in scales))
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is None is left out."""
        values = {f.name: to_plain(getattr(self, f.name)) for f in fields(self)}
        return {key: value for key, value in values.items() if value is not None}

    @staticmethod
    def from_dict(data: object, where: str = "DTypeWithConstraints") -> DTypeWithConstraints:
        """What `to_dict` wrote, or a dtype by name."""
        if isinstance(data, str):
            return DTypeWithConstraints(data)
        names = [f.name for f in fields(DTypeWithConstraints)]
        found = dict(check_keys(data, names, where, ("dtype",)))
        for key, kind in (("schemes", Scheme), ("granularities", Granularity)):
            if key in found:
                rows = check_list(found[key], f"{where}.{key}")
                found[key] = tuple(read_enum(kind, row, f"{where}.{key}") for row in rows)
        return DTypeWithConstraints(**found)


@dataclass(frozen=True)
class DTypeConfig:
    """One combination of dtypes a backend can run a pattern with. A dtype by name stands for one
    without constraints.

    Attributes:
        input, output: Computed operands, and the result.
        weight: Constant operands; not asked for where a pattern has none.
        bias: "int32" is in units of data scale x weight scale; another dtype has a grid of its own.
        is_dynamic: The backend picks the input's parameters at run time. This package is static:
            such a row is shown by `explain`, and no QConfig is served by it.
    """

    input: DTypeWithConstraints | str
    output: DTypeWithConstraints | str
    weight: DTypeWithConstraints | str = "int8"
    bias: DTypeWithConstraints | str = "int32"
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        for name in ("input", "output", "weight", "bias"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, DTypeWithConstraints(value))
            elif not isinstance(value, DTypeWithConstraints):
                raise ConfigError(
                    f"DTypeConfig.{name} is {value!r}; allowed: a dtype by name or a "
                    "DTypeWithConstraints."
                )

    def constraints(self, name: str) -> DTypeWithConstraints:
        """Those of "input", "output", "weight" or "bias"."""
        return getattr(self, name)

    def find_conflict(
        self, qconfig: QConfig, *, has_weight: bool = True, has_bias: bool = True
    ) -> str | None:
        """Why `qconfig` cannot run with these dtypes, or None when it can."""
        if self.is_dynamic:
            return "the backend runs this with parameters of the run time only, a QConfig is static"
        wanted = [("activation", "input", Role.ACTIVATION), ("output", "output", Role.OUTPUT)]
        if has_weight:
            wanted.append(("weight", "weight", Role.WEIGHT))
        if has_bias and qconfig.bias is not None:
            wanted.append(("bias", "bias", Role.BIAS))
        for what, name, role in wanted:
            conflict = self.constraints(name).find_conflict(qconfig.tensor(role).spec, what)
            if conflict is not None:
                return conflict
        if has_bias and qconfig.bias is None and self.constraints("bias").dtype != "int32":
            return (
                f"bias dtype int32 is asked for, the backend runs {self.constraints('bias').dtype}"
            )
        return None

    @property
    def description(self) -> str:
        """One line: "uint8 x int8 -> uint8"; a bias is named where it is not int32."""
        parts = [self.constraints(name).description for name in ("input", "weight", "output")]
        bias = self.constraints("bias").description
        text = f"{parts[0]} x {parts[1]} -> {parts[2]}" + (
            f", bias {bias}" if bias != "int32" else ""
        )
        return text + (", dynamic" if self.is_dynamic else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a dtype without constraints by name."""
        data: dict[str, Any] = {}
        for name in ("input", "output", "weight", "bias"):
            constraints = self.constraints(name)
            is_plain = constraints == DTypeWithConstraints(constraints.dtype)
            data[name] = constraints.dtype if is_plain else constraints.to_dict()
        return {**data, "is_dynamic": self.is_dynamic}

    @staticmethod
    def from_dict(data: object, where: str = "DTypeConfig") -> DTypeConfig:
        """What `to_dict` wrote."""
        names = [f.name for f in fields(DTypeConfig)]
        found = dict(check_keys(data, names, where, ("input", "output")))
        is_dynamic = found.pop("is_dynamic", False)
        tensors = {
            key: DTypeWithConstraints.from_dict(value, f"{where}.{key}")
            for key, value in found.items()
        }
        return DTypeConfig(**tensors, is_dynamic=is_dynamic)


class ObservationType(enum.Enum):
    """Where the parameters of a pattern's result come from; the names are FX's."""

    #: an observer of its own
    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = "output_use_different_observer_as_input"
    #: the input's: the result is on the same grid
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = "output_share_observer_with_input"
    #: there are none: the backend runs it in float, on purpose
    INPUT_OUTPUT_NOT_OBSERVED = "input_output_not_observed"
    #: a table by dtype, whatever the data: softmax and sigmoid lie between 0 and 1
    OUTPUT_USE_FIXED_QPARAMS = "output_use_fixed_qparams"


@dataclass(frozen=True)
class FixedOutput:
    """Fixed parameters of a pattern's result, for one dtype and scheme."""

    dtype: str
    scheme: Scheme
    calibration: (
        NamedSettings  #: an observer that looks at no data, e.g. `Fixed(scale, zero_point)`
    )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "dtype": self.dtype,
            "scheme": self.scheme.value,
            "observer": self.calibration.to_dict(),
        }

    @staticmethod
    def from_dict(data: object, where: str = "FixedOutput") -> FixedOutput:
        """What `to_dict` wrote."""
        names = ("dtype", "scheme", "observer")
        found = check_keys(data, names, where, names)
        return FixedOutput(
            found["dtype"],
            read_enum(Scheme, found["scheme"], f"{where}.scheme"),
            NamedSettings.from_dict(found["observer"], f"{where}.observer"),
        )


@runtime_checkable
class QuantPattern(Protocol):
    """What configuration needs to know of an operator row (`relayquant.ops.QuantOp`)."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...


@dataclass(frozen=True)
class PatternConfig:
    """One row of a backend: a pattern, and how the backend can run it.

    Attributes:
        pattern: The operator row.
        dtypes: Combinations that run; a QConfig must fit one of them.
        observation: Where the result's parameters come from; None: as the operator row says.
        fixed: For OUTPUT_USE_FIXED_QPARAMS, the parameters by dtype and scheme.
    """

    pattern: QuantPattern
    dtypes: tuple[DTypeConfig, ...]
    observation: ObservationType | None = None
    fixed: tuple[FixedOutput, ...] = ()

    def find_fixed(self, spec: QSpec) -> Any:
        """The observer of fixed parameters for a result of this spec, None if there is none."""
        if self.observation is not ObservationType.OUTPUT_USE_FIXED_QPARAMS:
            return None
        for row in self.fixed:
            if (row.dtype, row.scheme) == (spec.dtype, spec.scheme):
                return row.calibration
        return None

    def find_conflict(
        self, qconfig: QConfig, *, has_weight: bool = True, has_bias: bool = True
    ) -> str | None:
        """Why the backend cannot run the pattern with `qconfig`: the first row's reason if none
        fits; else None.
        """
        conflicts = [
            row.find_conflict(qconfig, has_weight=has_weight, has_bias=has_bias)
            for row in self.dtypes
        ]
        if not conflicts:
            return "the backend lists no dtypes for it"
        if all(conflict is not None for conflict in conflicts):
            return conflicts[0]
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
        """Plain data; the pattern by name."""
        data: dict[str, Any] = {
            "pattern": self.pattern.name,
            "dtypes": [row.to_dict() for row in self.dtypes],
        }
        if self.observation is not None:
            data["observation"] = self.observation.value
        if self.fixed:
            data["fixed"] = [row.to_dict() for row in self.fixed]
        return data

    @staticmethod
    def from_dict(
        data: object, patterns: Mapping[str, QuantPattern], where: str = "PatternConfig"
    ) -> PatternConfig:
        """What `to_dict` wrote; `patterns` gives the operator rows by name."""
        names = [f.name for f in fields(PatternConfig)]
        found = check_keys(data, names, where, ("pattern", "dtypes"))
        name = found["pattern"]
        if name not in patterns:
            raise ConfigError(f"{where}.pattern is {name!r}. {suggest_name(str(name), patterns)}")
        observation = found.get("observation")
        if observation is not None:
            observation = read_enum(ObservationType, observation, f"{where}.observation")
        dtypes = check_list(found["dtypes"], f"{where}.dtypes")
        fixed = check_list(found.get("fixed", ()), f"{where}.fixed")
        return PatternConfig(
            patterns[name],
            tuple(
                DTypeConfig.from_dict(row, f"{where}.dtypes[{i}]") for i, row in enumerate(dtypes)
            ),
            observation,
            tuple(FixedOutput.from_dict(row, f"{where}.fixed[{i}]") for i, row in enumerate(fixed)),
        )


@dataclass(frozen=True)
class BackendConfig:
    """What a backend can run. The order of `patterns` is priority: the first that matches wins.

    Attributes:
        name: For messages and the ledger.
        patterns: Rows, the longest patterns first.
        affine_rules: Rules of the allow-list (`relayquant.AffineRule`), tried before the built-in
            ones.
        default_qconfig: For all operators when the user gives no QConfigMapping.
        reduce_range: Activations use one bit less than their dtype has, unless a QSpec says
            otherwise.
    """

    name: str
    patterns: tuple[PatternConfig, ...] = ()
    affine_rules: tuple[Any, ...] = ()
    default_qconfig: QConfig | None = None
    reduce_range: bool = False

    def with_pattern(
        self,
        pattern: QuantPattern,
        dtypes: Iterable[DTypeConfig] | None = None,
        *,
        observation: ObservationType | None = None,
        fixed: Iterable[FixedOutput] = (),
    ) -> BackendConfig:
        """A backend that tries `pattern` before all others; a row it had for a pattern of this name
        is replaced.

        `dtypes` defaults to those of the first pattern the backend has.
        """
        if dtypes is None:
            if not self.patterns:
                raise ConfigError(
                    f"Backend {self.name!r} has no pattern to take dtypes from; pass dtypes="
                    "[DTypeConfig(input=..., output=...)]."
                )
            dtypes = self.patterns[0].dtypes
        row = PatternConfig(pattern, tuple(dtypes), observation, tuple(fixed))
        others = (other for other in self.patterns if other.pattern.name != pattern.name)
        return replace(self, patterns=(row, *others))

    def without_pattern(self, name: str) -> BackendConfig:
        """A backend that does not run the pattern.

        Raises:
            ConfigError: the backend has no such pattern.
        """
        removed = self.find_pattern(name)
        return replace(self, patterns=tuple(row for row in self.patterns if row is not removed))

    def with_affine_rule(self, rule: Any) -> BackendConfig:
        """A backend whose allow-list tries `rule` first."""
        return replace(self, affine_rules=(rule, *self.affine_rules))

    def find_pattern(self, name: str) -> PatternConfig:
        """The row of a pattern by name.

        Raises:
            ConfigError: the backend has no such pattern.
        """
        for row in self.patterns:
            if row.pattern.name == name:
                return row
        known = [row.pattern.name for row in self.patterns]
        raise ConfigError(
            f"Backend {self.name!r} has no pattern {name!r}. {suggest_name(name, known)}"
        )

    def adapt_qconfig(self, qconfig: QConfig) -> QConfig:
        """A user's QConfig as this backend runs it: one bit less where `reduce_range` says so."""
        return qconfig.with_reduced_range() if self.reduce_range else qconfig

    def explain(self, pattern: str | QuantPattern | None = None) -> str:
        """What the backend can run: a text with a line for each pattern and combination of dtypes.

        Args:
            pattern: A pattern, its name, or an operator ("nn.conv2d", "conv2d"); None: everything.

        Raises:
            ConfigError: the backend has nothing of this name.
        """
        rows = self.patterns
        if pattern is not None:
            name = pattern if isinstance(pattern, str) else pattern.name
            rows = tuple(r for r in rows if is_type(r.pattern.op, r.pattern.name, name))
            if not rows:
                known = [n for r in self.patterns for n in (r.pattern.name, r.pattern.op)]
                raise ConfigError(
                    f"Backend {self.name!r} cannot run {name!r}: it stays in float. "
                    f"{suggest_name(name, known)}"
                )
        lines = [
            f"backend {self.name}" + (", activations use one bit less" if self.reduce_range else "")
        ]
        for row in rows:
            lines.append(f"{row.pattern.name} ({row.pattern.op})")
            lines += [f"  {dtypes.description}" for dtypes in row.dtypes]
            if row.observation is not None:
                lines.append(f"  {row.observation.value}")
            for fixed in row.fixed:
                lines.append(f"  fixed {fixed.dtype} {fixed.scheme.value}: {fixed.calibration}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and TOML; patterns and affine rules, which are code, by name."""
        data: dict[str, Any] = {"name": self.name, "reduce_range": self.reduce_range}
        if self.default_qconfig is not None:
            data["default_qconfig"] = self.default_qconfig.to_dict()
        data["affine_rules"] = [rule.op for rule in self.affine_rules]
        data["patterns"] = [row.to_dict() for row in self.patterns]
        return data

    @staticmethod
    def from_dict(
        data: object,
        patterns: Iterable[QuantPattern],
        affine_rules: Iterable[Any] = (),
        where: str = "BackendConfig",
    ) -> BackendConfig:
        """What `to_dict` wrote. `patterns` are the operator rows it may name
        (`relayquant.BUILTIN_OPS` and your own).

        Raises:
            ConfigError: an unknown key or pattern (names the nearest), a missing one, or a value
                not allowed.
        """
        names = [f.name for f in fields(BackendConfig)]
        found = check_keys(data, names, where, ("name", "patterns"))
        known = {pattern.name: pattern for pattern in patterns}
        rules = {rule.op: rule for rule in affine_rules}
        for op in check_list(found.get("affine_rules", ()), f"{where}.affine_rules"):
            if op not in rules:
                raise ConfigError(
                    f"{where}.affine_rules names a rule for {op!r}, which was not passed as "
                    "affine_rules=[...]. "
                    f"{suggest_name(str(op), rules)}"
                )
        rows = check_list(found["patterns"], f"{where}.patterns")
        qconfig = found.get("default_qconfig")
        return BackendConfig(
            found["name"],
            tuple(
                PatternConfig.from_dict(row, known, f"{where}.patterns[{i}]")
                for i, row in enumerate(rows)
            ),
            tuple(rules[op] for op in found.get("affine_rules", ())),
            None if qconfig is None else QConfig.from_dict(qconfig, f"{where}.default_qconfig"),
            found.get("reduce_range", False),
        )
