"""The quantization of one operator: observer and specification for each kind of tensor.

annotate reads the user's QConfigs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from relayquant.base.arguments import check_arguments, check_fields, takes_arguments
from relayquant.base.plain_data import (
    NamedSettings,
    PlainSettings,
    check_keys,
    check_mapping,
    read_fields,
)
from relayquant.base.qtypes import Granularity, QSpec, Role
from relayquant.config.observers import read_observer
from relayquant.errors import ConfigError, suggest_name

#: plain data for None: the operator stays in float
KEPT_IN_FLOAT = "float"
#: dtypes in which an operator may be computed instead of float32
NARROW_FLOATS = ("float16",)
#: names that plain data may hold instead of a QConfig
CONFIG_NAMES = (KEPT_IN_FLOAT, *NARROW_FLOATS)


def check_observer(observer: object, where: str) -> None:
    """Raise ConfigError unless it is an observer, or a callable that can choose parameters."""
    allowed = "an observer, for instance MinMax(), or a callable (info, samples) -> QParams"
    if isinstance(observer, type):
        raise ConfigError(
            f"{where} is the class {observer.__name__}, not an instance: write "
            f"{observer.__name__}(). Allowed: {allowed}.",
            code="RQ101",
        )
    if isinstance(observer, NamedSettings):
        return
    if not callable(observer):
        raise ConfigError(f"{where} is {observer!r}; allowed: {allowed}.", code="RQ101")
    # The third argument is a `relayquant.observers.CalibrationContext`.
    if not takes_arguments(observer, 2) and not takes_arguments(observer, 3):
        raise ConfigError(
            f"{where} is {getattr(observer, '__qualname__', observer)}, which cannot be "
            f"called with two or three positional arguments; allowed: {allowed}.",
            code="RQ101",
        )


@check_fields
@dataclass(frozen=True)
class TensorConfig(PlainSettings):
    """The quantization of one kind of tensor: `spec`, and the observer or callable that chooses
    parameters.

    `observer` is an `Observer` or a callable `(ValueInfo, samples) -> QParams`; It is None for
    `spec.is_dynamic`, because nothing is calibrated, and for grouped weights, because each group
    uses the scale with the smallest error.
    """

    spec: QSpec
    observer: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, QSpec):
            raise ConfigError(
                f"TensorConfig.spec is {self.spec!r}; allowed: a QSpec.", code="RQ101"
            )
        if self.spec.is_dynamic and self.observer is not None:
            raise ConfigError(
                f"TensorConfig.observer is {self.observer!r}, but the spec is dynamic: its "
                "parameters are computed at run time. Leave the observer out.",
                code="RQ102",
            )
        if self.is_grouped and self.observer is not None:
            raise ConfigError(
                f"TensorConfig.observer is {self.observer!r}, but the spec has a group_size: "
                "each group gets the scale with the smallest error. Leave the observer out.",
                code="RQ102",
            )
        if not self.needs_none and self.observer is None:
            raise ConfigError(
                "TensorConfig.observer is missing; give an observer, for instance MinMax(), or "
                "a callable. Only QSpec(is_dynamic=True) and QSpec(group_size=...) need none.",
                code="RQ102",
            )
        if self.observer is not None:
            observer = read_observer(self.observer, "TensorConfig.observer")
            object.__setattr__(self, "observer", observer)
            check_observer(observer, "TensorConfig.observer")

    @property
    def is_grouped(self) -> bool:
        """Whether it is for weights that stay packed, in groups."""
        return self.spec.group_size is not None

    @property
    def needs_none(self) -> bool:
        """Whether no observer is needed, because parameters are not chosen from observed ranges."""
        return self.spec.is_dynamic or self.is_grouped

    def to_dict(self) -> dict[str, Any]:
        """Return {"spec": ..., "observer": {"name": class, setting: value, ...}}.

        There is no observer if the spec needs none.

        Raises:
            ConfigError: `observer` is a callable, which has no plain form.
        """
        if self.needs_none:
            return {"spec": self.spec.to_dict()}
        if not isinstance(self.observer, NamedSettings):
            name = getattr(self.observer, "__qualname__", type(self.observer).__name__)
            raise ConfigError(
                f"TensorConfig.observer is {name}, which cannot be written as plain data; use an "
                "observer, for instance MinMax(), or pass the callable as quantize(..., "
                "observer=...).",
                code="RQ101",
            )
        return {"spec": self.spec.to_dict(), "observer": self.observer.to_dict()}

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> TensorConfig:
        """What `to_dict` wrote.

        Raises:
            ConfigError: an unknown key, observer or setting (names the nearest), or a value not
                allowed.
        """
        where = where or cls.__name__
        found = check_keys(data, ("spec", "observer"), where, ("spec",))
        spec = QSpec.from_dict(found["spec"], f"{where}.spec")
        if "observer" not in found and (spec.is_dynamic or spec.group_size is not None):
            return TensorConfig(spec)
        found = check_keys(data, ("spec", "observer"), where, ("spec", "observer"))
        return TensorConfig(spec, NamedSettings.from_dict(found["observer"], f"{where}.observer"))


@check_fields
@dataclass(frozen=True)
class QConfig(PlainSettings):
    """The quantization of one operator.

    Attributes:
        activation: Computed operands. With `QSpec(is_dynamic=True)`, their parameters are computed
            at run time, the weights are quantized as usual, and the result is float32. With None,
            they stay float32 and only the weights are quantized.
        weight: Constant operands. With `QSpec(group_size=...)`, they stay packed in memory, the
            activation is None or has a scale for each row, and the result is float32.
        output: The result. None uses `activation`.
        bias: None is int32 with scale data scale x weight scale, which is exact to half a step. A
            TensorConfig with fewer bits first rounds the bias with a separate scale, as hardware
            with narrow biases does.
    """

    activation: TensorConfig | None
    weight: TensorConfig
    output: TensorConfig | None = None
    bias: TensorConfig | None = None

    def __post_init__(self) -> None:
        for name in ("activation", "weight", "output", "bias"):
            value = getattr(self, name)
            optional = name != "weight"
            if not isinstance(value, TensorConfig) and not (optional and value is None):
                raise ConfigError(
                    f"QConfig.{name} is {value!r}; allowed: a TensorConfig(spec, observer)"
                    f"{' or None' if optional else ''}.",
                    code="RQ101",
                )
            if isinstance(value, TensorConfig) and value.spec.is_dynamic and name != "activation":
                raise ConfigError(
                    f"QConfig.{name} is dynamic; only `activation` can be: its parameters alone "
                    "may be computed at run time.",
                    code="RQ101",
                )
            if isinstance(value, TensorConfig) and value.is_grouped and name != "weight":
                raise ConfigError(
                    f"QConfig.{name} has group_size={value.spec.group_size}; only weights are in "
                    "groups.",
                    code="RQ101",
                )
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise if activations do not match grouped or ungrouped weights."""
        data = self.activation
        if not self.is_grouped:
            if data is None:
                raise ConfigError(
                    "QConfig.activation is None, which weights in groups alone go with: "
                    "QSpec('int4', group_size=32), for instance.",
                    code="RQ102",
                )
            return
        is_row = data is None or data.spec.granularity is Granularity.PER_ROW
        if data is not None and not (is_row and data.spec.dtype == "int8"):
            raise ConfigError(
                f"QConfig.weight has group_size={self.weight.spec.group_size}, with which "
                "activations are None (float32), or QSpec('int8', is_dynamic=True, "
                "granularity=Granularity.PER_ROW).",
                code="RQ102",
            )
        for name in ("output", "bias"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"QConfig.{name} is configured, but it is float32 with weights in groups. "
                    "Leave it out.",
                    code="RQ102",
                )

    @property
    def is_grouped(self) -> bool:
        """Whether weights stay packed, in groups."""
        return self.weight.is_grouped

    @property
    def data(self) -> TensorConfig:
        """The config of quantized activations.

        Raises:
            ConfigError: activations are float32.
        """
        if self.activation is None:
            raise ConfigError(
                "This QConfig has no activation: its operators compute in float32.", code="RQ101"
            )
        return self.activation

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> QConfig:
        """What `to_dict` wrote; beside a weight in groups, "activation" may be left out."""
        where = where or cls.__name__
        entries = check_mapping(data, where)
        weight = entries.get("weight")
        spec = weight.get("spec") if isinstance(weight, Mapping) else None
        if isinstance(spec, Mapping) and spec.get("group_size") is not None:
            entries = {"activation": None, **entries}
        return read_fields(cls, entries, where)

    @check_arguments
    def tensor(self, role: Role) -> TensorConfig:
        """Return the config of a tensor in this role.

        Raises:
            ConfigError: role is BIAS and there is no `bias`: its parameters follow from data and
                weight; or activations are float32.
        """
        if role is Role.BIAS:
            if self.bias is None:
                raise ConfigError(
                    "This QConfig has no bias configuration: a bias is int32, its scale is input "
                    "scale x weight scale. Set QConfig(bias=...) to round it to a grid of its own.",
                    code="RQ101",
                )
            return self.bias
        if role is Role.WEIGHT:
            return self.weight
        if role is Role.OUTPUT and self.output is not None:
            return self.output
        return self.data

    @property
    def is_dynamic(self) -> bool:
        """Whether the parameters of computed operands are computed at run time."""
        return self.activation is not None and self.activation.spec.is_dynamic

    @property
    def has_own_bias(self) -> bool:
        """Whether biases are rounded with a separate scale before they are added."""
        return self.bias is not None and self.bias.spec.dtype != "int32"

    def with_reduced_range(self) -> QConfig:
        """Return a copy with activations of one bit less. See `QSpec.with_reduced_range`."""

        def reduce(config: TensorConfig) -> TensorConfig:
            return replace(config, spec=config.spec.with_reduced_range())

        if self.is_grouped:
            return self  # its data is float32, or has symmetric rows
        output = reduce(self.output) if self.output is not None else None
        return replace(self, activation=reduce(self.data), output=output)


@check_fields
@dataclass(frozen=True)
class FloatConfig:
    """A narrower float dtype, by name, for operators that are not quantized.

    Values are cast once where they enter and leave. Neighbours with the same dtype share the values
    between them.
    """

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in NARROW_FLOATS:
            raise ConfigError(
                f"FloatConfig.dtype is {self.dtype!r}; allowed: {', '.join(NARROW_FLOATS)}. "
                "float32 is what None in a QConfigMapping means.",
                code="RQ101",
            )


#: entry of a QConfigMapping: the operators are computed in float16
FLOAT16 = FloatConfig("float16")


def write_qconfig(qconfig: QConfig | FloatConfig | None) -> Any:
    """Return plain data: a dict, "float16", or "float" for None."""
    if qconfig is None:
        return KEPT_IN_FLOAT
    return qconfig.dtype if isinstance(qconfig, FloatConfig) else qconfig.to_dict()


def read_qconfig(data: object, where: str) -> QConfig | FloatConfig | None:
    """Read plain data: a QConfig, FLOAT16 from "float16", None from "float" or None."""
    if data is None or data == KEPT_IN_FLOAT:
        return None
    if isinstance(data, str):
        if data not in NARROW_FLOATS:
            raise ConfigError(
                f"{where} is {data!r}. {suggest_name(data, CONFIG_NAMES)}", code="RQ101"
            )
        return FloatConfig(data)
    return QConfig.from_dict(data, where)
