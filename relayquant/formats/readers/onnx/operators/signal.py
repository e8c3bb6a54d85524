"""ONNX reader: DFT and STFT, which TVM lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.fourier import count_values, emit_transform
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.rewrite.graph import constant_value, static_size


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
        Refusal: the length of the axis is symbolic, or the matrix too large.
        NotConstant: the axis or dft_length is computed at run time.
    """
    data, rank = inputs[0], len(known_shape(inputs[0]))
    count_parts(data)
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
    return emit_transform(bb, data, axis, length, inverse=inverse, onesided=onesided)


def convert_stft(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert STFT to frames, their product with the window, and their transforms.

    A signal (batch, L) has real numbers, as in ONNX Runtime.

    Raises:
        Refusal: frame_step or frame_length is missing or below 1, complex numbers have onesided
            results, or a frame is too long.
        NotConstant: frame_step, window or frame_length is computed at run time.
    """
    data = inputs[0]
    if len(known_shape(data)) == 2:
        data = bb.emit(relax.op.expand_dims(data, 2))
    parts = count_parts(data)
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
    frames = cut_frames(bb, data, length, step)
    if window is not None:
        dtype = str(data.ty.dtype)
        factor = relax.const(window.reshape(-1, 1).astype(dtype), dtype)
        frames = bb.emit(relax.op.multiply(frames, factor))
    return emit_transform(bb, frames, 2, length, onesided=onesided)


def cut_frames(bb: Builder, data: relax.Expr, length: int, step: int) -> relax.Expr:
    """Emit the frames of a signal: (batch, L, parts) -> (batch, frames, length, parts).

    The signal is cut into rows of `step` numbers. Frame f has the rows from f on.
    """
    batch, size, parts = data.ty.shape.values
    rows = -(-length // step)
    count = (size - length) // step + 1
    used = (count + rows - 1) * step
    if missing := rows * step - length:
        data = bb.emit(relax.op.nn.pad(data, [0, 0, 0, missing, 0, 0]))
    data = bb.emit(relax.op.strided_slice(data, [1], [0], [used], [1], assume_inbound=True))
    data = bb.emit(relax.op.reshape(data, [batch, count + rows - 1, step, parts]))
    frames = bb.emit(relax.op.take(data, place_rows(bb, count, rows), axis=1))
    frames = bb.emit(relax.op.reshape(frames, [batch, count, rows * step, parts]))
    if not missing:
        return frames
    return bb.emit(relax.op.strided_slice(frames, [2], [0], [length], [1]))


def place_rows(bb: Builder, count: Any, rows: int) -> relax.Expr:
    """Return the places f + r of the rows r of each frame f: int64 (count, rows)."""
    if (known := static_size(count)) is not None:
        return relax.const(np.add.outer(np.arange(known), np.arange(rows)), "int64")
    begins = bb.emit(relax.op.reshape(bb.emit(relax.op.arange(0, count, 1, "int64")), [count, 1]))
    return bb.emit(relax.op.add(begins, relax.const(np.arange(rows).reshape(1, -1), "int64")))
