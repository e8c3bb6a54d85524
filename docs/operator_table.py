"""The table of operators and dtypes in operators.md, from the tables of the backends."""

from __future__ import annotations

from collections.abc import Sequence

from relayquant.config import BackendConfig, PatternConfig
from relayquant.stages.backends import BACKENDS

#: what the name of a pattern may say behind that of its operator, in the order that it stands there
FUSED = ("bias", "add", "relu", "clip")


def format_table() -> str:
    """Markdown: what is fused with an operator, when it becomes integers, and what each backend
    takes of its data; operators that are alike in all of it share a line.
    """
    heads = ["operator", "fused with it", "kind", *(backend.name for backend in BACKENDS)]
    alike: dict[tuple[str, ...], list[str]] = {}
    for op in dict.fromkeys(row.pattern.op for backend in BACKENDS for row in backend.patterns):
        rows = [find_rows(backend, op) for backend in BACKENDS]
        first = next(found for found in rows if found)
        cells = (list_fused(first), first[0].pattern.kind.value, *map(describe_dtypes, rows))
        alike.setdefault(cells, []).append(f"`{op.removeprefix('relax.')}`")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join([', '.join(names), *cells])} |" for cells, names in alike.items()]
    return "\n".join(lines)


def find_rows(backend: BackendConfig, op: str) -> list[PatternConfig]:
    """The rows of an operator."""
    return [row for row in backend.patterns if row.pattern.op == op]


def list_fused(rows: Sequence[PatternConfig]) -> str:
    """What the patterns of one operator fuse with it, each once: "bias, relu, clip"."""
    names = [row.pattern.name for row in rows]
    base = min(names, key=len)
    words = {word for name in names for word in name.removeprefix(base).split("_")}
    return ", ".join(word for word in FUSED if word in words)


def describe_dtypes(rows: Sequence[PatternConfig]) -> str:
    """Dtypes of the data, in the order of preference, then those with parameters of the run time,
    then those with weights in groups: "uint8, int16; dynamic uint8, int8; groups float32, int8".
    """
    dtypes = [dtypes for row in rows for dtypes in row.dtypes]
    groups = [each for each in dtypes if each.is_grouped]
    dynamic = [each for each in dtypes if each.is_dynamic]
    static = [each for each in dtypes if not each.is_grouped and not each.is_dynamic]
    text = ", ".join(dict.fromkeys(each.input.description for each in static))
    for word, rest in (("dynamic", dynamic), ("groups", groups)):
        if rest:
            text += f"; {word} " + ", ".join(dict.fromkeys(each.input.dtype for each in rest))
    return text
