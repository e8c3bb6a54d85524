"""Rules -> kernels: the one way in which operators of a module become calls of kernels.

    v1 = op(x); v2 = op'(v1, y)    ->    v2 = call_tir(kernel, x, constants, y)

Each module `lower_*` of a family of kernels has a list of rules. A rule reads values of a
`BlockView` and returns `Lowered`, or the reason why it declines.
`lower_functions` does the rest: it tries the rules at every value, builds each kernel once and
rewrites the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import tvm_ffi
from tvm import relax, te
from tvm.ir import BaseFunc, Call, GlobalVar, IRModule, TupleType
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import IS_SCHEDULED
from relayquant.codegen.kernels.expansion import Expanded
from relayquant.codegen.kernels.in_place import can_overwrite, overwrite_operand
from relayquant.codegen.library.expanded_weights import call_expansion
from relayquant.ir.dialect.cost import MACS_ATTR, count_macs
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.dialect.loops import OPAQUE
from relayquant.ir.rewrite.constants import hash_array
from relayquant.ir.rewrite.expressions import FunctionGraph, list_reads, op_name
from relayquant.ir.rewrite.function import add_functions, list_functions
from relayquant.ir.rewrite.rule import Rule, fire_first, select_rules

#: An operand of a kernel: a value of the graph, or a constant made for the kernel.
Operand = relax.Expr | np.ndarray | Expanded


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel before it is built. Kernels with equal name and specification become one function.

    Attributes:
        name: Name of the function in the module.
        spec: What the kernel computes: all that `build` depends on.
        build: Makes the function.
    """

    name: str
    spec: Hashable
    build: Callable[[], PrimFunc]

    @staticmethod
    def of(func: PrimFunc) -> Kernel:
        """Wrap a function that is already built. Structurally equal functions become one."""
        return Kernel(str(func.attrs["global_symbol"]), func, lambda: func)

    @cached_property
    def func(self) -> PrimFunc:
        """The function, built once."""
        return self.build()


@dataclass(frozen=True, eq=False)
class ElementFunction:
    """A value that is a function of the elements of another one.

    It is no kernel: FuseOps merges it with what computes the other value, and both are scheduled
    together.

    Attributes:
        result: The value.
        operand: The other one, of the same shape.
        compute: The function, of tensors.
    """

    result: relax.Var
    operand: relax.Var
    compute: Callable[[te.Tensor], te.Tensor]


@dataclass(frozen=True, eq=False)
class Lowered:
    """Result of a rule: values that one call of a kernel computes.

    Attributes:
        vars: The values. The last one is the result, the others become part of the kernel.
        kernel: The kernel that computes them.
        operands: Arguments of the kernel before the results.
        results: Values that others read, if there are several. The kernel has an output for each of
            their tensors, in this order. The call is placed where the first one is bound.
        before: Other kernels that run first, for example to pack weights at run time.
        functions: Values of other operands that are computed first.
        concat: Concatenation that has the result as an input. The kernel writes the result into it.
            If the concatenation is the result, the kernel copies the operands into it.
        changed: Position of the operand that the kernel changes. The changed operand is the result.
            None: the kernel writes a new tensor.
        stored: Variable of another dtype that holds the result. Only kernels read it. None: the
            last of `vars`.
    """

    vars: tuple[relax.Var, ...]
    kernel: Kernel
    operands: tuple[Operand, ...]
    results: tuple[relax.Var, ...] = ()
    before: tuple[Lowered, ...] = ()
    functions: tuple[ElementFunction, ...] = ()
    concat: relax.Var | None = None
    stored: relax.Var | None = None
    changed: int | None = None

    @property
    def output(self) -> relax.Var:
        """The variable that holds the result."""
        return self.vars[-1] if self.stored is None else self.stored

    @property
    def first(self) -> relax.Var:
        """The value at whose binding the call is placed."""
        return self.results[0] if self.results else self.vars[-1]


def mark_opaque(mod: IRModule, names: Collection[str]) -> IRModule:
    """Mark functions that FuseOps must not fuse with anything. The same module without names."""
    marked = {
        gv: func.with_attr("op_pattern", OPAQUE)
        for gv, func in mod.functions.items()
        if gv.name_hint in names
    }
    return add_functions(mod, marked) if marked else mod


def mark_kernel(func: PrimFunc, macs: int) -> BaseFunc:
    """Mark a finished kernel with its number of multiply-adds, `macs`.

    No pass fuses or schedules it, and the module chooses its name.
    """
    # Opaque: FuseTIR cannot merge a kernel that has no blocks with its neighbours.
    marks = {"op_pattern": OPAQUE, IS_SCHEDULED: True, MACS_ATTR: macs}
    return func.without_attr("global_symbol").with_attrs(marks)


class KernelTable:
    """The kernels and the packed constants of one module, each made once."""

    def __init__(self, mod: IRModule) -> None:
        self.builder = relax.BlockBuilder(mod)
        self._kernels: dict[tuple[str, Hashable, bool], GlobalVar] = {}
        self._can_overwrite: dict[tuple[str, Hashable], bool] = {}
        self._packed: dict[Hashable, tuple[relax.Expr, ...]] = {}
        self._constants: dict[Hashable, relax.Expr] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no kernel was added."""
        return not self._kernels

    def get(self, kernel: Kernel, macs: int, in_place: bool = False) -> GlobalVar:
        """Return the function of a kernel in the module. Its attribute MACS_ATTR is `macs`.

        `in_place`: the function stores the result over the last operand; see `can_overwrite`.
        """
        key = kernel.name, kernel.spec, in_place
        if key not in self._kernels:
            func = overwrite_operand(kernel.func) if in_place else kernel.func
            self._kernels[key] = self.builder.add_func(mark_kernel(func, macs), kernel.name)
        return self._kernels[key]

    def can_overwrite(self, kernel: Kernel) -> bool:
        """Whether a kernel may store its result over the last operand."""
        key = kernel.name, kernel.spec
        if key not in self._can_overwrite:
            self._can_overwrite[key] = can_overwrite(kernel.func)
        return self._can_overwrite[key]

    def pack(
        self, key: Hashable, make: Callable[[], Iterable[np.ndarray]]
    ) -> tuple[relax.Expr, ...]:
        """Make constants once for all calls with the same `key`."""
        if key not in self._packed:
            self._packed[key] = tuple(relax.const(array) for array in make())
        return self._packed[key]

    def share(self, array: np.ndarray) -> relax.Expr:
        """Return a constant of an array. Equal arrays become one constant.

        Each call of a kernel packs its weights, and the steps of a recurrent layer have the same.
        """
        array = np.asarray(array, order="C")  # not `ascontiguousarray`: () would become (1,)
        key = str(array.dtype), array.shape, hash_array(array)
        if key not in self._constants:
            self._constants[key] = relax.const(array, str(array.dtype))
        return self._constants[key]


@dataclass(frozen=True, eq=False)
class BlockView:
    """A block as rules see it: its calls, their readers, and the values already taken.

    Attributes:
        graph: The function of the block.
        bindings: The bindings of the block.
        table: Kernels and constants made for the module so far.
        taken: Values that a kernel already computes. For example, a sum of two products belongs to
            the kernel of one product.
        placed: Concatenation -> its inputs that kernels write in place.
    """

    graph: FunctionGraph
    bindings: Sequence[relax.Binding]
    table: KernelTable
    taken: set[relax.Var] = field(default_factory=set)
    placed: dict[relax.Var, set[relax.Var]] = field(default_factory=dict)

    @cached_property
    def values(self) -> dict[relax.Var, relax.Expr]:
        """Bound variable -> its value, for this block."""
        return {b.var: b.value for b in self.bindings if not isinstance(b, relax.MatchCast)}

    def call_of(self, expr: relax.Expr, /) -> Call | None:
        """Return the call that computes a value, in this block or before it."""
        if not isinstance(expr, relax.Var):
            return None
        value = self.values.get(expr)
        return value if isinstance(value, Call) else self.graph.call_of(expr)

    def only_user(self, var: relax.Var, /) -> relax.Var | None:
        """Return the only value that reads `var`, if it is in this block."""
        user = self.graph.only_user(var)
        return user if user in self.values else None

    def users_of(self, var: relax.Var) -> list[relax.Var]:
        """List the values of this block that read `var`, once for each read."""
        return [user for user in self.graph.users_of(var) if user in self.values]

    def is_free(self, var: relax.Var) -> bool:
        """Whether no kernel computes the value so far."""
        return var not in self.taken

    def claim(self, lowered: Lowered) -> None:
        """Record the values and concatenations that a rule takes."""
        self.taken.update(lowered.vars)
        for part in (*lowered.before, lowered):
            if part.concat is not None:
                self.placed.setdefault(part.concat, set()).add(part.vars[-1])


ContextT = TypeVar("ContextT")
KernelRule = Rule[ContextT, relax.Var, Lowered]


def lower_functions(
    mod: IRModule,
    rules: Sequence[KernelRule[ContextT]],
    make_context: Callable[[BlockView], ContextT],
    *,
    refine: Callable[[list[Lowered], BlockView], list[Lowered]] = lambda calls, _: calls,
    in_any_block: bool = False,
    only: str | None = None,
) -> IRModule:
    """Replace the values that rules take by calls of kernels. Names and types stay.

    A module that calls no operator of a rule is returned as it is.

    Args:
        mod: Not changed.
        rules: Tried at every value in order. The first rule that takes the value wins.
        make_context: Makes the context that rules get with each value.
        refine: Chooses other kernels for the calls of a block, which it sees together.
        in_any_block: Whether blocks that are not dataflow blocks, and branches, are rewritten too.
        only: Name of the one function to lower. None: all functions.
    """
    if not any(select_rules(rules, name) for name in {op_name(call) for call in list_calls(mod)}):
        return mod
    table = KernelTable(mod)

    def lower_block(graph: FunctionGraph, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        block = BlockView(graph, bindings, table)
        calls = refine(claim_values(block, rules, make_context(block)), block)
        return BlockEmitter(block, calls).run()

    def lower_blocks(graph: FunctionGraph, body: relax.SeqExpr) -> relax.SeqExpr:
        blocks = []
        for block in body.blocks:
            if isinstance(block, relax.DataflowBlock):
                block = relax.DataflowBlock(drop_unread(lower_block(graph, block.bindings)))
            elif in_any_block:
                inner = [lower_branches(graph, binding) for binding in block.bindings]
                block = relax.BindingBlock(lower_block(graph, inner))
            blocks.append(block)
        return relax.SeqExpr(blocks, body.body)

    def lower_branches(graph: FunctionGraph, binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if not isinstance(value, relax.If):
            return binding
        branches = lower_blocks(graph, value.true_branch), lower_blocks(graph, value.false_branch)
        lowered = table.builder.normalize(relax.If(value.cond, *branches))
        return relax.VarBinding(binding.var, lowered)

    for gvar, func in list_functions(mod).items():
        if only in (None, gvar.name_hint) and isinstance(func.body, relax.SeqExpr):
            body = lower_blocks(FunctionGraph(func), func.body)
            new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
            table.builder.update_func(gvar, new)
    if table.is_empty:
        return mod
    mod = relax.transform.Normalize()(table.builder.get())
    relax.analysis.well_formed(mod)
    return mod


def drop_unread(bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
    """Drop the values inside a dataflow block that nothing reads.

    A kernel may read what its operand was computed from.
    """
    kept: list[relax.Binding] = []
    read: set[relax.Var] = set()
    for binding in reversed(bindings):
        is_inner = isinstance(binding.var, relax.DataflowVar)
        if isinstance(binding, relax.MatchCast) or not is_inner or binding.var in read:
            read.update(list_reads(binding.value))
            kept.append(binding)
    return kept[::-1]


def claim_values(
    block: BlockView, rules: Sequence[KernelRule[ContextT]], context: ContextT
) -> list[Lowered]:
    """Try the rules at every value of a block. Each value is in at most one kernel."""
    found: list[Lowered] = []
    for binding in block.bindings:
        var = binding.var
        if var in block.taken or var not in block.values:
            continue
        chosen = select_rules(rules, op_name(block.values[var]))
        fired = fire_first(((rule, var) for rule in chosen), context, var.name)
        if fired is not None:
            block.claim(fired[1])
            found.append(fired[1])
    return found


class BlockEmitter:
    """Writes the bindings of a block with calls of kernels.

    A concatenation that kernels write into is the whole tensor, written piece by piece:

        concat(f(x), g(x))    ->    t = call_tir(f, x); t' = call_tir_inplace(g, x, t)

    A residual that no later kernel reads becomes the memory of the result, if kernels made and read
    it and nothing else did, which could be a view of it:

        y = f(x, w, r)        ->    y = call_tir_inplace(f', x, w, r)
    """

    def __init__(self, block: BlockView, calls: Sequence[Lowered]) -> None:
        self.block, self.builder = block, block.table.builder
        self.calls = {call.first: call for call in calls}
        #: result of a kernel with several results -> its values
        self.results: dict[relax.Var, list[relax.Expr]] = {}
        self.is_result = {result for call in calls for result in call.results}
        #: concatenation -> number of inputs not written yet; and -> the tensor written so far
        self.missing = {concat: len(block.values[concat].args[0].fields) for concat in block.placed}
        self.written: dict[relax.Var, relax.Var] = {}
        self.bindings: list[relax.Binding] = []
        self.last_reads = find_last_reads(block, self.calls)
        #: tensors that kernels made, of which there is no view
        self.own: set[relax.Var] = set()

    def run(self) -> list[relax.Binding]:
        """Return the new bindings in order."""
        for binding in self.block.bindings:
            var = binding.var
            if var in self.calls:
                self.emit_call(self.calls[var])
            if var in self.is_result:
                self.bind_result(var)
            elif self.block.is_free(var) and var not in self.missing:
                self.bindings.append(binding)
                if is_kernel_call(binding):
                    self.own.add(var)
        return self.bindings

    def bind(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind var = value."""
        self.bindings.append(relax.VarBinding(var, self.builder.normalize(value)))

    def emit_call(self, call: Lowered) -> None:
        """Call a kernel, after the kernels that run before it."""
        for earlier in call.before:
            self.emit_call(earlier)
        for each in call.functions:
            self.bind(each.result, self.builder.call_te(each.compute, each.operand))
        values = self.block.values
        macs = sum(count_macs(values[var]) for var in call.vars if var in values)
        operands = [self.emit_operand(operand, call.vars[-1].name) for operand in call.operands]
        if self.may_overwrite(call, operands) and self.block.table.can_overwrite(call.kernel):
            call = replace(call, changed=len(operands) - 1)
            function = self.block.table.get(call.kernel, macs, in_place=True)
        else:
            function = self.block.table.get(call.kernel, macs)
        if call.concat is not None:
            self.write_part(call, call.concat, function, operands)
        elif call.results:
            self.bind_all(call.results, function, operands)
        elif call.changed is not None:
            value = relax.op.call_tir_inplace(function, operands, call.changed, call.output.ty)
            self.bind(call.output, value)
            if operands[call.changed] in self.own:
                self.own.add(call.output)
        else:
            value = relax.call_tir(function, relax.Tuple(operands), list_types(call.output))
            self.bind(call.output, value)
            self.own.add(call.output)

    def may_overwrite(self, call: Lowered, operands: list[relax.Expr]) -> bool:
        """Whether the last operand is a tensor like the result that nobody reads later.

        A tensor outside the dataflow block may be read there.
        """
        if call.results or call.concat is not None or call.changed is not None or not operands:
            return False
        *others, last = operands
        return (
            isinstance(last, relax.DataflowVar)
            and last in self.own
            and self.last_reads.get(last) is call
            and not any(each.same_as(last) for each in others)
            and tvm_ffi.structural_equal(last.ty, call.output.ty)
        )

    def emit_operand(self, operand: Operand, name: str) -> relax.Expr:
        """Return the argument for an operand of the kernel that computes the value `name`."""
        if isinstance(operand, np.ndarray):
            return self.block.table.share(operand)
        if not isinstance(operand, Expanded):
            return operand
        expansion = self.builder.normalize(call_expansion(operand))
        weights = relax.DataflowVar(f"{name}_weights", expansion.ty)
        self.bind(weights, expansion)
        return weights

    def bind_all(
        self, results: Sequence[relax.Var], function: GlobalVar, operands: list[relax.Expr]
    ) -> None:
        """Bind the tuple of all outputs of a kernel with several results."""
        types = [ty for result in results for ty in list_types(result)]
        outputs = relax.DataflowVar(f"{results[0].name}_outputs", TupleType(types))
        self.bind(outputs, relax.call_tir(function, relax.Tuple(operands), types))
        fields = iter(range(len(types)))
        for result in results:
            self.results[result] = [
                relax.TupleGetItem(outputs, next(fields)) for _ in list_types(result)
            ]

    def bind_result(self, var: relax.Var) -> None:
        """Bind one of several results."""
        fields = self.results[var]
        if not isinstance(var.ty, TupleType):
            self.bind(var, fields[0])
            return
        parts = [relax.DataflowVar(f"{var.name}_{i}", ty) for i, ty in enumerate(list_types(var))]
        for part, value in zip(parts, fields, strict=True):
            self.bind(part, value)
        self.bind(var, relax.Tuple(parts))

    def write_part(
        self, call: Lowered, whole: relax.Var, function: GlobalVar, operands: list[relax.Expr]
    ) -> None:
        """Write one input of a concatenation, or copy all operands, which are inputs.

        The last write binds the whole concatenation.
        """
        var, result = whole, call.vars[-1]
        is_copy = result.same_as(whole)
        self.missing[whole] -= len(operands) if is_copy else 1
        if self.missing[whole]:
            name = f"{whole.name}_part" if is_copy else result.name
            var = relax.DataflowVar(name, whole.ty)
        before = self.written.get(whole)
        if before is None:
            value = relax.call_tir(function, relax.Tuple(operands), whole.ty)
        else:
            at = len(operands)
            value = relax.op.call_tir_inplace(function, [*operands, before], at, whole.ty)
        self.bind(var, value)
        self.written[whole] = var


def is_kernel_call(binding: relax.Binding) -> bool:
    """Whether a binding is a call of a kernel that makes one new tensor."""
    value = getattr(binding, "value", None)
    is_tensor = isinstance(binding.var.ty, relax.TensorType)
    return is_tensor and value is not None and op_name(value) == "relax.call_tir"


def find_last_reads(
    block: BlockView, calls: Mapping[relax.Var, Lowered]
) -> dict[relax.Var, Lowered | relax.Binding]:
    """Find the call that reads a value last, among kernels and all other readers.

    What is no kernel may make a view, which others read later: then it counts as the last reader.
    """
    found: dict[relax.Var, Lowered | relax.Binding] = {}
    seen: set[relax.Var] = set()

    def read(reader: Lowered | relax.Binding, operands: Iterable[Any]) -> None:
        found.update({each: reader for each in operands if each not in seen})

    def read_all(call: Lowered) -> None:
        for earlier in call.before:
            read_all(earlier)
        read(call, (each for each in call.operands if isinstance(each, relax.Var)))

    for binding in block.bindings:
        if binding.var in calls:
            read_all(calls[binding.var])
        elif block.is_free(binding.var):
            operands = list_reads(binding.value)
            read(binding, operands)
            if not is_kernel_call(binding):
                seen.update(operands)
    return found


def list_types(var: relax.Var) -> list[Any]:
    """Return the types of a value's tensors."""
    return list(var.ty.fields) if isinstance(var.ty, TupleType) else [var.ty]
