"""Dialect: how the `relax.qnn` operators take part in `relax.transform.ConvertLayout`.

A layout is a string of letters, each a dimension of the tensor as it was before the pass: "ACDB"
holds dimensions 0, 2, 3, 1. Every function has TVM's signature
`FRelaxInferLayout(call, desired, layouts)`: `desired` maps operator names to layouts a user asked
for, `layouts` variables to what they have become. Operands whose layout has to change for a call
get a permute_dims from the pass.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import relax
from tvm.ir import Attrs, Call, make_node
from tvm.s_tir.data_layout import slayout

from relayquant.dialect.attrs import replace_attrs
from relayquant.dialect.inference import check_layout, operator_name
from relayquant.errors import QnnError

#: TVM's signature of FRelaxInferLayout.
LayoutFunc = Callable[[Call, Mapping[str, Any], Mapping[Any, Any]], Any]


def _initial(expr: Any) -> str | None:
    """Letters of an untouched tensor, None when its rank is unknown."""
    ndim = int(expr.ty.ndim)
    return None if ndim < 0 else string.ascii_uppercase[:ndim]


def _current(expr: Any, layouts: Mapping[Any, Any]) -> str | None:
    """Letters of a tensor as it stands now."""
    if isinstance(expr, relax.Var) and expr in layouts:
        decision = layouts[expr]
        return None if decision.is_unknown_dim else str(decision.layout.name)
    return _initial(expr)


def _decide(letters: str | None) -> Any:
    # slayout("") gives None, which the pass dereferences.
    layout = slayout(letters) if letters else make_node("s_tir.SLayout", name="", axes=[])
    return make_node(
        "relax.transform.LayoutDecision",
        layout=layout,
        is_unknown_dim=letters is None,
    )


def _decide_untouched(expr: Any) -> Any:
    """A parameter: no layout but its own; tuples element by element; a shape has none."""
    if isinstance(expr.ty, relax.ShapeType):
        return _decide(None)
    if isinstance(expr.ty, relax.TupleType):
        return tvm_ffi.Array([_decide(_initial(_Typed(ty))) for ty in expr.ty.fields])
    return _decide(_initial(expr))


class _Typed:
    """A type where an expression is expected: elements of a tuple variable have no expression."""

    def __init__(self, ty: Any) -> None:
        self.ty = ty


def _make_output(inputs: Sequence[Any], output: str | None, attrs: Attrs | None) -> Any:
    return make_node(
        "relax.transform.InferLayoutOutput",
        input_layouts=list(inputs),
        output_layouts=[_decide(output)],
        new_attrs=attrs,
        new_args={},
    )


def _move_axis(axis: int, letters: str) -> int:
    """Where dimension `axis` (may be negative) of the untouched tensor is now, non-negative."""
    if not letters:
        return axis
    return letters.index(string.ascii_uppercase[axis % len(letters)])


def _is_plain(letters: str | None) -> bool:
    """Whether a layout only reorders dimensions: packed layouts also hold lower case and digits."""
    return letters is None or (letters.isalpha() and letters.isupper())


def _keep_untouched(call: Call) -> Any:
    """All operands back in their original layout."""
    inputs = [_decide_untouched(argument) for argument in call.args]
    return _make_output(inputs, _initial(call), call.attrs)


# ---------------------------------------------------------------- elementwise


def infer_layout_elementwise(
    call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> Any:
    """Follow the first operand; `axis`, where there is one, moves along."""
    letters = _current(call.args[0], layouts)
    if letters is None or not _is_plain(letters):
        return _keep_untouched(call)
    attrs = call.attrs
    if attrs is not None and hasattr(attrs, "axis"):
        attrs = replace_attrs(attrs, axis=_move_axis(int(attrs.axis), letters))
    inputs = [_decide(letters), *map(_decide_untouched, call.args[1:])]
    return _make_output(inputs, letters, attrs)


def infer_layout_binary(call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """Both operands take the layout of the one that was changed; scalars follow anything."""
    sides = call.args[:2]
    letters = [_current(side, layouts) for side in sides]
    if any(text is None or not _is_plain(text) for text in letters):
        return _keep_untouched(call)
    known = [text or "" for text in letters]
    chosen = next(
        (
            text
            for text, side in zip(known, sides, strict=True)
            if text != _initial(side) and len(text) == max(map(len, known))
        ),
        max(known, key=len),
    )
    if any(len(text) not in (0, len(chosen)) for text in known):
        # A lower rank broadcasts from the right, which another order of dimensions breaks.
        return _keep_untouched(call)
    own = [chosen if text else "" for text in known]
    attrs = replace_attrs(
        call.attrs,
        lhs_axis=_move_axis(int(call.attrs.lhs_axis), own[0]),
        rhs_axis=_move_axis(int(call.attrs.rhs_axis), own[1]),
    )
    inputs = [*map(_decide, own), *map(_decide_untouched, call.args[2:])]
    return _make_output(inputs, chosen, attrs)


def infer_layout_concatenate(
    call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> Any:
    """All tensors take the first layout that was changed; `axis` moves along."""
    data = call.args[0]
    if not isinstance(data, relax.Tuple):
        return _keep_untouched(call)
    letters = [_current(field, layouts) for field in data.fields]
    if any(text is None or not _is_plain(text) for text in letters):
        return _keep_untouched(call)
    initial = _initial(data.fields[0])
    chosen = next((text for text in letters if text != initial), initial) or ""
    attrs = replace_attrs(call.attrs, axis=_move_axis(int(call.attrs.axis), chosen))
    tensors = tvm_ffi.Array([_decide(chosen) for _ in letters])
    return _make_output([tensors, *map(_decide_untouched, call.args[1:])], chosen, attrs)


# ---------------------------------------------------------------- reductions


def infer_layout_avg_pool2d(
    call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> Any:
    """Follow the data; `layout` names the dimensions in their new order."""
    letters = _current(call.args[0], layouts)
    if letters is None or not _is_plain(letters):
        return _keep_untouched(call)
    attrs = replace_attrs(call.attrs, layout=_reorder(str(call.attrs.layout), letters))
    inputs = [_decide(letters), *map(_decide_untouched, call.args[1:])]
    return _make_output(inputs, letters, attrs)


def _reorder(names: str, letters: str) -> str:
    """Names of the dimensions in the order of `letters`: NCHW and ACDB give NHWC."""
    return "".join(names[string.ascii_uppercase.index(letter)] for letter in letters)


def infer_layout_mean(call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """Follow the data; without keepdims the remaining dimensions are counted anew."""
    letters = _current(call.args[0], layouts)
    if letters is None or not _is_plain(letters):
        return _keep_untouched(call)
    attrs = call.attrs
    rank = len(letters)
    axes = [int(axis) % rank for axis in attrs.axes] or list(range(rank))
    reduced = {string.ascii_uppercase[axis] for axis in axes}
    moved = sorted(letters.index(letter) for letter in reduced)
    output = letters
    if not attrs.keepdims:
        kept = [letter for letter in letters if letter not in reduced]
        output = "".join(string.ascii_uppercase[sorted(kept).index(letter)] for letter in kept)
    inputs = [_decide(letters), *map(_decide_untouched, call.args[1:])]
    return _make_output(inputs, output, replace_attrs(attrs, axes=tvm_ffi.Array(moved)))


# ---------------------------------------------------------------- convolution


def infer_layout_conv(call: Call, desired: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """Take the layouts asked for, [data, kernel], or else follow the operands."""
    attrs, name = call.attrs, call.op.name
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    if name in desired:
        wanted = [str(text) for text in desired[name]]
        operator = f"ConvertLayout of {operator_name(call)}"
        if len(wanted) not in (2, 3) or wanted[2:] not in ([], wanted[:1]):
            raise QnnError(
                f"{operator}: layouts {wanted} are not allowed; allowed: [data, kernel], such as "
                "['NHWC', 'OHWI']; the result has the layout of the data."
            )
        spatial = "".join(sorted(set(data_layout) - set("NC")))
        check_layout(operator, "data layout", wanted[0], f"NC{spatial}")
        check_layout(operator, "kernel layout", wanted[1], f"OI{spatial}")
        letters = ["".join(_letter(data_layout, each) for each in wanted[0])]
        letters.append("".join(_letter(kernel_layout, each) for each in wanted[1]))
    else:
        current = [_current(argument, layouts) for argument in call.args[:2]]
        if any(text is None or not _is_plain(text) for text in current):
            return _keep_untouched(call)
        letters = [text or "" for text in current]
    attrs = replace_attrs(
        attrs,
        data_layout=_reorder(data_layout, letters[0]),
        kernel_layout=_reorder(kernel_layout, letters[1]),
    )
    inputs = [*map(_decide, letters), *map(_decide_untouched, call.args[2:])]
    return _make_output(inputs, letters[0], attrs)


def _letter(names: str, name: str) -> str:
    return string.ascii_uppercase[names.index(name)]
