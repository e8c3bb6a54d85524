"""Last step of a stage that makes constants: equal constants become one, which all uses read.

A weight that a model has once and uses twice stays one constant through rules that compute from it
for each use, so that it is held, saved and loaded once.
"""

from __future__ import annotations

import hashlib
from typing import Any

import tvm
import tvm_ffi
from tvm.ir import GenericConst


def share_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with equal tensor constants of main as one object; `mod` is not changed.

        a = matmul(x, const1); b = matmul(a, const2)  ->  ... matmul(a, const1)

    Equal are constants of one type whose elements have the same bits: 0.0 and -0.0 differ, a NaN
    equals its like.
    """
    first: dict[tuple[str, bytes], GenericConst] = {}
    swapped = False

    def share(constant: GenericConst) -> GenericConst:
        nonlocal swapped
        digest = hashlib.blake2b(constant.value.numpy().tobytes()).digest()
        found = first.setdefault((str(constant.ty), digest), constant)
        swapped = swapped or not found.same_as(constant)
        return found

    main: Any = tvm_ffi.structural_map(mod["main"], (GenericConst, share))
    if not swapped:
        return mod
    functions = {gvar: func for gvar, func in mod.functions_items() if gvar.name_hint != "main"}
    return tvm.IRModule({**functions, mod.get_global_var("main"): main}, attrs=mod.attrs)
