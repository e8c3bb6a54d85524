"""Codes of errors and warnings: everything that is raised for users has one, and a page for it."""

from __future__ import annotations

import ast
import builtins
import copy
import doctest
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import tvm
from package_sources import ROOT, SOURCES, list_nodes
from tvm import relax

import relayquant as rq
from relayquant import errors
from relayquant.base.arguments import check_type
from relayquant.base.storage.files import reading
from relayquant.errors import add_code, warn_user
from relayquant.ir.reference.affine import wrap_sums

PAGES = {path.stem: path for path in sorted((ROOT / "docs/errors").glob("RQ*.md"))}


@cache
def list_statements() -> list[tuple[str, ast.AST]]:
    """(file, node) for each definition, annotation, raise and call of the package."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign, ast.arg)
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for module, path in SOURCES.items()
        for node in list_nodes(module)
        if isinstance(node, (*kinds, ast.Raise, ast.Call))
    ]


def read_name(node: ast.expr | None) -> str:
    """ "ModelError" of `ModelError` and of `errors.ModelError`; "" if it is no name."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


@cache
def find_classes() -> dict[str, set[str]]:
    """Every error class of the package -> it and what it derives from, of ours."""
    found = {"RelayQuantError": {"RelayQuantError"}}
    definitions = [node for _, node in list_statements() if isinstance(node, ast.ClassDef)]
    for _ in definitions:
        for node in definitions:
            bases = [found[name] for base in node.bases if (name := read_name(base)) in found]
            if bases:
                found[node.name] = {node.name}.union(*bases)
    return found


@cache
def find_definitions() -> set[str]:
    """Functions and classes of the package: what these make has its code where they make it."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for _, node in list_statements() if isinstance(node, kinds)}


@cache
def find_holders() -> set[str]:
    """Parameters and fields that hold a class of ours, by their annotation."""
    return {
        read_name(node.target) if isinstance(node, ast.AnnAssign) else node.arg
        for _, node in list_statements()
        if isinstance(node, ast.AnnAssign | ast.arg)
        and isinstance(hint := node.annotation, ast.Subscript)
        and read_name(hint.value) == "type"
        and read_name(hint.slice) in find_classes()
    }


@dataclass(frozen=True)
class Site:
    """Where an error is made or a warning is given.

    Attributes:
        kind: Name of the class; "" if the class is an argument.
        code: What the source says: a literal, or other code.
    """

    place: str
    kind: str
    code: object


@cache
def list_sites() -> list[Site]:
    return list(find_sites())


def find_sites() -> Iterator[Site]:
    """Where the package calls a class of ours, raises a class that a variable holds, or warns.

    An error that is made in one place and raised in another is found where it is made.
    """
    raised = {id(node.exc) for _, node in list_statements() if isinstance(node, ast.Raise)}
    for path, node in list_statements():
        if not isinstance(node, ast.Call) or path == "relayquant/errors.py":
            continue
        name = read_name(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "warn_user":
            category = given.get("category", node.args[1] if len(node.args) > 1 else None)
            kind = read_name(category) or "UserWarning"
        elif name in find_classes():
            kind = name
        elif id(node) in raised and is_variable(node.func):
            kind = ""
        else:
            continue
        code = given.get("code")
        literal = code.value if isinstance(code, ast.Constant) else code and ast.unparse(code)
        yield Site(f"{path}:{node.lineno}", kind, literal)


def is_variable(function: ast.expr) -> bool:
    """Whether what is raised is a class that a variable or a field holds."""
    name = read_name(function)
    if isinstance(function, ast.Attribute):
        return name in find_holders()
    return name[:1].islower() and name not in find_definitions() and not hasattr(builtins, name)


@pytest.mark.slow
def test_sites__are_all_found():
    """Of every kind: a class, a subclass of one, a class that is an argument, a warning."""
    kinds, classes = {site.kind for site in list_sites()}, set(find_classes())
    assert len(list_sites()) > 600
    assert kinds >= classes - {"RelayQuantError"} | {"", "UserWarning", "AccuracyWarning"}
    assert {"PatternMismatch", "NotFiniteError"} <= classes


def test_sites__each_has_a_literal_code():
    wrong = [site for site in list_sites() if not re.fullmatch(r"RQ\d{3}", str(site.code))]
    assert wrong == []


def test_pages__one_for_each_code():
    assert sorted(PAGES) == sorted({str(site.code) for site in list_sites()})
    assert len(PAGES) <= 26


def read_parts(code: str) -> dict[str, str]:
    """The parts of a page by their heads."""
    text = PAGES[code].read_text("utf-8")
    assert re.match(rf"# {code}: [A-Zt].*[^.]\n", text)
    found = re.findall(r"^\*\*(.+?)\.\*\* (.+?)(?=\n\n\*\*|\n*\Z)", text, re.MULTILINE | re.DOTALL)
    return dict(found)


@pytest.mark.parametrize("code", PAGES)
def test_pages__say_what_why_and_what_to_do(code):
    """And which classes are raised with it: those, and no others."""
    parts = read_parts(code)
    assert list(parts) == ["What", "Why", "What to do", "Seen as"]
    assert all(len(body) > 30 for body in parts.values())
    named = set(re.findall(r"`(\w+(?:Error|Warning|Mismatch))`", parts["What"]))
    kinds = {site.kind for site in list_sites() if site.code == code}
    if "" in kinds:  # the class is an argument: whatever the page names
        assert len(named) > 1
    for kind in kinds - {""}:
        assert named & find_classes().get(kind, {kind}), kind
    derived = {name for kind in kinds for name in find_classes().get(kind, {kind})}
    builtin = {"OSError", "ImportError"}
    assert named - builtin <= derived or "" in kinds


@pytest.mark.parametrize("code", PAGES)
def test_pages__example_ends_with_the_code(code):
    """`tests/test_docs.py` runs it."""
    parts = read_parts(code)
    session = re.sub(r"^```.*$", "", parts["Seen as"], flags=re.MULTILINE)
    *rest, last = doctest.DocTestParser().get_examples(session)
    assert last.exc_msg is not None
    assert last.exc_msg.endswith(f" [{code}]\n")
    assert all(example.exc_msg is None for example in rest)
    raised = re.match(r"[\w.]+", last.exc_msg)
    assert raised
    assert f"`{raised[0].rpartition('.')[2]}`" in parts["What"]


def raise_in_tvm():
    scale, zero = relax.const(0.1, "float32"), relax.const(0, "int32")
    value = rq.extend.qnn.dequantize(relax.const(np.zeros(3, "float32")), scale, zero)
    relax.BlockBuilder().normalize(value)


def read_what_is_no_file(kind=rq.ConfigError):
    with reading("x.json", "prepared model", kind):
        raise KeyError("format")


@pytest.mark.parametrize("kind", [rq.ConfigError, rq.ModelError, rq.DataError])
def test_code__of_any_class_where_the_class_is_an_argument(kind):
    """What reads files is told of which class the error is to be."""
    with pytest.raises(kind) as caught:
        read_what_is_no_file(kind)
    assert caught.value.code == "RQ502"


def test_code__of_arguments_is_one_for_every_class():
    for hint, kind in ((int, rq.ConfigError), (tvm.IRModule, rq.ModelError)):
        with pytest.raises(kind) as caught:
            check_type("x", hint, "f: x")
        assert caught.value.code == "RQ101"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: rq.QSpec("int7"), "RQ101"),
        (lambda: rq.load("model.unknown"), "RQ201"),
        (lambda: rq.quantize("model.onnx", None, []), "RQ101"),
        (lambda: rq.save_qparams({}, "/no/such/folder/q.json"), "RQ501"),
        (raise_in_tvm, "RQ601"),
        (read_what_is_no_file, "RQ502"),
        (lambda: rq.BackendConfig.from_dict({"nam": "x"}, ()), "RQ101"),
        (lambda: rq.compile(None, "llvm -mcpu"), "RQ101"),
    ],
)
def test_message__ends_with_the_code(call, code):
    """However it comes out: through TVM, and as a copy or from another process too."""
    with pytest.raises(rq.RelayQuantError) as caught:
        call()
    error = caught.value
    assert str(error).endswith(f" [{code}]")
    assert str(error).count("[RQ") == 1
    for same in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same), same.code) == (type(error), str(error), code)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, rq.RelayQuantError)
    ],
)
def test_classes__copies_and_pickles_keep_the_code(kind):
    """Of every class, whatever its constructor takes."""
    error = kind("Wrong.", code="RQ202")
    for same in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same), same.code) == (type(error), "Wrong. [RQ202]", "RQ202")


def test_message__of_other_code_has_none():
    error = rq.ModelError("My own.")
    assert (str(error), error.code) == ("My own.", "")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Wrong.", "Wrong. [RQ101]"),
        ("Row 1: Wrong. [RQ601]", "Row 1: Wrong. [RQ601]"),
        ("Row 1: Wrong. [RQ601]. Try another.", "Row 1: Wrong. Try another. [RQ601]"),
        ("Row 1: wrong [RQ601]; row 2: wrong [RQ202].", "Row 1: wrong; row 2: wrong. [RQ601]"),
    ],
)
def test_add_code__what_is_quoted_is_nearer_to_the_cause(message, shown):
    assert add_code(message, "RQ101") == shown


def test_warning__ends_with_the_code():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap_sums(np.array([2**40]), "dense")
        warn_user("My own.")
    assert [str(w.message)[-8:] for w in caught] == [" [RQ402]", "My own."[-8:]]
