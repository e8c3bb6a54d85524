"""First stage, PyTorch: operators that TVM's frontend does not know, or gets wrong.

A conversion takes a node of the program and the importer of TVM's frontend, and returns the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

#: node of the program, importer of TVM's frontend -> value
Convert = Callable[[Any, Any], relax.Expr]


def read_arguments(node: Any, *names: str) -> list[Any]:
    """The arguments of an operator by the names that its schema has, with its defaults."""
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    return [given[name] for name in names]


def convert_extreme(node: Any, importer: Any) -> relax.Expr:
    """amax(x, dims, keepdim) -> R.max, amin -> R.min; no dims are all."""
    operand, dims, keepdims = read_arguments(node, "self", "dim", "keepdim")
    reduce = relax.op.max if "amax" in str(node.target) else relax.op.min
    value = reduce(importer.env[operand], list(dims) or None, bool(keepdims))
    return importer.block_builder.emit(value)


def convert_extreme_of_axis(node: Any, importer: Any) -> relax.Expr:
    """max(x, dim, keepdim) -> (R.max, R.argmax), min alike; TVM has max as a sorted top 1."""
    operand, dim, keepdims = read_arguments(node, "self", "dim", "keepdim")
    data, emit = importer.env[operand], importer.block_builder.emit
    is_max = "max" in str(node.target)
    functions = (relax.op.max, relax.op.argmax) if is_max else (relax.op.min, relax.op.argmin)
    return relax.Tuple([emit(reduce(data, int(dim), bool(keepdims))) for reduce in functions])


def convert_elu(node: Any, importer: Any) -> relax.Expr:
    """elu(x, alpha, scale, input_scale) -> scale * (max(x, 0) + min(alpha * (exp(input_scale * x) -
    1), 0)); selu and celu are written so, and TVM knows alpha only.
    """
    operand, *factors = read_arguments(node, "self", "alpha", "scale", "input_scale")
    data, emit = importer.env[operand], importer.block_builder.emit
    dtype = str(data.ty.dtype)
    alpha, scale, input_scale = (relax.const(float(factor), dtype) for factor in factors)
    grown = emit(relax.op.exp(emit(relax.op.multiply(data, input_scale))))
    curve = emit(relax.op.multiply(emit(grown - relax.const(1.0, dtype)), alpha))
    below = emit(relax.op.minimum(curve, relax.const(0.0, dtype)))
    total = emit(relax.op.add(emit(relax.op.nn.relu(data)), below))
    return emit(relax.op.multiply(total, scale))


def convert_adaptive_max_pool(node: Any, importer: Any) -> relax.Expr:
    """adaptive_max_pool2d(x, 1) -> (R.max over height and width, nothing).

    Raises:
        ValueError: another size of the result.
    """
    operand, sizes = read_arguments(node, "self", "output_size")
    if list(sizes) != [1, 1]:
        raise ValueError(f"{node.name} pools to {list(sizes)}; supported: [1, 1]")
    data = importer.env[operand]
    value = importer.block_builder.emit(relax.op.max(data, [-2, -1], keepdims=True))
    return relax.Tuple([value])


#: name of an operator, as TVM's frontend calls it -> its conversion
OPERATORS: dict[str, Convert] = {
    "amax.default": convert_extreme,
    "amin.default": convert_extreme,
    "max.dim": convert_extreme_of_axis,
    "min.dim": convert_extreme_of_axis,
    "elu.default": convert_elu,
    "adaptive_max_pool2d.default": convert_adaptive_max_pool,
}
