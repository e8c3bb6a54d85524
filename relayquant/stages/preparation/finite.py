"""Check of bound parameters: find weights and biases that are not usable numbers before any data
is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from relayquant.base.arguments import describe_not_finite
from relayquant.base.runtime import view_constant
from relayquant.errors import ModelError, format_count, warn_user
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite.bind import LAYOUTS
from relayquant.ir.rewrite.constants import LARGEST, count_huge
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.function import read_sources
from relayquant.stages.prepared import ConstantVariable

PRODUCTS = frozenset(
    {
        "relax.matmul",
        "relax.nn.conv1d",
        "relax.nn.conv2d",
        "relax.nn.conv3d",
        "relax.nn.conv1d_transpose",
        "relax.nn.conv2d_transpose",
        "relax.nn.conv3d_transpose",
    }
)
BATCH_NORM = "relax.nn.batch_norm"
NORMS = frozenset(
    {
        BATCH_NORM,
        "relax.nn.layer_norm",
        "relax.nn.group_norm",
        "relax.nn.instance_norm",
        "relax.nn.rms_norm",
    }
)
#: number of constants named in one message
SHOWN = 3
CHECK_FILE = (
    "No data will help: check the file of the model, and how it was trained or converted "
    "(float16 overflow)."
)


@dataclass(frozen=True, eq=False)
class ReadConstant:
    """A float constant as an operand of an operator.

    Attributes:
        reader: The value that the operator computes.
        place: Index of the operand.
        const: The constant.
        is_added: Whether it is the bias behind a product.
    """

    reader: relax.Var
    place: int
    const: GenericConst
    is_added: bool = False

    @cached_property
    def array(self) -> np.ndarray:
        return view_constant(self.const.value)


def check_constants(editor: Editor, sources: Mapping[str, Mapping[str, Any]]) -> None:
    """Check weights and biases of products, convolutions and normalizations.

    Infinity is allowed in other constants: masks, bounds of clips, and biases of operators that
    stay in float. A warning names constants whose squares overflow float32.

    Args:
        editor: The module with bound parameters.
        sources: Rows of `relayquant.sources`.

    Raises:
        ModelError: a weight holds NaN or infinity, a bias holds NaN, or a batch norm has a variance
            whose square root does not exist.
    """
    refused: list[tuple[ReadConstant, str]] = []
    huge: list[tuple[ReadConstant, str]] = []
    for read in find_weights(editor):
        if reason := explain_refusal(editor, read):
            refused.append((read, reason))
        elif count := count_huge(read.array):
            elements = format_count(read.array.size, "element")
            huge.append((read, f"{count} of {elements} beyond {LARGEST:.2g}"))
    if refused:
        raise ModelError(f"{describe(editor, sources, refused)} {CHECK_FILE}", code="RQ204")
    if huge:
        warn_user(
            f"{describe(editor, sources, huge)} Products of these numbers overflow float32, and "
            "smaller elements are lost in the sums: check the file of the model, and how it was "
            "trained or converted.",
            code="RQ204",
        )


def find_weights(editor: Editor) -> Iterator[ReadConstant]:
    """Find weights and biases of products, convolutions and normalizations, in reading order."""
    for reader in editor.order():
        op = editor.op_name(reader)
        if op in PRODUCTS or op in NORMS:
            yield from read_constants(editor, reader)
        elif op == "relax.add":
            sides = editor.call_of(reader).args
            if any(is_layer(editor, side) for side in sides):
                for read in read_constants(editor, reader):
                    yield ReadConstant(read.reader, read.place, read.const, is_added=True)


def is_layer(editor: Editor, expr: relax.Expr) -> bool:
    """Whether a value is a product with a constant. Only then is the added constant a bias:
    masks are added to products of two activations.
    """
    return editor.op_name(expr) in PRODUCTS and any(
        find_constant(editor, arg) is not None for arg in editor.call_of(expr).args
    )


def read_constants(editor: Editor, reader: relax.Var) -> Iterator[ReadConstant]:
    """Return the float constants that a value's operator reads."""
    call = editor.call_of(reader)
    for place, arg in enumerate(call.args if call is not None else ()):
        const = find_constant(editor, arg)
        if const is not None and str(const.ty.dtype).startswith("float"):
            yield ReadConstant(reader, place, const)


def find_constant(editor: Editor, expr: relax.Expr) -> GenericConst | None:
    """Return the tensor constant behind an operand, which may be in another layout."""
    while editor.op_name(expr) in LAYOUTS:
        expr = editor.call_of(expr).args[0]
    return expr if isinstance(expr, GenericConst) else None


def explain_refusal(editor: Editor, read: ReadConstant) -> str:
    """Return what is wrong with a constant; "" if nothing is."""
    array = read.array
    reason = describe_not_finite(array)
    if reason and (np.isnan(array).any() or not read.is_added):
        return reason
    if editor.op_name(read.reader) == BATCH_NORM and read.place == 4:
        epsilon = float(editor.call_of(read.reader).attrs.epsilon)
        if negative := int((array + epsilon < 0).sum()):
            elements = format_count(array.size, "element")
            return f"{negative} of {elements} (variances) below -epsilon = {-epsilon:g}"
    return ""


def describe(
    editor: Editor,
    sources: Mapping[str, Mapping[str, Any]],
    found: list[tuple[ReadConstant, str]],
) -> str:
    """Return sentences that name constants, their readers and what is wrong."""
    names = name_constants(editor, sources)
    shown = [
        f"{names[read.reader, read.place]}, which {editor.names[read.reader]!r} "
        f"({editor.op_name(read.reader).rpartition('.')[2]}) reads, holds {reason}."
        for read, reason in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        shown.append(f"So do {len(found) - SHOWN} more.")
    return " ".join(shown)


def name_constants(
    editor: Editor, sources: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[relax.Var, int], str]:
    """Map (reader, index of the operand) to the constant's name in the source model.

    The name is used if the node has as many constants as names. Otherwise the text names the
    candidates or the operand.
    """
    nodes: dict[tuple[Any, ...], list[ReadConstant]] = defaultdict(list)
    found: dict[tuple[relax.Var, int], str] = {}
    for reader in editor.order():
        row = sources.get(editor.names[reader], {})
        names = tuple(row.get("constants", ()))
        is_layout = editor.op_name(reader) in LAYOUTS  # the reader of its result counts
        for read in () if is_layout else read_constants(editor, reader):
            found[reader, read.place] = (
                f"One of the constants {', '.join(map(repr, names))}"
                if names
                else f"The constant at operand {read.place} of {editor.names[reader]!r}"
            )
            if names:
                nodes[row.get("node"), row.get("op"), names].append(read)
    for (_, _, names), reads in nodes.items():
        # A row has the weight before its bias.
        reads.sort(key=lambda read: -read.array.size)
        if len(names) == len(reads):
            for read, name in zip(reads, names, strict=True):
                found[read.reader, read.place] = f"The constant {name!r}"
    return found


def check_planned(
    mod: tvm.IRModule, plan: Plan, constants: Mapping[str, ConstantVariable], mapping: str
) -> None:
    """Check the constants of quantized operators after constant folding.

    A bias must be finite here, because its scale would be infinite too.

    Args:
        mod: The prepared module.
        plan: Which operators are quantized.
        constants: By "<operator>:weight" and "<operator>:bias".
        mapping: Code for the mapping, for the message.

    Raises:
        ModelError: one holds NaN or infinity.
    """
    sources = read_sources(mod["main"])
    for key, constant in constants.items():
        if reason := describe_not_finite(constant.value):
            name, _, operand = key.rpartition(":")
            rows = [sources.get(value, {}) for value in plan.operator(name).values]
            read = dict.fromkeys(repr(each) for row in rows for each in row.get("constants", ()))
            origin = f" (made of {', '.join(read)})" if read else ""
            raise ModelError(
                f"The {operand} of {name!r}{origin} holds {reason}, which cannot be quantized. "
                "Check the file of the model; if this is meant, keep the operator in float: "
                f"qconfig_mapping={mapping}.set_module_name({name!r}, None).",
                code="RQ204",
            )
