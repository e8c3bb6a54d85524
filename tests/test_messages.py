"""Everything said to a user that counts: "1 operator" and "2 operators"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from package_sources import PACKAGE, SOURCES, list_nodes

from relayquant.errors import format_count

#: What may follow a value and ends in s without being a plural.
NO_NOUNS = (
    "as has is its this was others belongs clips computes decides depends differs does draws ends "
    "gives holds lacks leaves looks names needs picks pools quantizes reads repeats rounds runs "
    "chooses says selects starts stores takes wants"
)

#: (file, value, plural) -> why the value is never one there, or no count at all.
NEVER_ONE = {
    ("analysis/linting/input_summary.py", "samples", "samples"): "FEW_SAMPLES at least",
    ("flow/compression/compress.py", "form.scale_dtype", "scales"): "a dtype",
    ("config/dtypes.py", "what", "scales"): "a description",
    ("data/dataset.py", "len(inputs)", "inputs"): "of one input any array will do",
    ("data/item.py", "len(inputs)", "inputs"): "of one input any array will do",
    ("ir/dialect/qnn/grouped.py", "bits", "bits"): "2, 3, 4 or 8",
    ("formats/writers/onnx/file.py", "size", "bytes"): "more than MAX_BYTES",
    ("base/qtypes.py", "source", "parameters"): "who picked them",
    ("ir/reference/qnn/grouped.py", "bits", "bits"): "2, 3, 4 or 8",
    ("plots/page.py", "what", "integers"): "what has a share",
    ("base/runtime.py", "threads", "threads"): "one thread survives a fork",
    ("stages/preparation/cells/chain.py", "name", "gates"): "which gates, one in each step",
}


def find_plurals(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """(value, plural) of each f-string where a value that may be a count stands before a plural, or
    before one other word and a plural.

    No count are values with a format of their own (a measure) but that of an integer, those in
    quotes or from repr, those of upper case (a limit of ours, more than one), products with a
    number, and enum values.
    """
    for node in nodes:
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, text in pairwise(parts):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            found = re.match(r" (?:([a-z-]+) )?([a-z]{2,}s)\b(?!')", str(text.value))
            if not found or set(NO_NOUNS.split()) & set(found.groups()) or not may_be_count(value):
                continue
            if found[1] not in {"and", "with", "of", "along", "leave"}:
                yield ast.unparse(value.value), found[2]


def may_be_count(value: ast.FormattedValue) -> bool:
    match value.value:
        case ast.Name(name) if name.isupper():
            return False
        case ast.BinOp(ast.Constant(), ast.Mult()):
            return False
        case ast.Attribute(attr="value" | "name" | "dtype"):
            return False
        case ast.Call(ast.Name("format_count" | "_show_count")):
            return False
    style = "" if value.format_spec is None else ast.unparse(value.format_spec)[2:-1]
    return value.conversion == -1 and re.fullmatch(r"[<>^]?\d*[,_]?[dn]?", style) is not None


def test_messages__what_is_counted_has_its_number():
    """In every f-string: a plural behind a value is written by `format_count`."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), *plural)
        for module, path in SOURCES.items()
        for plural in find_plurals(list_nodes(module))
    }
    assert sorted(found - set(NEVER_ONE)) == [], "write these with errors.format_count"
    assert sorted(set(NEVER_ONE) - found) == [], "these are gone"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("f'{len(rows)} operators'", [("len(rows)", "operators")]),
        ("f'of {count} ' 'zero points;'", [("count", "points")]),
        ("f'{ndim} axes' f'{x.size} sums'", [("ndim", "axes"), ("x.size", "sums")]),
        ("f'{backend} runs on'", []),
        ("f'{name!r} values'", []),
        ("f'{ratio:.3g} times'", []),
        ("f'{count:,} bytes'", [("count", "bytes")]),
        ("f'{count:4d} sums'", [("count", "sums")]),
        ("f'{LIMIT} bytes, {2 * rank} numbers'", []),
    ],
)
def test_find_plurals(source, found):
    assert list(find_plurals(ast.walk(ast.parse(source)))) == found


def test_messages__a_verb_agrees_with_its_count():
    """No message goes on with a verb of the plural: "1 operator are"."""
    wrong = re.compile(r" (are|were|have|do|differ|decide|overflow|that have)\b")
    for module, path in SOURCES.items():
        for node in list_nodes(module):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for value, text in pairwise(parts):
                if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                    continue
                # What is rare is asked first: to write an expression takes long.
                if wrong.match(str(text.value)):
                    is_count = ast.unparse(value.value).startswith("format_count(")
                    assert not is_count, f"{path}:{value.lineno}"


@pytest.mark.parametrize(
    ("noun", "plural"),
    [
        ("operator", "operators"),
        ("batch", "batches"),
        ("axis", "axes"),
        ("spatial axis", "spatial axes"),
        ("entry", "entries"),
        ("array", "arrays"),
        ("index", "indices"),
        ("zero point", "zero points"),
        ("box", "boxes"),
    ],
)
def test_format_count(noun, plural):
    counts = [format_count(number, noun) for number in (0, 1, 2)]
    assert counts == [f"0 {plural}", f"1 {noun}", f"2 {plural}"]
