"""Kernel with a residual -> the same kernel with one memory for the residual and the result.

Then the CPU does not have to fetch the memory of a result before it writes there.
"""

from __future__ import annotations

from tvm.tirx import PrimFunc

#: Attribute of kernels that read each element of the last operand, and no other one, before they
#: write the same element of the result, and write each element once.
STORES_ONCE = "relayquant.stores_once"


def can_overwrite(func: PrimFunc) -> bool:
    """Whether the last operand of a kernel may be the memory of its result."""
    return bool(func.attrs and func.attrs.get(STORES_ONCE))


def overwrite_operand(func: PrimFunc) -> PrimFunc:
    """Return the kernel without the last operand, which it reads from the result instead."""
    *_, operand, result = func.params
    return func.specialize({operand: result})
