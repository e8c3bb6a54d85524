"""Dialect: conv1d, conv2d and conv2d_transpose on integers."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder
from tvm.sym import Analyzer
from tvm_ffi import Array

from relayquant.errors import QnnError, format_count
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.construct import (
    Operand,
    Parameter,
    describe_constructor,
    make_call,
    make_integers,
    make_padding,
)
from relayquant.ir.dialect.layout import (
    current_letters,
    decide,
    decide_untouched,
    is_plain,
    keep_untouched,
    make_output,
    reorder_names,
)
from relayquant.ir.dialect.linear import (
    LINEAR_OPERANDS,
    check_linear_parameters,
    get_linear,
    make_multiply,
    subtract_zero_point,
)
from relayquant.ir.dialect.loops import make_loops, name_hint, pad_zeros, to_integers
from relayquant.ir.dialect.operands import (
    check_integers,
    check_layout,
    count_windows,
    is_known_different,
    operator_name,
    show_count,
    show_dimension,
    show_shape,
)
from relayquant.ir.dialect.operator import InferFunc, Operator, define_attrs, replace_attrs
from relayquant.ir.dialect.parameters import PrimExpr, Reader, compute_tensor

__all__ = ["conv1d", "conv2d", "conv2d_transpose"]


@define_attrs("relayquant.attrs.QConv1DAttrs")
class QConv1DAttrs(Attrs):
    """Attributes of qnn.conv1d, with the names of relax.nn.conv1d. Padding is (left, right)."""

    strides: Array
    padding: Array
    dilation: Array
    groups: int
    data_layout: str
    kernel_layout: str
    out_dtype: str


@define_attrs("relayquant.attrs.QConv2DAttrs")
class QConv2DAttrs(Attrs):
    """Attributes of qnn.conv2d, with the names of relax.nn.conv2d.

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
    """Attributes of qnn.conv2d_transpose, with the names of relax.nn.conv2d_transpose."""

    strides: Array
    padding: Array
    output_padding: Array
    dilation: Array
    groups: int
    data_layout: str
    kernel_layout: str
    out_dtype: str


# ---------------------------------------------------------------- constructors


def _define_convolution(name: str, attrs: type, spatial: str, meaning: str):
    """Define the constructor of a convolution over the axes with these letters."""
    rank = len(spatial)

    def construct(
        data: Operand,
        weight: Operand,
        input_zero_point: Parameter,
        kernel_zero_point: Parameter,
        input_scale: Parameter,
        kernel_scale: Parameter,
        strides: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        data_layout: str = "NC" + spatial,
        kernel_layout: str = "OI" + spatial,
        out_dtype: str = "int32",
    ) -> Call:
        values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
        return make_call(
            name,
            LINEAR_OPERANDS,
            values,
            attrs(
                make_integers(strides, rank, name, "strides"),
                make_padding(padding, rank, name),
                make_integers(dilation, rank, name, "dilation"),
                int(groups),
                data_layout,
                kernel_layout,
                out_dtype,
            ),
        )

    return describe_constructor(construct, name, meaning)


conv1d = _define_convolution(
    "conv1d",
    QConv1DAttrs,
    "W",
    """Convolve along one axis, like `conv2d`. Padding is (left, right).""",
)

conv2d = _define_convolution(
    "conv2d",
    QConv2DAttrs,
    "HW",
    """Convolve data - input_zero_point with weight - kernel_zero_point -> int32 or int64.

    data is int8, uint8 or int16 in `data_layout`. weight has one of these dtypes too, in
    `kernel_layout`, where I is the input channels per group. `out_dtype` is the dtype of the
    result. Kernel parameters: () or (O,). Padding is (top, left, bottom, right) with real 0. The
    result has scale input_scale * kernel_scale and zero point 0. The scales do not affect the
    integers.
    """,
)


def conv2d_transpose(
    data: Operand,
    weight: Operand,
    input_zero_point: Parameter,
    kernel_zero_point: Parameter,
    input_scale: Parameter,
    kernel_scale: Parameter,
    strides: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_layout: str = "NCHW",
    kernel_layout: str = "IOHW",
    out_dtype: str = "int32",
) -> Call:
    """Convolve transposed -> int32 or int64, with the operands of conv2d.

    In `kernel_layout`, I is all input channels and O is the output channels per group. Kernel
    parameters: (), or one entry per output channel of all groups.
    """
    name = "conv2d_transpose"
    values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
    return make_call(
        name,
        LINEAR_OPERANDS,
        values,
        QConv2DTransposeAttrs(
            make_integers(strides, 2, name, "strides"),
            make_padding(padding, 2, name),
            make_integers(output_padding, 2, name, "output_padding"),
            make_integers(dilation, 2, name, "dilation"),
            int(groups),
            data_layout,
            kernel_layout,
            out_dtype,
        ),
    )


# ---------------------------------------------------------------- types


def _check_conv_attributes(
    call: Call, spatial: str, kernel_letters: str
) -> tuple[list[int], list[int], list[int], int]:
    operator, attrs = operator_name(call), call.attrs
    rank = len(spatial)
    check_layout(operator, "data_layout", attrs.data_layout, "NC" + spatial)
    check_layout(operator, "kernel_layout", attrs.kernel_layout, kernel_letters)
    strides = check_integers(operator, "strides", attrs.strides, rank, 1)
    padding = check_integers(operator, "padding", attrs.padding, 2 * rank, 0)
    dilation = check_integers(operator, "dilation", attrs.dilation, rank, 1)
    if attrs.groups < 1:
        raise QnnError(
            f"{operator}: groups={attrs.groups} is not allowed; allowed: 1 or more.", code="RQ601"
        )
    return strides, padding, dilation, int(attrs.groups)


def _make_infer_conv(spatial: str) -> InferFunc:
    def infer_conv(call: Call, _builder: Any) -> Any:
        """Infer 8 or 16 bit data and weight -> int32 or int64."""
        attrs = call.attrs
        data, weight, parameters = get_linear(call)
        kernel_letters = "OI" + spatial
        strides, padding, dilation, groups = _check_conv_attributes(call, spatial, kernel_letters)
        data.check_rank(2 + len(spatial), attrs.data_layout)
        weight.check_rank(2 + len(spatial), attrs.kernel_layout)
        outputs = weight.dimension(attrs.kernel_layout.index("O"))
        check_linear_parameters(data, weight, parameters, outputs, True)
        if data.shape is None or weight.shape is None:
            return relax.TensorType(None, attrs.out_dtype, data.ty.vdevice, 2 + len(spatial))
        inputs = data.shape[attrs.data_layout.index("C")]
        per_group = weight.shape[attrs.kernel_layout.index("I")]
        if is_known_different(inputs, per_group * groups):
            raise weight.fail(
                f"takes {show_count(per_group, 'input channel')} in each of "
                f"{format_count(groups, 'group')}",
                f"'data' has {show_count(inputs, 'channel')}; allowed: groups * weight channels",
                "Check data_layout, kernel_layout and groups.",
            )
        if is_known_different(tirx.floormod(outputs, groups), tirx.IntImm("int64", 0)):
            raise weight.fail(
                f"has {show_count(outputs, 'output channel')}",
                f"allowed: a multiple of groups={groups}",
            )
        result = list(data.shape)
        result[attrs.data_layout.index("C")] = outputs
        for i, letter in enumerate(spatial):
            size = weight.shape[attrs.kernel_layout.index(letter)]
            axis = attrs.data_layout.index(letter)
            pads = padding[i] + padding[i + len(spatial)]
            span = result[axis] + pads - dilation[i] * (size - 1) - 1
            result[axis] = count_windows(data, letter, span, strides[i])
        return relax.TensorType(result, attrs.out_dtype, data.ty.vdevice)

    return infer_conv


infer_conv1d = _make_infer_conv("W")

infer_conv2d = _make_infer_conv("HW")


def infer_conv2d_transpose(call: Call, _builder: Any) -> Any:
    """Infer 8 or 16 bit data and weight -> int32 or int64. O of the weight is per group."""
    attrs = call.attrs
    data, weight, parameters = get_linear(call)
    strides, padding, dilation, groups = _check_conv_attributes(call, "HW", "IOHW")
    extra = check_integers(data.operator, "output_padding", attrs.output_padding, 2, 0)
    for i in range(2):
        if extra[i] >= max(strides[i], dilation[i]):
            raise QnnError(
                f"{data.operator}: output_padding={extra} is not allowed; allowed: less than the "
                f"stride or less than the dilation, strides={strides}, dilation={dilation}.",
                code="RQ601",
            )
    data.check_rank(4, attrs.data_layout)
    weight.check_rank(4, attrs.kernel_layout)
    per_group = weight.dimension(attrs.kernel_layout.index("O"))
    outputs = None if per_group is None else Analyzer().simplify(per_group * groups)
    check_linear_parameters(data, weight, parameters, outputs, True)
    if data.shape is None or weight.shape is None or outputs is None:
        return relax.TensorType(None, attrs.out_dtype, data.ty.vdevice, 4)
    inputs = data.shape[attrs.data_layout.index("C")]
    weight_inputs = weight.shape[attrs.kernel_layout.index("I")]
    if is_known_different(inputs, weight_inputs):
        raise weight.fail(
            f"takes {show_count(weight_inputs, 'input channel')}",
            f"'data' has {show_dimension(inputs)}; allowed: the same number",
            "Check data_layout and kernel_layout.",
        )
    if is_known_different(tirx.floormod(inputs, groups), tirx.IntImm("int64", 0)):
        raise data.fail(
            f"has {show_count(inputs, 'channel')}", f"allowed: a multiple of groups={groups}"
        )
    result = list(data.shape)
    result[attrs.data_layout.index("C")] = outputs
    for i, letter in enumerate("HW"):
        size = weight.shape[attrs.kernel_layout.index(letter)]
        axis = attrs.data_layout.index(letter)
        reach = dilation[i] * (size - 1) + 1
        pads = padding[i] + padding[i + 2]
        total: Any = Analyzer().simplify((result[axis] - 1) * strides[i] + reach - pads + extra[i])
        if Analyzer().can_prove(total <= 0):
            raise data.fail(
                f"has shape {show_shape(data.shape)}",
                f"padding={padding} leaves nothing of its {letter}",
                "Use less padding.",
            )
        result[axis] = total
    return relax.TensorType(result, attrs.out_dtype, data.ty.vdevice)


# ---------------------------------------------------------------- loop nests


def legalize_conv(builder: BlockBuilder, call: Call) -> Any:
    """Make the loop nest of conv1d and conv2d, in any layout, grouped, dilated and padded."""
    data, weight, input_zero, kernel_zero = call.args[:4]
    attrs, reader = call.attrs, Reader()
    read_input_zero, read_kernel_zero = reader.add(input_zero), reader.add(kernel_zero)
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    # Attributes list H before W, in every layout.
    names = sorted(set(kernel_layout) - {"O", "I"})
    strides = dict(zip(names, to_integers(attrs.strides), strict=True))
    dilation = dict(zip(names, to_integers(attrs.dilation), strict=True))
    padding = to_integers(attrs.padding)
    groups = int(attrs.groups)
    shape, multiply = list(call.ty.shape), make_multiply(call)
    position = {letter: data_layout.index(letter) for letter in data_layout}
    axes = [position[letter] for letter in names]

    def te_conv(source: te.Tensor, kernel: te.Tensor) -> te.Tensor:
        out_axis = kernel_layout.index("O")
        centred = subtract_zero_point(source, lambda *i: read_input_zero(0), "centred")
        padded = pad_zeros(centred, axes, padding)
        weights = subtract_zero_point(
            kernel, lambda *i: read_kernel_zero(i[out_axis]), "centred_weight"
        )
        size = dict(zip(kernel_layout, kernel.shape, strict=True))
        channel = te.reduce_axis((0, size["I"]), name="channel")
        taps: dict[str, Any] = {
            letter: te.reduce_axis((0, size[letter]), name=f"k{letter}") for letter in names
        }
        per_group = tirx.floordiv(size["O"], groups)

        def element(*index: PrimExpr) -> PrimExpr:
            out = index[position["C"]]
            at = dict(zip(data_layout, index, strict=True))
            at["C"] = channel
            if groups > 1:
                at["C"] = tirx.floordiv(out, per_group) * size["I"] + channel
            for letter in names:
                at[letter] = (
                    index[position[letter]] * strides[letter] + taps[letter] * dilation[letter]
                )
            weight_at = {"O": out, "I": channel, **taps}
            return te.sum(
                multiply(
                    padded(*(at[letter] for letter in data_layout)),
                    weights(*(weight_at[letter] for letter in kernel_layout)),
                ),
                axis=[channel, *taps.values()],
            )

        return compute_tensor(shape, element, name=name_hint(call))

    return make_loops(builder, call, te_conv, [data, weight], reader)


def legalize_conv2d_transpose(builder: BlockBuilder, call: Call) -> Any:
    """Make the loop nest for any layout. Each output gathers the inputs that contribute to it."""
    data, weight, input_zero, kernel_zero = call.args[:4]
    attrs, reader = call.attrs, Reader()
    read_input_zero, read_kernel_zero = reader.add(input_zero), reader.add(kernel_zero)
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    strides = dict(zip("HW", to_integers(attrs.strides), strict=True))
    dilation = dict(zip("HW", to_integers(attrs.dilation), strict=True))
    before = dict(zip("HW", to_integers(attrs.padding)[:2], strict=True))
    groups = int(attrs.groups)
    shape, multiply = list(call.ty.shape), make_multiply(call)

    def te_conv_transpose(source: te.Tensor, kernel: te.Tensor) -> te.Tensor:
        size = dict(zip(kernel_layout, kernel.shape, strict=True))
        extent = dict(zip(data_layout, source.shape, strict=True))
        per_group = tirx.floordiv(size["I"], groups)
        centred = subtract_zero_point(source, lambda *i: read_input_zero(0), "centred")
        channel = te.reduce_axis((0, per_group), name="channel")
        taps: dict[str, Any] = {
            letter: te.reduce_axis((0, size[letter]), name=f"k{letter}") for letter in "HW"
        }

        def element(*index: PrimExpr) -> PrimExpr:
            at = dict(zip(data_layout, index, strict=True))
            out = at["C"]
            group = tirx.floordiv(out, size["O"])
            at["C"] = group * per_group + channel
            hits = []
            for letter in "HW":
                reach = at[letter] + before[letter] - taps[letter] * dilation[letter]
                zero = tirx.const(0, fixed_point.expr_dtype(reach))
                hits += [reach >= 0, tirx.EQ(tirx.floormod(reach, strides[letter]), zero)]
                at[letter] = tirx.floordiv(reach, strides[letter])
                hits.append(at[letter] < extent[letter])
            weight_at = {"O": tirx.floormod(out, size["O"]), "I": at["C"], **taps}
            value = kernel(*(weight_at[letter] for letter in kernel_layout)).astype("int32")
            value = value - read_kernel_zero(out)
            product = multiply(centred(*(at[letter] for letter in data_layout)), value)
            return te.sum(
                tirx.if_then_else(tirx.all(*hits), product, tirx.const(0, attrs.out_dtype)),
                axis=[channel, *taps.values()],
            )

        return compute_tensor(shape, element, name=name_hint(call))

    return make_loops(builder, call, te_conv_transpose, [data, weight], reader)


# ---------------------------------------------------------------- layout


def infer_layout_conv(call: Call, desired: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """Use the desired layouts [data, kernel]. If there are none, follow the operands."""
    attrs, name = call.attrs, call.op.name
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    if name in desired:
        wanted = [str(text) for text in desired[name]]
        operator = f"ConvertLayout of {operator_name(call)}"
        if len(wanted) not in (2, 3) or wanted[2:] not in ([], wanted[:1]):
            raise QnnError(
                f"{operator}: layouts {wanted} are not allowed; allowed: [data, kernel], such as "
                "['NHWC', 'OHWI']; the result has the layout of the data.",
                code="RQ601",
            )
        spatial = "".join(sorted(set(data_layout) - set("NC")))
        check_layout(operator, "data layout", wanted[0], f"NC{spatial}")
        check_layout(operator, "kernel layout", wanted[1], f"OI{spatial}")
        letters = ["".join(_letter(data_layout, each) for each in wanted[0])]
        letters.append("".join(_letter(kernel_layout, each) for each in wanted[1]))
    else:
        current = [current_letters(argument, layouts) for argument in call.args[:2]]
        if any(text is None or not is_plain(text) for text in current):
            return keep_untouched(call)
        letters = [text or "" for text in current]
    attrs = replace_attrs(
        attrs,
        data_layout=reorder_names(data_layout, letters[0]),
        kernel_layout=reorder_names(kernel_layout, letters[1]),
    )
    inputs = [*map(decide, letters), *map(decide_untouched, call.args[2:])]
    return make_output(inputs, letters[0], attrs)


def _letter(names: str, name: str) -> str:
    return string.ascii_uppercase[names.index(name)]


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "conv1d", QConv1DAttrs, LINEAR_OPERANDS, infer_conv1d, legalize_conv, infer_layout_conv
    ),
    Operator(
        "conv2d", QConv2DAttrs, LINEAR_OPERANDS, infer_conv2d, legalize_conv, infer_layout_conv
    ),
    Operator(
        "conv2d_transpose",
        QConv2DTransposeAttrs,
        LINEAR_OPERANDS,
        infer_conv2d_transpose,
        legalize_conv2d_transpose,
        infer_layout_conv,
    ),
)
