"""For authors of patterns: does an operator row mean the same at every stage? Draws models and
compares.

check_pattern(row) builds small models around the pattern, with drawn shapes, axes, shared operands
and inputs that saturate, quantizes them, and compares the simulated, the reference, the numpy
integer and the compiled results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.dpl import CallPattern, TuplePattern

from relayquant.backends import GENERIC
from relayquant.calibration.observers import MinMax, Observer
from relayquant.calibration.weights.pick import pick_weight_parameters
from relayquant.config import BackendConfig, QConfig, QConfigMapping, TensorConfig
from relayquant.effort import Effort
from relayquant.errors import ConfigError, RelayQuantError, format_count
from relayquant.evaluation import ledger, verify
from relayquant.ops import QuantOp
from relayquant.prepared import PreparedModel
from relayquant.qtypes import QSpec, Role
from relayquant.reference import run_values
from relayquant.reference.unary import RELAX_UNARY
from relayquant.rewrite import Pattern
from relayquant.steps import convert_to_reference, lower, prepare


class PatternMismatch(RelayQuantError, AssertionError):
    """Two stages give different results for a pattern, or no stage used it."""


@dataclass(frozen=True)
class PatternReport:
    """What `check_pattern` compared.

    Attributes:
        pattern: Name of the row.
        examples: Models drawn.
        compared: Integers of the pattern's result compared between the stages.
        differing: Share of them that differ between simulation and integer module, by `steps` at
            most.
        steps: Largest difference in units of the result's scale.
    """

    pattern: str
    examples: int
    compared: int
    differing: float
    steps: int


class ModelBuilder:
    """Draws one model: what a `build` function gets. What is drawn depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.VarBinding] = []
        self.inputs: list[relax.Var] = []
        self.sources: dict[relax.Var, bool] = {}

    def draw(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def emit(self, expr: relax.Expr, hint: str = "v", *, last: bool = False) -> relax.Var:
        """Bind an expression to a name of its own."""
        value = self.builder.normalize(expr)
        make = relax.Var if last else relax.DataflowVar
        var = make(f"{hint}{len(self.bindings)}", value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def constant(self, *shape: int, scale: float = 0.5) -> relax.Expr:
        """A float32 constant of normal values."""
        return relax.const((self.rng.standard_normal(shape) * scale).astype("float32"))

    def activation(self, *shape: int, positive: bool = False) -> relax.Expr:
        """A value that is quantized: an input behind a product with a diagonal matrix; with
        `positive` behind a clip to 0.1..4 as well.

        One time in three it is one that was drawn before, so that operands share values and
        parameters.
        """
        known = [
            value
            for value, is_positive in self.sources.items()
            if shape_of(value) == shape and is_positive == positive
        ]
        if known and self.rng.integers(3) == 0:
            return known[-1]
        x = relax.Var(f"x{len(self.inputs)}", relax.TensorType(shape, "float32"))
        self.inputs.append(x)
        diagonal = np.diag(self.rng.uniform(0.5, 1.5, shape[-1])).astype("float32")
        source = self.emit(relax.op.matmul(x, relax.const(diagonal)), "source")
        if positive:
            source = self.emit(relax.op.clip(source, 0.1, 4.0), "source")
        self.sources[source] = positive
        return source

    def finish(self, result: relax.Expr) -> tvm.IRModule:
        """main(x0, x1, ...), with a product behind `result` that wants it as integers."""
        result = self.emit(result, "result")
        end = self.emit(
            relax.op.matmul(result, self.constant(shape_of(result)[-1], 3)), "end", last=True
        )
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], end)
        main = relax.Function(self.inputs, body, end.ty).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": main})


#: Emits the pattern, on operands from `builder.activation` and `builder.constant`; returns its
#: result (unbound).
BuildFunction = Callable[[ModelBuilder], relax.Expr]


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Static shape of a value."""
    return tuple(int(dim) for dim in expr.ty.shape.values)


def check_pattern(
    row: QuantOp,
    build: BuildFunction | None = None,
    *,
    backend: BackendConfig = GENERIC,
    dtypes: tuple[str, ...] = ("uint8", "int8"),
    examples: int = 3,
    steps: int = 2,
    share: float = 0.02,
    compiled: bool = True,
    seed: int = 0,
) -> PatternReport:
    """Compare the stages on models drawn around one operator row.

    Args:
        row: The row; the backend tries it before its own.
        build: Emits the pattern; None for the patterns of the built-in operators, which are drawn
            from the row.
        backend: Whose other patterns quantize what is around it.
        dtypes: Of activations; each is drawn in turn.
        examples: Models to draw.
        steps, share: How far integers of the pattern's result may be from the simulation: by
            `steps`, in at most this share of the elements (the simulation rounds real values, which
            may lie next to a tie).
        compiled: Also compile for this machine, and compare bit for bit with numpy, on calibration
            inputs and on four times larger ones, which saturate.
        seed: Of everything drawn.

    Raises:
        PatternMismatch: stages differ, the simulate callback computes something else than the
            float operators, or no drawn model was quantized by the row; says where and how.
        ConfigError: `build` is needed.
    """
    make = build or find_build(row)
    compared = differing = worst = used = 0
    reasons: list[str] = []
    for example in range(examples):
        builder = ModelBuilder(seed * 1000 + example)
        mod = builder.finish(make(builder))
        prepared = prepare_example(mod, row, backend, dtypes[example % len(dtypes)])
        name = builder.bindings[-2].var.name
        operator = next((op for op in prepared.plan.operators if name in op.values), None)
        if operator is None or operator.pattern != row.name or not operator.quantized:
            reasons.append(operator.reason or operator.pattern if operator else "it was rewritten")
            continue
        inputs = draw_inputs(builder, 3)
        prepared = observe_parameters(prepared, inputs)
        reference = convert_to_reference(prepared)
        integer = lower(reference, prepared.backend)
        entry = ledger(integer).row(name)
        if entry is None or not entry.quantized:
            reasons.append(entry.reason if entry else "it is not in the ledger")
            continue
        used += 1
        for have, want in compare_stages(prepared, reference, integer, name, inputs[0], steps):
            gap = np.abs(have.astype("int64") - want.astype("int64"))
            compared, differing = compared + gap.size, differing + int((gap > 0).sum())
            worst = max(worst, int(gap.max(initial=0)))
        for factor in (1.0, 4.0) if compiled else ():
            fed = {key: value * np.float32(factor) for key, value in inputs[0].items()}
            report = verify(integer, fed)
            if not report.is_equal:
                raise PatternMismatch(
                    f"Pattern {row.name!r}, example {example}, inputs times {factor:g}: compiled "
                    "code and numpy "
                    f"differ first in {report.first}."
                )
    if not used:
        raise PatternMismatch(
            f"Pattern {row.name!r} quantized none of {format_count(examples, 'drawn model')}: "
            f"{'; '.join(dict.fromkeys(reasons))}."
        )
    fraction = differing / max(compared, 1)
    if worst > steps or fraction > share:
        raise PatternMismatch(
            f"Pattern {row.name!r}: {fraction:.1%} of its integers differ between the stages, by "
            f"up to {format_count(worst, 'step')}; "
            f"allowed: {share:.1%} by {steps}. Do the simulate and realize callbacks compute the "
            "same function?"
        )
    return PatternReport(row.name, used, compared, fraction, worst)


def prepare_example(
    mod: tvm.IRModule, row: QuantOp, backend: BackendConfig, dtype: str
) -> PreparedModel:
    """The drawn model prepared with the row before all others, activations of one dtype."""
    default = backend.default_qconfig
    if default is None:
        raise ConfigError(
            f"check_pattern needs a backend with a default_qconfig; {backend.name!r} has none."
        )
    activation = TensorConfig(QSpec(dtype), MinMax())
    mapping = QConfigMapping().set_global(QConfig(activation, default.weight))
    known = [r for r in backend.patterns if r.pattern.name == row.name]
    served = backend.with_pattern(row, known[0].dtypes if known else None)
    # Also one of the backend's own rows goes first here: else a longer one may take its operators.
    first, *others = served.patterns
    served = replace(served, patterns=(replace(first, claims_first=True), *others))
    # With "fast" nothing is added that the row does not have, as a bias to be corrected.
    return prepare(mod, None, mapping, served, effort=Effort.FAST)


def observe_parameters(
    prepared: PreparedModel, inputs: list[dict[str, np.ndarray]]
) -> PreparedModel:
    """With parameters from the ranges of the float values, in numpy: nothing is compiled."""
    parameters = dict(pick_weight_parameters(prepared))
    arguments = prepared.graph.arguments()
    batches = [
        {**batch, **run_values(prepared.graph.mod, {**batch, **arguments})} for batch in inputs
    ]
    for group in prepared.plan.activations:
        seen = [batch[name] for batch in batches for name in group.points]
        observer = group.calibration if isinstance(group.calibration, Observer) else MinMax()
        parameters[group.key] = observer.observe(group.info, seen)
    return replace(prepared, parameters=parameters)


def draw_inputs(builder: ModelBuilder, count: int) -> list[dict[str, np.ndarray]]:
    """Batches of normal values for the inputs of a drawn model."""
    return [
        {x.name: builder.rng.standard_normal(shape_of(x)).astype("float32") for x in builder.inputs}
        for _ in range(count)
    ]


def compare_stages(
    prepared: PreparedModel,
    reference: tvm.IRModule,
    integer: tvm.IRModule,
    name: str,
    inputs: Mapping[str, np.ndarray],
    steps: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(integers of a stage, integers of the last stage) of the value `name`."""
    arguments = prepared.graph.arguments(prepared.parameters, prepared.constants)
    simulated = run_values(prepared.graph.mod, {**inputs, **arguments})
    real, last = run_values(reference, inputs), run_values(integer, inputs)
    compare_reals(simulated[name], real[name], find_step(prepared, name, real[name]), name, steps)
    have = last.get(f"{name}.q", last.get(name))
    if have is None or have.dtype.kind not in "iu":
        # It became one with its operand (a relu whose zero point is the smallest integer): its
        # reader tells.
        compare_results(run_values(prepared.mod, inputs), last, name)
        return
    for stage in (simulated, real):
        # A value on the grid of its operand is not rounded again: it has no integers of its own.
        if f"{name}.q" in stage:
            yield stage[f"{name}.q"], have


def compare_reals(
    simulated: np.ndarray, real: np.ndarray, step: float, name: str, steps: int
) -> None:
    """Raise PatternMismatch if a simulated value is another one than that of the float operators.

    Both before they are rounded: parameters are picked for what was simulated, and would clip what
    the float operators have besides.
    """
    same = simulated == real
    gap = np.abs(np.where(same, 0, simulated) - np.where(same, 0, real)) / step
    if not np.all(gap <= steps):
        raise PatternMismatch(
            f"The simulate callback gives another value {name!r} than the float operators, on the "
            f"same operands: {np.nanmax(gap):.3g} steps of its scale apart before it is rounded; "
            f"allowed: {steps}. Does the callback compute the function of the pattern?"
        )


def find_step(prepared: PreparedModel, name: str, value: np.ndarray) -> float:
    """Units to compare a real value in: the scale of its integers, or of 8 bits if it has none."""
    for key in prepared.plan.value_groups.get(name, ()):
        return float(prepared.parameters[key].scale)
    return max(float(np.abs(value).max(initial=0)), float(np.finfo("float32").tiny)) / 127


def compare_results(
    real: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray], name: str
) -> None:
    """Raise PatternMismatch if what is computed last is further from the float model than 8 bits
    explain.
    """
    (want, have) = (list(values.values())[-1] for values in (real, last))
    gap, size = np.abs(want - have).max(), np.abs(want).max()
    if gap > 0.1 * size:
        raise PatternMismatch(
            f"What is computed from value {name!r} differs from the float model by {gap:.3g}, of "
            f"{size:.3g}."
        )


# --- Models for the built-in operators ----------------------------------------------------------


def find_build(row: QuantOp) -> BuildFunction:
    """How models for a built-in row are drawn: from its own pattern.

    Raises:
        ConfigError: the pattern holds an operator that nothing is known of.
    """
    if not isinstance(row.pattern, Pattern):
        if row.op == "relax.elementwise_chain":
            return draw_chain
        raise ConfigError(f"check_pattern needs build=... for {row.name!r}: its matcher is code.")
    pattern = row.pattern
    roles = {operand.name: operand.role for operand in row.operands}

    def build(builder: ModelBuilder) -> relax.Expr:
        return draw_node(builder, pattern.root, pattern, roles)

    find_unknown(row, pattern.root)
    return build


def find_unknown(row: QuantOp, node: Any) -> None:
    """Raise ConfigError for operators that no model is known for."""
    if isinstance(node, CallPattern):
        if node.op.expr.name not in DRAWN:
            raise ConfigError(
                f"check_pattern needs build=... for {row.name!r}: how to draw {node.op.expr.name} "
                "is not known."
            )
        for arg in node.args:
            find_unknown(row, arg)


def draw_node(builder: ModelBuilder, node: Any, pattern: Pattern, roles: Mapping[str, Role]):
    """The expression of one node of a pattern."""
    args: list[Any] = []
    for arg in node.args:
        if isinstance(arg, CallPattern):
            args.append(builder.emit(draw_node(builder, arg, pattern, roles), "inner"))
        elif isinstance(arg, TuplePattern):
            raise ConfigError("check_pattern needs build=... for a pattern with a tuple.")
        else:
            name = next((n for n, part in pattern.parts.items() if part.same_as(arg)), "")
            args.append(roles.get(name, Role.ACTIVATION))
    return DRAWN[node.op.expr.name](builder, args)


def draw_chain(b: ModelBuilder) -> relax.Expr:
    """x * sigmoid(x), spelled out."""
    x = b.activation(2, b.draw(3, 8))
    return relax.op.multiply(x, b.emit(relax.op.sigmoid(x)))


def draw_conv(b: ModelBuilder, rank: int, op: Callable[..., relax.Expr], transposed: bool = False):
    """A convolution: kernel, stride, padding, groups or depthwise."""
    groups = b.draw(1, 1, 2, 4)
    channels, out = 4, 4 * b.draw(1, 2)
    sizes = [b.draw(5, 7) for _ in range(rank)]
    kernel = [b.draw(1, 3) for _ in range(rank)]
    data = b.activation(b.draw(1, 2), channels, *sizes)
    shape = (channels, out // groups) if transposed else (out, channels // groups)
    weight = b.constant(*shape, *kernel)
    attrs = {"strides": b.draw(1, 2), "padding": b.draw(0, 1), "groups": groups}
    return op(data, weight, **attrs)


def draw_matmul(b: ModelBuilder, args: list[Any]) -> relax.Expr:
    """A product with a constant, or of two values."""
    k, n = b.draw(3, 8), b.draw(1, 5)
    lead = b.draw((2,), (1, 4), (2, 3, 2))
    if args[1] is Role.WEIGHT:
        return relax.op.matmul(b.activation(*lead, k), b.constant(k, n))
    batch = lead[:-1]
    return relax.op.matmul(b.activation(*batch, 3, k), b.activation(*batch, k, n))


def draw_binary(op: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    """Two operands: values of one shape, a constant that broadcasts, or a bias per channel."""

    def draw(b: ModelBuilder, args: list[Any]) -> relax.Expr:
        given = next((arg for arg in args if not isinstance(arg, Role)), None)
        shape = shape_of(given) if given is not None else b.draw((2, 5), (1, 4, 3, 3))
        channel = (1, shape[1], *(1 for _ in shape[2:]))

        def fill(arg: Any) -> relax.Expr:
            if arg is Role.BIAS:
                is_map = len(shape) > 2 and "conv" in read_producer(b, given)
                return b.constant(*(channel if is_map else shape[-1:]))
            if arg is Role.WEIGHT:
                return b.constant(*b.draw(shape, channel))
            return b.activation(*shape) if isinstance(arg, Role) else arg

        return op(*(fill(arg) for arg in args))

    return draw


def read_producer(b: ModelBuilder, expr: Any) -> str:
    """Name of the operator that binds a value; "" if none does."""
    values = [binding.value for binding in b.bindings if binding.var.same_as(expr)]
    return str(getattr(getattr(values[0], "op", None), "name", "")) if values else ""


def draw_unary(
    op: Callable[..., relax.Expr],
    *shapes: tuple[int, ...],
    positive: bool = False,
    **choices: tuple[Any, ...],
) -> Callable[..., relax.Expr]:
    """One operand of one of the shapes, attributes from `choices`; inside a pattern, the operand
    that is there.
    """

    def draw(b: ModelBuilder, args: list[Any]) -> relax.Expr:
        data = args[0]
        if isinstance(data, Role):
            data = b.activation(*b.draw(*(shapes or ((2, 6), (1, 3, 4)))), positive=positive)
        return op(data, **{key: b.draw(*values) for key, values in choices.items()})

    return draw


def draw_prelu(b: ModelBuilder, args: list[Any]) -> relax.Expr:
    """prelu of a tensor with a slope for each index along one of its axes."""
    shape, axis = b.draw(((2, 6), 1), ((1, 3, 4), 1), ((1, 3, 4), 2))
    return relax.op.nn.prelu(b.activation(*shape), b.constant(shape[axis]), axis)


MAP = (1, 4, 6, 6)
R = relax.op

#: operator of a pattern -> how it is drawn
DRAWN: Mapping[str, Callable[[ModelBuilder, list[Any]], relax.Expr]] = {
    "relax.nn.conv1d": lambda b, args: draw_conv(b, 1, R.nn.conv1d),
    "relax.nn.conv2d": lambda b, args: draw_conv(b, 2, R.nn.conv2d),
    "relax.nn.conv2d_transpose": lambda b, args: draw_conv(b, 2, R.nn.conv2d_transpose, True),
    "relax.matmul": draw_matmul,
    "relax.add": draw_binary(R.add),
    "relax.subtract": draw_binary(R.subtract),
    "relax.multiply": draw_binary(R.multiply),
    "relax.nn.relu": draw_unary(R.nn.relu),
    "relax.clip": draw_unary(R.clip, min=(0.0, -0.5), max=(0.7, 6.0)),
    **{
        op: draw_unary(attrgetter(row.relax)(R), positive=row.low is not None)
        for op, row in RELAX_UNARY.items()
        if row.is_table
    },
    "relax.nn.leakyrelu": draw_unary(R.nn.leakyrelu, alpha=(0.01, 0.3)),
    "relax.nn.prelu": draw_prelu,
    "relax.mean": draw_unary(R.mean, MAP, axis=([2, 3], [1], [0, 2]), keepdims=(True,)),
    "relax.nn.avg_pool2d": draw_unary(
        R.nn.avg_pool2d,
        MAP,
        pool_size=((2, 2), (3, 3)),
        strides=((1, 1), (2, 2)),
        padding=((0, 0), (1, 1)),
    ),
    "relax.nn.max_pool2d": draw_unary(
        R.nn.max_pool2d,
        MAP,
        pool_size=((2, 2), (3, 3)),
        strides=((1, 1), (2, 2)),
        padding=((0, 0), (1, 1)),
    ),
    "relax.nn.max_pool1d": draw_unary(R.nn.max_pool1d, (1, 4, 8), pool_size=(2, 3), strides=(1, 2)),
    "relax.reshape": draw_unary(R.reshape, (2, 6), shape=((3, 4), (1, 2, 6))),
    "relax.permute_dims": draw_unary(R.permute_dims, (1, 3, 4), axes=([0, 2, 1], [1, 0, 2])),
    "relax.squeeze": draw_unary(R.squeeze, (1, 3, 4), axis=([0],)),
    "relax.expand_dims": draw_unary(R.expand_dims, (3, 4), axis=(0, 1)),
    "relax.strided_slice": draw_unary(
        R.strided_slice,
        (4, 6),
        axes=([0, 1],),
        begin=([0, 1],),
        end=([4, 6],),
        strides=([1, 1], [2, 2]),
    ),
    "relax.broadcast_to": draw_unary(R.broadcast_to, (1, 6), shape=((3, 6), (2, 1, 6))),
    "relax.take": lambda b, args: R.take(
        b.activation(4, 6),
        relax.const(np.array([2, 0], "int64").astype("int32")),
        axis=b.draw(0, 1),
    ),
    "relax.gather_elements": lambda b, args: R.gather_elements(
        b.activation(4, 6), relax.const(np.array([[2, 0, 1, 3, 3, 0]]), "int64"), axis=0
    ),
    "relax.gather_nd": lambda b, args: R.gather_nd(
        b.activation(4, 6), relax.const(np.array([[2, 0], [1, 5], [3, 3]]), "int64")
    ),
    "relax.tile": draw_unary(R.tile, (2, 3), repeats=((1, 2), (2, 1))),
    "relax.image.resize2d": draw_unary(
        R.image.resize2d,
        MAP,
        size=((12, 12), (9, 12)),
        layout=("NCHW",),
        method=("nearest_neighbor",),
        coordinate_transformation_mode=("asymmetric",),
        rounding_method=("floor",),
    ),
    "relax.max": draw_unary(R.max, (4, 6), axis=([1], [0]), keepdims=(True,)),
    "relax.min": draw_unary(R.min, (4, 6), axis=([1], [0]), keepdims=(True,)),
    "relax.nn.pad": draw_unary(R.nn.pad, (4, 6), pad_width=([0, 1, 2, 0],), pad_value=(0.0, 0.3)),
    "relax.concat": lambda b, args: R.concat(
        [b.activation(2, 6), b.activation(2, 6)], axis=b.draw(0, 1)
    ),
}
