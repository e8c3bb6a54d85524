"""Last step of annotation: quantized operators -> groups of values that share one set of
parameters, and the points where calibration observes each group.

Values joined by sharing operators have one set of parameters. The set is observed where a value is
computed. An operator that only moves values keeps them on the same grid. If only a relu or clip
reads a value, the relu's result is observed instead. This gives a tighter range, and the clamp of
the quantizer does the work of the relu.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from relayquant.base.qtypes import Granularity, QSpec, Role, ValueInfo
from relayquant.config import TensorConfig
from relayquant.ir.ops import Kind
from relayquant.ir.ops.base import Operand
from relayquant.ir.ops.callbacks import run_axis
from relayquant.ir.ops.shape import CLAMPING
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import find_free_name
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.ir.state import pair_states
from relayquant.stages.annotation.match import OperatorMatch

#: a value together with the specification it is quantized by
Node = tuple[relax.Var, QSpec]
#: roles of operands that are constants
CONSTANT = frozenset({Role.WEIGHT, Role.BIAS})


class Partition:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        #: node -> all nodes of its set, in order of appearance; the nodes of a set share one list
        self._sets: dict[Node, list[Node]] = {}
        self._order: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        """Add a node. A new node becomes a set with one member."""
        if node not in self._sets:
            self._sets[node] = [node]
            self._order[node] = len(self._order)

    def members(self, node: Node) -> list[Node]:
        """Return all nodes of the node's set, in order of appearance."""
        self.add(node)
        return sorted(self._sets[node], key=self._order.__getitem__)

    def is_joined(self, a: Node, b: Node) -> bool:
        """Whether two nodes are in one set."""
        self.add(a)
        self.add(b)
        return self._sets[a] is self._sets[b]

    def join(self, a: Node, b: Node) -> None:
        """Merge the sets of two nodes."""
        if self.is_joined(a, b):
            return
        small, large = sorted((self._sets[a], self._sets[b]), key=len)
        large.extend(small)
        self._sets.update(dict.fromkeys(small, large))

    def sets(self) -> list[list[Node]]:
        """Return all sets, each in order of appearance."""
        found: dict[int, list[Node]] = {}
        for node, members in self._sets.items():
            found.setdefault(id(members), []).append(node)
        return list(found.values())


@dataclass(frozen=True)
class ValueGroups:
    """Which values share parameters, by group key.

    Attributes:
        groups: The groups in topological order.
        operands: Operator -> (operand, key) for each quantized operand.
        outputs: Operator -> key of its result.
        value_groups: Value -> keys of its groups. The first is the one that all consumers read.
    """

    groups: tuple[SharedQParams, ...]
    operands: dict[str, tuple[tuple[str, str], ...]]
    outputs: dict[str, str]
    value_groups: dict[str, tuple[str, ...]]


def build_groups(
    graph: Graph,
    matches: Sequence[OperatorMatch],
    quantized: frozenset[relax.Var],
    wanted: Collection[str],
) -> ValueGroups:
    """Build the groups of the `quantized` operators. Results that are `wanted` as integers
    always have a group.
    """
    planned = [matched for matched in matches if matched.root in quantized]
    names = NamedSets.of(graph, matches, quantized, wanted)
    groups = group_values(graph, names)
    for matched in planned:
        groups += [weight_group(matched, *constant) for constant in find_constants(matched)]
    value_groups: dict[str, list[str]] = {}
    for (var, spec), key in names.key_of.items():
        keys = value_groups.setdefault(var.name, [])
        keys.insert(0 if names.primary[var] == spec else len(keys), key)
    order = {name: graph.order[var] for name, var in graph.vars.items()}
    groups.sort(key=lambda g: max(order[n] for n in g.points) if g.points else -len(order) - 1)
    return ValueGroups(
        tuple(groups),
        {matched.root.name: names.operands(matched) for matched in planned},
        {matched.root.name: key for matched in planned if (key := names.output(matched))},
        {name: tuple(keys) for name, keys in value_groups.items()},
    )


@dataclass(frozen=True, eq=False)
class NamedSets:
    """Which values share parameters, and by which key: what a search asks of many plans.

    Attributes:
        active: The operators on integers that read and return rounded values.
        partition: The sets of values.
        primary: Value -> the specification that all its consumers read.
        key_of: Value and specification -> group key, sets in order of appearance.
    """

    active: Sequence[OperatorMatch]
    partition: Partition
    primary: Mapping[relax.Var, QSpec]
    key_of: Mapping[Node, str]

    @staticmethod
    def of(
        graph: Graph,
        matches: Sequence[OperatorMatch],
        quantized: frozenset[relax.Var],
        wanted: Collection[str] = (),
    ) -> NamedSets:
        """Join the values of the `quantized` operators; arguments as of `build_groups`."""
        # An operator with dynamic parameters reads and returns float values, so only its weight has
        # a group. A weight in groups has no entry here, because it has many sets of parameters.
        active = [m for m in matches if m.root in quantized and not m.has_float_data]
        partition = Partition()
        for node in seed_nodes(active, wanted):
            partition.add(node)
        spread_sharing(active, partition)
        join_concat_inputs(graph, active, partition)
        add_supported_outputs(active, partition)
        join_states(graph, active, partition)
        primary = choose_primary(active, partition)
        key_of: dict[Node, str] = {}
        taken: set[str] = set()
        for nodes in partition.sets():
            first, spec = min(nodes, key=lambda node: graph.order[node[0]])
            name = first.name
            key = name if primary[first] == spec else find_free_name(f"{name}:{spec.dtype}", taken)
            taken.add(key)
            key_of.update(dict.fromkeys(nodes, key))
        return NamedSets(active, partition, primary, key_of)

    def operands(self, matched: OperatorMatch) -> tuple[tuple[str, str], ...]:
        """Return (operand, group key) for each quantized operand."""
        keys = {name: weight_key(matched, name) for name, _, _ in find_constants(matched)}
        if not matched.has_float_data:
            spec = operand_spec(matched, self.primary)
            for name, expr, operand in matched.operands:
                if operand.role not in CONSTANT and (expr, spec) in self.key_of:
                    keys[name] = self.key_of[expr, spec]
        return tuple((name, keys[name]) for name, _, _ in matched.operands if name in keys)

    def output(self, matched: OperatorMatch) -> str | None:
        """Return the group key of an operator's result; None if the result is not rounded."""
        if matched.has_float_data or matched.root not in self.primary:
            return None
        return self.key_of[matched.root, self.primary[matched.root]]


def group_values(graph: Graph, names: NamedSets) -> list[SharedQParams]:
    """Return a group for each set of computed values."""
    active, partition, primary = names.active, names.partition, names.primary
    shared = {matched.root: matched for matched in active if matched.kind is Kind.SHARING}
    by_root = {matched.root: matched for matched in active}
    consumers = find_consumers(active)
    groups: list[SharedQParams] = []
    for nodes in partition.sets():
        nodes = sorted(nodes, key=lambda node: graph.order[node[0]])
        spec = nodes[0][1]
        members = [var for var, _ in nodes]
        first = members[0]
        is_primary, key = primary[first] == spec, names.key_of[nodes[0]]
        points, clamped = find_points(graph, members, shared, by_root)
        fixed = find_fixed_calibration(nodes, by_root)
        info = ValueInfo(
            key,
            Role.ACTIVATION,
            spec.with_granularity(Granularity.PER_TENSOR),
            tensor_shape(points[0]) or (),
            consumers=tuple(user.name for var in members for user in graph.users[var]),
        )
        groups.append(
            SharedQParams(
                info,
                tuple(var.name for var in members),
                tuple(var.name for var in points),
                fixed or find_calibration(members, spec, consumers, by_root),
                is_fixed=fixed is not None,
                base=None if is_primary else primary_key(first, primary, partition, graph),
                clamped=tuple(var.name for var in clamped),
            )
        )
    return groups


def find_constants(matched: OperatorMatch) -> list[tuple[str, relax.Expr, Operand]]:
    """Return the constants that are rounded by parameters of their own: weights, and a bias if the
    QConfig rounds it. A weight in groups has many sets of parameters, and is left out.
    """
    if matched.grouped is not None:
        return []
    roles = CONSTANT if matched.require_qconfig().has_own_bias else {Role.WEIGHT}
    return [row for row in matched.operands if row[2].role in roles]


def weight_key(matched: OperatorMatch, name: str) -> str:
    """Return the group key of one constant operand."""
    return f"{matched.root.name}:{name}"


def operand_spec(matched: OperatorMatch, primary: Mapping[relax.Var, QSpec]) -> QSpec:
    """Return the specification in which the operator reads its computed operands. For a sharing
    operator it is the specification of its result.
    """
    if matched.kind is Kind.SHARING and matched.root in primary:
        return primary[matched.root]
    return matched.data_spec


def seed_nodes(active: Sequence[OperatorMatch], wanted: Collection[str]) -> list[Node]:
    """Return the nodes that need parameters: operands of computing operators, results with their
    own parameters, and results that are `wanted` as integers.
    """
    nodes: list[Node] = []
    for matched in active:
        if matched.root.name in wanted:
            nodes.append((matched.root, matched.result_spec))
        if matched.kind is Kind.SHARING:
            continue
        nodes += [(var, matched.data_spec) for var in matched.inputs]
        if matched.has_own_output:
            nodes.append((matched.root, matched.result_spec))
    return nodes


def spread_sharing(active: Sequence[OperatorMatch], partition: Partition) -> None:
    """Join inputs and outputs of sharing operators, in both directions, starting from the seeds."""
    neighbours: dict[relax.Var, list[relax.Var]] = {}
    for matched in active:
        if matched.kind is Kind.SHARING:
            for source in matched.inputs:
                neighbours.setdefault(source, []).append(matched.root)
                neighbours.setdefault(matched.root, []).append(source)
    queue = [node for nodes in partition.sets() for node in nodes]
    seen = set(queue)
    while queue:
        var, spec = queue.pop()
        for neighbour in neighbours.get(var, ()):
            node = (neighbour, spec)
            partition.join(node, (var, spec))
            if node not in seen:
                seen.add(node)
                queue.append(node)


def join_concat_inputs(graph: Graph, active: Sequence[OperatorMatch], partition: Partition) -> None:
    """Give the inputs of a concat its parameters if nothing else reads them. Then the concat needs
    no requantize. Parts of one value that are joined again, as neighbouring slices of a volume, are
    moved only.

    A value with another reader must not wait for the concat's range, which may depend on that
    reader.
    """
    by_root = {matched.root: matched for matched in active}
    for matched in active:
        if matched.pattern is None or matched.pattern.op != "relax.concat":
            continue
        node = (matched.root, matched.result_spec)
        for var in matched.inputs:
            part = (var, matched.data_spec)
            if part[1] != node[1] or partition.is_joined(part, node):
                continue
            members = partition.members(part)
            if find_fixed_calibration(members, by_root) is not None:
                continue  # a sigmoid has a fixed range, unlike the values it is joined with
            values = {value for value, _ in members}
            inside = values | {matched.root}
            if all(graph.order[v] >= 0 and is_read_inside(graph, v, inside) for v in values):
                partition.join(part, node)


def is_read_inside(graph: Graph, var: relax.Var, inside: Collection[relax.Var]) -> bool:
    """Whether one value is computed from `var`, or only slices that are in a collection, and the
    model does not return it.
    """
    are_slices = all(
        user in inside and graph.op_name(user) == "relax.strided_slice" for user in graph.users[var]
    )
    return graph.has_one_user(var) or (are_slices and var not in graph.outputs)


def join_states(graph: Graph, active: Sequence[OperatorMatch], partition: Partition) -> None:
    """Give a state and its new value the same parameters, since they are one value.

    A state that is read as integers is then returned on their grid, if an operator on integers
    computes it.
    """
    roots = {matched.root.name: matched for matched in active}
    for old, new in pair_states(graph):
        specs = {spec for nodes in partition.sets() for var, spec in nodes if var.name == old}
        if new not in roots or old == new:
            continue
        spec = roots[new].result_spec
        if spec in specs:
            partition.join((graph.vars[old], spec), (roots[new].root, spec))


def add_supported_outputs(active: Sequence[OperatorMatch], partition: Partition) -> None:
    """Return a result as the operator's QConfig says, if the QConfig has a separate `output` or if
    the backend cannot produce the specification that the readers want.

    Otherwise the accumulator is rounded once, to the specification of the first reader. As in FX, a
    reader that wants another dtype gets the result requantized.
    """
    wanted: dict[relax.Var, list[QSpec]] = {}
    for nodes in partition.sets():
        for var, spec in nodes:
            wanted.setdefault(var, []).append(spec)
    for matched in active:
        specs = wanted.get(matched.root, [])
        if matched.kind is Kind.SHARING or not specs or matched.result_spec in specs:
            continue
        config = matched.require_qconfig()
        if config.output is not None:
            partition.add((matched.root, matched.result_spec))
            continue
        direct = replace(config, output=TensorConfig(specs[0], config.data.observer))
        if (
            matched.row is not None
            and matched.row.find_conflict(direct, has_bias=False) is not None
        ):
            partition.add((matched.root, matched.result_spec))


def choose_primary(active: Sequence[OperatorMatch], partition: Partition) -> dict[relax.Var, QSpec]:
    """Choose the specification that all consumers of a value read: the producer's if a consumer
    wants it, else the first consumer's.
    """
    specs: dict[relax.Var, list[QSpec]] = {}
    for nodes in partition.sets():
        for var, spec in nodes:
            specs.setdefault(var, []).append(spec)
    made = {matched.root: matched.result_spec for matched in active}
    return {var: made[var] if made.get(var) in found else found[0] for var, found in specs.items()}


def primary_key(
    var: relax.Var, primary: Mapping[relax.Var, QSpec], partition: Partition, graph: Graph
) -> str:
    """Return the key of the group that holds the value in its primary specification."""
    members = [member for member, _ in partition.members((var, primary[var]))]
    return min(members, key=graph.order.__getitem__).name


def find_points(
    graph: Graph,
    members: Sequence[relax.Var],
    shared: Mapping[relax.Var, OperatorMatch],
    by_root: Mapping[relax.Var, OperatorMatch],
) -> tuple[list[relax.Var], list[relax.Var]]:
    """Return (members that are observed and rounded, members that are only rounded again)."""
    inside = set(members)

    def is_deferred(var: relax.Var) -> bool:
        """Whether all readers are chains of sharing operators that end in a clamp."""
        if not graph.has_one_user(var) or graph.order[var] < 0:
            return False
        user = graph.users[var][0]
        matched = shared.get(user)
        if matched is None or user not in inside or matched.pattern is None:
            return False
        return matched.pattern.op in CLAMPING.values() or is_deferred(user)

    deferred = {var for var in members if is_deferred(var)}
    settled: set[relax.Var] = set()
    points, clamped = [], []
    for var in members:
        if var in deferred:
            continue
        if not is_moved(var, inside, settled, shared, by_root):
            points.append(var)
        elif graph.op_name(var) == "relax.clip" or not keeps_grid(by_root[var]):
            clamped.append(var)  # neither a bound nor a mean needs to be on the grid
        settled.add(var)
    return points, clamped


def keeps_grid(matched: OperatorMatch) -> bool:
    """Whether the results of an operator without separate parameters are on the grid of its
    operands.
    """
    return matched.keeps_values or (
        matched.pattern is not None and matched.pattern.op == "relax.concat"
    )


def is_moved(
    var: relax.Var,
    inside: set[relax.Var],
    settled: set[relax.Var],
    shared: Mapping[relax.Var, OperatorMatch],
    by_root: Mapping[relax.Var, OperatorMatch],
) -> bool:
    """Whether the operator that computes `var` only moves or clamps values on the same grid."""
    matched = by_root.get(var)
    if matched is None or matched.pattern is None or matched.match is None:
        return False
    moves = var in shared or matched.pattern.op == "relax.concat"
    sources = matched.inputs
    if not moves or not sources or not all(v in inside and v in settled for v in sources):
        return False
    if len(sources) < sum(1 for _ in matched.operands):
        return False  # constants among the operands get another range
    if matched.pattern.op == "relax.nn.pad":
        return float(matched.match.call("relax.nn.pad").attrs.pad_value) == 0.0
    return True


def find_consumers(
    active: Sequence[OperatorMatch],
) -> dict[relax.Var, list[tuple[int, OperatorMatch]]]:
    """Map each value to the operators that compute with it and their indices in `active`."""
    found: dict[relax.Var, list[tuple[int, OperatorMatch]]] = {}
    for place, matched in enumerate(active):
        for var in matched.inputs if matched.kind is not Kind.SHARING else ():
            found.setdefault(var, []).append((place, matched))
    return found


def find_calibration(
    members: Sequence[relax.Var],
    spec: QSpec,
    consumers: Mapping[relax.Var, Sequence[tuple[int, OperatorMatch]]],
    by_root: Mapping[relax.Var, OperatorMatch],
):
    """Choose the observer that picks a group's parameters.

    As in FX, it is the `output` of a member's QConfig if the QConfig has one. Otherwise it is the
    first consumer's activation configuration, and without consumers the producer's.

    Args:
        consumers: See `find_consumers`.
    """
    for var in members:
        own = by_root[var].require_qconfig().output if var in by_root else None
        if own is not None and own.spec.stored == spec:
            return own.observer
    asking = [
        (place, matched)
        for var in members
        for place, matched in consumers.get(var, ())
        if matched.data_spec == spec
    ]
    if asking:
        _, first = min(asking, key=lambda found: found[0])
        return first.require_qconfig().tensor(Role.ACTIVATION).observer
    for var in members:
        if var in by_root:
            return by_root[var].require_qconfig().tensor(Role.OUTPUT).observer
    raise ValueError(f"no operator asks for the parameters of {members[0].name!r}")


def find_fixed_calibration(nodes: Sequence[Node], by_root: Mapping[relax.Var, OperatorMatch]):
    """Return the observer of parameters that the backend fixes for one of the values; None if it
    fixes none.
    """
    for var, spec in nodes:
        matched = by_root.get(var)
        if matched is not None and matched.row is not None and spec == matched.result_spec:
            fixed = matched.row.find_fixed(spec)
            if fixed is not None:
                return fixed
    return None


def weight_group(matched: OperatorMatch, name: str, expr: relax.Expr, operand) -> SharedQParams:
    """Return the group of one constant operand. It is per-channel if the operand has a channel
    axis.
    """
    config = matched.require_qconfig().tensor(operand.role)
    axis = run_axis(matched.pattern, operand, matched.match)
    spec = config.spec.stored
    if axis is None or not spec.is_per_channel:
        spec, axis = spec.with_granularity(Granularity.PER_TENSOR), None
    key = weight_key(matched, name)
    shape = tensor_shape(expr) or ()
    info = ValueInfo(key, operand.role, spec, shape, axis, (matched.root.name,))
    return SharedQParams(info, (), (), config.observer, constant=(matched.root.name, name))
