"""Numbers of a cache in memory, float16, float32 or int8 <-> vectors of float32.

A target without instructions for float16 converts it by operations on integers, to the same bits.
LLVM would call a function of the C runtime for each number.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import broadcast, constant, load_vector, store_vector, vector
from relayquant.codegen.kernels.floating.tile import FloatIsa
from relayquant.codegen.kernels.isa.base import Buffer, Expr

#: Bits of the mantissa that float16 lacks, and the bits of its exponent and of all but its sign.
LOW_BITS, EXPONENT, MAGNITUDE = 13, 0x7C00, 0x7FFF
#: Exponent biases: 127 - 15.
REBIAS = 112
INFINITY, NAN = 0x7F800000, 0x7E00
#: The bits of 65520, from which on float16 is infinite, and of 2^-14, its smallest normal number.
OVERFLOW, SMALLEST_NORMAL = 0x477FF000, 0x38800000
#: Added to a number below 2^-14, it rounds to a multiple of 2^-24: its bits, and the number.
DENORMAL_BITS, DENORMAL = 0x3F000000, 0.5


def load_numbers(buffer: Buffer, at: Expr, lanes: int, isa: FloatIsa) -> Expr:
    """Load a vector and convert it to float32, which is exact."""
    value = load_vector(buffer, at, lanes)
    if buffer.dtype == "float16" and not isa.half:
        return widen_half(value, lanes)
    if buffer.dtype == "int8":
        value = T.Cast(vector("int32", lanes), value)
    return value if buffer.dtype == "float32" else T.Cast(vector("float32", lanes), value)


def store_numbers(buffer: Buffer, value: Expr, at: Expr, lanes: int, isa: FloatIsa) -> None:
    """Store a vector of the buffer's dtype, or of float32, rounded to float16 half to even."""
    if buffer.dtype == "float16":
        if isa.half:
            value = T.Cast(vector("float16", lanes), value)
        else:
            value = T.reinterpret(vector("float16", lanes), narrow_bits(value, lanes))
    store_vector(buffer, value, at, lanes)


def widen_half(value: Expr, lanes: int) -> Expr:
    """Convert float16 to float32 by integer operations."""

    def number(value: int) -> Expr:
        return broadcast(T.uint32(value), lanes)

    bits = T.Cast(vector("uint32", lanes), T.reinterpret(vector("uint16", lanes), value))
    size = T.bind(T.bitwise_and(bits, number(MAGNITUDE)))
    # Scaled by a power of two: exact, also for denormal numbers.
    scaled = T.reinterpret(vector("float32", lanes), T.shift_left(size, number(LOW_BITS)))
    scaled = scaled * constant("float32", 2.0**REBIAS, lanes)
    found = T.reinterpret(vector("uint32", lanes), scaled)
    found = T.Select(size >= number(EXPONENT), T.bitwise_or(found, number(INFINITY)), found)
    sign = T.shift_left(T.bitwise_and(bits, number(0x8000)), number(16))
    return T.reinterpret(vector("float32", lanes), T.bitwise_or(found, sign))


def narrow_bits(value: Expr, lanes: int) -> Expr:
    """Convert float32 to the bits of float16 by integer operations: uint16."""

    def number(value: int) -> Expr:
        return broadcast(T.uint32(value), lanes)

    bits = T.bind(T.reinterpret(vector("uint32", lanes), value))
    size = T.bind(T.bitwise_and(bits, number(0x7FFFFFFF)))
    is_odd = T.bitwise_and(T.shift_right(size, number(LOW_BITS)), number(1))
    rounded = size + number((1 << LOW_BITS - 1) - 1) + is_odd
    normal = T.shift_right(rounded, number(LOW_BITS)) - number(REBIAS << 10)
    small = T.reinterpret(vector("float32", lanes), size) + constant("float32", DENORMAL, lanes)
    denormal = T.reinterpret(vector("uint32", lanes), small) - number(DENORMAL_BITS)
    found = T.Select(size < number(SMALLEST_NORMAL), denormal, normal)
    found = T.Select(size >= number(OVERFLOW), number(EXPONENT), found)
    found = T.Select(size > number(INFINITY), number(NAN), found)
    sign = T.shift_right(T.bitwise_and(bits, number(0x80000000)), number(16))
    return T.Cast(vector("uint16", lanes), T.bitwise_or(found, sign))
