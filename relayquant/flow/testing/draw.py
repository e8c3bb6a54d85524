"""Drawing of models for authors of patterns: operator row -> models around it, from its pattern or
from the author's `build` function.

A drawn model depends only on the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import CallPattern, TuplePattern

from relayquant.base.qtypes import Role
from relayquant.errors import ConfigError
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.recurrent import CELLS
from relayquant.ir.ops import QuantOp
from relayquant.ir.reference.unary import RELAX_UNARY
from relayquant.ir.rewrite import Pattern
from relayquant.ir.rewrite.expressions import with_operands


class ModelBuilder:
    """Draws one model. A `build` function gets it. The model depends only on the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.VarBinding] = []
        self.inputs: list[relax.Var] = []
        self.sources: dict[relax.Var, bool] = {}

    def draw(self, *choices: Any) -> Any:
        """Draw one of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def emit(self, expr: relax.Expr, hint: str = "v", *, last: bool = False) -> relax.Var:
        """Bind an expression to a new name. Calls inside it get names of their own."""
        value = self.builder.normalize(self._without_calls(expr))
        make = relax.Var if last else relax.DataflowVar
        var = make(f"{hint}{len(self.bindings)}", value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def _without_calls(self, expr: relax.Expr) -> relax.Expr:
        """Return an expression whose operands are bound."""
        if isinstance(expr, Call):
            return with_operands(expr, [self._bound(arg) for arg in expr.args])
        return self._bound(expr)

    def _bound(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._bound(part) for part in expr.fields])
        return self.emit(expr) if isinstance(expr, Call) else expr

    def constant(self, *shape: int, scale: float = 0.5) -> relax.Expr:
        """Draw a float32 constant of normal values."""
        return relax.const((self.rng.standard_normal(shape) * scale).astype("float32"))

    def activation(self, *shape: int, positive: bool = False) -> relax.Expr:
        """Draw a quantized value: an input behind a product with a diagonal matrix; with `positive`
        also behind a clip to 0.1..4.

        In one third of the draws it is a value drawn before, so that operands share values and
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
        """Return main(x0, x1, ...), with a product after `result` that wants it as integers."""
        result = self.emit(result, "result")
        end = self.emit(
            relax.op.matmul(result, self.constant(shape_of(result)[-1], 3)), "end", last=True
        )
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], end)
        main = relax.Function(self.inputs, body, end.ty).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": main})


#: Emits the pattern on operands from `builder.activation` and `builder.constant`, and returns its
#: result (unbound).
BuildFunction = Callable[[ModelBuilder], relax.Expr]


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Return the static shape of a value."""
    return tuple(int(dim) for dim in expr.ty.shape.values)


def draw_inputs(builder: ModelBuilder, count: int) -> list[dict[str, np.ndarray]]:
    """Draw batches of normal values for the inputs of a drawn model."""
    return [
        {x.name: builder.rng.standard_normal(shape_of(x)).astype("float32") for x in builder.inputs}
        for _ in range(count)
    ]


def find_build(row: QuantOp) -> BuildFunction:
    """Return how models for a built-in row are drawn: from its pattern.

    Raises:
        ConfigError: the pattern holds an operator that cannot be drawn.
    """
    if not isinstance(row.pattern, Pattern):
        if row.op == "relax.elementwise_chain":
            return draw_chain
        raise ConfigError(
            f"check_pattern needs build=... for {row.name!r}: its matcher is code.", code="RQ106"
        )
    pattern = row.pattern
    roles = {operand.name: operand.role for operand in row.operands}

    def build(builder: ModelBuilder) -> relax.Expr:
        return draw_node(builder, pattern.root, pattern, roles)

    find_unknown(row, pattern.root)
    return build


def find_unknown(row: QuantOp, node: Any) -> None:
    """Raise ConfigError for operators that cannot be drawn."""
    if isinstance(node, CallPattern):
        if node.op.expr.name not in DRAWN:
            raise ConfigError(
                f"check_pattern needs build=... for {row.name!r}: how to draw {node.op.expr.name} "
                "is not known.",
                code="RQ106",
            )
        for arg in node.args:
            find_unknown(row, arg)


def draw_node(builder: ModelBuilder, node: Any, pattern: Pattern, roles: Mapping[str, Role]):
    """Draw the expression of one node of a pattern."""
    args: list[Any] = []
    for arg in node.args:
        if isinstance(arg, CallPattern):
            args.append(builder.emit(draw_node(builder, arg, pattern, roles), "inner"))
        elif isinstance(arg, TuplePattern):
            raise ConfigError(
                "check_pattern needs build=... for a pattern with a tuple.", code="RQ106"
            )
        else:
            name = next((n for n, part in pattern.parts.items() if part.same_as(arg)), "")
            args.append(roles.get(name, Role.ACTIVATION))
    return DRAWN[node.op.expr.name](builder, args)


def draw_chain(b: ModelBuilder) -> relax.Expr:
    """Draw x * sigmoid(x), as two operators."""
    x = b.activation(2, b.draw(3, 8))
    return relax.op.multiply(x, b.emit(relax.op.sigmoid(x)))


def draw_conv(b: ModelBuilder, rank: int, op: Callable[..., relax.Expr], transposed: bool = False):
    """Draw a convolution: kernel, stride, padding, groups or depthwise."""
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
    """Draw a product with a constant, or of two values."""
    k, n = b.draw(3, 8), b.draw(1, 5)
    lead = b.draw((2,), (1, 4), (2, 3, 2))
    if args[1] is Role.WEIGHT:
        return relax.op.matmul(b.activation(*lead, k), b.constant(k, n))
    batch = lead[:-1]
    return relax.op.matmul(b.activation(*batch, 3, k), b.activation(*batch, k, n))


def draw_binary(op: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    """Draw two operands: values of one shape, a constant that broadcasts, or a bias per channel."""

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
    """Return the name of the operator that binds a value; "" if there is none."""
    values = [binding.value for binding in b.bindings if binding.var.same_as(expr)]
    return str(getattr(getattr(values[0], "op", None), "name", "")) if values else ""


def draw_unary(
    op: Callable[..., relax.Expr],
    *shapes: tuple[int, ...],
    positive: bool = False,
    **choices: tuple[Any, ...],
) -> Callable[..., relax.Expr]:
    """Draw one operand with one of the shapes, and attributes from `choices`. Inside a pattern,
    use the operand that is there.
    """

    def draw(b: ModelBuilder, args: list[Any]) -> relax.Expr:
        data = args[0]
        if isinstance(data, Role):
            data = b.activation(*b.draw(*(shapes or ((2, 6), (1, 3, 4)))), positive=positive)
        return op(data, **{key: b.draw(*values) for key, values in choices.items()})

    return draw


def draw_prelu(b: ModelBuilder, args: list[Any]) -> relax.Expr:
    """Draw a prelu of a tensor, with one slope for each index along one of its axes."""
    shape, axis = b.draw(((2, 6), 1), ((1, 3, 4), 1), ((1, 3, 4), 2))
    return relax.op.nn.prelu(b.activation(*shape), b.constant(shape[axis]), axis)


def draw_recurrent(name: str) -> Callable[[ModelBuilder, list[Any]], relax.Expr]:
    """Return a function that draws a recurrent layer, in both directions."""

    def draw(b: ModelBuilder, args: list[Any]) -> relax.Expr:
        hidden = b.draw(3, 8)
        units = CELLS[name].gates * hidden
        data = b.activation(b.draw(1, 4), b.draw(1, 2), units)
        return getattr(qnn, name)(data, b.constant(hidden, units), is_reversed=b.draw(False, True))

    return draw


MAP = (1, 4, 6, 6)
R = relax.op

#: operator of a pattern -> function that draws it
DRAWN: Mapping[str, Callable[[ModelBuilder, list[Any]], relax.Expr]] = {
    "relax.nn.conv1d": lambda b, args: draw_conv(b, 1, R.nn.conv1d),
    "relax.nn.conv2d": lambda b, args: draw_conv(b, 2, R.nn.conv2d),
    "relax.nn.conv2d_transpose": lambda b, args: draw_conv(b, 2, R.nn.conv2d_transpose, True),
    "relax.matmul": draw_matmul,
    **{f"relax.qnn.{name}": draw_recurrent(name) for name in CELLS},
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
