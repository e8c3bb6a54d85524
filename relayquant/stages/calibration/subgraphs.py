"""Split of the calibration graph: one graph -> one function (subgraph) per choice. Each operator
runs once per batch, whether all batches run through one subgraph before the next or each batch runs
through all of them. Only what takes longer to store than to compute runs again.

main(inputs, variables) -> subgraph_0(...), subgraph_1(...), ... A subgraph reads values of earlier
subgraphs and computes the values that a choice is made from: the values of a group, or the data of
an operator whose weight is fitted. Everything that depends only on weights goes into a separate
module, which runs once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.runtime import freeze_array
from relayquant.ir import reference
from relayquant.ir.dialect.cost import count_macs, static_dims
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.expressions import replace_vars
from relayquant.ir.rewrite.function import define_function
from relayquant.ir.rewrite.graph import (
    free_vars,
    iterate_results,
    result_expr,
    static_size,
    tensor_shape,
)
from relayquant.ir.rewrite.lifetimes import find_ends
from relayquant.ir.rewrite.moves import RESHAPES
from relayquant.stages.calibration.output_parts import list_parts
from relayquant.stages.prepared import CalibrationGraph, FitPoint

#: Elements of a value that is computed again instead of being stored, at least: 16 samples of it
#: need files (see `store.MOST_KEPT_BYTES`). Multiply-adds for each element, at most; and how many
#: times as large as what it is computed from, at least.
LARGE, MOST_REPEATED, LEAST_GROWTH = 1 << 21, 32, 8
#: Operators that move or round elements and nothing else, in no pass over memory and in one.
VIEWS = (*RESHAPES, "relax.strided_slice")
PASSES = (
    "relax.concat",
    "relax.nn.pad",
    "relax.permute_dims",
    "relax.maximum",
    "relax.minimum",
    "relax.qnn.simulated_quantize",
    "relax.qnn.simulated_dequantize",
)
#: The same for a value that is only moved and rounded: its elements, at least; what all passes
#: write for each of them, at most; and how many times as large it is, at least. To write a file and
#: to read it takes ten passes.
LARGE_MOVED, MOST_PASSES, MOVED_GROWTH = 1 << 19, 8, 2


@dataclass(frozen=True)
class Subgraph:
    """One function of the split module, with arguments and results by value name.

    Attributes:
        function: Name of the function; "" if there is nothing to compute.
        groups: Groups whose parameters are chosen after it has run.
        fits: Operators whose weights are fitted after it has run.
        symbols: Symbolic dimensions that are not the dimension of any input (an input may have n *
            2, but none n). They are the values of the last parameter, a shape.
        inputs: Values it reads, in the order of its parameters.
        outputs: Values it returns: the observed ones and the ones that later subgraphs read.
        observed: Values that the groups' observers see.
        expired: Values that nothing reads after this subgraph.
    """

    function: str
    groups: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    observed: tuple[str, ...]
    expired: tuple[str, ...] = ()
    fits: tuple[FitPoint, ...] = ()
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Breakpoint:
    """A place where the graph is split: the choices made there, and the values they depend on."""

    groups: tuple[str, ...]
    fits: tuple[FitPoint, ...]
    targets: tuple[relax.Var, ...]


@dataclass(frozen=True, eq=False)
class SplitGraph:
    """The split module.

    Attributes:
        mod: The functions of the subgraphs.
        constants: The subgraph of the values that do not depend on data, function main of
            `constants_mod`; None if no weight is quantized.
        subgraphs: In the order they run.
    """

    mod: tvm.IRModule
    constants: Subgraph | None
    constants_mod: tvm.IRModule | None
    subgraphs: tuple[Subgraph, ...]

    def compute_constants(self, variables: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Compute the rounded weights, once for all batches, from the values of all graph
        variables. They are frozen, so that `codegen.eager` need not compare them in each call.
        """
        subgraph = self.constants
        if subgraph is None or self.constants_mod is None:
            return {}
        # In numpy, because compiling a kernel for each weight's shape would take longer than all
        # the rest.
        results = reference.run(self.constants_mod, [variables[n] for n in subgraph.inputs])
        return dict(zip(subgraph.outputs, map(freeze_array, results), strict=True))


def split_graph(
    graph: CalibrationGraph,
    groups: Sequence[SharedQParams],
    fits: Sequence[FitPoint] = (),
    *,
    results: bool = False,
    is_stored: bool = False,
    prefix: str = "subgraph",
) -> SplitGraph:
    """Split main of the calibration graph at each choice, in topological order.

    Args:
        groups: Data-dependent groups, in the plan's order. The graph is split once their values
            exist.
        fits: Operators. The graph is split before they run.
        results: Whether the last subgraph computes the results of main, a concatenation as its
            parts.
        is_stored: Whether what later subgraphs read is stored meanwhile. What takes longer to store
            than to compute is then computed again (see `find_repeated` and `find_rearranged`).
        prefix: Prefix of the functions' names.
    """
    view = Graph(graph.mod)
    breakpoints = order_breakpoints(view, groups, fits)
    if results:
        parts = (part for result in list_results(view) for part in list_parts(view, result))
        breakpoints.append(Breakpoint((), (), tuple(dict.fromkeys(parts))))
    targets = [point.targets for point in breakpoints]
    data = find_data_dependent(view, graph.inputs, {var for target in targets for var in target})
    repeated = set[relax.Var]()
    if is_stored:
        repeated = find_repeated(view, data) | find_rearranged(view, data)

    wanted: list[tuple[list[relax.Var], list[relax.Var]]] = []  # (bindings, values read)
    done: set[relax.Var] = set()
    for target in targets:
        needed = [var for var in collect_ancestors(view, target, done) if var in data]
        needed = add_fields(view, needed)
        # A function returns tensors only. A subgraph computes shapes and whole tuples again.
        done.update(var for var in needed if is_tensor(var) and var not in repeated)
        inside = set(needed)
        reads = [arg for var in needed for arg in read_values(view, var) if arg not in inside]
        wanted.append((needed, list(dict.fromkeys(reads))))

    used = [
        (*needed, *reads, *target) for (needed, reads), target in zip(wanted, targets, strict=True)
    ]
    ends = find_ends(used)
    constants = make_constants(view, wanted, data)
    functions: dict[str, relax.Function] = {}
    kept: list[list[relax.Var]] = []
    for i, (needed, _) in enumerate(wanted):
        dropped = {*ends[i], *repeated} - set(targets[i])
        kept.append([var for var in needed if var not in dropped and is_tensor(var)])
    waiting = {*view.func.params, *(var for vars_ in kept for var in vars_)}
    subgraphs = []
    for i, (needed, reads) in enumerate(wanted):
        keep = kept[i]
        inputs, symbols = reads if needed else [], ()
        if needed:
            functions[f"{prefix}_{i}"], symbols = build_function(view, needed, inputs, keep)
        subgraphs.append(
            Subgraph(
                f"{prefix}_{i}" if needed else "",
                breakpoints[i].groups,
                tuple(var.name for var in inputs),
                tuple(var.name for var in keep),
                tuple(var.name for var in targets[i]),
                tuple(var.name for var in ends[i] if var in data and var in waiting),
                breakpoints[i].fits,
                symbols,
            )
        )
    subgraph, function = constants or (None, None)
    constants_mod = (
        make_module({subgraph.function: function}, graph.mod) if subgraph and function else None
    )
    return SplitGraph(make_module(functions, graph.mod), subgraph, constants_mod, tuple(subgraphs))


def make_module(functions: Mapping[str, relax.Function], source: tvm.IRModule) -> tvm.IRModule:
    """Return a module with functions by name and with the loops beside main in `source`.
    Operators that a frontend lowered itself are calls of these loops.
    """
    loops = {
        name: func for name, func in source.functions_items() if isinstance(func, tvm.tirx.PrimFunc)
    }
    made = {
        tvm.ir.GlobalVar(name): func.with_attr("global_symbol", name)
        for name, func in functions.items()
    }
    return tvm.IRModule({**loops, **made})


def order_breakpoints(
    view: Graph, groups: Sequence[SharedQParams], fits: Sequence[FitPoint]
) -> list[Breakpoint]:
    """Return one breakpoint per group, in the plan's order, and one per fit, in front of the
    first reader of the operator's weight, or behind the operator if its own result is the data.
    """
    by_name = view.vars
    breakpoints: list[tuple[float, Breakpoint]] = []
    for group in groups:
        targets = tuple(by_name[name] for name in group.points)
        place = max((view.order[var] for var in targets), default=-1)
        breakpoints.append((place, Breakpoint((group.key,), (), targets)))
    for fit in fits:
        weight = by_name[fit.weight]
        source, place = by_name[fit.source], min(view.order[user] for user in view.users[weight])
        place += 0.5 if view.order[source] >= place else -0.5
        breakpoints.append((place, Breakpoint((), (fit,), (source,))))
    return [point for _, point in sorted(breakpoints, key=lambda item: item[0])]


def list_results(view: Graph) -> Iterator[relax.Var]:
    """Return the tensors that main returns and computes, in order."""
    for expr in iterate_results(result_expr(view)):
        if not isinstance(expr, relax.Var) or expr not in view.values:
            continue
        if isinstance(expr.ty, relax.TensorType):
            yield expr


def read_values(view: Graph, var: relax.Var) -> Iterator[relax.Var]:
    """Return the values that a variable is computed from: its operands, and the casts that
    define its sizes and theirs. Sizes that no cast defines are known from the shapes of the inputs.
    """
    value = view.values[var]
    operands = [arg for arg in free_vars(value) if arg in view.order]
    yield from operands
    for ty in (var.ty, *(arg.ty for arg in operands), *list_sizes(value)):
        for symbol in relax.analysis.tir_vars_in_type(ty):
            cast = view.size_casts.get(symbol)
            if cast is not None and cast is not var:
                yield cast


def list_sizes(value: relax.Expr) -> Iterator[tvm.ir.Type]:
    """Return the types of the shapes that are arguments of an operator. A single size, alone or in
    a tuple, counts as a shape.
    """
    for arg in getattr(value, "args", ()):
        if isinstance(arg, relax.ShapeExpr):
            yield arg.ty
        for each in arg.fields if isinstance(arg, relax.Tuple) else (arg,):
            if isinstance(each.ty, tvm.ir.PrimType) and str(each.ty.dtype) == "int64":
                yield relax.ShapeType([each])


def add_fields(view: Graph, needed: Sequence[relax.Var]) -> list[relax.Var]:
    """Return values with all parts of the tuples among them, in topological order."""
    parts = {
        user
        for var in needed
        if isinstance(var.ty, relax.TupleType)
        for user in view.users[var]
        if isinstance(view.values[user], relax.TupleGetItem)
    }
    return sorted({*needed, *parts}, key=view.order.__getitem__) if parts else [*needed]


def is_tensor(var: relax.Var) -> bool:
    """Whether a value is neither a shape nor a tuple."""
    return isinstance(var.ty, relax.TensorType)


def is_shape(var: relax.Var) -> bool:
    """Whether a value is a shape and not a tensor."""
    return isinstance(var.ty, relax.ShapeType)


def find_data_dependent(
    view: Graph, inputs: Iterable[str], targets: Collection[relax.Var]
) -> set[relax.Var]:
    """Return the values that change from batch to batch, or whose number of elements depends on the
    batch size.

    A value that is computed from constants counts if it is a target, because it is observed like
    any other value. After it is rounded it counts too, because its parameters are chosen while
    subgraphs run.
    """
    names = set(inputs)
    data = {param for param in view.func.params if param.name in names}
    for binding in view.bindings:
        var, value = binding.var, binding.value
        if (
            any(arg in data for arg in free_vars(value))
            or has_symbols(var)
            or is_shape(var)
            or var in view.casts
            or reads_symbols(value)
            or var in targets
            or (
                view.op_name(var) == "relax.qnn.simulated_quantize" and value.args[0] in view.values
            )
        ):
            data.add(var)
    return data


def find_repeated(view: Graph, data: Collection[relax.Var]) -> set[relax.Var]:
    """Return the large values in `data` that few operations compute from much smaller values. It
    takes longer to write and read them than to compute them again: in DNSMOS, 1.1 GB that a
    convolution with 9 weights computes from 9 MB. The system time alone is 2 s of 12 s.
    """
    found: dict[relax.Var, tuple[set[relax.Var], int]] = {}  # values read, multiply-adds
    for binding in view.bindings:
        var, value = binding.var, binding.value
        size = math.prod(static_dims(var.ty))
        if var not in data or not is_tensor(var) or size < LARGE:
            continue
        args = [arg for arg in free_vars(value) if arg in data]
        before = [found.get(arg, ({arg}, 0)) for arg in args]
        sources = {source for read, _ in before for source in read}
        work = max(count_macs(value), size) + sum(macs for _, macs in before)
        read = sum(math.prod(static_dims(source.ty)) for source in sources)
        if work <= MOST_REPEATED * size and read * LEAST_GROWTH <= size:
            found[var] = sources, work
    return set(found)


def find_rearranged(view: Graph, data: Collection[relax.Var]) -> set[relax.Var]:
    """Return the large values in `data` that are smaller values moved and rounded, and the values
    in between: in a network of volumes, 8 GB that join neighbouring slices of 3 GB. To write and
    read them is a fifth of the calibration.
    """
    found: dict[relax.Var, tuple[set[relax.Var], int]] = {}  # values read, elements written
    chosen: list[relax.Var] = []
    for binding in view.bindings:
        var, name = binding.var, view.op_name(binding.var)
        size = math.prod(static_dims(var.ty)) if name in (*VIEWS, *PASSES) else 0
        if var not in data or size < LARGE_MOVED:
            continue
        args = [arg for arg in free_vars(binding.value) if arg in data]
        before = [found.get(arg, ({arg}, 0)) for arg in args]
        sources = {source for read, _ in before for source in read}
        written = sum(passes for _, passes in before) + size * (name in PASSES)
        read = sum(math.prod(static_dims(source.ty)) for source in sources)
        if written <= MOST_PASSES * size and read <= size:
            found[var] = sources, written
            chosen += [var] if read * MOVED_GROWTH <= size else []
    repeated: set[relax.Var] = set()
    while chosen:
        var = chosen.pop()
        if var in found and var not in repeated:
            repeated.add(var)
            chosen += [*free_vars(view.values[var])]
    return repeated


def has_symbols(expr: relax.Expr) -> bool:
    """Whether a dimension of a tensor is symbolic."""
    return any(isinstance(size, str) for size in tensor_shape(expr) or ())


def reads_symbols(value: relax.Expr) -> bool:
    """Whether an argument of an operator has a symbolic dimension: R.full(R.shape([n, 3]), 0)."""
    return any(static_size(dim) is None for ty in list_sizes(value) for dim in ty.values[:])


def collect_ancestors(
    view: Graph, targets: Sequence[relax.Var], done: set[relax.Var]
) -> list[relax.Var]:
    """Return the bound values that the targets need and that are not done, in topological order."""
    found: set[relax.Var] = set()
    stack = [var for var in targets if var in view.values and var not in done]
    while stack:
        var = stack.pop()
        if var in found:
            continue
        found.add(var)
        stack += [arg for arg in read_values(view, var) if arg in view.values and arg not in done]
    return sorted(found, key=view.order.__getitem__)


def make_constants(
    view: Graph,
    wanted: Sequence[tuple[list[relax.Var], list[relax.Var]]],
    data: set[relax.Var],
) -> tuple[Subgraph, relax.Function] | None:
    """Return the function that computes, once, the values that subgraphs read and that no input
    changes.
    """
    outputs = list(
        dict.fromkeys(
            var for _, reads in wanted for var in reads if var not in data and var in view.values
        )
    )
    if not outputs:
        return None
    needed = collect_ancestors(view, outputs, set())
    inputs = list(
        dict.fromkeys(
            arg for var in needed for arg in read_values(view, var) if arg not in view.values
        )
    )
    subgraph = Subgraph(
        "main",
        (),
        tuple(var.name for var in inputs),
        tuple(var.name for var in outputs),
        (),
    )
    return subgraph, build_function(view, needed, inputs, outputs)[0]


def find_waiting(view: Graph, inputs: Sequence[relax.Var]) -> dict[relax.Var, relax.Var]:
    """Return the inputs whose shapes have sizes that no input defines, each one with the last of
    the casts that define them.
    """
    known = {
        symbol for var in inputs for symbol in relax.analysis.definable_tir_vars_in_type(var.ty)
    }
    found: dict[relax.Var, relax.Var] = {}
    for var in inputs:
        symbols = set(relax.analysis.tir_vars_in_type(var.ty)) - known
        casts = [view.size_casts[symbol] for symbol in symbols if symbol in view.size_casts]
        if casts:
            found[var] = max(casts, key=view.order.__getitem__)
    return found


def build_function(
    view: Graph,
    needed: Sequence[relax.Var],
    inputs: Sequence[relax.Var],
    outputs: Sequence[relax.Var],
) -> tuple[relax.Function, tuple[str, ...]]:
    """Return a separate function of some bindings of main, which returns a tuple, and its
    `Subgraph.symbols`.

    If an input has the shape (n + k, 4), and a cast defines n and k, then the input is declared
    without sizes, and gets them after that cast.
    """
    new: dict[relax.Var, relax.Var] = {var: relax.Var(var.name, var.ty) for var in inputs}
    waiting = find_waiting(view, inputs)
    for var in waiting:
        new[var] = relax.Var(var.name, relax.TensorType(dtype=var.ty.dtype, ndim=var.ty.ndim))

    builder = relax.BlockBuilder()
    params = [new[var] for var in inputs]

    def cast(var: relax.Var, value: relax.Expr) -> None:
        new[var] = relax.DataflowVar(var.name, var.ty)
        builder.emit_normalized(relax.MatchCast(new[var], value, var.ty))

    def emit() -> relax.Expr:
        for var in needed:
            value = builder.normalize(replace_vars(view.values[var], new))
            if var in view.casts:
                cast(var, value)
                for each, last in waiting.items():
                    if last is var:
                        cast(each, new[each])
                continue
            new[var] = relax.DataflowVar(var.name, value.ty)
            builder.emit_normalized(relax.VarBinding(new[var], value))
        return builder.emit_output(relax.Tuple([new[var] for var in outputs]))

    function = define_function(builder, params, emit, attrs={"global_symbol": "subgraph"})
    symbols = list(relax.analysis.free_symbolic_vars(function))
    if not symbols and not relax.analysis.defined_symbolic_vars(function):
        return function, ()
    if symbols:
        shape = relax.Var("symbols", relax.ShapeType(symbols))
        function = relax.Function(
            [*function.params, shape], function.body, function.ret_ty, function.is_pure
        )
    # Symbolic dimensions must not be shared between functions of a module.
    return relax.utils.copy_with_new_vars(function), tuple(symbol.name for symbol in symbols)
