"""Codes of errors and warnings: everything that is raised for users has one, and a page for it."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

import relayquant as rq
from relayquant import errors
from relayquant.base.storage.files import reading
from relayquant.errors import KINDS, add_code, find_code, warn_user
from relayquant.flow.testing.check import PatternMismatch
from relayquant.ir.reference.affine import wrap_sums

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "relayquant"
PAGES = {path.stem: path for path in sorted((ROOT / "docs/errors").glob("RQ*.md"))}
CLASSES = {
    name: kind
    for name, kind in {**vars(errors), "PatternMismatch": PatternMismatch}.items()
    if isinstance(kind, type) and issubclass(kind, rq.RelayQuantError)
}
WARNINGS = {kind.__name__: kind for kind in (rq.AccuracyWarning, rq.DataWarning, RuntimeWarning)}


def find_raised() -> Iterator[tuple[str, type[Exception]]]:
    """(place, class) of every error that is made, and of every warning, in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or module == "relayquant.errors":
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in CLASSES:
                yield f"{module}:{node.lineno}", CLASSES[name]
            elif name == "warn_user":
                category = next((ast.unparse(arg) for arg in node.args[1:]), "")
                yield f"{module}:{node.lineno}", WARNINGS.get(category, UserWarning)


RAISED = list(find_raised())


def test_kinds__what_is_raised_anywhere_has_a_code():
    assert len(RAISED) > 600
    assert {place for place, kind in RAISED if not find_code(kind, place.split(":")[0])} == set()


def test_kinds__each_is_raised_somewhere():
    used = {find_code(kind, place.split(":")[0]) for place, kind in RAISED}
    assert used == {kind.code for kind in KINDS}


@pytest.mark.parametrize("module", ["arguments", "storage.files"])
def test_kinds__of_any_class_where_the_class_is_an_argument(module):
    """What checks arguments, and what reads files, are told of which class the error is to be."""
    public = (rq.ConfigError, rq.ModelError, rq.DataError)
    assert len({find_code(kind, f"relayquant.{module}") for kind in public} - {""}) == 1


def test_kinds__each_code_once_and_modules_that_exist():
    codes = [kind.code for kind in KINDS]
    assert len(codes) == len(set(codes))
    for kind in KINDS:
        for name in kind.modules:
            path = PACKAGE.joinpath(*name.split(".")) if name else PACKAGE
            assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_pages__one_for_each_code():
    assert sorted(PAGES) == sorted(kind.code for kind in KINDS)


@pytest.mark.parametrize("code", PAGES)
def test_pages__say_what_why_and_what_to_do(code):
    """And which classes are raised with it."""
    text = PAGES[code].read_text("utf-8")
    assert re.match(rf"# {code}: [A-Z].*[^.]\n", text)
    parts = re.findall(r"^\*\*(.+?)\*\* (.+?)(?=\n\n|\n*\Z)", text, re.MULTILINE | re.DOTALL)
    assert [head for head, _ in parts] == ["What.", "Why.", "What to do."]
    assert all(len(body) > 30 for _, body in parts)
    named = set(re.findall(r"`(\w+(?:Error|Warning))`", parts[0][1]))
    (kind,) = (kind for kind in KINDS if kind.code == code)
    assert {each.__name__ for each in kind.raises} <= named


def raise_in_tvm():
    scale, zero = relax.const(0.1, "float32"), relax.const(0, "int32")
    value = rq.extend.qnn.dequantize(relax.const(np.zeros(3, "float32")), scale, zero)
    relax.BlockBuilder().normalize(value)


def read_what_is_no_file():
    with reading("x.json", "prepared model", rq.ConfigError):
        raise KeyError("format")


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: rq.QSpec("int7"), "RQ103"),
        (lambda: rq.load("model.unknown"), "RQ201"),
        (lambda: rq.quantize("model.onnx", None, []), "RQ101"),
        (lambda: rq.save_qparams({}, "/no/such/folder/q.json"), "RQ601"),
        (raise_in_tvm, "RQ501"),
        (read_what_is_no_file, "RQ602"),
        (lambda: rq.BackendConfig.from_dict({"nam": "x"}, ()), "RQ102"),
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


def test_message__of_other_code_has_none():
    error = rq.ModelError("My own.")
    assert (str(error), error.code) == ("My own.", "")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Wrong.", "Wrong. [RQ103]"),
        ("Row 1: Wrong. [RQ501]", "Row 1: Wrong. [RQ501]"),
        ("Row 1: Wrong. [RQ501]. Try another.", "Row 1: Wrong. Try another. [RQ501]"),
        ("Row 1: wrong [RQ501]; row 2: wrong [RQ204].", "Row 1: wrong; row 2: wrong. [RQ501]"),
    ],
)
def test_add_code__what_is_quoted_is_nearer_to_the_cause(message, shown):
    assert add_code(message, rq.ConfigError, "relayquant.base.qtypes") == shown


def test_warning__ends_with_the_code():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap_sums(np.array([2**40]), "dense")
        warn_user("My own.")
    assert [str(w.message)[-8:] for w in caught] == [" [RQ502]", "My own."[-8:]]
