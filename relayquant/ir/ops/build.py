"""Building blocks for the rows of `ops/`: patterns with named operands, optional bias and
activation.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax
from tvm.relax.dpl import is_op, wildcard

from relayquant.ir.rewrite import Graph, Match, Pattern, Skip
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype

#: name suffix -> operator of the fused activation, "" for none; the longest patterns come first
ACTIVATION_SUFFIXES = (("_relu", "relax.nn.relu"), ("_clip", "relax.clip"), ("", ""))


def call_pattern(op: str, *operands: object) -> object:
    """Make a pattern of a call of `op`. Further arguments (shapes, bounds) may be anything."""
    return is_op(op)(*operands, varg_default_wildcard=True)


def add_activation(pattern: object, activation: str) -> object:
    """Add an activation function behind `pattern`. "" adds nothing."""
    return call_pattern(activation, pattern) if activation else pattern


def unary_pattern(op: str) -> Pattern:
    """Make a pattern op(data, ...)."""
    data = wildcard()
    return Pattern(call_pattern(op, data), {"data": data})


def binary_pattern(op: str, activation: str) -> Pattern:
    """Make a pattern op(lhs, rhs), with an optional activation behind it."""
    lhs, rhs = wildcard(), wildcard()
    return Pattern(add_activation(is_op(op)(lhs, rhs), activation), {"lhs": lhs, "rhs": rhs})


def weighted_patterns(op: str) -> Iterator[tuple[str, Pattern]]:
    """Make (suffix, pattern) pairs of op(data, weight) with bias and activation, the longest
    first.
    """
    for with_bias in (True, False):
        for suffix, activation in ACTIVATION_SUFFIXES:
            data, weight, bias = wildcard(), wildcard(), wildcard()
            root, parts = is_op(op)(data, weight), {"data": data, "weight": weight}
            if with_bias:
                root, parts = is_op("relax.add")(root, bias), {**parts, "bias": bias}
            yield (
                ("_bias" if with_bias else "") + suffix,
                Pattern(add_activation(root, activation), parts),
            )


def residual_patterns(op: str) -> Iterator[tuple[str, Pattern]]:
    """Make (suffix, pattern) pairs of op(data, weight) [+ bias] + residual with an activation.

    The longest patterns come first.
    """
    for with_bias in (True, False):
        for suffix, activation in ACTIVATION_SUFFIXES:
            for side in ("", "_swapped"):
                data, weight, bias, residual = (wildcard() for _ in range(4))
                linear = is_op(op)(data, weight)
                parts = {"data": data, "weight": weight, "residual": residual}
                if with_bias:
                    linear = is_op("relax.add")(linear, bias)
                    parts["bias"] = bias
                operands = (residual, linear) if side else (linear, residual)
                root = add_activation(is_op("relax.add")(*operands), activation)
                name = ("_bias" if with_bias else "") + "_add" + suffix + side
                yield name, Pattern(root, parts)


def source_constant(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return the constant `expr`, or the constant that `expr` dequantizes.

    Return None for a value that is computed from the inputs.
    """
    while constant_value(expr) is None:
        call = graph.call_of(expr)
        if call is None or graph.op_name(call) not in (
            "relax.qnn.dequantize",
            "relax.qnn.quantize",
        ):
            return None
        expr = call.args[0]
    return expr


def check_float(match: Match, *names: str) -> Skip | None:
    """Decline operands that are not float32 (integers, float16, tuples)."""
    for name in names or tuple(match.parts):
        skip = decline_dtype(f"operand {name}", tensor_dtype(match.parts[name]))
        if skip is not None:
            return skip
    return None


def decline_dtype(what: str, dtype: str) -> Skip | None:
    """Decline what is not float32. Only other floats can be cast: indices, lengths and masks are
    integers and booleans for good.
    """
    if dtype == "float32":
        return None
    if "float" in dtype:
        return Skip(
            f"{what} is {dtype}, only float32 is quantized",
            "cast the model to float32 before quantizing, as module.float() of PyTorch does",
        )
    return Skip(f"{what} is {dtype or 'no tensor'}, not float")


def check_constant(match: Match, *names: str) -> Skip | None:
    """Decline operands that must be constants and are not."""
    for name in names:
        if source_constant(match.graph, match.parts[name]) is None:
            return Skip(
                f"operand {name} is computed from the inputs, this pattern needs a constant"
            )
    return None


def check_activation(match: Match, *names: str) -> Skip | None:
    """Decline operands that must be computed and are constants."""
    for name in names:
        if source_constant(match.graph, match.parts[name]) is not None:
            return Skip(f"operand {name} is a constant, this pattern needs a computed value")
    return None


def first_skip(*checks: Skip | None) -> Skip | None:
    """Return the first reason to decline, or None."""
    return next((check for check in checks if check is not None), None)
