"""`shapes=` of `load` -> checked against what a file says of its inputs; for ONNX and TFLite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from relayquant.errors import ModelError, format_count, suggest_name

#: Input -> its shape; a name makes a size symbolic.
GivenShapes = Mapping[str, Sequence[int | str]]


def check_given_names(shapes: GivenShapes, inputs: Collection[str]) -> None:
    """Raise ModelError if `shapes` names an input that the model does not have."""
    for name in shapes:
        if name not in inputs:
            raise ModelError(
                f"shapes= names {name!r}, which is not an input of the model. "
                f"{suggest_name(name, inputs)}",
                code="RQ103",
            )


def check_given_shape(
    name: str, wanted: Sequence[int | str], known: Sequence[int | None] | None
) -> None:
    """Check the wanted shape of an input.

    Args:
        name: The input.
        wanted: Its sizes, and names of sizes.
        known: The sizes in the file, None for one that is open; None if it has no shape.

    Raises:
        ModelError: the file contradicts it, or it has a size below 1.
    """
    if known is not None and len(wanted) != len(known):
        raise ModelError(
            f"shapes= gives input {name!r} the shape {tuple(wanted)}; allowed: "
            f"{format_count(len(known), 'size')}, one for each dimension of the input.",
            code="RQ101",
        )
    for size, fixed in zip(wanted, known or [None] * len(wanted), strict=True):
        if not isinstance(size, str) and size <= 0:
            raise ModelError(
                f"shapes= gives input {name!r} the dimension {size}; allowed: positive integers "
                "and names.",
                code="RQ101",
            )
        if fixed not in (None, size):
            kind = "name" if isinstance(size, str) else "size"
            raise ModelError(
                f"shapes= gives a dimension of input {name!r} the {kind} {size!r}, but the model "
                f"fixes it to {fixed}. Write {fixed} there.",
                code="RQ101",
            )
