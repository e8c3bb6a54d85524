"""Building blocks of every kernel: function header, flat views, vector stores, copies, loops.

Kernels are PrimFuncs built with TVM's `tirx` IR builder. Vectors are explicit and LLVM assigns the
registers. All addresses are offsets into flat (1-D) views of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.isa.base import Buffer, Expr, fence

#: Marks a PrimFunc whose loops are final: it needs no schedule.
IS_SCHEDULED = "tirx.is_scheduled"
#: Annotation of a parallel loop whose extent is known only at run time: the least extent for which
#: threads share it. With a lower extent it stays on the caller's thread.
LEAST_EXTENT = "relayquant.least_extent"
#: Bytes moved by one copy or fill instruction. LLVM splits it if registers are narrower.
COPY_BYTES = 64

#: Integers that are added up in parallel.
SUM_LANES = 16

#: Bytes that a prefetch loads: 64 on every x86 and nearly every Arm core.
CACHE_LINE = 64

#: Below this many multiply-adds a kernel stays on one thread. They take 5 to 10 microseconds;
#: sharing them with a thread that is awake takes 1.
PARALLEL_THRESHOLD = 1_500_000
#: Multiply-adds that take as long as storing one result.
STORE_COST = 20
#: Multiply-adds that take as long as reading one weight that is not in a near cache.
WEIGHT_COST = 8
#: Below this many bytes a copy stays on one thread.
PARALLEL_BYTES = 128 * 1024

#: Arguments of the current kernel that have a symbolic batch, and the loops around its body.
_BATCHED: ContextVar[frozenset[int]] = ContextVar("batched", default=frozenset())
_LOOPS: ContextVar[ExitStack] = ContextVar("loops")


def build_kernel(name: str, body: Callable[[], None]) -> PrimFunc:
    """Build a PrimFunc `name` whose arguments and statements `body` emits, for `call_tir`.

    Relax passes expect a root SBlock around the body of a PrimFunc.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        with ExitStack() as loops:
            token = _LOOPS.set(loops)
            body()
            _LOOPS.reset(token)
    func = builder.get()
    root = s_tir.SBlock([], [], [], "root", func.body)
    return func.with_body(s_tir.SBlockRealize([], True, root))


def import_code(text: str) -> None:
    """Link functions in LLVM's language to the kernel, for calls of `T.call_extern` from here on.

    Kernels of one library may import the same functions, if these are `linkonce_odr`.
    """
    _LOOPS.get().enter_context(T.attr(T.int32(0), "pragma_import_llvm", text))


def declare_arguments(
    *arguments: tuple[str, tuple[int, ...], str] | None,
) -> list[Buffer | None]:
    """Declare the arguments (name, shape, dtype) of the kernel, as flat views; None stays None.

    All arguments of a kernel are declared in one call, since TVM wants them before anything else.
    Inside `repeat_over_batch` the views show one image, in a loop over all images.
    """
    batched = _BATCHED.get()
    size = T.int64() if batched else None
    buffers: list[Buffer | None] = []
    strides: list[int] = []
    for argument in arguments:
        if argument is None:
            buffers.append(None)
            continue
        name, shape, dtype = argument
        is_batched = sum(b is not None for b in buffers) in batched
        buffers.append(T.arg(name, T.Buffer((size, *shape[1:]) if is_batched else shape, dtype)))
        strides.append(prod(shape) if is_batched else 0)
    image = _LOOPS.get().enter_context(T.serial(size)) if batched else 0
    sizes = iter([prod(a[1]) for a in arguments if a is not None])
    offsets = iter([image * stride if stride else 0 for stride in strides])
    return [
        None
        if b is None
        else T.decl_buffer((next(sizes),), b.dtype, data=b.data, elem_offset=next(offsets))
        for b in buffers
    ]


def name_extents(extents: Sequence[int | None]) -> list[Any]:
    """Return the extents, with a symbol for each one that is known only at run time."""
    return [T.int64() if extent is None else extent for extent in extents]


def declare_argument(name: str, shape: Sequence[int | None], dtype: str) -> Buffer:
    """Declare one argument; None is an extent of the run time.

    TVM wants all arguments before anything else (`flat_view`).
    """
    return T.arg(name, T.Buffer(name_extents(shape), dtype))


def flat_view(buffer: Buffer) -> Buffer:
    """Make a one-dimensional view of a buffer, of static or symbolic size."""
    return T.decl_buffer((prod(buffer.shape),), buffer.dtype, data=buffer.data)


@contextmanager
def repeat_over_batch(positions: Iterable[int]) -> Iterator[None]:
    """Give kernels that are built in this block a batch whose size is known only at run time.

    `positions` are the arguments with a batch as first dimension, which must be 1 in the
    specification. The kernel for one image runs in a loop over the images.
    """
    token = _BATCHED.set(frozenset(positions))
    try:
        yield
    finally:
        _BATCHED.reset(token)


def alloc_workspace(size: int, dtype: str) -> Buffer:
    """Allocate scratch memory shared by all threads of the kernel."""
    return T.alloc_buffer((size,), dtype)


def settle(*values: Expr) -> list[Expr]:
    """Compute integers now, and keep them in memory.

    TVM would put the definitions of names into every index that is made of them, and simplify that
    for minutes.
    """
    memory = T.alloc_buffer((len(values),), "int64")
    for i, value in enumerate(values):
        T.buffer_store(memory, T.Cast("int64", value), [i])
    return [T.bind(memory[i]) for i in range(len(values))]


def alloc_vectors(count: int, lanes: int, dtype: str = "int32") -> list[Buffer]:
    """Allocate `count` vector variables, which LLVM keeps in registers.

    Each has a separate buffer of scope "global". TVM leaves these on the stack up to 1 KiB, where
    LLVM sees through them. Buffers of scope "local" and larger ones are allocated on the heap,
    every time.
    """
    return [T.alloc_buffer((lanes,), dtype) for _ in range(count)]


def vector(dtype: str, lanes: int) -> str:
    """Return the name of a vector type, "int32x16"; of a scalar if `lanes` is 1."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def load_vector(buffer: Buffer, offset: Expr, lanes: int) -> Expr:
    return buffer.vload([offset], vector(buffer.dtype, lanes))


def concat_vectors(pieces: list[Expr], size: int) -> Expr:
    """Concatenate the elements of vectors of `size`."""
    if len(pieces) == 1:
        return pieces[0]
    return T.Shuffle(pieces, [T.int32(i) for i in range(len(pieces) * size)])


def broadcast(value: Expr, lanes: int) -> Expr:
    return value if lanes == 1 else T.broadcast(value, lanes)


def constant(dtype: str, value: float, lanes: int) -> Expr:
    """Put `value` in every lane. It must be representable in `dtype`."""
    scalar = getattr(T, dtype)(value)
    return broadcast(scalar, lanes)


def constant_lane(value: int) -> Expr:
    """Make an int32 that layers may differ in: one lane of a vector; see `shared_kernels`."""
    return T.Shuffle([constant("int32", value, 2)], [T.int32(0)])


def flip_sign_bit(value: Expr, source: str, dtype: str, lanes: int) -> Expr:
    """Convert a byte vector of dtype `source` to `dtype`, shifted by 128 if they differ."""
    if source == dtype:
        return value
    bits = T.reinterpret(vector("uint8", lanes), value)
    bits = T.bitwise_xor(bits, constant("uint8", 128, lanes))
    return T.reinterpret(vector(dtype, lanes), bits)


def convert_activation(value: Expr, source: str, dtype: str, lanes: int) -> Expr:
    """Convert stored activations of dtype `source` to the dtype of the dot product.

    Bytes keep their values in int16. Bytes of the other byte dtype are shifted by 128.
    """
    if dtype == "int16":
        return T.Cast(vector(dtype, lanes), value)
    return flip_sign_bit(value, source, dtype, lanes)


def store_vector(buffer: Buffer, value: Expr, offset: Expr, lanes: int, width: int = 0) -> None:
    """Store the first `width` (default: all) of the `lanes` values of a vector.

    A partial vector is written in pieces of a power of two, so nothing after it is touched.
    """
    width = width or lanes
    if width == lanes:
        T.buffer_store(buffer, value, [T.ramp(offset, 1, lanes) if lanes > 1 else offset])
        return
    done = 0
    while done < width:
        piece = 1 << ((width - done).bit_length() - 1)
        part = T.Shuffle([value], [T.int32(done + i) for i in range(piece)])
        store_vector(buffer, part, offset + done, piece)
        done += piece


def emit_unknown(number: Expr) -> Expr:
    """Return a positive int32 number of which LLVM does not know the range."""
    return T.reinterpret("int32", fence(T.reinterpret("float32", T.Cast("int32", number)), 1))


def emit_prefetch(buffer: Buffer, offset: Expr, level: int, write: bool = False) -> None:
    """Fetch the cache line of an element into the cache of this level. Changes no value.

    `write`: the line will be written. An element beyond the buffer is harmless: nothing is read.
    """
    access, locality, is_data = T.int32(int(write)), T.int32(4 - level), T.int32(1)
    address = T.address_of(buffer[offset])
    T.evaluate(
        T.call_llvm_intrin("llvm.prefetch", address, access, locality, is_data, dtype="void")
    )


def emit_shared_loop(extent: Expr, is_worth: Expr | bool, emit: Callable[[Expr], None]) -> None:
    """Emit a loop of emit(i) for each i < extent, on threads if `is_worth`.

    `is_worth` is known now or at run time.
    """
    if isinstance(is_worth, tirx.IntImm):  # a comparison of known sizes
        is_worth = bool(is_worth.value)
    if isinstance(is_worth, bool):
        with (T.parallel if is_worth else T.serial)(extent) as index:
            emit(index)
        return
    with T.If(is_worth):
        with T.Then(), T.parallel(extent) as index:
            emit(index)
        with T.Else(), T.serial(extent) as index:
            emit(index)


def emit_parts(total: int, size: int, emit: Callable[[Expr, int], None]) -> None:
    """Emit the parts of `total` values with emit(number of the part, its length): a loop over all
    parts of length `size`, then a shorter one for the rest, if there is any.
    """
    whole, rest = divmod(total, size)
    if whole:
        with T.serial(whole) as number:
            emit(number, size)
    if rest:
        emit(T.int64(whole), rest)


def emit_vector_loop(
    size: int, lanes: int, body: Callable[[Expr, int], None], threads: bool = False
) -> None:
    """Call `body(offset, lanes)` so that it covers 0 .. size.

    The last vector is moved back and overlaps its neighbour, so `body` may run twice for an
    element. Ranges shorter than a vector use vectors of a power of two, again with overlap.
    """
    while lanes > size:
        lanes //= 2
    count, rest = divmod(size, lanes)
    if count == 1:
        body(0, lanes)
        if rest:
            body(size - lanes, lanes)
        return
    total = count + bool(rest)
    with (T.parallel if threads else T.serial)(total) as index:
        offset = index * lanes
        body(T.min(offset, size - lanes) if rest else offset, lanes)


def emit_sum(buffer: Buffer, start: Expr, count: int) -> Expr:
    """Emit the sum of `count` neighbouring elements of a buffer: int32, or float32 of floats."""
    lanes, dtype = SUM_LANES, "float32" if buffer.dtype == "float32" else "int32"
    (total,) = alloc_vectors(1, lanes, dtype)
    store_vector(total, constant(dtype, 0, lanes), 0, lanes)
    with T.serial(count // lanes) as i:
        value = T.Cast(vector(dtype, lanes), load_vector(buffer, start + i * lanes, lanes))
        store_vector(total, load_vector(total, 0, lanes) + value, 0, lanes)
    if dtype == "float32":
        result = fold_lanes(load_vector(total, 0, lanes), lanes, lambda a, b: a + b)
    else:
        name = f"llvm.vector.reduce.add.v{lanes}i32"
        result = T.call_llvm_pure_intrin(name, load_vector(total, 0, lanes), dtype=dtype)
    for i in range(count - count % lanes, count):
        result = result + T.Cast(dtype, buffer.vload([start + i]))
    return result


def fold_lanes(value: Expr, lanes: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Reduce a vector to one number by combining halves."""
    while lanes > 1:
        lanes //= 2
        value = T.bind(value)
        low, high = ([T.int32(first + i) for i in range(lanes)] for first in (0, lanes))
        value = combine(T.Shuffle([value], low), T.Shuffle([value], high))
    return value


def split_index(index: Expr, extents: tuple[Any, ...]) -> list[Expr]:
    """Split a flat loop index into row-major coordinates. Extents of 1 cost nothing.

    The first extent may be symbolic.
    """
    coordinates: list[Expr] = []
    for position, extent in enumerate(extents):
        stride = prod(extents[position + 1 :])
        if extent == 1:
            coordinates.append(T.int32(0))
            continue
        value = T.floordiv(index, stride) if stride > 1 else index
        leading = all(e == 1 for e in extents[:position])
        coordinates.append(value if leading else T.floormod(value, extent))
    return coordinates


@contextmanager
def loop_over(extents: tuple[Any, ...], threads: bool) -> Iterator[list[Expr]]:
    """Emit one fused loop over a grid, on threads if requested, and yield the coordinates.

    It is one loop and not a nest, so that the thread pool splits its range evenly for any shape.
    """
    total = prod(extents)
    with (T.parallel if threads else T.serial)(total) as index:
        yield split_index(index, extents)


def ceil_div(a: Any, b: Any) -> Any:
    """Return the ceiling of a / b for integers or TIR expressions."""
    return -(-a // b) if isinstance(a, int) else T.floordiv(a + (b - 1), b)
