"""The rules of the tree, read from its source: layers, frozen values, quiet imports, messages.

Nothing of relayquant is imported here: a broken rule is reported even when nothing loads.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "relayquant"

#: Rooms from the bottom up. A module may import from its own room and from rooms before it.
ROOMS: list[str] = [
    "errors",
    "base",
    "config",
    "ir",
    "codegen",
    "data",
    "stages",
    "relay",
    "formats",
    "analysis",
    "flow",
    "torch",
    "extend",
    "plots",
    "__init__",
    "demo",
    "cli",
    "__main__",
]
#: Each is replaceable alone, so none may know another.
STAGES = {"preparation", "annotation", "simulation", "calibration", "conversion"}

#: Names that say nothing of what is inside.
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}

#: "module:class" -> why it has to change after it was built.
MUTABLE_DATACLASSES: dict[str, str] = {
    "relayquant.ir.dialect.parameters:Reader": "a builder: collects the operands of a loop nest",
    "relayquant.ir.reference.frame:Frame": "the state of a running function",
}

#: The one table of functions of one value.
UNARY_TABLE = "relayquant.ir.reference.unary"
#: Module that names several of them -> why that is no second table.
NAMES_UNARY: dict[str, str] = {
    "relayquant.codegen.type_promotion": "those that TVM compiles of some types only",
    "relayquant.codegen.schedule.block_analysis": "functions of TIR, not operators",
    "relayquant.ir.ops.narrow_float": "those of all operators whose results are rounded once",
    "relayquant.stages.preparation.pooling": "operators whose results are not negative",
}

#: Module that names several operators of the dialect -> why that does not derive from their rows.
#: A new operator needs its row, its numpy meaning and a row of `ops`; nothing in these modules.
NAMES_QNN: dict[str, str] = {
    "relayquant.ir.dialect.legality": "the four that are legal where integers are not",
    "relayquant.ir.dialect.accumulator_range": "where the sums of an operator stand",
    "relayquant.formats.writers.onnx_qnn": "what has a form other than that of its float operator",
    "relayquant.relay.export.quantized_rows": "what Relay has, or arithmetic that is no table",
}

#: Module -> calls it may make while it is imported.
CALLS_AT_IMPORT: dict[str, set[str]] = {
    "relayquant": {"check_versions"},
}
IMPORTS = (ast.Import, ast.ImportFrom)
#: Fills TVM's registry of operators, which has no other way to be filled.
REGISTERS_OPERATORS = "relayquant.ir.dialect"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
TREES = {name: ast.parse(path.read_bytes(), str(path)) for name, path in SOURCES.items()}
each_module = pytest.mark.parametrize("module", sorted(SOURCES))


def member_of(module: str) -> str:
    """The part of the package a module belongs to: "relayquant.ir.ops.conv" -> "ops"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def level_of(room: str) -> int:
    assert room in ROOMS, f"{PACKAGE}/{room} has no place in ROOMS of {__file__}: give it one"
    return ROOMS.index(room)


def stage_of(module: str) -> str:
    """The stage a module belongs to, "" if it belongs to none."""
    parts = module.split(".")
    found = len(parts) > 2 and parts[1] == "stages" and parts[2] in STAGES
    return parts[2] if found else ""


def imported_modules(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import from this package, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_source(module, node)
            # `from package import x` names a module or something that package/__init__.py defines.
            names = [
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in SOURCES else source
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE:
                yield node.lineno, name


def resolve_source(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = SOURCES[module].name == "__init__.py"
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def dotted_name(node: ast.expr) -> str:
    """The text of a name: "tvm_ffi.register_error"; "" for anything that is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return ""


def statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those of functions, nor of scripts."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
            continue
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from statements_at_import(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements_at_import(handler.body)


def test_sources__found() -> None:
    assert "relayquant.errors" in SOURCES
    assert "relayquant" in SOURCES


def list_imports() -> Iterator[tuple[str, int, str]]:
    """(module, line, imported module) of the whole package."""
    for module, tree in TREES.items():
        for line, name in imported_modules(module, tree):
            yield module, line, name


IMPORTS_OF_ALL = list(list_imports())


def test_rooms__are_those_of_the_tree() -> None:
    found = {member_of(module) for module in SOURCES}
    assert found == set(ROOMS)
    assert len(found) <= 18


def test_rooms__imports_point_down() -> None:
    wrong = [
        f"{module} line {line}: imports {name}"
        for module, line, name in IMPORTS_OF_ALL
        if level_of(member_of(name)) > level_of(member_of(module))
    ]
    assert not wrong


def test_stages__do_not_know_each_other() -> None:
    wrong = [
        f"{module} line {line}: imports {name}"
        for module, line, name in IMPORTS_OF_ALL
        if stage_of(module) and stage_of(name) not in ("", stage_of(module))
    ]
    assert not wrong


def test_kernels__know_nothing_of_relax():
    wrong = [
        f"{module} line {node.lineno}"
        for module, tree in TREES.items()
        if module.startswith(f"{PACKAGE}.codegen.kernels")
        for node in ast.walk(tree)
        if isinstance(node, IMPORTS)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if "relax" in name.split(".")
    ]
    assert not wrong


def test_names__no_function_is_called_as_a_folder():
    """Folders are nouns, functions are verbs: `relayquant.x` is the one or the other."""
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    public = {
        alias.asname or alias.name
        for node in ast.walk(TREES[PACKAGE])
        if isinstance(node, ast.ImportFrom) and node.module != PACKAGE
        for alias in node.names
    }
    assert "quantize" in public
    clashes = sorted(public & folders)
    assert not clashes, clashes


def test_pipeline__is_one_page_of_functions():
    """The stages in order, and what they decide; arguments, signatures and their documentation are
    in `settings`, `steps` and `quantizer`.
    """
    page = f"{PACKAGE}.flow.pipeline"
    lines = SOURCES[page].read_text("utf-8").splitlines()
    body = [node for node in TREES[page].body if not isinstance(node, IMPORTS)]
    assert all(isinstance(node, ast.Expr | ast.FunctionDef) for node in body)
    assert len(lines) - body[1].lineno < 200
    arguments = [len(node.args.args) for node in body if isinstance(node, ast.FunctionDef)]
    assert max(arguments) <= 6


def test_settings__are_declared_once():
    """No function of the flow or above it lists a dozen of them by hand."""
    long = {
        f"{module}:{node.name}"
        for module, tree in TREES.items()
        if level_of(member_of(module)) >= level_of("flow")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and len([*node.args.args, *node.args.kwonlyargs]) > 12
    }
    assert not long


def public_functions() -> dict[str, ast.FunctionDef]:
    """Functions that `relayquant/__init__.py` imports, by name."""
    return {
        function.name: function
        for module, alias in (
            (node.module, alias)
            for node in ast.walk(TREES[PACKAGE])
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        )
        if module in TREES
        for function in TREES[module].body
        if isinstance(function, ast.FunctionDef) and function.name == alias.name
    }


PUBLIC_FUNCTIONS = public_functions()
#: Who takes data behind something else, and why.
DATA_COMES_LATER = {"prepare": "called as in PyTorch FX: model, qconfig_mapping, backend_config"}


def rank_argument(name: str, names: list[str]) -> int:
    """What comes first: the model with its parameters; what became of it; data; all else."""
    if name in ("mod", "prepared", "model", "reference") or (
        name == "params" and "quantized" not in names
    ):
        return 0
    return {"quantized": 1, "dataset": 2, "inputs": 2}.get(name, 3)


def test_signatures__found() -> None:
    assert {"quantize", "prepare", "compare", "verify", "lint", "sensitivity"} <= set(
        PUBLIC_FUNCTIONS
    )
    assert set(DATA_COMES_LATER) <= set(PUBLIC_FUNCTIONS)


@pytest.mark.parametrize("name", sorted(PUBLIC_FUNCTIONS))
def test_signatures__model_then_result_then_data(name: str) -> None:
    names = [argument.arg for argument in PUBLIC_FUNCTIONS[name].args.args]
    ranks = [rank_argument(each, names) for each in names]
    assert (ranks == sorted(ranks)) == (name not in DATA_COMES_LATER), names


def test_signatures__backend_is_given_once() -> None:
    """A prepared model knows its backend."""
    above = [name for name in SOURCES if level_of(member_of(name)) >= level_of("flow")]
    for module, node in ((name, node) for name in above for node in ast.walk(TREES[name])):
        if isinstance(node, ast.FunctionDef):
            names = {each.arg for each in [*node.args.args, *node.args.kwonlyargs]}
            twice = names & {"backend", "backend_config"} if "prepared" in names else set()
            assert not twice, f"{module}: {node.name} takes prepared and {twice}"


@pytest.mark.xfail(reason="four circles are left")
def test_modules__no_circle() -> None:
    edges: dict[str, set[str]] = {module: set() for module in SOURCES}
    for module, _, name in IMPORTS_OF_ALL:
        if name != module:
            edges[module].add(name)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other in a circle: {' -> '.join(error.args[1])}")


def test_classes__one_meaning_for_a_name() -> None:
    """No class is called as another of the package, also inside of functions: who reads a name need
    not ask which one.
    """
    places: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module} line {node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@each_module
def test_dataclasses__frozen(module: str) -> None:
    for node in ast.walk(TREES[module]):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if dotted_name(call.func if call else decorator).split(".")[-1] != "dataclass":
                continue
            frozen = call is not None and any(
                keyword.arg == "frozen"
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is True
                for keyword in call.keywords
            )
            excused = f"{module}:{node.name}" in MUTABLE_DATACLASSES
            assert frozen or excused, (
                f"{module} line {node.lineno}: dataclass {node.name} is not frozen"
            )
            assert not (frozen and excused), f"{module}:{node.name} needs no exception any more"


def test_dataclasses__exceptions_exist() -> None:
    defined = {
        f"{module}:{node.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert set(MUTABLE_DATACLASSES) <= defined


@each_module
def test_import__has_no_effects(module: str) -> None:
    if module == REGISTERS_OPERATORS:
        return
    allowed = CALLS_AT_IMPORT.get(module, set())
    for statement in statements_at_import(TREES[module].body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = dotted_name(statement.value.func)
            assert called in allowed, (
                f"{module} line {statement.lineno}: calls {called or 'something'} when imported"
            )
        if isinstance(statement, ast.For | ast.While | ast.With):
            raise AssertionError(
                f"{module} line {statement.lineno}: a {type(statement).__name__.lower()} statement "
                "runs when imported; build the value in one expression or in a function"
            )
        for decorator in getattr(statement, "decorator_list", []):
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = dotted_name(function).split(".")[-1]
            assert not name.startswith("register"), (
                f"{module} line {statement.lineno}: @{name} fills a registry when imported"
            )


def unary_names() -> set[str]:
    """Names of the rows of UNARY_TABLE, those of their operators in Relax, ONNX and Relay too."""
    rows = [
        node
        for node in ast.walk(TREES[UNARY_TABLE])
        if isinstance(node, ast.Call) and dotted_name(node.func) == "Unary"
    ]
    names = {
        value.value
        for row in rows
        for value in [*row.args, *(word.value for word in row.keywords if word.arg == "relay")]
        if isinstance(value, ast.Constant)
    }
    return names | {f"relax.{name}" for name in names}


def test_unary__found() -> None:
    assert {"sigmoid", "Sigmoid", "relax.nn.gelu", "softplus"} <= unary_names()
    assert set(NAMES_UNARY) <= set(SOURCES)


@each_module
def test_unary__one_table(module: str) -> None:
    """A module that lists four of these functions by name has a table of its own, which the next
    function will be missing from: derive it from the rows.
    """
    known = unary_names()
    listed = [
        (node.lineno, found)
        for node in ast.walk(TREES[module])
        if len(found := known & set(listed_strings(node))) > 3
    ]
    if module == UNARY_TABLE or module in NAMES_UNARY:
        assert listed or module == UNARY_TABLE, f"{module} needs no exception any more"
        return
    assert not listed, f"{module}: {listed}"


@each_module
def test_qnn__one_row(module: str) -> None:
    """As `test_unary__one_table`, of the operators `relax.qnn.*`."""
    listed = [
        (node.lineno, found)
        for node in ast.walk(TREES[module])
        if len(found := [s for s in listed_strings(node) if s.startswith("relax.qnn.")]) > 3
    ]
    assert bool(listed) == (module in NAMES_QNN), f"{module}: {listed}"


def listed_strings(node: ast.AST) -> Iterator[str]:
    """The strings that a literal collection or the keys of a dictionary consist of."""
    parts = getattr(node, "keys", None) if isinstance(node, ast.Dict) else None
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = node.elts
    for part in parts or []:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@each_module
def test_raise__has_a_message(module: str) -> None:
    for node in ast.walk(TREES[module]):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        where = f"{module} line {node.lineno}"
        if isinstance(node.exc, ast.Call):
            assert node.exc.args or node.exc.keywords, f"{where}: raises without a message"
            first = node.exc.args[0] if node.exc.args else None
            if isinstance(first, ast.Constant):
                assert first.value, f"{where}: raises an empty message"
        else:
            name = dotted_name(node.exc).split(".")[-1]
            assert not name[:1].isupper(), f"{where}: raises {name} without a message"


@each_module
def test_module__has_a_docstring(module: str) -> None:
    docstring = ast.get_docstring(TREES[module])
    assert docstring, f"{module} does not say where it stands in the data flow"
    assert docstring.strip(), f"{module} has an empty docstring"


@each_module
def test_module__has_a_telling_name(module: str) -> None:
    vague = VAGUE_NAMES.intersection(module.split("."))
    assert not vague, f"{module}: {vague} says nothing of what is inside"


def defined_functions(tree: ast.AST) -> dict[str, list[ast.FunctionDef]]:
    """Functions of a module by name, inner ones included."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def rule_functions(module: str) -> Iterator[ast.FunctionDef]:
    """What the rules that a module makes call: `make_rule(f, ...)` and `Rule(name, pattern, f)`;
    functions of this module, or else imported ones.
    """
    imported = [TREES[name] for _, name in imported_modules(module, TREES[module])]
    for node in ast.walk(TREES[module]):
        called = dotted_name(node.func) if isinstance(node, ast.Call) else ""
        if called not in ("make_rule", "Rule") or not isinstance(node, ast.Call):
            continue
        name = dotted_name(node.args[0 if called == "make_rule" else 2]).split(".")[-1]
        sources = (defined_functions(tree).get(name, []) for tree in (TREES[module], *imported))
        yield from next(filter(None, sources), [])


RULE_MODULES = {module: list(rule_functions(module)) for module in SOURCES}


def test_test_files__have_names_of_their_own() -> None:
    """pytest imports each by its name alone: of two with one name, one is not collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_rules__are_found() -> None:
    assert sum(map(len, RULE_MODULES.values())) > 50


@pytest.mark.parametrize("module", [name for name, rules in RULE_MODULES.items() if rules])
def test_rules__decline_with_a_reason(module: str) -> None:
    """A rule returns a new value or a Skip: no None and no False, which say nothing."""
    for function in RULE_MODULES[module]:
        where = f"{module}: {function.name}"
        returned = ast.unparse(function.returns) if function.returns else ""
        assert "Skip" in returned, f"{where} returns {returned or 'what it does not say'}"
        assert "None" not in returned.split(" | "), f"{where} declines without a reason"
        inner = {
            id(node)
            for child in ast.walk(function)
            if isinstance(child, ast.FunctionDef | ast.Lambda) and child is not function
            for node in ast.walk(child)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and id(node) not in inner:
                value = node.value
                bare = value is None or (
                    isinstance(value, ast.Constant) and value.value in (None, False, True)
                )
                assert not bare, f"{where} line {node.lineno}: returns no value and no reason"
