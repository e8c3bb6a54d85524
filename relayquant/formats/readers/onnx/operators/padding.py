"""ONNX reader: Pad -> R.nn.pad, crops and masks."""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.frontend import run_frontend
from relayquant.formats.readers.onnx.operators.quantized import find_real
from relayquant.formats.readers.onnx.operators.sizes import (
    fill_outside,
    known_shape,
    pad_at_run_time,
    read_sizes,
)
from relayquant.formats.readers.refusal import Refusal

#: Dtypes for which R.nn.pad computes the pad value in the dtype of the data.
FLOATS = ("float16", "bfloat16", "float32", "float64")
#: mode in ONNX -> mode of R.nn.pad
PAD_MODES = {
    b"constant": "constant",
    b"reflect": "reflect",
    b"edge": "replicate",
    b"wrap": "circular",
}


def convert_pad(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Pad to R.nn.pad. Negative pads crop first: R.strided_slice.

    Integer data is left to TVM, unless its pads are computed at run time.
    """
    mode = PAD_MODES.get(attrs.get("mode", b"constant"))
    if mode is None:
        return None
    data = inputs[0]
    shape = known_shape(data)
    fill = 0.0
    axes = list(range(len(shape)))
    if opset < 11:
        pads, fill = list(attrs["pads"]), float(attrs.get("value", 0.0))
    else:
        arrays = [None if given is None else find_real(bb, given) for given in inputs]
        pairs = list(zip(arrays, inputs, strict=True))[1:]
        late = [at for at, (array, given) in enumerate(pairs, 1) if array is None is not given]
        if late == [2] and mode == "constant":
            return pad_with_value(bb, inputs, attrs, opset)
        if late:
            return pad_at_run_time(bb, inputs, attrs.get("mode", b"constant"))
        pads = arrays[1].tolist()
        if len(arrays) > 2 and arrays[2] is not None:
            fill = float(arrays[2].item())
        if len(arrays) > 3 and arrays[3] is not None:
            axes = [int(axis) % len(shape) for axis in arrays[3]]
    if str(data.ty.dtype) not in FLOATS:
        return None
    if len(pads) != 2 * len(axes):
        raise Refusal(
            f"Pad has {format_count(len(pads), 'pad')} for {format_count(len(axes), 'axis')}; "
            f"expected {2 * len(axes)}"
        )
    widths = [[0, 0] for _ in shape]
    for i, axis in enumerate(axes):
        widths[axis] = [int(pads[i]), int(pads[i + len(axes)])]
    cropped = [axis for axis, (before, after) in enumerate(widths) if before < 0 or after < 0]
    if cropped:
        if any(isinstance(shape[axis], str) for axis in cropped):
            return None
        begin = [max(0, -widths[axis][0]) for axis in cropped]
        end = [int(shape[axis]) - max(0, -widths[axis][1]) for axis in cropped]
        data = bb.emit(relax.op.strided_slice(data, cropped, begin, end, [1] * len(cropped)))
        widths = [[max(0, before), max(0, after)] for before, after in widths]
    return relax.op.nn.pad(data, [int(pad) for pair in widths for pad in pair], mode, fill)


def pad_with_value(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Pad by constant counts with a run-time value: pad with zeros, then select the value outside
    the data.
    """
    data, pads, fill, *axes = inputs
    dtype = str(data.ty.dtype)
    plain = [data, pads, relax.const(np.zeros((), dtype), dtype), *axes]
    padded = convert_pad(bb, plain, attrs, opset)
    if padded is None:
        padded = run_frontend("Pad", bb, plain, attrs, opset)
    counts = read_sizes(pads) or []
    half = len(counts) // 2
    places = [axis for given in axes if given is not None for axis in read_sizes(given) or []]
    pairs = zip(counts[:half], counts[half:], strict=True)
    widths = dict(zip(places or range(half), pairs, strict=True))
    return fill_outside(bb, bb.emit(padded), data, widths, fill)
