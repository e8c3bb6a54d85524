"""Relax module -> its operators whose shapes fit for some sizes only, checked at run time.

    x (n, 2, 2); y (1, 4) = reshape(x)   ->   y_fits(n): n * 2 * 2 == 4; y = reshape(x)

TVM takes two sizes as equal where it cannot tell. It makes a view of memory of a reshape, and its
loop nests read as many elements as one of the operands or the result has. So elements would be left
out in silence, or read from memory of others.

Inputs have sizes, and R.match_cast reads some at run time or compares them. A later pass of TVM
takes sizes that are compared as one, and drops the comparison. These are two steps of `passes`:
operators are found before they are fused. Checks are added after that, each one where the last of
its sizes becomes known: in the function, or in the branch that has the operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, StringImm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from relayquant.codegen.checks.shape_rules import (
    RULES,
    describe_misfit,
    format_shape,
    read_shapes,
)
from relayquant.errors import ModelError
from relayquant.ir.rewrite.expressions import assume_sizes, list_bindings
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions, substitute

#: Where a sequence of bindings stands: the name of its function, then the value of each If around
#: it, how many times the sequence had the name before, and the branch that is taken.
Place = tuple[str | int | bool, ...]


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


def find_shape_checks(mod: tvm.IRModule) -> Mapping[Place, Sequence[ShapeCheck]]:
    """Find the checks that each function, and each branch of an If, needs."""
    found: dict[Place, list[ShapeCheck]] = {}
    for gv, func in list_functions(mod).items():
        if isinstance(func.body, relax.SeqExpr):
            if bounded := find_bounds(func):
                found[(gv.name_hint,)] = bounded
            analyzer = assume_sizes(list_input_sizes(func))
            known = {size: size for param in func.params for size in list_sizes(param.ty)}
            for place, binding in list_places((gv.name_hint,), func.body):
                check = find_shape_check(binding, analyzer, known)
                if check is not None:
                    found.setdefault(place, []).append(check)
    return found


def find_bounds(func: relax.Function) -> list[ShapeCheck]:
    """Find the largest sizes of inputs that a function declares, such as the `max` of PyTorch's
    `Dim`. TVM plans memory for these.
    """
    bounds = (func.attrs or {}).get("tir_var_upper_bound") or {}
    return [
        ShapeCheck(
            param.name,
            f"{param.name!r}, which has at most {bounds[size.name]} along axis {axis}",
            tirx.LE(size, tirx.const(int(bounds[size.name]), "int64")),
            (size,),
        )
        for param in func.params
        if isinstance(param.ty, relax.TensorType)
        for axis, size in enumerate(list_dimensions(param.ty))
        if isinstance(size, tirx.Var) and size.name in bounds
    ]


def list_places(place: Place, body: relax.SeqExpr) -> Iterator[tuple[Place, Any]]:
    """List the bindings of a sequence and of the branches inside it, with where they stand."""
    choices = name_choices(place, body)
    for binding in list_bindings(body):
        yield place, binding
        if binding.var in choices:
            inner, value = choices[binding.var], binding.value
            yield from list_places((*inner, True), value.true_branch)
            yield from list_places((*inner, False), value.false_branch)


def name_choices(place: Place, body: relax.SeqExpr) -> dict[relax.Var, Place]:
    """Return the place of each If in a sequence: the place of the sequence, the name of the If, and
    how many Ifs before it have this name. Passes keep the names, and the order of such Ifs.
    """
    count: Counter[str] = Counter()
    found = {}
    for binding in list_bindings(body):
        if isinstance(binding.value, relax.If):
            name = binding.var.name
            found[binding.var] = (*place, name, count[name])
            count[name] += 1
    return found


def list_input_sizes(func: relax.Function) -> list[tirx.Var]:
    """List the symbolic sizes of a function's tensors, which are at least 0. Parameters that are
    shapes may hold any numbers.
    """
    tensors = [param.ty for param in func.params if isinstance(param.ty, relax.TensorType)]
    return [size for ty in tensors for size in list_sizes(ty)]


def find_shape_check(
    binding: relax.Binding, analyzer: Analyzer, known: dict[tirx.Var, Any]
) -> ShapeCheck | None:
    """Return what has to hold at run time for the shapes of a value, and is not known. None:
    nothing.

    `known` has each size that is bound before, in sizes that passes keep. A match_cast adds its
    own.

    Raises:
        ModelError: A slice has to be longer than what it is taken from.
    """
    if isinstance(binding, relax.MatchCast):
        conditions = compare_sizes(binding, known)
        text = f"which must be {format_shape(list_dimensions(binding.ty))}"
    else:
        call = binding.value
        rule = RULES.get(call_name(call)) if isinstance(call, Call) else None
        shapes = None if rule is None else read_shapes(call)
        if rule is None or shapes is None:
            return None
        refuse_wrong_slice(binding.var.name, call)
        conditions = [substitute(each, known) for each in rule.list_conditions(shapes)]
        text = rule.text(shapes)
    # TVM compares numbers itself.
    open_ = [each for each in conditions if find_sizes(each) and not analyzer.can_prove(each)]
    if not open_:
        return None
    fits = tirx.all(*open_)
    text = f"{binding.var.name!r}, {text}"
    return ShapeCheck(binding.var.name, text, fits, find_sizes(fits))


def refuse_wrong_slice(name: str, call: Call) -> None:
    """Raise an error if a slice reaches beyond its operand for all sizes. TVM compares the sizes of
    other operators itself, but for the loop nest of a slice it takes what the operator says.

    Raises:
        ModelError: It does.
    """
    if call_name(call) == "relax.strided_slice" and (misfit := describe_misfit(call)):
        raise ModelError(
            f"Value {name!r}, {misfit}, reads elements that are not there. "
            "Fix the sizes of the model's values, or give its inputs larger sizes with shapes=.",
            code="RQ206",
        )


def compare_sizes(cast: relax.MatchCast, known: dict[tirx.Var, Any]) -> list[Any]:
    """Return what a match_cast of a value of known shape compares. Its new sizes become known."""
    given = [substitute(size, known) for size in list_dimensions(cast.value.ty)]
    wanted = list_dimensions(cast.ty)
    for size, value in zip(wanted, given, strict=False):
        if isinstance(size, tirx.Var):
            known.setdefault(size, value)
    known.update({size: size for size in list_sizes(cast.ty) if size not in known})
    return [
        tirx.EQ(value, substitute(size, known)) for size, value in zip(wanted, given, strict=False)
    ]


def find_sizes(condition: Any) -> tuple[tirx.Var, ...]:
    """Return the symbolic sizes that a condition reads."""
    return tuple(tirx.analysis.undefined_vars(tirx.Evaluate(condition), []))


def create_shape_checks(checks: Mapping[Place, Sequence[ShapeCheck]]) -> Any:
    """Make the pass that adds the checks. `checks`: of each place, as it was before."""

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return add_shape_checks(mod, checks)

    return tvm.transform.module_pass(run, opt_level=0, name="relayquant.add_shape_checks")


def add_shape_checks(
    mod: tvm.IRModule, checks: Mapping[Place, Sequence[ShapeCheck]]
) -> tvm.IRModule:
    """Add the checks. If no value has the sizes of a check any more, its operator is gone too."""
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

    def add_to(place: Place, body: relax.SeqExpr, known: set[tirx.Var]) -> relax.SeqExpr:
        ready, waiting = split_checks(checks.get(place, ()), known)
        blocks = [relax.BindingBlock(call_checks(str(place[0]), ready))]
        choices = name_choices(place, body)
        for block in body.blocks:
            bindings: list[relax.Binding] = []
            for binding in block.bindings:
                inner = choices.get(binding.var)
                bindings.append(binding if inner is None else add_to_choice(inner, binding, known))
                if isinstance(binding, relax.MatchCast):
                    known = known.union(list_sizes(binding.ty))
                    ready, waiting = split_checks(waiting, known)
                    bindings.extend(call_checks(str(place[0]), ready))
            blocks.append(relax.BindingBlock(bindings))
        return relax.SeqExpr(blocks, body.body)

    def add_to_choice(place: Place, binding: Any, known: set[tirx.Var]) -> relax.Binding:
        value = binding.value
        branches = [
            add_to((*place, taken), branch, known)
            for taken, branch in ((True, value.true_branch), (False, value.false_branch))
        ]
        choice = builder.normalize(relax.If(value.cond, *branches))
        return relax.VarBinding(binding.var, choice)

    changed = {place[0] for place in checks}
    for gv, func in mod.functions_items():
        if gv.name_hint in changed:
            known = {size for param in func.params for size in list_sizes(param.ty)}
            body = add_to((gv.name_hint,), func.body, known)
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
