"""Compiled module -> shared library that reads large constants directly from the mapped file.

TVM packs the constants of a module with its bytecode and copies them when a library is loaded. Each
constant is then in memory twice, for a moment four times. Here large constants are read-only data
of the library, and its code asks for them by number:

    grouped_dense(x, c[7], y)   ->   w = relayquant_constant(7); grouped_dense(x, w, y)

Processes that load the same library share its pages, and pages that nobody reads are never loaded.
A library needs only the TVM runtime that loads it.

Some kernels read transformed weights, which are four or eight times as large. The file keeps these
weights untransformed. On first use they are expanded into zeroed memory of the library:

    w = relayquant_expand_int16(c[7])   ->   w = relayquant_constant(7)
"""

from __future__ import annotations

import importlib.resources
import json
import platform
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
from relayquant.base.storage.files import open_temporary_folder, write_text, write_whole
from relayquant.codegen.kernels.expansion import Expanded
from relayquant.codegen.kernels.isa.emitted import list_missing_instructions
from relayquant.codegen.kernels.isa.select import describe_products
from relayquant.codegen.kernels.isa.target import (
    Architecture,
    find_architecture,
    may_use_system,
    read_cpu,
    read_triple,
    resolve_target,
)
from relayquant.codegen.library.description import describe_module, write_description
from relayquant.codegen.library.expanded_weights import expand_weights, read_expansion
from relayquant.codegen.library.linking import choose_linker, write_library, write_object
from relayquant.codegen.library.llvm_text import escape
from relayquant.codegen.library.object_file import AARCH64, X86_64, writing_object
from relayquant.errors import ConfigError
from relayquant.ir.rewrite.function import list_functions, map_functions

#: Smallest size in bytes of a large constant. Asking for one takes some 100 nanoseconds, a
#: hundredth of the time a kernel needs to read it.
LEAST_BYTES = 256 * 1024
#: Function of a library that returns its constants.
PROVIDER = "relayquant_constant"
#: Symbol of the constants' data.
DATA = "relayquant_data"
#: Source of a constant that is stored as kernels read it.
NO_SOURCE = "%source zeroinitializer"

#: A constant of a library, either stored as kernels read it or expanded from stored weights.
Large = GenericConst | Expanded


class MappedExecutable(relax.VMExecutable):
    """An executable of TVM whose `export_library` leaves large constants in the file.

    `relax.VirtualMachine` and `relayquant.Executor` run it.
    """

    def __init__(self, executable: Any, lowered: tvm.IRModule, target: Target) -> None:
        super().__init__(executable.mod)
        self._lowered, self.target = lowered, target

    def jit(self, **options: Any) -> Any:
        """Link the module into this process. The arguments are the same as for
        `tvm.runtime.Executable`.

        Raises:
            ConfigError: it was compiled for another kind of CPU, or for one with instructions that
                this one lacks.
        """
        host = resolve_target(None)
        if find_architecture(self.target) is not find_architecture(host):
            raise ConfigError(
                f"The module was compiled for {read_triple(self.target)}; this machine is "
                f"{platform.machine()}. Compile it for this machine, relayquant.compile(mod), or "
                "write it with export_library(path) and run it there.",
                code="RQ107",
            )
        missing = list_missing_instructions(self.target, host)
        if missing:
            raise ConfigError(
                f"The module was compiled for {read_cpu(self.target)}; this machine lacks "
                f"{', '.join(missing[:5])}, which it may use. Compile it for this machine, "
                "relayquant.compile(mod), or write it with export_library(path) and run it there.",
                code="RQ107",
            )
        return super().jit(**options)

    def describe(self) -> str:
        """Describe in one line how this process multiplies bytes if it runs the executable.

        A process that may not use the tiles of AMX runs the same kernels on vectors.
        """
        return describe_products(self.target)

    def describe_interface(self) -> dict[str, Any]:
        """Describe functions and target as plain data, see `describe_module`. The library carries
        this description.
        """
        return describe_module(self._lowered, self.target)

    def export_library(self, file_name: Any, *, addons: Any = None, **options: Any) -> Any:
        """Write a shared library. The arguments are the same as for `tvm.runtime.Executable`.

        The linker of another system, such as aarch64-linux-gnu-g++, is found if it is installed.
        The library is written beside `file_name` and renamed, so a process that has loaded the old
        one keeps it, and no incomplete file stays.

        Raises:
            FileError: the file cannot be written.
            ModelError: its constants are more than a library for this architecture holds.
            MissingDependencyError: there is no linker for the target. The message says what to
                install.
        """
        if options.get("fcompile") is None:
            options["fcompile"] = choose_linker(self.target, str(file_name))
        addons = [*(addons or [])]

        def write(temporary: Path) -> None:
            write_library(mapped.mod, temporary, folder, addons=addons, **options)

        with open_temporary_folder() as folder:
            if can_describe(self._lowered, self.target):
                text = json.dumps(self.describe_interface())
                addons.append(str(write_description(text, self.target, folder)))
            mapped = self.map_constants(addons, folder)
            write_whole(Path(file_name), write)

    def map_constants(self, addons: list[str], folder: Path) -> relax.VMExecutable:
        """Return an executable whose large constants are in an object file, which is added to
        `addons`. Without large constants, nothing is added.

        It is always a new one. A virtual machine writes an empty memory scope for each constant
        into the executable that it runs. A library with scopes prints a warning for each of them
        when it is saved, and again in every process that loads it.
        """
        # TVM adds an empty file of C where there are no kernels, and again when it links anew.
        libraries = [each for each in self.mod.imports if each.kind != "c"]
        lowered, constants = self._lowered, {}
        if can_map(lowered, self.target):
            constants = find_large_constants(lowered)
        if constants:
            (kernels,) = libraries
            described = str(kernels["_get_target_string"]())
            sources = [*constants.values()]
            addons += map(str, write_constants(sources, self.target, described, folder))
            lowered = call_provider(lowered, constants)
        return build_bytecode(expand_weights(lowered), self.target, libraries)


def can_describe(mod: tvm.IRModule, target: Target) -> bool:
    """Whether libraries can carry a description. Not if they are linked statically: the symbols of
    two modules would have the same name.
    """
    return target.kind.name == "llvm" and "system_lib_prefix" not in (mod.attrs or {})


def can_map(mod: tvm.IRModule, target: Target) -> bool:
    """Whether libraries for the target can map constants: 64-bit x86 or Arm with Linux.

    Libraries that are linked statically cannot, since the constants of a second module would have
    the same names.
    """
    return may_use_system(target, mod)


def find_large_constants(mod: tvm.IRModule) -> dict[int, Large]:
    """Find the large constants that kernels of a lowered module read.

    Returns:
        Address of the values -> constant. Constants with equal addresses are one constant. A
            constant also counts as large if it is large only after expansion.
    """
    found: dict[int, Large] = {}

    def visit(expr: relax.Expr) -> None:
        expansion = read_expansion(expr)
        if expansion is not None and expansion.byte_count >= LEAST_BYTES:
            found[find_constant_address(expr.args[0])] = expansion
        elif is_kernel_call(mod, expr):
            found.update({key: arg for arg in expr.args if (key := find_key(arg)) is not None})

    for func in list_functions(mod).values():
        relax.analysis.post_order_visit(func, visit)
    return found


def is_kernel_call(mod: tvm.IRModule, expr: relax.Expr) -> bool:
    """Whether `expr` calls a TIR function.

    A constant passed to anything else may become a result of the module. Results belong to the
    caller and must outlive the library.
    """
    return (
        isinstance(expr, Call)
        and isinstance(expr.op, tvm.ir.GlobalVar)
        and isinstance(mod[expr.op], tvm.tirx.PrimFunc)
    )


def find_key(expr: relax.Expr) -> int | None:
    """Return the address of a constant's values if it is large, else None."""
    if not isinstance(expr, GenericConst) or not isinstance(expr.value, tvm.runtime.Tensor):
        return None
    tensor = expr.value
    size = np.prod(tensor.shape, dtype="int64") * tensor.dtype.itemsize
    return find_constant_address(expr) if size >= LEAST_BYTES else None


def find_constant_address(constant: GenericConst) -> int:
    """Return the address of a constant's values."""
    return constant.value.data_ptr()


def call_provider(mod: tvm.IRModule, constants: Mapping[int, Large]) -> tvm.IRModule:
    """Make the kernels of a lowered module get these constants from the provider.

    Constants are numbered in their order.
    """
    numbers = {key: i for i, key in enumerate(constants)}
    return map_functions(mod, ProviderCalls(mod, numbers).visit_expr)


@relax.expr_functor.mutator
class ProviderCalls(relax.PyExprMutator):
    """kernel(x, constant, y)  ->  w = relayquant_constant(number); kernel(x, w, y)

    w = relayquant_expand_int16(constant)  ->  w = relayquant_constant(number)
    """

    def __init__(self, mod: tvm.IRModule, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self.mod, self.numbers = mod, numbers

    def visit_call_(self, op: Call) -> relax.Expr:
        if read_expansion(op) is not None:
            call = self.ask(find_constant_address(op.args[0]), op.ty)
            return op if call is None else call
        if not is_kernel_call(self.mod, op):
            return super().visit_call_(op)
        return Call(op.op, [self.provide(arg) for arg in op.args], op.attrs, op.ty_args)

    def provide(self, expr: relax.Expr) -> relax.Expr:
        call = self.ask(find_key(expr) or 0, expr.ty)
        return self.visit_expr(expr) if call is None else self.builder_.emit(call)

    def ask(self, key: int, ty: Any) -> Call | None:
        """Make the call that returns the constant at this address.

        None if the provider does not have it.
        """
        number = self.numbers.get(key)
        if number is None:
            return None
        return Call(relax.ExternFunc(PROVIDER), [relax.prim_value(number)], None, [ty])


# ---------------------------------------------------------------- the data of a library


def write_constants(
    constants: Sequence[Large], target: Target, described: str, folder: Path
) -> list[Path]:
    """Write object files with the constants and with their provider (`mapped.ll`), so that only a
    linker is needed afterwards. `described`: the target as LLVM describes it.

    Raises:
        FileError: there is no space for them.
        ModelError: they are too large for a library.
    """
    data, source = folder / "data.o", folder / "constants.ll"
    section = AARCH64 if find_architecture(target) is Architecture.AARCH64 else X86_64
    starts, end = [], 0
    with writing_object(data, section, DATA, ALIGNMENT) as file:
        for constant in constants:
            file.write(bytes(-end % ALIGNMENT))
            starts.append(end + -end % ALIGNMENT)
            is_expanded = isinstance(constant, Expanded)
            values = constant.taps if is_expanded else view_constant(constant.value)
            file.write(values.reshape(-1).view("uint8").data)
            end = starts[-1] + values.nbytes
    write_text(source, format_source(constants, starts, target, described))
    return [data, write_object(source)]


def format_source(
    constants: Sequence[Large],
    starts: Sequence[int],
    target: Target,
    described: str,
) -> str:
    """Fill in `mapped.ll` for constants that begin at the offsets `starts` of a file."""
    text = importlib.resources.files(__package__).joinpath("mapped.ll").read_text("utf-8")
    shapes, tensors, sources, end = [], [], [], 0
    for i, (constant, start) in enumerate(zip(constants, starts, strict=True)):
        values, source = f"ptr getelementptr (i8, ptr @{DATA}, i64 {start})", NO_SOURCE
        if isinstance(constant, Expanded):
            source = f"%source {{ {values}, ptr @{constant.rule.name}, i64 {constant.columns} }}"
            values = f"ptr getelementptr (i8, ptr @memory, i64 {end})"
            end += constant.byte_count + -constant.byte_count % ALIGNMENT
        sizes, kind = read_type(constant)
        extents = ", ".join(f"i64 {size}" for size in sizes)
        shapes.append(f"@shape{i} = private constant [{len(sizes)} x i64] [{extents}]")
        sources.append(source)
        tensors.append(
            f"%managed {{ %tensor {{ {values}, i32 1, i32 0, "
            f"i32 {len(sizes)}, i8 {int(kind.type_code)}, i8 {kind.bits}, i16 {kind.lanes}, "
            f"ptr @shape{i}, ptr null, i64 0 }}, ptr null, ptr null }}"
        )
    expanders = sorted({each.rule.name for each in constants if isinstance(each, Expanded)})
    return text.format(
        triple=read_triple(target),
        target=escape(described),
        alignment=ALIGNMENT,
        data=DATA,
        provider=PROVIDER,
        shapes="\n".join(shapes),
        count=len(tensors),
        tensors=",\n    ".join(tensors),
        sources=",\n    ".join(sources),
        bytes=end,
        expanders="\n".join(f"declare hidden i32 @{name}(ptr, ptr, i64)" for name in expanders),
    )


def read_type(constant: Large) -> tuple[list[int], Any]:
    """Return shape and dtype of the tensor that a kernel reads."""
    if isinstance(constant, Expanded):
        return [constant.size], tvm.DataType(constant.rule.dtype)
    return [int(size) for size in constant.value.shape], constant.value.dtype
