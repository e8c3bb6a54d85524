"""Dialect: how the `relax.qnn` operators take part in `relax.transform.ConvertLayout`.

A layout is a string of letters. Each letter is a dimension of the tensor before the pass: "ACDB" is
the order 0, 2, 3, 1. Every function has TVM's signature `FRelaxInferLayout(call, desired,
layouts)`. `desired` maps operator names to the layouts that a user asked for. `layouts` maps
variables to their current layouts. Where a call needs another layout of an operand, the pass
inserts a permute_dims.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import relax
from tvm.ir import Attrs, Call, make_node
from tvm.s_tir.data_layout import slayout

from relayquant.ir.dialect.operator import replace_attrs


def initial_letters(expr: Any) -> str | None:
    """Return the letters of an unchanged tensor, or None if its rank is unknown."""
    ndim = int(expr.ty.ndim)
    return None if ndim < 0 else string.ascii_uppercase[:ndim]


def current_letters(expr: Any, layouts: Mapping[Any, Any]) -> str | None:
    """Return the letters of a tensor in its current order."""
    if isinstance(expr, relax.Var) and expr in layouts:
        decision = layouts[expr]
        return None if decision.is_unknown_dim else str(decision.layout.name)
    return initial_letters(expr)


def decide(letters: str | None) -> Any:
    # slayout("") gives None, which the pass dereferences.
    layout = slayout(letters) if letters else make_node("s_tir.SLayout", name="", axes=[])
    return make_node(
        "relax.transform.LayoutDecision", layout=layout, is_unknown_dim=letters is None
    )


def decide_untouched(expr: Any) -> Any:
    """Decide that a parameter keeps its original layout.

    A tuple is decided element by element. A shape has no layout.
    """
    if isinstance(expr.ty, relax.ShapeType):
        return decide(None)
    if isinstance(expr.ty, relax.TupleType):
        return tvm_ffi.Array([decide(initial_letters(_Typed(ty))) for ty in expr.ty.fields])
    return decide(initial_letters(expr))


class _Typed:
    """A type in place of an expression, for the elements of a tuple variable, which have no
    expression.
    """

    def __init__(self, ty: Any) -> None:
        self.ty = ty


def make_output(inputs: Sequence[Any], output: str | None, attrs: Attrs | None) -> Any:
    return make_node(
        "relax.transform.InferLayoutOutput",
        input_layouts=list(inputs),
        output_layouts=[decide(output)],
        new_attrs=attrs,
        new_args={},
    )


def move_axis(axis: int, letters: str) -> int:
    """Return the current position of dimension `axis` of the unchanged tensor.

    `axis` may be negative. The result is not.
    """
    if not letters:
        return axis
    return letters.index(string.ascii_uppercase[axis % len(letters)])


def is_plain(letters: str | None) -> bool:
    """Whether a layout only reorders dimensions. Packed layouts also hold lower case and digits."""
    return letters is None or (letters.isalpha() and letters.isupper())


def keep_untouched(call: Call) -> Any:
    """Return all operands to their original layout."""
    inputs = [decide_untouched(argument) for argument in call.args]
    return make_output(inputs, initial_letters(call), call.attrs)


def infer_layout_elementwise(
    call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> Any:
    """Follow the layout of the first operand. An `axis` attribute is adapted."""
    letters = current_letters(call.args[0], layouts)
    if letters is None or not is_plain(letters):
        return keep_untouched(call)
    attrs = call.attrs
    if attrs is not None and hasattr(attrs, "axis"):
        attrs = replace_attrs(attrs, axis=move_axis(int(attrs.axis), letters))
    inputs = [decide(letters), *map(decide_untouched, call.args[1:])]
    return make_output(inputs, letters, attrs)


def reorder_names(names: str, letters: str) -> str:
    """Reorder the names of the dimensions by `letters`: NCHW with ACDB gives NHWC."""
    return "".join(names[string.ascii_uppercase.index(letter)] for letter in letters)
