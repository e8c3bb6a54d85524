"""The rules of the tree, read from its source: layers, frozen values, quiet imports, messages.

Nothing of relayquant is imported here: a broken rule is reported even when nothing loads.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from package_sources import ROOT, SOURCES, list_nodes, read_tree

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
STAGES = {"preparation", "equalization", "annotation", "simulation", "calibration", "conversion"}

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
    "relayquant.codegen.legalization.table": "those of which TVM's own loop nests lose digits",
    "relayquant.codegen.rewrites.type_promotion": "those that TVM compiles of some types only",
    "relayquant.codegen.schedule.block_analysis": "functions of TIR, not operators",
    "relayquant.config.onnx_names": "operators of another format by their names there",
    "relayquant.formats.readers.torch.program": "those that give values without rounding them",
    "relayquant.ir.ops.planned_walk": "those of all operators whose results are rounded once",
    "relayquant.stages.preparation.rules.pooling": "operators whose results are not negative",
}

#: Module that names several operators of the dialect -> why that does not derive from their rows.
#: A new operator needs its row, its numpy meaning and a row of `ops`; nothing in these modules.
NAMES_QNN: dict[str, str] = {
    "relayquant.ir.dialect.legality": "the four that are legal where integers are not",
    "relayquant.ir.dialect.accumulator_range": "where the sums of an operator stand",
    "relayquant.formats.writers.onnx.qnn": "what has a form other than that of its float operator",
    "relayquant.relay.export.quantized_rows": "what Relay has, or arithmetic that is no table",
}

#: Module -> calls it may make while it is imported.
CALLS_AT_IMPORT: dict[str, set[str]] = {
    "relayquant": {"check_versions"},
}
IMPORTS = (ast.Import, ast.ImportFrom)
#: Fills TVM's registry of operators, which has no other way to be filled.
REGISTERS_OPERATORS = "relayquant.ir.dialect"


def find_nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """(module, node) of every node of these kinds in the package."""
    for module in SOURCES:
        for node in list_nodes(module):
            if isinstance(node, kinds):
                yield module, node


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


def imported_modules(module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import from this package, also inside functions."""
    for node in list_nodes(module):
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


@functools.cache
def list_imports() -> list[tuple[str, int, str]]:
    """(module, line, imported module) of the whole package."""
    return [(module, line, name) for module in SOURCES for line, name in imported_modules(module)]


def test_rooms__are_those_of_the_tree() -> None:
    found = {member_of(module) for module in SOURCES}
    assert found == set(ROOMS)
    assert len(found) <= 18


def test_rooms__imports_point_down() -> None:
    wrong = [
        f"{module} line {line}: imports {name}"
        for module, line, name in list_imports()
        if level_of(member_of(name)) > level_of(member_of(module))
    ]
    assert not wrong


def test_stages__do_not_know_each_other() -> None:
    wrong = [
        f"{module} line {line}: imports {name}"
        for module, line, name in list_imports()
        if stage_of(module) and stage_of(name) not in ("", stage_of(module))
    ]
    assert not wrong


def test_kernels__know_nothing_of_relax():
    wrong = [
        f"{module} line {node.lineno}"
        for module, node in find_nodes(*IMPORTS)
        if module.startswith(f"{PACKAGE}.codegen.kernels")
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if "relax" in name.split(".")
    ]
    assert not wrong


def test_names__no_function_is_called_as_a_folder():
    """Folders are nouns, functions are verbs: `relayquant.x` is the one or the other."""
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    public = {
        alias.asname or alias.name
        for node in list_nodes(PACKAGE)
        if isinstance(node, ast.ImportFrom) and node.module != PACKAGE
        for alias in node.names
    }
    assert "quantize" in public
    clashes = sorted(public & folders)
    assert not clashes, clashes


def test_pipeline__is_one_page_of_functions():
    """The stages in order, what they decide, and the loops around them; arguments, signatures and
    their documentation are in `settings`, `steps` and `quantizer`, and what the loops ask in
    `refine`, which does not know the page. A function fits a screen.
    """
    page = f"{PACKAGE}.flow.pipeline"
    lines = SOURCES[page].read_text("utf-8").splitlines()
    body = [node for node in read_tree(page).body if not isinstance(node, IMPORTS)]
    assert all(isinstance(node, ast.Expr | ast.FunctionDef) for node in body)
    assert len(lines) - body[1].lineno < 280
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    assert max(len(node.args.args) for node in functions) <= 6
    assert max((node.end_lineno or 0) - node.lineno for node in functions) < 54
    assert not [
        module
        for module, _, name in list_imports()
        if module.startswith(f"{PACKAGE}.flow.refine") and name == page
    ]


def makes_settings(node: ast.FunctionDef) -> bool:
    """Whether the first thing that a function does with its settings is to make one value of all of
    them. `tests/flow/test_settings.py` compares its arguments with the fields.
    """
    first = next((each for each in node.body if isinstance(each, ast.Assign)), None)
    return bool(first and ast.unparse(first.value).endswith("Settings.read_call(locals())"))


def test_settings__are_listed_where_users_read_them():
    """A function of the flow or above it that lists a dozen settings is one that users call, and
    hands on one value: what is inside does not list them again.
    """
    long = {
        node.name: makes_settings(node)
        for module, node in find_nodes(ast.FunctionDef)
        if level_of(member_of(module)) >= level_of("flow")
        and len([*node.args.args, *node.args.kwonlyargs]) > 12
    }
    assert long == dict.fromkeys(("quantize", "compress_weights", "finetune"), True)


@functools.cache
def public_functions() -> dict[str, ast.FunctionDef]:
    """Functions that `relayquant/__init__.py` imports, by name."""
    return {
        function.name: function
        for module, alias in (
            (node.module, alias)
            for node in list_nodes(PACKAGE)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        )
        if module in SOURCES
        for function in read_tree(module).body
        if isinstance(function, ast.FunctionDef) and function.name == alias.name
    }


#: Who takes data behind something else, and why.
DATA_COMES_LATER: dict[str, str] = {}


def rank_argument(name: str) -> int:
    """What comes first: the model with its parameters; what became of it; data; all else."""
    if name in ("mod", "params", "prepared", "model", "reference"):
        return 0
    return {"qmod": 1, "dataset": 2, "inputs": 2}.get(name, 3)


def test_signatures__found() -> None:
    assert {"quantize", "prepare", "compare", "verify", "lint", "sensitivity"} <= set(
        public_functions()
    )
    assert set(DATA_COMES_LATER) <= set(public_functions())


def test_signatures__model_then_result_then_data() -> None:
    other = {}
    for name, function in public_functions().items():
        names = [argument.arg for argument in function.args.args]
        ranks = [rank_argument(each) for each in names]
        if ranks != sorted(ranks):
            other[name] = names
    assert other.keys() == DATA_COMES_LATER.keys(), other


def test_signatures__backend_is_given_once() -> None:
    """A prepared model knows its backend."""
    for module, node in find_nodes(ast.FunctionDef):
        if level_of(member_of(module)) >= level_of("flow"):
            names = {each.arg for each in [*node.args.args, *node.args.kwonlyargs]}
            twice = names & {"backend"} if "prepared" in names else set()
            assert not twice, f"{module}: {node.name} takes prepared and {twice}"


def folder_of(module: str) -> str:
    """The folder within a room that a module lies in, "" if it lies in the room itself."""
    parts = module.split(".")
    folder = ".".join(parts[:3])
    return folder if len(parts) > 2 and SOURCES[folder].name == "__init__.py" else ""


@pytest.mark.parametrize("place_of", [str, folder_of], ids=["modules", "folders"])
def test_imports__no_circle(place_of: Callable[[str], str]) -> None:
    """A reader who knows the folders below one knows all that it builds on."""
    edges: dict[str, set[str]] = {}
    for module, _, name in list_imports():
        if place_of(module) and place_of(name) not in ("", place_of(module)):
            edges.setdefault(place_of(module), set()).add(place_of(name))
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other in a circle: {' -> '.join(error.args[1])}")


def test_classes__one_meaning_for_a_name() -> None:
    """No class is called as another of the package, also inside of functions: who reads a name need
    not ask which one.
    """
    places: dict[str, list[str]] = {}
    for module, node in find_nodes(ast.ClassDef):
        places.setdefault(node.name, []).append(f"{module} line {node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def is_frozen(decorator: ast.expr) -> bool | None:
    """Whether a decorator makes a frozen dataclass; None: it makes no dataclass."""
    call = decorator if isinstance(decorator, ast.Call) else None
    if dotted_name(call.func if call else decorator).split(".")[-1] != "dataclass":
        return None
    return call is not None and any(
        keyword.arg == "frozen"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )


def test_dataclasses__frozen() -> None:
    mutable = {
        f"{module}:{node.name}"
        for module, node in find_nodes(ast.ClassDef)
        for decorator in node.decorator_list
        if is_frozen(decorator) is False
    }
    assert mutable == set(MUTABLE_DATACLASSES)


def test_dataclasses__exceptions_exist() -> None:
    defined = {f"{module}:{node.name}" for module, node in find_nodes(ast.ClassDef)}
    assert set(MUTABLE_DATACLASSES) <= defined


def list_effects(module: str) -> Iterator[str]:
    """What a module does when it is imported, but for definitions."""
    allowed = CALLS_AT_IMPORT.get(module, set())
    for statement in statements_at_import(read_tree(module).body):
        where = f"{module} line {statement.lineno}"
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = dotted_name(statement.value.func)
            if called not in allowed:
                yield f"{where}: calls {called or 'something'}"
        if isinstance(statement, ast.For | ast.While | ast.With):
            kind = type(statement).__name__.lower()
            yield f"{where}: a {kind} statement; build the value in one expression or a function"
        for decorator in getattr(statement, "decorator_list", []):
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = dotted_name(function).split(".")[-1]
            if name.startswith("register"):
                yield f"{where}: @{name} fills a registry"


def test_import__has_no_effects() -> None:
    modules = [module for module in SOURCES if module != REGISTERS_OPERATORS]
    assert [effect for module in modules for effect in list_effects(module)] == []


@functools.cache
def unary_names() -> set[str]:
    """Names of the rows of UNARY_TABLE, those of their operators in Relax, ONNX and Relay too."""
    rows = [
        node
        for node in list_nodes(UNARY_TABLE)
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


def find_tables(names: Callable[[set[str]], set[str]]) -> dict[str, list[str]]:
    """Module -> the collections in it that list more than three strings that `names` picks."""
    tables: dict[str, list[str]] = {}
    for module, node in find_nodes(ast.Dict, ast.Tuple, ast.List, ast.Set):
        found = names(set(listed_strings(node)))
        if len(found) > 3:
            tables.setdefault(module, []).append(f"line {node.lineno}: {sorted(found)}")
    return tables


def test_unary__one_table() -> None:
    """A module that lists four of these functions by name has a table of its own, which the next
    function will be missing from: derive it from the rows.
    """
    tables = find_tables(unary_names().intersection)
    tables.pop(UNARY_TABLE, None)
    assert tables.keys() == NAMES_UNARY.keys(), tables


def test_qnn__one_row() -> None:
    """As `test_unary__one_table`, of the operators `relax.qnn.*`."""
    tables = find_tables(lambda listed: {name for name in listed if name.startswith("relax.qnn.")})
    assert tables.keys() == NAMES_QNN.keys(), tables


def listed_strings(node: ast.AST) -> Iterator[str]:
    """The strings that a literal collection or the keys of a dictionary consist of."""
    parts = getattr(node, "keys", None) if isinstance(node, ast.Dict) else None
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = node.elts
    for part in parts or []:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def has_message(node: ast.Raise) -> bool:
    """Whether what is raised carries a text, or is no class."""
    if not isinstance(node.exc, ast.Call):
        return not dotted_name(node.exc).split(".")[-1][:1].isupper()
    first = node.exc.args[0] if node.exc.args else None
    return bool(first.value if isinstance(first, ast.Constant) else first or node.exc.keywords)


def test_raise__has_a_message() -> None:
    raised = [(module, node) for module, node in find_nodes(ast.Raise) if node.exc is not None]
    assert len(raised) > 900
    assert [
        f"{module} line {node.lineno}" for module, node in raised if not has_message(node)
    ] == []


def test_module__has_a_docstring() -> None:
    """It says where the module stands in the data flow."""
    assert [
        module for module in SOURCES if not (ast.get_docstring(read_tree(module)) or "").strip()
    ] == []


def test_module__has_a_telling_name() -> None:
    assert [module for module in SOURCES if VAGUE_NAMES.intersection(module.split("."))] == []


@functools.cache
def defined_functions(module: str) -> dict[str, list[ast.FunctionDef]]:
    """Functions of a module by name, inner ones included."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in list_nodes(module):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def rule_functions(module: str) -> Iterator[ast.FunctionDef]:
    """What the rules that a module makes call: `make_rule(f, ...)` and `Rule(name, pattern, f)`;
    functions of this module, or else imported ones.
    """
    imported = [name for _, name in imported_modules(module)]
    for node in list_nodes(module):
        called = dotted_name(node.func) if isinstance(node, ast.Call) else ""
        if called not in ("make_rule", "Rule") or not isinstance(node, ast.Call):
            continue
        name = dotted_name(node.args[0 if called == "make_rule" else 2]).split(".")[-1]
        sources = (defined_functions(source).get(name, []) for source in (module, *imported))
        yield from next(filter(None, sources), [])


def list_rules() -> list[tuple[str, ast.FunctionDef]]:
    """(module that makes the rule, function) of every rule."""
    return [(module, function) for module in SOURCES for function in rule_functions(module)]


def test_test_files__have_names_of_their_own() -> None:
    """pytest imports each by its name alone: of two with one name, one is not collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def find_silence(module: str, function: ast.FunctionDef) -> Iterator[str]:
    """Where a rule declines without a reason."""
    where = f"{module}: {function.name}"
    returned = ast.unparse(function.returns) if function.returns else ""
    if "Skip" not in returned:
        yield f"{where} returns {returned or 'what it does not say'}"
    if "None" in returned.split(" | "):
        yield f"{where} declines without a reason"
    inner = {
        id(node)
        for child in ast.walk(function)
        if isinstance(child, ast.FunctionDef | ast.Lambda) and child is not function
        for node in ast.walk(child)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and id(node) not in inner:
            value = node.value
            constant = isinstance(value, ast.Constant) and value.value in (None, False, True)
            if value is None or constant:
                yield f"{where} line {node.lineno}: returns no value and no reason"


def test_rules__decline_with_a_reason() -> None:
    """A rule returns a new value or a Skip: no None and no False, which say nothing."""
    rules = list_rules()
    assert len(rules) > 50
    assert [fault for rule in rules for fault in find_silence(*rule)] == []


#: Names of FlatBuffers, PyTorch, argparse and os that begin so. PyTorch's are used in `torch` too.
NOT_OF_TVM = {"_tab", "_ops", "_schema", "_actions", "_SubParsersAction", "_exit"}


def test_private_names__of_tvm_are_in_the_table() -> None:
    """Each private name that is read is one of the package, or of the table for the next TVM."""
    own: set[str] = set()
    read: set[str] = set()
    for module, node in find_nodes(ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Attribute) and member_of(module) != "torch":
            read.add(node.attr)
    (table,) = (
        node.value
        for node in read_tree("relayquant.base._tvm").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTERNALS"
    )
    names = " ".join(ast.literal_eval(table).values()).replace(".", " ").split()
    private = {name for name in read - own if name.startswith("_") and not name.startswith("__")}
    assert sorted(private - {*names} - NOT_OF_TVM) == []
