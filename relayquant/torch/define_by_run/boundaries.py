"""Define-by-run, convert: boundaries between regions, and which of them integers cross.

Values that can reach the same input of a region, from two branches or around a loop, share their
parameters. Such boundaries are joined until no value crosses two of them. A boundary is integer if
the regions that compute its values, and one region that reads them, quantize the values anyway. The
reading region's observer chooses the parameters from all values that crossed. A value that is also
read in float is not rounded for that: the region returns both forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relayquant.base.qtypes import QParams
from relayquant.config.observers import MinMax, Observer
from relayquant.errors import ConfigError
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import iterate_results, result_expr
from relayquant.stages.calibration.observer_selection import OutputSQNR
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.define_by_run.regions import Input, Region
from relayquant.torch.define_by_run.tape import Tape

#: number of the model's caller, treated as a region
OUTSIDE = -1


@dataclass(frozen=True, order=True)
class Port:
    """An input or output of a region, by number.

    In the region `OUTSIDE`, an output is an argument of the model, and an input is a result of the
    model.
    """

    region: int
    is_output: bool
    number: int


@dataclass(frozen=True)
class Boundary:
    """Inputs and outputs of regions that are one value of the model, with its parameters.

    `exact` are the outputs among them that are also read in float.
    """

    ports: frozenset[Port]
    qparams: QParams
    exact: frozenset[Port] = frozenset()


def find_made(tapes: Sequence[Tape], regions: Sequence[Region]) -> dict[tuple[int, int], Port]:
    """Map (tape, value) to the region output that it is."""
    made: dict[tuple[int, int], Port] = {}
    for b, region in enumerate(regions):
        for each in region.passes:
            inside: dict[int, int] = {}
            for i, step in zip(each.steps, region.steps, strict=True):
                inside.update(zip(step.results, tapes[each.tape].steps[i].results, strict=True))
            for k, number in enumerate(region.outputs):
                made[each.tape, inside[number]] = Port(b, True, k)
    return made


def find_owned(tapes: Sequence[Tape], regions: Sequence[Region]) -> list[set[int]]:
    """Return the steps of each tape that are part of a region."""
    owned = [set[int]() for _ in tapes]
    for region in regions:
        for each in region.passes:
            owned[each.tape].update(each.steps)
    return owned


def find_joins(
    tapes: Sequence[Tape],
    regions: Sequence[Region],
    inputs: Collection[int],
    outputs: Collection[int],
) -> list[frozenset[Port]]:
    """Group ports that values connect. Unconnected ports are left out.

    `inputs` and `outputs` are tensors of the model's arguments and results, by number, that become
    ports too.
    """
    made = find_made(tapes, regions)
    reads: list[tuple[tuple[int, int], Port]] = []
    for b, region in enumerate(regions):
        for each in region.passes:
            for k, value in enumerate(read_inputs(tapes[each.tape], region, each.steps)):
                reads.append(((each.tape, value), Port(b, False, k)))
    for t, tape in enumerate(tapes):
        for value, k in tape.entries.items():
            if k in inputs:
                made[t, value] = Port(OUTSIDE, True, k)
        for k, result in enumerate(tape.results):
            if k in outputs and result is not None:
                reads.append(((t, result), Port(OUTSIDE, False, k)))
    groups: dict[Port, set[Port]] = {}
    for value, port in reads:
        if value not in made:
            continue
        joined = groups.get(port, {port}) | groups.get(made[value], {made[value]})
        groups.update(dict.fromkeys(joined, joined))
    return sorted({frozenset(group) for group in groups.values()}, key=sorted)


def find_float_reads(
    tapes: Sequence[Tape], regions: Sequence[Region], outputs: Collection[int]
) -> set[Port]:
    """Find region outputs that operators in PyTorch or the user read.

    Results that the model returns as integers, the tensors with the given numbers, do not count.
    """
    owned, made = find_owned(tapes, regions), find_made(tapes, regions)
    read: set[Port] = set()
    for t, tape in enumerate(tapes):
        floats = {value for k, value in enumerate(tape.results) if k not in outputs}
        values: set[object] = {v for v in tape.alive if v in floats or v not in tape.results}
        for i, step in enumerate(tape.steps):
            if i not in owned[t]:
                values.update(step.operands)
        read.update(port for (at, value), port in made.items() if at == t and value in values)
    return read


def is_read_inside(prepared: PreparedModel, number: int) -> bool:
    """Whether operators of a region read one of its outputs."""
    graph = Graph(prepared.mod)
    result = list(iterate_results(result_expr(graph)))[number]
    return isinstance(result, relax.Var) and bool(graph.users[result])


def read_inputs(tape: Tape, region: Region, steps: Sequence[int]) -> list[int]:
    """Return the numbers of the values at the inputs of a region in one pass."""
    found: dict[int, int] = {}
    for i, step in zip(steps, region.steps, strict=True):
        for operand, source in zip(tape.steps[i].operands, step.sources, strict=True):
            if isinstance(source, Input) and isinstance(operand, int):
                found[source.number] = operand
    return [found[number] for number in range(len(found))]


def name_ports(prepared: PreparedModel) -> tuple[list[str], list[str]]:
    """Name the inputs and outputs of a region's module. "" for an output that is not a separate
    value.
    """
    graph = Graph(prepared.mod)
    inputs = [param.name for param in graph.func.params]
    results = iterate_results(result_expr(graph))
    return inputs, [getattr(result, "name", "") for result in results]


def find_group(prepared: PreparedModel, name: str) -> SharedQParams | None:
    """Find the 8-bit group of a value. None if it is float."""
    keys = prepared.plan.value_groups.get(name, ())
    if len(keys) != 1:
        return None
    group = prepared.plan.group(keys[0])
    maker = prepared.plan.operator(name) if prepared.plan.has_operator(name) else None
    if maker is not None and (not maker.quantized or maker.dynamic is not None):
        return None
    return None if group.info.spec.is_per_channel or group.constant is not None else group


def choose_boundaries(
    joins: Sequence[frozenset[Port]],
    graphs: Mapping[int, tvm.IRModule],
    plan_region: Callable[..., PreparedModel],
    observer: Observer | None,
    read_values: Callable[[Port], Iterator[np.ndarray]],
    float_reads: Collection[Port],
    returned_dtype: str,
) -> list[Boundary]:
    """Choose the boundaries that integers cross.

    Args:
        joins: Result of `find_joins`.
        graphs: Modules of the quantized regions, by number.
        plan_region: (module, output_dtypes) -> its plan. Raises ConfigError if an output cannot
            have its dtype.
        observer: Chooses the parameters. None: the observer of the first region that reads the
            values.
        read_values: Input of a region, or result of the model -> all arrays seen there.
        float_reads: Outputs that PyTorch reads.
        returned_dtype: Dtype of the model's results that no region reads.
    """
    plans = {number: plan_region(mod, {}) for number, mod in graphs.items()}
    boundaries = []
    for ports in joins:
        makers = [port for port in ports if port.is_output and port.region != OUTSIDE]
        if any(port.region not in plans for port in makers):
            continue
        read = {
            port: find_port_group(plans, port)
            for port in sorted(ports)
            if not port.is_output and port.region in plans
        }
        readers = {port: group for port, group in read.items() if group is not None}
        outside = {port for port in ports if port.region == OUTSIDE}
        returned = [port for port in outside if not port.is_output]
        first = next(iter(readers.values()), None)
        if first is None and not returned:
            continue
        dtype = returned_dtype if first is None else first.info.spec.dtype
        try:
            of_makers = {
                port: plan_region(graphs[port.region], {port.number: dtype})
                for port in sorted(makers)
            }
        except ConfigError:
            continue
        made = [find_port_group({port.region: plan}, port) for port, plan in of_makers.items()]
        groups = [*readers.values(), *made]
        first = next(iter(groups), None)
        if first is None or not all(g is not None and is_alike(g, first) for g in groups):
            continue
        picker = observer or first.observer
        if first.is_fixed or not isinstance(picker, Observer):
            continue
        if isinstance(picker, OutputSQNR):
            picker = MinMax()  # without an output to measure, nothing is clipped
        values = itertools.chain.from_iterable(map(read_values, [*read, *returned]))
        crossed = frozenset([*makers, *readers, *outside])  # other readers use the float form
        exact = frozenset(
            port for port in makers
            if crossed != ports or port in float_reads
            or is_read_inside(plans[port.region], port.number)
        )  # fmt: skip
        boundaries.append(Boundary(crossed, picker.observe(first.info, values), exact))
    return boundaries


def find_port_group(plans: Mapping[int, PreparedModel], port: Port) -> SharedQParams | None:
    """Find the group of an input or output."""
    prepared = plans[port.region]
    name = name_ports(prepared)[port.is_output][port.number]
    return find_group(prepared, name)


def is_alike(group: SharedQParams, other: SharedQParams) -> bool:
    """Whether two groups have the same kind of integers."""
    a, b = group.info.spec, other.info.spec
    return (a.dtype, a.limits, a.scheme) == (b.dtype, b.limits, b.scheme)
