"""Calls of float kernels -> the same calls, with values between them stored as bfloat16.

    y = product(x)  float32    ->    y' = product(x)  bfloat16
    z = product(y)                   z = product(y')

A product of bfloat16 rounds its operand, so rounding where the value is written gives the same
bits. Additions of a residual and depthwise convolutions then read rounded values, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from relayquant.codegen.kernels.floating.stored import Stored
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.codegen.lowering.engine import BlockView, Kernel, Lowered


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
    stored = {
        var: relax.DataflowVar(f"{var.name}_bf16", relax.TensorType(var.ty.shape, BF16_BITS))
        for var in find_narrow(calls, block)
    }
    return [convert_call(call, stored) for call in calls]


def find_narrow(calls: Sequence[Lowered], block: BlockView) -> set[relax.Var]:
    """Find the values that become bfloat16.

    Kernels write and read them: products, or kernels that pass them on to products.
    """
    readers: dict[relax.Var, list[tuple[Lowered, StoringKernel]]] = {}
    for call in calls:
        if isinstance(call.kernel, StoringKernel):
            for position in call.kernel.fields:
                operand = call.operands[position]
                if isinstance(operand, relax.Var):
                    readers.setdefault(operand, []).append((call, call.kernel))
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
