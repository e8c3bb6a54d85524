"""The site: every page, public name and tutorial becomes one, without a warning, and what its
examples show is what happens.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import relayquant as rq
from relayquant.cli.grammar import COMMANDS
from relayquant.cli.parsers import parse_words
from relayquant.stages.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
#: these, and the pages beside the sources
ALL_PAGES = PAGES | {path.name: path for path in sorted(ROOT.glob("*.md"))}
#: the page whose examples all others go on from
FIRST = "api/index.md"


def find_examples(text: str) -> list[doctest.Example]:
    """What a page shows of a session; fences end what an example prints."""
    return doctest.DocTestParser().get_examples(re.sub(r"^```.*$", "", text, flags=re.MULTILINE))


EXAMPLES = {
    page: examples
    for page, path in PAGES.items()
    if (examples := find_examples(path.read_text("utf-8")))
}


def run_examples(page: str, names: dict) -> dict:
    """The names that stand when all examples of a page have shown what it says."""
    test = doctest.DocTest(EXAMPLES[page], dict(names), page, str(PAGES[page]), 0, None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    assert runner.run(test, out=said.append, clear_globs=False).failed == 0, "".join(said)
    return test.globs


@pytest.fixture(scope="module")
def session():
    """What all examples stand on."""
    return run_examples(FIRST, {})


@pytest.mark.parametrize("page", [page for page in EXAMPLES if page != FIRST])
def test_examples__show_what_happens(page, session, tmp_path, monkeypatch):
    # Packages that are extras: without PyTorch its pages are left to the part of CI that has it.
    for package in ("torch", "onnxruntime", "gguf"):
        if any(example.source == f"import {package}\n" for example in EXAMPLES[page]):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    # A guide is read alone; pages of names and of codes go on from the first one.
    run_examples(page, session if page.startswith(("api/", "errors/")) else {})


def read_code(page: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(language and text of each block, code within sentences) of a page."""
    text = ALL_PAGES[page].read_text("utf-8")
    fence = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", fence.sub("", text))
    return fence.findall(text), [code.replace("\\|", "|") for code in inline]


def list_wrong_names(code: str) -> list[str]:
    """Names of ours, and their arguments, which code has and the package has not."""
    try:
        tree = ast.parse(code.replace("..., ", "").replace(", ...", ""))
    except SyntaxError:
        return []
    wrong = []
    for call in ast.walk(tree):
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if not re.fullmatch(r"(rq|relayquant)(\.\w+)+", name):
            continue
        try:
            parameters = inspect.signature(
                functools.reduce(getattr, name.split(".")[1:], rq)
            ).parameters
        except (AttributeError, ValueError):
            wrong += [] if name.startswith("relayquant.demo.") else [name]
            continue
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            wrong += [
                f"{name}({key.arg}=)" for key in call.keywords if key.arg not in (None, *parameters)
            ]
    return wrong


def list_commands(blocks: list[tuple[str, str]], inline: list[str]) -> list[list[str]]:
    """The words behind `relayquant` of whole command lines: no placeholder, no other program."""
    lines = [line for language, text in blocks if language == "bash" for line in text.splitlines()]
    words = [
        shlex.split(line.partition(" > ")[0].partition("  #")[0])
        for line in (*lines, *inline)
        if line.startswith("relayquant ") and "..." not in line and "|" not in line
    ]
    return [each[1:] for each in words if not any(re.fullmatch("[A-Z]+", word) for word in each)]


@pytest.mark.parametrize("page", ALL_PAGES)
def test_code__is_of_this_version(page, tmp_path, monkeypatch):
    """Blocks have a language, Python is Python, names, arguments and command lines exist."""
    monkeypatch.chdir(tmp_path)
    blocks, inline = read_code(page)
    assert [text for language, text in blocks if not language] == []
    plain = [text for language, text in blocks if language == "python" and ">>>" not in text]
    for text in plain:
        ast.parse(text)
    assert [name for code in (*plain, *inline) for name in list_wrong_names(code)] == []
    known = {command.name for command in COMMANDS}
    for words in list_commands(blocks, inline):
        if len(words) == 1 and words[0] not in known:
            tmp_path.joinpath(words[0]).touch()  # a model
        if words != ["--version"] and not (len(words) == 1 and words[0] in known):
            parse_words(words)


def test_code__that_is_not_of_this_version():
    blocks, inline = read_code("README.md")
    assert [language for language, _ in blocks] == ["bash", "bash", "python"]
    assert "tvm.IRModule" in inline
    assert list_wrong_names("rq.quantize(mod, None, data, parameters=p)") == [
        "rq.quantize(parameters=)"
    ]
    assert list_wrong_names("rq.fallback(..., relayquant.report())") == ["rq.fallback"]
    assert list_commands(
        [("bash", "ls\nrelayquant bench m.onnx  # fast?\n")], ["relayquant M"]
    ) == [["bench", "m.onnx"]]


#: What only points at things, or is no word of the field, and what to write.
VAGUE = {
    "that of": "the noun",
    "those of": "the noun",
    "the one that": "the noun",
    "in vain": "without effect",
    "takes the place of": "replaces",
    "is said": "is named",
    "comes to": "is",
    "what it takes": "what is needed",
    "have to be those": "must be the",
}


def list_sentences(page: str) -> list[str]:
    """Sentences of a page outside of code, tables and headings; code is one word."""
    text = re.sub(r"^```.*?^```", "", ALL_PAGES[page].read_text("utf-8"), flags=re.M | re.S)
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "Code", text))
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-|#])", text)]
    prose = [part for part in parts if part and part[0] not in "#|<"]
    return [sentence for part in prose for sentence in re.split(r"(?<=[.!?:]) (?=[A-Z\[])", part)]


@pytest.mark.parametrize("page", ALL_PAGES)
def test_sentences__are_plain(page):
    """One fact in each, said of a noun. More is in tables."""
    sentences = list_sentences(page)
    assert [each for each in sentences if len(each.split()) > 40] == []
    found = {(word, each) for each in sentences for word in VAGUE if f" {word} " in each}
    assert {(word, f"write: {VAGUE[word]}", each) for word, each in found} == set()


def read_sections() -> dict[str, tuple[str, str]]:
    """Public name -> (its directive, its examples): the sections of the pages of all names."""
    sections: dict[str, tuple[str, str]] = {}
    for page, path in PAGES.items():
        if not page.startswith("api/"):
            continue
        for part in re.split(r"^## ", path.read_text("utf-8"), flags=re.MULTILINE)[1:]:
            name, body = part.split("\n", 1)
            assert name not in sections, f"{name} is in two places"
            (directive,) = re.findall(
                r"^\.\. auto\w+:: relayquant\.(?:ir\.)?([\w.]+)$", body, re.MULTILINE
            )
            sections[name] = (
                directive,
                "".join(example.source + example.want for example in find_examples(body)),
            )
    return sections


#: Modules whose names have sections; the sections of others are of the whole module.
FACADES = ("analysis", "config", "observers", "plots")
#: What has a section besides that of its module.
SHOWN_TWICE = ("extend.AffineRule", "extend.BUILTIN_OPS", "extend.Skip", "torch.finetune")


def list_public_names() -> list[str]:
    """ "quantize", "config.Scheme": what users type behind `rq.`, as far as each has a section."""
    errors = {
        name
        for name, value in vars(rq.errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    return [
        *(name for name in rq.__all__ if name not in (*FACADES, "errors")),
        *(
            f"{facade}.{name}"
            for facade in FACADES
            for name in getattr(rq, facade).__all__
            if name not in rq.__all__
        ),
        *(f"errors.{name}" for name in errors - {*rq.__all__}),
        *SHOWN_TWICE,
    ]


def test_public_names__are_few():
    assert len(rq.__all__) <= 66
    assert all(hasattr(rq, name) for name in rq.__all__)


def test_public_names__each_has_an_example():
    """In its own section, where the name is used; those examples are run above."""
    sections = read_sections()
    assert sorted(sections) == sorted(list_public_names())
    for name, (directive, examples) in sections.items():
        assert directive == name
        assert re.search(rf"\b(rq|relayquant|relayquant\.errors)\.{name}\b", examples), name


def test_index__leads_to_every_page():
    index = (DOCS / "index.md").read_text("utf-8")
    below = ("api/", "errors/")  # which the index of their own lists
    pages = {page for page in PAGES if not page.startswith(below)} - {"index.md"}
    pages |= {f"{folder}index.md" for folder in below}
    assert sorted(page for page in pages if f"]({page})" not in index) == []


def load_script(name: str):
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawing__has_the_stages_of_the_pipeline():
    """What `lower` means on a target, kernels and loops, happens in `compile`."""
    source = Path(rq.__file__).parent.joinpath("flow", "pipeline.py").read_text("utf-8")
    stages = re.findall(r"(\w+) ->", ast.get_docstring(ast.parse(source)))
    texts = list(
        ElementTree.parse(PICTURES / "data_flow.svg").iter("{http://www.w3.org/2000/svg}text")
    )
    assert [t.text for t in texts if t.get("class") == "stage"] == [*stages, "compile"]
    # Each step that the page runs is a box, or is written at an arrow back.
    returns = ", ".join(t.text for t in texts if t.get("class") == "return").split(", ")
    drawing = load_script("data_flow")
    assert {"prepare", "annotate", "fit accumulators"} <= set(drawing.read_runs())
    assert set(drawing.read_runs()) <= {*stages, *returns, "lower"}


def test_drawing__is_made_by_its_script():
    """`python docs/data_flow.py` writes it anew."""
    drawing = load_script("data_flow")
    assert (PICTURES / "data_flow.svg").read_text("utf-8") == drawing.draw_flow()


def test_pictures__show_the_results():
    """`python docs/results.py` draws them anew from the README and docs/speed.json."""
    for path, picture in load_script("results").draw_results().items():
        assert path.read_text("utf-8") == picture


def test_operator_table__has_every_operator_of_every_backend():
    module = load_script("operator_table")
    head, _, *lines = module.format_table().splitlines()
    assert [cell.strip() for cell in head.split("|")[4:-1]] == [b.name for b in BACKENDS]
    found = {}
    for line in lines:
        names, fused, kind, *dtypes = (cell.strip() for cell in line.split("|")[1:-1])
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), (fused, kind, dtypes))
    assert set(found) == {
        row.pattern.op.removeprefix("relax.") for backend in BACKENDS for row in backend.patterns
    }
    assert found["nn.conv2d"][:2] == ("bias, add, relu, clip", "anchor")
    assert found["matmul"][2][0] == "uint8, int16; dynamic uint8, int8; groups float32, int8"
    assert found["nn.leakyrelu"][:2] == ("", "connector")
    assert found["sigmoid"][2][2] == "int8"


@pytest.mark.slow
def test_site__builds_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "sphinx_gallery", "furo"):
        pytest.importorskip(package)
    for folder in ("docs", "tutorials"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(tmp_path / "docs"), str(site)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages = [path.read_text("utf-8") for path in sorted((site / "api").glob("*.html"))]
    callables = [name for name in rq.__all__ if callable(getattr(rq, name))]
    assert [n for n in callables if sum(f'id="relayquant.{n}"' in p for p in pages) != 1] == []
    assert "<code" in (site / "reference" / "operators.html").read_text("utf-8").split("<table")[1]
    for script in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        assert (site / "tutorials" / f"{script.stem}.html").is_file()
    assert list_dead_links(site) == []


def list_dead_links(site: Path) -> list[str]:
    """Links within the site to pages, pictures or places that it does not have."""
    texts = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    dead = []
    for path, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"\w+:|#?$", link) or path.name in ("genindex.html", "search.html"):
                continue
            file, _, place = link.partition("#")
            other = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not other.exists() or (place and place not in places.get(other, {place})):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


@pytest.mark.slow
def test_rooms__are_drawn_from_the_imports():
    """`python docs/rooms.py` writes the picture and the table anew."""
    rooms = load_script("rooms")
    page = (DOCS / "concepts" / "design.md").read_text("utf-8")
    assert (PICTURES / "rooms.svg").read_text("utf-8") == rooms.draw_rooms()
    assert rooms.write_page(page) == page
