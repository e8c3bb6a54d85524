"""Expert stacks: a module with stacked matrices -> separate matrices and tables. It runs before
weights are searched for.

A product with a stack becomes one product per matrix:

    y = matmul(x, w)  ->  y = concat([matmul(x[..., 0:1, :, :], w0),
                                      matmul(x[..., 1:2, :, :], w1), ...], axis=-3)

x is (..., E, M, K) and w (E, K, N), or the transpose of (E, N, K). Data that all experts read,
(..., 1, M, K) or (M, K), is not cut. w0, w1, ... are parameters. They are views of w.

Matrices that are gathered by expert index become rows of a table, with one matrix per row:

    y = take(w, i, axis=0)  ->  y = reshape(take(rows, i, axis=0), (*shape of i, K, N))

rows, (E, K * N), is a parameter too, a view of w. The readers of y stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.flow.compression.find import follow_swaps
from relayquant.flow.compression.sources import (
    SourceKey,
    WeightSource,
    read_constant,
)
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.graph import call_name

#: axis of the experts in data and results, counted from the end
STACK_AXIS = -3
#: index in the key of a stack that is used as a table, instead of a matrix index
WHOLE = -1


def split_experts(
    mod: tvm.IRModule, params: Mapping[relax.Var, WeightSource]
) -> tuple[tvm.IRModule, dict[relax.Var, WeightSource]]:
    """Return the module with one product per matrix of a stack and a table for gathered stacks, and
    the values of its parameters.

    A function that other functions call keeps its stacks, because the callers pass its parameters.

    Args:
        params: Values of the functions' parameters; see `open_params`.
    """
    functions, found = dict(mod.functions_items()), dict(params)
    called = {
        var.name_hint
        for func in list_functions(mod).values()
        for var in relax.analysis.all_global_vars(func)
    }
    stacks: dict[SourceKey, list[WeightSource]] = {}
    for gvar, func in list_functions(mod).items():
        if gvar.name_hint in called:
            continue
        splitting = Splitting(func, params, stacks)
        if splitting.stacks_of or splitting.gathers:
            functions[gvar] = splitting.run()
            found.update(splitting.added)
    return tvm.IRModule(functions, attrs=mod.attrs), found


@relax.expr_functor.mutator
class Splitting(relax.PyExprMutator):
    """Splits the products of one function.

    Attributes:
        stacks_of: Variable of a product -> (stack, whether its matrices are transposed on the way).
        gathers: The same for gathered matrices.
    """

    def __init__(
        self,
        func: relax.Function,
        params: Mapping[relax.Var, WeightSource],
        stacks: dict[SourceKey, list[WeightSource]],
    ) -> None:
        super().__init__()
        self.func, self.params, self.stacks = func, params, stacks
        self.values = {binding.var: binding.value for binding in iterate_bindings(func)}
        self.added: dict[relax.Var, WeightSource] = {}
        self.members: dict[SourceKey, list[relax.Var]] = {}
        self.tables: dict[SourceKey, relax.Var] = {}
        self.stacks_of: dict[relax.Var, tuple[WeightSource, bool]] = {}
        self.gathers: dict[relax.Var, tuple[WeightSource, bool]] = {}
        for var, value in self.values.items():
            op = call_name(value) if isinstance(value, Call) else None
            if op == "relax.matmul" and (stack := self.find_stack(value)):
                self.stacks_of[var] = stack
            elif op == "relax.take" and (stack := self.find_gathered(value)):
                self.gathers[var] = stack

    def run(self) -> relax.Function:
        """Return the function with an additional parameter for each matrix."""
        func = self.visit_expr(self.func)
        return relax.Function(
            [*func.params, *self.added], func.body, func.ret_ty, func.is_pure, func.attrs, func.span
        )

    def find_stack(self, call: Call) -> tuple[WeightSource, bool] | None:
        """Return the stack that a product reads, if it can be split."""
        found = self.find_source(call.args[1])
        if found is None:
            return None
        data, kinds = call.args[0], {str(call.ty.dtype), found[0].dtype}
        if {str(data.ty.dtype), *kinds} != {"float32"} or data.ty.ndim < 2:
            return None
        if data.ty.ndim > 2 and count_parts(data) not in (1, found[0].shape[0]):
            return None
        return None if any(found[0].counts) else found

    def find_gathered(self, call: Call) -> tuple[WeightSource, bool] | None:
        """Return the stack that matrices are gathered from, if rows of a table can replace them."""
        found, axis = self.find_source(call.args[0]), call.attrs.axis
        if found is None or axis is None or int(axis) != 0 or found[0].dtype != "float32":
            return None
        is_known = isinstance(call.args[1].ty.shape, relax.ShapeExpr)
        return found if is_known and not any(found[0].counts) else None

    def find_source(self, operand: relax.Expr) -> tuple[WeightSource, bool] | None:
        """Return the stack behind an operand, and whether its matrices are transposed on the
        way.
        """
        found = follow_swaps(self.values, operand)
        if found is None:
            return None
        expr, is_swapped = found
        source = self.params.get(expr) if isinstance(expr, relax.Var) else None
        if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
            source = read_constant(expr.value)
        if source is None or len(source.shape) != 3 or not all(source.shape):
            return None
        return source, is_swapped

    def cut(self, stack: WeightSource) -> list[WeightSource]:
        """Return the matrices of a stack. All functions that read the stack share them."""
        if stack.key not in self.stacks:
            # All values of the stack are usable, so no matrix has to be read again.
            self.stacks[stack.key] = [
                WeightSource(
                    (stack.key, i),
                    stack.shape[1:],
                    stack.dtype,
                    partial(read_part, stack, i),
                    (0, 0),
                )
                for i in range(stack.shape[0])
            ]
        return self.stacks[stack.key]

    def list_members(self, stack: WeightSource, name: str) -> list[relax.Var]:
        """Add a parameter for each matrix, once per function."""
        if stack.key not in self.members:
            parts = self.cut(stack)
            own = {
                relax.Var(f"{name}_expert{i}", relax.TensorType(part.shape, part.dtype)): part
                for i, part in enumerate(parts)
            }
            self.added.update(own)
            self.members[stack.key] = list(own)
        return self.members[stack.key]

    def make_table(self, stack: WeightSource, name: str) -> relax.Var:
        """Add the parameter whose rows are the matrices of a stack, once per function."""
        if stack.key not in self.tables:
            count, rows, columns = stack.shape
            shape = count, rows * columns
            source = WeightSource(
                (stack.key, WHOLE),
                shape,
                stack.dtype,
                partial(read_rows, stack),
                (0, 0),
                is_stack=True,
            )
            var = relax.Var(f"{name}_matrices", relax.TensorType(shape, stack.dtype))
            self.added[var], self.tables[stack.key] = source, var
        return self.tables[stack.key]

    def gather(self, binding: relax.VarBinding) -> None:
        """Bind the matrices that are gathered from a stack."""
        (stack, is_swapped), call = self.gathers[binding.var], binding.value
        table = self.make_table(stack, binding.var.name)
        index = self.visit_expr(call.args[1])
        rows = relax.op.take(table, index, 0, call.attrs.mode)
        rows = self.builder_.emit(rows, f"{binding.var.name}_rows")
        found = relax.op.reshape(rows, [*index.ty.shape.values, *stack.shape[1:]])
        if is_swapped:
            found = self.builder_.emit(found, f"{binding.var.name}_stored")
            axes = [*range(found.ty.ndim)]
            found = relax.op.permute_dims(found, [*axes[:-2], axes[-1], axes[-2]])
        found = self.builder_.normalize(found)
        self.builder_.emit_normalized(relax.VarBinding(binding.var, found))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.gathers:
            self.gather(binding)
            return
        if binding.var not in self.stacks_of:
            super().visit_var_binding_(binding)
            return
        (stack, is_swapped), name = self.stacks_of[binding.var], binding.var.name
        data = self.visit_expr(binding.value.args[0])
        members = self.list_members(stack, name)
        if data.ty.ndim == 2:
            data = self.builder_.emit(relax.op.expand_dims(data, 0), f"{name}_data")
        if count_parts(data) == 1:
            parts = [data] * len(members)
        else:
            axis = data.ty.ndim + STACK_AXIS
            parts = [
                self.builder_.emit(
                    relax.op.strided_slice(data, [axis], [i], [i + 1], [1]), f"{name}_part{i}"
                )
                for i in range(len(members))
            ]
        results = []
        for i, (part, weight) in enumerate(zip(parts, members, strict=True)):
            if is_swapped:
                weight = self.builder_.emit(relax.op.permute_dims(weight), f"{name}_weight{i}")
            product = relax.op.matmul(part, weight)
            results.append(self.builder_.emit(product, f"{name}_expert{i}"))
        joined = self.builder_.normalize(relax.op.concat(results, STACK_AXIS))
        self.builder_.emit_normalized(relax.VarBinding(binding.var, joined))


def count_parts(data: relax.Expr) -> int | None:
    """Return the number of matrices of expert data (..., E, M, K); None if it is known only at
    run time.
    """
    shape = data.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return None
    size = shape.values[STACK_AXIS]
    return int(size) if isinstance(size, tvm.tirx.IntImm) else None


def read_part(stack: WeightSource, index: int) -> np.ndarray:
    """Read one matrix of a stack. A mapping that loads on access loads the whole stack."""
    return stack.array[index]


def read_rows(stack: WeightSource) -> np.ndarray:
    """Read the matrices of a stack as rows."""
    return stack.array.reshape(stack.shape[0], -1)
