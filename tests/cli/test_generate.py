"""`relayquant generate`: text of a tiny Llama, compiled and saved."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from llama_files import LENGTH, VOCABULARY, draw_weights, write_folder, write_tokenizer

import relayquant as rq
from relayquant import cli

pytest.importorskip("tokenizers")
WORDS = ["-p", "hello", "--max-tokens", "5", "--threads", "1"]

ALONE = """
import json, sys
import relayquant as rq
from relayquant import cli
from relayquant_runtime import Library
library, folder, words = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
assert cli.main([*words, "--quiet"]) == 0
generator = rq.Generator(Library(library), rq.load_tokenizer(folder))
steps = generator.iterate(["hello"], max_tokens=5)
print([piece.token for (piece,) in steps])
print(sorted({"tvm", "torch", "scipy", "onnx"} & {*sys.modules}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_folder(tmp_path_factory.mktemp("llama"), draw_weights()))


@pytest.mark.slow
def test_generate__text_and_rates_and_again_from_a_library(folder, tmp_path, capsys):
    """The text is on standard output, alone."""
    library = tmp_path / "m.so"
    words = ["generate", str(folder), *WORDS, "--bits", "8", "--save", str(library)]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert 0 < len(said.out.rstrip("\n")) <= 5  # special tokens have no text
    assert "relayquant: prompt: 5 tokens, " in said.err
    assert "relayquant: text: 5 tokens, " in said.err
    assert said.err.rstrip().endswith("ended by max tokens")
    again = ["generate", str(library), "--tokenizer", str(folder), *WORDS]
    assert cli.main([*again, "--quiet"]) == 0
    assert capsys.readouterr() == (said.out, "")
    assert cli.main([*again, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["text"] + "\n" == said.out
    assert len(summary["tokens"]) == summary["prompt_tokens"] == 5
    assert summary["reason"] == "max tokens"
    # A process of its own generates the same tokens, and loads no compiler.
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(library), str(folder), json.dumps(again)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, tokens, loaded = done.stdout.splitlines()
    assert json.loads(tokens) == summary["tokens"]
    assert "\n".join(printed) == summary["text"]
    assert loaded == "[]"


def test_other_commands__of_a_language_model(folder, tmp_path, capsys):
    """A folder is a model, and what has no main is described or refused by what it is."""
    assert cli.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "language model (transformers)" in said
    assert f"vocabulary: {VOCABULARY}" in said
    assert f'relayquant generate {folder} -p "TEXT"' in said
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["sequences"], summary["max_length"]) == (1, LENGTH)
    assert cli.main(["bench", str(folder)]) == 2
    assert "is a language model: it has the functions prefill" in capsys.readouterr().err
    for name in ("a.txt", "model.safetensors"):
        (tmp_path / name).write_text("x")
        words = ["generate", str(tmp_path / name), "-p", "x", "--tokenizer", str(folder)]
        assert cli.main(words) == 2
        assert "is no language model. Name a .gguf file" in capsys.readouterr().err


@pytest.mark.slow
def test_export_and_compress__of_a_language_model(folder, tmp_path, capsys):
    """They write what `generate` runs."""
    module, library = tmp_path / "m.rqm", tmp_path / "m.so"
    assert cli.main(["compress", str(folder), "--bits", "8", "-o", str(module), "--quiet"]) == 0
    assert cli.main(["export", str(folder), "-o", str(library), "--quiet"]) == 0
    texts = []
    for path in (module, library):
        words = ["generate", str(path), "--tokenizer", str(folder), *WORDS, "--quiet"]
        assert cli.main(words) == 0
        texts.append(capsys.readouterr().out)
    assert all(0 < len(text.rstrip("\n")) <= 5 for text in texts)
    assert cli.main(["generate", str(module), *WORDS]) == 2
    assert "m.rqm has no tokenizer. Add --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hello", "--max-length", "4"], "Prompt 0 has 5 tokens; allowed: at most 4."),
        ([""], "Prompt 0 has no tokens."),
    ],
)
def test_generate__a_prompt_that_does_not_fit_is_told_before_the_model_is_read(
    words, message, folder, monkeypatch, capsys
):
    monkeypatch.setattr(rq, "load", lambda *_, **__: pytest.fail("it reads the model"))
    assert cli.main(["generate", str(folder), "-p", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"\xef\xbb\xbfhello\n", "Prompt 0 has 5 tokens; allowed: at most 4."),
        ("größe".encode("latin-1"), "Standard input is no UTF-8 text"),
    ],
)
def test_generate__the_prompt_is_standard_input(given, message, folder, monkeypatch, capsys):
    """In any locale it is UTF-8. The end of the last line, which `echo` adds, is no token."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "ascii"))
    assert cli.main(["generate", str(folder), "-p", "-", "--max-length", "4"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m.so", "-p", "x"], "m.so has no tokenizer. Add --tokenizer"),
        (["m.so", "-p", "x", "--cache", "int8"], "--cache does not apply to m.so"),
        (["m.gguf", "-p", "x", "--save", "m.txt"], "--save m.txt: a compiled model is"),
        (["m.gguf", "-p", "x", "--max-tokens", "0"], "--max-tokens is 0; allowed: 1 or more"),
        (["m.gguf", "-p", "x", "--top-p", "2"], "top_p is 2.0; allowed: above 0, at most 1"),
        (["no.gguf", "-p", "x"], "There is no model file no.gguf."),
        (["m.gguf"], "the following arguments are required: -p/--prompt"),
    ],
)  # fmt: skip
def test_generate__wrong_words(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("m.so", "m.gguf"):
        (tmp_path / name).touch()
    assert cli.main(["generate", *words]) == 2
    assert message in capsys.readouterr().err
