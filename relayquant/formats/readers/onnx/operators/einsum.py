"""ONNX reader: Einsum -> matrix products, which can be quantized, with transposes and sums.

    "bsd,dhk->bhsk"  ->  transpose(reshape(x @ reshape(w, (D, H * K)), (B, S, H, K)), [0, 2, 1, 3])

Operands are multiplied from left to right. A label that two operands share and that is not needed
later is summed by the product. Other shared labels are multiplied elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.broadcast import Size, list_sizes, merge_sizes
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.reference.folding import emit_folded
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype


@dataclass(frozen=True, eq=False)
class Term:
    """A tensor and the label of each axis."""

    value: relax.Expr
    labels: tuple[str, ...]

    def sizes(self) -> dict[str, Size]:
        """Return the size of each label."""
        return dict(zip(self.labels, list_sizes(self.value), strict=True))


def convert_einsum(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Einsum with any number of operands. float16 is summed in float32.

    Raises:
        Refusal: the equation does not fit its operands, or it takes a diagonal of symbolic size.
    """
    operands = list(inputs)
    dtype = tensor_dtype(operands[0])
    if dtype == "float16":
        operands = [bb.emit(relax.op.astype(each, "float32")) for each in operands]
    ranks = [each.ty.ndim for each in operands]
    labels, output = parse_equation(attrs["equation"].decode(), ranks)
    terms = [take_diagonals(bb, Term(*pair)) for pair in zip(operands, labels, strict=True)]
    while len(terms) > 1:
        left, right, *rest = terms
        wanted = {*output, *(label for term in rest for label in term.labels)}
        terms = [multiply_terms(bb, left, right, wanted), *rest]
    result = permute(bb, sum_labels(bb, terms[0], output), output).value
    return relax.op.astype(result, dtype) if dtype == "float16" else result


def parse_equation(
    equation: str, ranks: Sequence[int]
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return (labels of each operand, labels of the result).

    A label is a letter, or "...k" for the k-th last axis of an ellipsis. Without "->", the result
    has the ellipsis, then the letters that occur once.

    Raises:
        Refusal: the equation does not fit operands of these ranks.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ranks):
        raise Refusal(
            f"its equation {equation!r} has {format_count(len(texts), 'operand')} for "
            f"{format_count(len(ranks), 'input')}; expected: as many"
        )
    labels, widest = [], 0
    for text, rank in zip(texts, ranks, strict=True):
        hidden = rank - len(text.replace("...", ""))
        if hidden < 0 or ("..." not in text and hidden):
            raise Refusal(
                f"its equation {equation!r} has {text!r} for an operand of rank {rank}; expected: "
                "a letter for each axis"
            )
        labels.append(read_labels(text, hidden))
        widest = max(widest, hidden)
    if arrow:
        output = read_labels(right, widest)
    else:
        letters = [letter for letter in sorted(set(left)) if letter.isalpha()]
        once = "".join(letter for letter in letters if left.count(letter) == 1)
        output = read_labels(f"...{once}", widest)
    known = {label for each in labels for label in each}
    if len(set(output)) < len(output) or not known.issuperset(output):
        raise Refusal(
            f"its equation {equation!r} has the result {right!r}; allowed: each letter once, of "
            "letters of the operands"
        )
    return labels, output


def read_labels(text: str, hidden: int) -> tuple[str, ...]:
    """Read the labels of a term. An ellipsis stands for `count` axes."""
    before, dots, behind = text.partition("...")
    if not (before + behind).isalpha() and before + behind:
        raise Refusal(f"its equation has the term {text!r}; allowed: letters and one ellipsis")
    middle = [f"...{at}" for at in range(hidden, 0, -1)] if dots else []
    return (*before, *middle, *behind)


# -- one operand -----------------------------------------------------------------------------------


def take_diagonals(bb: Builder, term: Term) -> Term:
    """Take diagonals so that each label occurs once.

    Raises:
        Refusal: a diagonal has two sizes, or a symbolic one.
    """
    repeated = next((label for label in term.labels if term.labels.count(label) > 1), None)
    if repeated is None:
        return term
    first, second = [at for at, label in enumerate(term.labels) if label == repeated][:2]
    sizes = list_sizes(term.value)
    size = sizes[first]
    if not isinstance(size, int) or sizes[second] != size:
        raise Refusal(
            f"it takes the diagonal {repeated!r} of sizes {size} and {sizes[second]}; supported: "
            "equal sizes that are known",
            "Fix them while loading: shapes={'NAME': (2, 3)}",
        )
    others = [at for at in range(len(sizes)) if at not in (first, second)]
    value = bb.emit(relax.op.permute_dims(term.value, [first, second, *others]))
    kept = [sizes[at] for at in others]
    value = bb.emit(relax.op.reshape(value, relax.ShapeExpr([size * size, *kept])))
    value = bb.emit(relax.op.strided_slice(value, [0], [0], [size * size], [size + 1]))
    return take_diagonals(bb, Term(value, (repeated, *(term.labels[at] for at in others))))


def sum_labels(bb: Builder, term: Term, wanted: Collection[str]) -> Term:
    """Sum the term over the labels that are not wanted."""
    axes = [at for at, label in enumerate(term.labels) if label not in wanted]
    if not axes:
        return term
    labels = tuple(label for label in term.labels if label in wanted)
    return Term(bb.emit(relax.op.sum(term.value, axes)), labels)


def permute(bb: Builder, term: Term, labels: Iterable[str]) -> Term:
    """Reorder the axes of the term. A constant stays a constant."""
    labels = tuple(labels)
    if labels == term.labels:
        return term
    axes = [term.labels.index(label) for label in labels]
    return Term(emit_folded(bb, relax.op.permute_dims(term.value, axes)), labels)


# -- two operands ----------------------------------------------------------------------------------


def multiply_terms(bb: Builder, left: Term, right: Term, wanted: set[str]) -> Term:
    """Multiply two terms and sum over shared labels that are not needed later."""
    left = sum_labels(bb, left, wanted | set(right.labels))
    right = sum_labels(bb, right, wanted | set(left.labels))
    if constant_value(left.value) is not None and constant_value(right.value) is None:
        left, right = right, left
    shared = [label for label in left.labels if label in right.labels]
    summed = [label for label in shared if label not in wanted]
    if not summed:
        return multiply_elements(bb, left, right)
    left, right = (
        spread_labels(bb, one, other, summed) for one, other in ((left, right), (right, left))
    )
    batch = [label for label in shared if label in wanted]
    rows = [label for label in left.labels if label not in shared]
    columns = [label for label in right.labels if label not in shared]
    have, other = left.sizes(), right.sizes()
    # Without a batch, a matrix product keeps all axes of the rows.
    one = join(bb, left, batch, [[label] for label in rows] if not batch else [rows], summed)
    two = join(bb, right, batch, [summed], columns)
    value = bb.emit(relax.op.matmul(one, two))
    sizes = [merge_sizes(have[label], other[label]) for label in batch]
    sizes += [have[label] for label in rows] + [other[label] for label in columns]
    is_whole = len(columns) == 1 and (not batch or len(rows) == 1)
    if not is_whole:
        value = bb.emit(relax.op.reshape(value, relax.ShapeExpr(sizes)))
    return Term(value, (*batch, *rows, *columns))


def join(
    bb: Builder,
    term: Term,
    batch: Sequence[str],
    groups: Sequence[Sequence[str]],
    last: Sequence[str],
) -> relax.Expr:
    """Reshape the term to one axis per batch label, one per group, and one for all last labels."""
    groups = [*([label] for label in batch), *groups, last]
    term = permute(bb, term, [label for group in groups for label in group])
    sizes = term.sizes()
    if all(len(group) == 1 for group in groups):
        return term.value
    joined = [math.prod((sizes[label] for label in group), start=1) for group in groups]
    return emit_folded(bb, relax.op.reshape(term.value, relax.ShapeExpr(joined)))


def spread_labels(bb: Builder, term: Term, other: Term, labels: Sequence[str]) -> Term:
    """Broadcast axes of size 1 that will be summed to the sizes in another term."""
    have, wanted = term.sizes(), other.sizes()
    sizes = [
        merge_sizes(have[label], wanted[label]) if label in labels else have[label]
        for label in term.labels
    ]
    if all(
        have[label] is size or have[label] == size
        for label, size in zip(term.labels, sizes, strict=True)
    ):
        return term
    return Term(bb.emit(relax.op.broadcast_to(term.value, relax.ShapeExpr(sizes))), term.labels)


def multiply_elements(bb: Builder, left: Term, right: Term) -> Term:
    """Emit left * right over all their labels."""
    labels = (*left.labels, *(label for label in right.labels if label not in left.labels))
    operands = []
    for term in (left, right):
        term = permute(bb, term, [label for label in labels if label in term.labels])
        absent = [at for at, label in enumerate(labels) if label not in term.labels]
        operands.append(bb.emit(relax.op.expand_dims(term.value, absent)) if absent else term.value)
    return Term(bb.emit(relax.op.multiply(*operands)), labels)
