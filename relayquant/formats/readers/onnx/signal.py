"""ONNX reader: DFT and STFT, which TVM lacks, as products with constant matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.fourier import (
    count_values,
    emit_product,
    make_real_inverse,
    make_transform,
)
from relayquant.formats.readers.onnx.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.sizes import known_shape
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.rewrite.graph import constant_value


def read_integer(inputs: Sequence[Any], at: int, what: str) -> int | None:
    """Return a constant operand of one integer. None if it is absent."""
    operand = inputs[at] if at < len(inputs) else None
    if operand is None:
        return None
    if (value := constant_value(operand)) is None:
        raise NotConstant(what)
    return int(value.item())


def count_parts(data: relax.Expr) -> int:
    """Return the size of the last axis: 1 of real numbers, 2 of complex ones."""
    parts = known_shape(data)[-1]
    if parts not in (1, 2):
        raise Refusal(f"its operand has a last axis of size {parts}; supported: 1 or 2")
    return int(parts)


def convert_dft(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert DFT. A onesided inverse gives real numbers, with a last axis of size 1.

    Raises:
        Refusal: the length of the axis is symbolic, or too large.
        NotConstant: the axis or dft_length is computed at run time.
    """
    data, parts, rank = inputs[0], count_parts(inputs[0]), len(known_shape(inputs[0]))
    if opset < 20:
        axis = int(attrs.get("axis", 1))
    else:
        given = read_integer(inputs, 2, "axis")
        axis = -2 if given is None else given
    axis %= rank
    inverse, onesided = bool(attrs.get("inverse", 0)), bool(attrs.get("onesided", 0))
    length = read_integer(inputs, 1, "dft_length")
    if length is None:
        length = count_values(data, axis)
        length = 2 * (length - 1) if inverse and onesided else length
    if length < 1:
        raise Refusal(f"its dft_length is {length}; supported: 1 or more")
    if inverse and onesided:
        matrix = make_real_inverse(length)
    else:
        results = length // 2 + 1 if onesided else length
        matrix = make_transform(length, results=results, inverse=inverse)
    return emit_product(bb, data, axis, matrix[:, :parts])


def convert_stft(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert STFT to a convolution along the signal, whose weights are the windowed matrix.

    Raises:
        Refusal: frame_step or frame_length is missing or below 1, complex numbers have onesided
            results, or a frame is too long.
        NotConstant: frame_step, window or frame_length is computed at run time.
    """
    (data, *_), parts = inputs, count_parts(inputs[0])
    step = read_integer(inputs, 1, "frame_step")
    length = read_integer(inputs, 3, "frame_length")
    window = inputs[2] if len(inputs) > 2 else None
    if window is not None:
        if (window := constant_value(window)) is None:
            raise NotConstant("window")
        length = window.size  # the onnx package sees to it that a frame_length is the same
    if length is None:
        raise Refusal("it has neither window nor frame_length; supported: one of them")
    if step is None or min(step, length) < 1:
        raise Refusal(f"its frame_step is {step}, its frame_length {length}; supported: 1 or more")
    signal = known_shape(data)[1]
    if isinstance(signal, int) and signal < length:
        count = format_count(signal, "value")
        raise Refusal(f"its signal has {count}, a frame {length}; supported: no fewer")
    onesided = bool(attrs.get("onesided", 1))
    if onesided and parts == 2:
        raise Refusal("it is onesided, of complex numbers; supported: onesided=0")
    dtype = str(data.ty.dtype)
    results = length // 2 + 1 if onesided else length
    matrix = make_transform(length, results=results)[:, :parts]
    if window is not None:
        matrix = matrix * window.reshape(-1, 1, 1, 1)
    weight = matrix.transpose(2, 3, 1, 0).reshape(2 * results, parts, length).astype(dtype)
    rows = bb.emit(relax.op.permute_dims(data, [0, 2, 1]))
    found = bb.emit(relax.op.nn.conv1d(rows, relax.const(weight, dtype), strides=step))
    batch, _, frames = found.ty.shape.values
    found = bb.emit(relax.op.permute_dims(found, [0, 2, 1]))
    return relax.op.reshape(found, [batch, frames, results, 2])
