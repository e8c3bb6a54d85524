"""Names that are loaded when they are first used: none is missing, none is loaded before."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import relayquant

#: Packages all of whose names are loaded when they are used.
PACKAGES = ["relayquant", "relayquant.plots", "relayquant.torch"]


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["relayquant", "relayquant.errors", "relayquant.config"])
def test_import__needs_no_tvm(module):
    program = f"import sys, {module}; print({{'tvm', 'tvm_ffi', 'torch'}} & {{*sys.modules}})"
    assert run_python(program) == "set()"


def test_import__of_a_wrong_tvm_is_refused_before_it_is_loaded():
    program = (
        "import sys\n"
        "from importlib import metadata\n"
        "metadata.version = lambda package: '0.26.0'\n"
        "try:\n"
        "    import relayquant\n"
        "except ImportError as error:\n"
        "    print('needs apache-tvm' in str(error), 'tvm' in sys.modules)\n"
    )
    assert run_python(program) == "True False"


@pytest.mark.parametrize("package", PACKAGES)
def test_names__are_those_that_type_checkers_see(package):
    module = import_module(package)
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name, (place, original) in seen.items():
        home = import_module(place)
        wanted = getattr(home, original, None) or import_module(f"{place}.{original}")
        assert getattr(module, name) is wanted


def test_names__unknown_one_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'relayquant' has no attribute 'quantise'"):
        relayquant.quantise  # noqa: B018


def test_relay__has_the_name_from_above():
    from relayquant.flow import relay_scripts

    assert relayquant.relay.quantize is relay_scripts.quantize
    assert "quantize" in dir(relayquant.relay)
