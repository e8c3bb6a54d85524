"""Dialect: the typed attributes of the `relax.qnn` operators, as printed, parsed and saved as JSON.

Every field is always present. A rounding or an arithmetic is stored as the `.value` of its enum
(`qtypes.Rounding`, `qtypes.Arithmetic`), because an attribute has to survive printing and JSON. A
module that holds these types loads only in a process that imported this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tvm.ir import Attrs
from tvm_ffi import Array
from tvm_ffi.dataclasses import py_class

AttrsType = TypeVar("AttrsType", bound=type)


def define_attrs(type_key: str) -> Callable[[AttrsType], AttrsType]:
    """Register a class of attributes, or return the one registered before.

    A type key is registered once per process, and this module may be imported again.
    """
    for known in Attrs.__subclasses__():
        info = getattr(known, "__tvm_ffi_type_info__", None)
        if info is not None and info.type_key == type_key:
            return lambda _cls: known  # type: ignore[return-value]
    return py_class(type_key)


def replace_attrs(attrs: Any, **changes: Any) -> Any:
    """A copy of typed attributes with some of them changed."""
    fields = [field.name for field in type(attrs).__tvm_ffi_type_info__.fields]
    values = {name: getattr(attrs, name) for name in fields}
    return type(attrs)(**{**values, **changes})


@define_attrs("relayquant.attrs.QuantizeAttrs")
class QuantizeAttrs(Attrs):
    """Attributes of qnn.quantize; `axis` is that of per-channel parameters."""

    axis: int
    out_dtype: str
    rounding: str


@define_attrs("relayquant.attrs.DequantizeAttrs")
class DequantizeAttrs(Attrs):
    """Attributes of qnn.dequantize; `axis` is that of per-channel parameters."""

    axis: int
    out_dtype: str


@define_attrs("relayquant.attrs.RequantizeAttrs")
class RequantizeAttrs(Attrs):
    """Attributes of qnn.requantize; `axis` is that of per-channel input parameters."""

    axis: int
    out_dtype: str
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.SimulatedQuantizeAttrs")
class SimulatedQuantizeAttrs(Attrs):
    """Attributes of qnn.simulated_quantize."""

    axis: int
    rounding: str


@define_attrs("relayquant.attrs.SimulatedDequantizeAttrs")
class SimulatedDequantizeAttrs(Attrs):
    """Attributes of qnn.simulated_dequantize."""

    axis: int


@define_attrs("relayquant.attrs.QConv1DAttrs")
class QConv1DAttrs(Attrs):
    """Attributes of qnn.conv1d, named as those of relax.nn.conv1d; padding is (left, right)."""

    strides: Array
    padding: Array
    dilation: Array
    groups: int
    data_layout: str
    kernel_layout: str
    out_dtype: str


@define_attrs("relayquant.attrs.QConv2DAttrs")
class QConv2DAttrs(Attrs):
    """Attributes of qnn.conv2d, named as those of relax.nn.conv2d.

    Padding is (top, left, bottom, right).
    """

    strides: Array
    padding: Array
    dilation: Array
    groups: int
    data_layout: str
    kernel_layout: str
    out_dtype: str


@define_attrs("relayquant.attrs.QConv2DTransposeAttrs")
class QConv2DTransposeAttrs(Attrs):
    """Attributes of qnn.conv2d_transpose, named as those of relax.nn.conv2d_transpose."""

    strides: Array
    padding: Array
    output_padding: Array
    dilation: Array
    groups: int
    data_layout: str
    kernel_layout: str
    out_dtype: str


@define_attrs("relayquant.attrs.QMatmulAttrs")
class QMatmulAttrs(Attrs):
    """Attributes of qnn.dense and qnn.batch_matmul."""

    out_dtype: str


@define_attrs("relayquant.attrs.QBinaryAttrs")
class QBinaryAttrs(Attrs):
    """Attributes of qnn.add, qnn.subtract and qnn.mul; out_dtype "" is the dtype of lhs."""

    lhs_axis: int
    rhs_axis: int
    out_dtype: str
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.QConcatenateAttrs")
class QConcatenateAttrs(Attrs):
    """Attributes of qnn.concatenate; `axis` is the axis along which the tensors are joined."""

    axis: int
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.QAvgPool2DAttrs")
class QAvgPool2DAttrs(Attrs):
    """Attributes of qnn.avg_pool2d, named as those of relax.nn.avg_pool2d."""

    pool_size: Array
    strides: Array
    dilation: Array
    padding: Array
    ceil_mode: bool
    count_include_pad: bool
    layout: str
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.QMeanAttrs")
class QMeanAttrs(Attrs):
    """Attributes of qnn.mean; no axes means all axes, out_dtype "" is the dtype of data."""

    axes: Array
    keepdims: bool
    out_dtype: str
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.QPreluAttrs")
class QPreluAttrs(Attrs):
    """Attributes of qnn.prelu; `axis` is that of the slopes."""

    axis: int


@define_attrs("relayquant.attrs.QLeakyReluAttrs")
class QLeakyReluAttrs(Attrs):
    """Attributes of qnn.leaky_relu; `alpha` is the slope of negative values."""

    alpha: float
    rounding: str
    compute_dtype: str
