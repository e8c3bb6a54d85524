"""`torch.ao.quantization` QConfigMapping and QConfig objects -> the same objects of relayquant.

Observers are read from what they are after construction: class, dtype, scheme and limits.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch.ao import quantization as ao
from torch.ao.quantization import observer

from relayquant.base.qtypes import Granularity, QSpec, Scheme
from relayquant.config import FLOAT16, FloatConfig, QConfig, QConfigMapping, TensorConfig
from relayquant.config.mapping import Selector
from relayquant.config.observers import MSE, Fixed, MinMax, MovingAverageMinMax
from relayquant.config.torch_names import find_name
from relayquant.errors import ConfigError
from relayquant.torch.custom_config import make_optional

DTYPES = {
    torch.quint8: "uint8",
    torch.uint8: "uint8",
    torch.qint8: "int8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.qint32: "int32",
    torch.int32: "int32",
}
SCHEMES = {
    torch.per_tensor_affine: (Scheme.AFFINE, Granularity.PER_TENSOR),
    torch.per_tensor_symmetric: (Scheme.SYMMETRIC, Granularity.PER_TENSOR),
    torch.per_channel_affine: (Scheme.AFFINE, Granularity.PER_CHANNEL),
    torch.per_channel_symmetric: (Scheme.SYMMETRIC, Granularity.PER_CHANNEL),
}
#: classes without parameters: torch.ao means the parameters of the input, or none
UNQUANTIZED = (observer.NoopObserver, observer.ReuseInputObserver, torch.nn.Identity)
#: smallest scale of torch.ao's observers unless the user chooses one
LEAST_SCALE = torch.finfo(torch.float32).eps


def is_from_torch(value: Any) -> bool:
    """Whether a value is a mapping or QConfig of torch.ao."""
    return isinstance(value, ao.QConfigMapping | ao.QConfig)


def read_ao_mapping(given: Any, default: QConfig) -> QConfigMapping:
    """Read a QConfigMapping, or a QConfig for all operators.

    Lines for types may select no operator, as in FX. Lines that PyTorch's own default mappings have
    for operators with fixed parameters or other weights are left out: our backends have the same
    rules.

    Args:
        given: A mapping or QConfig of torch.ao.
        default: Replaces what a line leaves open if there is no global QConfig.

    Raises:
        ConfigError: an observer, dtype, scheme or type has no counterpart; names it.
    """
    if isinstance(given, ao.QConfig):
        return QConfigMapping().set_global(read_ao_qconfig(given, "QConfig", default))
    whole = read_ao_qconfig(given.global_qconfig, "the global QConfig", default)
    base = whole if isinstance(whole, QConfig) else default
    mapping = QConfigMapping()
    standard = ao.get_default_qconfig_mapping().object_type_qconfigs
    for kind, each in given.object_type_qconfigs.items():
        where = f"object type {getattr(kind, '__name__', kind)}"
        if each is not None and each.activation is observer.ReuseInputObserver:
            continue  # operators that only move values always keep the parameters of their input
        config = read_ao_qconfig(each, where, base)
        if kind in standard and isinstance(config, QConfig):
            usual = read_ao_qconfig(standard[kind], where, base)
            if config in (base, usual, replace(usual, activation=base.activation)):
                continue
        name = find_name(kind) or kind if isinstance(kind, str) else kind
        mapping = mapping.set_object_type(name, config)
    mapping = make_optional(mapping, Selector)
    mapping = mapping.set_global(whole)
    for pattern, each in given.module_name_regex_qconfigs.items():
        config = read_ao_qconfig(each, f"regular expression {pattern!r}", base)
        mapping = mapping.set_module_name_regex(f"(?:{pattern}).*", config)  # it uses re.match
    for name, each in given.module_name_qconfigs.items():
        mapping = mapping.set_module_name(name, read_ao_qconfig(each, f"module {name!r}", base))
    for (name, kind, index), each in given.module_name_object_type_order_qconfigs.items():
        config = read_ao_qconfig(each, f"module {name!r}, {kind}, {index}", base)
        mapping = mapping.set_module_name_object_type_order(name, kind, index, config)
    return mapping


def read_ao_qconfig(given: Any, where: str, base: QConfig) -> QConfig | FloatConfig | None:
    """Read one QConfig. None stays None: float.

    Args:
        where: Its place, for messages.
        base: Has the input of operators with a fixed result, and weights that are left open.
    """
    if given is None:
        return None
    data, weight = build_observer(given.activation, where), build_observer(given.weight, where)
    halves = [
        part is None or getattr(part, "dtype", None) is torch.float16 for part in (data, weight)
    ]
    if data is not None and all(halves) and not getattr(data, "is_dynamic", False):
        return FLOAT16
    rounded = base.weight if is_open(weight) else read_observer(weight, f"{where}, weight")
    if is_open(data):
        raise ConfigError(
            f"torch.ao QConfig, {where}: its activations are float32 "
            f"({type(data).__name__}), but weights alone are not quantized by a QConfig here. Use "
            "relayquant.compress_weights, or None for float.",
            code="RQ102",
        )
    config = read_observer(data, f"{where}, activation")
    if isinstance(config.observer, Fixed):
        return QConfig(base.activation, rounded, output=config)
    return QConfig(config, rounded)


def read_observer(given: Any, where: str) -> TensorConfig:
    """Read an observer or fake quantization of torch.ao.

    Raises:
        ConfigError: it has no counterpart.
    """
    source = f"torch.ao QConfig, {where}: {type(given).__name__}"
    inner = getattr(given, "activation_post_process", given)
    dtype, scheme = DTYPES.get(inner.dtype), SCHEMES.get(getattr(inner, "qscheme", None))
    if dtype is None:
        raise ConfigError(
            f"{source} has dtype {inner.dtype}; allowed: {', '.join(map(str, DTYPES))}.",
            code="RQ101",
        )
    if scheme is None:
        raise ConfigError(
            f"{source} has qscheme {getattr(inner, 'qscheme', None)}; allowed: "
            f"{', '.join(map(str, SCHEMES))}.",
            code="RQ101",
        )
    axis = getattr(inner, "ch_axis", 0)
    is_transposed = axis == 1 and "transpose" in where.lower()
    if scheme[1] is Granularity.PER_CHANNEL and axis != 0 and not is_transposed:
        raise ConfigError(
            f"{source} has ch_axis={axis}; allowed: 0, the outputs of a weight (1 for transposed "
            "convolutions).",
            code="RQ101",
        )
    if getattr(inner, "is_dynamic", False):
        return TensorConfig(QSpec(dtype, scheme[0], is_dynamic=True))
    least = getattr(inner, "eps", None)
    least = None if least is None else float(least)
    spec = QSpec(
        dtype,
        *scheme,
        quant_min=inner.quant_min,
        quant_max=inner.quant_max,
        scale_min=None if least == LEAST_SCALE else least,
    )
    return TensorConfig(spec, find_observer(inner, source, is_weight=where.endswith("weight")))


def find_observer(inner: Any, source: str, *, is_weight: bool) -> Any:
    """Find the observer of relayquant that does what an observer of torch.ao does.

    Raises:
        ConfigError: there is none.
    """
    kind = type(inner)
    if kind is observer.FixedQParamsObserver:
        return Fixed(float(inner.scale), int(inner.zero_point))
    if kind is observer.HistogramObserver:
        return MSE()
    if kind in (observer.MinMaxObserver, observer.PerChannelMinMaxObserver):
        return MinMax()
    if kind in (
        observer.MovingAverageMinMaxObserver,
        observer.MovingAveragePerChannelMinMaxObserver,
    ):
        # A weight is observed once, and then its moving average is its range.
        return MinMax() if is_weight else MovingAverageMinMax(1 - inner.averaging_constant)
    raise ConfigError(
        f"{source} has no counterpart; allowed: MinMaxObserver, MovingAverageMinMaxObserver, their "
        "per-channel forms, HistogramObserver, FixedQParamsObserver, or a FakeQuantize of one of "
        "them. Write a relayquant.extend.Observer and a relayquant.QConfigMapping.",
        code="RQ101",
    )


def build_observer(make: Any, where: str) -> Any:
    """Build what a QConfig holds the constructor of. None for None.

    Raises:
        ConfigError: it is no constructor.
    """
    if make is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reduce_range is deprecated
            return make()
    except Exception as error:
        raise ConfigError(
            f"torch.ao QConfig, {where}: {make!r} cannot be built: {error}", code="RQ101"
        ) from error


def is_open(given: Any) -> bool:
    """Whether an observer leaves its tensor as it is."""
    is_placeholder = isinstance(given, observer.PlaceholderObserver) and not given.is_dynamic
    is_float = is_placeholder and given.dtype is torch.float32
    return given is None or isinstance(given, UNQUANTIZED) or is_float
