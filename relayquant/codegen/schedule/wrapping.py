"""Scheduled TIR -> the same TIR where sums, differences and products of unsigned integers wrap.

    y = a + b  uint32    ->    y = low 32 bits of (uint64(a) + uint64(b))

TVM tells LLVM that uint32 and uint64 never wrap around ("nuw"). So LLVM takes `0 - x` for 0, and
`x + 1 < x` for false. numpy, ONNX and PyTorch wrap. In twice the bits nothing wraps; LLVM removes
the wider type again. TVM's uint8 and uint16 wrap.

Signed overflow is left undefined, as in C: TVM itself simplifies `x + 1 < x` of int32 and int64.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.target import Target

from relayquant.ir.dialect.cost import MACS_ATTR

#: Type that LLVM takes not to wrap -> bits in which no sum and no product of two of its numbers
#: wraps.
WIDE_BITS = {"uint32": 64, "uint64": 128}


def wrap_unsigned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the unsigned arithmetic of a function wrap around."""

    def widen(value: Any) -> Any:
        dtype = str(value.ty)
        bits = WIDE_BITS.get(dtype)
        if bits is None:
            return value
        wide = f"uint{bits}"
        a, b = tirx.Cast(wide, value.a), value.b
        if isinstance(value, tirx.Sub):  # a - b = a + ~b + 1, modulo 2^n
            total = a + tirx.Cast(wide, tirx.bitwise_not(b)) + tirx.IntImm(wide, 1)
        elif isinstance(value, tirx.Add):
            total = a + tirx.Cast(wide, b)
        else:
            total = a * tirx.Cast(wide, b)
        # TVM bounds the numbers of a cast, but not of a reinterpretation.
        return tirx.Cast(dtype, tirx.reinterpret(f"int{bits}", total))

    kinds = (tirx.Add, tirx.Sub, tirx.Mul)
    return func.with_body(tvm_ffi.structural_map(func.body, (kinds, widen)))


def create_wrapping_pass(target: Target) -> Any:
    """Make a pass that applies `wrap_unsigned` to every TIR function but the kernels.

    Only LLVM targets are changed.
    """

    def wrap(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        is_kernel = bool(func.attrs) and MACS_ATTR in func.attrs
        return func if is_kernel or target.kind.name != "llvm" else wrap_unsigned(func)

    return tirx.transform.prim_func_pass(wrap, opt_level=0, name="relayquant.WrapUnsigned")
