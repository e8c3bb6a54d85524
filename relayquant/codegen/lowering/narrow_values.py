"""Calls of float kernels -> the same calls, with values between them stored as bfloat16.

    y = product(x)  float32    ->    y' = product(x)  bfloat16
    z = product(y)                   z = product(y')

A product of bfloat16 rounds its operand, so rounding where the value is written gives the same
bits. Additions of a residual and depthwise convolutions then read rounded values, too.

    y = relu(x * s + t)              y' = round(relu(x * s + t))
    z = product(y)             ->    z = product(y')

Operators on single values are no kernels. A function that rounds stands behind them, and FuseOps
makes one kernel of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from relayquant.codegen.kernels.floating.stored import Stored, round_elements
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.codegen.lowering.engine import BlockView, ElementFunction, Kernel, Lowered
from relayquant.ir.ops.chain import ELEMENTWISE
from relayquant.ir.rewrite.expressions import is_float32, op_name


@dataclass(frozen=True, eq=False)
class StoringKernel(Kernel):
    """A kernel that can read and write values in bfloat16.

    Attributes:
        choose: Makes the kernel for other dtypes in memory.
        fields: Position of an operand that may be bfloat16 -> its field of `Stored`.
        is_product: Whether the kernel rounds its data anyway. Other kernels read bfloat16 only if
            their result is bfloat16 too.
    """

    choose: Callable[[Stored], Kernel]
    fields: Mapping[int, str]
    is_product: bool


def store_narrow(calls: Sequence[Lowered], block: BlockView) -> list[Lowered]:
    """Return the same calls in order, with `Lowered.stored` where a value becomes bfloat16."""
    readers = list_readers(calls)
    rounded = find_rounded(readers, block)
    stored = {
        var: relax.DataflowVar(f"{var.name}_bf16", relax.TensorType(var.ty.shape, BF16_BITS))
        for var in (*find_narrow(calls, readers, block), *rounded)
    }
    places = {binding.var: place for place, binding in enumerate(block.bindings)}
    functions: dict[Lowered, list[ElementFunction]] = {}
    for var in rounded:
        first = min((call for call, _ in readers[var]), key=lambda call: places[call.first])
        functions.setdefault(first, []).append(ElementFunction(stored[var], var, round_elements))
    return [
        replace(convert_call(call, stored), functions=tuple(functions.get(call, ())))
        for call in calls
    ]


#: value -> the calls that read it where it may be bfloat16, and their kernels
Readers = dict[relax.Var, list[tuple[Lowered, StoringKernel]]]


def list_readers(calls: Sequence[Lowered]) -> Readers:
    """List the calls that can read values in bfloat16."""
    readers: Readers = {}
    for call in calls:
        if isinstance(call.kernel, StoringKernel):
            for position in call.kernel.fields:
                operand = call.operands[position]
                if isinstance(operand, relax.Var):
                    readers.setdefault(operand, []).append((call, call.kernel))
    return readers


def find_rounded(readers: Readers, block: BlockView) -> list[relax.Var]:
    """List the values of operators on single values that only products read, and as their data: a
    residual keeps its bits.
    """
    return [
        var
        for var, calls in readers.items()
        if op_name(block.values.get(var)) in ELEMENTWISE
        and is_float32(var)
        and block.is_free(var)
        and block.graph.count_uses(var) == len(calls)
        and all(kernel.is_product and reads_as_data(call, kernel, var) for call, kernel in calls)
    ]


def reads_as_data(call: Lowered, kernel: StoringKernel, var: relax.Var) -> bool:
    """Whether a call reads a value nowhere but as its data."""
    fields = {kernel.fields[i] for i in kernel.fields if var.same_as(call.operands[i])}
    return fields == {"data"}


def find_narrow(calls: Sequence[Lowered], readers: Readers, block: BlockView) -> set[relax.Var]:
    """Find the values of kernels that become bfloat16.

    Kernels write and read them: products, or kernels that pass them on to products.
    """
    narrow = {
        call.vars[-1]
        for call in calls
        if isinstance(call.kernel, StoringKernel) and call.concat is None and not call.results
    }
    narrow = {var for var in narrow if block.graph.count_uses(var) == len(readers.get(var, ())) > 0}
    while True:
        kept = {
            var
            for var in narrow
            if all(own.is_product or call.vars[-1] in narrow for call, own in readers[var])
        }
        if kept == narrow:
            return narrow
        narrow = kept


def convert_call(call: Lowered, stored: Mapping[relax.Var, relax.Var]) -> Lowered:
    """Return a call that reads and writes the values of `stored` in bfloat16."""
    kernel, result = call.kernel, stored.get(call.vars[-1])
    if not isinstance(kernel, StoringKernel):
        return call
    operands = list(call.operands)
    dtypes = {} if result is None else {"result": BF16_BITS}
    for position, name in kernel.fields.items():
        operand = operands[position]
        if isinstance(operand, relax.Var) and operand in stored:
            operands[position] = stored[operand]
            dtypes[name] = BF16_BITS
    if not dtypes:
        return call
    chosen = kernel.choose(Stored(**dtypes))
    return replace(call, kernel=chosen, operands=tuple(operands), stored=result)
