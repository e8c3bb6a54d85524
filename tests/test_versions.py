"""TVM's versions: the check that runs before TVM is loaded, and what another release may lack."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi

from relayquant.base import _tvm


@pytest.fixture
def installed(monkeypatch):
    """Function that pretends certain versions are installed; None: not installed."""

    def pretend(**versions: str | None) -> None:
        found = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post0"}
        found.update({name.replace("_", "-"): version for name, version in versions.items()})

        def version(package: str) -> str:
            if found[package] is None:
                raise metadata.PackageNotFoundError(package)
            return found[package]

        monkeypatch.setattr(_tvm.metadata, "version", version)

    return pretend


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"apache_tvm": "0.27.0"},
        {"apache_tvm": "0.27.3+cpu"},
        {"apache_tvm_ffi": "0.1.14.post2"},
    ],
)
def test_check_versions__accepts(installed, versions):
    installed(**versions)
    _tvm.check_versions()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            {"apache_tvm": "0.26.0"},
            r"needs apache-tvm>=0\.27\.0,<0\.28 but found 0\.26\.0 .*Relax API.*pip install "
            r"'apache-tvm>=0\.27\.0,<0\.28'",
        ),
        ({"apache_tvm": "0.28.0"}, r"apache-tvm>=0\.27\.0,<0\.28 but found 0\.28\.0"),
        (
            {"apache_tvm_ffi": "0.1.15"},
            r"apache-tvm-ffi>=0\.1\.14\.post0,<0\.1\.15 but found 0\.1\.15 .*crashes.*save_json",
        ),
        ({"apache_tvm_ffi": "0.1.15.post1"}, r"found 0\.1\.15\.post1"),
        ({"apache_tvm_ffi": "0.1.14"}, r"found 0\.1\.14 "),
        ({"apache_tvm": None}, r"apache-tvm>=0\.27\.0,<0\.28, which is not installed.*pip install"),
        ({"apache_tvm_ffi": None}, r"apache-tvm-ffi.*which is not installed"),
    ],
)
def test_check_versions__refuses_with_what_to_do(installed, versions, message):
    installed(**versions)
    with pytest.raises(ImportError, match=message):
        _tvm.check_versions()


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("0.1.14", "0.1.14.post0"),
        ("0.1.14.post0", "0.1.14.post1"),
        ("0.1.14.post9", "0.1.15"),
        ("0.9", "0.10"),
        ("0.27", "0.27.1"),
    ],
)
def test_parse_version__orders_as_pep_440(lower, higher):
    assert _tvm.parse_version(lower) < _tvm.parse_version(higher)
    assert _tvm.parse_version("0.27") == _tvm.parse_version("0.27.0+cu12")


def find_owner(path: str) -> Any:
    """A module, or a class of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not path.startswith(str(error.name)):
            pytest.skip(f"needs {error.name}")
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    except ImportError as error:  # of a frontend whose package is an extra
        pytest.skip(str(error))


def list_assigned(owner: Any) -> set[str]:
    """Names that the methods of a class assign to `self`."""
    parts = inspect.getmro(owner) if inspect.isclass(owner) else ()
    files = {inspect.getfile(part) for part in parts if part.__module__.startswith("tvm.")}
    texts = [Path(file).read_text("utf-8") for file in files]
    return {name for text in texts for name in re.findall(r"\bself\.(\w+)\b.*? = ", text)}


@pytest.mark.parametrize("path", _tvm.INTERNALS)
def test_internals__are_those_of_the_installed_tvm(path):
    """Fails with the names that a new release of TVM has no longer."""
    owner = find_owner(path)
    assigned = list_assigned(owner)
    missing = []
    for name in _tvm.INTERNALS[path].split():
        value: Any = owner
        for part in name.split("."):
            value = getattr(value, part, None if part not in assigned else "assigned")
        missing += [name] if value is None else []
    assert not missing, f"TVM {tvm.__version__}: {path} has no {', '.join(missing)}"


@pytest.mark.parametrize("name", _tvm.GLOBAL_FUNCTIONS)
def test_global_functions__are_those_of_the_installed_tvm(name):
    assert tvm_ffi.get_global_func(name, allow_missing=True) is not None
