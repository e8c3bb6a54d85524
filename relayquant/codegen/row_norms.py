"""lower_row_norms: layer norms and norms by the root mean square along rows -> one kernel each,
with the integers of the rows where a product quantizes them.

Runs before `grouped`, to which quantized rows would be an operator of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, IRModule
from tvm.target import Target

from relayquant.codegen.floating import mark_kernel
from relayquant.codegen.grouped import read_leading
from relayquant.codegen.kernels.floating.row_norm import RowNorm, make_row_norm
from relayquant.ir.rewrite.expressions import (
    FunctionGraph,
    is_float32,
    op_name,
    read_scalar,
    same_extents,
    same_type,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.ir.rewrite.rule import (
    OnSkip,
    Rule,
    Skip,
    decline,
    fire_first,
    log_skip,
    make_rule,
    select_rules,
)

QUANTIZE_ROWS = "relax.qnn.quantize_rows"
NO_ROWS = decline("not of float32 rows of known length")


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm that a function computes.

    Attributes:
        vars: What it computes on its way; the last is its result.
        data: Its rows.
        spec: What it does with them; of one result, no integers.
        factors: Weight and bias, those that there are.
    """

    vars: tuple[relax.Var, ...]
    data: relax.Expr
    spec: RowNorm
    factors: tuple[relax.Expr, ...]


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """The values between a norm and the integers of its rows, the pair of these last; and whether
    anything else reads the floats.
    """

    vars: tuple[relax.Var, ...]
    keeps_result: bool


def lower_row_norms(mod: IRModule, target: Target, on_skip: OnSkip = log_skip) -> IRModule:
    """Replace norms along rows of known length, in dataflow blocks, by kernels.

    Leading extents may be symbolic. Targets that are no LLVM CPUs keep theirs; `on_skip` hears of
    each that no kernel takes.
    """
    if target.kind.name != "llvm":
        return mod
    builder, kernels = relax.BlockBuilder(mod), {}
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            lowering = NormLowering(func, builder, kernels, on_skip)
            lowered = lowering.run()
            if lowered is not None:
                builder.update_func(gvar, lowered)
    return relax.transform.Normalize()(builder.get()) if kernels else mod


class NormLowering:
    """Rewrites the dataflow blocks of one function; `kernels` are those of its module."""

    def __init__(
        self,
        func: relax.Function,
        builder: relax.BlockBuilder,
        kernels: dict[RowNorm, tvm.ir.GlobalVar],
        on_skip: OnSkip,
    ) -> None:
        self.func, self.builder, self.kernels, self.on_skip = func, builder, kernels, on_skip
        self.graph = FunctionGraph(func)
        self.dropped: set[relax.Var] = set()
        self.replaced: dict[relax.Var, list[relax.Binding]] = {}

    def run(self) -> relax.Function | None:
        """The function with its norms replaced; None if it has none."""
        func, blocks = self.func, []
        for block in func.body.blocks:
            if isinstance(block, relax.DataflowBlock):
                block = relax.DataflowBlock(self.rewrite(block.bindings))
            blocks.append(block)
        if not self.replaced:
            return None
        body = relax.SeqExpr(blocks, func.body.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)

    def rewrite(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        """Bindings of one block."""
        inside = {binding.var for binding in bindings}
        for binding in bindings:
            rules = select_rules(NORM_RULES, op_name(self.graph.values.get(binding.var)))
            tried = ((rule, binding.var) for rule in rules)
            found = fire_first(tried, self, binding.var.name, self.on_skip)
            if found is not None and inside.issuperset(found[1].vars):
                self.replace(found[1], inside)
        return [
            new
            for binding in bindings
            if binding.var not in self.dropped
            for new in self.replaced.get(binding.var, [binding])
        ]

    def replace(self, norm: Norm, inside: set[relax.Var]) -> None:
        """y = norm(x); t = quantize_rows(y)  ->  t = kernel(x)

        and where y is read by others too  ->  k = kernel(x); y = k[0]; t = (k[1], k[2]).
        """
        result = norm.vars[-1]
        found = find_quantized(self.graph, result)
        self.dropped.update(norm.vars[:-1])
        if found is None or not inside.issuperset(found.vars):
            self.replaced[result] = [self.call(result, norm.spec, norm, [result.ty])]
            return
        pair = found.vars[-1]
        self.dropped.update(found.vars[:-1])
        rows = list_leading(self.graph.values[pair].args[0])
        spec = replace(norm.spec, rows=rows, keeps_result=found.keeps_result)
        types = list(pair.ty.fields)
        if not found.keeps_result:
            self.dropped.add(result)
            self.replaced[pair] = [self.call(pair, spec, norm, types)]
            return
        both = relax.DataflowVar(f"{result.name}_rows", tvm.ir.TupleType([result.ty, *types]))
        parts = [
            relax.DataflowVar(f"{pair.name}_{name}", ty)
            for name, ty in zip(("codes", "scale"), types, strict=True)
        ]
        self.replaced[result] = [
            self.call(both, spec, norm, [result.ty, *types]),
            self.bind(result, relax.TupleGetItem(both, 0)),
        ]
        self.replaced[pair] = [
            *(self.bind(part, relax.TupleGetItem(both, i + 1)) for i, part in enumerate(parts)),
            self.bind(pair, relax.Tuple(parts)),
        ]

    def call(self, var: relax.Var, spec: RowNorm, norm: Norm, types: list[Any]) -> relax.VarBinding:
        """var = call_tir of the kernel of `spec`, which is built unless it was."""
        if spec not in self.kernels:
            func = mark_kernel(make_row_norm(spec), macs=0)
            self.kernels[spec] = self.builder.add_func(func, "row_norm")
        operands = relax.Tuple([norm.data, *norm.factors])
        return self.bind(var, relax.call_tir(self.kernels[spec], operands, types))

    def bind(self, var: relax.Var, value: relax.Expr) -> relax.VarBinding:
        return relax.VarBinding(var, self.builder.normalize(value))

    # ---- which norms there are -------------------------------------------------------------------

    def read_layer_norm(self, var: relax.Var) -> Norm | Skip:
        """nn.layer_norm along the last axis."""
        call = self.graph.values[var]
        if not (call.attrs.center and call.attrs.scale):
            return decline("a factor is left out, which preparation fills in")
        return self.read_norm(var, call.args[1:], is_centred=True)

    def read_rms_norm(self, var: relax.Var) -> Norm | Skip:
        """nn.rms_norm along the last axis."""
        return self.read_norm(var, self.graph.values[var].args[1:], is_centred=False)

    def read_norm(
        self, var: relax.Var, factors: Sequence[relax.Expr], is_centred: bool
    ) -> Norm | Skip:
        """An operator with the attributes of both."""
        call = self.graph.values[var]
        spec = read_rows(call.args[0], float(call.attrs.epsilon))
        if spec is None:
            return NO_ROWS
        if [*map(int, call.attrs.axes)] not in ([-1], [len(spec.leading)]):
            return decline("along other axes than the last")
        found = [read_vector(factor, spec.features) for factor in factors]
        vectors = tuple(each for each in found if each is not None)
        if len(vectors) != len(factors):
            return decline("factors that are no vectors of float32")
        spec = replace(spec, is_centred=is_centred, bias=is_centred)
        return Norm((var,), call.args[0], spec, vectors)

    def read_root_mean_square(self, var: relax.Var) -> Norm | Skip:
        """x / sqrt(mean(x * x) + e) [* w], from the mean `var` on; or x * rsqrt(...)."""
        graph, mean = self.graph, self.graph.values[var]
        square = mean.args[0]
        data = read_square(graph, square)
        spec = None if data is None else read_rows(data, 0.0)
        if data is None or spec is None:
            return NO_ROWS
        axes = mean.attrs.axis
        if axes is None or [*map(int, axes)] not in ([-1], [len(spec.leading)]):
            return decline("along other axes than the last")
        if not mean.attrs.keepdims or not is_only_user(graph, square, var):
            return decline("the squares are read by others, or the axis goes")
        vars_ = [square, var]
        added = self.follow(vars_, "relax.add")
        epsilon = None if added is None else read_added(added)
        root = self.follow(vars_, "relax.sqrt", "relax.rsqrt")
        if epsilon is None or root is None:
            return decline("no root of the mean and a number")
        divides = op_name(root) == "relax.sqrt"
        scaled = self.follow(vars_, "relax.divide" if divides else "relax.multiply")
        orders = [(data, vars_[-2])] if divides else [(data, vars_[-2]), (vars_[-2], data)]
        if scaled is None or not any(
            all(a.same_as(b) for a, b in zip(scaled.args, order, strict=True)) for order in orders
        ):
            return decline("the root does not scale the rows")
        weight = self.follow_weight(vars_, spec.features)
        if not same_type(vars_[-1], data):
            return decline("a number of more axes than the rows")
        spec = replace(spec, epsilon=epsilon, divides=divides, weight=weight is not None)
        return Norm(tuple(vars_), data, spec, () if weight is None else (weight,))

    def follow(self, vars_: list[relax.Var], *names: str) -> Call | None:
        """The call that alone reads the last value, which it joins; None if it is another one."""
        user = self.graph.only_user(vars_[-1])
        call = None if user is None else self.graph.call_of(user)
        if user is None or call is None or op_name(call) not in names:
            return None
        vars_.append(user)
        return call

    def follow_weight(self, vars_: list[relax.Var], features: int) -> relax.Expr | None:
        """The vector that alone multiplies the last value, which its product joins."""
        last, user = vars_[-1], self.graph.only_user(vars_[-1])
        if user is None or op_name(self.graph.values[user]) != "relax.multiply":
            return None
        others = [arg for arg in self.graph.values[user].args if not arg.same_as(last)]
        weight = read_vector(others[0], features) if len(others) == 1 else None
        if weight is not None:
            vars_.append(user)
        return weight


def read_rows(data: relax.Expr, epsilon: float) -> RowNorm | None:
    """The norm of some rows; None where they are not float32, or of unknown length."""
    if not is_float32(data):
        return None
    width = static_sizes(shape_of(data)[-1:])
    if width is None or width[0] < 1:
        return None
    return RowNorm(list_leading(data), width[0], epsilon)


def list_leading(data: relax.Expr) -> tuple[int | None, ...]:
    """Extents before the last of a tensor of known rank, None where known at run time."""
    return read_leading((tensor_shape(data) or ())[:-1])


def read_vector(factor: relax.Expr, features: int) -> relax.Expr | None:
    """A factor of one number for each element of a row, as an array of one axis."""
    if not is_float32(factor) or static_sizes(shape_of(factor)[-1:]) != [features]:
        return None
    if isinstance(factor, GenericConst):
        values = factor.value.numpy()
        if values.size != features:
            return None
        return factor if values.ndim == 1 else relax.const(np.ascontiguousarray(values.reshape(-1)))
    return factor if len(shape_of(factor)) == 1 else None


def read_added(call: Call) -> float | None:
    """The number that a sum adds to its other operand."""
    for arg in call.args:
        if isinstance(arg, GenericConst) and str(arg.ty.dtype) == "float32":
            values = arg.value.numpy()
            return float(values.reshape(())) if values.size == 1 else None
    return None


def read_square(graph: FunctionGraph, var: relax.Expr) -> relax.Expr | None:
    """x of x * x, or of x to the power of 2."""
    call = graph.call_of(var) if isinstance(var, relax.Var) else None
    if call is None:
        return None
    if op_name(call) == "relax.multiply" and call.args[0].same_as(call.args[1]):
        return call.args[0]
    if op_name(call) == "relax.power" and read_scalar(call.args[1]) == 2:
        return call.args[0]
    return None


def find_quantized(graph: FunctionGraph, result: relax.Var) -> QuantizedRows | None:
    """Who quantizes the rows of a norm, as they are or behind a reshape that keeps them."""
    for user in graph.users_of(result):
        name, is_only = op_name(graph.values.get(user)), is_only_user(graph, result, user)
        if name == QUANTIZE_ROWS:
            return QuantizedRows((user,), not is_only)
        if name != "relax.reshape" or not same_extents(shape_of(user)[-1:], shape_of(result)[-1:]):
            continue
        for reader in graph.users_of(user):
            if op_name(graph.values.get(reader)) == QUANTIZE_ROWS:
                goes = is_only_user(graph, user, reader)
                return QuantizedRows((user, reader) if goes else (reader,), not (is_only and goes))
    return None


def is_only_user(graph: FunctionGraph, var: relax.Var, user: relax.Var) -> bool:
    """Whether nothing else reads a value, and the function does not return it."""
    found = graph.only_user(var)
    return found is not None and found.same_as(user)


NORM_RULES: tuple[Rule[NormLowering, relax.Var, Norm], ...] = (
    make_rule(NormLowering.read_layer_norm, "relax.nn.layer_norm"),
    make_rule(NormLowering.read_rms_norm, "relax.nn.rms_norm"),
    make_rule(NormLowering.read_root_mean_square, "relax.mean"),
)
