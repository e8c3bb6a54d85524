"""Relax module -> its reshapes that fit some sizes of inputs only; for `input_checks`.

    x (n, 2, 2); y (1, 4) = reshape(x)   ->   n * 2 * 2 == 4

TVM makes a view of memory of a reshape, or a kernel that reads as many elements as the result has.
With more in the operand, the rest would be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions, substitute

#: The number of a parameter, and of one of its dimensions.
Place = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SizedReshape:
    """A reshape whose operand has as many elements as its result for some sizes of inputs only.

    Attributes:
        text: Its value and both shapes, for a message.
        fits: Whether both have the same number of elements.
        places: Each variable of `fits`, with where an input has it.
    """

    text: str
    fits: Any
    places: Mapping[tirx.Var, Place]

    def test(self, sizes: Mapping[Place, Any]) -> Any:
        """Return `fits` for these sizes of the inputs."""
        return substitute(self.fits, {size: sizes[at] for size, at in self.places.items()})


def find_sized_reshapes(mod: tvm.IRModule) -> Mapping[str, Sequence[SizedReshape]]:
    """Find such reshapes of each function, in whose shapes are sizes of its inputs alone."""
    return {
        gv.name_hint: tuple(list_sized_reshapes(func))
        for gv, func in mod.functions_items()
        if isinstance(func, relax.Function)
    }


def list_sized_reshapes(func: relax.Function) -> Iterator[SizedReshape]:
    analyzer, places = Analyzer(), dict[tirx.Var, Place]()
    for number, param in enumerate(func.params):
        if not isinstance(param.ty, relax.TensorType) or param.ty.dtype is None:
            continue
        for axis, size in enumerate(list_dimensions(param.ty)):
            if isinstance(size, tirx.Var):
                places.setdefault(size, (number, axis))
    for binding in list_bindings(func):
        call = binding.value
        if not isinstance(call, Call) or call_name(call) != "relax.reshape":
            continue
        types = [each.ty for each in (call.args[0], call)]
        if not all(isinstance(ty.shape, relax.ShapeExpr) for ty in types):
            continue
        shapes = [list_dimensions(ty) for ty in types]
        counts = [prod(shape, start=tirx.const(1, "int64")) for shape in shapes]
        if analyzer.can_prove_equal(*counts):
            continue
        fits = tirx.EQ(*counts)
        sizes = tirx.analysis.undefined_vars(tirx.Evaluate(fits), [])
        if all(size in places for size in sizes):
            before, after = map(format_shape, shapes)
            text = f"{binding.var.name!r}, which makes {before} into {after}"
            yield SizedReshape(text, fits, {size: places[size] for size in sizes})


def format_shape(shape: Sequence[Any]) -> str:
    return f"({', '.join(str(getattr(size, 'value', size)) for size in shape)})"
