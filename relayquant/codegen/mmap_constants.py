"""Compiled module -> shared library whose large constants are used where the file is mapped.

TVM packs the constants of a module with its bytecode and copies them when a library is loaded: each
lies in memory twice then, four times for a moment. Here large ones are read-only data of the
library, and its code asks for them by number:

    grouped_dense(x, c[7], y)   ->   w = relayquant_constant(7); grouped_dense(x, w, y)

Processes that load the same library share their pages, and pages that nobody reads are never
loaded. A library needs nothing for it but the runtime of TVM that it is loaded by.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst
from tvm.target import Target

from relayquant.base._tvm import build_bytecode
from relayquant.base.runtime import ALIGNMENT, view_constant
from relayquant.base.storage.files import TEMPORARY, open_temporary_folder, write_text, writing
from relayquant.codegen.kernels.isa.target import ARCHITECTURES_64, read_triple

#: Bytes from which a constant is one of these. To ask for one takes some 100 nanoseconds, a
#: hundredth of the time in which a kernel reads as much.
LEAST_BYTES = 256 * 1024
#: The function of a library that answers with constants.
PROVIDER = "relayquant_constant"


class MappedExecutable(relax.VMExecutable):
    """An executable of TVM, which `relax.VirtualMachine` and `relayquant.Executor` run, and whose
    `export_library` leaves large constants in the file.
    """

    def __init__(self, executable: Any, lowered: tvm.IRModule, target: Target) -> None:
        super().__init__(executable.mod)
        self._lowered, self._target = lowered, target

    def export_library(self, file_name: Any, *, addons: Any = None, **options: Any) -> Any:
        """Write a shared library; arguments as those of `tvm.runtime.Executable`."""
        constants = find_large_constants(self._lowered)
        if not constants or not can_map(self._lowered, self._target):
            with writing(file_name):
                return super().export_library(file_name, addons=addons, **options)
        (kernels,) = self.mod.imports
        called = call_provider(self._lowered, constants)
        with open_temporary_folder() as folder:
            described = str(kernels["_get_target_string"]())
            compiled = write_constants([*constants.values()], self._target, described, folder)
            mapped = build_bytecode(called, self._target, kernels)
            addons = [*(addons or []), str(compiled)]
            with writing(file_name):
                return mapped.export_library(file_name, addons=addons, **options)


def can_map(mod: tvm.IRModule, target: Target) -> bool:
    """Whether libraries for the target can hold constants so: 64-bit x86 or Arm with Linux, not to
    be linked statically, where a second module's constants would have the same names.
    """
    if target.kind.name != "llvm" or "system_lib_prefix" in (mod.attrs or {}):
        return False
    architecture, *system = read_triple(target).split("-")
    return architecture in ARCHITECTURES_64 and "linux" in system


def find_large_constants(mod: tvm.IRModule) -> dict[int, GenericConst]:
    """Address of the values -> constant, for the large ones that kernels of a lowered module read;
    equal addresses are one constant.
    """
    found: dict[int, GenericConst] = {}

    def visit(expr: relax.Expr) -> None:
        if is_kernel_call(mod, expr):
            found.update({key: arg for arg in expr.args if (key := find_key(arg)) is not None})

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return found


def is_kernel_call(mod: tvm.IRModule, expr: relax.Expr) -> bool:
    """Whether `expr` calls a function of TIR. What others get may become a result of the module,
    which belongs to the caller and is not to end with the library.
    """
    return (
        isinstance(expr, Call)
        and isinstance(expr.op, tvm.ir.GlobalVar)
        and isinstance(mod[expr.op], tvm.tirx.PrimFunc)
    )


def find_key(expr: relax.Expr) -> int | None:
    """The address of a constant's values if it is a large one."""
    if not isinstance(expr, GenericConst) or not isinstance(expr.value, tvm.runtime.Tensor):
        return None
    tensor = expr.value
    size = np.prod(tensor.shape, dtype="int64") * tensor.dtype.itemsize
    return tensor.data_ptr() if size >= LEAST_BYTES else None


def call_provider(mod: tvm.IRModule, constants: Mapping[int, GenericConst]) -> tvm.IRModule:
    """The lowered module whose kernels get those constants from the provider, by their order."""
    numbers = {key: i for i, key in enumerate(constants)}
    mutator = ProviderCalls(mod, numbers)
    functions = {
        gvar: mutator.visit_expr(func) if isinstance(func, relax.Function) else func
        for gvar, func in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


@relax.expr_functor.mutator
class ProviderCalls(relax.PyExprMutator):
    """kernel(x, constant, y)  ->  w = relayquant_constant(number); kernel(x, w, y)"""

    def __init__(self, mod: tvm.IRModule, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self.mod, self.numbers = mod, numbers

    def visit_call_(self, op: Call) -> relax.Expr:
        if not is_kernel_call(self.mod, op):
            return super().visit_call_(op)
        return Call(op.op, [self.provide(arg) for arg in op.args], op.attrs, op.ty_args)

    def provide(self, expr: relax.Expr) -> relax.Expr:
        number = self.numbers.get(find_key(expr) or 0)
        if number is None:
            return self.visit_expr(expr)
        index = relax.prim_value(number)
        return self.builder_.emit(Call(relax.ExternFunc(PROVIDER), [index], None, [expr.ty]))


# ---------------------------------------------------------------- the data of a library


def write_constants(
    constants: Sequence[GenericConst], target: Target, described: str, folder: Path
) -> Path:
    """Object file with the constants and their provider (`mapped.ll`); LLVM writes it, as it does
    that of the kernels, so that a linker is all that is needed behind it. `described`: the
    target in its words.
    """
    data, source, compiled = (folder / f"constants.{end}" for end in ("bin", "ll", "o"))
    starts, end = [], 0
    with writing(data, TEMPORARY), data.open("wb") as file:
        for constant in constants:
            file.write(bytes(-end % ALIGNMENT))
            starts.append(end + -end % ALIGNMENT)
            values = view_constant(constant.value)
            file.write(values.reshape(-1).view("uint8").data)
            end = starts[-1] + values.nbytes
    write_text(source, format_source(constants, starts, target, described, data))
    tvm.runtime.load_module(str(source)).write_to_file(str(compiled))
    return compiled


def format_source(
    constants: Sequence[GenericConst],
    starts: Sequence[int],
    target: Target,
    described: str,
    data: Path,
) -> str:
    """`mapped.ll` for constants that begin at `starts` of a file."""
    text = importlib.resources.files(__package__).joinpath("mapped.ll").read_text("utf-8")
    shapes, tensors = [], []
    for i, (constant, start) in enumerate(zip(constants, starts, strict=True)):
        tensor = constant.value
        sizes = [int(size) for size in tensor.shape]
        extents = ", ".join(f"i64 {size}" for size in sizes)
        shapes.append(f"@shape{i} = private constant [{len(sizes)} x i64] [{extents}]")
        kind = tensor.dtype
        tensors.append(
            "%managed { %tensor { "
            f"ptr getelementptr (i8, ptr @relayquant_data, i64 {start}), i32 1, i32 0, "
            f"i32 {len(sizes)}, i8 {int(kind.type_code)}, i8 {kind.bits}, i16 {kind.lanes}, "
            f"ptr @shape{i}, ptr null, i64 0 }}, ptr null, ptr null }}"
        )
    return text.format(
        triple=read_triple(target),
        target=escape(described),
        alignment=ALIGNMENT,
        path=escape(quote(str(data))),
        provider=PROVIDER,
        shapes="\n".join(shapes),
        count=len(tensors),
        tensors=",\n    ".join(tensors),
    )


def quote(text: str) -> str:
    """`text` as it stands between quotation marks of an assembler."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def escape(text: str) -> str:
    """`text` as it stands between quotation marks of LLVM's language."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}"
        for byte in text.encode()
    )
