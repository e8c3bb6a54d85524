"""Relay's quantizer: options of `tvm.relay.quantize.qconfig` -> a configuration of relayquant.

The defaults are Relay's. An option without a counterpart raises an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from relayquant.base.arguments import check_arguments
from relayquant.base.qtypes import QSpec, Scheme
from relayquant.config import QConfig, QConfigMapping, TensorConfig
from relayquant.config.mapping import MappingRule, Selector
from relayquant.errors import ConfigError, format_count, suggest_name, warn_user

#: Operators for which `relay.quantize` has a rule. All others stay in float.
QUANTIZED_OPERATORS = (
    "nn.conv1d",
    "nn.conv2d",
    "nn.dense",
    "nn.batch_matmul",
    "add",
    "multiply",
    "concatenate",
    "nn.relu",
    "clip",
    "nn.max_pool1d",
    "nn.max_pool2d",
    "nn.avg_pool2d",
    "nn.batch_flatten",
    "reshape",
    "transpose",
    "strided_slice",
)

#: bits that integers of a dtype have here
DTYPE_BITS = {"int8": 8, "int16": 16}

#: calibrate_mode -> our observer as plain data. Relay keeps 99.999 percent of the magnitudes.
OBSERVERS: Mapping[str, Mapping[str, Any]] = {
    "kl_divergence": {"name": "KLDivergence"},
    "percentile": {"name": "Percentile", "percentile": 99.999},
}
GLOBAL_SCALE = "global_scale"

#: Options of the `with` blocks around the running code, the innermost last.
_SCOPES: ContextVar[tuple[RelayQConfig, ...]] = ContextVar("relay_qconfig", default=())

#: weight_scale -> whether scales are powers of two
WEIGHT_SCALES = {"power2": True, "max": False}


@dataclass(frozen=True)
class RelayQConfig:
    """Options of `relay.quantize.qconfig`, made by `qconfig`.

    A script written for Relay runs unchanged with `from relayquant import relay`:

        with relay.quantize.qconfig(...):
            relay.quantize.quantize(mod, params, dataset)

    It is equivalent to `rq.quantize(mod, params, dataset, **config.settings)`. Attributes have the
    names of Relay's options; `docs/coming_from/relay.md` says what each does here.
    """

    nbit_input: int = 8
    nbit_weight: int = 8
    nbit_activation: int = 32
    dtype_input: str = "int8"
    dtype_weight: str = "int8"
    dtype_activation: str = "int32"
    calibrate_mode: str = GLOBAL_SCALE
    global_scale: float = 8.0
    weight_scale: str = "power2"
    skip_dense_layer: bool = True
    skip_conv_layers: Sequence[int] | None = (0,)
    do_simulation: bool = False
    round_for_shift: bool = True
    debug_enabled_ops: Sequence[str] | None = None
    rounding: str = "UPWARD"
    calibrate_chunk_by: int = -1
    partition_conversions: str = "disabled"

    def __enter__(self) -> RelayQConfig:
        _SCOPES.set((*_SCOPES.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _SCOPES.set(_SCOPES.get()[:-1])

    def __post_init__(self) -> None:
        for name in ("skip_conv_layers", "debug_enabled_ops"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        for option, is_allowed, message in _CHECKS:
            value = getattr(self, option)
            if not is_allowed(value):
                near = find_near(value)
                raise ConfigError(
                    f"relay.qconfig: {option} is {value!r}; {message}{near}", code="RQ101"
                )
        bits = DTYPE_BITS[self.dtype_input]
        if self.nbit_input > bits:
            raise ConfigError(
                f"relay.qconfig: nbit_input is {self.nbit_input}, but dtype_input "
                f"{self.dtype_input!r} holds {format_count(bits, 'bit')}.",
                code="RQ101",
            )
        for name in self.debug_enabled_ops or ():
            if name not in QUANTIZED_OPERATORS:
                raise ConfigError(
                    f"relay.qconfig: debug_enabled_ops has {name!r}, which relay.quantize does not "
                    f"quantize. {suggest_name(name, QUANTIZED_OPERATORS)}",
                    code="RQ101",
                )

    @property
    def needs_data(self) -> bool:
        """Whether ranges are calibrated. With a global scale, the dataset may be None."""
        return self.calibrate_mode != GLOBAL_SCALE

    @property
    def qconfig(self) -> QConfig:
        """Symmetric activations and weights, with one scale per tensor.

        Relay's scale is the range divided by 2^(n - 1), and its integers are within +-(2^(n - 1) -
        1). A global scale here is the same. An observed scale is the range divided by 2^(n - 1) -
        1, so the largest value is not clipped.
        """
        steps = 2 ** (self.nbit_input - 1)
        observer: Mapping[str, Any] = {"name": "Fixed", "scale": self.global_scale / steps}
        observer = OBSERVERS.get(self.calibrate_mode, observer)
        return QConfig(
            _make_tensor_config(_make_spec(self.dtype_input, self.nbit_input), observer),
            _make_tensor_config(
                _make_spec("int8", self.nbit_weight, WEIGHT_SCALES[self.weight_scale]),
                {"name": "MinMax"},
            ),
        )

    @property
    def mapping(self) -> QConfigMapping:
        """The mapping for operators that `relay.quantize` would quantize. All others stay in
        float.
        """
        rules = [MappingRule(Selector.GLOBAL, "", None)]
        for name in QUANTIZED_OPERATORS:
            origin = self._find_origin(name)
            qconfig = None if origin else self.qconfig
            rule = MappingRule(Selector.OBJECT_TYPE, name, qconfig, optional=True, origin=origin)
            rules.append(rule)
        skipped = self.skip_conv_layers or ()
        for index in dict.fromkeys(skipped):
            origin = f"skip_conv_layers={list(skipped)}"
            kind = Selector.MODULE_NAME_OBJECT_TYPE_ORDER
            rules.append(MappingRule(kind, "", None, "nn.conv2d", index, True, origin))
        return QConfigMapping(tuple(rules))

    def _find_origin(self, name: str) -> str:
        """Return the option that keeps an operator in float. "" if there is none."""
        if self.debug_enabled_ops is not None and name not in self.debug_enabled_ops:
            return f"debug_enabled_ops={list(self.debug_enabled_ops)}"
        return "skip_dense_layer=True" if name == "nn.dense" and self.skip_dense_layer else ""

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `quantize`: the mapping, a backend with signed activations, and effort
        "fast", because Relay does no more.

        Raises:
            ConfigError: `do_simulation` is set, which `rq.quantize` does not do.
        """
        if self.do_simulation:
            raise ConfigError(
                "relay.qconfig: do_simulation is True, but rq.quantize returns integers. Call "
                "relay.quantize.quantize(mod, params, dataset) within `with config:`, or leave "
                "do_simulation out.",
                code="RQ102",
            )
        return {"qconfig_mapping": self.mapping, "backend": "generic", "effort": "fast"}


def find_near(value: object) -> str:
    """Return " Did you mean ...?" for the beginning of a mode's name, as in "kl". "" if there is
    none.
    """
    modes = (GLOBAL_SCALE, *OBSERVERS, *WEIGHT_SCALES)
    is_text = isinstance(value, str) and value != ""
    near = [mode for mode in modes if is_text and mode.startswith(str(value))]
    return f" Did you mean {near[0]!r}?" if near else ""


def _make_spec(dtype: str, bits: int, power_of_two: bool = False) -> QSpec:
    largest = 2 ** (bits - 1) - 1
    return QSpec(
        dtype,
        Scheme.SYMMETRIC,
        quant_min=-largest,
        quant_max=largest,
        power_of_two=power_of_two,
    )


def _make_tensor_config(spec: QSpec, observer: Mapping[str, Any]) -> TensorConfig:
    return TensorConfig.from_dict({"spec": spec.to_dict(), "observer": dict(observer)})


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < float("inf")


def _are_indices(value: Any) -> bool:
    return value is None or all(_is_integer(each, 0, 2**31) for each in value)


_Check = tuple[str, Callable[[Any], bool], str]

#: (option, whether a value is allowed, the allowed values and what to do)
_CHECKS: tuple[_Check, ...] = (
    ("dtype_input", DTYPE_BITS.__contains__, "allowed: int8, int16. Relay's integers are signed."),
    ("nbit_input", lambda value: _is_integer(value, 2, 16), "allowed: 2 to 16."),
    ("dtype_weight", lambda value: value == "int8", "allowed: int8, also for fewer bits."),
    ("nbit_weight", lambda value: _is_integer(value, 2, 8), "allowed: 2 to 8."),
    (
        "dtype_activation",
        ("int8", "int16", "int32").__contains__,
        "allowed: int8, int16, int32, the dtype of sums. Activations have dtype_input.",
    ),
    (
        "nbit_activation",
        lambda value: _is_integer(value, 2, 32),
        "allowed: 2 to 32, the bits of sums. Activations have nbit_input bits.",
    ),
    (
        "calibrate_mode",
        (GLOBAL_SCALE, *OBSERVERS).__contains__,
        f"allowed: {', '.join((GLOBAL_SCALE, *OBSERVERS))}.",
    ),
    ("global_scale", _is_positive, "allowed: a number above 0, the largest activation."),
    ("weight_scale", WEIGHT_SCALES.__contains__, f"allowed: {', '.join(WEIGHT_SCALES)}."),
    ("skip_dense_layer", lambda value: isinstance(value, bool), "allowed: True, False."),
    ("skip_conv_layers", _are_indices, "allowed: indices of nn.conv2d, from 0, or None."),
    ("do_simulation", lambda value: isinstance(value, bool), "allowed: True, False."),
    ("round_for_shift", lambda value: isinstance(value, bool), "allowed: True, False."),
    (
        "rounding",
        ("UPWARD", "TONEAREST").__contains__,
        "allowed: UPWARD, TONEAREST (both are to nearest; ties go to even here).",
    ),
    ("calibrate_chunk_by", lambda value: _is_integer(value, -1, 2**31), "allowed: -1, or a count."),
    (
        "partition_conversions",
        ("disabled", "enabled").__contains__,
        "allowed: disabled, enabled. quantize(..., input_dtypes=, output_dtypes=) gives a model "
        "with integer inputs and outputs.",
    ),
)

#: option -> why a value that is not the default has no effect
WITHOUT_EFFECT: Mapping[str, str] = {
    "dtype_activation": "sums are int32 here",
    "nbit_activation": "sums have 32 bits here",
    "round_for_shift": "results are always rounded to nearest here",
    "partition_conversions": "the module has one function here",
}

#: option of releases before 0.7 -> what to do
OUTDATED: Mapping[str, str] = {
    "skip_k_conv": "Use skip_conv_layers=range(k) instead.",
    "store_lowbit_output": "Leave it out: values between operators have nbit_input bits here.",
    "target": "Leave it out, and pass the target to relayquant.compile.",
}


@check_arguments
def qconfig(**options: Any) -> RelayQConfig:
    """Make the options of `relay.quantize.qconfig`, for `with` or for `quantize(...,
    **qconfig(...).settings)`. An option without effect here is a warning.

    Raises:
        ConfigError: there is no such option (names the nearest), or a value has no counterpart.
    """
    known = [field.name for field in fields(RelayQConfig)]
    for name in options:
        if name not in known:
            advice = OUTDATED.get(name) or suggest_name(name, known)
            raise ConfigError(f"relay.qconfig has no option {name!r}. {advice}", code="RQ101")
    config, default = RelayQConfig(**options), RelayQConfig()
    for name, reason in WITHOUT_EFFECT.items():
        value = getattr(config, name)
        if value != getattr(default, name):
            warn_user(f"relay.qconfig: {name}={value!r} has no effect: {reason}.", code="RQ104")
    return config


def current_qconfig() -> RelayQConfig:
    """Return the options of the innermost `with qconfig(...)`.

    Outside, these are Relay's defaults: those of `qconfig()`, except that `skip_conv_layers` skips
    none.
    """
    scopes = _SCOPES.get()
    return scopes[-1] if scopes else RelayQConfig(skip_conv_layers=None)
