"""Relax module -> its operators whose shapes fit for some sizes only, checked at run time.

    x (n, 2, 2); y (1, 4) = reshape(x)   ->   y_fits(n): n * 2 * 2 == 4; y = reshape(x)

TVM takes two sizes as equal where it cannot tell. It makes a view of memory of a reshape, and its
loop nests read as many elements as one of the operands or the result has. So elements would be
dropped in silence, or foreign memory read. Sizes are those of inputs, and those that R.match_cast
reads at run time.

These are two steps of `passes`: operators are found before they are fused. Checks are added after
that, each one where the last of its sizes becomes known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, StringImm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from relayquant.codegen.inner_sizes import pair_inner_sizes
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions, substitute

Shape = Sequence[Any]
#: Two sizes that have to be equal.
Pair = tuple[Any, Any]


def count_elements(before: Shape, after: Shape) -> list[Pair]:
    """Return the pair of a reshape: the numbers of elements."""
    one = tirx.const(1, "int64")
    return [(prod(before, start=one), prod(after, start=one))]


def pair_axes(before: Shape, after: Shape) -> list[Pair]:
    """Return the pairs of a broadcast: sizes of the same axis, but for a known 1."""
    pairs = zip(reversed(before), reversed(after), strict=False)
    return [pair for pair in pairs if not (isinstance(pair[0], tirx.IntImm) and int(pair[0]) == 1)]


@dataclass(frozen=True)
class ShapeRule:
    """What an operator wants of shapes.

    Attributes:
        list_pairs: Two shapes -> sizes that have to be equal.
        text: How the value comes from the shapes, for a message.
        reads_result: Whether the second shape is that of the result, not of the second operand.
    """

    list_pairs: Callable[[Shape, Shape], list[Pair]]
    text: str
    reads_result: bool


#: Operators whose result has a shape also where sizes may differ. TVM does not compile others.
RULES = {
    "relax.reshape": ShapeRule(count_elements, "which makes {} into {}", True),
    "relax.broadcast_to": ShapeRule(pair_axes, "which makes {} into {}", True),
    "relax.matmul": ShapeRule(
        lambda *shapes: [pair_inner_sizes(*shapes)], "which multiplies {} by {}", False
    ),
}


@dataclass(frozen=True, eq=False)
class ShapeCheck:
    """What has to hold for the shapes of an operator.

    Attributes:
        name: Its value.
        text: What it does, for a message.
        fits: Whether its shapes fit.
        sizes: The variables of `fits`.
    """

    name: str
    text: str
    fits: Any
    sizes: Sequence[tirx.Var]


def find_shape_checks(mod: tvm.IRModule) -> Mapping[str, Sequence[ShapeCheck]]:
    """Find the checks that each function needs."""
    return {
        gv.name_hint: tuple(list_shape_checks(func))
        for gv, func in mod.functions_items()
        if isinstance(func, relax.Function)
    }


def list_shape_checks(func: relax.Function) -> Iterator[ShapeCheck]:
    analyzer = Analyzer()
    for binding in list_bindings(func):
        call = binding.value
        rule = RULES.get(call_name(call)) if isinstance(call, Call) else None
        if rule is None:
            continue
        types = [each.ty for each in (call.args[0], call if rule.reads_result else call.args[1])]
        if not all(isinstance(ty.shape, relax.ShapeExpr) for ty in types):
            continue
        shapes = [list_dimensions(ty) for ty in types]
        pairs = [pair for pair in rule.list_pairs(*shapes) if not analyzer.can_prove_equal(*pair)]
        if pairs:
            fits = tirx.all(*(tirx.EQ(*pair) for pair in pairs))
            text = f"{binding.var.name!r}, {rule.text.format(*map(format_shape, shapes))}"
            sizes = tuple(tirx.analysis.undefined_vars(tirx.Evaluate(fits), []))
            yield ShapeCheck(binding.var.name, text, fits, sizes)


def format_shape(shape: Shape) -> str:
    return f"({', '.join(str(getattr(size, 'value', size)) for size in shape)})"


def create_shape_checks(checks: Mapping[str, Sequence[ShapeCheck]]) -> Any:
    """Make the pass that adds the checks. `checks`: of each function, as it was before."""

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return add_shape_checks(mod, checks)

    return tvm.transform.module_pass(run, opt_level=0, name="relayquant.add_shape_checks")


def add_shape_checks(mod: tvm.IRModule, checks: Mapping[str, Sequence[ShapeCheck]]) -> tvm.IRModule:
    """Add the checks. An operator that is gone, and a size of it with it, has none."""
    builder = relax.BlockBuilder(mod)

    def call_checks(function: str, ready: Iterable[ShapeCheck]) -> list[relax.Binding]:
        nothing = relax.TupleType([])
        kernels = [
            (builder.add_func(make_check(function, each), f"{each.name}_fits"), each.sizes)
            for each in ready
        ]
        return [
            relax.VarBinding(relax.Var("_", nothing), Call(kernel, [*sizes], None, [nothing]))
            for kernel, sizes in kernels
        ]

    for gv, func in mod.functions_items():
        waiting = [*checks.get(gv.name_hint, ())]
        if not waiting:
            continue
        known = {size for param in func.params for size in list_sizes(param.ty)}
        ready, waiting = split_checks(waiting, known)
        blocks = [relax.BindingBlock(call_checks(gv.name_hint, ready))]
        for block in func.body.blocks:
            bindings: list[relax.Binding] = []
            for binding in block.bindings:
                bindings.append(binding)
                if isinstance(binding, relax.MatchCast):
                    known.update(list_sizes(binding.ty))
                    ready, waiting = split_checks(waiting, known)
                    bindings.extend(call_checks(gv.name_hint, ready))
            blocks.append(relax.BindingBlock(bindings))
        body = relax.SeqExpr(blocks, func.body.body)
        checked = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        builder.update_func(gv, checked)
    return builder.get()


def list_sizes(ty: tvm.ir.Type) -> list[tirx.Var]:
    """List the variables that are defined by a value of a type."""
    return list(relax.analysis.definable_tir_vars_in_type(ty))


def split_checks(
    waiting: Sequence[ShapeCheck], known: set[tirx.Var]
) -> tuple[list[ShapeCheck], list[ShapeCheck]]:
    """Return the checks whose sizes are known, and the others."""
    is_ready = [known.issuperset(each.sizes) for each in waiting]
    pairs = list(zip(waiting, is_ready, strict=True))
    return [each for each, ready in pairs if ready], [each for each, ready in pairs if not ready]


def make_check(function: str, check: ShapeCheck) -> tirx.PrimFunc:
    """Make a PrimFunc of the sizes, int64, that fails unless the shapes fit."""
    message = f"inputs of {function!r}: their sizes do not fit {check.text}"
    with IRBuilder() as builder, T.prim_func():
        T.func_name("fits")
        T.func_attr({"tirx.noalias": True})
        sizes = {size: T.arg(size.name, tirx.Var(size.name, "int64")) for size in check.sizes}
        fits = substitute(check.fits, sizes)
        T.add_to_parent(tirx.AssertStmt(fits, StringImm("ValueError"), [StringImm(message)]))
    func: Any = builder.get()
    return func
