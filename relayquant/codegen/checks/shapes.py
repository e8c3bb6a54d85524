"""Relax module -> its operators whose shapes fit for some sizes only, checked at run time.

    x (n, 2, 2); y (1, 4) = reshape(x)   ->   y_fits(n): n * 2 * 2 == 4; y = reshape(x)

TVM takes two sizes as equal where it cannot tell. It makes a view of memory of a reshape, and its
loop nests read as many elements as one of the operands or the result has. So elements would be left
out in silence, or read from memory of others.

Inputs have sizes, and R.match_cast reads some at run time. These are two steps of `passes`:
operators are found before they are fused. Checks are added after that, each one where the last of
its sizes becomes known: in the function, or in the branch that has the operator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, StringImm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from relayquant.codegen.rewrites.inner_sizes import pair_inner_sizes
from relayquant.errors import format_count
from relayquant.ir.reference.relax.row import list_axes
from relayquant.ir.rewrite.expressions import assume_sizes
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions, substitute
from relayquant.ir.rewrite.moves import RESHAPES

Shape = Sequence[Any]


@dataclass(frozen=True)
class Shapes:
    """The shapes of a call.

    Attributes:
        attrs: Its attributes.
        operands: Shapes of its tensors, those of tuples included.
        result: Shape of its result. None of a tuple, or if it is not known.
    """

    attrs: Any
    operands: Sequence[Shape]
    result: Shape | None


@dataclass(frozen=True)
class ShapeRule:
    """What an operator wants of shapes.

    Attributes:
        list_conditions: Shapes -> what has to hold, expressions of sizes.
        text: How the value comes from the shapes, for a message.
    """

    list_conditions: Callable[[Shapes], Iterable[Any]]
    text: Callable[[Shapes], str]


def describe_change(shapes: Shapes) -> str:
    return (
        f"which makes {format_shape(shapes.operands[0])} into {format_shape(shapes.result or ())}"
    )


def describe_product(shapes: Shapes) -> str:
    left, right = map(format_shape, shapes.operands[:2])
    return f"which multiplies {left} by {right}"


def describe_operands(shapes: Shapes) -> str:
    return f"which is computed from {', '.join(map(format_shape, shapes.operands))}"


def describe_split(shapes: Shapes) -> str:
    (data,), cuts = shapes.operands, shapes.attrs.indices_or_sections
    if isinstance(cuts, int | tirx.IntImm):
        parts = f"into {format_count(int(cuts), 'section')}"
    else:
        parts = f"at {', '.join(str(int(cut)) for cut in cuts)}"
    return f"which splits {format_shape(data)} {parts} along {format_axes(shapes)}"


def describe_taking(shapes: Shapes) -> str:
    (data,), taken = shapes.operands, format_count(int(shapes.attrs.k), "value")
    return f"which takes {taken} of {format_shape(data)} along {format_axes(shapes)}"


def describe_reading(shapes: Shapes) -> str:
    (data,) = shapes.operands
    return f"which reads 1 value or more of {format_shape(data)} along {format_axes(shapes)}"


def format_axes(shapes: Shapes) -> str:
    """Write the axes that an attribute names, counted from 0."""
    if shapes.attrs.axis is None:
        return "all axes"
    axes = list_axes(shapes.attrs.axis, len(shapes.operands[0]))
    return f"axis {', '.join(map(str, axes))}"


def have_sizes(shapes: Shapes) -> Iterator[Any]:
    """Sizes, which may be values of an input, are at least 0."""
    return (tirx.GE(size, tirx.const(0, "int64")) for size in shapes.result or ())


def keep_count(shapes: Shapes) -> Iterator[Any]:
    """A reshape has as many elements as its operand."""
    yield from have_sizes(shapes)
    if shapes.result is not None:
        one = tirx.const(1, "int64")
        yield tirx.EQ(prod(shapes.operands[0], start=one), prod(shapes.result, start=one))


def match_axes(before: Shape, after: Shape) -> Iterator[Any]:
    """Sizes of the same axis are equal, counted from the last one, but for a known 1."""
    for pair in zip(reversed(before), reversed(after), strict=False):
        if not (isinstance(pair[0], tirx.IntImm) and int(pair[0]) == 1):
            yield tirx.EQ(*pair)


def spread(shapes: Shapes) -> Iterator[Any]:
    """A broadcast repeats what has the size 1."""
    yield from have_sizes(shapes)
    yield from match_axes(shapes.operands[0], shapes.result or ())


def match_inner(shapes: Shapes) -> Iterator[Any]:
    """A product sums over one size."""
    yield tirx.EQ(*pair_inner_sizes(*shapes.operands))


def match_rows(shapes: Shapes) -> Iterator[Any]:
    """A product of (..., M, K) and (..., N, K) sums over K. A matrix fits any number of others."""
    left, right, *_ = shapes.operands
    yield tirx.EQ(left[-1], right[-1])
    yield from match_axes(right[:-2], left[:-2])


def match_channels(shapes: Shapes, *, is_transposed: bool) -> Iterator[Any]:
    """A convolution's weight has the channels of the data, or of a group."""
    attrs, (data, weight, *_) = shapes.attrs, shapes.operands
    layouts = str(attrs.data_layout), str(attrs.kernel_layout)
    if "".join(layouts).isupper():  # not packed
        groups = 1 if is_transposed else int(attrs.groups)
        yield tirx.EQ(data[layouts[0].index("C")], weight[layouts[1].index("I")] * groups)


def match_letters(shapes: Shapes) -> Iterator[Any]:
    """Axes of an einsum with the same letter have the same size."""
    terms = str(shapes.attrs.subscripts).replace(" ", "").split("->")[0].split(",")
    first: dict[str, Any] = {}
    for term, shape in zip(terms, shapes.operands, strict=True):
        left, _, right = term.partition("...")
        lettered = [*zip(left, shape, strict=False), *zip(right[::-1], shape[::-1], strict=False)]
        for letter, size in lettered:
            yield tirx.EQ(first.setdefault(letter, size), size)


def match_keys(shapes: Shapes) -> Iterator[Any]:
    """Attention of (B, S, H, D) to keys (B, L, H, D) and values (B, L, H, V), with a bias that
    broadcasts to (B, H, S, L).
    """
    query, keys, values, *bias = shapes.operands
    yield from (tirx.EQ(query[axis], keys[axis]) for axis in (0, 2, 3))
    yield from (tirx.EQ(keys[axis], values[axis]) for axis in (0, 1, 2))
    for each in bias:
        yield from match_axes(each, (query[0], query[2], query[1], keys[1]))


def match_parameters(name: str, shapes: Shapes) -> Iterator[Any]:
    """Vectors have the size of the axis that an attribute names."""
    data, *vectors = shapes.operands
    size = data[int(getattr(shapes.attrs, name))]
    for vector in vectors:
        yield from match_axes(vector, (size,))


def stay_inside(data: Shape, indices: Shape, axis: int) -> Iterator[Any]:
    """Indices along an axis stay where they are along the others."""
    for at, (size, count) in enumerate(zip(data, indices, strict=True)):
        if at != axis % len(data):
            yield tirx.LE(count, size)


def gather(shapes: Shapes) -> Iterator[Any]:
    """See `stay_inside`."""
    return stay_inside(*shapes.operands, int(shapes.attrs.axis))


def scatter(shapes: Shapes) -> Iterator[Any]:
    """See `stay_inside`. Each index has its value."""
    data, indices, values = shapes.operands
    yield from stay_inside(data, indices, int(shapes.attrs.axis))
    yield from (tirx.EQ(*pair) for pair in zip(indices, values, strict=True))


def take_largest(shapes: Shapes) -> Iterator[Any]:
    """An axis has as many values as are taken."""
    count = tirx.const(int(shapes.attrs.k), "int64")
    yield tirx.LE(count, shapes.operands[0][int(shapes.attrs.axis)])


def read_one(shapes: Shapes) -> Iterator[Any]:
    """A place is found among one value or more, on some axes or on all."""
    (data,) = shapes.operands
    axes = list_axes(shapes.attrs.axis, len(data))
    return (tirx.LE(tirx.const(1, "int64"), data[axis]) for axis in axes)


def reach_cuts(shapes: Shapes) -> Iterator[Any]:
    """A split begins its last part inside the axis. Sections are equal but for the last one."""
    attrs, (data,) = shapes.attrs, shapes.operands
    size, cuts = data[int(attrs.axis)], attrs.indices_or_sections
    if isinstance(cuts, int | tirx.IntImm):
        yield tirx.LE((int(cuts) - 1) * ((size + int(cuts) - 1) // int(cuts)), size)
    else:
        yield from (tirx.LE(tirx.const(int(cut), "int64"), size) for cut in cuts)


CONVOLUTIONS = tuple(f"relax.nn.conv{rank}d" for rank in (1, 2, 3))
#: Operators that TVM compiles also where it cannot tell whether their sizes fit.
RULES = {
    **dict.fromkeys(RESHAPES, ShapeRule(keep_count, describe_change)),
    "relax.broadcast_to": ShapeRule(spread, describe_change),
    "relax.strided_slice": ShapeRule(have_sizes, describe_change),
    "relax.matmul": ShapeRule(match_inner, describe_product),
    **dict.fromkeys(
        (*CONVOLUTIONS, "relax.qnn.conv1d", "relax.qnn.conv2d"),
        ShapeRule(partial(match_channels, is_transposed=False), describe_product),
    ),
    **dict.fromkeys(
        (*(f"{name}_transpose" for name in CONVOLUTIONS), "relax.qnn.conv2d_transpose"),
        ShapeRule(partial(match_channels, is_transposed=True), describe_product),
    ),
    "relax.qnn.dense": ShapeRule(match_rows, describe_product),
    "relax.qnn.batch_matmul": ShapeRule(match_rows, describe_product),
    "relax.einsum": ShapeRule(match_letters, describe_operands),
    "relax.nn.attention": ShapeRule(match_keys, describe_operands),
    "relax.nn.attention_bias": ShapeRule(match_keys, describe_operands),
    "relax.nn.prelu": ShapeRule(partial(match_parameters, "axis"), describe_operands),
    **{
        f"relax.nn.{kind}_norm": ShapeRule(
            partial(match_parameters, "channel_axis"), describe_operands
        )
        for kind in ("group", "instance")
    },
    "relax.gather_elements": ShapeRule(gather, describe_operands),
    "relax.scatter_elements": ShapeRule(scatter, describe_operands),
    "relax.split": ShapeRule(reach_cuts, describe_split),
    **dict.fromkeys(
        ("relax.argmax", "relax.argmin", "relax.median"), ShapeRule(read_one, describe_reading)
    ),
    "relax.topk": ShapeRule(take_largest, describe_taking),
}


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
    for gv, func in mod.functions_items():
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            analyzer = assume_sizes(list_input_sizes(func))
            for place, binding in list_places((gv.name_hint,), func.body):
                check = find_shape_check(binding, analyzer)
                if check is not None:
                    found.setdefault(place, []).append(check)
    return found


def list_places(place: Place, body: relax.SeqExpr) -> Iterator[tuple[Place, Any]]:
    """List the bindings of a sequence and of the branches inside it, with where they stand."""
    choices = name_choices(place, body)
    for binding in (binding for block in body.blocks for binding in block.bindings):
        yield place, binding
        if binding.var in choices:
            inner, value = choices[binding.var], binding.value
            yield from list_places((*inner, True), value.true_branch)
            yield from list_places((*inner, False), value.false_branch)


def name_choices(place: Place, body: relax.SeqExpr) -> dict[relax.Var, Place]:
    """Return the place of each If in a sequence: that of its branches, up to which one is taken.

    Several Ifs may have one name. Passes keep the names, and the order of these Ifs.
    """
    count: Counter[str] = Counter()
    found = {}
    for binding in (binding for block in body.blocks for binding in block.bindings):
        if isinstance(binding.value, relax.If):
            name = binding.var.name
            found[binding.var] = (*place, name, count[name])
            count[name] += 1
    return found


def list_input_sizes(func: relax.Function) -> list[tirx.Var]:
    """List the symbolic sizes of a function's tensors. Those of its shapes may be any numbers."""
    tensors = [param.ty for param in func.params if isinstance(param.ty, relax.TensorType)]
    return [size for ty in tensors for size in list_sizes(ty)]


def find_shape_check(binding: relax.Binding, analyzer: Analyzer) -> ShapeCheck | None:
    """Return what has to hold at run time for the shapes of a call, and is not known. None:
    nothing.
    """
    call = binding.value
    rule = RULES.get(call_name(call)) if isinstance(call, Call) else None
    shapes = None if rule is None else read_shapes(call)
    if rule is None or shapes is None:
        return None
    conditions = [
        each
        for each in rule.list_conditions(shapes)
        # TVM compares numbers itself.
        if find_sizes(each) and not analyzer.can_prove(each)
    ]
    if not conditions:
        return None
    fits = tirx.all(*conditions)
    text = f"{binding.var.name!r}, {rule.text(shapes)}"
    return ShapeCheck(binding.var.name, text, fits, find_sizes(fits))


def find_sizes(condition: Any) -> tuple[tirx.Var, ...]:
    """Return the symbolic sizes that a condition reads."""
    return tuple(tirx.analysis.undefined_vars(tirx.Evaluate(condition), []))


def read_shapes(call: Call) -> Shapes | None:
    """Return the shapes of a call. None if one of an operand is not known."""
    types = [
        ty
        for arg in call.args
        for ty in (arg.ty.fields if isinstance(arg.ty, relax.TupleType) else [arg.ty])
        if isinstance(ty, relax.TensorType)
    ]
    if not all(isinstance(ty.shape, relax.ShapeExpr) for ty in types):
        return None
    is_known = isinstance(getattr(call.ty, "shape", None), relax.ShapeExpr)
    result = list_dimensions(call.ty) if is_known else None
    return Shapes(call.attrs, [list_dimensions(ty) for ty in types], result)


def format_shape(shape: Shape) -> str:
    """Write a shape without TVM's marks of types."""
    sizes = ", ".join(str(getattr(size, "value", size)) for size in shape)
    return f"({re.sub(r'T[.]int64[(](-?[0-9]+)[)]', lambda found: found[1], sizes)})"


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
