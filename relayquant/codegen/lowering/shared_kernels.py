"""Kernel calls -> the same calls, where kernels that differ only in numbers become one.

    x * 0.25 + 7.0,  x * 0.5 + 3.0    ->    x * c[0] + c[1]  with c an operand

The layers of a network repeat, and so do its kernels, except for scales and zero points. Compiling
a kernel takes long, reading a number once per call does not. Numbers that are equal in all of these
kernels stay in the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.isa.base import Expr
from relayquant.codegen.lowering.engine import Kernel, Lowered


@dataclass(frozen=True)
class Number:
    """An immediate of a kernel. Equal if all bits are equal, so 0.0 and -0.0 differ."""

    dtype: str
    bits: bytes


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A kernel with all numbers set to zero, and the numbers in the order of the code."""

    func: PrimFunc
    numbers: tuple[Number, ...]


def share_kernels(calls: Sequence[Lowered]) -> list[Lowered]:
    """Return the same calls in order, with shared kernels that read the differing numbers."""
    skeletons = [read_skeleton(call.kernel.func) for call in calls]
    shared = list(calls)
    for group in group_equal([skeleton.func for skeleton in skeletons]):
        numbers = [skeletons[i].numbers for i in group]
        columns, first = [*zip(*numbers, strict=True)], {}
        same = [first.setdefault(column, k) for k, column in enumerate(columns)]
        varying = [k for k in dict.fromkeys(same) if len(set(columns[k])) > 1]
        if not varying:
            continue
        kernel = Kernel.of(take_operands(calls[group[0]].kernel.func, numbers[0], varying, same))
        for i, own in zip(group, numbers, strict=True):
            operands = gather_operands([own[k] for k in varying])
            shared[i] = replace(calls[i], kernel=kernel, operands=(*calls[i].operands, *operands))
    return shared


def group_equal(functions: Iterable[PrimFunc]) -> list[list[int]]:
    """Group the indices of structurally equal functions, in the order of first occurrence."""
    groups: dict[int, list[tuple[PrimFunc, list[int]]]] = {}
    for i, func in enumerate(functions):
        same_hash = groups.setdefault(tvm_ffi.structural_hash(func), [])
        for first, members in same_hash:
            if tvm_ffi.structural_equal(first, func):
                members.append(i)
                break
        else:
            same_hash.append((func, [i]))
    return [members for same_hash in groups.values() for _, members in same_hash]


def map_numbers(func: PrimFunc, make: Callable[[Number], Expr | None]) -> PrimFunc:
    """Replace every number of a function by `make(number)`, unless this is None.

    Numbers are float immediates, and integers in all lanes of a vector. Other integers are sizes,
    indices and immediates of instructions, which must stay.
    """

    def map_immediate(node: tirx.FloatImm | tirx.IntImm) -> Expr:
        dtype = str(node.ty)
        made = make(Number(dtype, np.array(node.value, dtype).tobytes()))
        return node if made is None else made

    def map_broadcast(node: tirx.Broadcast) -> Expr:
        if not isinstance(node.value, tirx.IntImm):
            return node
        return tirx.Broadcast(map_immediate(node.value), node.lanes)

    callbacks = [(tirx.FloatImm, map_immediate), (tirx.Broadcast, map_broadcast)]
    return func.with_body(tvm_ffi.structural_map(func.body, callbacks))


def read_skeleton(func: PrimFunc) -> Skeleton:
    """Split a kernel into its skeleton and its numbers."""
    numbers: list[Number] = []

    def note(number: Number) -> Expr:
        numbers.append(number)
        return tirx.const(0, number.dtype)

    return Skeleton(map_numbers(func, note), tuple(numbers))


def take_operands(
    func: PrimFunc, numbers: Sequence[Number], varying: Sequence[int], same: Sequence[int]
) -> PrimFunc:
    """Make a function read the numbers at `varying` from operands before its result.

    There is one operand for each dtype, as in `gather_operands`. `same` has for each number the
    first one that is equal to it in all kernels. They are read once: registers are few.
    """
    slots: dict[int, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    for k in varying:
        dtype = numbers[k].dtype
        slots[k] = dtype, sizes.get(dtype, 0)
        sizes[dtype] = sizes.get(dtype, 0) + 1
    buffers = {
        dtype: tirx.decl_buffer((size,), dtype, f"{dtype}_numbers") for dtype, size in sizes.items()
    }
    # Read once, before the loops: stores might hide from LLVM that the operands do not change.
    read = {k: tirx.Var(f"number{k}", numbers[k].dtype) for k in varying}
    binds = [tirx.Bind(read[k], buffers[dtype].vload([slot])) for k, (dtype, slot) in slots.items()]
    position = count()
    body = map_numbers(func, lambda _: read.get(same[next(position)])).body.block.body
    root = s_tir.SBlock([], [], [], "root", tirx.SeqStmt([*binds, body]))
    params = [*func.params[:-1], *buffers.values(), func.params[-1]]
    return PrimFunc(params, s_tir.SBlockRealize([], True, root), func.ret_type, func.attrs)


def gather_operands(numbers: Sequence[Number]) -> list[np.ndarray]:
    """Make one array for each dtype, in the order in which the dtypes first occur."""
    values: dict[str, bytes] = {}
    for number in numbers:
        values[number.dtype] = values.get(number.dtype, b"") + number.bits
    return [np.frombuffer(column, dtype) for dtype, column in values.items()]
