"""Messages for nodes that a reader does not convert: what the node has, what is supported, what to
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tvm import relax
from tvm.ir import GenericConst, PrimType

from relayquant.ir.rewrite.graph import free_vars, tensor_dtype, tensor_shape

OTHERWISE = "Write this part of the model with other operators before its export"

FIX_SIZES = "Fix the symbolic sizes of the inputs while loading: shapes="


class Refusal(ValueError):
    """A node is not converted: "its ... is ...; supported: ...".

    Any other exception of a conversion comes from TVM's frontend or Python and does not help a
    user. `describe_failure` explains it.

    Attributes:
        remedy: What to do. "" lets `describe_failure` choose.
    """

    def __init__(self, fault: str, remedy: str = "") -> None:
        super().__init__(fault)
        self.remedy = remedy


class NotConstant(Refusal):
    """An operand that must be constant is computed at run time."""

    def __init__(self, what: str) -> None:
        verb = "are" if what.endswith("s") and not what.endswith("axis") else "is"
        super().__init__(f"its {what} {verb} computed at run time; supported: constants")


#: Operands of a node by tensor name.
Operands = Mapping[str, "relax.Expr | None"]

#: Returns the value that a variable is bound to, None for a parameter:
#: `BlockBuilder.lookup_binding`.
FindValue = Callable[[relax.Var], "relax.Expr | None"]


def describe_failure(
    error: BaseException, operands: Operands, find_value: FindValue | None = None
) -> str:
    """Describe why a node is not converted, what is supported, and what to do, without the last
    full stop.

    Args:
        error: The exception of the conversion.
        operands: Operands of the node. The first is data. Others that are not constant may be the
            reason.
        find_value: Returns what values of the model are computed from. None if inputs cannot be
            fixed.
    """
    text = " ".join(str(error).split()).rstrip(".") or "no further message"
    late = [value for value in list(operands.values())[1:] if find_value and is_late(value)]
    if isinstance(error, Refusal):
        fault = text
        late = late if isinstance(error, NotConstant) else []
        if error.remedy:
            return f"{fault}. {error.remedy}"
    else:
        given = ", ".join(
            f"{name!r} ({describe(value)}"
            f"{', at run time' if any(value is each for each in late) else ''})"
            for name, value in operands.items()
        )
        allowed = "constants after the first operand, and " if late else ""
        fault = (
            f"it has the operands {given or 'none'}; supported: {allowed}what TVM's frontend "
            f"takes, which says: {type(error).__name__}: {text}"
        )
    if not late or find_value is None:
        return f"{fault}. {OTHERWISE}"
    inputs = dict.fromkeys(name for value in late for name in find_inputs(value, find_value))
    if not inputs:
        sizes = dict.fromkeys(name for value in late for name in find_sizes(value, find_value))
        fix = f"Fix {', '.join(sizes)} while loading: shapes=. Else "
        otherwise = f"{fix}{OTHERWISE[0].lower()}{OTHERWISE[1:]}" if sizes else OTHERWISE
        return f"{fault}. {otherwise}"
    fixed = ", ".join(f"{name!r}: value" for name in inputs)
    return (
        f"{fault}. What is the same in every run may be fixed while loading: inputs={{{fixed}}}. "
        f"Else {OTHERWISE[0].lower()}{OTHERWISE[1:]}"
    )


def is_late(value: relax.Expr | None) -> bool:
    """Return whether an operand is a tensor that is computed at run time."""
    return isinstance(value, relax.Expr) and not isinstance(value, GenericConst | relax.ShapeExpr)


def describe(value: relax.Expr | None) -> str:
    """Describe an operand as the file shows it: "float32 of shape (1, 3)"."""
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        return "sizes" if value is not None else "none"
    shape = tensor_shape(value)
    sizes = "of unknown shape" if shape is None else f"of shape ({', '.join(map(str, shape))})"
    return f"{tensor_dtype(value)} {sizes}"


def find_inputs(value: relax.Expr, find_value: FindValue) -> Iterator[str]:
    """List the parameters of main that a value is computed from, by name, each once."""
    for var, source in find_sources(value, find_value):
        # A size that the model computes is a variable, too, and nothing is bound to it.
        if source is None and not isinstance(var.ty, PrimType):
            yield var.name


def find_sizes(value: relax.Expr, find_value: FindValue) -> Iterator[str]:
    """List the symbolic sizes that a value is computed from, by name."""
    for _, source in find_sources(value, find_value):
        if source is not None:
            yield from (size.name for size in relax.analysis.free_symbolic_vars(source))


def find_sources(
    value: relax.Expr, find_value: FindValue
) -> Iterator[tuple[relax.Var, relax.Expr | None]]:
    """List (variable, bound value) of everything that a value is computed from. The bound value of
    a parameter is None.
    """
    waiting, seen = list(free_vars(value)), set()
    while waiting:
        var = waiting.pop()
        if var in seen:
            continue
        seen.add(var)
        source = find_value(var)
        yield var, source
        if source is not None:
            waiting.extend(free_vars(source))
