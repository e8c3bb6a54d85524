"""The dtypes and constraints that a backend supports for each tensor of an operator.

annotate uses them to decide whether the backend supports a QConfig.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relayquant.base.arguments import check_fields
from relayquant.base.plain_data import PlainSettings, read_fields
from relayquant.base.qtypes import INTEGER_LIMITS, Granularity, QSpec, Role, Scheme
from relayquant.config.accumulator import NATIVE, Accumulator
from relayquant.config.observers import MinMax
from relayquant.config.qconfig import QConfig, TensorConfig
from relayquant.errors import ConfigError, suggest_name


@check_fields
@dataclass(frozen=True)
class DTypeWithConstraints(PlainSettings):
    """The supported specifications of one tensor. A QSpec fits if it is within every bound.

    Attributes:
        dtype: The only dtype. int8 also accepts int4, which is stored in int8.
        schemes, granularities: The supported values.
        quant_min_lower_bound, quant_max_upper_bound: The supported integers. None is the limits of
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
                f"{suggest_name(str(self.dtype), allowed)}",
                code="RQ101",
            )

        self.check_bounds()

    def check_bounds(self) -> None:
        """Raise ConfigError if no QSpec is within all bounds."""
        for name in ("schemes", "granularities"):
            if getattr(self, name) == ():
                raise ConfigError(
                    f"DTypeWithConstraints.{name} is empty: no QSpec fits. Leave it out for all.",
                    code="RQ101",
                )
        if self.dtype not in INTEGER_LIMITS:
            return
        limits = INTEGER_LIMITS[self.dtype]
        low, high = self.quant_min_lower_bound, self.quant_max_upper_bound
        low, high = (limits[0] if low is None else low), (limits[1] if high is None else high)
        if max(low, limits[0]) >= min(high, limits[1]):
            raise ConfigError(
                f"DTypeWithConstraints: no QSpec of {self.dtype} ({limits[0]}..{limits[1]}) fits "
                f"quant_min_lower_bound={low}, quant_max_upper_bound={high}.",
                code="RQ102",
            )
        least, most = self.scale_min_lower_bound, self.scale_max_upper_bound
        try:
            QSpec(self.dtype, scale_min=least, scale_max=most, power_of_two=self.power_of_two)
        except ConfigError as error:
            raise ConfigError(
                f"DTypeWithConstraints: no QSpec fits scale_min_lower_bound={least}, "
                f"scale_max_upper_bound={most}, power_of_two={self.power_of_two}: {error}",
                code="RQ102",
            ) from error

    def find_conflict(self, spec: QSpec, what: str) -> str | None:
        """Return why `spec` is refused, or None. `what` names the tensor for the message."""
        if not self.holds(spec):
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
            have = describe_bound("scale_min", spec.scale_min)
            return f"{what} {have}, the backend runs scale_min >= {self.scale_min_lower_bound}"
        if self.scale_max_upper_bound is not None and largest > self.scale_max_upper_bound:
            have = describe_bound("scale_max", spec.scale_max)
            return f"{what} {have}, the backend runs scale_max <= {self.scale_max_upper_bound}"
        if self.power_of_two and not spec.power_of_two:
            return f"{what} scales must be powers of two: QSpec(power_of_two=True)"
        return None

    def make_spec(self, name: str) -> QSpec:
        """Return a specification within all bounds: affine bytes, all else symmetric. A weight has
        one scale for each channel where this is allowed.
        """
        is_affine = name in ("input", "output") and self.dtype in ("uint8", "int8")
        scheme = Scheme.AFFINE if is_affine else Scheme.SYMMETRIC
        granularity = Granularity.PER_CHANNEL if name == "weight" else Granularity.PER_TENSOR
        return QSpec(
            self.dtype,
            scheme if scheme in self.schemes else self.schemes[0],
            granularity if granularity in self.granularities else self.granularities[0],
            quant_min=self.quant_min_lower_bound,
            quant_max=self.quant_max_upper_bound,
            power_of_two=self.power_of_two,
            scale_min=self.scale_min_lower_bound,
            scale_max=self.scale_max_upper_bound,
        )

    def holds(self, spec: QSpec) -> bool:
        """Whether integers of this specification have `dtype`. int8 limited to -8..7 is the same as
        int4.
        """
        if self.dtype == "int4" and spec.dtype == "int8":
            low, high = INTEGER_LIMITS["int4"]
            return low <= spec.limits[0] and spec.limits[1] <= high
        return self.dtype in (spec.dtype, spec.stored.dtype)

    @property
    def description(self) -> str:
        """A phrase such as "int8 symmetric per_tensor power_of_two -127..127".

        Unrestricted properties are left out.
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

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> DTypeWithConstraints:
        """Read the data of `to_dict`, or a dtype by name."""
        if isinstance(data, str):
            return DTypeWithConstraints(data)
        return read_fields(cls, data, where or cls.__name__)


def describe_bound(name: str, value: float | None) -> str:
    """Describe a bound of a QSpec, for messages."""
    return f"QSpec has no {name}" if value is None else f"{name} is {value}"


@check_fields
@dataclass(frozen=True, kw_only=True)
class DTypeConfig(PlainSettings):
    """One combination of dtypes that a backend can run a pattern with, given by keywords.

    The name of a dtype stands for the dtype without constraints. A combination that no QConfig can
    fit raises ConfigError.

    Attributes:
        input, output: The computed operands, and the result.
        weight: Constant operands. Ignored for patterns without constant operands.
        bias: "int32" has scale data scale x weight scale. Another dtype has a separate scale.
        accumulator: Accumulator of convolutions and matrix products: an `Accumulator`, or a text
            such as "int14" or "int14 wrap". The default never overflows.
        is_dynamic: Whether the input's parameters are computed at run time, from each tensor. It
            fits only QConfigs with a dynamic activation. `output` and `bias` must be "float32", and
            the accumulator must be the kernels' accumulator.
        is_grouped: Whether the weights stay packed, in groups. It fits only QConfigs with a
            `group_size` of the weight. `input` is "float32", or "int8" with a scale for each row.
            `output` and `bias` are "float32".
    """

    input: DTypeWithConstraints | str
    output: DTypeWithConstraints | str
    weight: DTypeWithConstraints | str = "int8"
    bias: DTypeWithConstraints | str = "int32"
    is_dynamic: bool = False
    accumulator: Accumulator | str = NATIVE
    is_grouped: bool = False

    def __post_init__(self) -> None:
        for name in ("input", "output", "weight", "bias"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, DTypeWithConstraints(value))
            elif not isinstance(value, DTypeWithConstraints):
                raise ConfigError(
                    f"DTypeConfig.{name} is {value!r}; allowed: a dtype by name or a "
                    "DTypeWithConstraints.",
                    code="RQ101",
                )

        if isinstance(self.accumulator, str):
            accumulator = Accumulator.parse(self.accumulator, "DTypeConfig.accumulator")
            object.__setattr__(self, "accumulator", accumulator)
        elif not isinstance(self.accumulator, Accumulator):
            raise ConfigError(
                f"DTypeConfig.accumulator is {self.accumulator!r}; allowed: an Accumulator, or a "
                "text such as 'int14 wrap'.",
                code="RQ101",
            )
        self.check_servable()

    def check_servable(self) -> None:
        """Raise ConfigError if no QConfig can fit."""
        if self.is_grouped is True:
            conflict = self._find_static_part()
            if conflict is None and self.constraints("input").dtype not in ("float32", "int8"):
                conflict = f"input is {self.constraints('input').dtype}, not float32 or int8"
            if conflict is not None:
                raise ConfigError(
                    f"DTypeConfig(is_grouped=True): no QConfig fits: {conflict}.", code="RQ102"
                )
            return
        if self.is_dynamic is True:
            conflict = self._find_static_part()
            data = self.constraints("input")
            if conflict is None and (
                set(data.granularities) == {Granularity.PER_CHANNEL}
                or data.power_of_two
                or (data.scale_min_lower_bound, data.scale_max_upper_bound) != (None, None)
            ):
                conflict = (
                    f"input is {data.description}, but parameters of the run time are one set per "
                    "tensor or row, with any scale"
                )
            if conflict is not None:
                raise ConfigError(
                    f"DTypeConfig(is_dynamic=True): no QConfig fits: {conflict}.", code="RQ102"
                )
        for name in ("input",) if self.is_dynamic else ("input", "output"):
            if self.constraints(name).dtype not in INTEGER_LIMITS:
                raise ConfigError(
                    f"DTypeConfig.{name} is {self.constraints(name).dtype}: no QConfig fits; "
                    f"allowed: {', '.join(INTEGER_LIMITS)}. Operators that the backend runs in "
                    "float need no DTypeConfig; BackendConfig.float_dtypes names narrow ones.",
                    code="RQ101",
                )

    @property
    def register(self) -> Accumulator:
        """The accumulator. A text is read as an `Accumulator`."""
        return (
            Accumulator.from_dict(self.accumulator)
            if isinstance(self.accumulator, str)
            else (self.accumulator)
        )

    def constraints(self, name: str) -> DTypeWithConstraints:
        """Return the constraints of "input", "output", "weight" or "bias"."""
        return getattr(self, name)

    def make_qconfig(self, like: QConfig | None) -> QConfig | None:
        """Return a QConfig of these dtypes, with what fits of another one. None if it would not be
        static.
        """
        if self.is_dynamic or self.is_grouped:
            return None
        tensors = dict.fromkeys(("input", "weight", "output", "bias"))
        if like is not None and not like.is_dynamic and not like.is_grouped:
            tensors |= {"input": like.activation, "weight": like.weight, "bias": like.bias}
            tensors["output"] = like.output or like.activation
        for name, config in tensors.items():
            allowed = self.constraints(name)
            if config is None or allowed.find_conflict(config.spec, name) is not None:
                tensors[name] = TensorConfig(allowed.make_spec(name), MinMax())
        data, weight, output, bias = tensors.values()
        has_bias = self.constraints("bias").dtype != "int32"
        return QConfig(data, weight, None if output == data else output, bias if has_bias else None)

    def find_conflict(
        self, qconfig: QConfig, *, has_weight: bool = True, has_bias: bool = True
    ) -> str | None:
        """Return why `qconfig` cannot run with these dtypes, or None if it can."""
        if self.is_grouped or qconfig.is_grouped:
            return self._find_grouped_conflict(qconfig)
        if self.is_dynamic or qconfig.is_dynamic:
            return self._find_dynamic_conflict(qconfig, has_weight=has_weight)
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

    def _find_grouped_conflict(self, qconfig: QConfig) -> str | None:
        """Find the conflict if the row or the QConfig has grouped weights."""
        if not qconfig.is_grouped:
            return "the backend's weights are in groups, the QConfig's weights are not"
        if not self.is_grouped:
            return "weights in groups are asked for (group_size), the backend's are not"
        wanted = "float32" if qconfig.activation is None else qconfig.activation.spec.dtype
        if wanted != self.constraints("input").dtype:
            return (
                f"activation dtype {wanted} is asked for, the backend runs "
                f"{self.constraints('input').dtype}"
            )
        return self.constraints("weight").find_conflict(qconfig.weight.spec, "weight")

    def _find_dynamic_conflict(self, qconfig: QConfig, *, has_weight: bool) -> str | None:
        """Find the conflict if the row or the QConfig has run-time parameters."""
        if not qconfig.is_dynamic:
            return "the backend computes the input's parameters at run time, the QConfig is static"
        if not self.is_dynamic:
            return "parameters of the run time are asked for (is_dynamic), the backend's are static"
        for name in ("output", "bias"):
            if getattr(qconfig, name) is not None:
                return f"{name} is configured, but that of a dynamic operator is float32"
        conflict = self.constraints("input").find_conflict(qconfig.activation.spec, "activation")
        if conflict is None and has_weight:
            return self.constraints("weight").find_conflict(qconfig.weight.spec, "weight")
        return conflict

    def _find_static_part(self) -> str | None:
        """Find a setting in a row for float results that only integer results can have, or None."""
        kind = "a grouped" if self.is_grouped else "a dynamic"
        for name in ("output", "bias"):
            if self.constraints(name).dtype != "float32":
                return (
                    f"{name} is {self.constraints(name).dtype}, but that of {kind} operator is "
                    f"float32: write {name}='float32'"
                )
        if not self.register.is_native:
            return (
                f"accumulator is {self.register.description}, but that of {kind} operator is "
                "the kernels' own"
            )
        return None

    @property
    def description(self) -> str:
        """One line such as "uint8 x int8 -> uint8". A bias is named if it is not int32."""
        parts = [self.constraints(name).description for name in ("input", "weight", "output")]
        bias = self.constraints("bias").description
        text = f"{parts[0]} x {parts[1]} -> {parts[2]}" + (
            f", bias {bias}" if bias != "int32" else ""
        )
        if not self.register.is_native:
            text += f", accumulator {self.register.description}"
        text += ", weights in groups" if self.is_grouped else ""
        return text + (", dynamic" if self.is_dynamic else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. A dtype without constraints is its name."""
        data: dict[str, Any] = {}
        for name in ("input", "output", "weight", "bias"):
            constraints = self.constraints(name)
            is_plain = constraints == DTypeWithConstraints(constraints.dtype)
            data[name] = constraints.dtype if is_plain else constraints.to_dict()
        if self.register != NATIVE:
            data["accumulator"] = self.register.to_dict()
        if self.is_grouped:
            data["is_grouped"] = True
        return {**data, "is_dynamic": self.is_dynamic}
