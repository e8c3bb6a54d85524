"""Lowered module -> the same module, whose functions check their inputs once, before anything runs.

    main(x, w): a = kernel(x, w); ...   ->   main(x, w): main_inputs(x, w); a = kernel(x, w); ...

TVM's virtual machine compares types and shapes. It leaves to each kernel to check that a tensor is
compact. These checks are half of the code that LLVM has to translate for a small kernel. Nobody
checks that the data begin at an aligned address, as vector code needs, so a slice of a PyTorch
tensor would end the process. Kernels that only read checked inputs, constants and results of the
module need no checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, GlobalVar, PrimType, StringImm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer
from tvm.target import Target

from relayquant.base.runtime import ALIGNMENT
from relayquant.codegen.kernels.isa.target import ARCHITECTURES_64, read_triple
from relayquant.codegen.library.host_functions import IS_INNER
from relayquant.ir.rewrite.expressions import list_bindings, op_name
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.inline import substitute

#: Operators whose result uses the memory of their first argument.
VIEWS = frozenset(["relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset"])


def create_input_checks(target: Target) -> Any:
    """Make the rewrite as a pass, between LegalizeOps and CallTIRRewrite."""

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return check_inputs(mod, target) if target.kind.name == "llvm" else mod

    return tvm.transform.module_pass(run, opt_level=0, name="relayquant.check_inputs")


def check_inputs(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Add a check to every public Relax function, and mark kernels without checks as `IS_INNER`."""
    mask = "int64" if read_triple(target).split("-")[0] in ARCHITECTURES_64 else "int32"
    builder, given = relax.BlockBuilder(mod), dict[GlobalVar, bool]()
    for gv, func in list_functions(mod).items():
        is_public = "global_symbol" in (func.attrs or {})
        checked = [p for p in func.params if is_public and is_known_tensor(p.ty)]
        for kernel, is_inner in list_kernel_calls(mod, func, checked):
            given[kernel] = given.get(kernel, True) and is_inner
        if checked:
            kernel = builder.add_func(
                make_check(gv.name_hint, checked, mask), f"{gv.name_hint}_inputs"
            )
            builder.update_func(gv, call_first(func, kernel, checked))
    for gv, func in mod.functions_items():
        is_own = "global_symbol" not in (func.attrs or {})  # others may call it by name
        if given.get(gv) and is_own and not has_asserts(func):
            builder.update_func(gv, func.with_attr(IS_INNER, True))
    return builder.get()


def is_known_tensor(ty: tvm.ir.Type) -> bool:
    """Whether a type is a tensor type with known dtype and rank."""
    return isinstance(ty, relax.TensorType) and ty.dtype is not None and ty.ndim >= 0


def list_kernel_calls(
    mod: tvm.IRModule, func: relax.Function, checked: list[relax.Var]
) -> Iterator[tuple[GlobalVar, bool]]:
    """List the kernel of each call, with whether all its arguments are known to be valid."""
    known = set(checked)

    def is_known(expr: relax.Expr) -> bool:
        if isinstance(expr.ty, PrimType):  # a size
            return True
        if isinstance(expr, relax.Var):
            return expr in known
        if isinstance(expr, relax.Tuple):
            return all(map(is_known, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return is_known(expr.tuple_value)
        if isinstance(expr, Call) and op_name(expr) in VIEWS:
            return is_known(expr.args[0])
        return isinstance(expr, GenericConst)

    for binding in list_bindings(func):
        value = binding.value
        if isinstance(value, Call) and op_name(value) == "relax.call_tir":
            kernel: Any = value.args[0]
            yield kernel, is_known(value.args[1]) and has_sizes(mod[kernel], value)
            known.add(binding.var)
        elif is_known(value):
            known.add(binding.var)
        for branch in list_branches(value):
            # outer values that a branch reads are known in this function only
            yield from ((called, False) for called, _ in list_kernel_calls(mod, branch, []))


def has_sizes(func: Any, call: Call) -> bool:
    """Whether the types alone prove that the arguments of a call have the sizes its kernel expects.

    Known sizes have to be equal. A size variable has to have the same value everywhere.
    """
    analyzer = Analyzer()
    operands = list(call.args[1].fields if isinstance(call.args[1], relax.Tuple) else call.args[1:])
    results = list(call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty])
    types = [*(operand.ty for operand in operands), *results]
    if len(call.args) > 2 or len(func.params) != len(types):
        return False
    is_size = [isinstance(ty, PrimType) for ty in types]
    given = zip(func.params, operands, is_size, strict=False)
    sizes = {param: operand for param, operand, is_number in given if is_number}
    for param, ty, is_number in zip(func.params, types, is_size, strict=True):
        if is_number:
            continue
        found = getattr(getattr(ty, "shape", None), "values", None)
        if not isinstance(param, tirx.Buffer) or found is None or len(found) != len(param.shape):
            return False
        for wanted, size in zip(param.shape, found, strict=True):
            if isinstance(wanted, tirx.Var):
                sizes.setdefault(wanted, size)
            if not analyzer.can_prove_equal(substitute(wanted, sizes), size):
                return False
    return True


def list_branches(expr: relax.Expr) -> list[Any]:
    """Return the functions inside an expression: branches of an If, or the expression itself."""
    if isinstance(expr, relax.If):
        parts = [expr.true_branch, expr.false_branch]
        return [relax.Function([], part, is_pure=False) for part in parts]
    return [expr] if isinstance(expr, relax.Function) else []


def has_asserts(func: Any) -> bool:
    """Whether a kernel has assertions in its body."""
    found = []
    tvm_ffi.structural_walk(func.body, (tirx.AssertStmt, found.append))
    return bool(found)


def make_check(function: str, params: list[relax.Var], mask: str) -> tirx.PrimFunc:
    """Make a PrimFunc that fails unless the inputs of a function are compact and aligned.

    TVM adds the check that they are compact. `mask` is the dtype of addresses.
    """
    with IRBuilder() as builder, T.prim_func():
        T.func_name(function)
        T.func_attr({"tirx.noalias": True})
        # no alignment is declared, or LLVM would assume it and drop the check
        buffers = [T.arg(p.name, T.Buffer(*declare_tensor(p.ty), align=1)) for p in params]
        for param, buffer in zip(params, buffers, strict=True):
            low = tirx.const(ALIGNMENT - 1, mask)
            rest = T.call_llvm_pure_intrin("handle", "llvm.ptrmask", buffer.data, low)
            message = (
                f"input {param.name!r} of {function!r}: its data do not begin at a multiple "
                f"of {ALIGNMENT} bytes, as a slice may do. Pass a copy: x.clone() for a PyTorch "
                "tensor, or tvm.runtime.tensor(x)"
            )
            T.add_to_parent(
                tirx.AssertStmt(T.isnullptr(rest), StringImm("ValueError"), [StringImm(message)])
            )
    func: Any = builder.get()
    return func


def declare_tensor(ty: relax.TensorType) -> tuple[list[Any], str]:
    """Return shape and dtype of a buffer. Each size known at run time becomes a new variable."""
    values = getattr(ty.shape, "values", None) or [None] * ty.ndim
    sizes = [int(v) if isinstance(v, tirx.IntImm) else T.int64() for v in values]
    return sizes, str(ty.dtype)


def call_first(func: relax.Function, kernel: GlobalVar, params: list[relax.Var]) -> relax.Function:
    """Add a call of the kernel at the beginning of a function."""
    nothing = relax.TupleType([])
    call = Call(kernel, params, None, [nothing])
    binding = relax.VarBinding(relax.Var("_", nothing), call)
    body = func.body
    blocks = [relax.BindingBlock([binding]), *body.blocks]
    checking = relax.SeqExpr(blocks, body.body)
    return relax.Function(func.params, checking, func.ret_ty, func.is_pure, func.attrs)
