"""Frozen values that all stages exchange: quantization parameters, specifications, and descriptions
of values.

Depends on numpy only, not on TVM. As in the documentation, *affine space* holds integers q with
`real = scale * (q - zero_point)`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relayquant.base.arguments import check_arguments, check_fields
from relayquant.base.packing import CODE_BITS
from relayquant.base.plain_data import PlainFields, PlainSettings
from relayquant.errors import ConfigError, format_count

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]

#: Range of each dtype for quantized values, both ends included.
INTEGER_LIMITS: dict[str, tuple[int, int]] = {
    "int4": (-8, 7),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}

#: Smallest and largest group size.
GROUP_SIZES = (16, 256)
#: Group size for one scale per output.
WHOLE_ROW = -1
#: Dtypes for the scales of groups.
SCALE_DTYPES = ("float32", "float16")


class Rounding(enum.Enum):
    """How a real value is rounded to an integer."""

    UPWARD = "UPWARD"  #: floor(x + 0.5): default of Relay's requantize
    TONEAREST = "TONEAREST"  #: half away from zero: Relay's quantize
    TONEAREST_EVEN = "TONEAREST_EVEN"  #: half to even: ONNX, and the default of this package


class Arithmetic(enum.Enum):
    """How requantize multiplies (`compute_dtype` in Relay)."""

    INT64 = "int64"  #: 31-bit fixed-point multiplier in 64-bit integers
    FLOAT32 = "float32"  #: one float32 multiplication, the default
    FLOAT64 = "float64"


def has_exact_sums(rounding: Rounding, arithmetic: Arithmetic) -> bool:
    """Whether sums and products are exact, in int64 where int32 overflows. True with half-to-even
    rounding and float arithmetic. Modes that follow TVM v0.19, and fixed point, use int32.
    """
    return rounding is Rounding.TONEAREST_EVEN and arithmetic is not Arithmetic.INT64


class Scheme(enum.Enum):
    """Whether the zero point is fixed."""

    SYMMETRIC = "symmetric"  #: zero point fixed at the middle of the range (0 for signed types)
    AFFINE = "affine"


class Granularity(enum.Enum):
    """How many parameters a tensor has."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    PER_ROW = "per_row"  #: one set per row (token), computed at run time
    PER_GROUP = "per_group"  #: one scale per group of a row, where the weight's groups are


class Role(enum.Enum):
    """Which operand of its operator a value is."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"


@check_fields
@dataclass(frozen=True)
class QSpec(PlainSettings):
    """How a tensor is quantized. Does not contain the values of its parameters.

    Attributes:
        dtype: Dtype of the integers.
        quant_min, quant_max: Smallest and largest integer used. Default: the limits of `dtype`.
            Symmetric int8 weights usually use -127..127, 4-bit weights -7..7 or -8..7.
        power_of_two: Scales are powers of two, so that hardware may shift instead of multiply.
        scale_min, scale_max: Bounds of every scale. None for no bound.
        is_dynamic: Scale and zero point are computed from each tensor at run time, as in ONNX's
            DynamicQuantizeLinear, instead of being calibrated. For input activations of operators
            with constant weights. With granularity PER_ROW, each row of a product's data has its
            own set; with PER_GROUP (symmetric int8, for `compress_weights`) each group of a row
            has its own scale.
        group_size: For weights that stay packed in memory: the number of neighbours along the
            reduction axis that share a scale, 16 to 256, or `WHOLE_ROW`. Codes have 2, 3, 4 or 8
            bits, as many as the limits need: -4..3 needs 3. Symmetric, or with a zero point per
            group.
        scale_dtype: Dtype of the scales of groups, "float32" or "float16".
    """

    dtype: str = "int8"
    scheme: Scheme = Scheme.AFFINE
    granularity: Granularity = Granularity.PER_TENSOR
    quant_min: int | None = None
    quant_max: int | None = None
    power_of_two: bool = False
    scale_min: float | None = None
    scale_max: float | None = None
    is_dynamic: bool = False
    group_size: int | None = None
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in INTEGER_LIMITS:
            raise ConfigError(
                f"QSpec.dtype is {self.dtype!r}; allowed: {', '.join(INTEGER_LIMITS)}.",
                code="RQ101",
            )
        if not isinstance(self.scheme, Scheme) or not isinstance(self.granularity, Granularity):
            raise ConfigError(
                f"QSpec.scheme is {self.scheme!r} and granularity {self.granularity!r}; allowed: "
                "members of Scheme and Granularity.",
                code="RQ101",
            )
        for name in ("quant_min", "quant_max"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(
                    f"QSpec.{name} is {value!r}; allowed: an integer or None.", code="RQ101"
                )
        low, high = INTEGER_LIMITS[self.dtype]
        if self.quant_min is None:
            object.__setattr__(self, "quant_min", low)
        if self.quant_max is None:
            object.__setattr__(self, "quant_max", high)
        if not low <= self.limits[0] < self.limits[1] <= high:
            raise ConfigError(
                f"QSpec quant_min={self.quant_min}, quant_max={self.quant_max} is not a range "
                f"within {self.dtype} ({low}..{high}).",
                code="RQ101",
            )
        if self.is_symmetric and self.limits[1] - self.limits[0] < 2:
            raise ConfigError(
                f"QSpec quant_min={self.quant_min}, quant_max={self.quant_max} has two values "
                "only; a symmetric scheme needs at least three: one below and one above its zero "
                "point.",
                code="RQ101",
            )
        lowest, largest = self.scale_bounds
        if not 0 <= lowest <= largest or largest == 0:
            raise ConfigError(
                f"QSpec scale_min={self.scale_min}, scale_max={self.scale_max} is not a range of "
                "scales; allowed: 0 < scale_min <= scale_max.",
                code="RQ101",
            )
        if self.power_of_two and find_power_of_two(largest) < lowest:
            raise ConfigError(
                f"QSpec scale_min={self.scale_min}, scale_max={self.scale_max} holds no power of "
                "two.",
                code="RQ101",
            )
        if not isinstance(self.is_dynamic, bool):
            raise ConfigError(
                f"QSpec.is_dynamic is {self.is_dynamic!r}; allowed: True or False.", code="RQ101"
            )
        self._check_granularity()
        self._check_groups()

    def _check_granularity(self) -> None:
        """Raise if another setting contradicts the granularity."""
        is_group = self.granularity is Granularity.PER_GROUP
        is_row = is_group or self.granularity is Granularity.PER_ROW
        if is_row and not self.is_dynamic:
            raise ConfigError(
                f"QSpec.granularity is {self.granularity.name}, whose parameters are computed when "
                "the model runs; set is_dynamic=True as well.",
                code="RQ102",
            )
        if is_group and not (self.is_symmetric and self.dtype == "int8"):
            raise ConfigError(
                f"QSpec with PER_GROUP is {self.scheme.value} {self.dtype}; allowed: symmetric "
                "int8.",
                code="RQ102",
            )
        if is_row and self.dtype not in ("int8", "uint8"):
            raise ConfigError(
                f"QSpec.dtype is {self.dtype!r}; allowed with PER_ROW: int8, uint8.", code="RQ101"
            )
        reach = {limit - self.symmetric_zero_point for limit in self.limits}
        if self.is_dynamic and self.is_symmetric and reach not in ({-128, 127}, {-127, 127}):
            raise ConfigError(
                f"QSpec(is_dynamic=True) of {self.dtype} in {self.quant_min}..{self.quant_max} is "
                "symmetric; allowed: the full 8-bit range, or the range without its lowest "
                "integer. Leave out quant_min and quant_max, or the scheme.",
                code="RQ101",
            )
        if self.is_dynamic and (
            self.is_per_channel
            or self.power_of_two
            or (self.scale_min, self.scale_max) != (None, None)
        ):
            raise ConfigError(
                "QSpec(is_dynamic=True) has one set of parameters per tensor, or with "
                "Granularity.PER_ROW one for each row of a product's data, and any scale; leave "
                "PER_CHANNEL, power_of_two, scale_min and scale_max out.",
                code="RQ102",
            )

    def _check_groups(self) -> None:
        """Raise if a setting contradicts groups, or is for groups only."""
        if self.scale_dtype not in SCALE_DTYPES:
            raise ConfigError(
                f"QSpec.scale_dtype is {self.scale_dtype!r}; allowed: {', '.join(SCALE_DTYPES)}.",
                code="RQ101",
            )
        low, high = GROUP_SIZES
        if self.group_size is None:
            if self.scale_dtype != SCALE_DTYPES[0]:
                raise ConfigError(
                    f"QSpec.scale_dtype is {self.scale_dtype!r}, which is for scales of groups: "
                    "set group_size as well.",
                    code="RQ102",
                )
            return
        if self.group_size != WHOLE_ROW and not low <= self.group_size <= high:
            raise ConfigError(
                f"QSpec.group_size is {self.group_size}; allowed: {low} to {high}, or {WHOLE_ROW} "
                "for one scale for each output.",
                code="RQ101",
            )
        if self.dtype not in ("int4", "int8") or self.code_bits not in CODE_BITS:
            raise ConfigError(
                f"QSpec(group_size={self.group_size}) has dtype {self.dtype}, {self.limits[0]}.."
                f"{self.limits[1]}; allowed: int4 or int8, with limits of 2, 3, 4 or 8 bits.",
                code="RQ101",
            )
        bounds = (self.scale_min, self.scale_max)
        if self.is_dynamic or self.power_of_two or bounds != (None, None):
            raise ConfigError(
                f"QSpec(group_size={self.group_size}) is for weights, with any scale; leave "
                "is_dynamic, power_of_two, scale_min and scale_max out.",
                code="RQ102",
            )

    @property
    def code_bits(self) -> int:
        """Number of bits that hold every integer from quant_min to quant_max."""
        low, high = self.limits
        return (high - low).bit_length()

    @property
    def scale_bounds(self) -> tuple[float, float]:
        """(scale_min, scale_max). Without a bound: 0 and the largest float32."""
        largest = float(np.finfo("float32").max)
        return (
            0.0 if self.scale_min is None else self.scale_min,
            largest if self.scale_max is None else self.scale_max,
        )

    @property
    def has_full_range(self) -> bool:
        """Whether every value of `dtype` is used."""
        return self.limits == INTEGER_LIMITS[self.dtype]

    @property
    def stored(self) -> QSpec:
        """The specification of the stored integers: int4 is stored in int8, within -8..7."""
        return replace(self, dtype="int8") if self.dtype == "int4" else self

    def with_granularity(self, granularity: Granularity) -> QSpec:
        """Return the specification with this granularity."""
        return self if self.granularity is granularity else replace(self, granularity=granularity)

    def with_reduced_range(self) -> QSpec:
        """Return the specification with one bit less if it uses all of `dtype`. For instruction
        sets that add products in 16 bits.
        """
        if not self.has_full_range:
            return self
        low, high = self.limits
        return replace(self, quant_min=low // 2, quant_max=high // 2)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON and TOML. Settings that are None are left out, also
        `is_dynamic` if it is False, and `scale_dtype` without groups.
        """
        unused = {"is_dynamic"} if not self.is_dynamic else set[str]()
        unused |= {"scale_dtype"} if self.group_size is None else set()
        return {key: value for key, value in super().to_dict().items() if key not in unused}

    @property
    def limits(self) -> tuple[int, int]:
        """(quant_min, quant_max), with defaults resolved."""
        if self.quant_min is None or self.quant_max is None:
            raise ConfigError(
                "QSpec limits are unresolved; build QSpec through its constructor.", code="RQ101"
            )
        return self.quant_min, self.quant_max

    @property
    def symmetric_zero_point(self) -> int:
        """Zero point of a symmetric scheme: 0 if it is inside the range, else the middle."""
        low, high = self.limits
        return 0 if low < 0 < high else (low + high + 1) // 2

    @property
    def is_symmetric(self) -> bool:
        return self.scheme is Scheme.SYMMETRIC

    @property
    def is_per_channel(self) -> bool:
        return self.granularity is Granularity.PER_CHANNEL


@dataclass(frozen=True, eq=False)
class QParams(PlainFields):
    """Quantization parameters: scale float32 > 0 and zero point int32, each of shape () or (C,).

    If the zero point is per channel, the scale is too. The zero point alone may be ().
    """

    scale: FloatArray
    zero_point: IntArray
    dtype: str
    axis: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in INTEGER_LIMITS:
            raise ConfigError(
                f"QParams.dtype is {self.dtype!r}; allowed: {', '.join(INTEGER_LIMITS)}.",
                code="RQ101",
            )
        with np.errstate(over="ignore", under="ignore"):
            scale = np.asarray(self.scale).astype("float32")
        given = np.asarray(self.zero_point)
        if scale.ndim > 1 or given.ndim > 1:
            raise ConfigError(
                f"QParams scale and zero point have shapes {scale.shape} and {given.shape}; "
                "allowed: () for one per tensor or (C,) for one per channel.",
                code="RQ101",
            )
        if scale.ndim == given.ndim == 1 and scale.shape != given.shape:
            raise ConfigError(
                f"QParams has {format_count(scale.size, 'scale')} and "
                f"{format_count(given.size, 'zero point')}; give one of each per channel.",
                code="RQ101",
            )
        if given.ndim > scale.ndim:
            # Parameters per channel always have a scale per channel.
            scale = np.full(given.shape, scale)
        if scale.ndim == 1 and self.axis is None:
            raise ConfigError("QParams with one scale per channel needs an axis.", code="RQ101")
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ConfigError(
                f"QParams scale must be finite and > 0 in float32, got {self.scale}.", code="RQ101"
            )
        # Checked before the cast to int32, which would cut off fractions and wrap around in
        # silence.
        low, high = INTEGER_LIMITS[self.dtype]
        low, high = max(low, -(2**31)), min(high, 2**31 - 1)
        if given.dtype.kind not in "iuf" or not (given == np.rint(given)).all():
            raise ConfigError(
                f"QParams zero point must be an integer, got {self.zero_point}.", code="RQ101"
            )
        if (given < low).any() or (given > high).any():
            raise ConfigError(
                f"QParams zero point {self.zero_point} is outside {self.dtype} ({low}..{high}).",
                code="RQ101",
            )
        zero_point = given.astype("int32")
        for name, value in (("scale", scale), ("zero_point", zero_point)):
            value = value.copy()
            value.setflags(write=False)
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QParams):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and (self.axis == other.axis or self.scale.ndim == other.scale.ndim == 0)
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )

    def __hash__(self) -> int:
        return hash((self.dtype, self.scale.tobytes(), self.zero_point.tobytes()))

    @property
    def is_per_channel(self) -> bool:
        return self.scale.ndim == 1

    def with_axis(self, axis: int | None) -> QParams:
        """Return the same parameters along another axis of the tensor."""
        return replace(self, axis=axis)


@check_arguments
def choose_qparams(low: Any, high: Any, spec: QSpec, axis: int | None = None) -> QParams:
    """Compute parameters that cover the real range [low, high], each of shape () or (C,).

    The range is widened to include 0, so that 0 is exactly representable (Jacob et al. 2018,
    section 2.1, https://arxiv.org/abs/1712.05877). A range of width 0 (a constant zero tensor) gets
    scale 1.

    Raises:
        ConfigError: low or high is NaN or infinite, low > high, the range is too wide for a float32
            scale, or the zero point does not fit in int32 (affine int64).
    """
    try:
        low, high = np.asarray(low, "float64"), np.asarray(high, "float64")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"choose_qparams: low is {low!r} and high {high!r}; allowed: numbers, or arrays of "
            "them.",
            code="RQ101",
        ) from error
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise ConfigError(
            f"choose_qparams needs finite low <= high, got low={low}, high={high}.", code="RQ101"
        )
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    qmin, qmax = spec.limits
    middle = spec.symmetric_zero_point
    if spec.is_symmetric:
        scale = np.maximum(high / (qmax - middle), -low / (middle - qmin))
    else:
        # Each end is divided first: the difference of two float64 may overflow.
        scale = high / (qmax - qmin) - low / (qmax - qmin)
    if (scale > np.finfo("float32").max).any():
        raise ConfigError(
            f"choose_qparams: the range low={low}, high={high} is too wide for a float32 scale of "
            f"{spec.dtype}.",
            code="RQ101",
        )
    # float32 has no positive number below 1.4e-45; stay in the normal range so that 1/scale is
    # finite.
    scale = np.where(scale > 0, np.maximum(scale, 1e-30), 1.0)
    scale = conform_scale(scale, spec).astype("float32")
    if spec.is_symmetric:
        zero_point = np.full(scale.shape, float(middle))
    else:
        zero_point = np.clip(np.rint(qmin - low / scale.astype("float64")), qmin, qmax)
    # float64 rather than int32: QParams rejects values that do not fit, but a cast would wrap
    # around.
    return QParams(scale, cast(Any, zero_point), spec.dtype, axis if scale.ndim else None)


def find_power_of_two(value: Any) -> Any:
    """Return the largest power of two that is at most `value` > 0, float64."""
    _, exponent = np.frexp(np.asarray(value, "float64"))
    return np.ldexp(1.0, exponent - 1)


def conform_scale(scale: Any, spec: QSpec) -> Any:
    """Return the nearest scale that `spec` allows, float64: within its bounds, and a power of two
    if required.

    Powers of two are rounded up, so that the range stays covered, unless that exceeds the bound.
    """
    lowest, largest = spec.scale_bounds
    scale = np.clip(np.asarray(scale, "float64"), lowest, largest)
    if not spec.power_of_two:
        return scale
    below = find_power_of_two(scale)
    scale = np.where(below < scale, 2 * below, scale)
    return np.minimum(scale, find_power_of_two(largest))


@check_fields
@dataclass(frozen=True)
class ValueInfo(PlainFields):
    """A value whose parameters a calibration callback chooses."""

    name: str  #: stable name of the value, or "<operator>:weight" for a constant operand
    role: Role
    spec: QSpec
    shape: tuple[int | str, ...]  #: symbolic dimensions are given by name
    axis: int | None = None  #: channel axis when spec is per channel
    consumers: tuple[str, ...] = field(default=())


def check_qparams(qparams: object, info: ValueInfo, source: str) -> QParams:
    """Return `qparams` if they fit `info`. `source` names who chose them, for the message.

    Raises:
        ConfigError: not a QParams, or dtype, shape, axis or zero points do not fit `info.spec`.
    """
    where = f"{source} picked parameters for value {info.name!r}"
    spec = info.spec
    if not isinstance(qparams, QParams):
        raise ConfigError(
            f"{where} but returned {type(qparams).__name__}; return a QParams, for instance "
            "choose_qparams(low, high, info.spec, info.axis).",
            code="RQ101",
        )
    if qparams.dtype != spec.dtype:
        raise ConfigError(
            f"{where} of dtype {qparams.dtype}; the plan says {spec.dtype}.", code="RQ101"
        )
    if not spec.is_per_channel and qparams.is_per_channel:
        raise ConfigError(
            f"{where} of shape {qparams.scale.shape}; the plan says one per tensor, shape ().",
            code="RQ101",
        )
    if spec.is_per_channel:
        rank, axis = len(info.shape), info.axis
        if axis is None or not -rank <= axis < rank:
            raise ConfigError(
                f"Value {info.name!r} is per channel but has axis {axis} and shape {info.shape}; "
                "give ValueInfo an axis within the shape.",
                code="RQ101",
            )
        channels = info.shape[axis]
        shape = qparams.scale.shape
        if len(shape) != 1 or (isinstance(channels, int) and shape != (channels,)):
            raise ConfigError(
                f"{where} of shape {shape}; the plan says one per channel, shape ({channels},).",
                code="RQ101",
            )
        if qparams.axis is None or qparams.axis % rank != axis % rank:
            raise ConfigError(
                f"{where} along axis {qparams.axis}; the plan says axis {axis}.", code="RQ101"
            )
    wrong = ~np.isclose(conform_scale(qparams.scale, spec), qparams.scale, rtol=1e-6, atol=0)
    if wrong.any():
        lowest, largest = spec.scale_bounds
        kind = "powers of two" if spec.power_of_two else "scales"
        raise ConfigError(
            f"{where} with scale {qparams.scale[wrong][:1] if wrong.ndim else qparams.scale}; the "
            f"plan allows {kind} from {lowest:.4g} to {largest:.4g}. Pass the scale through "
            "conform_scale(scale, info.spec).",
            code="RQ101",
        )
    low, high = spec.limits
    if (qparams.zero_point < low).any() or (qparams.zero_point > high).any():
        raise ConfigError(
            f"{where} with zero point {qparams.zero_point}, outside quant_min..quant_max = "
            f"{low}..{high}.",
            code="RQ101",
        )
    if spec.is_symmetric and (qparams.zero_point != spec.symmetric_zero_point).any():
        raise ConfigError(
            f"{where} with zero point {qparams.zero_point}; the symmetric scheme of the plan says "
            f"{spec.symmetric_zero_point}.",
            code="RQ101",
        )
    return qparams
